"""The bytes to learn from: a file, or the source of Python's own standard library."""

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from halfstep.cli.errors import InputError

STANDARD_LIBRARY_BYTES = 4_000_000


@dataclass(frozen=True)
class Text:
    """Bytes to train on and, from the end of the same text, a tenth to validate on.

    Args:
        name: where it comes from, for messages.
        digest: SHA-256 of all bytes, which tells a resumed run whether the text is still the same.
        train: uint8, on the CPU.
        validation: uint8, on the CPU.
    """

    name: str
    digest: str
    train: Tensor
    validation: Tensor

    def batch(self, seed: int, step: int, batch: int, window: int) -> Tensor:
        """Return ``batch`` windows of ``window`` bytes as int64, chosen by ``(seed, step)`` alone."""
        starts = np.random.default_rng([seed, step]).integers(0, len(self.train) - window + 1, size=batch)
        return torch.stack([self.train[start : start + window] for start in starts.tolist()]).long()

    def validation_windows(self, count: int, window: int) -> Tensor:
        """Return at most ``count`` windows of ``window`` bytes as int64, spread evenly and not overlapping."""
        count = min(count, len(self.validation) // window)
        starts = [place * (len(self.validation) - window) // max(count - 1, 1) for place in range(count)]
        return torch.stack([self.validation[start : start + window] for start in starts]).long()


def load_text(file: Path | None, window: int) -> Text:
    """Read ``file``, or the standard library's source where it is None.

    Raises:
        InputError: there is no such readable file, or a tenth of it holds no window of ``window`` bytes.
    """
    name = "Python's standard library" if file is None else str(file)
    data = _standard_library() if file is None else _read(file)
    if len(data) < 10 * window:
        raise InputError(
            f"--text {name}: holds {len(data):,} bytes; at least {10 * window:,} are needed, so that the last tenth, "
            "held out for validation, has one window. Give a longer text"
        )
    tokens = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    held_out = len(data) // 10
    return Text(name, hashlib.sha256(data).hexdigest(), tokens[:-held_out], tokens[-held_out:])


def _read(file: Path) -> bytes:
    try:
        if file.is_dir():
            raise InputError(f"--text {file}: is a directory; give one file, such as the output of `cat {file}/*`")
        if file.exists() and not file.is_file():
            raise InputError(f"--text {file}: is not a regular file; save its content in one and give that")
        return file.read_bytes()
    except OSError as error:
        raise InputError(
            f"--text {file}: cannot be read ({error.strerror}); give a readable file, or leave --text out to train on "
            "the source of Python's standard library"
        ) from error


def _standard_library() -> bytes:
    """Return the first bytes of the library's top-level modules in the order of their names."""
    root = Path(sysconfig.get_path("stdlib"))
    # The test suites and the packages that were installed later lie in folders, and differ between machines.
    modules = sorted(root.glob("*.py"), key=lambda module: module.name)
    if not modules:
        raise InputError(f"--text: Python's standard library in {root} has no source files here; give a file")
    return b"".join(module.read_bytes() for module in modules)[:STANDARD_LIBRARY_BYTES]
