"""`halfstep train`: the arguments, and nothing else."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from halfstep.cli.compare import compare as compare_ways
from halfstep.cli.errors import InputError
from halfstep.cli.loop import run
from halfstep.cli.settings import Settings


def train(
    text: Annotated[
        Path | None, typer.Option(help="Text to learn from.", show_default="Python's standard library")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of weights and gradients: float16, bfloat16 or float32.")] = "float16",
    weights: Annotated[str, typer.Option(help="How the optimizer keeps what 16-bit weights drop.")] = "split16",
    moments: Annotated[str, typer.Option(help="How the optimizer keeps its moments.")] = "float32",
    steps: Annotated[int, typer.Option(help="The number of the last step.")] = 300,
    lr: Annotated[
        float, typer.Option(help="The learning rate after 50 steps of warmup; with --compare it falls to 0 from there.")
    ] = 1e-3,
    clip: Annotated[float, typer.Option(help="The largest gradient norm; 0 for no clipping.")] = 1.0,
    seed: Annotated[
        int, typer.Option(help="Decides the first weights, the batches, rounding by chance and the sample.")
    ] = 0,
    out: Annotated[
        Path | None,
        typer.Option(
            help="The folder for metrics, pictures and checkpoint. A run is never overwritten; a comparison is "
            "replaced by a new one.",
            show_default="halfstep-run; with --compare, halfstep-compare-DTYPE-lrLR",
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    compare: Annotated[
        bool, typer.Option("--compare", help="Train four ways: torch in float32 and 16 bit, halfstep twice.")
    ] = False,
) -> int:
    """Train a small byte-level GPT on text, in half precision.

    Ctrl-C saves and leaves; --resume continues bit for bit as if never stopped.
    """
    if compare and resume:
        raise InputError("--resume: --compare keeps nothing to go on with; leave one of them out")
    if compare and weights != "split16":
        raise InputError(f"--weights {weights}: --compare trains split16 and master32 both; leave --weights out")
    name = f"halfstep-compare-{dtype}-lr{lr:g}" if compare else "halfstep-run"
    settings = Settings(
        out=Path(name) if out is None else out, text=text, dtype=dtype, weights=weights, moments=moments, steps=steps,
        lr=lr, clip=clip, seed=seed, device=device,
    )  # fmt: skip
    console = Console()
    return compare_ways(settings, console) if compare else run(settings, resume, console)
