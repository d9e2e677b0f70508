"""P10: a part of a tensor that is cut along two dims, as tensor parallelism does, has the bits of the whole."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

from halfstep.backends import cpu, eager, layout
from halfstep.contracts import BLOCK, Job, Plan
from harness import HERE, PLANS, assert_jobs_same, copy, job, run

#: of plans under which what is written of an element depends on its place those that walk in runs and in blocks, of one
#: use of random bits and of several, in each dtype
RANDOM = {
    name: PLANS[f"adam-{name}"]
    for name in (
        "split8-bfloat16-bfloat16-bfloat16",
        "split8-float16-float16-block8",
        "split8-float16-float32-float32",
        "stochastic-bfloat16-float32-float32",
        "split16-bfloat16-bfloat16-block8",
        "master32-float16-float16-bfloat16",
    )
}
#: one that walks in runs and one in blocks
FEW = {name: RANDOM[name] for name in ("split8-bfloat16-bfloat16-bfloat16", "split8-float16-float16-block8")}


class Cut(NamedTuple):
    """A whole tensor's shape, and for each dim that is cut its ends and what lies between."""

    shape: tuple[int, ...]
    places: dict[int, tuple[int, ...]]


#: rows of whole blocks, rows whose last block is short, and what is cut along dim 0 too
IN_BLOCKS = (
    Cut((6, 4, 128), {1: (0, 2, 4)}),
    Cut((5, 677), {1: (0, 256, 384, 677)}),
    Cut((5, 3, 2, 64), {0: (0, 2, 5), 1: (0, 1, 3)}),
)
RAGGED = (
    Cut((6, 5, 7), {1: (0, 2, 5)}),
    Cut((6, 5, 7), {2: (0, 3, 7)}),
    Cut((6, 5, 7), {0: (0, 1, 6), 1: (0, 1, 3, 5)}),
    Cut((6, 5, 7), {0: (0, 4, 6), 2: (0, 1, 7)}),
)
#: lines that are cut into spans of 140, and such of which several make one
SPANNED_IN_BLOCKS = (Cut((3, 600), {1: (0, 128, 600)}),)
SPANNED = (Cut((3, 40, 7), {1: (0, 7, 40)}),)
#: larger than what one thread takes, of lines that neither the CPU's pieces nor a vector divide
LARGE_IN_BLOCKS = (Cut((40, 1000), {1: (0, 384, 1000)}),)
LARGE = (
    Cut((150, 3, 101), {1: (0, 1, 3)}),
    Cut((25, 1500), {1: (0, 701, 1500)}),
    Cut((5, 60, 130), {0: (0, 2, 5), 2: (0, 33, 130)}),
)


def parts(whole: Job, cut: Cut) -> list[Job]:
    """The parts that a job's tensors are cut into, contiguous and on memory of their own."""
    return [
        _part(whole, dict(zip(cut.places, ends, strict=True)))
        for ends in itertools.product(*map(itertools.pairwise, cut.places.values()))
    ]


def _part(whole: Job, ends: dict[int, tuple[int, int]]) -> Job:
    shape = whole.param.shape
    box = tuple(slice(*ends.get(dim, (0, size))) for dim, size in enumerate(shape))
    behind = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    (dim,) = (dim for dim in ends if dim)
    first, stop = ends[dim]
    # where blocks share an entry dim 1 is cut, at their beginnings
    blocks = box[0], slice(first * behind[dim] // BLOCK, -(-stop * behind[dim] // BLOCK))
    counter = replace(
        whole.counter,
        start=whole.counter.start + sum(begin * behind[d] for d, (begin, _) in ends.items()),
        length=(stop - first) * behind[dim],
        pitch=shape[dim] * behind[dim],
    )
    state = tuple(part[box if part.shape == shape else blocks].clone().contiguous() for part in whole.state)
    param, grad = (tensor[box].clone().contiguous() for tensor in (whole.param, whole.grad))
    return replace(whole, param=param, grad=grad, state=state, counter=counter)


def turned(one: Job) -> Job:
    """The job on a param and a gradient of other strides."""
    last = one.param.dim() - 1
    param, grad = one.param.transpose(0, last), one.grad.transpose(0, 1)
    return replace(one, param=param.contiguous().transpose(0, last), grad=grad.contiguous().transpose(0, 1))


def cuts(plan: Plan, in_blocks: Sequence[Cut] = IN_BLOCKS, ragged: Sequence[Cut] = RAGGED) -> Sequence[Cut]:
    return in_blocks if plan.in_blocks else ragged


def wholes(plan: Plan, cuts: Sequence[Cut]) -> list[tuple[Job, Cut]]:
    """A job for each cut whose indices pass 2**32 in the middle of a line, and in that of a block."""
    made = [(job(plan, cut.shape, 5, 7, wild=True), cut) for cut in cuts]
    rows = [one.param[0].numel() for one, _ in made]
    starts = [2**32 - row - row * (1 + k % 2 * 3) // 6 for k, row in enumerate(rows)]
    return [
        (replace(one, counter=replace(one.counter, start=start)), cut)
        for (one, cut), start in zip(made, starts, strict=True)
    ]


def assert_parts_same(plan: Plan, made: Sequence[tuple[Job, Cut]], backends: Sequence[str]) -> None:
    """Raise unless the parts of jobs, stepped in one call, become those of the whole, contiguous or not."""
    for whole, cut in made:
        before, want = parts(whole, cut), copy(whole)
        count = run(plan, [want], "eager")[0]
        wants = parts(want, cut)
        for backend in backends:
            for got in ([copy(one) for one in before], [turned(copy(one)) for one in before]):
                assert sum(run(plan, got, backend)) == count
                assert_jobs_same(wants, got)
        # taken for contiguous in the whole they become something else
        wrong = [replace(copy(one), counter=replace(one.counter, length=0, pitch=0)) for one in before]
        run(plan, wrong, "eager")
        with pytest.raises(AssertionError, match="differ"):
            assert_jobs_same(wants, wrong)


def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let spans be of a few lines, or of a part of one."""
    for module, limit in ((layout, "STAGED"), (eager, "PIECE")):
        monkeypatch.setattr(module, limit, 140)


@pytest.mark.parametrize("plan", RANDOM.values(), ids=RANDOM)
def test_p10_parts_of_lines_have_the_bits_of_the_whole(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_parts_same(plan, wholes(plan, cuts(plan)), HERE)
    small(monkeypatch)
    assert_parts_same(plan, wholes(plan, cuts(plan, SPANNED_IN_BLOCKS, SPANNED)), HERE)


@pytest.mark.parametrize("plan", FEW.values(), ids=FEW)
def test_p10_threads_change_nothing_of_lines(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "SPAN", 5000)
    made = wholes(plan, cuts(plan, LARGE_IN_BLOCKS, LARGE))
    assert all(whole.param.numel() > 2**15 for whole, _ in made)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            assert_parts_same(plan, made, ["cpu"])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("name", ["adam-split16-bfloat16-bfloat16-float32", "average-split8-float16"])
def test_where_nothing_written_is_random_lines_are_of_no_account(name: str) -> None:
    assert not any(format.random for format in PLANS[name].formats[PLANS[name].rule.observes :])
    plan = PLANS[name]
    for backend in HERE:
        for cut in RAGGED:
            whole = job(plan, cut.shape, 5, 7)
            before = parts(whole, cut)
            run(plan, [whole], "eager")
            run(plan, before, backend)
            assert_jobs_same(parts(whole, cut), before)
