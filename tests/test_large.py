"""P27: tensors past 2**31 elements, and 20,000 of them."""

from dataclasses import replace

import pytest
import torch

from halfstep import backends
from halfstep.backends.pieces import part_shape
from halfstep.contracts import Counter, Job, Plan
from halfstep.formats import GRADS, MOMENTS, WEIGHTS
from halfstep.rules.lion import LION
from harness import CPU, GROUP, assert_same, copy, run
from training import make

HALF = torch.bfloat16
ROW = 2**16


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_p27_more_than_2_to_the_31_elements() -> None:
    """13 GiB: a split8 weight and a block8 moment of 2**31 elements and two rows; checked at both ends and between."""
    rows = 2**31 // ROW + 2
    plan = Plan(LION, WEIGHTS["split8"][HALF], (MOMENTS["block8"].signed,), GRADS[HALF], CPU)
    parts = [part for format in plan.formats for part in format.parts][1:]
    shape, few = (rows, ROW), (2, ROW)
    param, grad = torch.zeros(shape, dtype=HALF), torch.zeros(shape, dtype=HALF)
    state = tuple(torch.zeros(part_shape(part, shape), dtype=part.dtype) for part in parts)
    # the last two rows lie past 2**31, the middle ones on both sides of 2**30
    places = (0, rows // 2 - 1, rows - 2)
    cuts = {}
    for place in places:
        here = slice(place, place + 2)
        param[here], grad[here] = torch.randn(few).to(HALF), torch.randn(few).to(HALF)
        cuts[place] = Job(
            param[here].clone(), grad[here].clone(), tuple(part[here].clone() for part in state), (), Counter()
        )
    for step in (1, 2):
        scalars = (1.0, *LION.scalars(GROUP, step))
        backends.kernel(plan, "cpu")([Job(param, grad, state, scalars, Counter(7, 8, step))])
        for place, cut in cuts.items():
            run(plan, [replace(cut, scalars=scalars, counter=Counter(7, 8, step, place * ROW))], "eager")
    for place, cut in cuts.items():
        here = slice(place, place + 2)
        for mine, part in zip((cut.param, *cut.state), (param, *state), strict=True):
            assert_same(part[here], mine)
    # what had neither weight nor gradient has neither now
    assert param[2:1000].count_nonzero() == 0
    sums, _ = backends.squares(GRADS[HALF], [grad], "cpu")
    assert len(sums) == rows * ROW // 1024
    for place in places:
        want, _ = backends.squares(GRADS[HALF], [grad[place : place + 2]], "eager")
        assert_same(sums[place * ROW // 1024 :][: len(want)], want)


def test_p27_20_000_tensors(half: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three threads step tensors of up to 300 elements; one of all their elements together takes the same steps."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    sizes = torch.randint(0, 300, (20_000,)).tolist()
    values, grads = torch.randn(sum(sizes)).to(half), torch.randn(sum(sizes)).to(half)
    many = [torch.nn.Parameter(value.clone()) for value in values.split(sizes)]
    one = torch.nn.Parameter(values)
    optimizer, whole = make("AdamW", many, backend="cpu"), make("AdamW", [one], backend="eager")
    for step in range(3):
        one.grad = grads / (step + 1)
        for param, grad in zip(many, one.grad.split(sizes), strict=True):
            param.grad = grad
        optimizer.step()
        whole.step()
    assert_same(torch.cat([param.detach() for param in many]), one.detach())
    for key in ("remainder", "exp_avg", "exp_avg_sq"):
        assert_same(torch.cat([optimizer.state[param][key] for param in many]), whole.state[one][key])


def test_p27_20_000_tensors_with_random_bits_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    plan = Plan(LION, WEIGHTS["split8"][HALF], (MOMENTS["bfloat16"].signed,), GRADS[HALF], CPU)
    jobs = []
    for stream in range(20_000):
        shape = (stream % 300,)
        state = (torch.zeros(shape, dtype=torch.int8), torch.zeros(shape, dtype=HALF))
        scalars = (1.0, *LION.scalars(GROUP, 1))
        jobs.append(
            Job(torch.randn(shape).to(HALF), torch.randn(shape).to(HALF), state, scalars, Counter(1, stream, 1))
        )
    some = [copy(job) for job in jobs[::97]]
    run(plan, jobs, "cpu")
    run(plan, some, "eager")
    for mine, other in zip(jobs[::97], some, strict=True):
        for part, want in zip((mine.param, *mine.state), (other.param, *other.state), strict=True):
            assert_same(part, want)
