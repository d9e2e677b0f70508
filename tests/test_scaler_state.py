"""What a scaler keeps: its state dict, pickles and copies, and what it knows of optimizers."""

import copy
import gc
import io
import pickle
import re
import weakref
from typing import Any

import pytest
import torch

import halfstep
from scaled import WAYS, adamw, assert_same, backward, iterate, param, snapshot, step

INF = float("inf")
FIVE = ["scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"]


def used(**options: Any) -> halfstep.GradScaler:
    """A scaler that has had an overflow, of two that it bears, and then two healthy steps."""
    scaler = halfstep.GradScaler(**{"hysteresis": 2, "growth_interval": 3, **options})
    ours = param([1.0], torch.float32)
    optimizer = torch.optim.SGD([ours])
    for grad in (INF, 0.5, 0.5):
        iterate(scaler, optimizer, [ours], [[grad]])
    return scaler


def continued(scaler: halfstep.GradScaler) -> list[float]:
    """The scales that follow in three more steps, the first with an overflow."""
    ours, seen = param([1.0], torch.float32), []
    optimizer = torch.optim.SGD([ours])
    for grad in (INF, 0.5, 0.5):
        iterate(scaler, optimizer, [ours], [[grad]])
        seen.append(scaler.get_scale())
    return seen


def saved_and_loaded(state: dict[str, Any]) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def test_p19_the_state_has_torchs_five_keys_and_ours() -> None:
    state = used(max_scale=2.0**20).state_dict()
    assert list(state)[:5] == list(torch.amp.GradScaler("cpu").state_dict()) == FIVE
    ours = {"min_scale": 2.0**-14, "max_scale": 2.0**20, "hysteresis": 2, "_hysteresis_tracker": 1}
    assert state == {
        "scale": 2.0**16,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 3,
        "_growth_tracker": 2,
        **ours,
    }
    assert all(type(value) in (int, float) for value in state.values())


@pytest.mark.parametrize("begun", [False, True])
def test_p19_a_loaded_state_goes_on_as_if_never_stopped(begun: bool) -> None:
    scaler = used(max_scale=2.0**20, min_scale=1.0)
    state = saved_and_loaded(scaler.state_dict())
    expected = continued(scaler)
    assert expected == [2.0**15] * 3
    loaded = used(init_scale=4.0, hysteresis=5) if begun else halfstep.GradScaler(init_scale=4.0)
    loaded.load_state_dict(state)
    assert loaded.state_dict() == state
    assert continued(loaded) == expected
    assert loaded.state_dict() == scaler.state_dict()


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x)), copy.copy])
@pytest.mark.parametrize("enabled", [True, False])
def test_p19_pickles_and_copies_go_on_as_if_never_stopped(copier: Any, enabled: bool) -> None:
    scaler = used(at_floor="raise", enabled=enabled)
    twin = copier(scaler)
    assert twin.is_enabled() is enabled
    assert twin.state_dict() == scaler.state_dict()
    if enabled:
        expected = continued(scaler)
        assert continued(twin) == expected
        assert twin.state_dict() == scaler.state_dict()
    optimizer = adamw([param([1.0], torch.float16)])
    assert not twin.skipped(optimizer)


def test_p19_a_scaler_with_its_optimizer_goes_on_bit_for_bit(half: torch.dtype, backend: str) -> None:
    def twelve(stop: bool) -> tuple[list[torch.Tensor], Any]:
        ours = param(torch.linspace(-1, 1, 8), half)
        optimizer, scaler = adamw([ours], backend=backend), halfstep.GradScaler(growth_interval=3, hysteresis=2)
        for k in range(12):
            if stop and k == 6:
                state = saved_and_loaded({"o": optimizer.state_dict(), "s": scaler.state_dict()})
                ours = torch.nn.Parameter(ours.detach().clone())
                optimizer, scaler = adamw([ours], backend=backend), halfstep.GradScaler()
                optimizer.load_state_dict(state["o"])
                scaler.load_state_dict(state["s"])
            grads = torch.linspace(-0.1, 0.2, 8) * (INF if k in (1, 4, 8) else 1 + k)
            iterate(scaler, optimizer, [ours], [grads])
        return snapshot(optimizer), scaler.state_dict()

    (tensors, scaler), (again, other) = twelve(False), twelve(True)
    assert_same(tensors, again)
    assert scaler == other


def test_p19_no_pickle_in_the_middle_of_an_iteration_in_torchs_words() -> None:
    ours = param([1.0], torch.float16)
    optimizer, scaler = adamw([ours]), halfstep.GradScaler()
    backward(scaler, [ours], [[0.5]])
    copy.deepcopy(scaler)
    scaler.unscale_(optimizer)
    message = r"^A GradScaler instance may only be pickled at the beginning of an iteration, or at the end after scaler"
    for act in (copy.deepcopy, pickle.dumps):
        with pytest.raises(AssertionError, match=message):
            act(scaler)
    scaler.step(optimizer)
    scaler.update()
    pickle.dumps(scaler)


@pytest.mark.parametrize("begun", [False, True])
def test_p20_torchs_state_loads_and_ours_stays(begun: bool) -> None:
    torchs = torch.amp.GradScaler("cpu", init_scale=512.0, growth_factor=3.0, backoff_factor=0.25, growth_interval=7)
    state = saved_and_loaded(torchs.state_dict())
    scaler = used(min_scale=1.0) if begun else halfstep.GradScaler(hysteresis=2, min_scale=1.0)
    scaler.load_state_dict(state)
    assert {key: scaler.state_dict()[key] for key in FIVE} == state
    ours = {key: value for key, value in scaler.state_dict().items() if key not in FIVE}
    assert ours == {"min_scale": 1.0, "max_scale": 2.0**24, "hysteresis": 2, "_hysteresis_tracker": 2}
    torchs.load_state_dict(scaler.state_dict())  # and back
    assert torchs.state_dict() == state


