"""Ctrl-C and SIGTERM, asked about between two steps."""

import signal
from types import FrameType
from typing import Self


class Interrupt:
    """While entered, remember the first SIGINT or SIGTERM in ``signal``; a second one acts at once."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._remember)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _remember(self, number: int, _: FrameType | None) -> None:
        self.signal = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]
