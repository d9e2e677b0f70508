"""`checkpoint.pt`: all that a run needs to go on, whole at every moment."""

import dataclasses
from pathlib import Path
from typing import Any

import torch

from halfstep.cli.errors import InputError
from halfstep.cli.settings import Settings
from halfstep.cli.text import Text
from halfstep.cli.training import Training
from halfstep.files import write_atomically

NAME = "checkpoint.pt"

# What may change between a run and its continuation: where it goes on to, and where it lies. The text is compared by
# its content, and the device by what was meant.
_FREE = ("out", "steps", "text", "device", "sizes")


def identity(settings: Settings, text: Text) -> dict[str, Any]:
    """Return what decides a run's numbers; a run can only be resumed with the same."""
    named = {key: value for key, value in vars(settings).items() if key not in _FREE}
    sizes = dataclasses.asdict(settings.sizes)
    return {**named, "device": settings.torch_device.type, "text": text.name, "digest": text.digest, "sizes": sizes}


def save(training: Training, step: int, skipped: int) -> None:
    """Write the checkpoint of ``step`` in place of the one before."""
    state = {
        "step": step,
        "skipped": skipped,
        "identity": identity(training.settings, training.text),
        "model": training.model.state_dict(),
        "optimizer": training.optimizer.state_dict(),
        "scaler": training.scaler.state_dict(),
    }
    write_atomically(training.settings.out / NAME, lambda temporary: torch.save(state, temporary))


def load(file: Path) -> dict[str, Any]:
    """Read a checkpoint without running any code that it may hold.

    Raises:
        InputError: there is none, or it is none of ours.
    """
    if not file.exists():
        raise InputError(
            f"--resume: finds no {file.name} in --out {file.parent}; give the --out of an earlier run, or leave "
            "--resume out to start one"
        )
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
        step, theirs = state["step"], state["identity"]
        if not (isinstance(step, int) and "sizes" in theirs):
            raise TypeError("other contents")
    except Exception as error:
        # torch.load answers with half a dozen kinds of exceptions to a file that is not its own.
        raise InputError(
            f"--resume: {file} is not a checkpoint of `halfstep train`; give the --out of an earlier run, or start a "
            "new one in another"
        ) from error
    return state


def check(state: dict[str, Any], settings: Settings, text: Text) -> None:
    """Make sure that a checkpoint continues the run that ``settings`` and ``text`` describe.

    Raises:
        InputError: it was made with other ones, or is already past ``settings.steps``.
    """
    theirs, ours = state["identity"], identity(settings, text)
    where, way_out = f"the run in --out {settings.out}", "or start a new run in another --out"
    if theirs["digest"] != ours["digest"]:
        raise InputError(
            f"--text {text.name}: is not the text that {where} learns from ({theirs['text']}, as it was then); resume "
            f"with that, {way_out}"
        )
    for name, value in ours.items():
        if name not in ("text", "digest", "sizes") and theirs.get(name) != value:
            then = theirs.get(name)
            raise InputError(
                f"--{name} {value}: {where} was started with {then}; resume with --{name} {then}, {way_out}"
            )
    if theirs["sizes"] != ours["sizes"]:
        raise InputError(
            f"--resume: {where} was made by another version, with another model; resume it there, {way_out}"
        )
    if state["step"] > settings.steps:
        raise InputError(f"--steps {settings.steps}: {where} is already at step {state['step']}; give at least that")


def restore(training: Training, state: dict[str, Any]) -> None:
    """Put a checkpoint's weights, optimizer state and loss scale into ``training``.

    Raises:
        InputError: the run went wrong before it was saved.
    """
    training.model.load_state_dict(state["model"])
    try:
        training.optimizer.load_state_dict(state["optimizer"])
    except ValueError as error:
        raise InputError(
            f"--resume: the run in --out {training.settings.out} cannot go on: {error}. Or start one in another --out"
        ) from error
    training.scaler.load_state_dict(state["scaler"])
