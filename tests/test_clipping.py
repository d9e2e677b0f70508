"""The clip that is fused with the step: its norm, what the step makes of it, and for how long it holds."""

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import halfstep
from halfstep import backends
from halfstep import norms as norms_module
from halfstep.backends import cpu
from halfstep.formats import GRADS
from halfstep.norms import squares
from harness import assert_same
from scaled import Wrapper, snapshot
from scaled import assert_same as assert_same_all
from training import OPTIMIZERS, assert_alike, gradients, make, params

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
SIZES = (0, 1, 63, 64, 65, 1023, 1024, 1025, 5000)
INF, NAN = math.inf, math.nan


def some(dtype: torch.dtype) -> list[Tensor]:
    """Gradients of many sizes, with and without the strides of a contiguous one, some of them tiny or large."""
    made = [torch.randn(size) for size in SIZES] + [torch.randn(70, 40).t(), torch.randn(3, 5, 1500)[:, ::2]]
    made += [torch.randn(2000) * 2.0**-20, torch.randn(()) * 100]
    return [grad.to(dtype) for grad in made]


def defined(grad: Tensor) -> list[float]:
    """The sums of squares as they are defined, in Python's floats."""
    values = [value * value for value in grad.double().flatten().tolist()]
    sums = []
    for start in range(0, len(values), 1024):
        chunk = values[start : start + 1024]
        chunk += [0.0] * (1024 - len(chunk))
        while len(chunk) > 1:
            half = len(chunk) // 2
            chunk = [a + b for a, b in zip(chunk[:half], chunk[half:], strict=True)]
        sums += chunk
    return sums


@pytest.mark.parametrize("dtype", DTYPES)
def test_p10_squares_are_summed_as_defined(dtype: torch.dtype, backend: str) -> None:
    grads = some(dtype)
    want = [number for grad in grads for number in defined(grad)]
    assert_same(backends.squares(GRADS[dtype], grads, backend)[0], torch.tensor(want, dtype=torch.float64))


