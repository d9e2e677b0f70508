"""One training run in its folder: begun, interrupted, resumed, finished."""

import math
import statistics
import time
from typing import Any

from rich.console import Console

import halfstep
from halfstep.cli import checkpoint
from halfstep.cli.errors import InputError
from halfstep.cli.files import write_json, write_text
from halfstep.cli.interrupt import Interrupt
from halfstep.cli.machine import describe
from halfstep.cli.metrics import Metrics
from halfstep.cli.picture import draw_run
from halfstep.cli.progress import Progress, say
from halfstep.cli.settings import Settings, claim, command_line
from halfstep.cli.text import load_text
from halfstep.cli.training import Training, computes_in_float32, halfstep_adamw, rising

METRICS = "metrics.jsonl"


def run(settings: Settings, resume: bool, console: Console) -> int:
    """Train to ``settings.steps``, from the beginning or from the checkpoint, and return the exit code.

    Raises:
        InputError: the arguments cannot be met; nothing has been changed then.
    """
    text = load_text(settings.text, settings.sizes.window)
    file = settings.out / checkpoint.NAME
    state: dict[str, Any] | None = None
    if resume:
        state = checkpoint.load(file)
        checkpoint.check(state, settings, text)
    elif file.exists():
        raise InputError(
            f"--out {settings.out}: already holds a run; add --resume to go on with it, give another --out, or delete "
            "that folder"
        )
    try:
        make_optimizer = halfstep_adamw(settings, settings.weights)
        scaled = settings.dtype == "float16"
        training = Training(settings, text, settings.torch_dtype, make_optimizer, rising(settings), scaled)
    except ValueError as error:
        # The optimizer knows its formats, and what it says of them is for the person who typed their names.
        raise InputError(str(error)) from error
    claim(settings.out)
    introduce(settings, training, console)
    return _run(training, state, console)


def introduce(settings: Settings, training: Training, console: Console) -> None:
    """Say what is about to be trained, on what."""
    count = sum(param.numel() for param in training.model.parameters())
    say(
        console,
        f"A GPT of {count:,} parameters, {settings.dtype}, on {training.text.name}; {describe(training.device)}",
    )
    if computes_in_float32(settings.torch_dtype, training.device):
        say(console, "This CPU has no float16 products: they are computed in float32 and rounded to float16")


def _run(training: Training, state: dict[str, Any] | None, console: Console) -> int:
    settings, sizes = training.settings, training.settings.sizes
    metrics_file = settings.out / METRICS
    step = skipped = 0
    if state is None:
        metrics = Metrics(metrics_file, [])
        # From here on a kill at any moment leaves a checkpoint.
        checkpoint.save(training, step, skipped)
    else:
        step, skipped = state["step"], state["skipped"]
        checkpoint.restore(training, state)
        metrics = Metrics.resumed(metrics_file, step)
        say(console, f"Resuming after step {step}")
    with metrics, Interrupt() as interrupt, Progress(console, settings.steps) as progress:
        while step < settings.steps and interrupt.signal is None:
            began = time.perf_counter()
            step += 1
            # The scale that this step's loss is multiplied by; the step may change it.
            scale = training.scaler.get_scale() if training.scaler.is_enabled() else None
            loss = training.backward(step)
            training.unscale()
            skipped += training.apply()
            training.finish()
            seconds = time.perf_counter() - began
            row = {"step": step, "loss": loss, "scale": scale, "skipped": skipped}
            row["tokens_per_second"] = sizes.batch * sizes.shape.context / seconds
            if step % sizes.validation_every == 0:
                row["validation_loss"] = training.validation_loss()
            metrics.append(row)
            progress.show(row)
            if step % sizes.checkpoint_every == 0 and step < settings.steps:
                metrics.sync()
                checkpoint.save(training, step, skipped)
        metrics.sync()
        checkpoint.save(training, step, skipped)
    if step < settings.steps and interrupt.signal is not None:
        say(console, f"Stopped and saved after step {step}. To go on:\n  {command_line(settings)} --resume")
        return 128 + interrupt.signal
    _finish(training, metrics, skipped, console)
    return 0


def _finish(training: Training, metrics: Metrics, skipped: int, console: Console) -> None:
    settings = training.settings
    # Not a row of metrics.jsonl: a run that is extended later has the same rows as one that was longer from the start.
    validation = training.validation_loss()
    speed = statistics.median(row["tokens_per_second"] for row in metrics.rows) if metrics.rows else None
    sample = training.sample()
    write_json(
        settings.out / "summary.json",
        {
            "steps": settings.steps,
            "loss": metrics.rows[-1]["loss"] if metrics.rows else None,
            "validation_loss": validation,
            "skipped": skipped,
            "scale": training.scaler.get_scale() if training.scaler.is_enabled() else None,
            "tokens_per_second": speed,
            "parameters": sum(param.numel() for param in training.model.parameters()),
            "settings": checkpoint.identity(settings, training.text),
            "float32_products": computes_in_float32(settings.torch_dtype, training.device),
            "machine": describe(training.device),
            "halfstep": halfstep.__version__,
        },
    )
    title = (
        f"halfstep train: {settings.dtype}, weights {settings.weights}, moments {settings.moments}, lr {settings.lr:g}"
    )
    draw_run(settings.out / "loss.png", title, metrics.rows, (settings.steps, validation))
    write_text(settings.out / "sample.txt", sample)
    say(console, f"A sample of what it writes now:\n\n{sample}")
    result = f"Validation loss {validation:.4f} after {settings.steps} steps, {skipped} skipped."
    files = f"{METRICS}, loss.png, summary.json, sample.txt, {checkpoint.NAME}"
    say(console, f"{result} In {settings.out}: {files}")
    if not math.isfinite(validation):
        say(console, "The loss is not finite: the weights were driven out of range. Try a lower --lr")
