"""P22: a param that is written from outside wins over what is kept beside it."""

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from halfstep.formats import WEIGHTS
from harness import assert_same
from training import Snapshot, drive, gradients, make, members, params

WRITES: dict[str, Callable[[Tensor], object]] = {
    "copy": lambda p: p.copy_(torch.linspace(-3, 3, p.numel())),
    "zero": lambda p: p.zero_(),
    "minus zero": lambda p: p.fill_(-0.0),
    "infinity": lambda p: p.fill_(math.inf),
    "minus infinity": lambda p: p.fill_(-math.inf),
    "nan": lambda p: p.fill_(math.nan),
    "clamp": lambda p: p.clamp_(min=0),
    "clamp to a largest": lambda p: p.clamp_(-0.5, 0.5),
    "a mask": lambda p: p.mul_(torch.arange(p.numel()) % 2),
    "the least": lambda p: p.fill_(torch.finfo(p.dtype).smallest_normal * torch.finfo(p.dtype).eps),
    "the largest": lambda p: p.fill_(torch.finfo(p.dtype).max),
    "one entry": lambda p: p[3].fill_(7.0),
    "negated": lambda p: p.neg_(),
}


def half_ulp(param: Tensor) -> Tensor:
    """Half the distance between the numbers of a 16-bit dtype at ``param``, in float64."""
    info = torch.finfo(param.dtype)
    exponent = torch.frexp(param.double().abs().clamp(info.smallest_normal, info.max)).exponent - 1
    return info.eps / 2 * 2.0 ** exponent.double()


def assert_the_param_wins(weights: str, param: Tensor, weight: Tensor) -> None:
    """Raise unless ``weight`` is the param itself, or within half an ulp where a remainder stays beside it."""
    finite = param.isfinite()
    assert_same(weight[~finite], param[~finite].float())
    if weights.startswith("split"):
        off = (weight.double() - param.double()).abs()[finite]
        assert (off <= half_ulp(param)[finite]).all(), off.max()
        assert (weight.signbit() == param.signbit())[finite].all()
    else:
        assert_same(weight, param.float())


