"""The same model on the same batches, four ways, in one table and one picture."""

import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from halfstep.cli.errors import InputError
from halfstep.cli.files import write_json, write_text
from halfstep.cli.interrupt import Interrupt
from halfstep.cli.loop import introduce
from halfstep.cli.machine import describe
from halfstep.cli.picture import draw_comparison
from halfstep.cli.progress import Progress, say
from halfstep.cli.settings import Settings, claim, command_line
from halfstep.cli.text import load_text
from halfstep.cli.training import Training, halfstep_adamw, rising_and_falling

COLUMNS = ("", "validation loss", "from float32", "bytes a parameter", "optimizer ms a step", "skipped steps")


@dataclass
class Outcome:
    """What became of one way.

    Args:
        name: the way.
        curve: (step, validation loss), as far as it came.
        bytes_held: weights, gradients and optimizer state after a backward, in bytes a parameter.
        bytes_at_step: the same just before the optimizer's step, where gradients may have become float32.
        milliseconds: each step's time from the backward's end to the updated scale: unscale, clip, step, update.
        skipped: steps left out because a gradient was not finite.
        end: the step that broke it, and how; None for a run that came through.
    """

    name: str
    curve: list[tuple[int, float]] = field(default_factory=list)
    bytes_held: float | None = None
    bytes_at_step: float | None = None
    milliseconds: list[float] = field(default_factory=list)
    skipped: int = 0
    end: tuple[int, str] | None = None

    @property
    def validation_loss(self) -> float | None:
        """The last validation loss; None for a run that broke."""
        return None if self.end else self.curve[-1][1]


