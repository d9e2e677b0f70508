"""Every argument that cannot be met says so, before anything is changed."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from halfstep.cli.errors import InputError
from halfstep.cli.settings import Settings, claim, command_line

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"dtype": "half"}, "--dtype half: is not one of float16, bfloat16, float32; choose one of them"),
    ({"steps": 0}, "--steps 0: must be 1 or more; give the number of the last step"),
    ({"steps": -5}, "--steps -5: must be 1 or more; give the number of the last step"),
    ({"lr": 0.0}, "--lr 0.0: must be a finite number above 0, such as 1e-3; give one"),
    ({"lr": -1e-3}, "--lr -0.001: must be a finite number above 0, such as 1e-3; give one"),
    ({"lr": math.nan}, "--lr nan: must be a finite number above 0, such as 1e-3; give one"),
    ({"lr": math.inf}, "--lr inf: must be a finite number above 0, such as 1e-3; give one"),
    ({"clip": -1.0}, "--clip -1.0: must be a finite gradient norm, 0 or above; give 0 for no clipping"),
    ({"clip": math.nan}, "--clip nan: must be a finite gradient norm, 0 or above; give 0 for no clipping"),
    ({"clip": math.inf}, "--clip inf: must be a finite gradient norm, 0 or above; give 0 for no clipping"),
    ({"seed": -1}, "--seed -1: must be from 0 to 9223372036854775807; choose one in that range"),
    ({"seed": 2**63}, "--seed 9223372036854775808: must be from 0 to 9223372036854775807; choose one in that range"),
    ({"device": "tpu"}, "--device tpu: is not one of auto, cpu, cuda; choose one of them"),
]


@pytest.mark.parametrize(("arguments", "expected"), REFUSED)
def test_refused(arguments: dict[str, Any], expected: str) -> None:
    with pytest.raises(InputError) as error:
        Settings(out=Path("out"), **arguments)
    assert str(error.value) == expected


def test_cuda_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert Settings(out=Path("out"), device="auto").torch_device.type == "cpu"
    with pytest.raises(InputError) as error:
        Settings(out=Path("out"), device="cuda")
    assert str(error.value) == "--device cuda: PyTorch finds no CUDA device here; give cpu or auto"


def test_auto_takes_cuda_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert Settings(out=Path("out"), device="auto").torch_device.type == "cuda"


def test_claim_makes_the_folder_and_leaves_nothing_in_it(tmp_path: Path) -> None:
    claim(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_claim_refuses_a_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(InputError) as error:
        claim(file)
    assert str(error.value) == f"--out {file}: is a file; give a folder, which is created where it is missing"
    with pytest.raises(InputError) as error:
        claim(file / "below")
    assert str(error.value) == f"--out {file / 'below'}: cannot be written (Not a directory); give a folder that can"


def test_command_line_names_all_that_is_not_a_default() -> None:
    assert command_line(Settings(out=Path("run"))) == "halfstep train --out run"
    settings = Settings(out=Path("my run"), text=Path("a.txt"), dtype="bfloat16", steps=7, lr=3e-5, clip=0.0)
    assert command_line(settings) == (
        "halfstep train --out 'my run' --text a.txt --dtype bfloat16 --steps 7 --lr 3e-05 --clip 0.0"
    )
