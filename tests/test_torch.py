"""P31: what is built around torch's optimizers works around ours."""

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedules
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.optim.swa_utils import SWALR, AveragedModel

import halfstep
from halfstep import Adam, AdamW
from harness import assert_same
from training import OPTIMIZERS, assert_alike, drive, gradients, make, members, params

OWN = ["weights", "moments", "backend", "seed"]


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_p31_the_signature_is_torchs(name: str) -> None:
    ours = inspect.signature(getattr(halfstep, name)).parameters
    theirs = inspect.signature(getattr(torch.optim, name)).parameters
    assert [n for n in ours if n not in OWN] == list(theirs)
    assert list(ours)[-4:] == OWN
    for key, parameter in theirs.items():
        assert (ours[key].default, ours[key].kind) == (parameter.default, parameter.kind), key
    assert [ours[key].default for key in OWN] == ["split16", "float32", "auto", 0]
    assert all(ours[key].kind is inspect.Parameter.KEYWORD_ONLY for key in OWN)


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_p31_the_groups_have_torchs_keys(name: str, half: torch.dtype) -> None:
    theirs = getattr(torch.optim, name)(params(torch.float32)).param_groups[0]
    ours = getattr(halfstep, name)(params(half)).param_groups[0]
    assert {key: ours[key] for key in theirs if key != "params"} == {k: v for k, v in theirs.items() if k != "params"}


@pytest.mark.parametrize("argument", ["foreach", "fused", "capturable", "differentiable", "amsgrad"])
@pytest.mark.parametrize("cls", [Adam, AdamW])
def test_p29_arguments_that_do_not_apply(cls: Any, argument: str, half: torch.dtype) -> None:
    for nothing in (None, False):
        cls(params(half), **{argument: nothing})
    with pytest.raises(ValueError, match=rf"{argument}=True: .*(leave it out|backend=|torch\.optim)"):
        cls(params(half), **{argument: True})
    with pytest.raises(ValueError, match=rf"{argument}=True: .*leave it out"):
        cls([{"params": params(half), argument: True}])


def test_lr_may_be_a_tensor(half: torch.dtype, backend: str) -> None:
    lr = torch.tensor(0.25)
    tensor, number = (AdamW(params(half), lr=rate, backend=backend) for rate in (lr, 0.25))
    for rate in (0.25, 0.5, 0.125):
        lr.fill_(rate)
        number.param_groups[0]["lr"] = rate
        drive(tensor, range(1))
        drive(number, range(1))
    assert tensor.param_groups[0]["lr"] is lr
    for a, b in zip(members(tensor), members(number), strict=True):
        assert_same(a.detach(), b.detach())


def test_maximize_is_minimising_the_negated(half: torch.dtype, backend: str) -> None:
    up, down = AdamW(params(half), maximize=True, backend=backend), AdamW(params(half), backend=backend)
    for number in range(3):
        for optimizer, sign in ((up, -1), (down, 1)):
            gradients(optimizer, number)
            for param in members(optimizer):
                param.grad.mul_(sign)  # type: ignore[union-attr]
            optimizer.step()
    for a, b in zip(members(up), members(down), strict=True):
        assert_same(a.detach(), b.detach())


def test_a_closure_is_evaluated_once_with_gradients_on(half: torch.dtype, backend: str) -> None:
    optimizer = AdamW(params(half), backend=backend)
    twin = copy.deepcopy(optimizer)
    calls = []

    def closure(of: torch.optim.Optimizer) -> torch.Tensor:
        calls.append(torch.is_grad_enabled())
        of.zero_grad()
        loss = torch.stack([param.float().square().sum() for param in members(of)]).sum()
        loss.backward()
        return loss

    with torch.no_grad():
        loss = optimizer.step(lambda: closure(optimizer))
    assert calls == [True]
    assert isinstance(loss, torch.Tensor)
    closure(twin)
    twin.step()
    assert_alike(optimizer, twin)


def test_groups_have_options_of_their_own(half: torch.dtype, backend: str) -> None:
    kinds: list[dict[str, Any]] = [
        {"weights": "split16", "lr": 0.1},
        {"weights": "master32", "betas": [0.5, 0.75]},
        {"weights": "rounded", "moments": torch.float32, "weight_decay": 0.5},
    ]
    together = AdamW([{"params": params(half), **kind} for kind in kinds], backend=backend)
    for group, kind in zip(together.param_groups, kinds, strict=True):
        alone = make("AdamW", params(half), backend=backend, **kind)
        assert group["weights"] == kind["weights"]
        assert group["moments"] == "float32"
        # one at a time, with the gradients that it has alone
        part = group["params"]
        for number in range(3):
            together.zero_grad()
            gradients(alone, number)
            for param, other in zip(part, members(alone), strict=True):
                param.grad = other.grad
            together.step()
            alone.step()
        for param, other in zip(part, members(alone), strict=True):
            assert_same(param.detach(), other.detach())
            assert_same(together.float32_weight(param), alone.float32_weight(other))


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda o: schedules.LambdaLR(o, lambda k: 0.5**k),
    "MultiplicativeLR": lambda o: schedules.MultiplicativeLR(o, lambda k: 0.5),
    "StepLR": lambda o: schedules.StepLR(o, 2),
    "MultiStepLR": lambda o: schedules.MultiStepLR(o, [1, 3]),
    "ConstantLR": lambda o: schedules.ConstantLR(o),
    "LinearLR": lambda o: schedules.LinearLR(o, 0.1, total_iters=4),
    "ExponentialLR": lambda o: schedules.ExponentialLR(o, 0.5),
    "PolynomialLR": lambda o: schedules.PolynomialLR(o, 4),
    "CosineAnnealingLR": lambda o: schedules.CosineAnnealingLR(o, 4),
    "CosineAnnealingWarmRestarts": lambda o: schedules.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: schedules.CyclicLR(o, 0.1, 0.2, 2, cycle_momentum=True, base_momentum=0.5, max_momentum=0.75),
    "OneCycleLR": lambda o: schedules.OneCycleLR(o, 0.1, total_steps=8),
    "SequentialLR": lambda o: schedules.SequentialLR(
        o, [schedules.ConstantLR(o), schedules.ExponentialLR(o, 0.5)], milestones=[2]
    ),
    "ChainedScheduler": lambda o: schedules.ChainedScheduler(
        [schedules.ConstantLR(o), schedules.ExponentialLR(o, 0.5)]
    ),
    "ReduceLROnPlateau": lambda o: schedules.ReduceLROnPlateau(o, patience=0),
    "SWALR": lambda o: SWALR(o, 0.25, 2),
}


