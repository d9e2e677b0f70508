"""The GPU backend in Triton's interpreter: run by test_gpu_interpreted.py, in a process with TRITON_INTERPRET=1."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import halfstep
import test_cut
from halfstep import backends
from halfstep.backends import gpu, jitted, layout
from halfstep.contracts import Ahead, Counter, Job, Plan
from halfstep.ema import EMA
from halfstep.formats import FLOAT32, GRADS, WEIGHTS
from halfstep.primitives import VOCABULARY
from halfstep.rules import RULES
from halfstep.rules.adam import ADAM
from halfstep.schedule import Schedule
from harness import (
    CPU,
    GROUP,
    MOMENT_FORMATS,
    PLANS,
    WEIGHT_FORMATS,
    assert_jobs_same,
    assert_same,
    copy,
    job,
    load,
    run,
    specials,
    spread,
    store,
)
from test_counter import LINES, assert_defined_along
from test_cut import SPANNED, SPANNED_IN_BLOCKS, assert_parts_same, cuts, small, wholes
from training import assert_states, drive, gradients, make, members, params, through_file

# numpy, which computes here, speaks of NaN and of what goes out of range
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

#: a plan without blocks and one with, in either dtype, of many parts
FEW = {
    name: PLANS[name]
    for name in (
        "adam-split16-bfloat16-bfloat16-float32",
        "adam-split8-float16-float16-block8",
        "sgd-float32-float32-float32",
    )
}
SIZES = (0, 1, 15, 16, 127, 128, 129, 4097)
INF, NAN = float("inf"), float("nan")


def shaped(plan: Plan, sizes: Sequence[int] = SIZES) -> list[tuple[int, ...]]:
    """Tensors of these sizes, as one row where there are blocks."""
    return [(1, size) if plan.in_blocks else (size,) for size in sizes]


def fenced(tensor: Tensor, before: int = 16) -> tuple[Tensor, Tensor]:
    """A copy of a tensor amid NaN, so many bytes from an aligned address, and all of that memory."""
    memory = torch.full((tensor.nbytes + before + 256,), 0xFF, dtype=torch.uint8)
    assert memory.data_ptr() % 16 == 0
    inside = memory[before : before + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
    return inside.copy_(tensor), memory


def inside_fences(one: Job, before: int = 16) -> tuple[Job, list[tuple[Tensor, int, int]]]:
    """A job whose tensors lie amid NaN, and for each its memory and where it begins and ends in there."""
    made, fences = [], []
    for tensor in (one.param, one.grad, *one.state):
        found, memory = fenced(tensor, before)
        made.append(found)
        fences.append((memory, before, before + tensor.nbytes))
    return replace(one, param=made[0], grad=made[1], state=tuple(made[2:])), fences


def assert_whole(fences: Sequence[tuple[Tensor, int, int]]) -> None:
    """Raise where anything was written beside the tensors."""
    for memory, begin, end in fences:
        assert (memory[:begin] == 0xFF).all()
        assert (memory[end:] == 0xFF).all()


def assert_as_eager(plan: Plan, jobs: Sequence[Job], before: int = 16) -> None:
    """Raise unless both backends make the same of jobs, in one call, and write nothing beside them."""
    want = [copy(one) for one in jobs]
    counts = run(plan, want, "eager")
    pairs = [inside_fences(one, before) for one in jobs]
    got = [one for one, _ in pairs]
    assert run(plan, got, "gpu") == counts
    assert_jobs_same(want, got)
    for _, fences in pairs:
        assert_whole(fences)


def test_the_interpreter_runs() -> None:
    assert jitted.INTERPRETED
    assert "backend gpu: Triton's interpreter" in make("AdamW", params(torch.float16), backend="gpu").explain()
    # unasked it is chosen for no one
    assert "backend cpu: " in make("AdamW", params(torch.float16)).explain()


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_p10_every_pair_has_the_bits_of_eager(plan: Plan) -> None:
    jobs = [job(plan, shape, seed, 3 * seed + 1) for seed, shape in enumerate(shaped(plan))]
    assert_as_eager(plan, jobs)
    skipped = [replace(copy(one), scalars=(), ahead=ahead(plan, 7, skip=1.0)) for one in jobs]
    assert run(plan, skipped, "gpu") == [0] * len(jobs)
    assert_jobs_same(skipped, jobs)
    assert all(one.ahead and one.ahead.step.item() == 7 for one in skipped)


@pytest.mark.parametrize("plan", FEW.values(), ids=FEW)
@pytest.mark.parametrize("wild", [False, True], ids=["ordinary", "wild"])
def test_p10_whatever_shape_and_values(plan: Plan, wild: bool) -> None:
    shapes = [(), (2, 2048), (3, 130), (5, 64), (40, 65), (2, 3, 70), (1, 6144), (9, 16), (17,)]
    assert_as_eager(plan, [job(plan, shape, seed, 5, wild=wild) for seed, shape in enumerate(shapes)])


@pytest.mark.parametrize("plan", FEW.values(), ids=FEW)
@pytest.mark.parametrize("before", [4, 20])
def test_p25_unaligned_views_take_the_narrow_path(plan: Plan, before: int) -> None:
    assert_as_eager(plan, [job(plan, shape, seed, 5) for seed, shape in enumerate([(1, 4096), (3, 80)])], before)


def test_tiles_are_wide_where_their_memory_allows() -> None:
    run_, blocks = FEW["adam-split16-bfloat16-bfloat16-float32"], FEW["adam-split8-float16-float16-block8"]

    def wide(plan: Plan, shape: tuple[int, ...], before: int = 16) -> tuple[int, int]:
        one, _ = inside_fences(job(plan, shape, 0, 1), before)
        kernel: Any = gpu._Kernel(plan)
        rows: list[Any] = []
        layout.step_all(plan, [one], rows.extend)
        (*_, wide), tiles = kernel._row(rows[0])
        return wide, tiles

    assert wide(run_, (4096,)) == (2, 2)
    assert wide(run_, (4096,), before=8) == (0, 2)
    assert wide(run_, (64, 66)) == (3, 3)  # all of it is a multiple of 16
    assert wide(run_, (5, 821)) == (2, 3)  # a tail is not
    assert wide(blocks, (32, 128)) == (2, 2)
    assert wide(blocks, (32, 144)) == (4, 4)  # rows of a block and a short one
    assert wide(blocks, (32, 130)) == (0, 4)
    assert wide(blocks, (1, 4100)) == (2, 3)


@pytest.mark.parametrize("plan", FEW.values(), ids=FEW)
def test_p07_an_index_may_pass_32_bits_anywhere(plan: Plan) -> None:
    for start in (2**32 - 4096, 2**32 - 1000, 2**32 - 37, 2**40 + 5):
        jobs = [
            replace(job(plan, shape, 3, 2), counter=Counter(2**64 - 1, 7, 2**33, start))
            for shape in [(2, 2048), (5, 260)]
        ]
        assert_as_eager(plan, jobs)


@pytest.mark.parametrize("counter", LINES.values(), ids=LINES)
def test_p10_along_lines_the_bits_are_those_of_the_definition(counter: Counter) -> None:
    assert_defined_along(counter, "gpu")


@pytest.mark.parametrize("plan", test_cut.FEW.values(), ids=test_cut.FEW)
def test_p10_parts_of_lines_have_the_bits_of_the_whole(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_parts_same(plan, wholes(plan, cuts(plan)), ["gpu"])
    small(monkeypatch)
    assert_parts_same(plan, wholes(plan, cuts(plan, SPANNED_IN_BLOCKS, SPANNED)), ["gpu"])


@pytest.mark.parametrize("plan", FEW.values(), ids=FEW)
def test_p25_strides_change_nothing(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "STAGED", 140)
    jobs = [job(plan, shape, 3, 4) for shape in [(6, 5, 7), (3, 40, 7)]]
    want, got = [copy(one) for one in jobs], [copy(one) for one in jobs]
    strided = [
        replace(
            one,
            param=one.param.permute(2, 0, 1).contiguous().permute(1, 2, 0),
            grad=one.grad.permute(1, 2, 0).contiguous().permute(2, 0, 1),
        )
        for one in got
    ]
    counts = run(plan, want, "eager")
    assert run(plan, strided, "gpu") == counts
    assert_jobs_same(want, strided)


@pytest.mark.parametrize(
    "format", [*WEIGHT_FORMATS.values(), *MOMENT_FORMATS.values()], ids=[*WEIGHT_FORMATS, *MOMENT_FORMATS]
)
def test_p10_a_format_keeps_the_bits_of_any_value(format: Any) -> None:
    values = torch.cat([specials(), spread(3000)]).view(1, -1)
    for mine, theirs in zip(store(format, values, "gpu"), store(format, values, "eager"), strict=True):
        assert_same(mine, theirs)
    parts = [
        torch.randint(-128, 128, (part.nbytes,)).to(torch.int8).view(part.dtype).view(part.shape)
        for part in store(format, values, "eager")
    ]
    assert_same(load(format, parts, "gpu"), load(format, parts, "eager"))


def test_p09_what_saturates_is_counted_by_tensor(half: torch.dtype) -> None:
    plan = Plan(ADAM, WEIGHTS["split16"][half], (FLOAT32, FLOAT32), FLOAT32, CPU)
    jobs = [replace(job(plan, (n,), n, 1), grad=torch.full((n,), -1.0)) for n in (5, 3000)]
    jobs = [replace(one, scalars=(1.0, 1.0, 1.0, 1.0, 0.0, 3.4e38, 1.0, 0.0)) for one in jobs]
    counts = run(plan, [copy(one) for one in jobs], "eager")
    assert all(counts)
    assert run(plan, jobs, "gpu") == counts


# ---------------------------------------------------------------------- the check


@pytest.mark.parametrize("dtype", GRADS)
def test_p10_the_norm_has_the_bits_of_eager(dtype: torch.dtype) -> None:
    sizes = (0, 1, 15, 1023, 1024, 1025, 16384, 20000)
    grads = [fenced((torch.randn(size) * 30).to(dtype), before)[0] for size in sizes for before in (16, 4)]
    grads.append(torch.randn(70, 40).to(dtype).t())
    want, _ = backends.squares(GRADS[dtype], grads, "eager")
    got, kinds = backends.squares(GRADS[dtype], grads, "gpu")
    assert_same(got, want)
    assert not kinds.any()
    assert_same(backends.total(got, "gpu"), backends.total(want, "eager"))


@pytest.mark.parametrize("count", [0, 1, 2, 3, 255, 256, 257, 5000, 70_000])
def test_p10_the_tree_above_the_chunks_is_the_same(count: int) -> None:
    sums = torch.randn(count, dtype=torch.float64).exp()
    assert_same(backends.total(sums, "gpu"), backends.total(sums, "eager"))


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
@pytest.mark.parametrize("dtype", GRADS)
def test_each_gradient_is_told_of(dtype: torch.dtype, bad: float) -> None:
    grads = [torch.full((size,), torch.finfo(dtype).max, dtype=dtype) for size in (0, 17, 3000, 20000)]
    assert not backends.squares(GRADS[dtype], grads, "gpu")[1].any()
    for place in (0, 1023, 2999):
        grads[2].fill_(1.0)[place] = bad
        kinds = backends.squares(GRADS[dtype], grads, "gpu")[1]
        assert kinds.tolist() == [0, 0, 2 if bad != bad else 1, 0]


# ---------------------------------------------------------------------- an optimizer and its scaler


def pair(weights: str, moments: str, half: torch.dtype, **options: Any) -> list[Any]:
    """Two optimizers of the same params: on the GPU's backend, and in PyTorch's operators."""
    shapes = [(64, 66), (7,), (), (5, 3)]
    made = [params(half, shapes) for _ in range(2)]
    kept = {"weights": weights, "moments": moments, "lr": 1e-2, "weight_decay": 0.1}
    return [make("AdamW", made[0], backend="gpu", **options, **kept), make("AdamW", made[1], backend="eager", **kept)]


FORMATS = [("split16", "float32"), ("split8", "block8"), ("stochastic", "bfloat16")]


def scaled(optimizer: Any, scaler: Any, number: int, bad: float | None = None) -> None:
    """Give each param the gradient of step ``number`` times the scale, and one of them a number that is ``bad``."""
    gradients(optimizer, number)
    scale = scaler.scale(torch.ones(())).item()
    for param in members(optimizer):
        assert param.grad is not None
        param.grad = (param.grad.float().clamp(-3, 3) * scale).to(param.dtype)
    if bad is not None:
        grad = members(optimizer)[1].grad
        assert grad is not None
        grad[3] = bad


def assert_alike_but_step(a: Any, b: Any) -> None:
    """Raise unless params and states are the same, counts of steps by their value."""
    for one, other in zip(members(a), members(b), strict=True):
        assert_same(one.detach(), other.detach())
        mine, theirs = ({**o.state.get(p, {})} for o, p in ((a, one), (b, other)))
        assert int(mine.pop("step", 0)) == int(theirs.pop("step", 0))
        assert_states(mine, theirs)


@pytest.mark.parametrize(
    ("half", "capturable"), [(torch.float16, False), (torch.float16, True), (torch.bfloat16, True)]
)
@pytest.mark.parametrize(("weights", "moments"), FORMATS)
def test_p05_many_steps_with_a_scaler_a_clip_and_skips(
    weights: str, moments: str, capturable: bool, half: torch.dtype
) -> None:
    both = pair(weights, moments, half, capturable=capturable)
    scalers = [halfstep.GradScaler(init_scale=2.0**6, growth_interval=3) for _ in both]
    for number in range(12):
        norms = []
        for optimizer, scaler in zip(both, scalers, strict=True):
            scaled(optimizer, scaler, number, {4: INF, 7: NAN}.get(number))
            if number % 3 == 1:
                norms.append(halfstep.clip_grad_norm_(optimizer, 0.5, scaler))
            elif number % 3 == 2:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            assert scaler.skipped(optimizer) == (number in (4, 7))
            scaler.update()
            optimizer.zero_grad()
        if norms:
            assert_same(*norms)
        assert_alike_but_step(*both)
        assert scalers[0].state_dict() == scalers[1].state_dict()
    assert {int(both[0].state[param]["step"]) for param in members(both[0])} == {10}


# ---------------------------------------------------------------------- steps that the device counts


def ahead(plan: Plan, step: int, skip: float = 0.0) -> Ahead:
    coming = Schedule().of(plan.rule, 0, {**GROUP, "maximize": False}, CPU, 0.37, torch.tensor(skip))
    return Ahead(torch.tensor(step), *coming)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.95, 0.99)])
def test_a_device_finds_the_scalars_of_any_step(rule: Any, betas: tuple[float, float]) -> None:
    for optimized in (False, True):
        group = {**GROUP, "betas": betas, "optimized_update": optimized, "maximize": True}
        for lr in (1e-3, 0.3, 7e-6):
            coming = Schedule().of(
                rule, 0, {**group, "lr": torch.tensor(lr, dtype=torch.float64)}, CPU, torch.tensor(0.1).double(), None
            )
            plan = PLANS[f"{rule.name}-float32-float32-float32"]
            kernel: Any = gpu._Kernel(plan)
            for step in (0, 1, 2, 355, 17_000, 36_000, 10**6):
                one = replace(job(plan, (3,), 0, 1), ahead=Ahead(torch.tensor(step), *coming))
                steps, scalars, _ = kernel._advanced([one])
                assert steps.tolist() == [step + 1]
                want = torch.tensor([-0.1, *rule.scalars({**group, "lr": lr}, step + 1)], dtype=torch.float64)
                assert_same(scalars, want.float().view(1, -1))


@pytest.mark.parametrize(("half", "maximize"), [(torch.float16, False), (torch.bfloat16, True)])
def test_steps_that_the_device_counts_follow_the_others(maximize: bool, half: torch.dtype) -> None:
    both = pair("split8", "block8", half, capturable=True, maximize=maximize)
    both[1].param_groups[0]["maximize"] = maximize
    for number in range(6):
        for optimizer in both:
            optimizer.param_groups[0]["lr"] = 1e-2 / (number + 1)
            drive(optimizer, [number])
        assert_alike_but_step(*both)
    step = both[0].state[members(both[0])[0]]["step"]
    assert step.dtype is torch.int64
    assert step.item() == 6


def test_the_rate_may_be_a_tensor(half: torch.dtype) -> None:
    both = pair("split16", "float32", half, capturable=True)
    rate = torch.tensor(1e-2)
    for optimizer in both:
        optimizer.param_groups[0]["lr"] = rate
    for number in range(4):
        rate.fill_(0.5**number)
        for optimizer in both:
            drive(optimizer, [number])
        assert_alike_but_step(*both)


def test_p19_counts_of_steps_move_between_both_kinds(half: torch.dtype) -> None:
    both = pair("split8", "block8", half, capturable=True)
    for optimizer in both:
        drive(optimizer, range(3))
    states = [through_file(optimizer.state_dict()) for optimizer in both]
    for optimizer, state in zip(both, reversed(states), strict=True):
        optimizer.load_state_dict(state)
        assert optimizer.param_groups[0]["capturable"] == (optimizer is both[0])
        drive(optimizer, range(3, 6))
    assert_alike_but_step(*both)
    assert isinstance(both[0].state[members(both[0])[0]]["step"], Tensor)
    assert type(both[1].state[members(both[1])[0]]["step"]) is int


def test_without_a_scaler_a_clip_leaves_out_what_is_not_finite(half: torch.dtype) -> None:
    optimizer, _ = pair("split16", "float32", half, capturable=True)
    drive(optimizer, [0])
    before = [param.detach().clone() for param in members(optimizer)]
    gradients(optimizer, 1)
    grad = members(optimizer)[0].grad
    assert grad is not None
    grad[0, 0] = INF
    assert halfstep.clip_grad_norm_(optimizer, 1.0).item() == INF
    optimizer.step()
    for param, was in zip(members(optimizer), before, strict=True):
        assert_same(param.detach(), was)
    assert optimizer.state[members(optimizer)[0]]["step"].item() == 1
    gradients(optimizer, 2)
    optimizer.step()
    assert optimizer.state[members(optimizer)[0]]["step"].item() == 2


def test_a_clip_by_another_scaler_raises(half: torch.dtype) -> None:
    optimizer, _ = pair("split16", "float32", half, capturable=True)
    scaler = halfstep.GradScaler(init_scale=8.0)
    scaled(optimizer, scaler, 0)
    halfstep.clip_grad_norm_(optimizer, 1.0)
    with pytest.raises(RuntimeError, match="clip_grad_norm_ was not given the scaler that steps"):
        scaler.step(optimizer)


def test_averages_ask_once_for_the_steps_that_the_device_counts(
    half: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = pair("split16", "float32", half, capturable=True)
    averages, scalers = [EMA(optimizer, 0.5) for optimizer in both], [halfstep.GradScaler(init_scale=8.0) for _ in both]
    asked: list[str] = []
    for number in range(5):
        for optimizer, ema, scaler in zip(both, averages, scalers, strict=True):
            scaled(optimizer, scaler, number, INF if number in (0, 3) else None)
            scaler.step(optimizer)
            scaler.update()
            with monkeypatch.context() as patched:
                for way in ("item", "tolist", "__int__", "__float__", "__bool__", "__index__"):
                    own = getattr(Tensor, way)
                    patched.setattr(Tensor, way, lambda *a, own=own, way=way: (asked.append(way), own(*a))[1])
                ema.update()
        for one, other in zip(*map(members, both), strict=True):
            assert_same(averages[0].float32_weight(one), averages[1].float32_weight(other))
    assert asked == ["tolist"] * 5
    assert [entry["step"] for entry in averages[0].state_dict()["state"].values()] == [3] * len(members(both[0]))


def test_hyperparameters_may_change_and_leave_one_table(half: torch.dtype) -> None:
    both = pair("split16", "float32", half, capturable=True)
    for number in range(4):
        for optimizer in both:
            # a list, as one that was read from JSON
            optimizer.param_groups[0]["betas"] = [0.9 - number / 10, 0.99]
            drive(optimizer, [number])
        assert_alike_but_step(*both)
    assert len(both[0]._schedule._tables) == 1


def test_betas_whose_scalars_never_settle_raise(half: torch.dtype) -> None:
    optimizer, _ = pair("split16", "float32", half, capturable=True)
    optimizer.param_groups[0]["betas"] = (0.9, 1 - 2.0**-40)
    with pytest.raises(ValueError, match=r"capturable=True: the scalars of adam change for more than .* betas=\(0.9"):
        drive(optimizer, [0])
    assert not optimizer.state


def test_every_word_has_a_meaning() -> None:
    assert set(jitted.WORDS) == set(VOCABULARY)
