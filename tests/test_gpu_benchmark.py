"""benchmarks/gpu.py without a GPU: its checks in Triton's interpreter, and that nothing that goes wrong is lost."""

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the GPU's backend needs Triton")

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
gpu: Any = importlib.import_module("gpu")
parity: Any = importlib.import_module("gpu_parity")
stages: Any = importlib.import_module("gpu_stages")
speed: Any = importlib.import_module("gpu_speed")

SCRIPT = Path(gpu.__file__)
CPU = torch.device("cpu")


def script(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", str(SCRIPT), *arguments],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **variables},
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_it_checks_in_the_interpreter(tmp_path: Path) -> None:
    done = script("--quick", "--stages", "machine,parity,asynchronous", "--out", str(tmp_path), TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "All is as it should be" in done.stdout
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert report["bad"] == []
    found = report["stages"]
    assert list(found) == ["machine", "parity", "asynchronous"]
    assert found["machine"]["torch"] == torch.__version__
    assert (found["parity"]["plans"], found["parity"]["red"], found["parity"]["not_checked"]) == (3, {}, [])
    assert found["asynchronous"]["checked"] == ["split16 × float32, bfloat16"]
    assert all(result["seconds"] > 0 for result in found.values())


def test_without_a_gpu_it_says_what_it_needs(tmp_path: Path) -> None:
    done = script("--out", str(tmp_path / "gpu"), TRITON_INTERPRET="0")
    assert done.returncode == 2
    assert "needs a GPU that PyTorch sees" in done.stderr
    assert not (tmp_path / "gpu").exists()


def red(run: Any) -> dict[str, Any]:
    return {"red": {"adam-split16": "first at (3,)"}, "says": "1 red"}


def raises(run: Any) -> dict[str, Any]:
    run.keep({"known": 3})
    raise ValueError("as asked")


def dies(run: Any) -> dict[str, Any]:
    run.keep({"known": 4})
    os._exit(7)


def fine(run: Any) -> dict[str, Any]:
    return {"says": "fine"}


def hangs(run: Any) -> dict[str, Any]:
    time.sleep(600)
    return {}


def test_what_fails_is_written_and_the_rest_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu, "INTERPRETED", False)
    made = {"parity": red, "raises": raises, "dies": dies, "speed": fine, "fine": fine}
    assert gpu.main(["--out", str(tmp_path)], made) == 1
    report = json.loads((tmp_path / "gpu.json").read_text())
    found = report["stages"]
    assert report["bad"] == ["parity", "raises", "dies"]
    assert found["raises"]["failed"] == "ValueError: as asked"
    assert 'raise ValueError("as asked")' in found["raises"]["traceback"]
    assert (found["raises"]["known"], found["dies"]["known"]) == (3, 4)
    assert found["dies"]["failed"] == "its process ended with 7"
    assert found["speed"]["skipped"] == "nothing is timed, as parity is not green: 1 red"
    assert found["fine"]["says"] == "fine"
    told = capsys.readouterr().out
    assert "red: adam-split16: first at (3,)" in told
    assert "Not as it should be: parity, raises, dies" in told


def test_what_hangs_ends_with_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu, "GRACE", 2)
    assert gpu.main(["--out", str(tmp_path), "--seconds", "1"], {"hangs": hangs, "fine": fine}) == 1
    found = json.loads((tmp_path / "gpu.json").read_text())["stages"]
    assert found["hangs"]["failed"] == "still running when the time was up"
    assert found["fine"]["skipped"] == "the time was up"


def test_a_wrong_bit_is_red(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, change = parity.backends.kernel, []

    def changed(plan: Any, requested: str) -> Any:
        step = kernel(plan, "eager")

        def run(jobs: Sequence[Any]) -> Any:
            counts = step(jobs)
            for each in change if requested == "gpu" else ():
                each(jobs)
            return counts

        return run

    def flip(jobs: Sequence[Any]) -> None:
        jobs[7].param.view(torch.int16)[0, 4000] ^= 1

    def write_beside(jobs: Sequence[Any]) -> None:
        param = jobs[3].param
        torch.as_strided(param, (1,), (1,), param.storage_offset() + param.numel()).zero_()

    monkeypatch.setattr(parity.backends, "kernel", changed)
    plan = parity.plans()[parity.QUICK[0]]
    parity._steps_agree(plan, CPU, parity.CASES)
    change[:] = [flip]
    with pytest.raises(
        stages.Differs, match=r"step 1, shape \(1, 4097\), 16 bytes in, part 0: 1 of 4097 differ, .* 4000"
    ):
        parity._steps_agree(plan, CPU, parity.CASES)
    change[:] = [write_beside]
    with pytest.raises(stages.Differs, match="it writes beside its tensors"):
        parity._steps_agree(plan, CPU, parity.CASES)


@pytest.mark.parametrize(("mine", "theirs"), [([1.0, float("nan")], [1.0, float("nan")]), ([], [])])
def test_the_same_is_the_same(mine: list[float], theirs: list[float]) -> None:
    stages.assert_same("these", torch.tensor(mine), torch.tensor(theirs))


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        (torch.tensor([0.0]), torch.tensor([-0.0])),
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, 2.0])),
        (torch.tensor(1), torch.tensor(1, dtype=torch.int32)),
        (torch.zeros(1), torch.zeros(1, 1)),
    ],
)
def test_and_nothing_else(mine: Tensor, theirs: Tensor) -> None:
    with pytest.raises(stages.Differs, match="these: "):
        stages.assert_same("these", mine, theirs)


def test_the_plans_are_those_of_the_tests() -> None:
    harness = importlib.import_module("harness")
    made = [plan for rule in parity.RULES.values() for plan in harness.plans(rule).values()]
    assert set(parity.plans().values()) == set(made)
    assert set(parity.QUICK) <= set(parity.plans())


def test_rows_are_set_beside_the_copy_and_torch() -> None:
    shape = speed.one(10**6)
    rows = [
        speed._row("ours", "step", shape, 26.0, 2.0, 0.1),
        speed._row("ours", "asynchronous whole", shape, 28.0, 4.0, 0.1),
        speed._row("ours", "check", shape, 2.0, 1.0, 0.1),
        speed._row(speed.FUSED, "step", shape, 28.0, 3.0, 0.1),
        speed._row(speed.FUSED, "whole", shape, 40.0, 6.0, 0.1),
    ]
    speed._compare(rows, 26.0)
    assert [row["times_torch_fused"] for row in rows] == [1.5, 1.5, None, 1.0, 1.0]
    assert rows[0]["gigabytes_a_second"] == pytest.approx(26.0 * shape.params / 2e6)
    assert rows[0]["of_copy"] == pytest.approx(shape.params / 2e6)
    assert gpu._cells(rows[0]) == ("ours, step", "26.00", "2.000", "0.100", "13", "0.50", "1.50")