@pytest.mark.parametrize("tensor", [False, True], ids=["number", "tensor"])
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_p31_schedules_set_what_they_set_on_torchs(schedule: Any, tensor: bool) -> None:
    rates = [torch.tensor(0.5) if tensor else 0.5 for _ in range(2)]
    ours, theirs = AdamW(params(torch.bfloat16), lr=rates[0]), torch.optim.AdamW(params(torch.float32), lr=rates[1])
    one, other = schedule(ours), schedule(theirs)
    for number in range(6):
        for optimizer, scheduler in ((ours, one), (theirs, other)):
            drive(optimizer, [number])
            scheduler.step(*([1.0] if isinstance(scheduler, schedules.ReduceLROnPlateau) else []))
        for key in ("lr", "betas"):
            assert ours.param_groups[0][key] == theirs.param_groups[0][key]
    assert one.state_dict().keys() == other.state_dict().keys()
    for param in members(ours):
        assert param.isfinite().all()


def test_p31_averaged_models(half: torch.dtype, backend: str) -> None:
    model = nn.Linear(3, 2).to(half)
    optimizer, averaged = make("AdamW", model.parameters(), backend=backend, lr=0.1), AveragedModel(model)
    seen = []
    for number in range(3):
        drive(optimizer, [number])
        averaged.update_parameters(model)
        seen.append(model.weight.detach().clone())
    # the average of 16-bit params is rounded at each of 3 updates: 3 half ulps of numbers under 1
    bound = 3 * torch.finfo(half).eps
    average = next(averaged.module.parameters())
    assert (average.float() - torch.stack(seen).float().mean(0)).abs().max() <= bound
    assert average.data_ptr() != model.weight.data_ptr()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_p31_step_hooks(name: str, half: torch.dtype, backend: str) -> None:
    optimizer = make(name, params(half), backend=backend)
    log: list[str] = []
    handles = [
        optimizer.register_step_pre_hook(lambda o, args, kwargs: log.append("before")),
        optimizer.register_step_post_hook(
            lambda o, args, kwargs: log.append(f"after {o.state[members(o)[0]]['step']}")
        ),
        register_optimizer_step_pre_hook(lambda o, args, kwargs: log.append("all before")),
        register_optimizer_step_post_hook(lambda o, args, kwargs: log.append("all after")),
    ]
    drive(optimizer, range(1))
    for handle in handles:
        handle.remove()
    drive(optimizer, range(1))
    assert log == ["all before", "before", "after 1", "all after"]


def test_p31_state_dict_hooks(half: torch.dtype) -> None:
    optimizer = make("AdamW", params(half))
    optimizer.register_state_dict_post_hook(lambda o, state: {**state, "mine": 1})
    drive(optimizer, range(1))
    assert optimizer.state_dict()["mine"] == 1
    optimizer.load_state_dict(optimizer.state_dict())


def test_p31_a_profile_shows_the_step(half: torch.dtype, backend: str) -> None:
    optimizer = make("AdamW", params(half), backend=backend)
    drive(optimizer, range(1))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        drive(optimizer, range(1))
    assert "Optimizer.step#AdamW.step" in {event.key for event in profile.key_averages()}


class Trainer:
    """Forward, backward, step and zero_grad in one function, as people compile it."""

    def __init__(self, half: torch.dtype, backend: str) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(half)
        self.optimizer = AdamW(self.model.parameters(), lr=0.05, backend=backend)

    def train(self, inputs: torch.Tensor) -> torch.Tensor:
        loss = self.model(inputs).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


# torch's own: where it resumes after a call that it does not trace, it looks at the loss
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_p31_a_compiled_training_function_gives_the_same_bits(half: torch.dtype, backend: str) -> None:
    plain, compiled = Trainer(half, backend), Trainer(half, backend)
    train = torch.compile(compiled.train, backend="eager")
    for number in range(4):
        inputs = torch.randn(6, 4, generator=torch.Generator().manual_seed(number)).to(half)
        assert_same(train(inputs), plain.train(inputs))
        if number == 1:  # between compiled calls all else goes on as usual
            for trainer in (plain, compiled):
                trainer.optimizer.load_state_dict(copy.deepcopy(trainer.optimizer.state_dict()))
    assert_alike(compiled.optimizer, plain.optimizer)
    torch._dynamo.reset()


def test_p31_a_compiled_step_gives_the_same_bits(half: torch.dtype, backend: str) -> None:
    plain, compiled = (make("AdamW", params(half), backend=backend) for _ in range(2))
    step = torch.compile(compiled.step, backend="eager")
    for number in range(3):
        gradients(plain, number)
        gradients(compiled, number)
        plain.step()
        step()
    assert_alike(compiled, plain)
    torch._dynamo.reset()
