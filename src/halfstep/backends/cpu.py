"""Numba: the same functions compiled by LLVM, one pass over memory, on torch's number of threads."""

import functools
import math
import os
import platform
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeAlias

import numba
import numpy as np
import torch
from llvmlite import binding as llvm
from llvmlite import ir
from numba import carray, config, types  # pyright: ignore[reportPrivateImportUsage]
from numba.extending import intrinsic
from torch import Tensor

from halfstep import primitives
from halfstep.backends.pieces import pieces
from halfstep.contracts import Backend, Job, Kernel, Plan

#: Elements of a tensor with other strides that are copied, stepped and written back at a time: 4 MiB a buffer.
STAGED = 2**20
#: Below this many elements a second thread costs more than it saves.
SPAN = 2**14

_jit = functools.partial(numba.njit, nogil=True, error_model="numpy")  # no fastmath: nothing contracts into an FMA


def _intrinsic(result: types.Type, argument: types.Type, code: Callable[[Any, Any], Any]) -> Any:
    """A function of one value, given as LLVM instructions: ``code(builder, value)``."""

    def typed(context, value):
        return result(argument), lambda _context, builder, _signature, values: code(builder, values[0])

    return intrinsic(typed)


_I16, _I32, _HALF, _FLOAT = ir.IntType(16), ir.IntType(32), ir.HalfType(), ir.FloatType()
_bits = _intrinsic(types.int32, types.float32, lambda b, x: b.bitcast(x, _I32))
_float = _intrinsic(types.float32, types.int32, lambda b, x: b.bitcast(x, _FLOAT))
_widen = _intrinsic(types.float32, types.int32, lambda b, x: b.fpext(b.bitcast(b.trunc(x, _I16), _HALF), _FLOAT))
_narrow = _intrinsic(types.int32, types.float32, lambda b, x: b.sext(b.bitcast(b.fptrunc(x, _HALF), _I16), _I32))
_pointer = _intrinsic(types.voidptr, types.int64, lambda b, x: b.inttoptr(x, ir.IntType(8).as_pointer()))

WORDS: dict[str, Callable[..., Any]] = {
    "sqrt": _jit(lambda x: math.sqrt(x)),
    "div": _jit(lambda a, b: a / b),
    "bits": _bits,
    "from_bits": _jit(lambda b: _float(np.int32(b))),
    "to_i32": _jit(lambda b: np.int32(b)),
    "to_f32": _jit(lambda b: np.float32(b)),
    "select": _jit(lambda condition, a, b: a if condition else b),
    "widen_f16": _jit(lambda half: _widen(np.int32(half))),
    "narrow_f16": _narrow,
}


