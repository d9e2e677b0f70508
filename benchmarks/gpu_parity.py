"""Whether the GPU's kernels have the bits of the eager backend: every plan, and the sums of squares."""

import functools
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

import halfstep
from gpu_stages import CPU, INF, Differs, Run, assert_same, content, short
from halfstep import backends
from halfstep.backends import jitted, tiles
from halfstep.checkpoint import fresh
from halfstep.contracts import Counter, Job, Plan
from halfstep.formats import FLOAT32, GRADS, MOMENTS, WEIGHTS
from halfstep.rules import RULES

Case = tuple[tuple[int, int], int, bool]

#: shapes, as one row where neighbours may share a block; bytes between an aligned address and each tensor; and whether
#: its values have any bits at all: subnormals, infinities and NaNs among them
CASES: tuple[Case, ...] = (
    *(((1, size), 16, False) for size in (0, 1, 15, 16, 127, 128, 129, 4097)),
    ((16, 80), 16, True),
    ((3, 720), 4, False),
)
#: a large one, and a gradient whose chunks' sums make a tree of two levels; where it is to be quick a smaller one
LARGE: Sequence[tuple[Case, ...]] = (((300, 768), 16, False),), (((9, 768), 16, False),)
MOST = 2_000_000, 20_001
#: a plan without blocks and one with, in either dtype, and one that keeps nothing
QUICK = (
    "adam-split16-bfloat16-bfloat16-float32",
    "adam-split8-float16-float16-block8",
    "sgd-float32-float32-float32-float32",
)
PARITY_SECONDS = 150


@functools.cache
def plans() -> dict[str, Plan]:
    """Return the plans of every rule: each weight format with each moment format, and with gradients of either dtype.

    They are named by rule, weight format, param's dtype, gradient's dtype and moment format.
    """
    found = {}
    for rule in RULES.values():
        for weights, formats in {"float32": {torch.float32: FLOAT32}, **WEIGHTS}.items():
            for dtype, weight in formats.items():
                own = [(dtype, moments) for moments in (MOMENTS if rule.moments else ["float32"])]
                for grad, moments in dict.fromkeys([*own, (torch.float32, "float32")]):
                    kept = tuple(MOMENTS[moments].of(moment) for moment in rule.moments)
                    name = f"{rule.name}-{weights}-{short(dtype)}-{short(grad)}-{moments}"
                    found[name] = Plan(rule, weight, kept, GRADS[grad], CPU)
    return found


def parity(run: Run) -> dict[str, Any]:
    """Compare two steps of every plan, and the sums of squares, with the eager backend on the CPU, bit for bit."""
    # threads that wait for cores on which others compile take ten times as long as one alone
    torch.set_num_threads(1)
    names = list(QUICK if run.quick else plans())
    red: dict[str, str] = {}
    left = set(names)

    def told() -> dict[str, Any]:
        said = f"{len(names) - len(left)} of {len(names)} plans compared, {len(red)} red"
        return {"says": said, "plans": len(names), "red": red, "not_checked": sorted(left)}

    try:
        for dtype in GRADS:
            with _noting(red, f"squares-{short(dtype)}", run.device):
                _squares_agree(dtype, run.device, MOST[run.quick])
        for name, error in _compiled(names, run):
            left.discard(name)
            with _noting(red, name, run.device):
                if error:
                    raise error
                _steps_agree(plans()[name], run.device, CASES + LARGE[run.quick])
            if len(left) % 10 == 0:
                run.keep(told())
    finally:
        run.keep(told())
    return told()


@contextmanager
def _noting(red: dict[str, str], name: str, device: torch.device) -> Iterator[None]:
    """Note what goes wrong, and go on; but not on a device that is lost, where all else would go wrong too."""
    try:
        yield
    except Exception as error:
        red[name] = f"{type(error).__name__}: {error}"[:1000]
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def _compiled(names: Sequence[str], run: Run) -> Iterator[tuple[str, BaseException | None]]:
    """Yield each plan's name when its kernel is in Triton's cache, and what went wrong where something did.

    A kernel takes a second or two: processes on all cores compile while plans that are ready are compared.
    """
    if jitted.INTERPRETED:
        yield from ((name, None) for name in names)
        return
    active: Any = driver.active.get_current_target()
    target = active.backend, active.arch, active.warp_size
    pool = ProcessPoolExecutor(max(1, (os.cpu_count() or 1) - 1), multiprocessing.get_context("spawn"))
    try:
        futures = {pool.submit(_compile, name, target): name for name in names}
        with suppress(TimeoutError):
            for future in as_completed(futures, min(PARITY_SECONDS, max(run.left(), 1))):
                yield futures[future], future.exception()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _compile(name: str, target: tuple[str, Any, int]) -> None:
    plan = replace(plans()[name], device=torch.device("cuda", 0))
    jitted.compiled(tiles.kernel_of(plan), tiles.TYPES, GPUTarget(*target), tiles.warps(plan), {})


