"""Four ways in one table and one picture."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from halfstep.cli import compare as module
from halfstep.cli.compare import compare
from halfstep.cli.errors import InputError
from halfstep.cli.settings import Settings, Sizes
from halfstep.cli.training import Training


@pytest.fixture
def settings(tmp_path: Path, text: Path, tiny: Sizes) -> Any:
    return lambda **changes: Settings(out=tmp_path / "out", text=text, sizes=tiny, **{"steps": 5, **changes})


def ways(settings: Settings) -> dict[str, dict[str, Any]]:
    return {way["name"]: way for way in json.loads((settings.out / "compare.json").read_text())["ways"]}


def test_float16(settings: Any, console: Console, capsys: pytest.CaptureFixture) -> None:
    made = settings()
    assert compare(made, console) == 0
    assert {file.name for file in made.out.iterdir()} == {"compare.json", "compare.md", "compare.png"}
    found = ways(made)
    assert list(found) == [
        "torch AdamW, float32",
        "torch AdamW, float16",
        "halfstep split16, float16",
        "halfstep master32, float16",
    ]
    full, plain, split, master = found.values()
    assert [step for step, _ in full["curve"]] == [2, 4, 5]
    assert full["validation_loss"] == full["curve"][-1][1]
    # Stock AdamW's eps of 1e-8 is 0 in float16, and so is the square of a small gradient: 0 / 0.
    assert (plain["validation_loss"], plain["broke_at_step"], plain["broke_how"]) == (None, 1, "NaN from step 1")
    for way in (split, master):
        assert way["validation_loss"] == pytest.approx(full["validation_loss"], rel=5e-3)
        assert way["percent_from_float32"] == pytest.approx(
            100 * (way["validation_loss"] / full["validation_loss"] - 1), abs=1e-12
        )
        assert way["skipped"] == 0
        assert way["optimizer_milliseconds"] > 0
    output = capsys.readouterr().out
    table = (made.out / "compare.md").read_text()
    for text in (output, table):
        assert all(name in text for name in found)
        assert "NaN from step 1" in text
        assert f"{split['validation_loss']:.4f}" in text
    assert table.startswith(f"`halfstep train --out {made.out} --text {made.text} --steps 5 --compare`\n")


def test_bytes_are_those_really_held(settings: Any, console: Console) -> None:
    for dtype, at_step in (("float16", 2), ("bfloat16", 0)):
        made = settings(dtype=dtype)
        compare(made, console)
        held = {name: round(way["bytes_after_backward"], 1) for name, way in ways(made).items()}
        before = {name: round(way["bytes_before_step"], 1) for name, way in ways(made).items()}
        # Weights, gradients, two moments, and what the format keeps.
        assert held == {
            "torch AdamW, float32": 4 + 4 + 8,
            f"torch AdamW, {dtype}": 2 + 2 + 4,
            f"halfstep split16, {dtype}": 2 + 2 + 8 + 2,
            f"halfstep master32, {dtype}": 2 + 2 + 8 + 4,
        }
        # A float16 gradient is unscaled to float32 before it is clipped.
        assert before == {name: size + (at_step if "halfstep" in name else 0) for name, size in held.items()}


def test_without_clipping_no_float32_gradient_is_held(settings: Any, console: Console) -> None:
    made = settings(clip=0.0)
    compare(made, console)
    for way in ways(made).values():
        assert way["bytes_before_step"] == way["bytes_after_backward"]


def test_all_ways_see_the_same_batches_from_the_same_start(
    settings: Any, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts, losses = [], []
    backward = Training.backward

    def watched(self: Training, step: int) -> float:
        if step == 1:
            starts.append([param.detach().clone() for param in self.model.parameters()])
        loss = backward(self, step)
        if step == 1:
            losses.append(loss)
        return loss

    monkeypatch.setattr(Training, "backward", watched)
    compare(settings(dtype="bfloat16", steps=1), console)
    full, *halves = starts
    assert len(halves) == 3
    for half in halves:
        assert all(torch.equal(one, other.bfloat16()) for one, other in zip(half, full, strict=True))
    assert losses[1] == losses[2] == losses[3]
    # The float32 loss differs by the rounding of weights and activations, 2**-9 of a loss near 5.5.
    assert losses[0] == pytest.approx(losses[1], abs=5.5 * 2**-9)


def test_an_exception_of_plain_torch_is_a_row(
    settings: Any, console: Console, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def failing(*_: object, **__: object) -> None:
        raise RuntimeError("\"lerp_kernel\" not implemented for 'Half'")

    adamw = torch.optim.AdamW

    def make(params: Any, lr: float) -> torch.optim.Optimizer:
        optimizer = adamw(params, lr=lr)
        if params[0].dtype == torch.float16:
            monkeypatch.setattr(optimizer, "step", failing)
        return optimizer

    monkeypatch.setattr(torch.optim, "AdamW", make)
    made = settings()
    assert compare(made, console) == 0
    plain = ways(made)["torch AdamW, float16"]
    assert (plain["broke_at_step"], plain["broke_how"]) == (1, "RuntimeError in step 1")
    assert "RuntimeError in step 1" in capsys.readouterr().out


def test_an_exception_of_ours_is_none(settings: Any, console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    apply = Training.apply

    def failing(self: Training) -> bool:
        if self.scaler.is_enabled():
            raise RuntimeError("broken")
        return apply(self)

    monkeypatch.setattr(Training, "apply", failing)
    with pytest.raises(RuntimeError, match="broken"):
        compare(settings(), console)


def test_a_comparison_is_replaced_by_a_new_one(settings: Any, console: Console) -> None:
    compare(settings(steps=2), console)
    first = ways(settings())["torch AdamW, float32"]["validation_loss"]
    compare(settings(steps=3), console)
    assert ways(settings())["torch AdamW, float32"]["validation_loss"] != first


def test_float32_has_nothing_to_compare(settings: Any, console: Console) -> None:
    with pytest.raises(InputError) as error:
        compare(settings(dtype="float32"), console)
    assert str(error.value) == (
        "--dtype float32: --compare sets a 16-bit dtype beside float32; choose float16 or bfloat16"
    )
    assert not settings().out.exists()


def test_moments_reach_halfsteps_optimizers(settings: Any, console: Console) -> None:
    with pytest.raises(InputError, match="moments='float7'"):
        compare(settings(moments="float7"), console)
    assert not settings().out.exists()


def test_stopped_it_keeps_nothing(
    settings: Any, console: Console, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    class Stopped(module.Interrupt):
        def __enter__(self) -> "Stopped":
            self.signal = 2
            return self

    monkeypatch.setattr(module, "Interrupt", Stopped)
    made = settings()
    assert compare(made, console) == 130
    assert list(made.out.iterdir()) == []
    assert f"To start again:\n  halfstep train --out {made.out} " in capsys.readouterr().out
