"""A step through the scaler: what it computes, both ways, what it leaves behind, and whom it tells."""

import copy
import functools
from typing import Any

import pytest
import torch
from torch.nn import Parameter

import halfstep
from harness import allocations
from scaled import WAYS, adamw, assert_same, backward, iterate, param, snapshot, step

INF = float("inf")

# ---------------------------------------------------------------------- numbers


@pytest.mark.parametrize("way", WAYS)
def test_p01_gradients_below_float16_step_as_in_float32(half: torch.dtype, backend: str, way: str) -> None:
    small = 2.0**-26
    ours, reference = param([1.0, -1.0], half), param([1.0, -1.0], torch.float32)
    optimizer = adamw([ours], backend=backend, eps=1e-8)
    single = adamw([reference], backend=backend, eps=1e-8)
    scaler = halfstep.GradScaler(init_scale=2.0**16)
    for _ in range(3):
        backward(scaler, [ours], [[small, -small]])
        step(scaler, optimizer, way)
        scaler.update()
        optimizer.zero_grad()
        reference.grad = torch.tensor([small, -small])
        single.step()
    assert torch.equal(optimizer.float32_weight(ours), reference.detach())
    # a step of Adam on a constant gradient g is lr * g / (g + eps), here 0.6 lr; the decay takes lr * 0.01 on each
    moved = 1.0 - reference[0].item()
    expected = 3 * 0.01 * (small / (small + 1e-8) + 0.01)
    # weights near 1 carry 2**-25 of rounding an operation, and three steps have two each; the decay's base falls by 2 %
    assert abs(moved - expected) < 6 * 2.0**-25 + 3 * 0.01 * 0.01 * 0.02


def test_p04_unscaled_gradients_have_the_true_norm_and_clipping_counts(half: torch.dtype, backend: str) -> None:
    ours, reference = param(torch.ones(100), half), param(torch.ones(100), torch.float32)
    optimizer, single = adamw([ours], backend=backend), adamw([reference], backend=backend)
    scaler = halfstep.GradScaler(init_scale=2.0)
    values = torch.full((100,), 3e4).to(half).float()
    for k in range(3):  # Adam hides the size of the first step
        backward(scaler, [ours], [values / (k + 1)])
        reference.grad = ours.grad.float() / 2
        scaler.unscale_(optimizer)
        assert ours.grad.dtype is torch.float32
        assert torch.equal(ours.grad, reference.grad)
        true = ours.grad.double().norm().item()
        norm = torch.nn.utils.clip_grad_norm_([ours], 1.0 + k)
        torch.nn.utils.clip_grad_norm_([reference], 1.0 + k)
        # float32 sums of 100 equal squares, each addition within 2**-24, and a square root that halves it
        assert abs(norm.item() / true - 1) < 100 * 2.0**-24
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        single.step()
    assert torch.equal(optimizer.float32_weight(ours), reference.detach())


@pytest.mark.parametrize("scale", [2.0**16, 1000.0])
@pytest.mark.parametrize("options", [{}, {"maximize": True}, {"weights": "master32", "weight_decay": 0.1}], ids=str)
def test_both_ways_of_a_step_give_the_same_bits(
    half: torch.dtype, backend: str, scale: float, options: dict[str, Any]
) -> None:
    def run(way: str) -> tuple[list[torch.Tensor], list[float]]:
        generator = torch.Generator().manual_seed(1)
        transposed = Parameter(torch.randn(5, 3, generator=generator).to(half).t())
        params = [
            param(torch.randn(4, 3, generator=generator), half),
            transposed,
            param(torch.randn(7, generator=generator), torch.float32),
            param(0.5, half),
            param(torch.empty(0, 3), half),
        ]
        optimizer = adamw(params, backend=backend, **options)
        scaler, scales = halfstep.GradScaler(init_scale=scale), []
        for k in range(6):
            grads = [torch.randn(p.shape, generator=generator) * 0.3 for p in params]
            if k == 2:
                grads[0][0, 0] = INF
            backward(scaler, params, grads)
            step(scaler, optimizer, way)
            scaler.update()
            scales.append(scaler.get_scale())
            optimizer.zero_grad()
        assert not transposed.is_contiguous()
        assert all(optimizer.state[p]["step"] == 5 for p in params)
        return snapshot(optimizer), scales

    straight, unscaled = run("straight"), run("unscaled")
    assert_same(straight[0], unscaled[0])
    assert straight[1] == unscaled[1] == [scale] * 2 + [scale / 2] * 4


def test_no_float32_gradient_exists_in_the_straight_way(half: torch.dtype, backend: str) -> None:
    numel = 2**20  # eager's pieces hold 2**18 elements, of at most 8 bytes: half of a float32 gradient
    ours = param(torch.ones(numel), half)
    optimizer, scaler = adamw([ours], backend=backend), halfstep.GradScaler()
    largest = {}
    for way in ("straight", *WAYS):  # the first makes the state
        optimizer.zero_grad()
        backward(scaler, [ours], [torch.full((numel,), 0.1)])
        before, bits = ours.grad, ours.grad.clone()
        largest[way] = max(allocations(functools.partial(step, scaler, optimizer, way)), default=0)
        scaler.update()
        if way == "straight":
            assert ours.grad is before
            assert torch.equal(before, bits)
    assert largest["straight"] < 4 * numel
    assert largest["unscaled"] >= 4 * numel  # what the measurement would have shown


