"""Rules and formats for Triton: the shared functions, each compiled from its own source, with Triton's words."""

import functools
import inspect
import itertools
import linecache
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.driver import driver

from halfstep import primitives

# pyright: reportAttributeAccessIssue=false
# a block has its methods from Triton

#: Whether Triton's interpreter runs kernels, as TRITON_INTERPRET=1 asks for when Triton is imported.
INTERPRETED = knobs.runtime.interpret

#: The bytes that an access takes at once where it can, and that it wants its address to be a multiple of; and the
#: elements whose bytes take one.
WIDE = 16

#: The type through which a kernel sees a part's memory: of floats but float32 the bits.
KINDS = {torch.float32: tl.float32, torch.float16: tl.int16, torch.bfloat16: tl.int16}
KINDS |= {getattr(torch, name): getattr(tl, name) for name in ("int8", "uint8", "int16", "int32")}


def _jit(function: Any) -> Any:
    """What a kernel may call; the interpreter runs plain functions as they are, and far faster."""
    if INTERPRETED:
        return function
    try:
        inspect.getsource(function)
    except OSError:
        raise TypeError(
            f"{function.__module__}.{function.__qualname__} has no source: Triton compiles it from there, so define it "
            "in a file, or choose backend='eager'"
        ) from None
    return triton.jit(function)


@_jit
def _sqrt(x):
    return tl.sqrt_rn(x)


@_jit
def _div(a, b):
    return tl.div_rn(a, b)


@_jit
def _bits(x):
    return x.to(tl.int32, bitcast=True)


@_jit
def _from_bits(b):
    return b.to(tl.float32, bitcast=True)


@_jit
def _to_i32(b):
    return b


@_jit
def _to_f32(b):
    return b.to(tl.float32)


@_jit
def _select(condition, a, b):
    return tl.where(condition, a, b)


@_jit
def _widen_f16(half):
    return half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@_jit
def _narrow_f16(x):
    return x.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)


WORDS: dict[str, Callable[..., Any]] = {
    "sqrt": _sqrt,
    "div": _div,
    "bits": _bits,
    "from_bits": _from_bits,
    "to_i32": _to_i32,
    "to_f32": _to_f32,
    "select": _select,
    "widen_f16": _widen_f16,
    "narrow_f16": _narrow_f16,
}


@functools.cache
def bind(function: Callable[..., Any]) -> Any:
    """Return ``function`` over blocks, to be called from a kernel."""
    return primitives.bind(function, WORDS, _jit, tl.constexpr)


_numbers = itertools.count()


def from_text(text: str, name: str, names: Mapping[str, Any]) -> Any:
    """Return the kernel called ``name`` that ``text`` defines with the help of ``names``.

    Triton reads a function's source, so it is kept where Python looks for it.
    """
    file = f"<halfstep kernel {next(_numbers)}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    space = {"__name__": __name__, "tl": tl, **names}
    exec(compile(text, file, "exec"), space)
    return triton.jit(space[name])


def read_row(columns: Sequence[str]) -> list[str]:
    """Return a kernel's lines that read the row of ``tensor`` in ``table``."""
    return [f"{name} = tl.load(table + tensor * {len(columns)} + {n})" for n, name in enumerate(columns)]


def compiled(kernel: Any, types: Sequence[str], target: GPUTarget, warps: int, constants: Mapping[str, int]) -> Any:
    """Return ``kernel`` as machine code for ``target``. No product is fused with a sum.

    Args:
        kernel: from `from_text` or `triton.jit`.
        types: Triton's names of the types of its arguments; pointers are multiples of 16.
        target: the kind of GPU.
        warps: how many warps of 32 threads run a program; of AMD's 64 it is 4.
        constants: the arguments behind these, by name.
    """
    names = kernel.arg_names
    signature = dict(zip(names, [*types, *["constexpr"] * len(constants)], strict=True))
    pointers = {(k,): [["tt.divisibility", 16]] for k, kind in enumerate(types) if kind.startswith("*")}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()}, pointers)
    # ptxas would rather spill than have fewer programs at a time, which wait for memory all the same
    per_vendor = {"num_warps": warps, "maxnreg": 255} if target.backend == "cuda" else {"num_warps": 4}
    options = {**per_vendor, "enable_fp_fusion": False}
    return triton.compile(source, target=target, options=options)


class Launch:
    """A kernel compiled for one device, to be run there; in Triton's interpreter it is run as Python."""

    def __init__(
        self,
        kernel: Any,
        types: Sequence[str],
        device: torch.device,
        warps: int,
        constants: Mapping[str, int] | None = None,
    ) -> None:
        self._device, self._constants = device, constants or {}
        self._run: Any = kernel
        if not INTERPRETED:
            with torch.cuda.device(device):
                target: Any = driver.active.get_current_target()
                self._run = compiled(kernel, types, target, warps, self._constants)

    def __call__(self, programs: int, *arguments: Any) -> None:
        """Run so many programs, on the current stream of the device."""
        if programs and INTERPRETED:
            self._run[(programs,)](*arguments, **self._constants)
        elif programs:
            with torch.cuda.device(self._device):
                self._run[(programs, 1, 1)](*arguments, *self._constants.values())
