"""`halfstep bench`: its arguments, its files, and what it refuses."""

import json
import struct
from pathlib import Path

import pytest

from halfstep.bench import parity, timing
from halfstep.bench import run as running
from halfstep.bench.parity import Red
from halfstep.bench.settings import NAMES
from halfstep.cli import main

FILES = {"bench.json", "bench.md", "bench.png"}


def outcome(capsys: pytest.CaptureFixture, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit_:
        main(["bench", *arguments])
    output = capsys.readouterr()
    return int(exit_.value.code or 0), output.out, output.err


@pytest.fixture(autouse=True)
def _little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that takes long: one pair of formats, and no pauses."""
    monkeypatch.setattr(running, "pairs", lambda dtype: [("rounded", "float32")])
    monkeypatch.setattr(timing, "PAUSE", 0.0)


SMALL = ("--params", "5000", "--rounds", "2", "--dtype", "bfloat16", "--only", "rounded")


def test_a_run_shows_and_writes_its_tables(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "a" / "out"
    code, output, error = outcome(capsys, *SMALL, "--out", str(out))
    assert (code, error) == (0, "")
    # nothing else: no temporary file is left
    assert {file.name for file in out.iterdir()} == FILES
    found = json.loads((out / "bench.json").read_text())
    assert found["machine"] in output
    (shape,) = found["shapes"]
    assert (shape["name"], shape["tensors"], shape["params"]) == ("one", 1, 5120)
    names = ["triad, float32", "triad in place, float32", "torch AdamW fused, float32"]
    names += ["halfstep rounded × float32, bfloat16"]
    assert [row["name"] for row in shape["rows"]] == names
    assert all(len(row["seconds"]) == 2 for row in shape["rows"])
    # a gradient of 2 bytes, a param of 2 and moments of 8, read and written
    assert shape["rows"][-1]["bytes_a_param"] == 2 + 2 * (2 + 8)
    page = (out / "bench.md").read_text()
    for name in names:
        assert name in output
        assert name in page
    picture = (out / "bench.png").read_bytes()
    assert picture.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", picture[16:24])
    assert 900 <= width <= 1300
    assert 200 <= height <= 1300


def test_files_of_an_earlier_run_stay_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert outcome(capsys, *SMALL, "--out", str(tmp_path))[0] == 0
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    def red(*pair: str) -> None:
        raise Red("weights='rounded': a bit differs")

    monkeypatch.setattr(parity, "check", red)
    code, output, error = outcome(capsys, *SMALL, "--out", str(tmp_path))
    assert (code, error) == (1, "halfstep: weights='rounded': a bit differs\n")
    assert "ms" not in output.split()
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


NAMED = ", ".join(NAMES)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--params 100", "--params 100: must be 4096 or more; give more elements"),
        ("--rounds 0", "--rounds 0: must be 1 or more; 11 and more give a steady median"),
        ("--shape two", "--shape two: is not one of one, gpt2, many; choose among them"),
        ("--shape one --shape two", "--shape two: is not one of one, gpt2, many; choose among them"),
        ("--dtype float32", "--dtype float32: is not one of bfloat16, float16; choose among them"),
        ("--only split17", f"--only split17: is not one of {NAMED}; choose among them"),
    ],
)
def test_what_cannot_be_met_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, arguments: str, expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert outcome(capsys, *arguments.split()) == (2, "", f"halfstep: {expected}\n")
    assert list(tmp_path.iterdir()) == []


def test_out_must_be_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "file").touch()
    code, _, error = outcome(capsys, *SMALL, "--out", str(tmp_path / "file"))
    assert code == 2
    assert error.endswith("is a file; give a folder, which is created where it is missing\n")


@pytest.mark.parametrize("argument", ["--params=many", "--rounds=1.5", "--unknown=1"])
def test_what_cannot_be_parsed_is_named(capsys: pytest.CaptureFixture, argument: str) -> None:
    code, output, error = outcome(capsys, argument)
    assert (code, output) == (2, "")
    assert argument.partition("=")[0] in error
    assert error.count("\n") == 1


def test_help_names_every_option(capsys: pytest.CaptureFixture) -> None:
    code, output, _ = outcome(capsys, "--help")
    assert code == 0
    assert not [name for name in ("params", "shape", "rounds", "dtype", "only", "out") if f"--{name}" not in output]
