"""The vocabulary in which rules and formats are written, and `bind`, which gives it to a compiler.

Rules and formats are plain Python functions over two kinds of value, float32 and int32, using ``+ - * & | ^ << >>``,
comparisons and the words below. Each backend has its own meaning of every word, with the same bits; `bind` copies a
function with its words pointing at them. Called unbound, a word raises.

Integers are 32 bits wide and wrap, but a compiler may compute them wider: pass every integer result that could leave
32 bits through `to_i32`. A shift to the right is arithmetic; a logical one is ``(x >> k) & mask``.
"""

import builtins
import types
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeAlias, TypeVar

import numpy as np

Float: TypeAlias = Any
"""A float32 value: a tensor to eager, an LLVM value to cpu, a block to Triton."""
Int: TypeAlias = Any
"""An int32 value."""
Bool: TypeAlias = Any
"""What a comparison gives."""

VOCABULARY: dict[str, Callable[..., Any]] = {}
"""Every word of this module by its name; a backend must bind all of them."""

_Word = TypeVar("_Word", bound=Callable[..., Any])


def _word(function: _Word) -> _Word:
    VOCABULARY[function.__name__] = function
    return function


def _unbound(name: str) -> NoReturn:
    raise TypeError(f"{name}() has no meaning of its own: pass the function that uses it to a backend's bind() first")


@_word
def sqrt(x: Float) -> Float:
    """The square root, correctly rounded."""
    _unbound("sqrt")


@_word
def div(a: Float, b: Float) -> Float:
    """The quotient, correctly rounded."""
    _unbound("div")


@_word
def bits(x: Float) -> Int:
    """The 32 bits of a float as a signed integer."""
    _unbound("bits")


@_word
def from_bits(b: Int) -> Float:
    """The float with these 32 bits."""
    _unbound("from_bits")


@_word
def to_i32(b: Int) -> Int:
    """The low 32 bits, signed: what int32 arithmetic that wraps would have given."""
    _unbound("to_i32")


@_word
def to_f32(b: Int) -> Float:
    """An integer as a float, rounded to the nearest, ties to even."""
    _unbound("to_f32")


@_word
def select(condition: Bool, a: Any, b: Any) -> Any:
    """``a`` where the condition holds, else ``b``; both are computed. One of the two must not be a constant."""
    _unbound("select")


@_word
def widen_f16(half: Int) -> Float:
    """The float16 whose bits are the low 16 of ``half``, as a float; exact."""
    _unbound("widen_f16")


@_word
def narrow_f16(x: Float) -> Int:
    """The bits of the float16 nearest to ``x``, ties to even, past 65520 infinity; ``x`` must not be NaN."""
    _unbound("narrow_f16")


def bind(
    function: Callable[..., Any],
    words: Mapping[str, Callable[..., Any]],
    compiled: Callable[[Callable[..., Any]], Any] = lambda function: function,
    number: Callable[[Any], Any] = lambda number: number,
) -> Callable[..., Any]:
    """Copy ``function``, and each function of ours that it calls, with a backend's meaning of every word.

    Float constants are rounded to float32: ``w * 0.1 + 0.3`` must not meet float64 in any backend.

    Args:
        function: a rule's or a format's function; its globals may be words of the vocabulary, integers, floats and
            functions of the same kind.
        words: the backend's meaning of each name in `VOCABULARY`.
        compiled: what the backend makes of each copy.
        number: what it makes of each number among the globals.

    Raises:
        TypeError: a global of ``function`` is none of these, or it is a closure.
    """
    if not isinstance(function, types.FunctionType) or function.__closure__:
        raise TypeError(f"{function!r} must be a plain function without a closure: it is compiled from its source")
    here = f"{function.__module__}.{function.__qualname__}"
    # what a word calls may look for the builtins among its caller's globals, as imports in C do
    namespace: dict[str, Any] = {"__name__": function.__module__, "__builtins__": builtins}
    for name in function.__code__.co_names:
        if name not in function.__globals__:
            raise TypeError(
                f"{here} uses {name!r}, which its module does not define: use the words of halfstep.primitives"
            )
        value = function.__globals__[name]
        if VOCABULARY.get(name) is value:
            namespace[name] = words[name]
        elif isinstance(value, types.FunctionType):
            namespace[name] = bind(value, words, compiled, number)
        elif isinstance(value, int) and not isinstance(value, bool):
            namespace[name] = number(value)
        elif isinstance(value, float):
            namespace[name] = number(float(np.float32(value)))
        else:
            raise TypeError(
                f"{here} uses {name!r}, a {type(value).__name__}: only words, functions and numbers compile"
            )
    constants = tuple(float(np.float32(c)) if isinstance(c, float) else c for c in function.__code__.co_consts)
    copy = types.FunctionType(
        function.__code__.replace(co_consts=constants), namespace, function.__name__, function.__defaults__
    )
    copy.__module__, copy.__qualname__, copy.__doc__ = function.__module__, function.__qualname__, function.__doc__
    return compiled(copy)
