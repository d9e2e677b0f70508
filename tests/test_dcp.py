"""P19: through torch.distributed.checkpoint in one process, flattened and full, into an optimizer that is fresh."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import halfstep
from test_state import PAIRS, Run
from training import OPTIMIZERS, assert_alike, drive, gradients, make, members, params

FORMS = {
    "full": StateDictOptions(full_state_dict=True),
    "flattened": StateDictOptions(flatten_optimizer_state_dict=True),
}

# what dcp itself warns of where no process group is
pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning",
)


def saved(run: Run, form: StateDictOptions, folder: Path) -> None:
    state = {
        "model": run.model.state_dict(),
        "optimizer": get_optimizer_state_dict(run.model, run.optimizer, options=form),
        "scaler": run.scaler.state_dict(),
    }
    save(state, checkpoint_id=folder)


def loaded(run: Run, form: StateDictOptions, folder: Path) -> None:
    state: dict[str, Any] = {
        "model": run.model.state_dict(),
        "optimizer": get_optimizer_state_dict(run.model, run.optimizer, options=form),
        "scaler": run.scaler.state_dict(),
    }
    load(state, checkpoint_id=folder)
    run.model.load_state_dict(state["model"])
    set_optimizer_state_dict(run.model, run.optimizer, state["optimizer"], options=form)
    run.scaler.load_state_dict(state["scaler"])


@pytest.mark.parametrize(("weights", "moments"), PAIRS)
@pytest.mark.parametrize("form", FORMS)
def test_p19_six_and_six_steps_are_twelve(
    form: str, weights: str, moments: str, half: torch.dtype, tmp_path: Path
) -> None:
    options = {"weights": weights, "moments": moments, "seed": 7, "backend": "eager"}
    whole, first = Run(0, half, "AdamW", **options), Run(0, half, "AdamW", **options)
    whole.train(range(12))
    first.train(range(6))
    saved(first, FORMS[form], tmp_path)
    second = Run(1, half, "AdamW", **{**options, "seed": 8})
    loaded(second, FORMS[form], tmp_path)
    assert_alike(second.optimizer, first.optimizer)
    second.train(range(6, 12))
    assert_alike(second.optimizer, whole.optimizer)
    assert second.scaler.state_dict() == whole.scaler.state_dict()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_p19_every_optimizer_goes_through(name: str, form: str, half: torch.dtype, tmp_path: Path) -> None:
    options = {"weights": "split8", "moments": "block8", "weight_decay": 0.1, "momentum": 0.9}
    whole, first = Run(0, half, name, **options), Run(0, half, name, **options)
    whole.train(range(8))
    first.train(range(4))
    saved(first, FORMS[form], tmp_path)
    second = Run(1, half, name, **options)
    loaded(second, FORMS[form], tmp_path)
    second.train(range(4, 8))
    assert_alike(second.optimizer, whole.optimizer)


@pytest.mark.parametrize("lr", [1e-2, torch.tensor(1e-2)], ids=["number", "tensor"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_decay": 0.1, "decoupled_weight_decay": False},
        {"weight_decay": 0.1, "absolute_weight_decay": True, "decoupled_weight_decay": True},
        {"weights": "stochastic", "moments": "block8"},
    ],
    ids=["plain", "L2", "absolute", "chance"],
)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_p19_dcps_fake_step_leaves_no_trace(name: str, options: dict[str, Any], lr: Any, half: torch.dtype) -> None:
    options = {"lr": lr, "momentum": 0.9, **options}
    looked, other = nn.Linear(64, 70, dtype=half), nn.Linear(64, 70, dtype=half)
    other.load_state_dict(looked.state_dict())
    seen, unseen = (make(name, model.parameters(), **options) for model in (looked, other))
    state: Any = get_optimizer_state_dict(looked, seen)
    assert all(entry["step"] == 0 for entry in state["state"].values())
    assert all(param.grad is None for param in members(seen))
    for optimizer in (seen, unseen):
        drive(optimizer, range(3))
    assert_alike(seen, unseen)


def test_p15_a_step_that_only_looks_like_dcps_counts(half: torch.dtype) -> None:
    # a warmup that begins at 0 steps: its gradients are the first that the averages see
    optimizer = make("AdamW", params(half), lr=0.0)
    drive(optimizer, range(1))
    assert {optimizer.state[param]["step"] for param in members(optimizer)} == {1}
    # and once there are states, zeros count as torch counts them
    for param in members(optimizer):
        param.grad = torch.zeros_like(param)
    optimizer.step()
    assert {optimizer.state[param]["step"] for param in members(optimizer)} == {2}
    # so do zeros with a learning rate
    other = make("AdamW", params(half), lr=1e-3)
    for param in members(other):
        param.grad = torch.zeros_like(param)
    other.step()
    assert {other.state[param]["step"] for param in members(other)} == {1}
    # and a closure is asked for its loss
    asked = make("AdamW", params(half), lr=0.0)
    gradients(asked, 0)
    for param in members(asked):
        assert param.grad is not None
        param.grad.zero_()
    assert asked.step(lambda: 3.5) == 3.5


@pytest.mark.parametrize(("old", "new"), [("split16", "split8"), ("split8", "split16")])
def test_p20_a_remainder_that_dcp_cast_is_refused_by_name(
    old: str, new: str, half: torch.dtype, tmp_path: Path
) -> None:
    source, target = Run(0, half, "AdamW", weights=old, seed=3), Run(0, half, "AdamW", weights=new, seed=3)
    source.train(range(3))
    target.train(range(1))
    before = target.optimizer.state_dict()
    for entry in source.optimizer.state.values():
        entry.setdefault("stream", 0)  # which the other format has, and dcp asks for
    for entry in target.optimizer.state.values():
        entry.setdefault("stream", 0)
    saved(source, FORMS["flattened"], tmp_path)
    keeps = "torch.int8" if new == "split8" else "torch.int16"
    text = rf"^the state for param 0 of group 0 does not fit: it holds 'remainder' in {keeps}, which no format of a .* "
    with pytest.raises(ValueError, match=text + rf"it is of weights='{old}' .*a library that casts what it loads"):
        loaded(target, FORMS["flattened"], tmp_path)
    assert target.optimizer.state_dict()["param_groups"] == before["param_groups"]


def test_a_run_begun_by_dcp_equals_one_that_was_not(half: torch.dtype) -> None:
    # a checkpoint loop asks for the state before the first step
    torch.manual_seed(0)
    model = nn.Linear(6, 3).to(half)
    optimizer = halfstep.AdamW(model.parameters(), lr=1e-2)
    twin = nn.Linear(6, 3).to(half)
    twin.load_state_dict(model.state_dict())
    other = halfstep.AdamW(twin.parameters(), lr=1e-2)
    get_optimizer_state_dict(model, optimizer)
    for each in (optimizer, other):
        drive(each, range(4))
    assert_alike(optimizer, other)


def test_p20_what_a_flattened_state_lacks_is_taken_as_missing(half: torch.dtype) -> None:
    # torch hands over {} for each entry that only the live state has, here the stream of random bits
    source, target = Run(0, half, "AdamW", weights="split16"), Run(0, half, "AdamW", weights="split8")
    source.train(range(3))
    target.train(range(1))
    target.model.load_state_dict(source.model.state_dict())
    state = get_optimizer_state_dict(source.model, source.optimizer, options=FORMS["flattened"])
    set_optimizer_state_dict(target.model, target.optimizer, state, options=FORMS["flattened"])
    assert {each.what for each in target.optimizer.conversions()} == {"weight"}
    for place, param in enumerate(members(target.optimizer)):
        assert target.optimizer.state[param]["stream"] == place
    target.train(range(3, 5))
