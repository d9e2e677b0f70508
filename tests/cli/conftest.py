"""A run so small that a test of it takes no time."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rich.console import Console

from halfstep.cli.gpt import Shape
from halfstep.cli.settings import Sizes

TINY = Sizes(
    shape=Shape(layers=1, heads=2, width=16, context=16),
    batch=2, warmup=3, validation_windows=8, validation_every=2, checkpoint_every=3, sample=20,
)  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """So small a model only waits for a second thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def tiny() -> Sizes:
    return TINY


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_bytes(b"the quick brown fox jumps over the lazy dog, and then again.\n" * 40)
    return file


@pytest.fixture
def console() -> Console:
    """A console whose output `capsys` sees as plain lines."""
    return Console(force_terminal=False, width=200)
