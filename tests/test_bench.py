"""halfstep.bench: its ratios, what it counts, what it refuses, and its files. Speed itself is not tested."""

import dataclasses
import gc
import importlib
import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from halfstep.backends import Unavailable
from halfstep.bench import costs, parity, peers, subjects, timing
from halfstep.bench import run as running
from halfstep.bench.parity import Red
from halfstep.bench.peers import Peer
from halfstep.bench.results import Measured, Results, Row
from halfstep.bench.roofline import draw
from halfstep.bench.run import run
from halfstep.bench.settings import NAMES, Settings, Sizes
from halfstep.bench.shapes import GPT2_SMALL, Tensors, gpt2, many, one
from halfstep.bench.subjects import COMPACT, DTYPES, EXACT, FUSED, IN_PLACE, MAIN, TRIAD, WHOLE
from halfstep.bench.timing import Subject, measure, paired_ratio

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
step: Any = importlib.import_module("step")
report: Any = importlib.import_module("step_report")
scaling: Any = importlib.import_module("scaling")
command: Any = importlib.import_module("command")

SMALL = Sizes(gpt2=((3, 64), (64, 64), (64,)), many=(5, 10))
LARGE = one(2**13).sizes


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "PAUSE", 0.0)


# ---------------------------------------------------------------------- ratios


def test_a_ratio_is_the_median_of_the_rounds_ratios() -> None:
    # the ratios are 2, 3, 0.5; the medians 4 and 4 would say 1
    assert paired_ratio([4.0, 3.0, 4.0], [2.0, 1.0, 8.0]) == 2.0
    assert paired_ratio([1.0, 3.0], [1.0, 1.0]) == 2.0
    with pytest.raises(ValueError, match="shorter"):
        paired_ratio([1.0, 2.0], [1.0])


def test_every_subject_runs_once_a_round_in_changing_order() -> None:
    calls: list[str] = []
    names = ["a", "b", "c"]
    made = [Subject(name, "float32", "torch", 1, 1, lambda name=name: calls.append(name)) for name in names]
    seconds = measure(made, 20, warmup=1)
    assert list(seconds) == ["a, float32", "b, float32", "c, float32"]
    assert {len(times) for times in seconds.values()} == {20}
    rounds = [tuple(calls[place : place + 3]) for place in range(0, len(calls), 3)]
    assert len(rounds) == 21
    assert all(sorted(order) == names for order in rounds)
    assert len(set(rounds)) == 6
    assert gc.isenabled()


def test_a_subject_that_raises_leaves_the_collector_on() -> None:
    calls = iter([None])
    with pytest.raises(StopIteration):
        measure([Subject("a", "float32", "torch", 1, 1, lambda: next(calls))], 1)
    assert gc.isenabled()


def measured(name: str = "one") -> Measured:
    """Rows with times of two rounds that can be reckoned by heart: 1000 params, milliseconds."""
    rows = [
        Row(TRIAD, "float32", "memory", 1000, 12, (0.012, 0.024)),
        Row(IN_PLACE, "float32", "memory", 1000, 12, (0.006, 0.012)),
        Row(FUSED, "float32", "torch", 1000, 28, (0.030, 0.060)),
        Row("halfstep split16 × float32", "bfloat16", "halfstep", 1000, 26, (0.026, 0.052)),
        Row("halfstep split16 × float32", "float16", "halfstep", 1000, 26, (0.020, 0.040)),
        Row("halfstep split16 × float32 in one tensor", "float16", "halfstep", 500, 26, (0.008, 0.016)),
        Row("labml-nn AdamFP16", "float16", "peer", 1000, 30, (0.100, 0.200)),
        Row(FUSED + WHOLE, "float32", "torch", 1000, None, (0.060, 0.060)),
        Row("halfstep split16 × float32" + WHOLE, "float16", "halfstep", 1000, None, (0.030, 0.030)),
    ]
    return Measured(name, "one tensor of 1,000", 1, 1000, rows)


