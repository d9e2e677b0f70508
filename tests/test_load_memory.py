"""A state is loaded within 1.1 times its own size: nothing is held twice but what is loaded."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfstep.engine import HalfOptimizer
from test_convert import follow
from test_state import PAIRS
from training import drive, make, members, params

#: many tensors, so that no one of them counts; each is large enough for blocks
SHAPES = ((64, 64),) * 100
#: of one at a time there are some 30 temporaries of 4 bytes an element
WORKING = 30 * 4 * 64 * 64


def peak(function: Callable[[], object]) -> int:
    """The most bytes that torch holds at a time inside ``function`` beyond what it held before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    assert profile.profiler is not None
    assert profile.profiler.kineto_results is not None
    held = most = 0
    events: Any = profile.profiler.kineto_results.events()
    for event in events:
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


def size(optimizer: HalfOptimizer) -> int:
    return sum(t.nbytes for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        *((pair, pair) for pair in PAIRS),
        (("split16", "float32"), ("split8", "block8")),
        (("split8", "block8"), ("master32", "float32")),
        (("stochastic", "bfloat16"), ("split16", "block8")),
    ],
)
def test_a_state_loads_within_a_tenth_more_than_its_own_size(old: tuple[str, str], new: tuple[str, str]) -> None:
    source = make("AdamW", params(torch.bfloat16, SHAPES), weights=old[0], moments=old[1])
    target = make("AdamW", params(torch.bfloat16, SHAPES, 1), weights=new[0], moments=new[1])
    drive(source, range(1))
    follow(target, source)
    state = source.state_dict()
    most = peak(lambda: target.load_state_dict(state))
    assert size(target) <= most <= 1.1 * size(target) + WORKING


def test_torchs_16_bit_moments_are_widened_one_at_a_time() -> None:
    theirs = torch.optim.AdamW(params(torch.bfloat16, SHAPES))
    drive(theirs, range(1))
    target = make("AdamW", params(torch.bfloat16, SHAPES))
    state = theirs.state_dict()
    assert peak(lambda: target.load_state_dict(state)) <= 1.1 * size(target) + WORKING


#: what a child does to say how much memory that is its own, none of a file's, a load takes at most
CHILD = """
import sys, threading, time
import torch
import halfstep

torch.set_num_threads(1)

def own():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))

params = [torch.nn.Parameter(torch.zeros(2**18, 64, dtype=torch.bfloat16)) for _ in range(2)]
for param in params:
    param.data.fill_(1)
optimizer = halfstep.AdamW(params, backend="eager")
halfstep.AdamW([torch.nn.Parameter(torch.ones(4))], backend="eager").load_state_dict(
    torch.load(sys.argv[2], mmap=True, weights_only=True)
)
before = most = own()
done = False

def watch():
    global most
    while not done:
        most = max(most, own())
        time.sleep(0.001)

thread = threading.Thread(target=watch)
thread.start()
optimizer.load_state_dict(torch.load(sys.argv[1], mmap=True, weights_only=True))
done = True
thread.join()
size = sum(t.nbytes for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor))
print(size, max(most, own()) - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's own figures")
def test_a_mapped_file_loads_within_a_tenth_more_than_the_states_size(tmp_path: Path) -> None:
    zeros = torch.zeros(2**18, 64)
    entry = {"step": 3, "mantissa": 23, "remainder": zeros.short(), "exp_avg": zeros, "exp_avg_sq": zeros}
    group = make("AdamW", [nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))]).state_dict()["param_groups"][0]
    torch.save({"state": {0: entry, 1: entry}, "param_groups": [{**group, "params": [0, 1]}]}, tmp_path / "state.pt")
    small = make("AdamW", params(torch.float32, [(4,)]))
    drive(small, range(1))
    torch.save(small.state_dict(), tmp_path / "small.pt")
    files = [str(tmp_path / "state.pt"), str(tmp_path / "small.pt")]
    run = subprocess.run([sys.executable, "-c", CHILD, *files], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    whole, most = map(int, run.stdout.split())
    assert whole == 2 * 2**24 * 10
    assert whole * 0.9 < most < 1.1 * whole


def test_loading_changes_nothing_of_the_loaded_dict() -> None:
    source = make("AdamW", params(torch.float16, [(64, 64)]), weights="split8", moments="block8")
    drive(source, range(1))
    target = make("AdamW", params(torch.float16, [(64, 64)]), weights="split8", moments="block8")
    target.load_state_dict(source.state_dict())
    for param, other in zip(members(target), members(source), strict=True):
        for key, value in target.state[param].items():
            assert not isinstance(value, Tensor) or value.data_ptr() != source.state[other][key].data_ptr()
