"""Where the bytes come from, and which of them a step sees."""

import os
from pathlib import Path

import pytest
import torch

from halfstep.cli.errors import InputError
from halfstep.cli.text import STANDARD_LIBRARY_BYTES, load_text

DATA = bytes(range(256)) * 4


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "data"
    file.write_bytes(DATA)
    return file


def test_the_last_tenth_is_held_out(file: Path) -> None:
    text = load_text(file, 17)
    assert bytes(text.train.tolist()) == DATA[:-102]
    assert bytes(text.validation.tolist()) == DATA[-102:]


def test_a_batch_follows_from_seed_and_step_alone(file: Path) -> None:
    text = load_text(file, 17)
    batch = text.batch(3, 7, 4, 17)
    assert batch.shape == (4, 17)
    assert batch.dtype == torch.int64
    assert torch.equal(load_text(file, 17).batch(3, 7, 4, 17), batch)
    assert not torch.equal(text.batch(3, 8, 4, 17), batch)
    assert not torch.equal(text.batch(4, 7, 4, 17), batch)
    # Consecutive bytes, as the text has them.
    assert torch.equal((batch[:, 1:] - batch[:, :-1]) % 256, torch.ones(4, 16, dtype=torch.int64))


def test_batches_reach_both_ends_of_the_text(tmp_path: Path) -> None:
    file = tmp_path / "short"
    file.write_bytes(bytes(range(200)))
    text = load_text(file, 20)
    starts = {int(window[0]) for step in range(100) for window in text.batch(0, step, 20, 20)}
    # 161 places, 2,000 draws: a given one is missed once in 260,000 times, and the seed is fixed.
    assert {0, 160} <= starts
    assert max(starts) == 160


def test_validation_windows_are_spread_and_do_not_overlap(file: Path) -> None:
    text = load_text(file, 17)
    windows = text.validation_windows(4, 17)
    assert [int(window[0]) for window in windows] == [int(text.validation[start]) for start in (0, 28, 56, 85)]
    assert len(text.validation_windows(100, 17)) == 102 // 17
    assert len(text.validation_windows(100, 60)) == 1


def test_the_standard_library_is_the_default() -> None:
    text = load_text(None, 129)
    assert text.name == "Python's standard library"
    assert 1_000_000 < len(text.train) + len(text.validation) <= STANDARD_LIBRARY_BYTES
    assert load_text(None, 129).digest == text.digest


def message(file: Path) -> str:
    with pytest.raises(InputError) as error:
        load_text(file, 129)
    return str(error.value)


def test_a_missing_file(tmp_path: Path) -> None:
    file = tmp_path / "missing"
    assert message(file) == (
        f"--text {file}: cannot be read (No such file or directory); give a readable file, or leave --text out to "
        "train on the source of Python's standard library"
    )


def test_a_directory(tmp_path: Path) -> None:
    assert message(tmp_path) == (
        f"--text {tmp_path}: is a directory; give one file, such as the output of `cat {tmp_path}/*`"
    )


@pytest.mark.parametrize("size", [0, 1289])
def test_a_text_too_short(tmp_path: Path, size: int) -> None:
    file = tmp_path / "short"
    file.write_bytes(b"x" * size)
    assert message(file) == (
        f"--text {file}: holds {size:,} bytes; at least 1,290 are needed, so that the last tenth, held out for "
        "validation, has one window. Give a longer text"
    )
    file.write_bytes(b"x" * 1290)
    assert len(load_text(file, 129).validation) == 129


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_is_refused_rather_than_waited_for(tmp_path: Path) -> None:
    file = tmp_path / "pipe"
    os.mkfifo(file)
    assert message(file) == f"--text {file}: is not a regular file; save its content in one and give that"
