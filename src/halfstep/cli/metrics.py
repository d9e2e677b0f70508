"""`metrics.jsonl`: one line a step, each step once."""

import json
import os
from pathlib import Path
from typing import Any, Self

from halfstep.cli.files import to_json, write_text

Row = dict[str, Any]


class Metrics:
    """The rows so far, in memory and in their file.

    Args:
        file: the JSON lines; written anew.
        rows: what the file holds at first.
    """

    def __init__(self, file: Path, rows: list[Row]) -> None:
        self.rows = rows
        write_text(file, "".join(to_json(row) + "\n" for row in rows))
        self._handle = file.open("a", encoding="utf-8")

    @classmethod
    def resumed(cls, file: Path, step: int) -> Self:
        """Keep the rows up to ``step``; those after it will be computed again."""
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        rows = [row for line in lines if (row := _parse(line)) is not None]
        return cls(file, [row for row in rows if row["step"] <= step])

    def append(self, row: Row) -> None:
        """Add one step's row."""
        self.rows.append(row)
        self._handle.write(to_json(row) + "\n")
        self._handle.flush()

    def sync(self) -> None:
        """Put every row on disk, as must be before the checkpoint that counts on them."""
        self._handle.flush()
        os.fsync(self._handle.fileno())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._handle.close()


def _parse(line: str) -> Row | None:
    # A kill may leave half a line at the end.
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        return None
