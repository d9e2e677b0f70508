"""Learning-rate schedulers stand still for skipped steps, and move as torch's do otherwise."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as schedulers
from torch.optim.lr_scheduler import LRScheduler

import halfstep
from halfstep.scaler import GradScaler
from harness import assert_equal
from training import make, members, params, through_file

Make = Callable[[Any], LRScheduler]
MAKERS: dict[str, Make] = {
    "LambdaLR": lambda over: schedulers.LambdaLR(over, lambda step: 0.9**step),
    "StepLR": lambda over: schedulers.StepLR(over, 2, 0.5),
    "OneCycleLR": lambda over: schedulers.OneCycleLR(over, 0.1, total_steps=6),
    "CosineAnnealingWarmRestarts": lambda over: schedulers.CosineAnnealingWarmRestarts(over, 3),
    "CyclicLR": lambda over: schedulers.CyclicLR(over, 1e-3, 1e-1, 2, cycle_momentum=False),
    "SequentialLR": lambda over: schedulers.SequentialLR(
        over, [schedulers.LinearLR(over, total_iters=2), schedulers.ExponentialLR(over, 0.9)], [2]
    ),
    "ChainedScheduler": lambda over: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(over), schedulers.ExponentialLR(over, 0.9)]
    ),
}


def optimizer_of(half: torch.dtype = torch.float16) -> Any:
    return make("AdamW", params(half), lr=1e-2, backend="eager")


def step(optimizer: Any, scaler: GradScaler, bad: bool = False) -> None:
    scale = scaler.scale(torch.ones(())).item()
    for param in members(optimizer):
        param.grad = torch.full_like(param, float("inf") if bad else scale)
    scaler.step(optimizer)
    scaler.update()


def rates(scheduler: LRScheduler) -> Any:
    return [*scheduler.get_last_lr(), *(group["lr"] for group in scheduler.optimizer.param_groups)]


@pytest.mark.parametrize("name", MAKERS)
def test_p31_a_skipped_step_leaves_the_rate(name: str) -> None:
    # at first too, where torch would warn that the scheduler steps before the optimizer
    skips = {0, 3, 4}
    optimizer, other, scaler = optimizer_of(), optimizer_of(), halfstep.GradScaler(init_scale=64.0)
    scheduler = MAKERS[name](optimizer)
    kind = type(scheduler)
    assert halfstep.hold_scheduler(scheduler, scaler) is scheduler
    assert isinstance(scheduler, kind)
    assert type(scheduler).__name__ == name
    plain = MAKERS[name](other)
    for number in range(8):
        before = rates(scheduler)
        step(optimizer, scaler, bad=number in skips)
        scheduler.step()
        if number in skips:
            assert rates(scheduler) == before
        else:
            step(other, halfstep.GradScaler(init_scale=64.0))
            plain.step()
            assert rates(scheduler) == rates(plain)
            assert rates(scheduler) != before or name == "StepLR"


def test_held_or_not_torch_warns_where_it_should() -> None:
    # what the tests above say without a warning would be worth little if torch never warned
    optimizer, scaler = optimizer_of(), halfstep.GradScaler(init_scale=64.0)
    scheduler = MAKERS["StepLR"](optimizer)
    step(optimizer, scaler, bad=True)
    with pytest.warns(UserWarning, match=r"`lr_scheduler.step\(\)` before `optimizer.step\(\)`"):
        scheduler.step()


@pytest.mark.parametrize("name", MAKERS)
def test_p19_its_state_is_that_of_its_own_class(name: str) -> None:
    optimizer, scaler = optimizer_of(), halfstep.GradScaler(init_scale=64.0)
    scheduler = halfstep.hold_scheduler(MAKERS[name](optimizer), scaler)
    for bad in (False, True):
        step(optimizer, scaler, bad)
        scheduler.step()
    other = optimizer_of()
    plain = MAKERS[name](other)
    step(other, halfstep.GradScaler(init_scale=64.0))
    plain.step()
    if name != "LambdaLR":
        state = through_file(scheduler.state_dict())
        assert_equal(state, through_file(plain.state_dict()))
    fresh = halfstep.hold_scheduler(MAKERS[name](optimizer_of()), scaler)
    fresh.load_state_dict(scheduler.state_dict())
    assert fresh.get_last_lr() == scheduler.get_last_lr()


def test_one_that_moves_once_an_epoch_is_held_by_a_whole_epoch_alone() -> None:
    optimizer, scaler = optimizer_of(), halfstep.GradScaler(init_scale=64.0)
    scheduler = halfstep.hold_scheduler(schedulers.ExponentialLR(optimizer, 0.5), scaler)
    for bads, want in (((False, True), 0.5), ((True, True), 0.5), ((True, False), 0.25), ((False, False), 0.125)):
        for bad in bads:
            step(optimizer, scaler, bad)
        scheduler.step()
        assert scheduler.get_last_lr() == [1e-2 * want]


def test_one_that_moves_more_often_than_the_optimizer_is_let() -> None:
    optimizer, scaler = optimizer_of(), halfstep.GradScaler(init_scale=64.0)
    scheduler = halfstep.hold_scheduler(schedulers.ExponentialLR(optimizer, 0.5), scaler)
    step(optimizer, scaler)
    for _ in range(2):
        scheduler.step()
    assert scheduler.get_last_lr() == [1e-2 * 0.25]


def test_a_measure_is_passed_on() -> None:
    optimizer, scaler = optimizer_of(), halfstep.GradScaler(init_scale=64.0)
    scheduler: Any = halfstep.hold_scheduler(schedulers.ReduceLROnPlateau(optimizer, patience=0, factor=0.5), scaler)
    for bad, want in ((False, 1.0), (True, 1.0), (False, 0.5), (False, 0.25)):
        step(optimizer, scaler, bad)
        scheduler.step(1.0)
        assert optimizer.param_groups[0]["lr"] == 1e-2 * want


def test_each_follows_its_own_optimizer() -> None:
    both, scaler = [optimizer_of(), optimizer_of()], halfstep.GradScaler(init_scale=64.0)
    held = [halfstep.hold_scheduler(schedulers.ExponentialLR(each, 0.5), scaler) for each in both]
    scale = scaler.scale(torch.ones(())).item()
    for optimizer, value in zip(both, (float("inf"), scale), strict=True):
        for param in members(optimizer):
            param.grad = torch.full_like(param, value)
        scaler.step(optimizer)
    scaler.update()
    for scheduler in held:
        scheduler.step()
    assert [scheduler.get_last_lr() for scheduler in held] == [[1e-2], [5e-3]]


def test_p17_other_optimizers_are_followed_too() -> None:
    param = torch.nn.Parameter(torch.ones(3))
    optimizer, scaler = torch.optim.SGD([param], lr=1e-2), halfstep.GradScaler("cpu", init_scale=64.0)
    scheduler = halfstep.hold_scheduler(schedulers.ExponentialLR(optimizer, 0.5), scaler)
    for bad, want in ((True, 1.0), (False, 0.5)):
        step(optimizer, scaler, bad)
        scheduler.step()
        assert scheduler.get_last_lr() == [1e-2 * want]


def test_p29_what_it_cannot_hold_is_named() -> None:
    optimizer, scaler = optimizer_of(), halfstep.GradScaler()
    scheduler = schedulers.ExponentialLR(optimizer, 0.5)
    anything: Any = object()
    with pytest.raises(TypeError, match=r"scheduler is a builtins\.object: must be one of torch\.optim\.lr_scheduler"):
        halfstep.hold_scheduler(anything, scaler)
    stock: Any = torch.amp.GradScaler("cpu")
    with pytest.raises(
        TypeError, match=r"scaler is a torch\.amp\.grad_scaler\.GradScaler: must be the halfstep\.GradScaler that steps"
    ):
        halfstep.hold_scheduler(scheduler, stock)
    assert type(scheduler) is schedulers.ExponentialLR
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scheduler.step()
    assert scheduler.get_last_lr() == [5e-3]
