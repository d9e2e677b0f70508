"""The commands of `halfstep`."""

import typer

from halfstep.cli.train import train

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
app.command()(train)


# With a callback a lone command keeps its name: `halfstep train`.
@app.callback()
def halfstep() -> None:
    """Train PyTorch models whose weights and gradients are 16 bit, with the result of float32 training."""
