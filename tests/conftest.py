"""What every test may use."""

import pytest
import torch

from harness import HERE

# the tests are many and small: threads of their own would only wait for each other
torch.set_num_threads(1)

HALVES = (torch.float16, torch.bfloat16)


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
