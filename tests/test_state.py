"""P19: a run that is saved and loaded goes on as if it had never stopped, bit for bit."""

import copy
import itertools
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import halfstep
from halfstep.formats import MOMENTS, WEIGHTS
from harness import assert_same
from training import (
    OPTIMIZERS,
    assert_alike,
    assert_states,
    drive,
    gradients,
    make,
    members,
    params,
    through_file,
)

PAIRS = [(weights, moments) for weights in WEIGHTS for moments in MOMENTS]


class Run:
    """A model, its optimizer and its scaler, as a person writes them."""

    def __init__(self, start: int, half: torch.dtype, name: str, **options: Any) -> None:
        torch.manual_seed(start)
        # the layer in the middle is large enough for blocks
        layers = nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 70), nn.Tanh(), nn.Linear(70, 1)
        self.model = nn.Sequential(*layers).to(half)
        self.optimizer = make(name, self.model.parameters(), lr=1e-2, **options)
        self.scaler = halfstep.GradScaler("cpu", growth_interval=2, init_scale=2.0**13)
        self.half = half

    def train(self, numbers: range) -> None:
        for number in numbers:
            generator = torch.Generator().manual_seed(number)
            inputs, targets = torch.randn(8, 6, generator=generator), torch.randn(8, 1, generator=generator)
            loss = (self.model(inputs.to(self.half)).float() - targets).square().mean()
            if number % 5 == 2:
                loss = loss * float("inf")  # a skipped step among them
            self.scaler.scale(loss).backward()
            if number % 2:
                self.scaler.unscale_(self.optimizer)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        parts = {"model": self.model, "optimizer": self.optimizer, "scaler": self.scaler}
        return {name: part.state_dict() for name, part in parts.items()}

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("weights", "moments"), PAIRS)
def test_p19_six_and_six_steps_are_twelve(
    name: str, weights: str, moments: str, half: torch.dtype, backend: str
) -> None:
    options = {"weights": weights, "moments": moments, "backend": backend, "seed": 7}
    whole, first = Run(0, half, name, **options), Run(0, half, name, **options)
    whole.train(range(12))
    first.train(range(6))
    # other weights and a stepped optimizer: all must come from the file
    second = Run(1, half, name, **{**options, "seed": 8})
    second.load(through_file(first.state()))
    second.train(range(6, 12))
    assert_alike(second.optimizer, whole.optimizer)
    assert second.scaler.state_dict() == whole.scaler.state_dict()
    assert 6 < whole.optimizer.state[members(whole.optimizer)[0]]["step"] <= 10  # two at least were skipped


@pytest.mark.parametrize(("weights", "moments"), [("split16", "float32"), ("split8", "block8")])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_p19_a_copy_goes_on_the_same(
    name: str, copied: Any, weights: str, moments: str, half: torch.dtype, backend: str
) -> None:
    over = params(half, [(64, 65), (5,)])
    whole = make(name, over, backend=backend, weights=weights, moments=moments, seed=3)
    drive(whole, range(3))
    twin = copied(whole)
    assert not set(members(twin)) & set(members(whole))
    before = copied(whole)
    drive(whole, range(3, 6))
    assert_alike(twin, before)  # nothing is shared
    drive(twin, range(3, 6))
    assert_alike(twin, whole)
    assert f"backend {backend}" in twin.explain()


def test_p19_a_copy_made_after_loading_goes_on_the_same(half: torch.dtype) -> None:
    whole, loaded = (make("AdamW", params(half)) for _ in range(2))
    drive(whole, range(3))
    for param, other in zip(members(loaded), members(whole), strict=True):
        param.data.copy_(other)
    loaded.load_state_dict(whole.state_dict())
    twin = pickle.loads(pickle.dumps(copy.deepcopy(loaded)))
    drive(whole, range(3, 6))
    drive(twin, range(3, 6))
    assert_alike(twin, whole)


def test_p19_loading_before_the_first_step_and_after_many_give_the_same(half: torch.dtype, backend: str) -> None:
    source, early, late = (make("AdamW", params(half), backend=backend) for _ in range(3))
    drive(source, range(4))
    drive(late, range(20, 23))
    for target in (early, late):
        for param, other in zip(members(target), members(source), strict=True):
            param.data.copy_(other)
        target.load_state_dict(source.state_dict())
        assert_alike(target, source)
    drive(source, range(4, 6))
    drive(early, range(4, 6))
    drive(late, range(4, 6))
    assert_alike(early, source)
    assert_alike(late, source)


def test_p19_a_state_saved_before_the_first_step_loads(half: torch.dtype) -> None:
    source, target = make("AdamW", params(half)), make("AdamW", params(half))
    drive(target, range(2))
    for param, other in zip(members(target), members(source), strict=True):
        param.data.copy_(other)
    target.load_state_dict(through_file(source.state_dict()))
    assert not any(target.state.values())
    drive(source, range(3))
    drive(target, range(3))
    assert_alike(target, source)


def test_p19_the_loaded_dict_is_not_aliased(half: torch.dtype) -> None:
    source, target = make("AdamW", params(half)), make("AdamW", params(half))
    drive(source, range(2))
    state = source.state_dict()
    kept = copy.deepcopy(state)
    target.load_state_dict(state)
    drive(target, range(2))
    target.param_groups[0]["lr"] = 5.0
    assert state["param_groups"] == kept["param_groups"]
    for key, entry in state["state"].items():
        assert_states(entry, kept["state"][key])


