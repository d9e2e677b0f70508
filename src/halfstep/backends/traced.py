"""Rules and formats as LLVM instructions: their functions are run over values that write down what is done to them.

So an integer has 32 bits throughout, as vectors want it, and Numba sees each function as one instruction of many parts.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types  # pyright: ignore[reportPrivateImportUsage]
from numba.extending import intrinsic

from halfstep import primitives

_BOOL, _I16, _I32, _HALF, _FLOAT = ir.IntType(1), ir.IntType(16), ir.IntType(32), ir.HalfType(), ir.FloatType()
_NUMBAS = {_BOOL: types.boolean, _I32: types.int32, _FLOAT: types.float32}
_LLVMS = {numba: llvm for llvm, numba in _NUMBAS.items()}


def _operator(whole: str, real: str | None = None, swapped: bool = False) -> Callable[[Any, Any], Any]:
    """An operator as the builder's method for integers, and for floats where there is one."""

    def apply(self: "_Value", other: Any) -> "_Value":
        other = self.like(other)
        a, b = (other, self) if swapped else (self, other)
        method = real if self.ir.type == _FLOAT else whole
        if method is None or a.ir.type != b.ir.type:
            raise TypeError(f"no {whole} of {a.ir.type} and {b.ir.type}: use from_bits, to_f32, bits")
        return _Value(self.builder, getattr(self.builder, method)(a.ir, b.ir))

    return apply


def _comparison(symbol: str) -> Callable[[Any, Any], Any]:
    def apply(self: "_Value", other: Any) -> "_Value":
        other = self.like(other)
        # of NaN everything is false, but that it differs
        floats = self.builder.fcmp_unordered if symbol == "!=" else self.builder.fcmp_ordered
        compare = floats if self.ir.type == _FLOAT else self.builder.icmp_signed
        return _Value(self.builder, compare(symbol, self.ir, other.ir))

    return apply


class _Value:
    """A value in a function that is being written, and what Python's operators write for it."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, builder: Any, value: Any) -> None:
        self.builder, self.ir = builder, value

    def like(self, other: Any) -> "_Value":
        """Return ``other``, a number where it is none of ours, as this one's kind of value."""
        if isinstance(other, _Value):
            return other
        if self.ir.type == _FLOAT:
            return _Value(self.builder, ir.Constant(_FLOAT, float(other)))
        if isinstance(other, float):
            raise TypeError(f"{other!r} meets an integer: use to_f32")
        return _Value(self.builder, ir.Constant(self.ir.type, other))

    __add__ = __radd__ = _operator("add", "fadd")
    __sub__, __rsub__ = _operator("sub", "fsub"), _operator("sub", "fsub", swapped=True)
    __mul__ = __rmul__ = _operator("mul", "fmul")
    __and__ = __rand__ = _operator("and_")
    __or__ = __ror__ = _operator("or_")
    __xor__ = __rxor__ = _operator("xor")
    __lshift__, __rlshift__ = _operator("shl"), _operator("shl", swapped=True)
    __rshift__, __rrshift__ = _operator("ashr"), _operator("ashr", swapped=True)
    __lt__, __le__, __gt__ = _comparison("<"), _comparison("<="), _comparison(">")
    __ge__, __eq__, __ne__ = _comparison(">="), _comparison("=="), _comparison("!=")  # type: ignore[assignment]


def _word(write: Callable[[Any, Any], Any]) -> Callable[[_Value], _Value]:
    return lambda x: _Value(x.builder, write(x.builder, x.ir))


def _div(a: _Value, b: _Value) -> _Value:
    return _Value(a.builder, a.builder.fdiv(a.ir, a.like(b).ir))


def _select(condition: _Value, a: Any, b: Any) -> _Value:
    a, b = (a, a.like(b)) if isinstance(a, _Value) else (b.like(a), b)
    return _Value(condition.builder, condition.builder.select(condition.ir, a.ir, b.ir))


def _root(builder: Any, x: Any) -> Any:
    return builder.call(builder.module.declare_intrinsic("llvm.sqrt", [_FLOAT]), [x])


WORDS: dict[str, Callable[..., Any]] = {
    "sqrt": _word(_root),
    "div": _div,
    "bits": _word(lambda b, x: b.bitcast(x, _I32)),
    "from_bits": _word(lambda b, x: b.bitcast(x, _FLOAT)),
    "to_i32": lambda x: x,
    "to_f32": _word(lambda b, x: b.sitofp(x, _FLOAT)),
    "select": _select,
    "widen_f16": _word(lambda b, x: b.fpext(b.bitcast(b.trunc(x, _I16), _HALF), _FLOAT)),
    "narrow_f16": _word(lambda b, x: b.sext(b.bitcast(b.fptrunc(x, _HALF), _I16), _I32)),
}


def _kind(argument: types.Type) -> types.Type:
    """What an argument is to a formula: of integers the low 32 bits."""
    if isinstance(argument, types.Boolean):
        return types.boolean
    return types.float32 if isinstance(argument, types.Float) else types.int32


@functools.cache
def bind(function: Callable[..., Any]) -> Any:
    """Return ``function`` over scalars, as an intrinsic of Numba's that may be called from compiled code."""
    formula = primitives.bind(function, WORDS)
    count = function.__code__.co_argcount

    def write(builder: Any, values: list[Any]) -> tuple[list[Any], bool]:
        """Write the formula; return what it gives, and whether that is one value and no tuple."""
        found = formula(*(_Value(builder, value) for value in values))
        alone = not isinstance(found, tuple)
        return [value.ir for value in ((found,) if alone else found)], alone

    def typed(context: Any, *arguments: types.Type) -> Any:
        kinds = [_kind(argument) for argument in arguments]
        scratch = ir.Function(ir.Module(), ir.FunctionType(ir.VoidType(), [_LLVMS[kind] for kind in kinds]), "scratch")
        found, alone = write(ir.IRBuilder(scratch.append_basic_block()), list(scratch.args))
        results = [_NUMBAS[value.type] for value in found]

        def lowered(context: Any, builder: Any, signature: Any, values: list[Any]) -> Any:
            cast = zip(values, signature.args, kinds, strict=True)
            found, _ = write(builder, [context.cast(builder, value, given, kind) for value, given, kind in cast])
            return found[0] if alone else context.make_tuple(builder, signature.return_type, found)

        return (results[0] if alone else types.Tuple(results))(*arguments), lowered

    # Numba asks for the number of arguments
    names = ["context", *(f"a{k}" for k in range(count))]
    typed.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    )
    return intrinsic(typed)
