"""What the runs of benchmarks/quality.py say: the arithmetic, the tables, the page and its picture."""

import math
import statistics
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from halfstep.cli.files import write_atomically, write_text
from quality_tasks import Task

Record = dict[str, Any]

#: percent of float32's loss: what nobody would notice
LIMIT = 0.3

INTRO = """# Is it float32 training?

Three tasks are trained in float32 with `torch.optim.AdamW`, and in bfloat16 and float16 with `halfstep.AdamW` in every
pair of `weights=` and `moments=`, and with `torch.optim.AdamW` on the 16-bit params. Runs of one seed share their first
weights (16 bits start from the float32 ones, rounded), their batches, and a learning rate that rises over a twentieth
of the steps and falls in a line to the end. There is no dropout. float16 runs of halfstep use `halfstep.GradScaler`;
torch's has no scaler, as its own refuses float16 gradients. A model is validated as it is used, in its own dtype, with
its loss computed in float32.

"From float32" is the mean, over the seeds, of a run's distance from the float32 run of its seed, with the standard
error of that mean. "Spread" is the standard deviation of the losses over the seeds: what another seed does to a
training. A row is "the same" where its mean distance is at most {limit} % and at most the spread of float32. "Bytes"
counts weights, gradients and optimizer state after a backward, for each parameter of that model; in a small model,
small tensors that a format leaves in float32 weigh more. "NaN" is a loss that is not finite.

The tasks were chosen so that a run's distance is small where the float32 weight is kept exactly, by looking at float32
and at bfloat16 with `split16`, seeds 0 to 2: harsher ones were left out after such runs ended up to 5.5 % (digits at a
learning rate of 2e-3, or on unseen writers), 0.6 % (gpt at 1e-3) and 0.4 % (minilm at 2e-4) from float32, which is what
16-bit products do and no format can mend. What is shown are other seeds, that no choice was made by. So the page
compares formats in calm trainings; it does not say that every training in 16 bits ends this close.

Under each table stands by how much a single run deviates from float32's although its float32 weight is kept exactly.
On digits that is so much that a mean of three seeds cannot tell {limit} %: there bfloat16's `split16` × `block8` ended
at -0.36 ± 0.17 % (`--tasks digits --only block8 --seeds 3 4 5` prints it). So digits has 48 seeds, a number chosen
after three were seen, and the others have three. In float16 a run deviates most where the scaler skips steps while it
finds its scale: it loses those batches.

![Distances of the validation losses from float32 training](quality.png)
"""


@dataclass(frozen=True)
class Row:
    """One way to train one task.

    Args:
        dtype: of the params.
        weights: how they are kept; "torch" for `torch.optim.AdamW`.
        moments: how the moments are kept.
        bytes: held for each parameter.
        losses: the validation loss of each seed.
        skipped: steps that the scaler left out, for each seed.
        differences: from the float32 loss of the seed, in percent, for the seeds that have both.
        band: the spread of float32's losses, in percent of their mean.
    """

    dtype: str
    weights: str
    moments: str
    bytes: float
    losses: Mapping[int, float]
    skipped: Mapping[int, int]
    differences: Mapping[int, float]
    band: float

    @property
    def name(self) -> str:
        """The optimizer and its formats."""
        return "torch AdamW" if self.weights == "torch" else f"{self.weights} × {self.moments}"

    @property
    def mean_difference(self) -> float:
        """The mean paired difference from float32, in percent."""
        return mean(self.differences.values())

    @property
    def error(self) -> float:
        """The standard error of the mean paired difference."""
        return spread(self.differences.values()) / math.sqrt(len(self.differences) or 1)

    @property
    def same(self) -> bool:
        """Whether it cannot be told from float32: within ``LIMIT`` and within what another seed does.

        Of one seed nobody can say: the band is NaN.
        """
        return abs(self.mean_difference) <= LIMIT and abs(self.mean_difference) <= self.band


def mean(values: Iterable[float]) -> float:
    """Return the mean; NaN of nothing, and where one is NaN."""
    values = list(values)
    return sum(values) / len(values) if values else math.nan


def spread(values: Iterable[float]) -> float:
    """Return the sample standard deviation; NaN of fewer than two values, and where one is NaN."""
    values = list(values)
    return statistics.stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else math.nan