def test_the_arithmetic_of_a_table() -> None:
    found = measured()
    row, single = found.rows[3], found.rows[5]
    assert row.milliseconds == pytest.approx(39.0)
    assert row.gigabytes_a_second == pytest.approx(26 * 1000 / 0.039 / 1e9)
    # the triad moves 12 bytes in 12 ms, the step 26 in 26: as fast as the memory; in place that has 12 bytes in 6 ms
    assert found.bandwidth_ratio(row) == pytest.approx(1.0)
    assert found.bandwidth_ratio(row, IN_PLACE) == pytest.approx(0.5)
    assert found.times_as_fast(row) == pytest.approx(30 / 26)
    # half the params in 8 ms: 26 bytes × 500 in 8 ms against 12 × 1000 in 12 ms, and 16 ns a param against 30
    assert found.bandwidth_ratio(single) == pytest.approx(26 * 500 / 8 / (12 * 1000 / 12))
    assert found.times_as_fast(single) == pytest.approx(30 / 16)
    whole = found.rows[8]
    assert (whole.gigabytes_a_second, found.bandwidth_ratio(whole)) == (None, None)
    assert found.cells()[3] == ("halfstep split16 × float32, bfloat16", "26.00", "39.00", "0.0", "1.00", "0.50", "1.15")
    assert found.cells()[0][-1] == "-"
    assert found.whole_cells() == [
        (f"{FUSED}, float32", "60.00", "1.00"),
        ("halfstep split16 × float32, float16", "30.00", "2.00"),
    ]


# ---------------------------------------------------------------------- what is counted and timed


@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_moved_are_those_of_the_optimizers_memory(dtype: str) -> None:
    for weights, moments in subjects.pairs(dtype):
        params = Tensors(LARGE).params(DTYPES[dtype])
        # the eager backend keeps the same, and compiles nothing
        optimizer = subjects.halfstep_adamw(params, weights, moments, backend="eager")
        optimizer.step()
        memory = optimizer.memory()
        assert subjects.bytes_moved(optimizer) == memory["grad"] + 2 * (memory["total"] - memory["grad"])


@pytest.mark.parametrize(("pair", "moved"), [(EXACT, 26), (COMPACT, 12 + 4 / 128)])
def test_bytes_moved_by_the_main_pairs(pair: tuple[str, str], moved: float) -> None:
    assert subjects.halfstep_step(Tensors(LARGE), "bfloat16", *pair).moved == moved


@pytest.mark.parametrize("fused", [True, False])
def test_bytes_moved_by_torch(fused: bool) -> None:
    assert subjects.torch_step(Tensors(LARGE), fused).moved == 28


def test_every_pair_of_the_registries_is_timed() -> None:
    for dtype in DTYPES:
        found = list(subjects.pairs(dtype))
        assert set(MAIN) <= set(found)
        assert {name for pair in found for name in pair} <= set(NAMES)


def test_no_step_changes_the_gradients_that_all_share() -> None:
    tensors = Tensors(LARGE)
    before = {dtype: [grad.clone() for grad in tensors.grads(dtype)] for dtype in (torch.float32, torch.bfloat16)}
    made = [
        subjects.torch_step(tensors, fused=True),
        subjects.torch_step(tensors, fused=False),
        subjects.torch_whole(tensors),
        subjects.halfstep_step(tensors, "bfloat16", *EXACT),
        subjects.halfstep_whole(tensors, "bfloat16", *EXACT),
        subjects.halfstep_whole(tensors, "bfloat16", *COMPACT),
    ]
    measure(made, 3)
    for dtype, grads in before.items():
        assert all(map(torch.equal, tensors.grads(dtype), grads))


