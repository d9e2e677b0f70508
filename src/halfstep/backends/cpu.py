"""Numba: the same functions compiled by LLVM, one pass over memory, on torch's number of threads."""

import functools
import math
import os
import platform
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import binding as llvm
from llvmlite import ir
from numba import config, types
from numba.extending import intrinsic

from halfstep import primitives
from halfstep.backends.pieces import pieces
from halfstep.contracts import Job, Kernel, Plan

#: Elements of a tensor with other strides that are copied, stepped and written back at a time: 4 MiB a buffer.
STAGED = 2**20
#: Below this many elements a second thread costs more than it saves.
SPAN = 2**14

_jit = functools.partial(numba.njit, nogil=True, error_model="numpy")  # no fastmath: nothing contracts into an FMA


@intrinsic
def _bits(context, x):
    return types.int32(types.float32), lambda c, b, s, a: b.bitcast(a[0], ir.IntType(32))


@intrinsic
def _float_of(context, x):
    return types.float32(types.int32), lambda c, b, s, a: b.bitcast(a[0], ir.FloatType())


@intrinsic
def _widen_f16(context, x):
    def code(c, b, s, a):
        return b.fpext(b.bitcast(b.trunc(a[0], ir.IntType(16)), ir.HalfType()), ir.FloatType())

    return types.float32(types.int32), code


@intrinsic
def _narrow_f16(context, x):
    def code(c, b, s, a):
        return b.sext(b.bitcast(b.fptrunc(a[0], ir.HalfType()), ir.IntType(16)), ir.IntType(32))

    return types.int32(types.float32), code


@intrinsic
def _pointer(context, address):
    return types.voidptr(types.int64), lambda c, b, s, a: b.inttoptr(a[0], ir.IntType(8).as_pointer())


WORDS: dict[str, Callable[..., Any]] = {
    "sqrt": _jit(lambda x: math.sqrt(x)),
    "div": _jit(lambda a, b: a / b),
    "bits": _bits,
    "from_bits": _jit(lambda b: _float_of(np.int32(b))),
    "to_i32": _jit(lambda b: np.int32(b)),
    "to_f32": _jit(lambda b: np.float32(b)),
    "select": _jit(lambda condition, a, b: a if condition else b),
    "widen_f16": _jit(lambda half: _widen_f16(np.int32(half))),
    "narrow_f16": _narrow_f16,
}


