"""examples/fsdp_train.py: a process may die at any moment, and any number of processes goes on, with the same bits."""

import functools
import importlib.util
import io
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import halfstep
from harness import assert_equal, assert_same
from ranks import outcomes, together

FILE = Path(__file__).parent.parent / "examples" / "fsdp_train.py"
SPEC = importlib.util.spec_from_file_location("fsdp_train", FILE)
assert SPEC
assert SPEC.loader
example: Any = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(example)

#: six steps and three checkpoints of a model that 1, 2 and 3 processes can share, with tensors that get blocks
SMALL = ["--layers", "1", "--width", "64", "--context", "32", "--batch", "6", "--steps", "6", "--save-every", "2"]
WAYS = {
    "float16": ["--dtype", "float16", "--weights", "split8", "--moments", "block8"],
    "bfloat16": [],
}
REMAINDERS = {"float16": torch.int8, "bfloat16": torch.int16}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return request.param


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def trained(line: Sequence[Any], prepare: Callable[[], None] | None = None, terminal: bool = False) -> str:
    """Train in this process, which has joined others; return what it prints."""
    # the bits are those of the CPU's own kernels, which each process would compile for seconds
    halfstep.AdamW = functools.partial(halfstep.AdamW, backend="eager")  # type: ignore[misc]
    if prepare:
        prepare()
    with redirect_stdout(Terminal() if terminal else io.StringIO()) as printed:
        example.train(example.arguments([*SMALL, *map(str, line)]), torch.device("cpu"))
    return printed.getvalue()


def launched(script: Path, *line: Any) -> subprocess.CompletedProcess[str]:
    """Train in two processes that torchrun starts; they must end by themselves."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.run(
        [*launcher, str(script), *SMALL, *map(str, line)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )


def held(folder: Path | None) -> dict[str, Any]:
    """Everything that a checkpoint holds, put together from its parts."""
    assert folder
    file = folder.with_suffix(".whole")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of loading without other processes
        dcp_to_torch_save(folder, file)
    state = torch.load(file, weights_only=False)
    for group in state["optimizer"]["param_groups"]:
        del group["backend"]  # any gives the same bits
    return state


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of two processes whose training nothing stopped."""

    @functools.cache
    def folder(way: str) -> Path:
        out = tmp_path_factory.mktemp(way)
        first, second = together(trained, 2, [*WAYS[way], "--out", out])
        assert "step 6/6  loss " in first
        assert not second
        return out

    return folder


# ------------------------------------------------------------------ a process dies


def die_on_call(owner: Any, name: str, call: int) -> None:
    """Kill process 1 when it calls this function for the ``call``-th time."""
    function, calls = getattr(owner, name), []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        if len(calls) == call and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)

    setattr(owner, name, counted)


def die_amid_a_step() -> None:
    # when there are checkpoints of the second step and the fourth
    die_on_call(halfstep, "clip_grad_norm_", 5)


def die_amid_a_save() -> None:
    die_on_call(FileSystemWriter, "write_data", 2)


#: the same, and without the seconds that the CPU's own kernels take to compile
FAULTY = f"""
import functools, os, signal, sys
sys.path.insert(0, {str(FILE.parent)!r})
import fsdp_train, halfstep

halfstep.AdamW = functools.partial(halfstep.AdamW, backend="eager")
clip, calls = halfstep.clip_grad_norm_, []

def counted(*args):
    calls.append(args)
    if len(calls) == 5 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return clip(*args)

halfstep.clip_grad_norm_ = counted
fsdp_train.main()
"""


def test_torchrun_ends_when_a_process_dies_and_the_next_run_goes_on(
    undisturbed: Callable[[str], Path], tmp_path: Path
) -> None:
    script, line = tmp_path / "faulty.py", [*WAYS["float16"], "--out", tmp_path]
    script.write_text(FAULTY)
    ended = launched(script, *line)
    assert ended.returncode != 0
    assert "Signal 9 (SIGKILL)" in ended.stderr
    assert example.newest(tmp_path) == tmp_path / "step-000004"
    resumed = launched(FILE, *line)
    # no warning either
    assert (resumed.returncode, resumed.stderr) == (0, "")
    head, going_on, shown, end = resumed.stdout.splitlines()
    assert head.endswith(" in float16, weights=split8, moments=block8; 2 processes (gloo)")
    assert going_on == f"going on from {tmp_path}/step-000004"
    assert shown.startswith("step 6/6  loss ")
    assert shown.endswith(" tokens/s  0 skipped")
    assert end.startswith(f"checkpoint {tmp_path}/step-000006, validation loss ")
    # the last two steps by the CPU's own kernels, all others by PyTorch's operators
    assert_equal(held(tmp_path / "step-000006"), held(undisturbed("float16") / "step-000006"), ordered=False)


def test_a_run_whose_process_dies_amid_a_step_ends_as_if_it_had_not(
    undisturbed: Callable[[str], Path], tmp_path: Path
) -> None:
    line = [*WAYS["bfloat16"], "--out", tmp_path]
    other, dead = outcomes(trained, 2, line, die_amid_a_step)
    assert (other.status, dead.status) == (1, -signal.SIGKILL)
    assert example.newest(tmp_path) == tmp_path / "step-000004"
    assert f"going on from {tmp_path}/step-000004\n" in together(trained, 2, line)[0]
    assert_equal(held(tmp_path / "step-000006"), held(undisturbed("bfloat16") / "step-000006"), ordered=False)


