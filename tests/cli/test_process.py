"""The command as a process: exit codes, one-line errors, missing libraries."""

import subprocess
import sys
from pathlib import Path

import pytest

from halfstep import cli
from halfstep.cli import main, train
from halfstep.cli.settings import Settings


def outcome(capsys: pytest.CaptureFixture, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    output = capsys.readouterr()
    return int(exit_.value.code or 0), output.out, output.err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("train --steps 0", "--steps 0: must be 1 or more; give the number of the last step"),
        ("train --dtype int8", "--dtype int8: is not one of float16, bfloat16, float32; choose one of them"),
        ("train --compare --resume", "--resume: --compare keeps nothing to go on with; leave one of them out"),
        (
            "train --compare --weights master32",
            "--weights master32: --compare trains split16 and master32 both; leave --weights out",
        ),
        ("train --text", "Option '--text' requires an argument."),
        ("nothing", "No such command 'nothing'."),
    ],
)
def test_an_error_is_one_line_on_stderr(capsys: pytest.CaptureFixture, arguments: str, expected: str) -> None:
    assert outcome(capsys, *arguments.split()) == (2, "", f"halfstep: {expected}\n")


@pytest.mark.parametrize("argument", ["--steps=many", "--lr=fast", "--seed=1.5", "--unknown=1"])
def test_what_cannot_be_parsed_is_named(capsys: pytest.CaptureFixture, argument: str) -> None:
    code, output, error = outcome(capsys, "train", argument)
    assert (code, output) == (2, "")
    assert argument.partition("=")[0] in error
    assert error.startswith("halfstep: ")
    assert error.count("\n") == 1


def test_help_names_every_option(capsys: pytest.CaptureFixture) -> None:
    code, output, _ = outcome(capsys, "train", "--help")
    assert code == 0
    names = ["text", "dtype", "weights", "moments", "steps", "lr", "clip", "seed", "out", "resume", "device", "compare"]
    assert not [name for name in names if f"--{name}" not in output]


def test_defaults(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    seen: list[Settings] = []
    monkeypatch.setattr(train, "run", lambda settings, *_: seen.append(settings) or 0)
    monkeypatch.setattr(train, "compare_ways", lambda settings, *_: seen.append(settings) or 130)
    assert outcome(capsys, "train")[0] == 0
    assert outcome(capsys, "train", "--compare", "--dtype", "bfloat16", "--lr", "3e-5")[0] == 130
    assert seen == [
        Settings(out=Path("halfstep-run")),
        Settings(out=Path("halfstep-compare-bfloat16-lr3e-05"), dtype="bfloat16", lr=3e-5),
    ]


def test_a_disk_that_fails_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device", "run/checkpoint.pt")

    monkeypatch.setattr(train, "run", full)
    assert outcome(capsys, "train") == (1, "", "halfstep: run/checkpoint.pt: No space left on device\n")


def test_a_second_interrupt_leaves_at_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    def stopped(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "run", stopped)
    assert outcome(capsys, "train") == (130, "", "")


def test_missing_libraries_are_named_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(cli, "find_spec", lambda name: None if name in ("rich", "typer") else object())
    assert outcome(capsys, "train") == (
        2,
        "",
        'halfstep: needs typer, rich; install with: pip install "halfstep[cli]"\n',
    )


def test_python_m_is_the_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "halfstep.cli", "train", "--lr", "nan"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60, check=False)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr == "halfstep: --lr nan: must be a finite number above 0, such as 1e-3; give one\n"
    assert list(tmp_path.iterdir()) == []
