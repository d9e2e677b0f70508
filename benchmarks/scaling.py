"""How a step's time grows with params, tensors and threads, and what memory it takes: python benchmarks/scaling.py.

Whatever stands in one line of a table was timed in the same rounds. The largest tensor takes 12 GB. ``--docs`` writes
docs/scaling.md and its picture; otherwise they go to --out.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from typing import Any

import torch
from matplotlib.figure import Figure

from command import parsed, parser
from halfstep.bench import costs
from halfstep.bench.results import markdown
from halfstep.bench.shapes import Tensors, one
from halfstep.bench.subjects import COMPACT, EXACT, MAIN, halfstep_step, memory, torch_step
from halfstep.bench.timing import Subject, measure, paired_ratio
from halfstep.cli.files import write_atomically, write_text
from halfstep.cli.machine import describe

DTYPE = "bfloat16"
#: steps so short that a clock's tick and a thread's waking show are timed more often
SHORT, MORE = 10**6, 10

INTRO = """# How a step scales

One run of `benchmarks/scaling.py` on the CPU, on bfloat16 params; torch's AdamW is on float32. Times are medians over
rounds in which all that stands in one line is timed in turn.

![Time a param against params and tensors, speed against threads, temporary memory against params](scaling.png)
"""


@dataclass(frozen=True)
class Sizes:
    """What is measured; smaller in the tests.

    Args:
        params: elements of one tensor.
        counts: numbers of tensors.
        total: elements of all of these together.
        threaded: elements of the tensor that is stepped on 1, 2, ... threads.
        held: elements of the tensors whose temporary memory is read.
    """

    params: Sequence[int] = (10**4, 10**5, 10**6, 10**7, 10**8, 3 * 10**8)
    counts: Sequence[int] = (1, 2**4, 2**8, 2**12, 2**16)
    total: int = 2**24
    threaded: int = 2**25
    held: Sequence[int] = (10**6, 10**7, 10**8)


@dataclass(frozen=True)
class Table:
    """Figures against one size: ``lines`` holds for each label its (size, figure)."""

    title: str
    size: str
    figure: str
    lines: dict[str, list[tuple[int, float]]]

    def markdown(self) -> str:
        """Return the heading and the table, a row a size."""
        sizes = sorted({size for points in self.lines.values() for size, _ in points})
        known = {label: dict(points) for label, points in self.lines.items()}
        rows = [
            (f"{size:,}", *(f"{found[size]:.3g}" if size in found else "-" for found in known.values()))
            for size in sizes
        ]
        return f"## {self.title}\n\n{self.figure}\n\n{markdown((self.size, *self.lines), rows)}\n"


def against_params(sizes: Sizes, rounds: int) -> Table:
    """Time one tensor of each size."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for params in sizes.params:
        tensors = Tensors(one(params).sizes)
        subjects = [halfstep_step(tensors, DTYPE, *pair) for pair in MAIN] + [torch_step(tensors, fused=True)]
        seconds = measure(subjects, rounds * (MORE if params <= SHORT else 1))
        for subject in subjects:
            a_param = 1e9 * statistics.median(seconds[subject.name]) / subject.params
            lines.setdefault(subject.label, []).append((params, a_param))
        del tensors, subjects
    return Table("Params", "params", "Nanoseconds a param, in one tensor of so many.", lines)


