"""Triton: the same functions on a GPU, one launch for all tensors of a plan.

Tables on the device tell each program its tensor. They are kept from step to step, and made anew where an address has
changed; nothing here waits for the device.
"""

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from halfstep.backends import tiles, trees
from halfstep.backends.jitted import INTERPRETED, WIDE, Launch
from halfstep.backends.layout import STAGED, Row, step_all
from halfstep.backends.pieces import Rows, chunks, spans, taken
from halfstep.contracts import CHUNK, Backend, Format, Job, Kernel, Plan

#: How many sets of tables a kernel keeps.
_KEPT = 8


@triton.jit
def halfstep_advance(table, skip, steps, scalars, COUNT: tl.constexpr, WIDTH: tl.constexpr):
    """Count the step of each job, and find its scalars, ``COUNT`` of them, as `Ahead` says."""
    if tl.load(skip) == 0:
        job = tl.program_id(0).to(tl.int64)
        row = table + job * 5
        # of all threads one counts, and tells the others
        step = tl.atomic_add(tl.load(row).to(tl.pointer_type(tl.int64)), 1) + 1
        tl.store(steps + job, step)
        k = tl.arange(0, WIDTH)
        rows = tl.load(row + 1).to(tl.pointer_type(tl.float64))
        at = rows + (tl.minimum(step, tl.load(row + 2)) - 1) * 2 * COUNT + k
        lr = tl.load(tl.load(row + 3).to(tl.pointer_type(tl.float64)))
        value = tl.load(at, mask=k < COUNT, other=0.0) + lr * tl.load(at + COUNT, mask=k < COUNT, other=0.0)
        tl.store(scalars + job * (COUNT + 1) + 1 + k, value.to(tl.float32), mask=k < COUNT)
        factor = tl.load(tl.load(row + 4).to(tl.pointer_type(tl.float64)))
        tl.store(scalars + job * (COUNT + 1), factor.to(tl.float32))


#: The types of its arguments.
ADVANCE_TYPES = ("*i64", "*fp32", "*i64", "*fp32")


