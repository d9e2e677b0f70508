"""Numba: the same functions compiled by LLVM, one pass over memory, on torch's number of threads."""

import functools
import itertools
import os
import platform
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np
import torch
from llvmlite import binding as llvm
from numba import config
from torch import Tensor

from halfstep.backends.chunks import compile_squares
from halfstep.backends.layout import STAGED, Row, step_all
from halfstep.backends.loops import compile_plan
from halfstep.backends.pieces import Rows, kinds, pairwise, spans, taken
from halfstep.contracts import BLOCK, CHUNK, Backend, Format, Job, Kernel, Plan

#: Below this many elements a second thread costs more than it saves.
SPAN = 2**14


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


class _Kernel:
    """A plan's compiled loops, and how its tensors are laid before them."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._run_span = plan, compile_plan(plan)
        #: how many elements a unit of work stands for
        self._unit = BLOCK if plan.in_blocks else 1

    def __call__(self, jobs: Sequence[Job]) -> Sequence[int]:
        """Step every job; return what saturated in each."""
        saturated = np.zeros(len(jobs), dtype=np.int64)
        step_all(self._plan, jobs, lambda found: self._run(jobs, found, saturated))
        return saturated.tolist()

    def _run(self, jobs: Sequence[Job], found: Sequence[Row], saturated: np.ndarray) -> None:
        """Run the loops over ``found``, the sum of their work cut evenly among threads; count what saturated."""
        addresses = np.array([row.addresses for row in found], dtype=np.int64)
        steps = [jobs[row.job].counter.step for row in found]
        numbers = np.array(
            [(r.seed, r.stream, step, r.start, r.length, r.pitch) for r, step in zip(found, steps, strict=True)],
            dtype=np.int64,
        )
        scalars = np.array([jobs[row.job].scalars for row in found], dtype=np.float64).astype(np.float32)
        offsets = _offsets([row.size if self._unit == 1 else Rows(row.length).block(row.size) for row in found])
        threads = _threads(int(offsets[-1]) * self._unit)
        # a tensor cut between two threads is counted by both, so each has counts of its own
        counts = np.zeros((threads, len(found)), dtype=np.int64)

        def call(k: int, first: int, begin: int, end: int) -> None:
            self._run_span(addresses, offsets, numbers, scalars, first, begin, end, counts[k])

        _across(threads, offsets, 64 // self._unit or 1, call)
        np.add.at(saturated, [row.job for row in found], counts.sum(axis=0))


def _offsets(work: Sequence[int] | np.ndarray) -> np.ndarray:
    """Where each tensor's work begins in the sum of all, and where that ends."""
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(work, dtype=np.int64)))


def _threads(elements: int) -> int:
    return max(1, min(torch.get_num_threads(), elements // SPAN))


def _across(threads: int, offsets: np.ndarray, even: int, call: Callable[[int, int, int, int], None]) -> None:
    """Cut work evenly among threads, at multiples of ``even``, and ``call`` each: thread, first tensor, begin, end."""
    total = int(offsets[-1])
    cuts = [total * k // threads // even * even for k in range(threads)] + [total]
    firsts = np.searchsorted(offsets, cuts, side="right") - 1
    _POOL.run([functools.partial(call, k, int(firsts[k]), cuts[k], cuts[k + 1]) for k in range(threads)])


def _squares(grad: Format, grads: Sequence[Tensor]) -> np.ndarray:
    """The sums of the squares of contiguous gradients' chunks."""
    sizes = np.array([g.numel() for g in grads], dtype=np.int64)
    addresses = np.array([g.data_ptr() for g in grads], dtype=np.int64)
    offsets = _offsets(-(-sizes // CHUNK))
    sums, kernel = np.empty(int(offsets[-1])), compile_squares(grad)

    def call(_: int, first: int, begin: int, end: int) -> None:
        kernel(addresses, offsets, sizes, first, begin, end, sums)

    _across(_threads(int(sizes.sum())), offsets, 1, call)
    return sums


def converts_float16() -> bool:
    """Whether the CPU that Numba compiles for converts float16 in hardware; elsewhere its code ends the process."""
    if platform.machine().lower() in ("aarch64", "arm64"):
        return True
    asked = getattr(config, "CPU_FEATURES")  # noqa: B009, set from the environment while numba is imported
    return "+f16c" in (llvm.get_host_cpu_features().flatten() if asked is None else asked).split(",")


class Cpu(Backend):
    """The backend of machine code for the CPU."""

    name = "cpu"
    capturable = False

    def refuses(self, device: torch.device, dtypes: Collection[torch.dtype]) -> str | None:
        if device.type != "cpu":
            return f"the tensors are on {device}"
        if torch.float16 in dtypes and not converts_float16():
            return "the CPU that Numba compiles for has no float16 conversions (F16C)"
        return None

    def describe(self, plan: Plan) -> str:
        threads = torch.get_num_threads()
        return f"Numba on {threads} thread{'s' if threads > 1 else ''}"

    def compile(self, plan: Plan) -> Kernel:
        return _Kernel(plan)

    def squares(self, grad: Format, grads: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        found: list[np.ndarray] = []
        for alike, run in itertools.groupby(grads, Tensor.is_contiguous):
            if alike:
                found.append(_squares(grad, list(run)))
            else:  # copied a span at a time
                spans_ = ((g, start, stop) for g in run for start, stop in spans(g.shape, STAGED))
                found += [_squares(grad, [taken(g, start, stop)]) for g, start, stop in spans_]
        sums = torch.from_numpy(np.concatenate(found))
        return sums, kinds(sums, grads)

    def total(self, sums: Tensor) -> Tensor:
        return pairwise(sums)


BACKEND = Cpu()
