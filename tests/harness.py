"""What the tests of arithmetic share: values that break things, sameness, and one format or rule run on one backend."""

import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import halfstep
from halfstep import backends
from halfstep.backends import BACKENDS
from halfstep.backends.pieces import part_shape
from halfstep.contracts import Counter, Format, Job, Moment, Plan, Rule
from halfstep.engine import HalfOptimizer
from halfstep.formats import FLOAT32, GRADS, MOMENTS, WEIGHTS
from halfstep.rules import RULES
from halfstep.rules.average import AVERAGE

CPU = torch.device("cpu")
#: every backend that runs on the CPU: the GPU's does in Triton's interpreter
HERE = [name for name in BACKENDS if name != "gpu" or os.environ.get("TRITON_INTERPRET") == "1"]
#: every format of a weight, float32 params' own among them, by a name that reads well in a test's id
WEIGHT_FORMATS: dict[str, Format] = {"float32": FLOAT32} | {
    f"{name}-{str(dtype).removeprefix('torch.')}": format
    for name, formats in WEIGHTS.items()
    for dtype, format in formats.items()
}
#: every format of a moment, one that serves both kinds once
MOMENT_FORMATS: dict[str, Format] = {
    name if formats.signed is formats.square else f"{name}-{kind}": format
    for name, formats in MOMENTS.items()
    for kind, format in zip(formats._fields, formats, strict=True)
}
#: hyperparameters for any rule's scalars, each rule taking what it needs: the public optimizers' defaults together, but
#: for those at which a part of the arithmetic would stand still
GROUP: dict[str, Any] = {}
for _optimizer in vars(halfstep).values():
    if isinstance(_optimizer, type) and issubclass(_optimizer, HalfOptimizer):
        make: Any = _optimizer
        GROUP |= make([torch.nn.Parameter(torch.zeros(1))]).defaults
GROUP |= {"weight_decay": 0.01, "momentum": 0.9, "dampening": 0.1, "decay": 0.9}


def float_of(bits: int) -> float:
    """The float32 with these 32 bits."""
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def specials() -> Tensor:
    """Values at which formats and conversions go wrong, of both signs."""
    bits = [
        *(0x00000000, 0x00000001, 0x00007FFF, 0x00008000, 0x00008001, 0x007FFFFF, 0x00800000),  # zero, subnormals
        *(0x33000000, 0x33000001, 0x32FFFFFF, 0x33800000, 0x337FFFFF, 0x33C00000),  # 2**-25, 2**-24: float16's least
        *(0x37800000, 0x377FFFFF, 0x387FC000, 0x387FE000, 0x38800000, 0x38801000),  # 2**-16; 2**-14: its least normal
        *(0x3F800000, 0x3F800001, 0x3F7FFFFF, 0x3F808000, 0x3F818000, 0x3F801000, 0x3F803000),  # 1 and ties beside it
        *(0x477FE000, 0x477FEFFF, 0x477FF000, 0x477FF001, 0x47800000),  # 65504, 65520: float16's end
        *(0x7F7F0000, 0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF),  # bfloat16's and float32's end
        *(0x7F800000, 0x7FC00000, 0x7F800001, 0x7FFFFFFF),  # infinity, NaNs
    ]
    values = torch.tensor(bits, dtype=torch.int64)
    return torch.cat([values, values + 0x80000000]).to(torch.int32).view(torch.float32)


def spread(n: int, generator: torch.Generator | None = None) -> Tensor:
    """``n`` float32 values of any bits at all: every exponent, subnormals, infinities and NaNs."""
    return (
        torch.randint(-(2**31), 2**31, (n,), generator=generator, dtype=torch.int64).to(torch.int32).view(torch.float32)
    )


def assert_same(a: Tensor, b: Tensor) -> None:
    """Raise unless both have the same dtype, shape and bits; where both are NaN their bits may differ."""
    assert a.dtype is b.dtype, f"{a.dtype} is not {b.dtype}"
    assert a.shape == b.shape, f"{tuple(a.shape)} is not {tuple(b.shape)}"
    width = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    differs = a.contiguous().view(width) != b.contiguous().view(width)
    if a.is_floating_point():
        differs &= ~(a.isnan() & b.isnan())
    if differs.any():
        where = differs.nonzero()[0].tolist()
        raise AssertionError(
            f"{int(differs.sum())} of {differs.numel()} differ, first at {where}: {a[*where]}, {b[*where]}"
        )


def assert_equal(one: Any, two: Any, where: str = "", *, ordered: bool = True) -> None:
    """Raise unless two states hold the same, type for type and bit for bit, and in the same order where that counts."""
    assert type(one) is type(two), where
    if isinstance(one, Tensor):
        try:
            assert_same(one.detach(), two.detach())
        except AssertionError as error:
            raise AssertionError(f"{where}: {error}") from None
    elif isinstance(one, dict):
        first, second = ([(type(key), key) for key in each] for each in (one, two))
        assert first == second if ordered else set(first) == set(second), where
        for key in one:
            assert_equal(one[key], two[key], f"{where}/{key}", ordered=ordered)
    elif isinstance(one, list | tuple):
        assert len(one) == len(two), where
        for place, pair in enumerate(zip(one, two, strict=True)):
            assert_equal(*pair, f"{where}/{place}", ordered=ordered)
    else:
        assert one == two or (one != one and two != two), where


