"""P28: what a step needs beside the params, gradients and state is bounded, however large the model."""

import gc
import json
import subprocess
import sys
import weakref

import pytest
import torch

import halfstep
from halfstep.formats import WEIGHTS
from harness import allocations
from training import OPTIMIZERS, gradients, make, params

#: a naive float32 copy of a param of so many elements takes 68 MiB, more than all that is allowed
SIZE = 17 * 2**20
LIMIT = 64 * 2**20

SCRIPT = """
import json, sys, torch, halfstep
backend = sys.argv[1]
torch.set_num_threads(1)

def make(size, layout, weights, moments, half):
    param = torch.nn.Parameter(torch.zeros(64, size // 64, dtype=getattr(torch, half)))
    if layout == "transposed":
        param.data = param.data.t()
    param.grad = torch.zeros_like(param)
    return param, halfstep.AdamW([param], weights=weights, moments=moments, backend=backend)

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

def beside(call):
    "How far the resident size rose above what it was before ``call``."
    before = resident()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    call()
    with open("/proc/self/status") as file:
        return 1024 * int(next(line for line in file if line.startswith("VmHWM")).split()[1]) - before

for case in (
    ("contiguous", "split16", "float32", "float16"),
    ("transposed", "split16", "float32", "bfloat16"),
    ("contiguous", "master32", "float32", "bfloat16"),
    ("contiguous", "split8", "block8", "float16"),
    ("transposed", "stochastic", "block8", "float16"),
):
    # what is compiled, imported or cached once is no part of a step
    param, optimizer = make(4096, *case)
    optimizer.step()
    optimizer.step()
    # two are so large that even a 16-bit copy of their params would show
    size = 2 * int(sys.argv[2]) if case[1] in ("split16", "stochastic") and case[3] == "float16" else int(sys.argv[2])
    param, optimizer = make(size, *case)
    first = beside(optimizer.step)
    kept = sum(t.nbytes for t in optimizer.state[param].values() if isinstance(t, torch.Tensor))
    state = optimizer.state_dict()
    figures = [first - kept, beside(optimizer.step), beside(lambda: optimizer.load_state_dict(state)) - kept]
    print(json.dumps([*case, kept, *figures]))
    del param, optimizer, state
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
def test_p28_a_step_needs_little_beside(backend: str) -> None:
    call = [sys.executable, "-c", SCRIPT, backend, str(SIZE)]
    output = subprocess.run(call, capture_output=True, text=True, check=True, timeout=200).stdout
    cases = [json.loads(line) for line in output.splitlines()]
    assert len(cases) == 5
    for layout, weights, moments, half, kept, *figures in cases:
        assert kept >= SIZE * (3 if moments == "block8" else 10)
        assert kept < SIZE * 8 or moments != "block8", "blocks were not for this shape"
        for what, figure in zip(("the first step", "a later step", "loading"), figures, strict=True):
            assert figure < LIMIT, f"{what}, {layout} {half} as {weights} and {moments}: {figure / 2**20:.0f} MiB"


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("moments", ["float32", "block8"])
@pytest.mark.parametrize(
    ("half", "transposed"), [(torch.float16, False), (torch.bfloat16, True)], ids=["contiguous", "transposed"]
)
def test_p28_the_first_step_allocates_the_state_and_nothing_else_as_large_as_the_param(
    half: torch.dtype, backend: str, weights: str, moments: str, transposed: bool
) -> None:
    # what is worked on at a time, at most 2**20 elements of 4 bytes, is less than half of the param
    size = 5 * 2**20
    param = torch.nn.Parameter(torch.zeros(64, size // 64, dtype=half))
    if transposed:
        param.data = param.data.t()
    param.grad = torch.zeros_like(param)
    optimizer = halfstep.AdamW([param], weights=weights, moments=moments, backend=backend)
    kept = [part.dtype.itemsize * size for part in WEIGHTS[weights][half].parts[1:]]
    kept += [size, size] if moments == "block8" else [4 * size] * 2
    first, second = allocations(optimizer.step), allocations(optimizer.step)
    assert sorted(n for n in first if n >= size) == sorted(kept)
    assert not [n for n in second if n >= size]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_p28_an_optimizer_lets_go_of_its_memory_at_once(name: str) -> None:
    # not when the collector of garbage comes by: gigabytes hang on it
    gc.disable()
    try:
        # compilers keep frames of their callers for a while
        optimizer, scaler = make(name, params(torch.float16), backend="eager"), halfstep.GradScaler()
        for _ in range(2):
            scaler.scale(torch.ones(()))
            gradients(optimizer, 0)
            halfstep.clip_grad_norm_(optimizer, 1.0, scaler)
            scaler.step(optimizer)
            scaler.update()
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.explain()
        halfstep.EMA(optimizer).update()
        gradients(optimizer, 1)
        halfstep.clip_grad_norm_(optimizer, 1.0)
        gone = weakref.ref(optimizer)
        del optimizer
        assert gone() is None
    finally:
        gc.enable()
