"""What a run found: its ratios, its tables, and its JSON."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from halfstep.bench.subjects import FUSED, IN_PLACE, TRIAD, WHOLE
from halfstep.bench.timing import Kind, paired_ratio

HEAD = ("", "bytes a param", "ms", "GB/s", "÷ triad", "÷ in place", "× torch fused")
WHOLE_HEAD = ("scaled and clipped", "ms", "× torch fused")

NOTES = (
    "ms: the median of the rounds. Every ratio is the median of the ratios within a round.",
    "GB/s: bytes that the step has to read and to write, divided by its time. ÷ triad: that bandwidth as a part of "
    "STREAM's triad (a = b + s c), whose count leaves out that the processor reads a before it writes it. ÷ in place: "
    "as a part of b = b + s c, which writes where it has read, as a step does; 1 is the memory's own speed.",
    "× torch fused: how many times as fast as torch's fused AdamW on float32.",
)


@dataclass(frozen=True)
class Row:
    """One subject's times on one shape; ``moved`` is in bytes a param."""

    label: str
    dtype: str
    kind: Kind
    params: int
    moved: float | None
    seconds: tuple[float, ...]

    @property
    def name(self) -> str:
        """The label and the dtype."""
        return f"{self.label}, {self.dtype}"

    @property
    def milliseconds(self) -> float:
        """The median over the rounds."""
        return 1e3 * statistics.median(self.seconds)

    @property
    def gigabytes_a_second(self) -> float | None:
        """The bytes it has to move, by its median time."""
        return None if self.moved is None else self.moved * self.params / self.milliseconds / 1e6


@dataclass(frozen=True)
class Measured:
    """All rows of one shape, timed in the same rounds."""

    name: str
    title: str
    tensors: int
    params: int
    rows: Sequence[Row]

    def row(self, label: str, dtype: str = "float32") -> Row | None:
        """Return a row, where it was timed."""
        return next((row for row in self.rows if (row.label, row.dtype) == (label, dtype)), None)

    def bandwidth_ratio(self, row: Row, label: str = TRIAD) -> float | None:
        """Return the bandwidth that a row achieves as a part of the memory's."""
        memory = self.row(label)
        if memory is None or memory.moved is None or row.moved is None:
            return None
        return row.moved * row.params / (memory.moved * memory.params) * paired_ratio(memory.seconds, row.seconds)

    def times_as_fast(self, row: Row, label: str = FUSED, dtype: str = "float32") -> float | None:
        """Return how many times as fast a row steps a param as another one does."""
        other = self.row(label, dtype)
        return None if other is None else row.params / other.params * paired_ratio(other.seconds, row.seconds)

    def cells(self) -> list[tuple[str, ...]]:
        """Return the table's rows: steps of the whole shape, by what `HEAD` says."""
        return [
            (
                row.name,
                _number(row.moved, 2),
                _number(row.milliseconds, 2),
                _number(row.gigabytes_a_second, 1),
                _number(self.bandwidth_ratio(row), 2),
                _number(self.bandwidth_ratio(row, IN_PLACE), 2),
                "-" if row.kind == "memory" else _number(self.times_as_fast(row), 2),
            )
            for row in self.rows
            if row.moved is not None
        ]

    def whole_cells(self) -> list[tuple[str, ...]]:
        """Return the rows of whole scaled and clipped steps, by what `WHOLE_HEAD` says."""
        return [
            (
                f"{row.label.removesuffix(WHOLE)}, {row.dtype}",
                _number(row.milliseconds, 2),
                _number(self.times_as_fast(row, FUSED + WHOLE), 2),
            )
            for row in self.rows
            if row.moved is None
        ]

    def markdown(self) -> str:
        """Return the heading and the tables."""
        parts = [f"## {self.title}", markdown(HEAD, self.cells())]
        if whole := self.whole_cells():
            parts.append(markdown(WHOLE_HEAD, whole))
        return "\n\n".join(parts)


@dataclass(frozen=True)
class Results:
    """A whole run.

    Args:
        machine: what it ran on, in one line.
        date: of the run.
        versions: of halfstep, of what it stands on, and of the peers.
        shapes: what was measured.
        absent: what was not, by name, and why.
        costs: other figures of the same run.
    """

    machine: str
    date: str
    versions: Mapping[str, str]
    shapes: Sequence[Measured]
    absent: Mapping[str, str]
    costs: Mapping[str, Any] = field(default_factory=dict)

    def shape(self, name: str) -> Measured | None:
        """Return what was measured on a shape, where it was."""
        return next((measured for measured in self.shapes if measured.name == name), None)

    def as_json(self) -> dict[str, Any]:
        """Return everything, every round's seconds too."""
        return {
            "date": self.date,
            "machine": self.machine,
            "versions": dict(self.versions),
            "not_timed": dict(self.absent),
            "costs": dict(self.costs),
            "shapes": [
                {
                    "name": measured.name,
                    "tensors": measured.tensors,
                    "params": measured.params,
                    "rows": [_entry(measured, row) for row in measured.rows],
                }
                for measured in self.shapes
            ],
        }

    def plain(self) -> str:
        """Return the tables, what was not timed and why, and the notes, for a terminal."""
        parts = []
        for measured in self.shapes:
            parts.append(f"{measured.title}\n{aligned(HEAD, measured.cells())}")
            if whole := measured.whole_cells():
                parts.append(aligned(WHOLE_HEAD, whole))
        if self.absent:
            parts.append("\n".join(f"not timed: {name}: {reason}" for name, reason in self.absent.items()))
        return "\n\n".join([*parts, "\n".join(NOTES)])

    def markdown(self) -> str:
        """Return the tables, what was not timed and why, the notes and the machine."""
        parts = [measured.markdown() for measured in self.shapes]
        if self.absent:
            parts.append("Not timed:\n\n" + "\n".join(f"- {name}: {reason}" for name, reason in self.absent.items()))
        parts.append("\n\n".join(NOTES))
        named = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        parts.append(f"{self.machine}. {named}. {self.date}.")
        return "\n\n".join(parts) + "\n"


def _entry(measured: Measured, row: Row) -> dict[str, Any]:
    return {
        "name": row.name,
        "kind": row.kind,
        "params": row.params,
        "bytes_a_param": row.moved,
        "milliseconds": row.milliseconds,
        "gigabytes_a_second": row.gigabytes_a_second,
        "of_triad": measured.bandwidth_ratio(row),
        "of_triad_in_place": measured.bandwidth_ratio(row, IN_PLACE),
        "times_torch_fused": measured.times_as_fast(row, FUSED if row.moved is not None else FUSED + WHOLE),
        "seconds": [round(seconds, 7) for seconds in row.seconds],
    }


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table whose first column is text and whose others are numbers."""
    lines = [f"| {' | '.join(head)} |", "|---|" + "---:|" * (len(head) - 1)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def aligned(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return the same table for a terminal, however narrow it is."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in (head, *rows)
    )


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
