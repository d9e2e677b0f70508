"""What a person sees and presses while a run goes on."""

import io
import os
import signal

import pytest
from rich.console import Console

from halfstep.cli import progress
from halfstep.cli.interrupt import Interrupt
from halfstep.cli.progress import Progress


def row(step: int, **more: float | None) -> dict[str, float | None]:
    return {"step": step, "loss": 2.5, "scale": 65536.0, "skipped": 1, "tokens_per_second": 1234.0, **more}


def shown(terminal: bool, *rows: dict[str, float | None]) -> str:
    stream = io.StringIO()
    with Progress(Console(file=stream, force_terminal=terminal, width=120), steps=4, label="way: ") as line:
        for each in rows:
            line.show(each)
    return stream.getvalue()


def test_a_terminal_has_one_line_that_changes() -> None:
    output = shown(True, row(1), row(2, validation_loss=2.25), row(3))
    assert "way: step 1/4  loss 2.5000  1,234 tokens/s  scale 65536  skipped 1" in output
    assert "way: step 3/4  loss 2.5000  validation 2.2500  1,234 tokens/s  scale 65536  skipped 1" in output
    # Each but the last is wiped by a return to the line's start.
    assert output.count("\n") == 1


def test_elsewhere_validations_and_the_last_step_are_lines() -> None:
    output = shown(False, row(1), row(2, validation_loss=2.25), row(3), row(4, scale=None))
    assert output == (
        "way: step 2/4  loss 2.5000  validation 2.2500  1,234 tokens/s  scale 65536  skipped 1\n"
        "way: step 4/4  loss 2.5000  validation 2.2500  1,234 tokens/s  skipped 1\n"
    )


def test_elsewhere_a_slow_run_is_heard_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", -1.0)
    assert shown(False, row(1), row(2), row(3)).count("\n") == 3


def test_a_first_signal_is_remembered_and_a_second_acts() -> None:
    # a shell's background job ignores SIGINT
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with Interrupt() as interrupt:
            os.kill(os.getpid(), signal.SIGINT)
            assert interrupt.signal == signal.SIGINT
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
