"""What a step costs beside its time: importing, compiling at the first step, and memory that is not kept."""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from halfstep.bench.shapes import Sizes, Tensors, one
from halfstep.bench.subjects import DTYPES, MAIN, halfstep_adamw, halfstep_whole

#: processes whose median is taken
REPEATS = 3
TIMEOUT = 300
#: a matrix and a vector, as every model has them: with blocks they are two plans
SMALL: Sizes = ((64, 128), (128,))

#: By itself glibc comes to keep freed blocks of up to 32 MiB for later, where a peak of memory does not show them.
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(2**16), "MALLOC_TRIM_THRESHOLD_": str(2**16)}

_IMPORT = """
import time
import torch
began = time.perf_counter()
import halfstep
print(time.perf_counter() - began)
"""


def measure(params: int) -> dict[str, Any]:
    """Return seconds of an import beside torch's and of first steps, and bytes of temporary memory."""
    return {
        "import_seconds": {"halfstep": statistics.median(_fresh(_IMPORT) for _ in range(REPEATS))},
        "first_step_seconds": {
            f"{w} × {m}, {d}": statistics.median(_call("first_step", w, m, d) for _ in range(REPEATS))
            for w, m in MAIN
            for d in DTYPES
        },
        "temporary_bytes": temporary(params, [(w, m, d, whole) for w, m in MAIN for d in DTYPES for whole in (0, 1)]),
    }


def temporary(params: int, cases: Iterable[tuple[str, str, str, int]]) -> dict[str, int]:
    """Return the most temporary bytes of each case, each in a process of its own; nothing where they cannot be read.

    Args:
        params: elements of one tensor.
        cases: weights, moments, dtype, and whether the step is scaled and clipped.
    """
    if sys.platform != "linux":
        return {}
    return {
        f"{w} × {m}, {d}{', scaled and clipped' if whole else ''}": int(
            _call("temporary_bytes", w, m, d, whole, params)
        )
        for w, m, d, whole in cases
    }


def first_step(weights: str, moments: str, dtype: str) -> float:
    """Return the seconds of the first step of a process; it means nothing in one that has stepped."""
    optimizer = halfstep_adamw(Tensors(SMALL).params(DTYPES[dtype]), weights, moments)
    return _seconds(optimizer.step)


def temporary_bytes(weights: str, moments: str, dtype: str, whole: int, params: int) -> int:
    """Return how far memory rises in a later step above what is held before it, in bytes.

    The first step makes the state, and one of another param has compiled and imported what is needed once.
    """

    def made(elements: int) -> Callable[[], object]:
        tensors = Tensors(one(elements).sizes)
        if whole:
            step = halfstep_whole(tensors, dtype, weights, moments).step
        else:
            step = halfstep_adamw(tensors.params(DTYPES[dtype]), weights, moments).step
        step()
        return step

    made(2**13)()
    step = made(params)
    before = _resident()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    step()
    with open("/proc/self/status") as file:
        peak = 1024 * int(next(line for line in file if line.startswith("VmHWM")).split()[1])
    return max(0, peak - before)


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _call(function: str, *arguments: Any) -> float:
    """Return what a function of this file returns in a fresh process."""
    listed = ", ".join(map(repr, arguments))
    variables = _ALLOCATOR if function == "temporary_bytes" else {}
    return _fresh(f"from halfstep.bench import costs\nprint(costs.{function}({listed}))", **variables)


def _fresh(code: str, **variables: str) -> float:
    """Return the number that ``code`` prints last in a fresh process with these variables, where torch is imported."""
    command = [sys.executable, "-c", f"import torch; torch.set_num_threads({torch.get_num_threads()})\n{code}"]
    result = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=TIMEOUT, env={**os.environ, **variables}
    )
    if result.returncode:
        raise RuntimeError(f"a process that measures ended with {result.returncode}:\n{result.stderr}")
    return float(json.loads(result.stdout.splitlines()[-1]))
