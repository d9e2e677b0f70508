"""The picture: each step's time beside the time that the memory needs for its bytes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from halfstep.bench.results import Measured, Row
from halfstep.bench.subjects import IN_PLACE, TRIAD
from halfstep.files import write_atomically

#: a marker a dtype, so that they are told apart without colour too
MARKERS = {"bfloat16": "o", "float16": "D", "float32": "s"}
COLOURS = {"halfstep": "tab:blue", "torch": "black", "peer": "tab:red"}
LIMITS = {TRIAD: ("-", "triad"), IN_PLACE: (":", "triad in place")}
GROUPS = {"halfstep": "halfstep", "torch": "torch", "peer": "others"}


def draw(file: Path, measured: Measured, machine: str) -> None:
    """Draw a line for each optimizer and its formats, by the bytes that it moves; dtypes share a line."""
    lines: dict[str, list[Row]] = {}
    for row in sorted(measured.rows, key=lambda row: (row.moved or 0, row.label)):
        # what has no count of bytes, or works on other params, has no place beside this limit
        if row.kind != "memory" and row.moved is not None and row.params == measured.params:
            lines.setdefault(row.label, []).append(row)
    figure = Figure(figsize=(9, 1.9 + 0.27 * len(lines)), layout="constrained")
    axes = figure.subplots()
    bytes_moved = [max(row.moved or 0.0 for row in rows) for rows in lines.values()]
    for label, (style, title) in LIMITS.items():
        _limit(axes, measured, label, bytes_moved, style, title)
    for y, rows in enumerate(lines.values()):
        for row in rows:
            axes.plot(
                row.milliseconds, y, MARKERS[row.dtype], color=COLOURS[row.kind], markersize=6, alpha=0.85,
                markeredgewidth=0, zorder=3,
            )  # fmt: skip
    _label(axes, lines, bytes_moved)
    axes.set_title(f"One step of AdamW: {measured.title}", pad=20)
    axes.annotate(
        machine, (0.5, 1), xycoords="axes fraction", xytext=(0, 6), textcoords="offset points", fontsize=8,
        color="0.35", horizontalalignment="center",
    )  # fmt: skip
    write_atomically(file, lambda temporary: figure.savefig(temporary, dpi=120, format="png"))


def _limit(axes: Any, measured: Measured, label: str, moved: Sequence[float], style: str, title: str) -> None:
    """Draw a staircase: the time that the memory needs for the bytes of each line."""
    memory = measured.row(label)
    if memory is None or not memory.gigabytes_a_second:
        return
    needed = [bytes_ * measured.params / memory.gigabytes_a_second / 1e6 for bytes_ in moved]
    edges = [place - 0.5 for place in range(len(moved) + 1)]
    axes.stairs(
        needed, edges, orientation="horizontal", baseline=None, color="0.35", linewidth=1.2, linestyle=style, zorder=2,
        label=f"limit: {title}, {memory.gigabytes_a_second:.1f} GB/s",
    )  # fmt: skip


def _label(axes: Any, lines: dict[str, list[Row]], moved: Sequence[float]) -> None:
    """Name each line on the left, with its bytes, and write its milliseconds on the right."""
    places = range(len(lines))
    names = [f"{label}, {bytes_:.4g} B" for label, bytes_ in zip(lines, moved, strict=True)]
    axes.set_yticks(places, names, fontsize=8.5)
    for text, rows in zip(axes.get_yticklabels(), lines.values(), strict=True):
        text.set_color(COLOURS[rows[0].kind])
    axes.set_ylim(-0.7, len(lines) - 0.3)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("milliseconds a step (right: the medians), fewer is better")
    for formatter in (axes.xaxis.set_major_formatter, axes.xaxis.set_minor_formatter):
        formatter(FuncFormatter(lambda value, _: f"{value:g}" if f"{value:.0e}"[0] in "125" else ""))
    axes.tick_params(axis="x", which="both", length=4, pad=4, labelsize=9)
    axes.grid(axis="x", which="major", alpha=0.3)
    axes.grid(axis="y", alpha=0.15)
    right = axes.secondary_yaxis("right")
    right.set_yticks(places, [" / ".join(f"{row.milliseconds:.3g}" for row in rows) for rows in lines.values()])
    right.tick_params(labelsize=8.5, length=0)
    seen = {(row.kind, row.dtype) for rows in lines.values() for row in rows}
    for kind, group in GROUPS.items():
        for dtype, marker in MARKERS.items():
            if (kind, dtype) in seen:
                axes.plot([], [], marker, color=COLOURS[kind], markeredgewidth=0, label=f"{group}, {dtype}")
    axes.figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8.5)