def rows_of(records: Iterable[Record], task: str) -> list[Row]:
    """Return the rows of ``task``: float32 first, then by dtype and bytes."""
    groups: dict[tuple[str, str, str], list[Record]] = {}
    for record in records:
        if record["task"] == task:
            groups.setdefault((record["dtype"], record["weights"], record["moments"]), []).append(record)
    base = {record["seed"]: record["validation_loss"] for record in groups.get(("float32", "torch", "torch"), [])}
    band = 100 * spread(base.values()) / mean(base.values())
    rows = []
    for way, group in groups.items():
        losses = {record["seed"]: record["validation_loss"] for record in group}
        differences = {seed: 100 * (loss / base[seed] - 1) for seed, loss in losses.items() if seed in base}
        skipped = {record["seed"]: record["skipped"] for record in group}
        rows.append(Row(*way, mean(record["bytes"] for record in group), losses, skipped, differences, band))
    return sorted(rows, key=lambda row: (row.dtype != "float32", row.dtype, row.bytes, row.name))


def markdown(rows: Sequence[Row]) -> str:
    """Return the table of one task."""
    lines = [
        "| dtype | weights × moments | bytes | validation loss | spread | from float32 | the same | skipped steps |",
        "|---|---|---:|---:|---:|---:|:---:|---:|",
    ]
    for row in rows:
        distance, same = f"{row.mean_difference:+.2f}", "yes" if row.same else "no"
        if row.dtype == "float32":
            distance = same = "-"
        elif math.isnan(row.mean_difference):
            distance = "NaN"
        else:
            distance += " %" if math.isnan(row.error) else f" ± {row.error:.2f} %"
        cells = [
            row.dtype, row.name, f"{row.bytes:.2f}", _number(mean(row.losses.values())),
            _number(spread(row.losses.values())) if len(row.losses) > 1 else "-", distance, same,
            str(sum(row.skipped.values())),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def deviations(rows: Iterable[Row]) -> str:
    """Return a paragraph on what one run says: how far those that keep the float32 weight deviate from float32's.

    Standard deviations of the distances over the seeds, where there are two; in brackets over the seeds that skipped no
    step, where others did.
    """
    texts = []
    for row in rows:
        deviation = spread(row.differences.values())
        if (row.weights, row.moments) != ("split16", "float32") or math.isnan(deviation):
            continue
        text = f"in {row.dtype} by {deviation:.2f} %"
        calm = [distance for seed, distance in row.differences.items() if row.skipped[seed] == 0]
        if 1 < len(calm) < len(row.differences):
            text += f" (over the {len(calm)} seeds that skip no step by {spread(calm):.2f} %)"
        texts.append(text)
    said = f"A single run of `split16` × `float32` deviates {', '.join(texts)}."
    return f"\n{textwrap.fill(said, 120)}\n" if texts else ""


def _number(value: float) -> str:
    return "NaN" if math.isnan(value) else f"{value:.4f}"


def write_report(
    folder: Path,
    tables: Mapping[str, Sequence[Row]],
    records: Sequence[Record],
    tasks: Mapping[str, Task],
    command: str,
) -> None:
    """Write ``quality.md`` and ``quality.png`` into ``folder``; ``command`` is what trained."""
    parts = [INTRO.format(limit=LIMIT)]
    for name, rows in tables.items():
        of = [record for record in records if record["task"] == name]
        if not of:
            continue
        seeds, steps = sorted({record["seed"] for record in of}), of[0]["steps"]
        seconds = sum(record["seconds"] for record in of) / len(of)
        said = (
            f"The task is {tasks[name].what}: {steps:,} steps at a learning rate of {of[0]['lr']:g}, {len(seeds)} "
            f"seeds; {seconds:.1f} seconds a run."
        )
        parts.append(f"## {name}\n\n{textwrap.fill(said, 120)}\n\n{markdown(rows)}\n{deviations(rows)}")
    dates = sorted({record["date"] for record in records})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    parts.append(
        f"## How it was made\n\n`{command}` trains, and the same with `--report` writes this page, {len(records):,} "
        f"runs of {when}, with halfstep {_all(records, 'halfstep')}, on:\n\n"
        f"{_all(records, 'machine')}\n"
    )
    write_text(folder / "quality.md", "\n".join(parts))
    figure = picture(tables)
    write_atomically(folder / "quality.png", lambda file: figure.savefig(file, dpi=120, format="png"))


def _all(records: Iterable[Record], key: str) -> str:
    return "; ".join(sorted({record[key] for record in records}))


#: percent at which a panel ends at the latest
WIDEST = 1.0
#: width of a panel with the margins in which stands what lies beyond its ends
MARGIN = 1.6
COLOURS = {"bfloat16": "tab:blue", "float16": "tab:orange"}


def picture(tables: Mapping[str, Sequence[Row]]) -> Figure:
    """Draw a panel a task: distances from float32 in percent, a line for each pair of formats, sorted by bytes."""
    tables = {name: [row for row in rows if row.dtype != "float32"] for name, rows in tables.items() if rows}
    # One order for all panels, by the model in which what a format leaves alone weighs least.
    sizes: dict[str, list[float]] = {}
    for row in (row for rows in tables.values() for row in rows):
        sizes.setdefault(row.name, []).append(row.bytes)
    names = sorted(sizes, key=lambda name: (-min(sizes[name]), name))
    figure = Figure(figsize=(2.2 + 3.6 * len(tables), 1.6 + 0.36 * len(names)), layout="constrained")
    panels = figure.subplots(1, len(tables), sharey=True, squeeze=False)[0]
    for axes, (task, rows) in zip(panels, tables.items(), strict=True):
        _panel(axes, task, rows, names)
    panels[0].set_yticks(range(len(names)), [f"{name}, {min(sizes[name]):.1f}" for name in names])
    panels[0].set_ylabel("weights × moments, bytes a parameter (the fewest of the tasks)")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2 * len(tables) - 1, frameon=False)
    return figure


