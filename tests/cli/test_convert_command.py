"""`halfstep convert`: checkpoints between files, formats, torch and float32, and never half a file."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep
from cli.test_process import outcome
from halfstep.cli import converting
from harness import assert_equal, assert_same
from training import Tied, drive, make, members


class Saved:
    """A run that was saved: model, optimizer of named params in two groups, scaler, and a number."""

    def __init__(self, folder: Path, half: torch.dtype = torch.bfloat16, name: str = "AdamW", **options: Any) -> None:
        torch.manual_seed(0)
        self.model = Tied().to(half)
        params = [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]
        groups = [{"params": params[:1], "lr": 0.5}, {"params": params[1:]}]
        self.optimizer = make(name, groups, seed=5, momentum=0.9, **options)
        drive(self.optimizer, range(3))
        self.state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": halfstep.GradScaler("cpu").state_dict(),
            "epoch": 3,
        }
        self.file = folder / "run.pt"
        torch.save(self.state, self.file)

    def again(self, **options: Any) -> tuple[Tied, Any]:
        """A fresh model and optimizer."""
        model = Tied().to(next(self.model.parameters()).dtype)
        params = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        groups = [{"params": params[:1]}, {"params": params[1:]}]
        return model, make(type(self.optimizer).__name__, groups, momentum=0.9, **options)


def read(file: Path) -> Any:
    if file.suffix == ".safetensors":
        return halfstep.load_safetensors(file)
    return torch.load(file, weights_only=True)


def convert(capsys: pytest.CaptureFixture, *arguments: Any) -> str:
    code, output, error = outcome(capsys, "convert", *map(str, arguments))
    assert (code, error) == (0, "")
    return output


def test_between_files_nothing_changes(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    saved = Saved(tmp_path, moments="block8")
    output = convert(capsys, saved.file, tmp_path / "run.safetensors")
    assert output.startswith(f"Reading {saved.file}, ")
    assert f"In {tmp_path / 'run.safetensors'}: " in output
    plain = {**saved.state, "model": dict(saved.state["model"])}
    assert_equal(read(tmp_path / "run.safetensors"), plain)
    convert(capsys, tmp_path / "run.safetensors", tmp_path / "back.pt")
    assert_equal(read(tmp_path / "back.pt"), plain)
    model = read(tmp_path / "back.pt")["model"]
    assert model["head.weight"].data_ptr() == model["embedding.weight"].data_ptr()


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("name", ["AdamW", "Lion", "SGD"])
@pytest.mark.parametrize(("weights", "moments"), [("split8", "block8"), ("master32", "bfloat16"), (None, "block8")])
def test_formats_are_converted_as_loading_converts(
    capsys: pytest.CaptureFixture, tmp_path: Path, name: str, weights: str | None, moments: str, suffix: str
) -> None:
    saved, out = Saved(tmp_path, name=name), tmp_path / f"out{suffix}"
    asked = [*(["--weights", weights] if weights else []), "--moments", moments]
    output = convert(capsys, saved.file, out, *asked)
    assert "4 params converted." in output
    assert " to block8, 1 tensor, 4,480 values, " in output or moments != "block8"
    found = read(out)
    # as if the optimizer had loaded it
    model, optimizer = saved.again(weights=weights or "split16", moments=moments)
    model.load_state_dict(saved.state["model"])
    optimizer.load_state_dict(saved.state["optimizer"])
    assert_equal(found["optimizer"]["state"], optimizer.state_dict()["state"])
    assert_equal(dict(found["model"]), dict(model.state_dict()))
    assert (found["epoch"], found["scaler"]) == (3, saved.state["scaler"])
    for group, theirs in zip(found["optimizer"]["param_groups"], optimizer.state_dict()["param_groups"], strict=True):
        assert {k: v for k, v in group.items() if k in theirs} == theirs
    # and it is gone on with
    other, again = saved.again(weights=weights or "split16", moments=moments)
    other.load_state_dict(found["model"])
    again.load_state_dict(found["optimizer"])
    assert again.conversions() == []
    drive(again, range(3, 5))


def test_to_float32_gives_the_weights_alone(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    saved, out = Saved(tmp_path, torch.float16, weights="split8"), tmp_path / "weights.safetensors"
    convert(capsys, saved.file, out, "--to", "float32")
    expected = halfstep.float32_state_dict(saved.model, saved.optimizer)
    found = read(out)
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert_same(found[name], value)
    twin = Tied()
    twin.load_state_dict(found)


def test_to_torch_gives_what_torch_goes_on_with(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    saved, out = Saved(tmp_path, moments="block8"), tmp_path / "torch.pt"
    convert(capsys, saved.file, out, "--to", "torch")
    found, twin = read(out), Tied()
    twin.load_state_dict(found["model"])
    params = [p for p in twin.parameters() if p.requires_grad]
    theirs = torch.optim.AdamW([{"params": params[:1]}, {"params": params[1:]}])
    theirs.load_state_dict(found["optimizer"])
    for param, other in zip(members(theirs), members(saved.optimizer), strict=True):
        assert_same(param.detach(), saved.optimizer.float32_weight(other))
    assert theirs.param_groups[0]["lr"] == 0.5
    drive(theirs, range(1))
    # and torch's own comes in, names or not
    torch.save({"model": twin.bfloat16().state_dict(), "optimizer": theirs.state_dict()}, tmp_path / "theirs.pt")
    convert(capsys, tmp_path / "theirs.pt", tmp_path / "ours.pt", "--weights", "split16")
    assert read(tmp_path / "ours.pt")["optimizer"]["state"][0]["step"] == 4


def test_a_state_alone_converts_its_moments(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    params = [nn.Parameter(torch.randn(70, 64, dtype=torch.bfloat16)), nn.Parameter(torch.randn(3).bfloat16())]
    optimizer = make("AdamW", params, weights="stochastic", seed=4)
    drive(optimizer, range(2))
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    convert(capsys, tmp_path / "state.pt", tmp_path / "out.pt", "--moments", "block8")
    other = make("AdamW", [nn.Parameter(p.detach().clone()) for p in params], weights="stochastic", moments="block8")
    other.load_state_dict(optimizer.state_dict())
    assert_equal(read(tmp_path / "out.pt")["state"], other.state_dict()["state"])


def test_what_lies_beside_and_how_the_run_stepped_stay(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    saved, out = Saved(tmp_path), tmp_path / "out.pt"
    ema = halfstep.EMA(saved.optimizer)
    optimizer: Any = saved.state["optimizer"]
    # another machine's choices, a rate as a cosine leaves it at its end, a scheduler's own entry, and an empty group
    for group in optimizer["param_groups"]:
        group.update(backend="gpu", capturable=True, lr=-1e-20, initial_lr=0.5)
    optimizer["param_groups"].append({**optimizer["param_groups"][0], "params": [], "param_names": [], "lr": 0.25})
    beside = {"ema": ema.state_dict(), "rng": torch.get_rng_state(), "rngs": {"cpu": torch.get_rng_state()}}
    torch.save({**saved.state, **beside}, saved.file)
    convert(capsys, saved.file, out, "--moments", "block8")
    found = read(out)
    assert_equal({name: found[name] for name in beside}, beside)
    for group, old in zip(found["optimizer"]["param_groups"], optimizer["param_groups"], strict=True):
        assert group == {**old, "moments": "block8"}
    convert(capsys, saved.file, tmp_path / "torch.pt", "--to", "torch")
    for group in read(tmp_path / "torch.pt")["optimizer"]["param_groups"]:
        assert group["capturable"]
        assert group["initial_lr"] == 0.5


ERRORS = {
    "no file": (["absent.pt", "out.pt"], "IN absent.pt: there is no such file"),
    "a file that is none": (["junk.pt", "out.pt"], "IN junk.pt: cannot be read as a checkpoint: "),
    "cut short": (["cut.pt", "out.pt"], "IN cut.pt: cannot be read as a checkpoint: "),
    "cut safetensors": (["cut.safetensors", "out.pt"], "IN cut.safetensors: cannot be read as a checkpoint: "),
    "there already": (["run.pt", "junk.pt"], "OUT junk.pt: there is such a file; add --overwrite to replace it"),
    "a suffix": (["run.pt", "out.zip"], "OUT out.zip: must end in one of .safetensors, .pt, .pth, .bin, .ckpt"),
    "no folder": (["run.pt", "no/out.pt"], "OUT no/out.pt: there is no folder no"),
    "a format": (["run.pt", "out.pt", "--weights", "int4"], "--weights int4: must be one of split16, split8, "),
    "an aim": (["run.pt", "out.pt", "--to", "jax"], "--to jax: must be one of halfstep, torch, float32"),
    "two aims": (
        ["run.pt", "out.pt", "--to", "torch", "--moments", "block8"],
        "--to torch: is float32 throughout; leave --weights and --moments out",
    ),
    "nothing in it": (["empty.pt", "out.pt"], "IN: holds neither a model's state nor an optimizer's"),
    "no optimizer": (["model.pt", "out.pt", "--moments", "block8"], "IN: holds no optimizer's state, so there are no"),
    "no optimizer for torch": (["model.pt", "out.pt", "--to", "torch"], "--to torch: IN holds no optimizer's state"),
    "no model": (
        ["state.pt", "out.pt", "--weights", "split8"],
        "IN: param 0 cannot be converted without the model: the float32 weight is in both; give a checkpoint that",
    ),
    "no model for float32": (["state.pt", "out.pt", "--to", "float32"], "--to float32: IN holds 0 models' states, and"),
    "whose": (
        ["nameless.pt", "out.pt", "--weights", "split8"],
        "IN: optimizer has 4 params without names in 2 groups, the model 8 tensors: it cannot be told which belongs",
    ),
    "another model": (
        ["other.pt", "out.pt", "--weights", "split8"],
        "IN: optimizer names params that the model has not: embedding.weight, head.bias",
    ),
    "names for some": (
        ["some.pt", "out.pt", "--weights", "split8"],
        "IN: optimizer has 4 params and 3 names of them; save it from an optimizer of named params",
    ),
    "a state that does not fit": (
        ["spoiled.pt", "out.pt", "--moments", "block8"],
        "IN: the state for head.bias does not fit: its 'exp_avg' holds NaN: ",
    ),
}


@pytest.mark.parametrize(("arguments", "text"), ERRORS.values(), ids=ERRORS)
def test_what_cannot_be_is_told_in_a_line_and_writes_nothing(
    capsys: pytest.CaptureFixture, tmp_path: Path, arguments: list[str], text: str
) -> None:
    state = Saved(tmp_path).state
    whole = (tmp_path / "run.pt").read_bytes()
    (tmp_path / "junk.pt").write_bytes(b"no checkpoint")
    (tmp_path / "cut.pt").write_bytes(whole[: len(whole) // 2])
    halfstep.save_safetensors(state, tmp_path / "cut.safetensors")
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "cut.safetensors").read_bytes()[:-9])
    torch.save({"epoch": 1}, tmp_path / "empty.pt")
    torch.save(state["model"], tmp_path / "model.pt")
    torch.save(state["optimizer"], tmp_path / "state.pt")
    groups = [{k: v for k, v in g.items() if k != "param_names"} for g in state["optimizer"]["param_groups"]]
    nameless = {**state["optimizer"], "param_groups": groups}
    torch.save({**state, "optimizer": nameless}, tmp_path / "nameless.pt")
    some = [{**g, "param_names": g["param_names"][:2]} for g in state["optimizer"]["param_groups"]]
    torch.save({**state, "optimizer": {**state["optimizer"], "param_groups": some}}, tmp_path / "some.pt")
    torch.save({**state, "model": {"w": torch.ones(2)}}, tmp_path / "other.pt")
    state["optimizer"]["state"][1]["exp_avg"][0] = torch.nan
    torch.save(state, tmp_path / "spoiled.pt")
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    with contextlib.chdir(tmp_path):
        code, _, error = outcome(capsys, "convert", *arguments)
    assert code == 2
    assert error.startswith(f"halfstep: {text}")
    assert error.count("\n") == 1
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_overwriting_is_asked_for_and_whole(
    capsys: pytest.CaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, out = Saved(tmp_path), tmp_path / "out.pt"
    out.write_bytes(b"old")
    torch_save = torch.save

    def fails(content: Any, file: Path) -> None:
        torch_save(content, file)
        raise OSError(28, "No space left on device", str(file))

    monkeypatch.setattr(converting.torch, "save", fails)
    code, _, error = outcome(capsys, "convert", str(saved.file), str(out), "--overwrite")
    assert code == 1
    assert "No space left on device" in error
    assert out.read_bytes() == b"old"
    assert sorted(tmp_path.iterdir()) == [out, saved.file]
    monkeypatch.undo()
    convert(capsys, saved.file, out, "--overwrite")
    assert isinstance(read(out)["model"]["norm.bias"], Tensor)
    # in place, too
    convert(capsys, saved.file, saved.file, "--overwrite", "--moments", "block8")
    assert "exp_avg_code" in read(saved.file)["optimizer"]["state"][0]