def test_gradients_kept_in_float32_accumulate_and_step(half: torch.dtype, backend: str) -> None:
    ours = {way: param([1.0, 2.0], half) for way in WAYS}
    for way, p in ours.items():
        p.grad_dtype = torch.float32
        optimizer, scaler = adamw([p], backend=backend), halfstep.GradScaler(init_scale=1.0)
        backward(scaler, [p], [[1.0, 1.0]])
        for _ in range(1024):
            backward(scaler, [p], [[2.0**-11, 2.0**-11]])
        assert torch.equal(p.grad, torch.tensor([1.5, 1.5]))
        step(scaler, optimizer, way)
        scaler.update()
        assert p.grad.dtype is p.grad_dtype is torch.float32
        assert optimizer.state[p]["exp_avg"].tolist() == pytest.approx([0.15, 0.15], rel=2.0**-22)  # (1 - beta1) * g
    assert torch.equal(ours["straight"], ours["unscaled"])


# ---------------------------------------------------------------------- overflow


@pytest.mark.parametrize("bad", [INF, -INF, float("nan")])
@pytest.mark.parametrize("way", WAYS)
def test_p11_an_overflow_leaves_nothing_behind(half: torch.dtype, backend: str, way: str, bad: float) -> None:
    params = [param([1.0, 2.0], half), param([3.0], half), param([4.0], torch.float32)]
    optimizer, scaler = adamw(params, backend=backend), halfstep.GradScaler()
    assert not scaler.skipped(optimizer)
    iterate(scaler, optimizer, params, [[0.5, 0.5], [0.5], [0.5]])
    assert not scaler.skipped(optimizer)
    before = snapshot(optimizer)

    optimizer.zero_grad()
    backward(scaler, params, [[0.5, bad], [0.5], [0.5]])
    assert step(scaler, optimizer, way) is None
    assert scaler.skipped(optimizer)
    assert scaler.get_scale() == 2.0**16
    if way == "unscaled":
        assert [p.grad is None for p in params] == [True, True, False]
    scaler.update()
    assert scaler.get_scale() == 2.0**15
    assert scaler.skipped(optimizer)
    assert_same(snapshot(optimizer), before)
    assert [p.grad_dtype for p in params] == [half, half, torch.float32]

    iterate(scaler, optimizer, params, [[0.5, 0.5], [0.5], [0.5]])
    assert not scaler.skipped(optimizer)
    assert [optimizer.state[p]["step"] for p in params] == [2, 2, 2]
    assert scaler.get_scale() == 2.0**15


def test_p11_an_overflow_in_the_first_step_makes_no_state(half: torch.dtype, backend: str) -> None:
    ours = param([1.0], half)
    optimizer, scaler = adamw([ours], backend=backend), halfstep.GradScaler()
    iterate(scaler, optimizer, [ours], [[INF]])
    assert not optimizer.state


@pytest.mark.parametrize("way", WAYS)
def test_p14_only_the_optimizer_that_overflowed_is_skipped(half: torch.dtype, way: str) -> None:
    good, bad = param([1.0], half), param([1.0], half)
    optimizers, scaler = [adamw([good]), adamw([bad])], halfstep.GradScaler()
    backward(scaler, [good, bad], [[0.5], [INF]])
    for optimizer in optimizers:
        step(scaler, optimizer, way)
    assert [scaler.skipped(optimizer) for optimizer in optimizers] == [False, True]
    scaler.update()
    assert [scaler.skipped(optimizer) for optimizer in optimizers] == [False, True]
    assert scaler.get_scale() == 2.0**15
    assert (good.item() < 1.0, bad.item()) == (True, 1.0)

    for optimizer in optimizers:
        optimizer.zero_grad()
    backward(scaler, [good, bad], [[INF], [INF]])
    for optimizer in optimizers:
        step(scaler, optimizer, way)
    scaler.update()
    assert [scaler.skipped(optimizer) for optimizer in optimizers] == [True, True]
    assert scaler.get_scale() == 2.0**14


# ---------------------------------------------------------------------- which params


@pytest.mark.parametrize("way", WAYS)
def test_p15_no_gradients_is_no_error(half: torch.dtype, way: str) -> None:
    ours, other = param([1.0], half), param([1.0], half)
    idle, busy, scaler = adamw([ours]), adamw([other]), halfstep.GradScaler()
    backward(scaler, [other], [[0.5]])
    step(scaler, idle, way)
    step(scaler, busy, way)
    assert not scaler.skipped(idle)
    scaler.update()
    assert ours.item() == 1.0
    assert not idle.state
    assert busy.state[other]["step"] == 1