@functools.cache
def bind(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` over scalars, as machine code."""
    return primitives.bind(function, WORDS, _jit, constant=lambda number: number)


# The stored parts of a plan differ in number, so its loop is written out from this text: an element's parts are read,
# passed through load, update and store, and written back. `kernel` slices and `loop` counts from 0, because with
# offsets inside the loop LLVM does not vectorise it, and with a 64-bit count it takes 2 elements at a time, not 8.
_SOURCE = """
def loop({arrays}, {scalars}):
    saturated = int32(0)
    for i in range(p0.size):
        {body}
    return saturated


def kernel(addresses, offsets, scalars, tensor, begin, end, saturated):
    while begin < end:
        stop = min(end, offsets[tensor + 1], begin + 2**30)
        first, size = begin - offsets[tensor], stop - begin
        saturated[tensor] += loop({slices}, {constants})
        begin = stop
        if begin == offsets[tensor + 1]:
            tensor += 1
"""

_NUMBERS = {1: np.int8, 2: np.int16, 4: np.int32}


def _number(dtype: torch.dtype) -> type[np.number]:
    """The numpy type through which a part's memory is seen."""
    return np.float32 if dtype is torch.float32 else _NUMBERS[dtype.itemsize]


def _kernel(plan: Plan) -> Callable[..., None]:
    """Compile the loop of ``plan`` over tables of addresses: the param, its state's parts and the gradient."""
    formats = (plan.weight, *plan.moments)
    numbers = [_number(part.dtype) for format in (*formats, plan.grad) for part in format.parts]
    reads = [f"p{k}[i]" if number is np.float32 else f"int32(p{k}[i])" for k, number in enumerate(numbers)]
    # the rule's scalars are the arguments of its update that are nothing else; the gradient's factor comes before them
    constants = [f"c{k}" for k in range(1 + plan.rule.update.__code__.co_argcount - 2 - len(plan.moments))]
    values = [f"v{k}" for k in range(len(formats))]
    names: dict[str, Any] = {"pointer": _pointer, "carray": carray, "int32": np.int32}
    names |= {number.__name__: number for number in numbers}
    names |= {"load_grad": bind(plan.grad.load), "update": bind(plan.rule.update)}

    loads, stores, first = [], [], 0
    for k, format in enumerate(formats):
        names[f"load{k}"], names[f"store{k}"] = bind(format.load), bind(format.store)
        parts = range(first, first + len(format.parts))
        first = parts.stop
        loads.append(f"v{k} = load{k}({', '.join(reads[p] for p in parts)})")
        stores.append(f"{' '.join(f's{p},' for p in parts)} = store{k}(v{k})")
        stores += [f"p{p}[i] = {numbers[p].__name__}(s{p})" for p in parts]
    if plan.weight.saturates:
        names["saturates"] = bind(plan.weight.saturates)
        stores.append("saturated = int32(saturated + int32(saturates(v0)))")
    step = [
        f"grad = load_grad({reads[-1]}) * c0",
        f"{' '.join(f'{value},' for value in values)} = "
        f"update({', '.join([values[0], 'grad', *values[1:], *constants[1:]])})",
    ]
    slices = [
        f"carray(pointer(addresses[tensor, {k}] + first * {np.dtype(number).itemsize}), size, {number.__name__})"
        for k, number in enumerate(numbers)
    ]
    source = _SOURCE.format(
        arrays=", ".join(f"p{k}" for k in range(len(numbers))),
        scalars=", ".join(constants),
        body="\n        ".join([*loads, *step, *stores]),
        slices=", ".join(slices),
        constants=", ".join(f"scalars[tensor, {k}]" for k in range(len(constants))),
    )
    exec(source, names)
    names["loop"] = _jit(names["loop"])
    table, row = numba.int64[:, ::1], numba.int64[::1]
    signature = numba.void(table, row, numba.float32[:, ::1], numba.int64, numba.int64, numba.int64, row)
    return _jit(signature)(names["kernel"])


class _Pool:
    """Threads that outlive a step, as many as torch uses, made anew in a forked child."""

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None
        self._size = 0
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._executor, self._size = None, 0

    def run(self, calls: Sequence[Callable[[], None]]) -> None:
        """Run all calls, the last one on this thread, and return when each has ended."""
        *others, own = calls
        if self._size < len(others):
            # one that another thread still uses ends by itself once that lets go of it
            self._executor, self._size = ThreadPoolExecutor(len(others), "halfstep"), len(others)
        executor = self._executor
        futures = [executor.submit(call) for call in others] if executor else []
        try:
            own()
        finally:
            wait(futures)
        for future in futures:
            future.result()


_POOL = _Pool()


_Row: TypeAlias = tuple[Sequence[int], int, Sequence[float]]
"""A contiguous tensor's addresses, number of elements and scalars."""


def _run(kernel: Callable[..., None], rows: Sequence[_Row]) -> np.ndarray:
    """Run ``kernel`` over ``rows``, the sum of their elements cut evenly among threads; count what saturated."""
    addresses = np.array([row[0] for row in rows], dtype=np.int64)
    offsets = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum([row[1] for row in rows], out=offsets[1:])
    scalars = np.array([row[2] for row in rows], dtype=np.float64).astype(np.float32)
    total = int(offsets[-1])
    threads = max(1, min(torch.get_num_threads(), total // SPAN))
    cuts = [total * k // threads // 64 * 64 for k in range(threads)] + [total]
    # a tensor cut between two threads is counted by both, so each has counts of its own
    saturated = np.zeros((threads, len(rows)), dtype=np.int64)

    def call(k: int) -> None:
        first = int(np.searchsorted(offsets, cuts[k], side="right")) - 1
        kernel(addresses, offsets, scalars, first, cuts[k], cuts[k + 1], saturated[k])

    _POOL.run([functools.partial(call, k) for k in range(threads)])
    return saturated.sum(axis=0)


def _row(param: Tensor, state: Sequence[Tensor], grad: Tensor, scalars: Sequence[float]) -> _Row:
    return [tensor.data_ptr() for tensor in (param, *state, grad)], param.numel(), scalars


def _staged(kernel: Callable[..., None], job: Job) -> int:
    """Step a tensor whose param or gradient is not contiguous through bounded copies; count what saturated."""
    saturated = 0
    state = [part.view(-1) for part in job.state]
    for box, start, stop in pieces(job.param.shape, STAGED):
        piece = job.param[box]
        param, grad = piece.contiguous(), job.grad[box].contiguous()
        row = _row(param, [part[start:stop] for part in state], grad, job.scalars)
        saturated += int(_run(kernel, [row])[0])
        if param.data_ptr() != piece.data_ptr():
            piece.copy_(param)
    return saturated


def _step(kernel: Callable[..., None], jobs: Sequence[Job]) -> list[int]:
    in_place = [job.param.is_contiguous() and job.grad.is_contiguous() for job in jobs]
    rows = [
        _row(job.param, job.state, job.grad, job.scalars) for job, there in zip(jobs, in_place, strict=True) if there
    ]
    counts = iter(_run(kernel, rows).tolist() if rows else ())
    return [next(counts) if there else _staged(kernel, job) for job, there in zip(jobs, in_place, strict=True)]


def converts_float16() -> bool:
    """Whether the CPU that Numba compiles for converts float16 in hardware; elsewhere its code ends the process."""
    if platform.machine().lower() in ("aarch64", "arm64"):
        return True
    asked = getattr(config, "CPU_FEATURES")  # noqa: B009, set from the environment while numba is imported
    return "+f16c" in (llvm.get_host_cpu_features().flatten() if asked is None else asked).split(",")


class Cpu(Backend):
    """The backend of machine code for the CPU."""

    name = "cpu"

    def refuses(self, plan: Plan) -> str | None:
        if plan.device.type != "cpu":
            return f"the tensors are on {plan.device}"
        dtypes = {part.dtype for format in (plan.weight, *plan.moments, plan.grad) for part in format.parts}
        if torch.float16 in dtypes and not converts_float16():
            return "the CPU that Numba compiles for has no float16 conversions (F16C)"
        return None

    def describe(self, plan: Plan) -> str:
        threads = torch.get_num_threads()
        return f"Numba on {threads} thread{'s' if threads > 1 else ''}"

    def compile(self, plan: Plan) -> Kernel:
        return functools.partial(_step, _kernel(plan))


BACKEND = Cpu()
