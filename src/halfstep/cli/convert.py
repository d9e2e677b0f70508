"""`halfstep convert`: the arguments, and nothing else."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from halfstep.cli.converting import AIMS, SUFFIXES, Conversions, read, write
from halfstep.cli.errors import InputError
from halfstep.cli.progress import say
from halfstep.formats import MOMENTS, WEIGHTS


def convert(
    source: Annotated[Path, typer.Argument(metavar="IN", help="A checkpoint of torch.save, or of safetensors.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help=f"The new one: {', '.join(SUFFIXES)}.")],
    weights: Annotated[
        str | None, typer.Option(help=f"Keep the weights as {', '.join(WEIGHTS)}.", show_default="as they are")
    ] = None,
    moments: Annotated[
        str | None, typer.Option(help=f"Keep the moments as {', '.join(MOMENTS)}.", show_default="as they are")
    ] = None,
    to: Annotated[
        str,
        typer.Option(
            help=f"{' or '.join(AIMS)}: for torch, float32 weights and torch.optim's state; float32, the weights alone."
        ),
    ] = "halfstep",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT where there is one.")] = False,
) -> int:
    """Convert a checkpoint: between files, between formats, to torch's state or to float32 weights.

    OUT is written as a whole or not at all. What was rounded on the way is told.
    """
    if target.suffix not in SUFFIXES:
        raise InputError(f"OUT {target}: must end in one of {', '.join(SUFFIXES)}")
    if target.exists() and not overwrite:
        raise InputError(f"OUT {target}: there is such a file; add --overwrite to replace it, or give another name")
    if not target.parent.is_dir():
        raise InputError(f"OUT {target}: there is no folder {target.parent}")
    console = Console()
    say(
        console, f"Reading {source}, {source.stat().st_size / 1e6:,.1f} MB" if source.is_file() else f"Reading {source}"
    )
    conversions = Conversions(read(source), weights, moments, to)
    columns = (
        TextColumn("Converting"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=conversions.params)
        content = conversions.convert(lambda name: progress.update(task, advance=1, description=name))
    for line in conversions.summary():
        say(console, f"  {line}")
    say(console, f"Writing {target}")
    write(target, content)
    say(console, f"{conversions.params} params converted. In {target}: {target.stat().st_size / 1e6:,.1f} MB")
    return 0