@pytest.mark.parametrize("stale", [-32768, -1, 0, 1, 32767])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_p22_a_written_param_wins(
    weights: str, write: Callable[[Tensor], object], stale: int, half: torch.dtype
) -> None:
    optimizer = make("AdamW", params(half, [(40,)]), weights=weights, backend="eager")
    drive(optimizer, range(3))
    (param,) = members(optimizer)
    if "remainder" in optimizer.state[param]:
        remainder = optimizer.state[param]["remainder"]
        worst = torch.iinfo(remainder.dtype)
        remainder.fill_(max(worst.min, min(stale, worst.max)))  # as bad as any that a store may have left
    before, weight_before = param.detach().clone(), optimizer.float32_weight(param)
    with torch.no_grad():
        write(param)
    changed = param.detach().view(torch.int16) != before.view(torch.int16)
    weight = optimizer.float32_weight(param)
    assert_the_param_wins(weights, param.detach()[changed], weight[changed])
    assert_same(weight[~changed], weight_before[~changed])


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_p22_a_step_starts_from_what_was_written(
    weights: str, write: Callable[[Tensor], object], half: torch.dtype, backend: str
) -> None:
    optimizer = make("AdamW", params(half, [(40,)]), weights=weights, backend=backend, lr=0.0, weight_decay=0.0)
    drive(optimizer, range(2))
    (param,) = members(optimizer)
    with torch.no_grad():
        write(param)
    written = param.detach().clone()
    drive(optimizer, range(1))
    # a step that moves nothing leaves the very numbers; adding a zero may take the sign of one away
    torch.testing.assert_close(param.detach(), written, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_p22_written_before_the_first_step_it_wins_exactly(weights: str, half: torch.dtype, backend: str) -> None:
    values = torch.tensor([0.0, -0.0, 1.5, -3.0, torch.finfo(half).max, 6e-8, math.inf, -math.inf])
    optimizer = make("AdamW", [nn.Parameter(torch.ones(8, dtype=half))], weights=weights, backend=backend)
    (param,) = members(optimizer)
    param.data.copy_(values)
    assert_same(optimizer.float32_weight(param), values.to(half).float())
    fresh = make("AdamW", [nn.Parameter(values.to(half))], weights=weights, backend=backend)
    drive(optimizer, range(3))
    drive(fresh, range(3))
    assert_same(param.detach(), members(fresh)[0].detach())
    assert_same(optimizer.float32_weight(param), fresh.float32_weight(members(fresh)[0]))


@pytest.mark.parametrize("weights", WEIGHTS)
def test_p22_clamped_after_each_step_it_trains_on(weights: str, half: torch.dtype, backend: str) -> None:
    optimizer = make("AdamW", params(half, [(200,)]), weights=weights, backend=backend, lr=0.1)
    (param,) = members(optimizer)
    for number in range(30):
        drive(optimizer, [number])
        with torch.no_grad():
            param.clamp_(min=0)
        assert param.isfinite().all()
        weight = optimizer.float32_weight(param)
        zero = param == 0
        assert (weight[zero] <= half_ulp(param.detach())[zero]).all()
        assert (weight >= 0).all()
    assert (param > 0).any()
    assert (param == 0).any()


@pytest.mark.parametrize("weights", WEIGHTS)
def test_p22_loading_the_model_wins(weights: str, half: torch.dtype, backend: str) -> None:
    model = nn.Linear(9, 4).to(half)
    optimizer = make("AdamW", model.parameters(), weights=weights, backend=backend, lr=0.1)
    kept = copy.deepcopy(model.state_dict())
    drive(optimizer, range(5))
    model.load_state_dict(kept)
    for name, param in model.named_parameters():
        weight = optimizer.float32_weight(param)
        assert_same(param.detach(), kept[name])
        assert_the_param_wins(weights, param.detach(), weight)


def test_p22_what_was_not_written_keeps_its_low_bits(half: torch.dtype, backend: str) -> None:
    # updates a thousandth of an ulp each, and a write of the very same values in between
    for weights in ("split16", "master32"):
        optimizer = make("AdamW", [nn.Parameter(torch.ones(6, dtype=half))], weights=weights, backend=backend)
        (param,) = members(optimizer)
        optimizer.param_groups[0].update(lr=torch.finfo(half).eps / 1000, weight_decay=0.0)
        for _ in range(100):
            param.grad = torch.ones_like(param)
            optimizer.step()
            param.data.copy_(param.detach().clone())
        moved = (1 - optimizer.float32_weight(param).double()) / (torch.finfo(half).eps / 1000)
        # each of 100 roundings is off by half of 2**-24, the ulp of float32 under 1
        assert ((moved - 100).abs() <= 100 * 2.0**-25 / (torch.finfo(half).eps / 1000) + 0.1).all()


@pytest.mark.parametrize("weights", WEIGHTS)
def test_p22_a_changed_dtype_is_refused_by_name(weights: str, half: torch.dtype, backend: str) -> None:
    for other in {torch.float16, torch.bfloat16, torch.float32} - {half}:
        model = nn.Linear(3, 2).to(half)
        optimizer = make("AdamW", model.named_parameters(), weights=weights, backend=backend)
        drive(optimizer, range(2))
        model.to(other)
        gradients(optimizer, 0)
        before = Snapshot(optimizer)
        with pytest.raises(
            TypeError, match=rf"weight was {half} at its first step and is {other} now: .*float32_weight"
        ):
            optimizer.step()
        before.check()


def test_p22_the_dtype_may_change_before_the_first_step(half: torch.dtype, backend: str) -> None:
    model = nn.Linear(3, 2)
    early = make("AdamW", model.parameters(), backend=backend)
    model.to(half)
    late = make("AdamW", [nn.Parameter(p.detach().clone()) for p in model.parameters()], backend=backend)
    drive(early, range(3))
    drive(late, range(3))
    for param, other in zip(members(early), members(late), strict=True):
        assert param.dtype is half
        assert_same(param.detach(), other.detach())
        assert early.state[param].keys() == {"step", "mantissa", "remainder", "exp_avg", "exp_avg_sq"}


def test_p22_moved_storage_is_followed(half: torch.dtype, backend: str) -> None:
    moved, still = (make("AdamW", params(half), backend=backend) for _ in range(2))
    for number in range(4):
        drive(moved, [number])
        drive(still, [number])
        for param in members(moved):
            old = param.data
            param.data = param.detach().clone()
            old.fill_(math.nan)
    for param, other in zip(members(moved), members(still), strict=True):
        assert_same(param.detach(), other.detach())
        assert_same(moved.float32_weight(param), still.float32_weight(other))


def test_p22_data_of_another_shape_is_refused(half: torch.dtype, backend: str) -> None:
    optimizer = make("AdamW", [("w", nn.Parameter(torch.ones(4, dtype=half)))], backend=backend)
    drive(optimizer, range(1))
    (param,) = members(optimizer)
    param.data = torch.ones(3, dtype=half)
    gradients(optimizer, 1)
    with pytest.raises(
        ValueError, match=r"w cannot be stepped: 'remainder' in its state has shape \(4,\), the param \(3,\)"
    ):
        optimizer.step()
    optimizer.state.clear()
    optimizer.step()
    # a gradient from before the data was replaced
    gradients(optimizer, 2)
    param.data = torch.ones(2, dtype=half)
    optimizer.state.clear()
    with pytest.raises(ValueError, match=r"w has shape \(2,\) on cpu, its gradient \(3,\) on cpu: .*zero_grad\(\)"):
        optimizer.step()