@pytest.mark.parametrize("dtype", DTYPES)
def test_p10_threads_change_no_sum(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    grads = [*some(dtype), torch.randn(100, 1000).to(dtype)]
    one, _ = backends.squares(GRADS[dtype], grads, "cpu")
    monkeypatch.setattr(cpu, "SPAN", 100)
    for threads in (2, 3, 7):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert_same(backends.squares(GRADS[dtype], grads, "cpu")[0], one)


def test_p10_groups_with_backends_and_dtypes_of_their_own_change_no_sum() -> None:
    groups: list[dict[str, Any]] = [{"params": params(half)} for half in DTYPES]
    for which in (("cpu",) * 3, ("eager", "cpu", "eager")):
        for group, name in zip(groups, which, strict=True):
            group["backend"] = name
        optimizer = halfstep.AdamW(groups)
        gradients(optimizer, 1)
        sums = torch.tensor([s for param in members(optimizer) for s in defined(param.grad)], dtype=torch.float64)
        while len(sums) > 1:
            sums = torch.cat([sums, sums.new_zeros(len(sums) % 2)])
            sums = sums[0::2] + sums[1::2]
        assert squares(optimizer).total.item() == sums.item()


@pytest.mark.parametrize("window", [1, 2, 4, 8, 2**18])
def test_p28_few_sums_at_a_time_change_none(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    grads = [torch.randn(size) for size in (5000, 0, 3, 9000, 1024, 1)] + [torch.randn(70, 40).t()]
    optimizer = halfstep.AdamW([torch.nn.Parameter(torch.zeros_like(grad)) for grad in grads])
    for param, grad in zip(members(optimizer), grads, strict=True):
        param.grad = grad
    whole = squares(optimizer).total.item()
    monkeypatch.setattr(norms_module, "WINDOW", window)
    counts = []
    plain = backends.squares
    monkeypatch.setattr(backends, "squares", lambda *given: counts.append(len((found := plain(*given))[0])) or found)
    assert squares(optimizer).total.item() == whole
    assert sum(counts) == 5 + 1 + 9 + 1 + 1 + 3
    # one that is not contiguous stays whole
    assert max(counts) <= max(2 * window, 3 + window)


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_number_that_is_not_finite_makes_the_sum_so(dtype: torch.dtype, bad: float, backend: str) -> None:
    largest = torch.full((3000,), torch.finfo(dtype).max, dtype=dtype)
    assert backends.squares(GRADS[dtype], [largest], backend)[0].isfinite().all()
    for place in (0, 1023, 2999):
        grad = largest.clone()
        grad[place] = bad
        sums, kinds = backends.squares(GRADS[dtype], [largest, grad, largest[:0]], backend)
        assert not math.isfinite(float(sums.sum()))
        assert kinds.tolist() == [0, 2 if math.isnan(bad) else 1, 0]


# ---------------------------------------------------------------------- the norm


def members(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Its params; typed so that their gradients need not be asked for None."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def scaled(optimizer: torch.optim.Optimizer, scaler: Any, number: int) -> None:
    """Give each param the gradient of step ``number``, times the scale."""
    gradients(optimizer, number)
    scale = scaler.scale(torch.ones(())).item()
    for param in members(optimizer):
        param.grad = (param.grad.float() * scale).to(param.dtype)


def test_p04_the_norm_is_the_true_one(half: torch.dtype, backend: str) -> None:
    optimizer, scaler = make("AdamW", params(half, [(100,)]), backend=backend), halfstep.GradScaler(init_scale=2.0)
    scaler.scale(torch.ones(()))
    optimizer.param_groups[0]["params"][0].grad = torch.full((100,), 3e4).to(half)
    norm = halfstep.clip_grad_norm_(optimizer, 1.0, scaler)
    assert norm.dtype is torch.float32
    assert norm.shape == ()
    # 100 equal numbers: 10 times half of one, with float64's roundings under float32's one
    assert norm.item() == np.float32(10 * float(torch.tensor(3e4).to(half)) / 2)


def test_no_gradient_and_no_element_are_a_norm_of_0(half: torch.dtype, backend: str) -> None:
    optimizer = make("AdamW", params(half), backend=backend)
    assert halfstep.clip_grad_norm_(optimizer, 1.0).item() == 0
    optimizer.step()
    optimizer = make("AdamW", params(half, [(0,), (3, 0)]), backend=backend)
    gradients(optimizer, 0)
    assert halfstep.clip_grad_norm_(optimizer, 1.0).item() == 0
    optimizer.step()


# ---------------------------------------------------------------------- what the step makes of it


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("max_norm", [0.0, 0.01, 1e6, INF])
def test_the_step_is_that_of_gradients_times_the_factor(
    name: str, max_norm: float, half: torch.dtype, backend: str
) -> None:
    ours, other = (make(name, params(half), backend=backend) for _ in range(2))
    scaler = halfstep.GradScaler(init_scale=2.0**6, growth_interval=2)
    for number in range(4):
        scaled(ours, scaler, number)
        kept = [param.grad.clone() for param in members(ours)]
        inverse = 1 / scaler.get_scale()
        norm = math.sqrt(squares(ours).total.item()) * inverse
        factor = np.float32(inverse * min(1.0, max_norm / (norm + 1e-6))).item()
        for param, grad in zip(members(other), kept, strict=True):
            param.grad_dtype = None  # type: ignore[attr-defined]
            param.grad = grad.float() * factor
        assert halfstep.clip_grad_norm_(ours, max_norm, scaler).item() == np.float32(norm)
        scaler.step(ours)
        for param, grad in zip(members(ours), kept, strict=True):
            assert_same(param.grad, grad)
        other.step()
        scaler.update()
        ours.zero_grad()
        other.zero_grad()
    assert_alike(ours, other)
    assert scaler.get_scale() == 2.0**8


def test_without_a_scaler_likewise(half: torch.dtype, backend: str) -> None:
    ours, other = (make("AdamW", params(half), backend=backend) for _ in range(2))
    for number in range(3):
        gradients(ours, number)
        factor = np.float32(min(1.0, 0.1 / (math.sqrt(squares(ours).total.item()) + 1e-6))).item()
        for param, one in zip(members(other), members(ours), strict=True):
            param.grad_dtype = None  # type: ignore[attr-defined]
            param.grad = one.grad.float() * factor
        halfstep.clip_grad_norm_(ours, 0.1)
        ours.step()
        other.step()
    assert_alike(ours, other)


def test_a_clip_counts_before_and_after_unscale_and_where_hooks_read_gradients(half: torch.dtype, backend: str) -> None:
    def run(way: str) -> halfstep.AdamW:
        optimizer, scaler = halfstep.AdamW(params(half), backend=backend), halfstep.GradScaler(init_scale=2.0**6)
        if way == "hooked":
            optimizer.register_step_pre_hook(lambda *_: None)
        stepped: Any = Wrapper(optimizer) if way == "wrapped" else optimizer
        for number in range(3):
            scaled(optimizer, scaler, number)
            if way == "after":
                scaler.unscale_(optimizer)
            norm = halfstep.clip_grad_norm_(stepped, 1e-3, scaler)
            assert norm > 1e-3
            if way == "before":
                scaler.unscale_(optimizer)
            scaler.step(stepped)
            scaler.update()
            optimizer.zero_grad()
        return optimizer

    fused = run("fused")
    for way in ("after", "before", "hooked", "wrapped"):
        # a scale that is a power of two leaves the one factor as it is
        assert_alike(run(way), fused)


@pytest.mark.parametrize("bad", [INF, NAN])
def test_what_is_not_finite_is_skipped_with_a_scaler(bad: float, half: torch.dtype, backend: str) -> None:
    optimizer, scaler = make("AdamW", params(half), backend=backend), halfstep.GradScaler(init_scale=2.0**6)
    scaled(optimizer, scaler, 0)
    members(optimizer)[1].grad[3] = bad
    before = copy.deepcopy([param.detach() for param in members(optimizer)])
    assert not halfstep.clip_grad_norm_(optimizer, 1.0, scaler).isfinite()
    scaler.step(optimizer)
    assert scaler.skipped(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**5
    for param, old in zip(members(optimizer), before, strict=True):
        assert_same(param.detach(), old)
    # the clip went with the step
    gradients(optimizer, 1)
    optimizer.step()


# ---------------------------------------------------------------------- how long it holds


def test_a_clip_is_for_one_step_and_for_its_gradients(half: torch.dtype) -> None:
    clipped, plain = (halfstep.AdamW(params(half)) for _ in range(2))
    for number in range(4):
        for optimizer in (clipped, plain):
            gradients(optimizer, number)
        if number == 1:  # left out by hand: new gradients, which nobody asked to clip
            halfstep.clip_grad_norm_(clipped, 1e-3)
            for optimizer in (clipped, plain):
                optimizer.zero_grad()
                gradients(optimizer, number)
        clipped.step()
        plain.step()
    assert_alike(clipped, plain)


def test_gradients_that_changed_since_raise(half: torch.dtype) -> None:
    optimizer = halfstep.AdamW(params(half))
    gradients(optimizer, 0)
    halfstep.clip_grad_norm_(optimizer, 1.0)
    for param in members(optimizer):
        param.grad += 1
    before = snapshot(optimizer)
    with pytest.raises(RuntimeError, match="gradients have changed since clip_grad_norm_ took their norm: call it aft"):
        optimizer.step()
    assert_same_all(snapshot(optimizer), before)
    halfstep.clip_grad_norm_(optimizer, 1.0)
    optimizer.step()


@pytest.mark.parametrize("bad", [INF, NAN])
def test_without_a_scaler_what_is_not_finite_raises(bad: float, half: torch.dtype) -> None:
    optimizer = halfstep.AdamW(params(half))
    gradients(optimizer, 0)
    members(optimizer)[1].grad[3] = bad
    halfstep.clip_grad_norm_(optimizer, 1.0)
    before = snapshot(optimizer)
    with pytest.raises(
        RuntimeError, match=r"gradients' norm is (inf|nan), so that nothing can be clipped to: leave th"
    ):
        optimizer.step()
    assert_same_all(snapshot(optimizer), before)


def test_a_scaler_that_was_not_told_of_raises(half: torch.dtype) -> None:
    optimizer, scaler = halfstep.AdamW(params(half)), halfstep.GradScaler(init_scale=2.0**6)
    for call in (scaler.step, scaler.unscale_):
        scaled(optimizer, scaler, 0)
        halfstep.clip_grad_norm_(optimizer, 1.0)
        before = snapshot(optimizer)
        with pytest.raises(
            RuntimeError, match="took gradients scaled by 1, and they are scaled by 64: call clip_grad_n"
        ):
            call(optimizer)
        assert_same_all(snapshot(optimizer), before)
    halfstep.clip_grad_norm_(optimizer, 1.0, scaler)
    scaler.step(optimizer)


def test_between_step_and_update_nothing_is_clipped(half: torch.dtype) -> None:
    # the gradients are scaled still, and their norm would be taken for the true one
    optimizer, scaler = halfstep.AdamW(params(half)), halfstep.GradScaler(init_scale=2.0**6)
    scaled(optimizer, scaler, 0)
    scaler.step(optimizer)
    with pytest.raises(
        RuntimeError, match=r"clip_grad_norm_\(\) is being called after step\(\): call it between the la"
    ):
        halfstep.clip_grad_norm_(optimizer, 1.0, scaler)
    scaler.update()
    halfstep.clip_grad_norm_(optimizer, 1.0, scaler)


def test_what_is_none_of_ours_is_refused(half: torch.dtype) -> None:
    ours, stock = halfstep.AdamW(params(half)), torch.optim.AdamW(params(half))
    with pytest.raises(
        TypeError, match=r"optimizer is a torch.optim.adamw.AdamW: must be one of halfstep's, whose ste"
    ):
        halfstep.clip_grad_norm_(stock, 1.0)
    with pytest.raises(TypeError, match=r"optimizer is a builtins.list: must be one of halfstep's"):
        halfstep.clip_grad_norm_(params(half), 1.0)
    with pytest.raises(TypeError, match=r"scaler is a torch.amp.grad_scaler.GradScaler: must be the halfstep.GradScal"):
        halfstep.clip_grad_norm_(ours, 1.0, torch.amp.GradScaler("cpu"))  # type: ignore[arg-type]
    for bad in (-1.0, NAN, "1", None):
        with pytest.raises(ValueError, match=r"max_norm=.*: must be a number >= 0"):
            halfstep.clip_grad_norm_(ours, bad)  # type: ignore[arg-type]


def test_sparse_gradients_are_refused() -> None:
    layer = torch.nn.Embedding(10, 3, sparse=True)
    layer(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(TypeError, match="the gradient of param 0 of group 0 is sparse"):
        halfstep.clip_grad_norm_(halfstep.AdamW(layer.parameters()), 1.0)


def test_a_disabled_scaler_is_none(half: torch.dtype) -> None:
    ours, other = (halfstep.AdamW(params(half)) for _ in range(2))
    scaler = halfstep.GradScaler(enabled=False)
    for optimizer, given in ((ours, scaler), (other, None)):
        gradients(optimizer, 0)
        halfstep.clip_grad_norm_(optimizer, 0.1, given)
        scaler.step(optimizer)
    assert_alike(ours, other)


def test_a_norm_past_float32_is_finite() -> None:
    param = torch.nn.Parameter(torch.zeros(4, 4))
    optimizer, scaler = halfstep.AdamW([param], lr=1e-3), halfstep.GradScaler(init_scale=1.0)
    scaler.scale(torch.ones(()))
    param.grad = torch.full_like(param, 3e38)
    assert halfstep.clip_grad_norm_(optimizer, 1.0, scaler).item() == INF
    scaler.step(optimizer)
    assert not scaler.skipped(optimizer)
    assert param.detach().isfinite().all()
    assert (param.detach() != 0).all()
