"""`halfstep bench`: the arguments, and nothing else."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from halfstep.bench.parity import Red
from halfstep.bench.roofline import draw
from halfstep.bench.run import run
from halfstep.bench.settings import NAMES, SHAPES, Settings
from halfstep.bench.subjects import DTYPES
from halfstep.cli.files import write_json, write_text
from halfstep.cli.progress import say
from halfstep.cli.settings import claim


def bench(
    params: Annotated[int, typer.Option(help="Elements of the one large tensor.")] = Settings.params,
    shape: Annotated[
        list[str] | None,
        typer.Option(help=f"What is stepped, of {', '.join(SHAPES)}; may be given again.", show_default="one"),
    ] = None,
    rounds: Annotated[int, typer.Option(help="How often each is timed.")] = Settings.rounds,
    dtype: Annotated[
        list[str] | None, typer.Option(help=f"Of halfstep's params: {' or '.join(DTYPES)}.", show_default="both")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Beside the memory and torch's fused AdamW, time only this, of {', '.join(NAMES)}; may be "
            "given again.",
            show_default="all",
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="The folder for bench.json, bench.md and bench.png.")] = Path(
        "halfstep-bench"
    ),
) -> int:
    """Time a step on the CPU in every format, beside the memory's own speed, torch and other libraries.

    All are timed in turn, round by round, after their bits were checked; ratios are taken within a round.
    """
    settings = Settings(
        params=params, shape=tuple(shape or Settings.shape), rounds=rounds, dtype=tuple(dtype or Settings.dtype),
        only=tuple(only or ()),
    )  # fmt: skip
    claim(out)
    console = Console()
    try:
        results = run(settings, lambda text: say(console, text))
    except Red as error:
        say(Console(stderr=True), f"halfstep: {error}")
        return 1
    say(console, results.plain())
    write_json(out / "bench.json", results.as_json())
    write_text(out / "bench.md", results.markdown())
    draw(out / "bench.png", results.shapes[0], results.machine)
    say(console, f"In {out}: bench.json, bench.md, bench.png")
    return 0
