"""Whole files, or the ones before."""

import json
import math
import stat
from pathlib import Path

import pytest

from halfstep.cli.files import to_json, write_text
from halfstep.cli.metrics import Metrics
from halfstep.files import write_atomically


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "file.txt"
    write_text(file, "old")

    def half(temporary: Path) -> None:
        temporary.write_text("ne")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomically(file, half)
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_a_write_replaces_and_is_as_readable_as_any_file(tmp_path: Path) -> None:
    file, plain = tmp_path / "file.txt", tmp_path / "plain.txt"
    write_text(file, "old")
    write_text(file, "new")
    plain.touch()
    assert file.read_text() == "new"
    assert stat.S_IMODE(file.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


def test_json_is_strict() -> None:
    assert to_json({"a": math.nan, "b": [math.inf, 1.5], "c": (-math.inf, "x")}) == (
        '{"a": null, "b": [null, 1.5], "c": [null, "x"]}'
    )


def test_resumed_metrics_drop_later_steps_and_a_torn_line(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"ste')
    with Metrics.resumed(file, 2) as metrics:
        metrics.append({"step": 3, "loss": math.nan})
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert rows == [{"step": 1}, {"step": 2}, {"step": 3, "loss": None}]


def test_resumed_metrics_begin_anew_where_the_file_is_gone(tmp_path: Path) -> None:
    with Metrics.resumed(tmp_path / "metrics.jsonl", 2) as metrics:
        assert metrics.rows == []
    assert (tmp_path / "metrics.jsonl").read_text() == ""
