"""What every test may use."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from harness import HERE

# the tests are many and small: threads of their own would only wait for each other
torch.set_num_threads(1)

#: what steps on the CPU in every format there is: one process runs these, so that each kernel is compiled once
EVERY_KERNEL = {f"test_{name}" for name in ("parity", "state", "report", "dcp", "convert", "pairs", "written", "ema")}

HALVES = (torch.float16, torch.bfloat16)


class FileByFile(LoadScopeScheduling):
    """Each file's tests are run by one process."""

    def _split_scope(self, nodeid: str) -> str:
        name = Path(nodeid.partition("::")[0]).stem
        return "every kernel" if name in EVERY_KERNEL else name


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> FileByFile:
    """Let files be shared out among processes."""
    return FileByFile(config, log)


@pytest.fixture(params=HALVES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def half(request: pytest.FixtureRequest) -> torch.dtype:
    """Each 16-bit dtype."""
    return request.param


@pytest.fixture(params=HERE)
def backend(request: pytest.FixtureRequest) -> str:
    """Each backend by its name."""
    return request.param


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _accelerate_anew() -> Iterator[None]:
    """What Accelerate's objects share is that of one test."""
    yield
    state = sys.modules.get("accelerate.state")
    if state:
        state.AcceleratorState._reset_state(True)
        state.GradientState._reset_state()
