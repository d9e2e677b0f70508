"""The scaler that frameworks are given: they update it after each optimizer's step, and an iteration counts once."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import halfstep
from halfstep.integrations.scaling import FrameworkScaler
from harness import assert_equal
from training import make, members, params

INF = float("inf")
#: which of two optimizers overflow, step by step
PATTERNS = [(False, False), (True, False), (False, True), (True, True), (False, False), (False, False)]
OPTIONS: dict[str, Any] = {"init_scale": 2.0**10, "growth_interval": 2}


def pair(half: torch.dtype) -> list[Any]:
    return [make("AdamW", params(half, seed=seed), lr=1e-2, backend="eager") for seed in (0, 1)]


def backward(scaler: Any, optimizers: list[Any], number: int, bad: tuple[bool, ...]) -> None:
    """Give each param a gradient that bears the scale, and the optimizers that are ``bad`` an infinite one."""
    scale = scaler.scale(torch.ones(())).item()
    for place, (optimizer, overflows) in enumerate(zip(optimizers, bad, strict=True)):
        generator = torch.Generator().manual_seed(100 * number + place)
        for param in members(optimizer):
            grad = torch.randn(param.shape, generator=generator) * scale
            param.grad = (grad * (INF if overflows else 1)).to(param.dtype)


def straight(scaler: Any, optimizer: Any) -> None:
    scaler.step(optimizer)


def unscaled(scaler: Any, optimizer: Any) -> None:
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(members(optimizer), 1.0)
    scaler.step(optimizer)


def clipped(scaler: Any, optimizer: Any) -> None:
    halfstep.clip_grad_norm_(optimizer, 1.0, scaler)
    scaler.step(optimizer)


@pytest.mark.parametrize("hysteresis", [1, 2])
@pytest.mark.parametrize("way", [straight, unscaled, clipped])
def test_p14_updates_after_each_of_two_steps_are_one(
    half: torch.dtype, way: Callable[[Any, Any], None], hysteresis: int
) -> None:
    ours, theirs = pair(half), pair(half)
    each = FrameworkScaler(hysteresis=hysteresis, **OPTIONS)
    once = halfstep.GradScaler(hysteresis=hysteresis, **OPTIONS)
    scales = set()
    for number, bad in enumerate(PATTERNS):
        backward(each, ours, number, bad)
        for optimizer in ours:
            way(each, optimizer)
            each.update()
        backward(once, theirs, number, bad)
        for optimizer in theirs:
            way(once, optimizer)
        once.update()
        assert [each.skipped(optimizer) for optimizer in ours] == list(bad)
        assert each.state_dict() == once.state_dict()
        scales.add(each.get_scale())
        for one, other in zip(ours, theirs, strict=True):
            assert_equal(members(one), members(other))
            assert_equal(one.state_dict(), other.state_dict())
    # it fell and rose
    assert len(scales) > 2 or hysteresis == 2


def test_what_is_unscaled_before_another_steps_is_not_unscaled_again(half: torch.dtype) -> None:
    optimizers, scaler = pair(half), FrameworkScaler(**OPTIONS)
    backward(scaler, optimizers, 0, (True, False))
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    (want,) = {param.grad for param in members(optimizers[1])[:1]}
    assert want is not None
    scaler.step(optimizers[0])
    scaler.update()
    assert scaler.get_scale() == 2.0**9
    grad: Any = members(optimizers[1])[0].grad
    assert grad is want
    assert grad.dtype is torch.float32
    scaler.unscale_(optimizers[1])
    assert members(optimizers[1])[0].grad is want
    scaler.step(optimizers[1])
    assert not scaler.skipped(optimizers[1])
    assert members(optimizers[1])[0].grad is None


def test_a_backward_between_two_steps_begins_anew(half: torch.dtype) -> None:
    first, second = pair(half)
    scaler = FrameworkScaler(**OPTIONS)
    for number in range(2):
        backward(scaler, [first], number, (True,))
        scaler.step(first)
        scaler.update()
        assert scaler.get_scale() == 2.0 ** (9 - 2 * number)
        backward(scaler, [second], number, (True,))
        scaler.step(second)
        scaler.update()
        assert scaler.get_scale() == 2.0 ** (8 - 2 * number)


def test_a_second_step_of_one_iteration_raises(half: torch.dtype) -> None:
    optimizer, scaler = pair(half)[0], FrameworkScaler(**OPTIONS)
    backward(scaler, [optimizer], 0, (False,))
    scaler.step(optimizer)
    scaler.update()
    with pytest.raises(RuntimeError, match=r"step\(\) has already been called since the last update"):
        scaler.step(optimizer)


def test_a_scale_that_is_set_stays_set(half: torch.dtype) -> None:
    optimizers, scaler = pair(half), FrameworkScaler(**OPTIONS)
    backward(scaler, optimizers, 0, (False, False))
    scaler.step(optimizers[0])
    with pytest.raises(ValueError, match="new_scale"):
        scaler.update(0.0)
    scaler.update(2.0**5)
    assert scaler.get_scale() == 2.0**5
    before = [param.detach().clone() for param in members(optimizers[1])]
    scaler.step(optimizers[1])
    scaler.update()
    assert scaler.get_scale() == 2.0**5
    # Adam's first step is the rate whatever the gradient's size, so look at its average
    state = optimizers[1].state[members(optimizers[1])[0]]["exp_avg"]
    grad = torch.randn(state.shape, generator=torch.Generator().manual_seed(1)) * 2.0**10
    assert_equal(state, (grad.to(half).float() / 2.0**10) * torch.tensor(1 - 0.9))
    assert not torch.equal(before[0], members(optimizers[1])[0])


def test_p19_it_is_saved_copied_and_loaded_after_an_update(half: torch.dtype) -> None:
    optimizer, scaler = pair(half)[0], FrameworkScaler(**OPTIONS)
    backward(scaler, [optimizer], 0, (True,))
    scaler.step(optimizer)
    scaler.update()
    state = scaler.state_dict()
    assert state["scale"] == 2.0**9
    assert pickle.loads(pickle.dumps(scaler)).state_dict() == state
    assert copy.deepcopy(scaler).state_dict() == state
    other = FrameworkScaler()
    backward(other, [optimizer], 1, (True,))
    other.step(optimizer)
    other.update()
    other.load_state_dict(state)
    assert other.state_dict() == state
    backward(other, [optimizer], 2, (True,))
    other.step(optimizer)
    other.update()
    assert other.get_scale() == 2.0**8


def test_p12_the_floor_may_raise_and_is_left_again(half: torch.dtype) -> None:
    optimizer, scaler = pair(half)[0], FrameworkScaler(init_scale=2.0, min_scale=1.0, at_floor="raise")
    backward(scaler, [optimizer], 0, (True,))
    scaler.step(optimizer)
    scaler.update()
    backward(scaler, [optimizer], 1, (True,))
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="infinite in param 0 of group 0"):
        scaler.update()
    backward(scaler, [optimizer], 2, (False,))
    scaler.step(optimizer)
    scaler.update()
    assert not scaler.skipped(optimizer)


def test_disabled_it_does_nothing(half: torch.dtype) -> None:
    optimizer, scaler = pair(half)[0], FrameworkScaler(enabled=False)
    for param in members(optimizer):
        param.grad = torch.ones_like(param)
    assert scaler.scale(torch.ones(())).item() == 1.0
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert optimizer.state[members(optimizer)[0]]["step"] == 1
    assert scaler.state_dict() == {}
