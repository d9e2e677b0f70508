"""The commands of `halfstep`."""

import typer

from halfstep.cli.bench import bench
from halfstep.cli.convert import convert
from halfstep.cli.train import train

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
app.command()(train)
app.command()(bench)
app.command()(convert)


@app.callback()
def halfstep() -> None:
    """Train PyTorch models whose weights and gradients are 16 bit, with the result of float32 training."""