@functools.cache
def bind(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` over scalars, as machine code."""
    return primitives.bind(function, WORDS, _jit, constant=lambda number: number)


# The stored parts of a plan differ in number, so its loop is written out from this text: an element's parts are read,
# passed through load, update and store, and written back. `kernel` slices and `loop` counts from 0, because with
# offsets inside the loop LLVM does not vectorise it, and with a 64-bit count it takes 2 elements at a time instead of 8.
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
    """Compile the loop of ``plan`` over tables of addresses."""
    formats = (plan.weight, *plan.moments)
    numbers = [_number(part.dtype) for format in formats for part in format.parts] + [_number(plan.grad.parts[0].dtype)]
    count = plan.rule.update.__code__.co_argcount - 2 - len(plan.moments)  # the rule's scalars: all else is known
    names: dict[str, Any] = {
        "update": bind(plan.rule.update),
        "load_grad": bind(plan.grad.load),
        "carray": numba.carray,
    }
    names |= {"pointer": _pointer, **{number.__name__: number for number in numbers}}

    def read(k: int) -> str:
        return f"p{k}[i]" if numbers[k] is np.float32 else f"int32(p{k}[i])"

    body, ends, names["int32"] = [], 0, np.int32
    stores = []
    for k, format in enumerate(formats):
        parts = range(ends, ends := ends + len(format.parts))
        names[f"load{k}"], names[f"store{k}"] = bind(format.load), bind(format.store)
        body.append(f"v{k} = load{k}({', '.join(read(p) for p in parts)})")
        stored = [f"s{p}" for p in parts]
        stores.append(f"{', '.join(stored)}, = store{k}(v{k})")
        stores += [f"p{p}[i] = {numbers[p].__name__}(s{p})" for p in parts]
    values = [f"v{k}" for k in range(len(formats))]
    scalars = [f"c{k}" for k in range(1 + count)]
    body.append(f"grad = load_grad({read(ends)}) * c0")
    result = ", ".join(values) + ("," if len(values) == 1 else "")
    body.append(f"{result} = update({', '.join((values[0], 'grad', *values[1:], *scalars[1:]))})")
    if plan.weight.saturates:
        names["saturates"] = bind(plan.weight.saturates)
        body.append("saturated = int32(saturated + int32(saturates(v0)))")
    source = _SOURCE.format(
        arrays=", ".join(f"p{k}" for k in range(len(numbers))),
        scalars=", ".join(scalars),
        body="\n        ".join(body + stores),
        slices=", ".join(
            f"carray(pointer(addresses[tensor, {k}] + first * {np.dtype(n).itemsize}), size, {n.__name__})"
            for k, n in enumerate(numbers)
        ),
        constants=", ".join(f"scalars[tensor, {k}]" for k in range(1 + count)),
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


def _run(kernel: Callable[..., None], jobs: Sequence[tuple[Sequence[int], int, Sequence[float]]]) -> np.ndarray:
    """Run ``kernel`` over jobs of (addresses, size, scalars), the sum of their elements cut evenly among threads."""
    addresses = np.array([job[0] for job in jobs], dtype=np.int64)
    offsets = np.zeros(len(jobs) + 1, dtype=np.int64)
    np.cumsum([job[1] for job in jobs], out=offsets[1:])
    scalars = np.array([job[2] for job in jobs], dtype=np.float64).astype(np.float32)
    total = int(offsets[-1])
    threads = max(1, min(torch.get_num_threads(), total // SPAN))
    cuts = [total * k // threads // 64 * 64 for k in range(threads)] + [total]
    # a tensor cut between two threads is counted by both, so each has counts of its own
    saturated = np.zeros((threads, len(jobs)), dtype=np.int64)

    def call(k: int) -> None:
        first = int(np.searchsorted(offsets, cuts[k], side="right")) - 1
        kernel(addresses, offsets, scalars, first, cuts[k], cuts[k + 1], saturated[k])

    _POOL.run([functools.partial(call, k) for k in range(threads)])
    return saturated.sum(axis=0)


def _staged(kernel: Callable[..., None], job: Job) -> int:
    """Step a tensor whose param or gradient is not contiguous through bounded copies; count what saturated."""
    saturated = 0
    state = [part.view(-1) for part in job.state]
    for box, start, stop in pieces(job.param.shape, STAGED):
        piece = job.param[box]
        param, grad = piece.contiguous(), job.grad[box].contiguous()
        parts = [param, *(part[start:stop] for part in state), grad]
        saturated += int(_run(kernel, [([part.data_ptr() for part in parts], stop - start, job.scalars)])[0])
        if param.data_ptr() != piece.data_ptr():
            piece.copy_(param)
    return saturated


def _step(kernel: Callable[..., None], jobs: Sequence[Job]) -> list[int]:
    saturated = [0] * len(jobs)
    straight = [k for k, job in enumerate(jobs) if job.param.is_contiguous() and job.grad.is_contiguous()]
    if straight:
        tensors = ((jobs[k].param, *jobs[k].state, jobs[k].grad) for k in straight)
        rows = [
            ([t.data_ptr() for t in parts], parts[0].numel(), jobs[k].scalars) for k, parts in zip(straight, tensors)
        ]
        for k, n in zip(straight, _run(kernel, rows).tolist(), strict=True):
            saturated[k] = n
    for k in set(range(len(jobs))) - set(straight):
        saturated[k] = _staged(kernel, jobs[k])
    return saturated


def converts_float16() -> bool:
    """Whether the CPU that Numba compiles for converts float16 in hardware; elsewhere its code would end the process."""
    if platform.machine().lower() in ("aarch64", "arm64"):
        return True
    features = config.CPU_FEATURES if config.CPU_FEATURES is not None else llvm.get_host_cpu_features().flatten()
    return "+f16c" in features.split(",")


class Cpu:
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


CPU = Cpu()
