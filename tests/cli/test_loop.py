"""A run: what it leaves, and that stopping it changes nothing."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from halfstep.cli import loop, training
from halfstep.cli.errors import InputError
from halfstep.cli.loop import run
from halfstep.cli.settings import Settings, Sizes
from halfstep.cli.training import Training
from harness import assert_equal

PNG = b"\x89PNG\r\n\x1a\n"
FILES = {"checkpoint.pt", "loss.png", "metrics.jsonl", "sample.txt", "summary.json"}


@pytest.fixture
def settings(tmp_path: Path, text: Path, tiny: Sizes) -> Any:
    """Return a maker of settings for a folder of the given name."""
    return lambda out, **changes: Settings(out=tmp_path / out, text=text, sizes=tiny, **{"steps": 8, **changes})


def checkpoint(out: Path) -> dict[str, Any]:
    """Return a run's checkpoint."""
    return torch.load(out / "checkpoint.pt", weights_only=True)


def rows(out: Path) -> list[dict[str, Any]]:
    """Return the rows but for their times."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        assert line.pop("tokens_per_second") > 0
    return lines


def assert_same_run(ours: Path, theirs: Path) -> None:
    assert_equal(checkpoint(ours), checkpoint(theirs), ordered=False)
    assert rows(ours) == rows(theirs)
    assert (ours / "sample.txt").read_text() == (theirs / "sample.txt").read_text()


def interrupt_after(monkeypatch: pytest.MonkeyPatch, step: int, number: int) -> None:
    """Send the signal in the midst of ``step``, once."""
    backward = Training.backward

    def interrupted(self: Training, now: int) -> float:
        if now == step:
            monkeypatch.setattr(Training, "backward", backward)
            os.kill(os.getpid(), number)
        return backward(self, now)

    monkeypatch.setattr(Training, "backward", interrupted)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_run_leaves_its_files(settings: Any, console: Console, capsys: pytest.CaptureFixture, dtype: str) -> None:
    made = settings("run", dtype=dtype)
    assert run(made, False, console) == 0
    assert {file.name for file in made.out.iterdir()} == FILES
    assert (made.out / "loss.png").read_bytes().startswith(PNG)
    assert [row["step"] for row in rows(made.out)] == list(range(1, 9))
    assert [row["step"] for row in rows(made.out) if "validation_loss" in row] == [2, 4, 6, 8]
    assert [row["scale"] for row in rows(made.out)] == [65536.0 if dtype == "float16" else None] * 8
    summary = json.loads((made.out / "summary.json").read_text())
    assert summary["validation_loss"] == rows(made.out)[-1]["validation_loss"]
    assert (summary["steps"], summary["skipped"], summary["settings"]["dtype"]) == (8, 0, dtype)
    assert {param.dtype for param in checkpoint(made.out)["model"].values()} == {made.torch_dtype}
    output = capsys.readouterr().out
    assert "step 8/8  loss " in output
    assert "tokens/s" in output
    assert ("scale 65536" in output) == (dtype == "float16")
    assert (made.out / "sample.txt").read_text().strip() in output
    assert f"after 8 steps, 0 skipped. In {made.out}: " in output


def test_the_loss_falls(settings: Any, console: Console) -> None:
    made = settings("run", steps=30, lr=1e-2)
    run(made, False, console)
    losses = [row["loss"] for row in rows(made.out)]
    # 30 steps on one repeated sentence take a nat off at the least.
    assert sum(losses[-5:]) / 5 < sum(losses[:5]) / 5 - 1


@pytest.mark.parametrize(
    ("dtype", "number"),
    [
        ("float16", signal.SIGINT),
        ("float16", signal.SIGTERM),
        ("bfloat16", signal.SIGINT),
        ("float32", signal.SIGINT),
    ],
)
def test_interrupted_and_resumed_is_as_if_never_stopped(
    settings: Any,
    console: Console,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    dtype: str,
    number: signal.Signals,
) -> None:
    whole, parts = settings("whole", dtype=dtype), settings("parts", dtype=dtype)
    run(whole, False, console)
    interrupt_after(monkeypatch, 5, number)
    handler = signal.getsignal(number)
    assert run(parts, False, console) == 128 + number
    assert signal.getsignal(number) is handler
    assert checkpoint(parts.out)["step"] == 5
    assert [row["step"] for row in rows(parts.out)] == [1, 2, 3, 4, 5]
    assert "Stopped and saved after step 5. To go on:\n  halfstep train --out " in capsys.readouterr().out
    assert run(parts, True, console) == 0
    assert "Resuming after step 5" in capsys.readouterr().out
    assert_same_run(parts.out, whole.out)


def test_a_run_can_be_extended(settings: Any, console: Console) -> None:
    run(settings("whole", steps=7), False, console)
    run(settings("parts", steps=3), False, console)
    run(settings("parts", steps=5), True, console)
    run(settings("parts", steps=7), True, console)
    assert_same_run(settings("parts").out, settings("whole").out)


def test_skipped_steps_are_counted_and_survive_a_resume(
    settings: Any, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    backward = Training.backward

    def overflowing(self: Training, step: int) -> float:
        loss = backward(self, step)
        gradient = next(self.model.parameters()).grad
        if step in (2, 6) and gradient is not None:
            gradient.fill_(float("inf"))
        return loss

    monkeypatch.setattr(Training, "backward", overflowing)
    run(settings("whole"), False, console)
    run(settings("parts", steps=4), False, console)
    run(settings("parts"), True, console)
    assert_same_run(settings("parts").out, settings("whole").out)
    assert [row["skipped"] for row in rows(settings("parts").out)] == [0, 1, 1, 1, 1, 2, 2, 2]
    assert [row["scale"] for row in rows(settings("parts").out)] == [65536.0] * 2 + [32768.0] * 4 + [16384.0] * 2


def test_killed_at_any_moment_it_resumes_to_the_same_bits(
    settings: Any, console: Console, text: Path, tmp_path: Path
) -> None:
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); from conftest import TINY; from pathlib import Path\n"
        "from rich.console import Console; from halfstep.cli.loop import run\n"
        "from halfstep.cli.settings import Settings\n"
        "settings = Settings(out=Path(sys.argv[2]), text=Path(sys.argv[3]), steps=10**6, sizes=TINY)\n"
        "run(settings, False, Console())"
    )
    parts = tmp_path / "parts"
    folder = str(Path(__file__).parent)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", program, folder, str(parts), str(text)], stdout=subprocess.DEVNULL, env=environment
    )
    try:
        deadline = time.monotonic() + 60
        while not (parts / "metrics.jsonl").exists() or len((parts / "metrics.jsonl").read_bytes()) < 2000:
            assert process.poll() is None, "the run ended by itself"
            assert time.monotonic() < deadline, "the run wrote nothing in a minute"
            time.sleep(0.001)
    finally:
        process.kill()
        process.wait()
    step = checkpoint(parts)["step"]
    assert step >= 3
    assert run(settings("parts", steps=step + 4), True, console) == 0
    assert run(settings("whole", steps=step + 4), False, console) == 0
    assert_same_run(parts, settings("whole").out)


def refusal(settings: Settings, resume: bool, console: Console) -> str:
    before = {file: file.read_bytes() for file in settings.out.parent.rglob("*") if file.is_file()}
    with pytest.raises(InputError) as error:
        run(settings, resume, console)
    assert {file: file.read_bytes() for file in settings.out.parent.rglob("*") if file.is_file()} == before
    return str(error.value)


def test_a_run_is_not_overwritten(settings: Any, console: Console) -> None:
    made = settings("run", steps=1)
    run(made, False, console)
    assert refusal(made, False, console) == (
        f"--out {made.out}: already holds a run; add --resume to go on with it, give another --out, or delete that "
        "folder"
    )


def test_nothing_to_resume(settings: Any, console: Console) -> None:
    made = settings("run")
    assert refusal(made, True, console) == (
        f"--resume: finds no checkpoint.pt in --out {made.out}; give the --out of an earlier run, or leave "
        "--resume out to start one"
    )
    assert not made.out.exists()


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", None])
def test_a_checkpoint_of_something_else(settings: Any, console: Console, content: bytes | None) -> None:
    made = settings("run")
    made.out.mkdir()
    file = made.out / "checkpoint.pt"
    torch.save({"model": torch.zeros(3)}, file) if content is None else file.write_bytes(content)
    assert refusal(made, True, console) == (
        f"--resume: {file} is not a checkpoint of `halfstep train`; give the --out of an earlier run, or start a new "
        "one in another"
    )


@pytest.mark.parametrize(
    ("changes", "option"),
    [
        ({"dtype": "bfloat16"}, "--dtype bfloat16|float16"),
        ({"weights": "master32"}, "--weights master32|split16"),
        ({"lr": 0.5}, "--lr 0.5|0.001"),
        ({"clip": 0.0}, "--clip 0.0|1.0"),
        ({"seed": 1}, "--seed 1|0"),
    ],
)
def test_resuming_with_other_arguments(settings: Any, console: Console, changes: dict[str, Any], option: str) -> None:
    run(settings("run", steps=1), False, console)
    made = settings("run", **changes)
    given, _, stored = option.partition("|")
    assert refusal(made, True, console) == (
        f"{given}: the run in --out {made.out} was started with {stored}; resume with {given.split()[0]} {stored}, or "
        "start a new run in another --out"
    )


def test_resuming_with_another_text(settings: Any, console: Console, text: Path) -> None:
    made = settings("run", steps=1)
    run(made, False, console)
    text.write_bytes(text.read_bytes()[::-1])
    assert refusal(made, True, console) == (
        f"--text {text}: is not the text that the run in --out {made.out} learns from ({text}, as it was then); resume "
        "with that, or start a new run in another --out"
    )


def test_resuming_to_an_earlier_step(settings: Any, console: Console) -> None:
    run(settings("run", steps=4), False, console)
    made = settings("run", steps=3)
    assert refusal(made, True, console) == (
        f"--steps 3: the run in --out {made.out} is already at step 4; give at least that"
    )


def test_resuming_another_versions_model(
    settings: Any, console: Console, monkeypatch: pytest.MonkeyPatch, tiny: Sizes
) -> None:
    run(settings("run", steps=1), False, console)
    made = settings("run")
    monkeypatch.setitem(made.__dict__, "sizes", Sizes())
    made.text.write_bytes(made.text.read_bytes())
    assert refusal(made, True, console) == (
        f"--resume: the run in --out {made.out} was made by another version, with another model; resume it there, or "
        "start a new run in another --out"
    )


def test_a_format_that_does_not_exist_changes_nothing(settings: Any, console: Console) -> None:
    message = refusal(settings("run", weights="split15"), False, console)
    assert "weights='split15'" in message
    assert "split16" in message
    assert not settings("run").out.exists()


def test_products_in_float32_are_used_and_told(
    settings: Any, console: Console, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered = []
    products = training.float32_products
    monkeypatch.setattr(training, "float32_products", lambda: entered.append(1) or products())
    monkeypatch.setattr(training, "native_float16_products", lambda: False)
    run(settings("half", steps=2), False, console)
    line = "This CPU has no float16 products: they are computed in float32 and rounded to float16"
    assert line in capsys.readouterr().out
    assert entered
    assert json.loads((settings("half").out / "summary.json").read_text())["float32_products"] is True
    entered.clear()
    run(settings("bfloat16", dtype="bfloat16", steps=2), False, console)
    assert line not in capsys.readouterr().out
    assert not entered


def test_a_loss_that_is_not_finite_is_told_and_breaks_nothing(
    settings: Any, console: Console, capsys: pytest.CaptureFixture
) -> None:
    made = settings("run", dtype="float32", lr=1e30)
    assert run(made, False, console) == 0
    assert "The loss is not finite: the weights were driven out of range. Try a lower --lr" in capsys.readouterr().out
    assert json.loads((made.out / "summary.json").read_text())["validation_loss"] is None
    assert (made.out / "sample.txt").read_text() == "(no sample: the model's outputs are not finite)\n"
    before = {file: file.read_bytes() for file in made.out.iterdir()}
    with pytest.raises(
        InputError, match=r"^--resume: the run in --out .*run cannot go on: the state for .* holds NaN: "
    ):
        run(settings("run", dtype="float32", lr=1e30, steps=9), True, console)
    assert {file: file.read_bytes() for file in made.out.iterdir()} == before


def test_without_clipping_the_scaler_alone_unscales(
    settings: Any, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "clip_grad_norm_", lambda *_: pytest.fail("clipped"))
    assert run(settings("run", clip=0.0), False, console) == 0
    assert loop.METRICS in {file.name for file in settings("run").out.iterdir()}
