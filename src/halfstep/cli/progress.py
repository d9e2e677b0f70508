"""The line that tells how a run is doing."""

import time
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.text import Text as RichText

from halfstep.cli.metrics import Row

SECONDS_BETWEEN_LINES = 10.0


class Progress:
    """One live line on a terminal; elsewhere a plain line at each validation, and now and then.

    Args:
        console: where to write.
        steps: the last step.
        label: what stands before the line.
    """

    def __init__(self, console: Console, steps: int, label: str = "") -> None:
        self._console = console
        self._steps = steps
        self._label = label
        self._validation = ""
        self._printed = time.monotonic()
        self._line = RichText("")
        self._live = Live(self._line, console=console, auto_refresh=False) if console.is_terminal else None

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def show(self, row: Row) -> None:
        """Show a step's row of `metrics.jsonl`."""
        validated = row.get("validation_loss") is not None
        if validated:
            self._validation = f"  validation {row['validation_loss']:.4f}"
        scale = "" if row["scale"] is None else f"  scale {row['scale']:g}"
        text = (
            f"{self._label}step {row['step']}/{self._steps}  loss {row['loss']:.4f}{self._validation}"
            f"  {row['tokens_per_second']:,.0f} tokens/s{scale}  skipped {row['skipped']}"
        )
        if self._live:
            self._live.update(RichText(text, no_wrap=True, overflow="ellipsis"), refresh=True)
        elif validated or row["step"] == self._steps or time.monotonic() - self._printed > SECONDS_BETWEEN_LINES:
            self._printed = time.monotonic()
            say(self._console, text)


def say(console: Console, text: str) -> None:
    """Print ``text`` as it is: no markup, no colours, no wrapping."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)