@pytest.mark.parametrize("pair", MAIN)
def test_a_whole_step_steps_every_time(pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    make = subjects.halfstep_adamw
    monkeypatch.setattr(subjects, "halfstep_adamw", lambda *args: kept.append(make(*args)) or kept[-1])
    whole = subjects.halfstep_whole(Tensors(LARGE), "float16", *pair)
    for _ in range(4):
        whole.step()
    (state,) = kept[0].state.values()
    assert state["step"] == 4


def test_shapes() -> None:
    assert (len(GPT2_SMALL), gpt2().params) == (148, 124_439_808)
    assert one(5000).sizes == ((5, 1024),)
    assert many(20_000, 100).title == "20,000 tensors of 100"


# ---------------------------------------------------------------------- parity


@pytest.mark.parametrize("pair", MAIN)
def test_parity_is_green(pair: tuple[str, str]) -> None:
    parity.check(*pair, "float16")


def test_parity_is_red_where_a_bit_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    make = parity.halfstep_adamw

    def wrong(params: list[Parameter], weights: str, moments: str, backend: str) -> Any:
        optimizer = make(params, weights, moments, backend)
        if backend == "cpu":
            optimizer.param_groups[0]["lr"] *= 1 + 1e-3
        return optimizer

    monkeypatch.setattr(parity, "halfstep_adamw", wrong)
    with pytest.raises(Red) as error:
        parity.check("split16", "float32", "bfloat16")
    said = str(error.value)
    assert said.startswith(
        "weights='split16', moments='float32' on bfloat16 params: backend 'cpu' differs from 'eager'"
    )
    assert said.endswith("after step 1; nothing is timed and nothing written")


def test_red_parity_ends_a_run_before_anything_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def red(*pair: str) -> None:
        raise Red("differs")

    monkeypatch.setattr(running, "measure", lambda *_: pytest.fail("something was timed"))
    monkeypatch.setattr(parity, "check", red)
    with pytest.raises(Red, match="differs"):
        run(Settings(params=4096), lambda text: None)


# ---------------------------------------------------------------------- a run


def _broken(params: list[Parameter]) -> torch.optim.Optimizer:
    raise OSError("no compiler\nand more")


def _idle(params: list[Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.0)


def _writing(params: list[Parameter]) -> torch.optim.Optimizer:
    optimizer = _good(params)

    def write(*_: Any) -> None:
        assert params[0].grad is not None
        params[0].grad.mul_(2)

    optimizer.register_step_post_hook(write)
    return optimizer


def _good(params: list[Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.5, momentum=0.9)


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers that are absent, broken, idle and good; the last three pass for packages that are installed here."""
    found = (
        Peer("no-such-package", "an absent one", "bfloat16", _good),
        Peer("torch", "a broken one", "bfloat16", _broken),
        Peer("torch", "an idle one", "bfloat16", _idle),
        Peer("torch", "a good one", "bfloat16", _good),
        Peer("torch", "one that writes", "bfloat16", _writing, writes_grads=True),
    )
    monkeypatch.setattr(running, "PEERS", found)


@pytest.fixture
def two_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the main pairs, so that little is compiled."""
    monkeypatch.setattr(running, "pairs", lambda dtype: MAIN)


@pytest.mark.usefixtures("others", "two_pairs")
def test_a_run_times_what_it_can_and_names_what_it_cannot() -> None:
    told: list[str] = []
    settings = Settings(params=2**13, shape=("one", "gpt2", "many"), rounds=2, dtype=("bfloat16",), sizes=SMALL)
    results = run(settings, told.append)
    assert results.absent == {
        "an absent one": 'not installed: pip install "halfstep[peers]"',
        **{
            f"a broken one, {shape.title}": "OSError: no compiler"
            for shape in settings.shapes()
        },
        **{
            f"an idle one, {shape.title}": "RuntimeError: its step leaves the params as they are, or not finite"
            for shape in settings.shapes()
        },
    }  # fmt: skip
    assert all(name in results.plain() and name in results.markdown() for name in results.absent)
    common = ["triad", "triad in place", FUSED, "torch AdamW foreach", *(subjects.halfstep_label(*p) for p in MAIN)]
    whole = [FUSED + WHOLE, *(subjects.halfstep_label(*pair) + WHOLE for pair in MAIN)]
    single = [subjects.halfstep_label(*pair) + " in one tensor" for pair in MAIN]
    labels = {shape.name: [row.label for row in shape.rows] for shape in results.shapes}
    good = ["a good one", "one that writes"]
    assert labels == {
        "one": [*common, *whole, *good],
        "gpt2": [*common, *single, *good],
        "many": [*common, *single, *good],
    }
    assert all(len(row.seconds) == 2 for shape in results.shapes for row in shape.rows)
    assert told[0] == results.machine
    row = results.shapes[0].row("a good one", "bfloat16")
    # a gradient, a param and a momentum of 2 bytes
    assert row is not None
    assert row.moved == 2 + 2 * (2 + 2)


@pytest.mark.usefixtures("others", "two_pairs")
def test_a_format_that_cannot_run_here_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable(*pair: str) -> None:
        raise Unavailable("no F16C")

    monkeypatch.setattr(parity, "check", unavailable)
    results = run(Settings(params=4096, rounds=1, dtype=("float16",), only=("split8",)), lambda text: None)
    assert results.absent == {"halfstep split8 × block8, float16": "no F16C"}
    assert [row.label for row in results.shapes[0].rows] == ["triad", "triad in place", FUSED]


def test_a_peer_that_writes_shared_gradients_is_not_timed() -> None:
    with pytest.raises(RuntimeError, match="changes gradients that others share"):
        Peer("torch", "", "bfloat16", _writing).step(Tensors(LARGE))
    tensors = Tensors(LARGE)
    before = tensors.grads(torch.bfloat16)[0].clone()
    Peer("torch", "", "bfloat16", _writing, writes_grads=True).step(tensors)
    assert torch.equal(tensors.grads(torch.bfloat16)[0], before)


def test_each_peer_is_timed_or_named() -> None:
    told: list[str] = []
    results = run(Settings(params=4096, rounds=1, only=tuple(peer.package for peer in peers.PEERS)), told.append)
    timed = {row.label for row in results.shapes[0].rows if row.kind == "peer"}
    named = {name.partition(", one tensor")[0] for name in results.absent}
    assert timed | named == {peer.label for peer in peers.PEERS}
    assert not timed & named
    assert {peer.package for peer in peers.PEERS if peer.label in timed} <= set(results.versions)


def test_bytes_of_a_tensor_that_wraps_others_are_theirs() -> None:
    class Wrapping(torch.Tensor):
        def __tensor_flatten__(self) -> tuple[list[str], None]:
            return ["codes"], None

    wrapping: Any = torch.zeros(100).as_subclass(Wrapping)
    wrapping.codes = torch.zeros(100, dtype=torch.uint8)
    assert subjects._nbytes(wrapping) == 100


# ---------------------------------------------------------------------- files


def results(**changes: Any) -> Results:
    one_ = measured()
    shapes = [one_, dataclasses.replace(one_, name="gpt2"), dataclasses.replace(one_, name="many")]
    found = Results("a machine", "2026-01-01", {"torch": "2"}, shapes, {"a peer": "not installed"})
    return dataclasses.replace(found, **changes)


def test_json_has_every_round() -> None:
    found = json.loads(json.dumps(results().as_json()))
    assert (found["machine"], found["not_timed"]) == ("a machine", {"a peer": "not installed"})
    row = found["shapes"][0]["rows"][3]
    assert row["seconds"] == [0.026, 0.052]
    assert row["of_triad"] == pytest.approx(1.0)
    assert found["shapes"][0]["rows"][8]["times_torch_fused"] == pytest.approx(2.0)


def size_of(file: Path) -> tuple[int, int]:
    content = file.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", content[16:24])


def test_the_picture(tmp_path: Path) -> None:
    draw(tmp_path / "a.png", measured(), "a machine")
    width, height = size_of(tmp_path / "a.png")
    assert 900 <= width <= 1300
    assert 250 <= height <= 1300


def test_the_targets() -> None:
    cells = {target.key: target.cells(results(costs=COSTS)) for target in report.TARGETS}
    assert {key: (reached, met) for key, (_, _, reached, met) in cells.items()} == {
        "exact bandwidth": ("1.00 (bfloat16), 1.30 (float16)", "yes"),
        "compact bandwidth": ("not measured", "-"),
        "exact fused": ("1.15 × (bfloat16), 1.50 × (float16)", "yes"),
        "compact fused": ("not measured", "-"),
        "teaching": ("5.00 × (float16)", "no"),
        "exact whole": ("2.00 × (float16)", "yes"),
        "compact whole": ("not measured", "-"),
        # 20 ns a param against 16
        "many tensors": ("1.25 (split16 × float32, float16)", "no"),
        "small tensors": ("not measured", "-"),
        "temporary memory": ("65.0 MiB (b)", "no"),
        "import": ("0.20 s (halfstep)", "yes"),
        "first step": ("2.00 s (c)", "yes"),
    }
    table = report.targets(results(costs=COSTS), {"teaching": "because."})
    assert table.startswith("|  | target | reached | met |\n|---|---:|---:|---:|\n| split16 + float32 moments")
    assert "- split16 + float32 against the teaching implementation: because.\n" in table
    assert "GPT-2 small's 148 tensors ÷ one tensor: not explained yet." in table


COSTS = {
    "import_seconds": {"halfstep": 0.2},
    "first_step_seconds": {"a": 1.0, "c": 2.0},
    "temporary_bytes": {"a": 1, "b": 65 * 2**20},
}


@pytest.mark.usefixtures("others", "two_pairs")
def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "measure", lambda params: COSTS)
    monkeypatch.setattr(command, "DOCS", tmp_path)
    step.main(["--params", "8192", "--rounds", "1", "--docs"], SMALL)
    assert {file.name for file in tmp_path.iterdir()} == {"performance.md", "performance.json", "performance.png"}
    page = (tmp_path / "performance.md").read_text()
    assert page.count("![") == 1
    assert "## one tensor of 8,192\n" in page
    assert "`python benchmarks/step.py --params 8192 --rounds 1 --docs`" in page
    assert "- an absent one: not installed" in page
    found = json.loads((tmp_path / "performance.json").read_text())
    assert [target["what"] for target in found["targets"]] == [target.what for target in report.TARGETS]
    assert found["costs"] == COSTS
    size_of(tmp_path / "performance.png")


def test_the_page_is_not_written_while_parity_is_red(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def red(*pair: str) -> None:
        raise Red("bits differ")

    monkeypatch.setattr(parity, "check", red)
    with pytest.raises(SystemExit, match="bits differ"):
        step.main(["--out", str(tmp_path)], SMALL)
    assert list(tmp_path.iterdir()) == []


def test_scaling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(costs, "temporary", lambda params, cases: {f"{w}, {d}": 2**20 for w, _, d, _ in cases})
    small = scaling.Sizes((10**4, 2 * 10**4), (1, 4), 2**12, 2**13, (10, 20))
    scaling.main(["--rounds", "1", "--out", str(tmp_path)], small)
    page, output = (tmp_path / "scaling.md").read_text(), capsys.readouterr().out
    for title in ("Params", "Tensors", "Threads", "Temporary memory"):
        assert f"## {title}\n" in page
        assert f"## {title}\n" in output
    assert "| 20 | 1 | 1 |" in page
    size_of(tmp_path / "scaling.png")


# ---------------------------------------------------------------------- costs


def test_costs_come_from_processes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(costs, "_fresh", lambda code, **_: calls.append(code) or float(len(calls)))
    found = costs.measure(2**20)
    assert found["import_seconds"] == {"halfstep": 2.0}
    assert len(found["first_step_seconds"]) == 4
    if sys.platform == "linux":
        assert len(found["temporary_bytes"]) == 8
        assert "costs.temporary_bytes('split16', 'float32', 'bfloat16', 0, 1048576)" in calls[15]


def test_a_fresh_process_measures() -> None:
    assert 0 < costs._fresh(costs._IMPORT) < 60
    with pytest.raises(RuntimeError, match=r"ended with 1:\n(.|\n)*ZeroDivisionError"):
        costs._fresh("1 / 0")


def test_the_first_step_is_timed() -> None:
    assert 0 < costs.first_step("split16", "float32", "bfloat16") < 60


#: prints what a step needs, and then what one that makes a float32 copy of its param does
TEMPORARY = """
import sys
from halfstep.bench import costs
made = costs.halfstep_adamw
call = lambda: print(costs.temporary_bytes("split16", "float32", "bfloat16", int(sys.argv[1]), int(sys.argv[2])))
call()
def wasteful(params, *pair):
    optimizer = made(params, *pair)
    def waste(*_):
        params[0].float()
    optimizer.register_step_post_hook(waste)
    return optimizer
costs.halfstep_adamw = wasteful
call()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
@pytest.mark.parametrize("whole", [0, 1])
def test_temporary_memory_is_read(whole: int) -> None:
    size = 2**23
    # in a process of its own: what this one has freed and kept would hide what is taken
    call = [sys.executable, "-c", TEMPORARY, str(whole), str(size)]
    done = subprocess.run(
        call, capture_output=True, text=True, check=True, timeout=200, env=os.environ | costs._ALLOCATOR
    )
    found, wasted = map(int, done.stdout.split())
    assert 0 <= found < 2 * size
    if not whole:
        assert wasted >= 4 * size - 2**20
