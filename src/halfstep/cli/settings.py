"""What one `halfstep train` does, checked once, where it enters."""

import dataclasses
import math
import shlex
from dataclasses import dataclass, field
from pathlib import Path

import torch

from halfstep.cli.errors import InputError
from halfstep.cli.gpt import Shape

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
DEVICES = ("auto", "cpu", "cuda")
LARGEST_SEED = 2**63 - 1


@dataclass(frozen=True)
class Sizes:
    """What a person does not choose: fixed by the command, smaller in its tests.

    Args:
        shape: the model.
        batch: windows of ``shape.context`` bytes a step.
        warmup: steps in which the learning rate rises to ``lr``. It depends on no total, so a run may be extended.
        validation_windows: windows of the held-out text that a validation reads.
        validation_every: steps between validations.
        checkpoint_every: steps between checkpoints.
        sample: bytes of generated text.
    """

    shape: Shape = field(default_factory=Shape)
    batch: int = 8
    warmup: int = 50
    validation_windows: int = 128
    validation_every: int = 25
    checkpoint_every: int = 25
    sample: int = 400

    @property
    def window(self) -> int:
        """The bytes of one example: the context, and the byte after its last."""
        return self.shape.context + 1


@dataclass(frozen=True)
class Settings:
    """One run's arguments, as `halfstep train` names them.

    Raises:
        InputError: an argument is out of its range, or names a device that is not there.
    """

    out: Path
    text: Path | None = None
    dtype: str = "float16"
    weights: str = "split16"
    moments: str = "float32"
    steps: int = 300
    lr: float = 1e-3
    clip: float = 1.0
    seed: int = 0
    device: str = "auto"
    sizes: Sizes = field(default_factory=Sizes)

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise InputError(f"--dtype {self.dtype}: is not one of {', '.join(DTYPES)}; choose one of them")
        if self.steps < 1:
            raise InputError(f"--steps {self.steps}: must be 1 or more; give the number of the last step")
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise InputError(f"--lr {self.lr}: must be a finite number above 0, such as 1e-3; give one")
        if not (math.isfinite(self.clip) and self.clip >= 0):
            raise InputError(f"--clip {self.clip}: must be a finite gradient norm, 0 or above; give 0 for no clipping")
        if not 0 <= self.seed <= LARGEST_SEED:
            raise InputError(f"--seed {self.seed}: must be from 0 to {LARGEST_SEED}; choose one in that range")
        if self.device not in DEVICES:
            raise InputError(f"--device {self.device}: is not one of {', '.join(DEVICES)}; choose one of them")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise InputError("--device cuda: PyTorch finds no CUDA device here; give cpu or auto")

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of the model's parameters and gradients."""
        return DTYPES[self.dtype]

    @property
    def torch_device(self) -> torch.device:
        """The device that ``device`` means on this machine."""
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return torch.device(self.device)


def claim(out: Path) -> None:
    """Make sure that ``out`` is a folder that can be written, and create it where it is missing.

    Raises:
        InputError: it is a file, or it cannot be created or written.
    """
    if out.exists() and not out.is_dir():
        raise InputError(f"--out {out}: is a file; give a folder, which is created where it is missing")
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe = out / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise InputError(f"--out {out}: cannot be written ({error.strerror}); give a folder that can") from error


def command_line(settings: Settings) -> str:
    """Return the command that asks for ``settings``: all that is not a default, quoted for a shell."""
    words = ["halfstep", "train"]
    for field_ in dataclasses.fields(settings):
        value = getattr(settings, field_.name)
        if field_.name != "sizes" and value != field_.default:
            words += [f"--{field_.name}", str(value)]
    return shlex.join(words)