def compare(settings: Settings, console: Console) -> int:
    """Train all four ways, show and write their table and picture, and return the exit code.

    Raises:
        InputError: the arguments cannot be met; nothing has been changed then.
    """
    if settings.dtype == "float32":
        raise InputError("--dtype float32: --compare sets a 16-bit dtype beside float32; choose float16 or bfloat16")
    text = load_text(settings.text, settings.sizes.window)
    half, scaled = settings.torch_dtype, settings.dtype == "float16"
    rate = rising_and_falling(settings.lr, settings.sizes.warmup, settings.steps)

    def torch_adamw(params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW([param for _, param in params], lr=settings.lr)

    try:
        trainings = {
            "torch AdamW, float32": Training(settings, text, torch.float32, torch_adamw, rate, scaled=False),
            f"torch AdamW, {settings.dtype}": Training(settings, text, half, torch_adamw, rate, scaled=False),
            **{
                f"halfstep {weights}, {settings.dtype}": Training(
                    settings, text, half, halfstep_adamw(settings, weights), rate, scaled
                )
                for weights in ("split16", "master32")
            },
        }
    except ValueError as error:
        raise InputError(str(error)) from error
    _, plain, *_ = trainings
    claim(settings.out)
    introduce(settings, trainings[plain], console)
    outcomes = []
    with Interrupt() as interrupt:
        for name in list(trainings):
            # Popped, so that each model is gone before the next one trains.
            outcomes.append(_run(name, trainings.pop(name), interrupt, console, may_break=name == plain))
            if interrupt.signal is not None:
                say(console, "Stopped; --compare keeps nothing of a part. To start again:\n  " + _command(settings))
                return 128 + interrupt.signal
    _report(settings, outcomes, console)
    return 0


def _run(name: str, training: Training, interrupt: Interrupt, console: Console, may_break: bool) -> Outcome:
    outcome = Outcome(name)
    with Progress(console, training.settings.steps, label=f"{name}: ") as progress:
        for step in range(1, training.settings.steps + 1):
            if interrupt.signal is not None:
                break
            try:
                progress.show(_step(training, step, outcome))
            except Exception as error:
                if not may_break:
                    raise
                # Whatever PyTorch says to a float16 model is what this row is there to show.
                outcome.end = step, f"{type(error).__name__} in step {step}"
            if outcome.end:
                break
    if outcome.end:
        say(console, f"{name}: {outcome.end[1]}")
    return outcome


def _step(training: Training, step: int, outcome: Outcome) -> dict[str, Any]:
    settings, sizes = training.settings, training.settings.sizes
    began = time.perf_counter()
    scale = training.scaler.get_scale() if training.scaler.is_enabled() else None
    loss = training.backward(step)
    training.synchronize()
    held = training.bytes_a_parameter()
    before_unscale = time.perf_counter()
    training.unscale()
    unscaled = time.perf_counter() - before_unscale
    at_step = training.bytes_a_parameter()
    before_apply = time.perf_counter()
    outcome.skipped += training.apply()
    training.synchronize()
    applied = time.perf_counter() - before_apply
    outcome.milliseconds.append(1e3 * (unscaled + applied))
    if not training.finite():
        outcome.end = step, f"NaN from step {step}"
        # A run that breaks in its first step has its moments only now.
        held = at_step = training.bytes_a_parameter()
    training.finish()
    # The first step begins without moments, so the most that was held is what counts.
    outcome.bytes_held = max(held, outcome.bytes_held or 0)
    outcome.bytes_at_step = max(at_step, outcome.bytes_at_step or 0)
    tokens = sizes.batch * sizes.shape.context / (time.perf_counter() - began)
    row = {"step": step, "loss": loss, "scale": scale, "skipped": outcome.skipped, "tokens_per_second": tokens}
    if outcome.end is None and (step % sizes.validation_every == 0 or step == settings.steps):
        row["validation_loss"] = training.validation_loss()
        outcome.curve.append((step, row["validation_loss"]))
    return row


def _report(settings: Settings, outcomes: list[Outcome], console: Console) -> None:
    rows = [_cells(outcome, outcomes[0]) for outcome in outcomes]
    table = Table(title=f"{settings.dtype}, lr {settings.lr:g}, {settings.steps} steps")
    for place, column in enumerate(COLUMNS):
        table.add_column(column, justify="right" if place else "left")
    for row in rows:
        table.add_row(*row)
    notes = [
        "Validation loss in nats a byte; its distance is relative to float32's.",
        _bytes_note(settings),
        "Optimizer ms: the median of what lies between backward and the next forward: "
        + ("unscale, clip, step and scale update." if settings.clip else "unscale, step and scale update."),
    ]
    machine = describe(settings.torch_device)
    console.print(table)
    for line in (*notes, machine):
        say(console, line)
    markdown = [f"| {' | '.join(COLUMNS)} |", "|---|" + "---:|" * (len(COLUMNS) - 1)]
    markdown += [f"| {' | '.join(row)} |" for row in rows]
    write_text(
        settings.out / "compare.md",
        "\n".join([f"`{_command(settings)}`", "", *markdown, "", *(f"{note}  " for note in notes), machine, ""]),
    )
    title = f"{settings.dtype}, lr {settings.lr:g}: the same model and batches, four ways"
    curves = [(outcome.name, outcome.curve, outcome.end) for outcome in outcomes]
    draw_comparison(settings.out / "compare.png", title, curves)
    write_json(
        settings.out / "compare.json",
        {
            "command": _command(settings),
            "machine": machine,
            "ways": [_entry(outcome, outcomes[0]) for outcome in outcomes],
        },
    )
    say(console, f"In {settings.out}: compare.md, compare.png, compare.json")


def _distance(outcome: Outcome, reference: Outcome) -> float | None:
    if outcome.validation_loss is None or not reference.validation_loss:
        return None
    return 100 * (outcome.validation_loss / reference.validation_loss - 1)


def _cells(outcome: Outcome, reference: Outcome) -> list[str]:
    distance = _distance(outcome, reference)
    held, at_step = outcome.bytes_held, outcome.bytes_at_step
    if held is None or at_step is None:
        size = "-"
    else:
        size = f"{held:.1f}" if f"{held:.1f}" == f"{at_step:.1f}" else f"{held:.1f} ({at_step:.1f})"
    return [
        outcome.name,
        outcome.end[1] if outcome.end else f"{outcome.validation_loss:.4f}",
        "-" if distance is None or outcome is reference else f"{distance:+.2f} %",
        size,
        f"{statistics.median(outcome.milliseconds):.2f}" if outcome.milliseconds else "-",
        str(outcome.skipped),
    ]


def _bytes_note(settings: Settings) -> str:
    note = "Bytes a parameter: weights, gradients and optimizer state as held after backward"
    if settings.dtype == "float16" and settings.clip:
        return f"{note}; in brackets, where they differ, just before the step, with the float32 gradients to clip."
    return f"{note} and just before the step."


def _entry(outcome: Outcome, reference: Outcome) -> dict[str, Any]:
    return {
        "name": outcome.name,
        "validation_loss": outcome.validation_loss,
        "percent_from_float32": _distance(outcome, reference),
        "bytes_after_backward": outcome.bytes_held,
        "bytes_before_step": outcome.bytes_at_step,
        "optimizer_milliseconds": statistics.median(outcome.milliseconds) if outcome.milliseconds else None,
        "skipped": outcome.skipped,
        "broke_at_step": outcome.end[0] if outcome.end else None,
        "broke_how": outcome.end[1] if outcome.end else None,
        "curve": outcome.curve,
    }


def _command(settings: Settings) -> str:
    return command_line(settings) + " --compare"