def advance_constants(count: int) -> dict[str, int]:
    """Return what `halfstep_advance` is compiled for, for a rule of ``count`` scalars."""
    return {"COUNT": count, "WIDTH": triton.next_power_of_2(count)}


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class _Uploads:
    """Tables on their way to a device.

    A copy that a CUDA graph captures reads the host's memory at each replay, and page-locked memory cannot be had while
    capturing: for each table that a step outside made, one of its size is set aside.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spare: defaultdict[int, list[Tensor]] = defaultdict(list)
        self._captured: list[Tensor] = []

    def __call__(self, table: np.ndarray) -> Tensor:
        """Return a copy of ``table`` on the device."""
        source = torch.from_numpy(table)
        if self._device.type == "cpu" or not table.size:
            return source.to(self._device)
        spare = self._spare[table.nbytes]
        if _capturing(self._device):
            if not spare:
                raise RuntimeError(
                    "a step cannot be captured in a CUDA graph before one like it ran outside: warm up with a few "
                    "steps first, as torch.cuda.graph asks, and again before each further capture"
                )
            host = spare.pop().view(source.dtype).view(source.shape)
            self._captured.append(host.copy_(source))
        else:
            host = source.pin_memory()
            if len(spare) < _KEPT:
                spare.append(torch.empty(table.nbytes, dtype=torch.uint8, pin_memory=True))
        return host.to(self._device, non_blocking=True)

    def hold(self, *tensors: Tensor) -> None:
        """Keep what a capture reads, as long as this lives."""
        if _capturing(self._device):
            self._captured += tensors


def _make_room(kept: dict) -> None:
    """Forget all when there are too many: addresses go around among a few, or are new each time."""
    if len(kept) >= _KEPT:
        kept.clear()


class _Tables:
    """Which tensor each tile is of, and a row for each tensor: kept, and made anew where something has changed.

    Args:
        device: where they go.
        columns: what a row of the table has.
        row: what gives of a tensor all of its row but ``first_tile``, and how many tiles it has.
    """

    def __init__(
        self, device: torch.device, columns: Sequence[str], row: Callable[[Any], tuple[Sequence[int], int]]
    ) -> None:
        self._uploads, self._row, self._first = _Uploads(device), row, columns.index("first_tile")
        self._kept: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}

    def __call__(self, found: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        """Return the tables of tensors, of which ``found`` says all that is in them."""
        tables = self._kept.get(found)
        if tables is None:
            _make_room(self._kept)
            rows, tiles_ = zip(*map(self._row, found), strict=True) if found else ((), ())
            ends = np.cumsum(tiles_, dtype=np.int64)
            table = np.insert(np.array(rows, dtype=np.int64).reshape(len(rows), -1), self._first, ends - tiles_, axis=1)
            tensors = np.repeat(np.arange(len(rows), dtype=np.int32), tiles_)
            tables = self._kept[found] = self._uploads(tensors), self._uploads(table)
        self._uploads.hold(*tables)
        return tables


class _Kernel:
    """A plan's launch, and how its tensors are laid before it."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._device = plan, plan.device
        self._step = Launch(tiles.kernel_of(plan), tiles.TYPES, plan.device, tiles.warps(plan))
        self._own = [not part.shared for part in plan.parts]
        self._uploads = _Uploads(plan.device)
        self._tables = _Tables(plan.device, tiles.columns(plan), self._row)
        self._ahead: dict[tuple[tuple[int, ...], ...], Tensor] = {}
        self._advances: dict[int, Launch] = {}
        self._zero = torch.zeros((), device=plan.device)

    def __call__(self, jobs: Sequence[Job]) -> Sequence[Tensor | int]:
        """Step every job; return what saturated in each, where that can be."""
        saturated = torch.zeros(len(jobs), dtype=torch.int64, device=self._device)
        moving = self._advanced(jobs) if jobs[0].ahead else self._given(jobs)

        def run(found: Sequence[Row]) -> None:
            tensors, table = self._tables(tuple(found))
            self._step(len(tensors), tensors, table, *moving, saturated)

        step_all(self._plan, jobs, run)
        return saturated.unbind() if self._plan.weight.saturates else [0] * len(jobs)

    def _given(self, jobs: Sequence[Job]) -> tuple[Tensor, Tensor, Tensor]:
        """The jobs' steps and scalars, as the host has them, and that nothing is skipped."""
        steps = np.array([job.counter.step for job in jobs], dtype=np.int64)
        scalars = np.array([job.scalars for job in jobs], dtype=np.float64).astype(np.float32)
        # together in one copy; each begins at a multiple of 16 bytes
        behind = -(-steps.nbytes // 16) * 16
        bytes_ = np.zeros(behind + scalars.nbytes, dtype=np.uint8)
        bytes_[: steps.nbytes], bytes_[behind:] = steps.view(np.uint8), scalars.reshape(-1).view(np.uint8)
        there = self._uploads(bytes_)
        return there[: steps.nbytes].view(torch.int64), there[behind:].view(torch.float32), self._zero

    def _advanced(self, jobs: Sequence[Job]) -> tuple[Tensor, Tensor, Tensor]:
        """The jobs' steps and scalars as the device finds them, where nothing is to be skipped, and whether it is."""
        found = [job.ahead for job in jobs if job.ahead]
        key = tuple(
            (a.step.data_ptr(), a.rows.data_ptr(), len(a.rows), a.lr.data_ptr(), a.factor.data_ptr()) for a in found
        )
        if key not in self._ahead:
            _make_room(self._ahead)
            self._ahead[key] = self._uploads(np.array(key, dtype=np.int64))
        table, skip, count = self._ahead[key], found[0].skip, found[0].rows.shape[2]
        self._uploads.hold(table, skip, *(tensor for a in found for tensor in (a.step, a.rows, a.lr, a.factor)))
        steps = torch.empty(len(jobs), dtype=torch.int64, device=self._device)
        scalars = torch.empty(len(jobs), count + 1, device=self._device)
        if count not in self._advances:
            self._advances[count] = Launch(halfstep_advance, ADVANCE_TYPES, self._device, 1, advance_constants(count))
        self._advances[count](len(jobs), table, skip, steps, scalars)
        return steps, scalars, skip

    def _row(self, row: Row) -> tuple[Sequence[int], int]:
        length = row.length
        total = -(-Rows(length).block(row.size) // tiles.BLOCKS)
        aligned = all(address % WIDE == 0 for address, own in zip(row.addresses, self._own, strict=True) if own)
        whole = total if length % WIDE == 0 else (row.size // tiles.TILE if row.size == length else 0)
        numbers = (row.job, row.size, length, row.size // length, row.seed, row.stream, row.start, row.pitch)
        return (*row.addresses, *numbers, whole if aligned else 0), total


class _Squares:
    """The launch that sums a format's gradients' squares on a device."""

    def __init__(self, grad: Format, device: torch.device) -> None:
        self._launch = Launch(trees.squares_of(grad), trees.TYPES, device, 4)
        self._tables, self._device = _Tables(device, trees.COLUMNS, self._row), device

    def __call__(self, grads: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        *places, end = itertools.accumulate(map(chunks, grads), initial=0)
        sums = torch.empty(end, dtype=torch.float64, device=self._device)
        kinds = torch.zeros(len(grads), dtype=torch.int32, device=self._device)
        in_place = []
        for k, (grad, place) in enumerate(zip(grads, places, strict=True)):
            if grad.is_contiguous():
                in_place.append((grad.data_ptr(), grad.numel(), place, k))
            else:  # copied a span at a time
                for start, stop in spans(grad.shape, STAGED):
                    span = taken(grad, start, stop)
                    self._run(((span.data_ptr(), stop - start, place + start // CHUNK, k),), sums, kinds)
        self._run(tuple(in_place), sums, kinds)
        return sums, kinds

    def _run(self, found: tuple[tuple[int, ...], ...], sums: Tensor, kinds: Tensor) -> None:
        """Sum contiguous gradients, each an address, a number of elements, and the places of its sums and its kind."""
        tensors, table = self._tables(found)
        self._launch(len(tensors), tensors, table, sums, kinds)

    @staticmethod
    def _row(grad: tuple[int, ...]) -> tuple[Sequence[int], int]:
        address, size, place, k = grad
        tile = CHUNK * trees.CHUNKS
        total = -(-size // tile)
        whole = total if size % WIDE == 0 else size // tile
        return (address, size, whole if address % WIDE == 0 else 0, place, k), total


@functools.cache
def _squares(grad: Format, device: torch.device) -> _Squares:
    return _Squares(grad, device)


@functools.cache
def _total(device: torch.device) -> Launch:
    return Launch(trees.halfstep_total, trees.TOTAL_TYPES, device, 4, trees.TOTAL_CONSTANTS)


class Gpu(Backend):
    """The backend of Triton's kernels for NVIDIA's and AMD's GPUs."""

    name = "gpu"
    capturable = True

    def refuses(self, device: torch.device, dtypes: Collection[torch.dtype]) -> str | None:
        if device.type != ("cpu" if INTERPRETED else "cuda"):
            return f"the tensors are on {device}"
        if not INTERPRETED and torch.version.cuda and (found := torch.cuda.get_device_capability(device)) < (8, 0):
            return f"Triton wants compute capability 8.0 or above, and {device} has {found[0]}.{found[1]}"
        return None

    def describe(self, plan: Plan) -> str:
        if INTERPRETED:
            return "Triton's interpreter"
        return f"Triton on {torch.cuda.get_device_name(plan.device)}, {plan.device}"

    def compile(self, plan: Plan) -> Kernel:
        return _Kernel(plan)

    def squares(self, grad: Format, grads: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        return _squares(grad, grads[0].device)(grads)

    def total(self, sums: Tensor) -> Tensor:
        while len(sums) > 1:
            above = torch.empty(-(-len(sums) // trees.SUMS), dtype=torch.float64, device=sums.device)
            _total(sums.device)(len(above), sums, len(sums), above)
            sums = above
        return sums.sum()


BACKEND = Gpu()