def test_a_process_that_dies_amid_a_save_leaves_the_last_good_checkpoint(
    undisturbed: Callable[[str], Path], tmp_path: Path
) -> None:
    line = [*WAYS["float16"], "--out", tmp_path]
    other, dead = outcomes(trained, 2, line, die_amid_a_save)
    assert (other.status, dead.status) == (1, -signal.SIGKILL)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["step-000002", "step-000004.partial"]
    # one that died later still, all but its last rename done
    (tmp_path / "step-000005.partial").mkdir()
    (tmp_path / "step-000005.partial" / ".metadata").touch()
    assert example.newest(tmp_path) == tmp_path / "step-000002"
    assert f"going on from {tmp_path}/step-000002\n" in together(trained, 2, line)[0]
    # the newest two, and nothing half written
    assert sorted(file.name for file in tmp_path.iterdir()) == ["step-000004", "step-000006"]
    assert_equal(held(tmp_path / "step-000006"), held(undisturbed("float16") / "step-000006"), ordered=False)


# ------------------------------------------------------------------ other numbers of processes


def resaved(source: Path, line: Sequence[Any], target: Path) -> list[Tensor]:
    """Go on for two steps; save what was loaded before, and return the batches and what validates."""
    resume, loss_of, seen = example.resume, example.loss_of, []

    def resuming(folder: Path, run: Any, fixed: str) -> tuple[int, int]:
        step, skipped = resume(folder, run, fixed)
        example.save(target, run, fixed, step, skipped)
        return step, skipped

    def watching(model: Any, tokens: Tensor) -> Tensor:
        seen.append(tokens)
        return loss_of(model, tokens)

    def prepare() -> None:
        example.resume, example.loss_of = resuming, watching

    printed = trained([*line, "--out", source, "--steps", 8], prepare)
    assert dist.get_rank() or "step 8/8  loss " in printed
    return seen


def test_other_numbers_of_processes_go_on_from_the_bits_that_were_saved(
    way: str, undisturbed: Callable[[str], Path], tmp_path: Path
) -> None:
    saved, seen = undisturbed(way) / "step-000006", {}
    state = held(saved)
    # what it should be, lest two be alike that are wrong or empty
    entries = state["optimizer"]["state"]
    assert state["model"].keys() == entries.keys()
    assert {tensor.dtype for tensor in state["model"].values()} == {getattr(torch, way)}
    assert {entry["remainder"].dtype for entry in entries.values()} == {REMAINDERS[way]}
    assert {entry["step"] for entry in entries.values()} == {6}
    # of bfloat16 there is none
    assert state.get("scaler", {}).get("_growth_tracker") == (6 if way == "float16" else None)
    assert (state["step"], state["skipped"]) == (6, 0)
    for count in (1, 3):
        source, target = tmp_path / f"{count}", tmp_path / f"{count} again"
        source.mkdir()
        (source / saved.name).symlink_to(saved)
        seen[count] = together(resaved, count, source, WAYS[way], target)
        assert len(list((target / saved.name).glob("*.distcp"))) == count
        assert_equal(held(target / saved.name), state, ordered=False)
        assert held(source / "step-000008")["step"] == 8
    (alone,) = seen[1]
    for step in range(2):
        assert_same(torch.cat([own[step] for own in seen[3]]), alone[step])
    for own in seen[3]:
        assert_same(own[2], alone[2])
    assert not torch.equal(alone[0], alone[1])


# ------------------------------------------------------------------ what a person sees


def refused(lines: Sequence[Sequence[Any]]) -> list[str]:
    """What is printed on stderr of command lines that are refused."""
    found = []
    for line in lines:
        with redirect_stderr(io.StringIO()) as printed, pytest.raises(SystemExit) as caught:
            trained(line)
        assert caught.value.code == 1
        found.append(printed.getvalue())
    return found


def test_what_cannot_be_met_is_one_line(undisturbed: Callable[[str], Path], tmp_path: Path) -> None:
    other, model = undisturbed("float16") / "step-000006", "84,928 parameters in"
    formats = "'split16', 'split8', 'master32', 'stochastic', 'rounded'"
    lines = {
        "--batch 5": "--batch 5: must be a multiple of 2, the number of processes",
        "--batch 0": "--batch 0: must be at least 1",
        "--save-every -1": "--save-every -1: must be at least 1",
        "--width 66": "--width 66: must be a multiple of 4, the number of heads",
        "--weights split17": f"weights='split17': must be one of {formats}",
        "--moments int4": "moments='int4': must be one of 'float32', 'bfloat16', 'block8'",
        "--lr -1": "lr=-1.0: must be 0, or a float32 number from 1.4e-45 to 3.4e+38",
        f"--out {other.parent}": f"{other} has {model} float16, weights=split8, moments=block8, and this run {model} "
        "bfloat16, weights=split16, moments=float32: ask for the same, or give another --out",
    }
    first, second = together(refused, 2, [["--out", tmp_path, *line.split()] for line in lines])
    assert first == [f"fsdp_train.py: {text}\n" for text in lines.values()]
    assert second == [""] * len(lines)
    assert not list(tmp_path.iterdir())


def test_a_terminal_sees_one_line_that_is_written_over(tmp_path: Path) -> None:
    printed, other = together(trained, 2, ["--out", tmp_path], None, True)
    assert not other
    head, *shown, end = printed.split("\r")
    assert head.endswith("2 processes (gloo)\n")
    assert [text[:9] for text in shown] == [f"step {step}/6 " for step in range(1, 6)]
    assert not any("\n" in text for text in shown)
    last, checkpoint = end.splitlines()
    assert last.startswith("step 6/6  loss ")
    # as long as any, so that nothing of the one before is left
    assert {len(text) for text in [*shown, last]} == {79}
    assert checkpoint.startswith(f"checkpoint {tmp_path}/step-000006, validation loss ")
