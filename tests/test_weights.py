"""P23: a float32 checkpoint seeds params and what is kept beside them, and the float32 weights come out again."""

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import halfstep
from halfstep.formats import WEIGHTS
from harness import assert_same
from test_convert import room
from training import Snapshot, Tied, assert_alike, drive, gradients, make, members


class Model(Tied):
    """Other strides, no dimension and no element, too."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.randn(6, 5).t())
        self.scalar, self.empty = nn.Parameter(torch.randn(())), nn.Parameter(torch.zeros(0, 3))


def models(half: torch.dtype, seed: int = 0) -> tuple[Model, Model]:
    """A model in 16 bits and its float32 twin of other values."""
    torch.manual_seed(seed)
    return Model().to(half), Model()


def optimizer_of(model: nn.Module, name: str = "AdamW", **options: Any) -> Any:
    # what is loaded is the same on every backend, and this one has nothing to compile
    options = {"backend": "eager", **options}
    return make(name, [(n, p) for n, p in model.named_parameters() if p.requires_grad], lr=1e-2, **options)


def assert_state(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert list(a) == list(b)
    for name in a:
        assert_same(a[name], b[name])


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_p23_a_float32_checkpoint_goes_in_and_out(weights: str, stepped: bool, half: torch.dtype) -> None:
    model, twin = models(half)
    # float16's split16 is exact from 2**-16 on
    for param in twin.parameters():
        param.data = torch.where(param.abs() < 2**-14, 0.25, param.data)
    optimizer = optimizer_of(model, weights=weights, moments="block8")
    if stepped:
        drive(optimizer, range(2))
    storages = [param.data_ptr() for param in model.parameters()]
    moments = copy.deepcopy([{k: v for k, v in optimizer.state[p].items() if "exp" in k} for p in members(optimizer)])
    given = twin.state_dict()
    halfstep.load_weights(model, optimizer, given)
    found = halfstep.float32_state_dict(model, optimizer)
    assert list(found) == list(given)
    optimised = {id(param) for param in members(optimizer)}
    for name, target in model.state_dict(keep_vars=True).items():
        value = given[name]
        if id(target) not in optimised:
            rounded = value.to(target.dtype)
            assert_same(target.detach(), rounded)
            assert_same(found[name], rounded.float() if target.dtype is half else rounded)
            continue
        assert ((found[name] - value).abs() <= room(weights, value, half)).all()
        if weights in ("split16", "master32"):
            assert_same(found[name], value)
        assert ((target.float() - value).abs() <= room("stochastic", value, half)).all()
    assert [param.data_ptr() for param in model.parameters()] == storages
    for param, before in zip(members(optimizer), moments, strict=True):
        state = optimizer.state.get(param, {})
        assert state.get("step", 0) == (2 if stepped else 0)
        for key, value in before.items():
            assert_same(state[key], value)
    assert found["head.weight"] is found["embedding.weight"]
    assert found["norm.num_batches_tracked"].dtype is torch.int64
    drive(optimizer, range(2, 4))
    assert {optimizer.state[param]["step"] for param in members(optimizer)} == {4 if stepped else 2}
    # what came out is its own, and the twin's
    twin.load_state_dict(found, strict=True)
    assert ((found["head.weight"] - given["head.weight"]).abs() <= room(weights, given["head.weight"], half)).all()


@pytest.mark.parametrize(
    ("weights", "dtype"), [("split16", torch.bfloat16), ("master32", torch.bfloat16), ("master32", torch.float16)]
)
def test_p23_a_seeded_run_is_the_float32_run(weights: str, dtype: torch.dtype, backend: str) -> None:
    model, twin = nn.Linear(40, 33).to(dtype), nn.Linear(40, 33)
    half = halfstep.AdamW(model.parameters(), lr=1e-3, weights=weights, backend=backend)
    full = halfstep.AdamW(twin.parameters(), lr=1e-3, backend=backend)
    halfstep.load_weights(model, half, twin.state_dict())
    for number in range(20):
        gradients(half, number)
        for param, other in zip(members(full), members(half), strict=True):
            param.grad = other.grad.float()  # type: ignore[union-attr]
        half.step()
        full.step()
        for name, value in halfstep.float32_state_dict(model, half).items():
            assert_same(value, twin.state_dict()[name])


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_p23_through_a_file(suffix: str, half: torch.dtype, tmp_path: Path) -> None:
    (model, twin), file = models(half), tmp_path / f"weights.{suffix}"
    optimizer = optimizer_of(model, weights="master32")
    if suffix == "pt":
        torch.save(twin.state_dict(), file)
    else:
        halfstep.save_safetensors(twin.state_dict(), file)
    halfstep.load_weights(model, optimizer, file)
    found = halfstep.float32_state_dict(model, optimizer)
    assert_same(found["head.weight"], twin.head.weight.detach())
    halfstep.save_safetensors(found, tmp_path / "out.safetensors")
    theirs = safetensors.torch.load_file(tmp_path / "out.safetensors")
    assert "head.weight" not in theirs  # tied, and kept once
    assert_same(theirs["embedding.weight"], twin.head.weight.detach())
    other, _ = models(half, 1)
    again = optimizer_of(other, weights="master32")
    halfstep.load_weights(other, again, str(tmp_path / "out.safetensors"))
    assert_state(halfstep.float32_state_dict(other, again), found)


def test_p21_a_run_moves_to_torch_and_back(half: torch.dtype) -> None:
    model, twin = models(half)
    ours = optimizer_of(model, weights="master32")
    drive(ours, range(3))
    theirs = torch.optim.AdamW([p for p in twin.parameters() if p.requires_grad], lr=5.0)
    twin.load_state_dict(halfstep.float32_state_dict(model, ours))
    theirs.load_state_dict(halfstep.torch_state_dict(ours))
    assert theirs.param_groups[0]["lr"] == 1e-2
    for param, other in zip(members(theirs), members(ours), strict=True):
        assert_same(param.detach(), ours.float32_weight(other))
        assert theirs.state[param]["step"] == 3.0
        for key in ("exp_avg", "exp_avg_sq"):
            assert_same(theirs.state[param][key], ours.state[other][key])
    for optimizer in (ours, theirs):
        drive(optimizer, [])
    gradients(ours, 7)
    for param, other in zip(members(theirs), members(ours), strict=True):
        param.grad = other.grad.float()  # type: ignore[union-attr]
    ours.step()
    theirs.step()
    for param, other in zip(members(theirs), members(ours), strict=True):
        # a step of lr at most, in float32, whose operations torch orders otherwise: each rounds to half an ulp, of the
        # weight or of the step
        weight = ours.float32_weight(other)
        assert ((param - weight).abs() <= 2.0**-22 * weight.abs() + 1e-2 * 2.0**-20).all()
    # and back: the weights first, or the state first
    for first in ("weights", "state"):
        fresh, _ = models(half, 2)
        again = optimizer_of(fresh, weights="master32")
        loads = [
            lambda m=fresh, o=again: halfstep.load_weights(m, o, twin.state_dict()),
            lambda o=again: o.load_state_dict(theirs.state_dict()),
        ]
        for load in loads if first == "weights" else reversed(loads):
            load()
        for param, other in zip(members(again), members(theirs), strict=True):
            assert_same(again.float32_weight(param), other.detach())
            assert again.state[param]["step"] == 4
            assert_same(again.state[param]["exp_avg"], theirs.state[other]["exp_avg"])


def test_p21_every_optimizers_state_goes_out_in_float32(half: torch.dtype) -> None:
    for name in ("Lion", "SGD", "AdamFP16"):
        model, _ = models(half)
        optimizer = optimizer_of(model, name, moments="block8", momentum=0.9)
        drive(optimizer, range(2))
        state = halfstep.torch_state_dict(optimizer)
        assert not {"weights", "moments", "seed", "layout"} & state["param_groups"][0].keys()
        for entry in state["state"].values():
            assert {value.dtype for value in entry.values()} == {torch.float32}
            assert not {key for key in entry if "code" in key or key in ("mantissa", "stream")}
        other, _ = models(half)
        back = optimizer_of(other, name, momentum=0.9)
        back.load_state_dict(state)
        assert {back.state[param]["step"] for param in members(back)} == {2}
    for entry in optimizer.state.values():
        entry["step"] = 2**24 + 1
    with pytest.raises(ValueError, match=r"has had 16777217 steps: torch counts in float32, exactly up to 16777216"):
        halfstep.torch_state_dict(optimizer)


def test_p23_torchs_state_of_no_step_leaves_the_seeds(half: torch.dtype) -> None:
    model, twin = models(half)
    optimizer = optimizer_of(model, weights="master32")
    halfstep.load_weights(model, optimizer, twin.state_dict())
    optimizer.load_state_dict(torch.optim.AdamW([p for p in twin.parameters() if p.requires_grad]).state_dict())
    assert_same(halfstep.float32_state_dict(model, optimizer)["head.weight"], twin.head.weight.detach())


def test_p23_two_optimizers_and_an_average(half: torch.dtype) -> None:
    model, twin = models(half)
    named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    pair = [make("AdamW", named[:2], weights="master32"), make("Lion", named[2:], weights="master32")]
    halfstep.load_weights(model, pair, twin.state_dict())
    found = halfstep.float32_state_dict(model, pair)
    for name, _ in named:
        assert_same(found[name], twin.state_dict()[name])
    averages = [halfstep.EMA(optimizer, 0.5) for optimizer in pair]
    for optimizer, average in zip(pair, averages, strict=True):
        drive(optimizer, range(2))
        average.update()
    averaged = halfstep.float32_state_dict(model, averages)
    for name, param in named:
        owner = averages[0] if name in dict(named[:2]) else averages[1]
        assert_same(averaged[name], owner.float32_weight(param))
    assert not torch.equal(averaged["scalar"], halfstep.float32_state_dict(model, pair)["scalar"])


def test_p09_float16_weights_past_the_largest_are_counted() -> None:
    model = nn.Linear(3, 1, bias=False).half()
    optimizer = halfstep.AdamW(model.named_parameters())
    with pytest.warns(RuntimeWarning, match=r"^weight: 2 of 3 weights went past 65504"):
        halfstep.load_weights(model, optimizer, {"weight": torch.tensor([[1e6, 1.0, -7e4]])})
    assert model.weight.tolist() == [[65504.0, 1.0, -65504.0]]


REFUSED: dict[str, tuple[Any, str]] = {
    "missing": (
        lambda s: s.pop("norm.bias"),
        r"^float32_state lacks 'norm\.bias'\. To load a part of it, complete it with what there is: "
        r"\{\*\*halfstep\.float32_state_dict\(model, optimizer\), \*\*part\}$",
    ),
    "unknown": (lambda s: s.update(new=torch.ones(1)), r"^float32_state has 'new', unknown to the model\. To load"),
    "both": (
        lambda s: (s.pop("scalar"), s.update(new=torch.ones(1))),
        r"^float32_state lacks 'scalar' and has 'new', unknown to the model",
    ),
    "a shape": (
        lambda s: s.update(turned=torch.zeros(6, 5)),
        r"^float32_state\['turned'\] has shape \(6, 5\), and the model's is \(5, 6\)$",
    ),
    "integers": (
        lambda s: s.update(scalar=torch.tensor(1)),
        r"^float32_state\['scalar'\] is torch\.int64 of layout torch\.strided, and the model's torch\.b?float16$",
    ),
    "complex": (
        lambda s: s.update(scalar=torch.tensor(1j)),
        r"^float32_state\['scalar'\] is torch\.complex64 of layout",
    ),
    "sparse": (
        lambda s: s.update(turned=torch.zeros(5, 6).to_sparse()),
        r"\['turned'\] is .* layout torch\.sparse_coo",
    ),
    "no tensor": (lambda s: s.update(scalar=1.0), r"^float32_state\['scalar'\] is a float, not a tensor$"),
    # the last of all names, so that a fault met only on the way would leave the others written
    "no values": (
        lambda s: s.update({"frozen.bias": torch.zeros(2, device="meta")}),
        r"^float32_state\['frozen\.bias'\] is on the meta device and has no values",
    ),
    "tied apart": (
        lambda s: s.update({"head.weight": s["head.weight"] + 1}),
        r"^float32_state\['head\.weight'\] differs from 'embedding\.weight', which is the same tensor in the model$",
    ),
}


@pytest.mark.parametrize(("spoil", "text"), REFUSED.values(), ids=REFUSED)
def test_p23_a_checkpoint_that_does_not_fit_changes_nothing(spoil: Any, text: str, half: torch.dtype) -> None:
    model, twin = models(half)
    optimizer = optimizer_of(model)
    drive(optimizer, range(1))
    state = twin.state_dict()
    spoil(state)
    before, kept = Snapshot(optimizer), copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=text):
        halfstep.load_weights(model, optimizer, state)
    before.check()
    assert_state(model.state_dict(), kept)


def test_a_tied_name_that_is_missing_and_a_part_are_no_failure(half: torch.dtype) -> None:
    model, twin = models(half)
    optimizer = optimizer_of(model, weights="master32")
    state = twin.state_dict()
    del state["embedding.weight"]
    halfstep.load_weights(model, optimizer, state)
    assert_same(halfstep.float32_state_dict(model, optimizer)["embedding.weight"], twin.head.weight.detach())
    part = {"scalar": torch.tensor(1 / 3)}
    halfstep.load_weights(model, optimizer, {**halfstep.float32_state_dict(model, optimizer), **part})
    assert_same(halfstep.float32_state_dict(model, optimizer)["scalar"], torch.tensor(1 / 3))
    assert_same(halfstep.float32_state_dict(model, optimizer)["turned"], twin.turned.detach().contiguous())


def test_p23_any_iterable_of_optimizers_will_do(half: torch.dtype) -> None:
    model, twin = models(half)
    named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    pair = {"a": make("AdamW", named[:2], weights="master32"), "b": make("Lion", named[2:], weights="master32")}
    halfstep.load_weights(model, (each for each in pair.values()), twin.state_dict())
    for several in (pair.values(), set(pair.values()), iter(pair.values())):
        found = halfstep.float32_state_dict(model, several)
        for name, _ in named:
            assert_same(found[name], twin.state_dict()[name])


def test_p23_tied_names_may_come_in_several_dtypes(half: torch.dtype) -> None:
    model, twin = models(half)
    optimizer, state = optimizer_of(model, weights="master32"), twin.state_dict()
    # a third of float64 is rounded once, to what the other name has
    state["head.weight"] = torch.full_like(state["head.weight"], 1 / 3, dtype=torch.float64)
    state["embedding.weight"] = state["head.weight"].float()
    halfstep.load_weights(model, optimizer, state)
    assert_same(optimizer.float32_weight(model.head.weight), state["embedding.weight"])
    # what only 16 bits make the same is not
    state["head.weight"] = state["embedding.weight"] + 2.0**-20
    with pytest.raises(ValueError, match="which is the same tensor in the model"):
        halfstep.load_weights(model, optimizer, state)


class Extra(nn.Module):
    """A module whose extra state is what it is given."""

    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.line, self.extra = nn.Linear(2, 2), extra

    def get_extra_state(self) -> Any:
        return copy.copy(self.extra)

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.mark.parametrize(("old", "new"), [(torch.zeros(3), torch.arange(5.0)), ({}, torch.ones(2)), ({}, {"n": 1})])
def test_p23_extra_state_is_set_by_its_module(old: Any, new: Any, half: torch.dtype) -> None:
    model, twin = nn.Sequential(Extra(old)).to(half), nn.Sequential(Extra(new))
    optimizer = halfstep.AdamW(model.parameters(), weights="master32")
    halfstep.load_weights(model, optimizer, twin.state_dict())
    found = halfstep.float32_state_dict(model, optimizer)
    assert torch.equal(found["0._extra_state"], new) if isinstance(new, Tensor) else found["0._extra_state"] == new
    assert_same(found["0.line.weight"], twin.state_dict()["0.line.weight"])


def test_p09_a_warning_that_is_an_error_comes_when_all_is_written() -> None:
    model = nn.Linear(3, 2).half()
    optimizer = halfstep.AdamW(model.named_parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match=r"^weight: 6 of 6 weights went past 65504"):
            halfstep.load_weights(model, optimizer, {"weight": torch.full((2, 3), 1e6), "bias": torch.tensor([1.0, 2])})
    assert model.weight.unique().tolist() == [65504.0]
    assert model.bias.tolist() == [1.0, 2.0]


def test_other_optimizers_are_refused_by_name(half: torch.dtype) -> None:
    model, twin = models(half)
    other = torch.optim.SGD(twin.parameters())
    text = r"^optimizer is a torch\.optim\.sgd\.SGD: must be one of halfstep's"
    with pytest.raises(TypeError, match=text):
        halfstep.load_weights(model, other, twin.state_dict())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=text):
        halfstep.float32_state_dict(model, [optimizer_of(model), other])  # type: ignore[list-item]
    with pytest.raises(TypeError, match=text):
        halfstep.torch_state_dict(other)  # type: ignore[arg-type]


def test_p19_a_seeded_state_is_saved_and_goes_on(half: torch.dtype) -> None:
    model, twin = models(half)
    optimizer = optimizer_of(model, weights="split8", moments="block8")
    halfstep.load_weights(model, optimizer, twin.state_dict())
    other, _ = models(half, 1)
    again = optimizer_of(other, weights="split8", moments="block8")
    other.load_state_dict(model.state_dict())
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each in (optimizer, again):
        drive(each, range(3))
    assert_alike(optimizer, again)


def test_p20_chance_is_that_of_a_loaded_state(half: torch.dtype) -> None:
    # weights that come in by themselves, and as a state's float32 copies, are the same weights
    model, twin = models(half)
    optimizer = optimizer_of(model, weights="split8", seed=3)
    halfstep.load_weights(model, optimizer, twin.state_dict())
    other, _ = models(half, 1)
    exact, again = (optimizer_of(other, weights=weights, seed=3) for weights in ("master32", "split8"))
    halfstep.load_weights(other, exact, twin.state_dict())
    again.load_state_dict(exact.state_dict())
    assert_alike(again, optimizer)