def _steps_agree(plan: Plan, device: torch.device, cases: Sequence[Case]) -> None:
    """Step all cases twice on both backends, the GPU's tensors amid bytes that must stay what they are."""
    # a backend asked for by name is the one, or raises
    eager, gpu = backends.kernel(plan, "eager"), backends.kernel(replace(plan, device=device), "gpu")
    mine: list[Job] = []
    theirs: list[Job] = []
    memories: list[tuple[Tensor, int, int]] = []
    for number, (shape, before, wild) in enumerate(cases):
        param = content(shape, number, 0.1, wild).to(plan.weight.parts[0].dtype)
        made = fresh(param, plan.weight, list(zip(plan.rule.moments, plan.moments, strict=True)))
        state = tuple(part for part in made.values() if isinstance(part, Tensor))
        theirs.append(Job(param, param, state, ()))
        there, *kept = (_fenced(memories, part, before, device) for part in (param, *state))
        mine.append(Job(there, there, tuple(kept), ()))
    for step in (1, 2):
        for number, (shape, before, wild) in enumerate(cases):
            grad = content(shape, 100 * step + number, 10.0, wild).to(plan.grad.parts[0].dtype)
            counter = Counter(2**63 + 5, number, step)
            now = {"scalars": (0.37, *plan.rule.scalars(_group(), step)), "counter": counter}
            theirs[number] = replace(theirs[number], grad=grad, **now)
            mine[number] = replace(mine[number], grad=_fenced(memories, grad, before, device), **now)
        saturated = [int(count) for count in eager(theirs)]
        found = [int(count) for count in gpu(mine)]
        if found != saturated:
            raise Differs(f"step {step}: {found} weights saturated, {saturated} in eager")
        for (shape, before, _), one, other in zip(cases, mine, theirs, strict=True):
            for part, (a, b) in enumerate(zip((one.param, *one.state), (other.param, *other.state), strict=True)):
                assert_same(f"step {step}, shape {shape}, {before} bytes in, part {part}", a, b)
    for memory, begin, end in memories:
        if not ((memory[:begin] == 0xFF).all() and (memory[end:] == 0xFF).all()):
            raise Differs("it writes beside its tensors")


def _squares_agree(dtype: torch.dtype, device: torch.device, most: int) -> None:
    """Compare sums of squares, their total, and what is said of gradients that are not finite."""
    grads = [content((size,), size, 30.0).to(dtype) for size in (0, 1, 15, 1023, 1024, 1025, 16384, 20000, most)]
    grads += [content((70, 40), 7, 30.0).to(dtype).t(), content((4099,), 8, 1.0).to(dtype)[1:]]
    for bad in (None, INF, float("nan")):
        if bad is not None:
            grads[6][5000] = bad
        there = [grad.to(device) for grad in grads[:-1]]
        # a copy would be aligned
        there.append(torch.cat([grads[-1][:1], grads[-1]]).to(device)[1:])
        want, kinds = backends.squares(GRADS[dtype], grads, "eager")
        got, found = backends.squares(GRADS[dtype], there, "gpu")
        assert_same(f"sums with {bad}", got, want)
        assert_same(f"kinds with {bad}", found, kinds)
        assert_same(f"total with {bad}", backends.total(got, "gpu"), backends.total(want, "eager"))


def _fenced(memories: list[tuple[Tensor, int, int]], tensor: Tensor, begin: int, device: torch.device) -> Tensor:
    """A copy on the device amid bytes of ones, so many bytes from an aligned address."""
    end = begin + tensor.nbytes
    memory = torch.full((end + 256,), 0xFF, dtype=torch.uint8, device=device)
    memories.append((memory, begin, end))
    return memory[begin:end].view(tensor.dtype).view(tensor.shape).copy_(tensor)


@functools.cache
def _group() -> dict[str, Any]:
    """Hyperparameters for any rule, none of them at a value where a part of the arithmetic would stand still."""
    made = [optimizer([Parameter(torch.zeros(1))]) for optimizer in (halfstep.SGD, halfstep.Lion, halfstep.AdamW)]
    group: dict[str, Any] = {}
    for optimizer in made:
        group |= optimizer.defaults
    return group | {"weight_decay": 0.01, "momentum": 0.9, "dampening": 0.1}