@pytest.mark.parametrize("way", WAYS)
def test_p15_each_param_counts_its_own_steps(half: torch.dtype, backend: str, way: str) -> None:
    """Frozen and later unfrozen params, and a group added late, step as a fresh optimizer's first step."""
    frozen, busy, late, alone = (param([1.0], half) for _ in range(4))
    frozen.requires_grad_(False)
    optimizer, scaler = adamw([frozen, busy], backend=backend), halfstep.GradScaler()
    for _ in range(3):
        backward(scaler, [frozen, busy], [[0.5], [0.5]])
        step(scaler, optimizer, way)
        scaler.update()
        optimizer.zero_grad()
    assert frozen.item() == 1.0
    frozen.requires_grad_()
    optimizer.add_param_group({"params": [late]})
    backward(scaler, [frozen, busy, late], [[0.5]] * 3)
    step(scaler, optimizer, way)
    scaler.update()
    assert [optimizer.state[p]["step"] for p in (frozen, busy, late)] == [1, 4, 1]
    fresh = adamw([alone], backend=backend)
    backward(scaler, [alone], [[0.5]])
    step(scaler, fresh, way)
    assert torch.equal(optimizer.float32_weight(frozen), fresh.float32_weight(alone))
    assert torch.equal(optimizer.float32_weight(late), fresh.float32_weight(alone))


def test_a_param_frozen_after_backward_still_steps(half: torch.dtype) -> None:
    ours = param([1.0], half)
    optimizer, scaler = adamw([ours]), halfstep.GradScaler()
    backward(scaler, [ours], [[0.5]])
    ours.requires_grad_(False)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert optimizer.state[ours]["step"] == 1
    assert ours.grad is None


# ---------------------------------------------------------------------- order


@pytest.mark.parametrize("kind", [halfstep.GradScaler, torch.amp.GradScaler])
def test_p16_calls_out_of_order_raise_in_torchs_words(kind: type[torch.amp.GradScaler]) -> None:
    ours = param([0.0], torch.bfloat16)
    optimizer = adamw([ours]) if kind is halfstep.GradScaler else torch.optim.AdamW([ours])
    scaler = kind("cpu")
    for name, call in {"unscale_": scaler.unscale_, "step": scaler.step}.items():
        with pytest.raises(AssertionError, match=rf"^Attempted {name} but _scale is None\.  This may indicate"):
            call(optimizer)
    with pytest.raises(AssertionError, match=r"^Attempted update but _scale is None\.  This may indicate"):
        scaler.update()
    copy.deepcopy(scaler)  # none of these began an iteration
    backward(scaler, [ours], [[0.5]])
    with pytest.raises(AssertionError, match=r"^No inf checks were recorded prior to update\.$"):
        scaler.update()
    scaler.unscale_(optimizer)
    with pytest.raises(
        RuntimeError, match=r"^unscale_\(\) has already been called on this optimizer since the last update\(\)\.$"
    ):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    weight = ours.item()
    with pytest.raises(RuntimeError, match=r"^step\(\) has already been called since the last update\(\)\.$"):
        scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"^unscale_\(\) is being called after step\(\)\.$"):
        scaler.unscale_(optimizer)
    assert ours.item() == weight
    scaler.update()
    optimizer.zero_grad()
    backward(scaler, [ours], [[0.5]])
    scaler.step(optimizer)
    assert ours.item() < weight


def test_a_closure_is_refused_in_torchs_words() -> None:
    ours = param([1.0], torch.bfloat16)
    optimizer, scaler = adamw([ours]), halfstep.GradScaler()
    backward(scaler, [ours], [[0.5]])
    message = r"^Closure use is not currently supported if GradScaler is enabled\.$"
    with pytest.raises(RuntimeError, match=message):
        scaler.step(optimizer, lambda: None)
    with pytest.raises(RuntimeError, match=message):
        scaler.step(optimizer, closure=lambda: None)
    scaler.step(optimizer, None)  # as Accelerate calls it
    assert optimizer.state[ours]["step"] == 1


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("moment", ["before step", "instead of step", "after step", "after update"])
def test_p18_the_next_backward_accepts_what_zero_grad_leaves(half: torch.dtype, moment: str, set_to_none: bool) -> None:
    ours = param([1.0, 2.0], half)
    optimizer, scaler = adamw([ours]), halfstep.GradScaler(init_scale=4.0)
    for _ in range(2):
        backward(scaler, [ours], [[1.0, 2.0]])
        scaler.unscale_(optimizer)
        if moment in ("before step", "instead of step"):
            optimizer.zero_grad(set_to_none)
        if moment == "instead of step":
            backward(scaler, [ours], [[1.0, 2.0]])
        else:
            scaler.step(optimizer)
        if moment == "after step":
            optimizer.zero_grad(set_to_none)
        scaler.update()
        optimizer.zero_grad(set_to_none)
        assert ours.grad is None
        assert ours.grad_dtype is half
    backward(scaler, [ours], [[1.0, 2.0]])
    backward(scaler, [ours], [[1.0, 2.0]])
    grad: Any = ours.grad  # None by pyright's reckoning
    assert torch.equal(grad, torch.tensor([8.0, 16.0], dtype=half))