def against_tensors(sizes: Sizes, rounds: int) -> Table:
    """Time the same number of params in ever more tensors."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for count in sizes.counts:
        # vectors, whose moments stay float32 whatever is asked for: the exact pair is the one to time
        tensors = Tensors(((sizes.total // count,),) * count)
        subjects = [halfstep_step(tensors, DTYPE, *EXACT), torch_step(tensors, True), torch_step(tensors, False)]
        seconds = measure(subjects, rounds)
        for subject in subjects:
            a_param = 1e9 * statistics.median(seconds[subject.name]) / subject.params
            lines.setdefault(subject.label, []).append((count, a_param))
        del tensors, subjects
    return Table("Tensors", "tensors", f"Nanoseconds a param, {sizes.total:,} params cut into so many tensors.", lines)


def against_threads(sizes: Sizes, rounds: int) -> Table:
    """Time one tensor on each number of threads up to what torch uses here."""
    most = torch.get_num_threads()
    tensors = Tensors(one(sizes.threaded).sizes)
    made = [
        *memory(sizes.threaded),
        *(halfstep_step(tensors, DTYPE, *pair) for pair in MAIN),
        torch_step(tensors, True),
    ]
    subjects = [_on_threads(subject, count) for subject in made for count in range(1, most + 1)]
    try:
        seconds = measure(subjects, rounds)
    finally:
        torch.set_num_threads(most)
    lines = {
        subject.label: [
            (count, 1 / paired_ratio(seconds[_on_threads(subject, count).name], seconds[_on_threads(subject, 1).name]))
            for count in range(1, most + 1)
        ]
        for subject in made
    }
    return Table("Threads", "threads", f"Times as fast as on one thread, {sizes.threaded:,} params.", lines)


def _on_threads(subject: Subject, count: int) -> Subject:
    def step() -> None:
        torch.set_num_threads(count)
        subject.step()

    return replace(subject, label=f"{subject.label}, {count} threads", step=step)


def temporary_memory(sizes: Sizes, rounds: int) -> Table:
    """Read the temporary memory of one step, in processes of their own; ``rounds`` mean nothing to it."""
    lines: dict[str, list[tuple[int, float]]] = {}
    cases = [(*EXACT, DTYPE, 0), (*COMPACT, DTYPE, 0), (*EXACT, DTYPE, 1), (*COMPACT, DTYPE, 1)]
    for params in sizes.held:
        for label, found in costs.temporary(params, cases).items():
            lines.setdefault(f"halfstep {label.replace(f', {DTYPE}', '')}", []).append((params, found / 2**20))
    figure = "MiB that a step holds beside params, gradients and state while it runs, at the most."
    return Table("Temporary memory", "params", figure, lines)


MEASURES: tuple[Callable[[Sizes, int], Table], ...] = (
    against_params,
    against_tensors,
    against_threads,
    temporary_memory,
)
#: told apart without colour too
LOOKS = (("o", "-"), ("D", "--"), ("s", ":"), ("v", "-."), ("x", "-"))


def picture(tables: Sequence[Table]) -> Figure:
    """Draw a panel a table."""
    figure = Figure(figsize=(11, 8.5), layout="constrained")
    panels = figure.subplots(2, 2).flat
    for axes, table in zip(panels, tables, strict=True):
        _panel(axes, table)
    return figure


def _panel(axes: Any, table: Table) -> None:
    for (label, points), (marker, style) in zip(table.lines.items(), LOOKS, strict=False):
        axes.plot(
            *zip(*points, strict=True), label=label, marker=marker, linestyle=style, markersize=4.5, linewidth=1.3
        )
    if table.size == "threads":
        axes.set_xticks(sorted({size for points in table.lines.values() for size, _ in points}))
        axes.set_ylim(bottom=0)
    else:
        axes.set_xscale("log")
        if table.figure.startswith("MiB"):
            axes.set_ylim(bottom=0)
        else:
            axes.set_yscale("log")
    axes.set_title(table.title)
    axes.set_xlabel(table.size)
    axes.set_ylabel(table.figure.partition(",")[0].partition(" that")[0], fontsize=9)
    axes.grid(alpha=0.3)
    if table.lines:
        axes.legend(fontsize=8)


def main(arguments: Sequence[str] | None = None, sizes: Sizes | None = None) -> None:
    """Measure, print the tables, and write the page and its picture."""
    options, out, command = parsed(parser(__doc__, "scaling", rounds=11), arguments)
    machine = describe(torch.device("cpu"))
    print(machine)
    tables = []
    for take in MEASURES:
        tables.append(take(sizes or Sizes(), options.rounds))
        print(f"\n{tables[-1].markdown()}", flush=True)
    made = f"## How it was made\n\n`{command}`, {date.today().isoformat()}, on:\n\n{machine}\n"
    write_text(out / "scaling.md", "\n".join([INTRO, *(table.markdown() for table in tables), made]))
    figure = picture(tables)
    write_atomically(out / "scaling.png", lambda temporary: figure.savefig(temporary, dpi=120, format="png"))
    print(f"In {out}: scaling.md, scaling.png")


if __name__ == "__main__":
    main()