def _panel(axes: Any, task: str, rows: Sequence[Row], names: Sequence[str]) -> None:
    band = rows[0].band if rows else math.nan
    # Wide enough to see float32's own spread, but not so wide that nothing else is seen; what lies outside is written.
    limit = max(1.5 * LIMIT, min(1.5 * band, WIDEST)) if math.isfinite(band) else 1.5 * LIMIT
    if math.isfinite(band):
        axes.axvspan(-band, band, color="0.92", zorder=0, label="spread of float32 over seeds")
    dots = {"color": "0.55", "linewidth": 0.9, "linestyle": ":", "zorder": 1}
    axes.axvline(-LIMIT, **dots)
    axes.axvline(LIMIT, label=f"± {LIMIT} %", **dots)
    axes.axvline(0, color="0.4", linewidth=0.8, zorder=1)
    for dtype, colour in COLOURS.items():
        axes.plot([], [], "o", color=colour, markersize=3.5, label=f"{dtype}: seeds, mean ± its standard error")
    for row in rows:
        y = names.index(row.name) + (0.18 if row.dtype == "float16" else -0.18)
        colour = COLOURS[row.dtype]
        inside = [d for d in row.differences.values() if abs(d) <= limit]
        axes.plot(inside, [y] * len(inside), "o", color=colour, markersize=3.5, alpha=0.35, markeredgewidth=0)
        if abs(row.mean_difference) <= limit:
            cross: dict[str, Any] = {"markersize": 9, "markeredgewidth": 2, "elinewidth": 2}
            axes.errorbar(row.mean_difference, y, xerr=row.error, fmt="|", color=colour, **cross)
        _outside(axes, row, y, limit, colour)
    # The margins hide what would run into them, so that nothing lies under what is written there.
    for side in (-1, 1):
        axes.axvspan(side * limit, side * MARGIN * limit, color="white", linewidth=0, zorder=2.3)
        axes.axvline(side * limit, color="0.8", linewidth=0.8, zorder=2.3)
    axes.set_xlim(-MARGIN * limit, MARGIN * limit)
    axes.set_xticks([tick for tick in MaxNLocator(5).tick_values(-limit, limit) if abs(tick) <= limit])
    axes.set_ylim(-0.6, len(names) - 0.4)
    axes.invert_yaxis()
    axes.set_title(task)
    known = f"± {band:.2f} %" if math.isfinite(band) else "unknown"
    axes.set_xlabel(f"from float32, %\n(float32's own spread: {known})")
    axes.grid(axis="y", alpha=0.25)


def _outside(axes: Any, row: Row, y: float, limit: float, colour: str) -> None:
    """Write in the margins what lies beyond them: the mean, or how many seeds where the mean lies within."""
    middle = row.mean_difference
    left, right = (_seeds(sum(side * d > limit for d in row.differences.values())) for side in (-1, 1))
    if middle < -limit:
        left, right = f"{middle:+.2g}", ""
    elif not middle <= limit:
        left, right = "", "NaN" if math.isnan(middle) else f"{middle:+.2g}"
    style: dict[str, Any] = {"color": colour, "fontsize": 7.5, "verticalalignment": "center"}
    edge = 0.98 * MARGIN * limit
    if left:
        axes.text(-edge, y, f"◂ {left}", horizontalalignment="left", **style)
    if right:
        axes.text(edge, y, f"{right} ▸", horizontalalignment="right", **style)


def _seeds(count: int) -> str:
    return "1 seed" if count == 1 else f"{count} seeds" if count else ""
