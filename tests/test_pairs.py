"""P20: a state in any pair of formats loads into any other, and keeps all that the new one can hold."""

import itertools

import pytest
import torch
from torch import Tensor, nn

from halfstep import checkpoint
from halfstep.engine import HalfOptimizer
from halfstep.formats import MOMENTS, WEIGHTS, moment_format, weight_format
from harness import assert_same
from test_convert import follow, room
from training import drive, make, members, params, through_file

PAIRS = [(weights, moments) for weights in WEIGHTS for moments in MOMENTS]


def over(half: torch.dtype, seed: int) -> list[nn.Parameter]:
    """A tensor with blocks, one of other strides, and one that is too small for blocks."""
    first, second, third = params(half, [(40, 110), (70, 64), (9,)], seed)
    return [first, nn.Parameter(second.detach().t()), third]


@pytest.fixture(scope="module")
def trained() -> dict[tuple[torch.dtype, str, str], HalfOptimizer]:
    """An optimizer in each pair of formats, after some steps; none is stepped on."""
    found = {}
    for half, (weights, moments) in itertools.product((torch.float16, torch.bfloat16), PAIRS):
        optimizer = make("AdamW", over(half, 0), lr=1e-2, weights=weights, moments=moments)
        drive(optimizer, range(5))
        found[half, weights, moments] = optimizer
    return found


def moments_of(optimizer: HalfOptimizer, param: Tensor) -> dict[str, Tensor]:
    group = optimizer.param_groups[0]
    _, kept = optimizer._slots.moments(group, "", param)
    return {moment.name: checkpoint.decode(format, parts) for moment, format, parts in kept}


@pytest.mark.parametrize("old", PAIRS, ids="-".join)
def test_p20_every_pair_of_formats_converts_to_every_other(
    old: tuple[str, str], half: torch.dtype, trained: dict[tuple[torch.dtype, str, str], HalfOptimizer]
) -> None:
    source = trained[half, *old]
    state = through_file(source.state_dict())
    for new in PAIRS:
        target = make("AdamW", over(half, 1), weights=new[0], moments=new[1])
        follow(target, source)
        target.load_state_dict(state)
        found = {(each.param, each.what): each for each in target.conversions()}
        for k, (param, other) in enumerate(zip(members(target), members(source), strict=True)):
            name = f"param {k} of group 0"
            assert param.dtype is half
            was, now = source.float32_weight(other), target.float32_weight(param)
            assert ((now - was).abs() <= room(new[0], was, half)).all()
            of_weight = found.pop((name, "weight"), None)
            formats = [weight_format(weights, half) for weights, _ in (old, new)]
            # a format that keeps nothing beside the param has nothing to convert
            assert (of_weight is not None) == (formats[0] is not formats[1] and len(formats[0].parts) > 1)
            assert (of_weight.rounded if of_weight else 0) == (now != was).sum()
            assert (of_weight.largest if of_weight else 0) == (now - was).abs().max()
            olds, news = moments_of(source, other), moments_of(target, param)
            for moment in source.rule.moments:
                kept = [moment_format(moments, moment, param.shape) for _, moments in (old, new)]
                was, now = olds[moment.name], news[moment.name]
                # steps of 2**-7; a signed code's of 2**-3; a square root's of 2**-4, so that its square is off by
                # (1 + 2**-4)**2 - 1; and under 2**-14.8 of the block's largest (2**-28 of a square's) there is chance
                step = {"float32": 0.0, "bfloat16": 2.0**-7, "block8": (1 + 2.0**-4) ** 2 - 1}[kept[1].name]
                small = was.abs() < was.abs().max() * 2.0 ** (-28 if moment.square else -14)
                off = (now - was).abs()
                assert (off <= step * was.abs())[~small | torch.tensor(kept[1].measure is None)].all()
                report = found.pop((name, moment.name), None)
                assert (report is not None) == (kept[0] is not kept[1])
                assert (report.rounded if report else 0) == off.count_nonzero()
                assert (report.largest if report else 0) == off.max()
        assert not found
        # what the old format can hold of it is what it held
        back = make("AdamW", over(half, 2), weights=old[0], moments=old[1])
        follow(back, target)
        back.load_state_dict(through_file(target.state_dict()))
        if not any(each.rounded for each in target.conversions()):
            for param, other in zip(members(back), members(source), strict=True):
                assert_same(back.float32_weight(param), source.float32_weight(other))
                for name, moment in moments_of(back, param).items():
                    assert_same(moment, moments_of(source, other)[name])
        drive(target, range(5, 6))


def test_p20_the_report_says_what_was_rounded(half: torch.dtype) -> None:
    source = make("AdamW", [("w", nn.Parameter(torch.ones(64, 64, dtype=half)))], lr=1e-2)
    drive(source, range(3))
    target = make("AdamW", [("w", nn.Parameter(torch.ones(64, 64, dtype=half)))], weights="split8", moments="block8")
    follow(target, source)
    assert target.conversions() == []
    target.load_state_dict(source.state_dict())
    assert [(each.param, each.what, each.source, each.target) for each in target.conversions()] == [
        ("w", "weight", "split16", "split8"),
        ("w", "exp_avg", "float32", "block8"),
        ("w", "exp_avg_sq", "float32", "block8"),
    ]
    text = target.explain()
    assert "  loaded weight: split16 to split8, 1 tensor, 4,096 values, " in text
    assert " rounded, by " in text
    target.load_state_dict(target.state_dict())
    assert target.conversions() == []
    assert "loaded" not in target.explain()
    back = make("AdamW", [("w", nn.Parameter(torch.ones(64, 64, dtype=half)))], weights="master32")
    follow(back, target)
    back.load_state_dict(target.state_dict())
    assert "  loaded weight: split8 to master32, 1 tensor, 4,096 values, all exact" in back.explain()
    assert "  loaded exp_avg: block8 to float32, 1 tensor, 4,096 values, all exact" in back.explain()


def test_p20_float64_moments_are_rounded_once_and_reported() -> None:
    theirs = torch.optim.AdamW([nn.Parameter(torch.full((5,), 1.0, dtype=torch.float64))])
    (param,) = members(theirs)
    param.grad = torch.linspace(0.1, 0.7, 5, dtype=torch.float64)
    theirs.step()
    ours = make("AdamW", [nn.Parameter(torch.ones(5, dtype=torch.bfloat16))])
    ours.load_state_dict(theirs.state_dict())
    (own,) = members(ours)
    for name in ("exp_avg", "exp_avg_sq"):
        assert_same(ours.state[own][name], theirs.state[param][name].float())
    assert [(each.what, each.source, each.target) for each in ours.conversions()] == [
        ("exp_avg", "float64", "float32"),
        ("exp_avg_sq", "float64", "float32"),
    ]
    assert all(each.rounded for each in ours.conversions())
