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
        size, length: how many elements it has, and how many a row; of no account where there are no blocks.
        seed, stream, start: what its random bits come from, as in `Counter`; the seed is signed.
    """

    job: int
    addresses: tuple[int, ...]
    size: int
    length: int
    seed: int
    stream: int
    start: int


def step_all(plan: Plan, jobs: Sequence[Job], run: Callable[[Sequence[Row]], None]) -> None:
    """Step every job by ``run``, which steps contiguous tensors in place."""
    in_place, in_blocks = [job.param.is_contiguous() and job.grad.is_contiguous() for job in jobs], plan.in_blocks
    found = [
        _row(k, job, job.param, job.grad, job.state, 0, rows(job.param.shape).length if in_blocks else 1)
        for k, job in enumerate(jobs)
        if in_place[k]
    ]
    if found:
        run(found)
    for k, job in enumerate(jobs):
        if not in_place[k]:
            _staged(plan, k, job, run)


def _row(k: int, job: Job, param: Tensor, grad: Tensor, state: Sequence[Tensor], start: int, length: int) -> Row:
    counter = job.counter
    # the seed as a table's signed 64 bits
    seed = (counter.seed + 2**63) % 2**64 - 2**63
    addresses = tuple(map(Tensor.data_ptr, (param, *state, grad)))
    return Row(k, addresses, param.numel(), length, seed, counter.stream, counter.start + start)


def _staged(plan: Plan, k: int, job: Job, run: Callable[[Sequence[Row]], None]) -> None:
    """Step a tensor whose param or gradient is not contiguous through bounded copies."""
    layout = rows(job.param.shape)
    _, *parts, _ = plan.parts
    for start, stop in spans(job.param.shape, STAGED, plan.in_blocks):
        param, grad = taken(job.param, start, stop), taken(job.grad, start, stop)
        ends = {False: slice(start, stop), True: slice(layout.block(start), layout.block(stop))}
        state = [tensor.view(-1)[ends[part.shared]] for part, tensor in zip(parts, job.state, strict=True)]
        # a span is a number of rows, or a part of one that begins on a block
        run([_row(k, job, param, grad, state, start, min(layout.length, stop - start))])
        if not plan.rule.observes:
            put_back(job.param, start, stop, param)