def test_p19_the_argument_is_named_state_dict(half: torch.dtype) -> None:
    source, target = make("AdamW", params(half)), make("AdamW", params(half))
    drive(source, range(2))
    for param, other in zip(members(target), members(source), strict=True):
        param.data.copy_(other)
    target.load_state_dict(state_dict=source.state_dict())
    assert_alike(target, source)


def test_p19_hooks_of_the_person_are_heard(half: torch.dtype) -> None:
    source, target = make("AdamW", params(half)), make("AdamW", params(half))
    drive(source, range(2))
    seen: list[Any] = []

    def edit(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        edited = copy.deepcopy(state_dict)
        for entry in edited["state"].values():
            entry["exp_avg"] *= 2
        edited["param_groups"][0]["lr"] = 0.25
        return edited

    def look(optimizer: torch.optim.Optimizer) -> None:
        seen.extend((optimizer.state[param]["exp_avg"].clone(), param) for param in members(optimizer))

    target.register_load_state_dict_pre_hook(edit)
    target.register_load_state_dict_post_hook(look)
    target.load_state_dict(source.state_dict())
    assert target.param_groups[0]["lr"] == 0.25
    assert len(seen) == len(members(source))
    for (exp_avg, param), original in zip(seen, members(source), strict=True):
        assert_same(exp_avg, source.state[original]["exp_avg"] * 2)
        assert_same(target.state[param]["exp_avg"], exp_avg)
    # no hook of ours stays behind
    assert len(target._optimizer_load_state_dict_pre_hooks) == 1
    assert len(target._optimizer_load_state_dict_post_hooks) == 1


def test_p19_steps_count_exactly_past_two_to_the_24(half: torch.dtype, backend: str) -> None:
    optimizer = make("AdamW", params(half), backend=backend)
    drive(optimizer, range(1))
    state = optimizer.state_dict()
    for entry in state["state"].values():
        entry["step"] = 2**24
    optimizer.load_state_dict(through_file(state))
    drive(optimizer, range(3))
    assert {optimizer.state[param]["step"] for param in members(optimizer)} == {2**24 + 3}
    assert {type(optimizer.state[param]["step"]) for param in members(optimizer)} == {int}


@pytest.mark.parametrize(("weights", "moments"), PAIRS)
def test_p15_each_param_counts_its_own_steps(weights: str, moments: str, half: torch.dtype, backend: str) -> None:
    # frozen until step 3, and a group that comes at step 5: each moves as in an optimizer that it has for itself,
    # behind as many others, since its place when first seen is the number of its random bits
    options = {"weights": weights, "moments": moments, "backend": backend}
    three = early, thawed, late = params(half, [(64, 65)] * 3)
    optimizer = make("AdamW", [early, thawed], **options)
    twins = [nn.Parameter(param.detach().clone()) for param in three]
    idle = params(half, [(0,)] * 2)
    alone = [make("AdamW", [*idle[:place], param], **options) for place, param in enumerate(twins)]
    thawed.requires_grad_(False)
    slope = torch.linspace(-1, 1, 64 * 65).view(64, 65)
    for number in range(8):
        if number == 3:
            thawed.requires_grad_(True)
        if number == 5:
            optimizer.add_param_group({"params": [late], **options})
        due = [True, number >= 3, number >= 5]
        for param in (*itertools.compress(three, due), *itertools.compress(twins, due)):
            (param.float() * slope).sum().backward()
        for stepped in (optimizer, *itertools.compress(alone, due)):
            stepped.step()
            stepped.zero_grad()
    for param, twin, other, steps in zip(three, twins, alone, (8, 5, 3), strict=True):
        assert_same(param.detach(), twin.detach())
        assert_states(optimizer.state[param], other.state[twin])
        assert optimizer.state[param]["step"] == steps


def test_a_seed_and_a_place_decide_the_random_bits(half: torch.dtype, backend: str) -> None:
    def trained(seed: int, place: int) -> torch.Tensor:
        over = params(half, [(64, 64)] * 2)
        over[1 - place].requires_grad_(False)
        over[place].data.copy_(torch.ones(64, 64))
        optimizer = make("AdamW", over, weights="stochastic", moments="block8", backend=backend, seed=seed)
        for _ in range(5):
            over[place].grad = torch.ones(64, 64, dtype=half)
            optimizer.step()
        return over[place].detach()

    first = trained(0, 0)
    assert_same(first, trained(0, 0))
    for seed, place in ((1, 0), (2**32, 0), (0, 1)):
        assert not torch.equal(first, trained(seed, place))


def test_p15_no_gradient_is_no_ceremony(half: torch.dtype, backend: str) -> None:
    (with_grad, without) = params(half, [(3,), (3,)])
    optimizer = make("AdamW", [{"params": [with_grad, without]}, {"params": []}], backend=backend)
    assert optimizer.step() is None
    assert not any(optimizer.state.values())
    before = without.detach().clone()
    with_grad.grad = torch.ones_like(with_grad)
    optimizer.step()
    assert_same(without.detach(), before)
    assert without not in optimizer.state
    assert optimizer.saturated() == {}


def test_p15_a_mixture_of_step_counts_in_one_call(half: torch.dtype, backend: str) -> None:
    optimizer = make("AdamW", params(half), backend=backend)
    for number in range(4):
        gradients(optimizer, number)
        for k, param in enumerate(members(optimizer)):
            if k > number:
                param.grad = None
        optimizer.step()
    assert [optimizer.state[p]["step"] for p in members(optimizer)] == [4, 3, 2, 1]
