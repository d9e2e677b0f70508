"""A rule or a format is one file: those in third_party/ work on every backend, in state and in what is told."""

import ast
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from halfstep.contracts import Plan
from halfstep.engine import HalfOptimizer
from halfstep.formats import FLOAT32, MOMENTS, PLAIN, WEIGHTS
from halfstep.rules.adam import ADAM
from harness import CPU, GROUP, HERE, assert_same, copy, job, run
from test_vocabulary import arithmetic, faults, known_names
from third_party.dithered import DITHERED
from third_party.half8 import HALF8
from third_party.rmsprop import RMSPROP
from training import assert_alike, drive, make, members, params, through_file

OTHERS = [name for name in HERE if name != "eager"]
BF16 = torch.bfloat16


class RMSprop(HalfOptimizer):
    rule = RMSPROP

    def __init__(self, over: Any, lr: float = 1e-2, **options: Any) -> None:
        defaults = {"weights": "split16", "moments": "float32", "backend": "auto", "maximize": False}
        super().__init__(over, {"lr": lr, "alpha": 0.99, "eps": 1e-8, **defaults, **options})


@pytest.fixture(autouse=True)
def listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """List the formats, as an import of their package would, and give plans a group with the rule's own option."""
    monkeypatch.setitem(WEIGHTS, "dithered", DITHERED)
    monkeypatch.setitem(MOMENTS, "half8", HALF8)
    monkeypatch.setitem(GROUP, "alpha", 0.99)


@pytest.mark.parametrize("path", sorted((Path(__file__).parent / "third_party").glob("*.py")), ids=lambda p: p.stem)
def test_the_files_keep_to_the_vocabulary(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert arithmetic(tree)
    assert not [fault for function in arithmetic(tree) for fault in faults(function, known_names(tree))]


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("wild", [False, True], ids=["ordinary", "wild"])
@pytest.mark.parametrize(
    "plan",
    [
        Plan(RMSPROP, WEIGHTS["split8"][BF16], (MOMENTS["block8"].square,), PLAIN[BF16], CPU),
        Plan(RMSPROP, FLOAT32, (HALF8.square,), FLOAT32, CPU),
        Plan(ADAM, DITHERED[BF16], tuple(HALF8), PLAIN[BF16], CPU),
    ],
    ids=["rmsprop", "rmsprop-half8", "adam-dithered-half8"],
)
def test_every_backend_gives_the_same_bits(plan: Plan, wild: bool, other: str) -> None:
    jobs = [job(plan, shape, seed, 3, wild=wild) for seed, shape in enumerate([(40, 300), (7,), (3, 5, 60)])]
    want, got = ([copy(j) for j in jobs] for _ in range(2))
    run(plan, want, "eager")
    run(plan, got, other)
    for a, b in zip(want, got, strict=True):
        for one, same in zip((a.param, *a.state), (b.param, *b.state), strict=True):
            assert_same(one, same)
    assert not torch.equal(want[0].param, jobs[0].param)


def test_a_new_rule_computes_what_torch_does(backend: str) -> None:
    values = torch.randn(40, 100)
    ours, theirs = Parameter(values.clone()), Parameter(values.clone())
    a, b = RMSprop([ours], backend=backend), torch.optim.RMSprop([theirs])
    for number in range(20):
        theirs.grad = torch.randn(40, 100, generator=torch.Generator().manual_seed(number))
        ours.grad = theirs.grad.clone()
        a.step()
        b.step()
    # 20 steps of at most lr / sqrt(1 - alpha) = 0.1, each off by less than 1e-5 of itself: a few roundings of 2**-24,
    # where torch sums the average in another order
    assert (ours - theirs).abs().max() <= 20 * 0.1 * 1e-5
    assert (ours - values).abs().min() > 0


def test_a_new_rule_takes_every_format(half: torch.dtype, backend: str) -> None:
    kept = [name for name in WEIGHTS if half in WEIGHTS[name]]
    # each once at least
    for weights, moments in zip(itertools.cycle(kept), [*MOMENTS, *MOMENTS], strict=False):
        param = Parameter(torch.ones(64, 64, dtype=half))
        optimizer = RMSprop([param], weights=weights, moments=moments, backend=backend)
        for _ in range(3):
            param.grad = torch.ones_like(param)
            optimizer.step()
        # steps of lr / sqrt(1 - alpha**t): 0.1, 0.071, 0.058
        assert 0.7 < float(optimizer.float32_weight(param).mean()) < 0.83, (weights, moments)
        assert weights in optimizer.explain()
        assert moments in optimizer.explain()


def test_new_formats_serve_in_state_and_are_told_of(backend: str) -> None:
    def fresh(seed: int) -> HalfOptimizer:
        over = params(BF16, [(64, 130), (9,)], seed)
        return make("AdamW", over, weights="dithered", moments="half8", backend=backend, seed=seed)

    whole, first, second = fresh(0), fresh(0), fresh(1)
    drive(whole, range(6))
    drive(first, range(3))
    for param, other in zip(members(second), members(first), strict=True):
        param.data.copy_(other)
    second.load_state_dict(through_file(first.state_dict()))
    assert_alike(second, first)
    drive(second, range(3, 6))
    assert_alike(second, whole)
    large, small = members(whole)
    assert set(whole.state[large]) == {
        "step", "stream", "mantissa",
        "nibble", "exp_avg_half", "exp_avg_shared", "exp_avg_sq_half", "exp_avg_sq_shared",
    }  # fmt: skip
    assert whole.state[large]["exp_avg_shared"].shape == (64, 2)
    assert whole.state[small]["exp_avg"].dtype is torch.float32
    assert whole.memory()["moments"] == 2 * (64 * 130 + 64 * 2) + 8 * 9
    assert whole.memory()["weight"] == 64 * 130 + 9
    target = make("AdamW", params(BF16, [(64, 130), (9,)], 2), weights="split16", moments="block8", backend=backend)
    for param, other in zip(members(target), members(whole), strict=True):
        param.data.copy_(other)
    target.load_state_dict(whole.state_dict())
    for param, other in zip(members(target), members(whole), strict=True):
        assert_same(target.float32_weight(param), whole.float32_weight(other))
    del whole.state[large]["nibble"]
    with pytest.raises(ValueError, match="its state has no 'nibble'"):
        drive(whole, range(1))
    with pytest.raises(ValueError, match=r"moments='half9': must be one of .*'half8'"):
        make("AdamW", params(BF16), moments="half9")
