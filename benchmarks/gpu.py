"""See that a GPU computes what it should, and how fast: python benchmarks/gpu.py, in under 8 minutes.

In this order it compares every plan of the backend "gpu" with the backend "eager" bit for bit; steps asynchronously
where a wait for the device raises; captures and replays an iteration in a CUDA graph; times the check and the step for
10^6 to 10^9 params and GPT-2 small's tensors beside a copy, torch's fused AdamW, FlashOptim and `torch.compile`; and
trains the model of `halfstep train` in float16 and in float32. OUT/gpu.json has all of it.

Each stage has a process of its own, so that a device that is lost, a crash or a kernel that never ends takes one stage
along and no more; what it knew by then is in the JSON. Nothing is timed where parity is red. It ends with 1 where a
stage failed or parity is not green. With TRITON_INTERPRET=1 parity and the asynchronous steps run without a GPU.
"""

import argparse
import json
import multiprocessing
import os
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Any

import torch

from gpu_capturable import asynchronous, graph
from gpu_parity import parity
from gpu_speed import speed
from gpu_stages import Run, machine, training
from halfstep.backends.jitted import INTERPRETED
from halfstep.bench.results import aligned
from halfstep.cli.files import write_json
from halfstep.cli.settings import claim

Stage = Callable[[Run], dict[str, Any]]

STAGES: Mapping[str, Stage] = {
    "machine": machine,
    "parity": parity,
    "asynchronous": asynchronous,
    "graph": graph,
    "speed": speed,
    "training": training,
}
#: what Triton's interpreter is no stand-in for
ON_A_GPU = ("graph", "speed", "training")
#: seconds that a stage which is running when the time is up has to end by itself
GRACE = 15

HEAD = ("", "bytes a param", "ms", "host ms", "GB/s", "÷ copy", "× torch fused")
NOTES = (
    "ms: the device's time from a call's begin to its end, the median of 21. host ms: the time that the call keeps the "
    "host; a whole step that is not asynchronous waits in it for the device. × torch fused: how many times as fast as "
    "torch's fused AdamW on float32; whole: with the scaler's check and change of scale."
)


def main(arguments: Sequence[str] | None = None, stages: Mapping[str, Stage] = STAGES) -> int:
    """Run the stages that are asked for, print and write what they found, and return the exit code."""
    asked = argparse.ArgumentParser(
        prog="gpu.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    asked.add_argument("--out", type=Path, default=Path("runs/gpu"), help="the folder of gpu.json (default runs/gpu)")
    asked.add_argument("--seconds", type=float, default=450, help="begin nothing after so many (default 450)")
    asked.add_argument("--stages", default=",".join(stages), help="which, with commas between (default: all)")
    asked.add_argument("--quick", action="store_true", help="a small part of each stage, to see that it works")
    given = sys.argv[1:] if arguments is None else list(arguments)
    options = asked.parse_args(given)
    chosen = [name for name in stages if name in options.stages.split(",")]
    if unknown := set(options.stages.split(",")) - set(stages):
        asked.error(f"--stages {','.join(sorted(unknown))}: must be some of {', '.join(stages)}")
    if not (INTERPRETED or torch.cuda.is_available()):
        told = "benchmarks/gpu.py needs a GPU that PyTorch sees, and torch.cuda.is_available() is False here."
        print(f"{told} TRITON_INTERPRET=1 runs the stages parity and asynchronous without one.", file=sys.stderr)
        return 2
    claim(options.out)
    file, ends = options.out / "gpu.json", time.time() + options.seconds
    command = shlex.join(["python", "benchmarks/gpu.py", *given])
    report: dict[str, Any] = {"command": command, "date": date.today().isoformat(), "stages": {}}
    write_json(file, report)
    for name in chosen:
        began = time.time()
        run = Run(file, name, ends, options.quick)
        if why := _why_not(name, run, report["stages"]):
            run.keep({"skipped": why})
        else:
            _attempt(stages[name], run)
        report = _read(file)
        result = report["stages"].setdefault(name, {"failed": "it left nothing"})
        result["seconds"] = round(time.time() - began, 1)
        write_json(file, report)
        print(f"{name}, {result['seconds']} s: {_said(result)}", flush=True)
    bad = [name for name, result in report["stages"].items() if _bad(result)]
    write_json(file, report | {"bad": bad})
    _show(report["stages"])
    print(f"In {file}. " + (f"Not as it should be: {', '.join(bad)}" if bad else "All is as it should be."))
    return 1 if bad else 0


def _why_not(name: str, run: Run, results: Mapping[str, Any]) -> str:
    """Say why a stage is left out, or nothing."""
    if run.left() <= 0:
        return "the time was up"
    if INTERPRETED and name in ON_A_GPU:
        return "needs a GPU; Triton's interpreter is none"
    seen = results.get("parity", {})
    if name == "speed" and (seen.get("red") or "failed" in seen or "skipped" in seen):
        return f"nothing is timed, as parity is not green: {_said(seen)}"
    return ""


def _attempt(stage: Stage, run: Run) -> None:
    """Run a stage in a process of its own, and see to it that its failure is written down."""
    process = multiprocessing.get_context("spawn").Process(target=_in_process, args=(stage, run))
    process.start()
    try:
        process.join(max(run.left(), 0) + GRACE)
    finally:
        if late := process.is_alive():
            # with the processes that it began; at first it has no group of its own, and there are none
            assert process.pid
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()
    if late or process.exitcode:
        why = "still running when the time was up" if late else f"its process ended with {process.exitcode}"
        run.keep({"failed": why, **_read(run.file)["stages"].get(run.stage, {})})


def _in_process(stage: Stage, run: Run) -> None:
    os.setsid()
    try:
        run.keep(stage(run))
    except Exception as error:
        known = _read(run.file)["stages"].get(run.stage, {})
        failed = f"{type(error).__name__}: {error}"[:2000]
        run.keep({**known, "failed": failed, "traceback": traceback.format_exc()})


def _read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8"))


def _bad(result: Mapping[str, Any]) -> bool:
    return bool("failed" in result or result.get("red") or result.get("not_checked"))


def _said(result: Mapping[str, Any]) -> str:
    """Say in a line what came of a stage."""
    words = [f"{word} ({result[word]})" for word in ("failed", "skipped") if word in result]
    return "; ".join([*words, *filter(None, [result.get("says")])]).replace("\n", " ")


def _show(results: Mapping[str, Any]) -> None:
    """Print what is red, and the tables."""
    for name, why in results.get("parity", {}).get("red", {}).items():
        print(f"red: {name}: {why}")
    measured = results.get("speed", {})
    rows = measured.get("rows", [])
    for shape in dict.fromkeys(row["shape"] for row in rows):
        cells = [_cells(row) for row in rows if row["shape"] == shape]
        print(f"\n{shape}\n{aligned(HEAD, cells)}")
    for name, why in measured.get("not_timed", {}).items():
        print(f"not timed: {name}: {why}")
    if rows:
        print(f"\n{NOTES}")


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    times = row.get("times_torch_fused")
    return (
        f"{row['label']}, {row['what']}",
        f"{row['bytes_a_param']:.2f}",
        f"{row['milliseconds']:.3f}",
        f"{row['host_milliseconds']:.3f}",
        f"{row['gigabytes_a_second']:.0f}",
        f"{row['of_copy']:.2f}" if "of_copy" in row else "-",
        "-" if times is None else f"{times:.2f}",
    )


if __name__ == "__main__":
    sys.exit(main())
