"""The two pictures: a run's losses and loss scale, and a comparison's validation losses."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from halfstep.cli.metrics import Row
from halfstep.files import write_atomically

Points = Sequence[tuple[int, float]]

# Distinguishable without colour too: the lines of a comparison often lie upon each other, so each is thinner than the
# one beneath it, and has dashes and a marker of its own.
_STYLES: tuple[dict[str, Any], ...] = (
    {"color": "0.75", "linewidth": 6.0, "linestyle": "-"},
    {"color": "tab:red", "linewidth": 1.8, "linestyle": "-", "marker": "x", "markersize": 6},
    {"color": "tab:blue", "linewidth": 2.2, "linestyle": "-"},
    {"color": "black", "linewidth": 1.4, "linestyle": (0, (2, 2))},
)


def draw_run(file: Path, title: str, rows: Sequence[Row], last_validation: tuple[int, float]) -> None:
    """Draw a run's loss and validation loss, and beneath them its loss scale, where it has one."""
    scaled = any(row["scale"] is not None for row in rows)
    figure = Figure(figsize=(8, 5.5 if scaled else 4), layout="constrained")
    if scaled:
        losses, scales = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
        _draw_scale(scales, rows)
        scales.set_xlabel("step")
    else:
        losses = figure.subplots()
        losses.set_xlabel("step")
    steps = [row["step"] for row in rows]
    losses.plot(steps, [_number(row["loss"]) for row in rows], color="0.65", linewidth=0.9, label="loss of the batch")
    validations = [(row["step"], _number(row["validation_loss"])) for row in rows if "validation_loss" in row]
    if math.isfinite(last_validation[1]) and last_validation not in validations:
        validations.append(last_validation)
    if validations:
        losses.plot(
            *zip(*validations, strict=True), color="tab:blue", marker="o", markersize=4, label="validation loss"
        )
    losses.set_ylabel("nats a byte")
    losses.set_title(title)
    losses.legend()
    losses.grid(alpha=0.3)
    _whole_steps(losses)
    _save(figure, file)


def draw_comparison(file: Path, title: str, curves: Sequence[tuple[str, Points, tuple[int, str] | None]]) -> None:
    """Draw validation losses, (label, points, end); an end is the step at which a run broke, and how."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for place, (label, points, end) in enumerate(curves):
        style = {**_STYLES[place], "zorder": 2 + place}
        if end is None:
            axes.plot(*zip(*points, strict=True), label=label, **style)
            continue
        finite = [point for point in points if math.isfinite(point[1])]
        # A run that broke before its first validation has no curve; its name in the legend stands for it.
        axes.plot([step for step, _ in finite], [loss for _, loss in finite], label=f"{label}: {end[1]}", **style)
        axes.axvline(end[0], color=style["color"], linewidth=1.2, linestyle="--", zorder=1)
        axes.annotate(
            end[1], (end[0], 0.5), xycoords=("data", "axes fraction"), xytext=(4, 0), textcoords="offset points",
            rotation=90, verticalalignment="center", color=style["color"],
        )  # fmt: skip
    axes.set_xlabel("step")
    axes.set_ylabel("validation loss, nats a byte")
    axes.set_title(title)
    axes.legend()
    axes.grid(alpha=0.3)
    _whole_steps(axes)
    _save(figure, file)


def _draw_scale(axes: Any, rows: Sequence[Row]) -> None:
    axes.step([row["step"] for row in rows], [row["scale"] for row in rows], where="post", color="tab:green")
    before = [0, *(row["skipped"] for row in rows)]
    skips = [
        (row["step"], row["scale"]) for row, earlier in zip(rows, before, strict=False) if row["skipped"] > earlier
    ]
    if skips:
        axes.plot(*zip(*skips, strict=True), color="tab:red", marker="x", linestyle="none", label="skipped step")
        axes.legend()
    axes.set_yscale("log", base=2)
    axes.set_ylabel("loss scale")
    axes.grid(alpha=0.3)
    _whole_steps(axes)


def _whole_steps(axes: Any) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _number(value: float | None) -> float:
    # What is not finite is null in metrics.jsonl.
    return math.nan if value is None else value


def _save(figure: Figure, file: Path) -> None:
    # A Figure without pyplot draws into memory whatever backend is set, so no display is needed.
    write_atomically(file, lambda temporary: figure.savefig(temporary, dpi=120, format="png"))
