"""P19: states of every layout that was ever written load, and training goes on from them with the same bits."""

import gzip
import io
from pathlib import Path
from typing import Any

import pytest
import torch

import halfstep
from golden.make import CASES, STEPS, digest, optimizer, step
from halfstep.checkpoint import LAYOUT
from training import members

FILES = sorted((Path(__file__).parent / "golden").glob("layout*.pt.gz"))


def content(file: Path) -> dict[str, Any]:
    return torch.load(io.BytesIO(gzip.decompress(file.read_bytes())), weights_only=True)


def test_every_layout_has_its_file() -> None:
    assert [file.name for file in FILES] == [f"layout{number}.pt.gz" for number in range(1, LAYOUT + 1)]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name.partition(".")[0])
def test_p19_a_state_of_any_layout_goes_on_with_the_same_bits(file: Path, case: str) -> None:
    saved = content(file)
    found = saved["cases"][case]
    made = optimizer(case, [torch.nn.Parameter(param.clone()) for param in found["params"]])
    made.load_state_dict(found["state"])
    assert all(group["layout"] == LAYOUT for group in made.param_groups)
    assert all("mantissa" in made.state[param] for param in members(made))
    step(made, saved["grads"], range(STEPS, 2 * STEPS))
    assert digest(made) == found["then"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name.partition(".")[0])
def test_p19_a_scalers_state_of_any_layout_loads(file: Path) -> None:
    saved = content(file)["scaler"]
    scaler = halfstep.GradScaler("cpu")
    scaler.load_state_dict(saved)
    assert scaler.state_dict() == saved
