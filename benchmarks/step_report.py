"""What a run of benchmarks/step.py says of its targets, and its page."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from halfstep.bench.peers import TEACHING
from halfstep.bench.results import Measured, Results, Row, markdown
from halfstep.bench.roofline import draw
from halfstep.bench.subjects import COMPACT, EXACT, FOREACH, FUSED, MAIN, SINGLE, WHOLE, halfstep_label
from halfstep.cli.files import write_json, write_text

INTRO = """# How fast is a step?

A step of an optimizer moves bytes: arithmetic is nearly free beside it, so the memory's own speed is the limit. This
page is one run of `benchmarks/step.py` on the CPU of one machine; no GPU was used. `benchmarks/gpu.py`, which times a
GPU, has not run yet: [gpu.md](gpu.md) has what is known without. Before anything is timed, every pair of formats is
stepped by the compiled backend and by PyTorch's operators, and one bit that differs ends the run.

All subjects of a table are timed in turn, round by round, in an order that changes with the round, and every ratio is
the median of the ratios within a round: whatever else the machine does, it does to both. All step the same values.
`halfstep bench` repeats the tables anywhere; the numbers of other machines will differ, the ratios less so.

![One step's milliseconds beside the limit that the memory sets](performance.png)
"""

Figures = dict[str, float]
Pair = tuple[str, str]


@dataclass(frozen=True)
class Target:
    """What a run has to reach.

    Args:
        key: by which a note explains that it is not met.
        what: in words.
        limit: in words.
        figures: what a run reached, by what each figure is of; empty where it was not measured.
        met: whether a figure meets it.
        shown: a figure in words.
    """

    key: str
    what: str
    limit: str
    figures: Callable[[Results], Figures]
    met: Callable[[float], bool]
    shown: Callable[[float], str] = "{:.2f}".format

    def verdict(self, results: Results) -> str:
        """Say whether every figure meets it."""
        figures = self.figures(results)
        if not figures:
            return "-"
        return "yes" if all(map(self.met, figures.values())) else "no"

    def cells(self, results: Results) -> tuple[str, ...]:
        """Return its row of the table."""
        said = ", ".join(f"{self.shown(value)} ({name})" for name, value in self.figures(results).items())
        return self.what, self.limit, said or "not measured", self.verdict(results)


def _of_triad(pair: Pair) -> Callable[[Results], Figures]:
    return lambda results: _each_dtype(results, "one", halfstep_label(*pair), lambda m, row: m.bandwidth_ratio(row))


def _faster(pair: Pair, than: str, shape: str = "one", whole: str = "") -> Callable[[Results], Figures]:
    label = halfstep_label(*pair) + whole
    return lambda results: _each_dtype(results, shape, label, lambda m, row: m.times_as_fast(row, than + whole))


def _than_teaching(results: Results) -> Figures:
    return _each_dtype(results, "one", halfstep_label(*EXACT), lambda m, row: m.times_as_fast(row, TEACHING, row.dtype))


def _many_to_one(results: Results) -> Figures:
    figures = {}
    for pair in MAIN:
        label = halfstep_label(*pair)
        found = _each_dtype(results, "gpt2", label, _to_single)
        figures |= {f"{' × '.join(pair)}, {dtype}": value for dtype, value in found.items()}
    return figures


def _to_single(measured: Measured, row: Row) -> float | None:
    """Return the time a param of many tensors, by that of one tensor in the same formats."""
    single = measured.row(row.label + SINGLE, row.dtype)
    return None if single is None else measured.times_as_fast(single, row.label, row.dtype)


def _each_dtype(results: Results, shape: str, label: str, figure: Callable[[Measured, Row], float | None]) -> Figures:
    """Return a figure of the rows with this label, by their dtype."""
    measured = results.shape(shape)
    if measured is None:
        return {}
    found = {row.dtype: figure(measured, row) for row in measured.rows if row.label == label}
    return {dtype: value for dtype, value in found.items() if value is not None}


def _cost(key: str, scale: float = 1.0) -> Callable[[Results], Figures]:
    """Return the largest of a cost's figures."""

    def figures(results: Results) -> Figures:
        found: Mapping[str, float] = results.costs.get(key, {})
        most = max(found, key=found.__getitem__, default=None)
        return {} if most is None else {most: scale * found[most]}

    return figures


def _at_least(limit: float) -> Callable[[float], bool]:
    return lambda value: value >= limit


def _at_most(limit: float) -> Callable[[float], bool]:
    return lambda value: value <= limit


_TIMES: Callable[[float], str] = "{:.2f} ×".format
_SECONDS: Callable[[float], str] = "{:.2f} s".format

TARGETS = (
    Target("exact bandwidth", "split16 + float32 moments, bandwidth ÷ triad's", "≥ 0.90", _of_triad(EXACT),
           _at_least(0.90)),
    Target("compact bandwidth", "split8 + block8, bandwidth ÷ triad's", "≥ 0.55; 0.75 is the aim", _of_triad(COMPACT),
           _at_least(0.55)),
    Target("exact fused", "split16 + float32 against torch fused on float32", "≥ 1.1 ×", _faster(EXACT, FUSED),
           _at_least(1.1), _TIMES),
    Target("compact fused", "split8 + block8 against torch fused on float32", "≥ 1.6 ×; 2 × is the aim",
           _faster(COMPACT, FUSED), _at_least(1.6), _TIMES),
    Target("teaching", "split16 + float32 against the teaching implementation", "≥ 7 ×", _than_teaching, _at_least(7),
           _TIMES),
    Target("exact whole", "scaled and clipped step, split16 + float32, against torch's on float32", "≥ 1.6 ×",
           _faster(EXACT, FUSED, whole=WHOLE), _at_least(1.6), _TIMES),
    Target("compact whole", "scaled and clipped step, split8 + block8, against torch's on float32", "≥ 3 ×",
           _faster(COMPACT, FUSED, whole=WHOLE), _at_least(3), _TIMES),
    Target("many tensors", "time a param, GPT-2 small's 148 tensors ÷ one tensor", "≤ 1.1", _many_to_one,
           _at_most(1.1)),
    Target("small tensors", "20,000 tensors of 100, split16 + float32 against torch foreach", "faster",
           _faster(EXACT, FOREACH, shape="many"), lambda value: value > 1, _TIMES),
    Target("temporary memory", "temporary memory of a step, the most", "< 64 MiB", _cost("temporary_bytes", 2**-20),
           lambda value: value < 64, "{:.1f} MiB".format),
    Target("import", "import halfstep after import torch", "≤ 0.3 s", _cost("import_seconds"), _at_most(0.3), _SECONDS),
    Target("first step", "first step of a process, compiling, the slowest", "≤ 3 s", _cost("first_step_seconds"),
           _at_most(3), _SECONDS),
)  # fmt: skip


def targets(results: Results, unmet: Mapping[str, str]) -> str:
    """Return the table of targets, and why those that are not met are not."""
    table = markdown(("", "target", "reached", "met"), [target.cells(results) for target in TARGETS])
    notes = [
        f"- {target.what}: {unmet.get(target.key, 'not explained yet.')}"
        for target in TARGETS
        if target.verdict(results) == "no"
    ]
    return "\n\n".join([table, *(["Not met:\n\n" + "\n".join(notes)] if notes else [])])


def write_report(folder: Path, results: Results, unmet: Mapping[str, str], command: str) -> None:
    """Write ``performance.md``, ``performance.json`` and ``performance.png`` into ``folder``."""
    page = [
        INTRO,
        f"## Targets\n\n{targets(results, unmet)}\n",
        results.markdown(),
        f"## How it was made\n\n`{command}`\n",
    ]
    write_text(folder / "performance.md", "\n".join(page))
    reached = [dict(zip(("what", "target", "reached", "met"), t.cells(results), strict=True)) for t in TARGETS]
    write_json(folder / "performance.json", {"command": command, "targets": reached, **results.as_json()})
    draw(folder / "performance.png", results.shapes[0], results.machine)