@pytest.mark.parametrize(("scale", "becomes"), [(2.0**-120, 2.0**-14), (2.0**100, 2.0**24)])
@pytest.mark.parametrize("begun", [False, True])
def test_p12_a_scale_that_torch_let_go_is_brought_back(scale: float, becomes: float, begun: bool) -> None:
    scaler = used() if begun else halfstep.GradScaler()
    text = f"the loaded scale {scale:g} lies outside 6.10352e-05 and 1.67772e+07; it is {becomes:g} now"
    with pytest.warns(UserWarning, match=f"^{re.escape(text)}$"):
        scaler.load_state_dict({**torch.amp.GradScaler("cpu").state_dict(), "scale": scale})
    assert scaler.get_scale() == becomes


def test_p20_a_state_that_cannot_be_loaded_says_why_and_changes_nothing() -> None:
    scaler = used()
    before = scaler.state_dict()
    for name, value, text in (
        (
            "scale",
            0.0,
            r"scale=0\.0 in the loaded state: must be a number above 0 and finite; load an earlier",
        ),
        ("scale", INF, r"scale=inf in the loaded state: must be a number above 0 and finite"),
        ("scale", -4.0, r"scale=-4\.0 in the loaded state: must be a number above 0 and finite"),
        ("scale", float("nan"), r"scale=nan in the loaded state: must be a number above 0 and finite"),
        ("scale", "4", r"scale='4' in the loaded state: must be a number above 0 and finite"),
        ("growth_factor", 1.0, r"growth_factor=1\.0 in the loaded state: must be a number above 1 and finite"),
        ("backoff_factor", 1.0, r"backoff_factor=1\.0 in the loaded state: must be a number above 0 and below 1"),
        ("growth_interval", 2.5, r"growth_interval=2\.5 in the loaded state: must be a whole number"),
        ("_growth_tracker", -1, r"_growth_tracker=-1 in the loaded state: must be a whole number, at least 0"),
        ("hysteresis", 0, r"hysteresis=0 in the loaded state: must be a whole number, at least 1"),
        ("_hysteresis_tracker", None, r"_hysteresis_tracker=None in the loaded state: must be a whole number"),
        ("patience", 3, r"the loaded state has 'patience', which no scaler keeps: take that out"),
    ):
        with pytest.raises(ValueError, match=f"^{text}"):
            scaler.load_state_dict({**before, name: value})
    with pytest.raises(ValueError, match=r"^min_scale=0\.0, max_scale=16777216\.0: must be 2\*\*-126 <= min_scale"):
        scaler.load_state_dict({**before, "min_scale": 0.0})
    with pytest.raises(RuntimeError, match=r"^The source state dict is empty, possibly because it was saved from a"):
        scaler.load_state_dict({})
    for missing in FIVE:
        with pytest.raises(ValueError, match=f"^the loaded state of a scaler has no '{missing}': it has 'min_scale', "):
            scaler.load_state_dict({name: value for name, value in before.items() if name != missing})
    assert scaler.state_dict() == before


# ---------------------------------------------------------------------- what it knows of optimizers


@pytest.mark.parametrize("way", WAYS)
def test_p14_an_optimizer_lives_until_update_and_no_longer(half: torch.dtype, way: str) -> None:
    """What is known of it goes by its id, which Python gives to another one after its end."""
    ours = param([1.0], half)
    optimizer, scaler = adamw([ours]), halfstep.GradScaler()
    backward(scaler, [ours], [[INF]])
    step(scaler, optimizer, way)
    alive = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert alive() is not None
    scaler.update()
    gc.collect()
    assert alive() is None


def test_p11_an_iteration_without_a_step_is_cleared_by_update(half: torch.dtype) -> None:
    ours = param([1.0], half)
    optimizer, scaler = adamw([ours]), halfstep.GradScaler(init_scale=4.0, growth_interval=1)
    backward(scaler, [ours], [[0.5]])
    scaler.unscale_(optimizer)
    assert ours.grad.tolist() == [0.5]
    scaler.update()
    assert ours.grad is None
    assert ours.grad_dtype is half
    assert scaler.get_scale() == 8.0
    assert not scaler.skipped(optimizer)
    backward(scaler, [ours], [[INF]])
    scaler.unscale_(optimizer)
    scaler.update(16.0)
    assert ours.grad is None
    assert scaler.get_scale() == 16.0
    assert not optimizer.state
    iterate(scaler, optimizer, [ours], [[0.5]])
    assert optimizer.state[ours]["step"] == 1
    assert optimizer.state[ours]["exp_avg"].item() == pytest.approx(0.05, rel=2.0**-22)  # (1 - beta1) * g


def test_p11_what_was_unscaled_survives_a_step_of_another_optimizer(half: torch.dtype) -> None:
    first, second = param([1.0], half), param([1.0], half)
    one, two, scaler = adamw([first]), adamw([second]), halfstep.GradScaler()
    backward(scaler, [first, second], [[0.25], [0.5]])
    scaler.unscale_(one)
    scaler.step(two)
    assert first.grad.tolist() == [0.25]
    scaler.step(one)
    scaler.update()
    assert first.item() == second.item() < 1.0