def _assign(weight, grad):
    return (grad,)


def _observe(weight, grad, seen):
    return weight, weight


COUNTER = Counter(1, 2, 3)
ASSIGN = Rule("assign", (), _assign, lambda group, step: ())
OBSERVE = Rule("observe", (Moment("seen", signed=True),), _observe, lambda group, step: ())


def store(format: Format, values: Tensor, backend: str, counter: Counter = COUNTER) -> list[Tensor]:
    """What ``format`` keeps of float32 ``values`` on ``backend``, as its parts."""
    plan = Plan(ASSIGN, format, (), FLOAT32, CPU)
    parts = [torch.empty(part_shape(part, values.shape), dtype=part.dtype) for part in format.parts]
    for part in parts:  # whatever is not written must show
        part.view(-1).view(torch.uint8).fill_(0xA5)
    run(plan, [Job(parts[0], values, tuple(parts[1:]), (1.0,), counter)], backend)
    return parts


def load(format: Format, parts: Sequence[Tensor], backend: str) -> Tensor:
    """The float32 values that ``parts`` hold in ``format``, read on ``backend``."""
    plan = Plan(OBSERVE, format, (FLOAT32,), FLOAT32, CPU)
    first, *rest = (part.clone() for part in parts)
    seen = torch.full(first.shape, 7.0)
    run(plan, [Job(first, torch.zeros(first.shape), (*rest, seen), (1.0,))], backend)
    return seen


def run(plan: Plan, jobs: list[Job], backend: str) -> list[int]:
    """Run ``jobs`` on ``backend`` and no other; return what saturated."""
    assert backends.choose(plan.device, plan.dtypes, backend).backend.name == backend
    return [int(count) for count in backends.kernel(plan, backend)(jobs)]


def job(plan: Plan, shape: tuple[int, ...], seed: int, step: int, *, wild: bool = False) -> Job:
    """A tensor's step under ``plan`` with random content; ``wild`` takes any bits and the special values."""
    generator = torch.Generator().manual_seed(seed)
    n = int(torch.Size(shape).numel())

    def some(scale: float, square: bool = False) -> Tensor:
        values = torch.randn(n, generator=generator) * torch.randn(n, generator=generator).exp() * scale
        if wild:
            values = torch.cat([specials(), spread(n, generator)])[
                torch.randperm(n + specials().numel(), generator=generator)[:n]
            ]
        return (values.abs() if square else values).view(shape)

    param, *state = store(plan.weight, some(0.1), "eager")
    for moment, format in zip(plan.rule.moments, plan.moments, strict=True):
        state += store(format, some(1e-5 if moment.square else 1e-3, moment.square), "eager")
    grad = some(10.0).to(plan.grad.parts[0].dtype)
    return Job(param, grad, tuple(state), (0.37, *plan.rule.scalars(GROUP, step)), Counter(2**63 + 5, seed, step))


def copy(job: Job) -> Job:
    """The same job on tensors of its own."""
    return replace(job, param=job.param.clone(), state=tuple(part.clone() for part in job.state))


def plans(rule: Rule) -> dict[str, Plan]:
    """The plans of ``rule``: every weight format with every moment format, and with gradients of either dtype."""
    found = {}
    for weight, format in WEIGHT_FORMATS.items():
        own = format.parts[0].dtype
        pairs = [(own, name) for name in (MOMENTS if rule.moments else ["float32"])]
        for grad, moments in [*pairs, (torch.float32, "float32")]:
            kept = tuple(MOMENTS[moments].of(moment) for moment in rule.moments)
            name = f"{weight}-{str(grad).removeprefix('torch.')}-{moments}"
            found[name] = Plan(rule, format, kept, GRADS[grad], CPU)
    return found


PLANS = {f"{name}-{key}": plan for name, rule in RULES.items() for key, plan in plans(rule).items()}
PLANS |= {
    f"average-{weight}": Plan(AVERAGE, format, (FLOAT32,), GRADS[format.parts[0].dtype], CPU)
    for weight, format in WEIGHT_FORMATS.items()
}
"""Every plan of every optimizer's rule, and the average of a weight of every format."""


def assert_jobs_same(a: Sequence[Job], b: Sequence[Job]) -> None:
    """Raise unless params and states of both are the same."""
    for one, other in zip(a, b, strict=True):
        for mine, theirs in zip((one.param, *one.state), (other.param, *other.state), strict=True):
            assert_same(mine, theirs)


def allocations(function: Callable[[], object]) -> list[int]:
    """The bytes of every block of memory that torch allocates meanwhile, inside its operators too."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    assert profile.profiler is not None
    assert profile.profiler.kineto_results is not None
    events: Any = profile.profiler.kineto_results.events()
    return [event.nbytes() for event in events if event.name() == "[memory]" and event.nbytes() > 0]
