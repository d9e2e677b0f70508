"""Tensors as kernels take them: each a row of addresses and numbers, and what has other strides through copies."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from halfstep.backends.pieces import put_back, rows, spans, taken
from halfstep.contracts import Job, Plan

#: Elements of a tensor with other strides that are copied, stepped and written back at a time: 4 MiB a buffer, a
#: number of chunks.
STAGED = 2**20


class Row(NamedTuple):
    """A contiguous tensor, or a span of one.

    Args:
        job: the number of the job it is of.
        addresses: of the param, the state's parts and the gradient.
        size, length: how many elements it has, and how many each of the rows that are worked on one by one.
        seed, stream, start, pitch: what its random bits come from, as in `Counter`, where a row is a line; the seed is
            signed.
    """

    job: int
    addresses: tuple[int, ...]
    size: int
    length: int
    seed: int
    stream: int
    start: int
    pitch: int


def step_all(plan: Plan, jobs: Sequence[Job], run: Callable[[Sequence[Row]], None]) -> None:
    """Step every job by ``run``, which steps contiguous tensors in place."""
    in_place = [job.param.is_contiguous() and job.grad.is_contiguous() for job in jobs]
    found = [
        _row(k, job, job.param, job.grad, job.state, 0, *_lines(plan, job)) for k, job in enumerate(jobs) if in_place[k]
    ]
    if found:
        run(found)
    for k, job in enumerate(jobs):
        if not in_place[k]:
            _staged(plan, k, job, run)


def _lines(plan: Plan, job: Job) -> tuple[int, int]:
    """How many elements a row has, and how far apart rows begin in the whole tensor: all is one row where it can be."""
    counter = job.counter
    if plan.in_blocks:
        length = rows(job.param.shape).length
        return length, counter.pitch or length
    if plan.pairs and counter.length:
        return counter.length, counter.pitch
    size = max(1, job.param.numel())
    return size, size


def _row(
    k: int, job: Job, param: Tensor, grad: Tensor, state: Sequence[Tensor], start: int, length: int, pitch: int
) -> Row:
    counter, (row, place) = job.counter, divmod(start, length)
    # the seed as a table's signed 64 bits
    seed = (counter.seed + 2**63) % 2**64 - 2**63
    addresses = tuple(map(Tensor.data_ptr, (param, *state, grad)))
    size = param.numel()
    # a span is a number of rows, or a part of one that begins on a block
    length = max(1, min(length, size))
    return Row(k, addresses, size, length, seed, counter.stream, counter.start + row * pitch + place, pitch)


def _staged(plan: Plan, k: int, job: Job, run: Callable[[Sequence[Row]], None]) -> None:
    """Step a tensor whose param or gradient is not contiguous through bounded copies."""
    layout, (length, pitch) = rows(job.param.shape), _lines(plan, job)
    _, *parts, _ = plan.parts
    for start, stop in spans(job.param.shape, STAGED, length):
        param, grad = taken(job.param, start, stop), taken(job.grad, start, stop)
        ends = {False: slice(start, stop), True: slice(layout.block(start), layout.block(stop))}
        state = [tensor.view(-1)[ends[part.shared]] for part, tensor in zip(parts, job.state, strict=True)]
        run([_row(k, job, param, grad, state, start, length, pitch)])
        if not plan.rule.observes:
            put_back(job.param, start, stop, param)
