"""P02, P03, P05, P09: what comes out of many steps. P06 is in test_updates.py, P07 in test_averages.py."""

from typing import Any

import pytest
import torch
from torch import Tensor

import halfstep
from chance import mean_bound
from halfstep.formats import MOMENTS, WEIGHTS
from harness import assert_same

ULP = 2.0**-23  # float32's, at 1
EXACT = ("split16", "master32")
KEEPING = [name for name in WEIGHTS if name != "rounded"]


def param(values: Tensor, dtype: torch.dtype) -> torch.nn.Parameter:
    return torch.nn.Parameter(values.to(dtype, copy=True))


def feed(p: torch.nn.Parameter, grad: Tensor) -> None:
    """Give a param a gradient of any dtype, as a scaler that unscales does."""
    p.grad = None
    p.grad_dtype = None
    p.grad = grad.clone()


def unit(weights: str, dtype: torch.dtype, at: Tensor | float) -> Tensor:
    """How far apart the numbers are that a format can hold at these sizes: the most that one store moves a weight."""
    extra = {"rounded": 0, "stochastic": 0, "split8": 8}.get(weights)
    if extra is None:
        return torch.zeros_like(torch.as_tensor(at, dtype=torch.float64))
    exponent = torch.frexp(torch.as_tensor(at, dtype=torch.float64).abs()).exponent - 1
    return torch.finfo(dtype).eps / 2**extra * torch.exp2(exponent.clamp(min=-14).double())


# ---------------------------------------------------------------------- P02

TINY = (0.0, 2.0**-24, -(2.0**-24), 1e-30)


@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_p02_zero_and_tiny_gradients_give_no_nan(half: torch.dtype, backend: str, weights: str, moments: str) -> None:
    start = torch.randn(64, 128)  # large enough for blocks
    p = param(start, half)
    before = p.detach().clone()
    optimizer = halfstep.AdamW(
        [p], lr=1e-3, eps=1e-8, weight_decay=0.0, weights=weights, moments=moments, backend=backend
    )
    grad = torch.randn(64, 128).to(half)
    for row, gradient in enumerate(TINY):
        grad[row] = gradient
    grad[4, ::2] = 0.0  # beside others in its blocks
    for _ in range(20):
        p.grad = grad.clone()
        optimizer.step()
    if moments == "block8":
        assert optimizer.state[p]["exp_avg_sq_exponent"].shape == (64, 1)
    weight = optimizer.float32_weight(p)
    assert weight.isfinite().all()
    assert not torch.equal(p[5], before[5])
    still = grad == 0
    assert int(still.sum()) >= 128 + 64
    assert_same(p.detach()[still], before[still])
    assert_same(weight[still], before.float()[still])
    # |update| <= lr for a gradient that never changes, whatever its size; where moments are rounded Adam's own bound of
    # 7.27 lr, of which blocks may take 1.5; and what the stores add
    most = 1e-3 * (1 + 1e-3 if moments == "float32" else 1.5 * 7.27)
    moved = (weight.double() - before.double()).abs()[: len(TINY)]
    assert (moved <= 20 * (most + unit(weights, half, before[: len(TINY)].double().abs() + 20 * most))).all()


# ---------------------------------------------------------------------- P03


@pytest.mark.parametrize("weights", KEEPING)
@pytest.mark.parametrize(("lr", "target"), [(1e-4, 0.98), (7e-6, 0.9986)])
def test_p03_small_updates_add_up(half: torch.dtype, backend: str, weights: str, lr: float, target: float) -> None:
    n = 100 if weights in EXACT else 2**14
    p = param(torch.ones(n), half)
    optimizer = halfstep.AdamW([p], lr=lr, weight_decay=0.0, weights=weights, backend=backend)
    for _ in range(200):
        p.grad = torch.ones(n, dtype=half)
        optimizer.step()
    # a constant gradient of 1 moves by lr / (1 + eps) a step; each step rounds the weight and the update, a float32 ulp
    # of 1 at most between them, and the moments' own roundings change the update by less than 1e-4 of it
    bound = 200 * (ULP + lr * 1e-4)
    weight = optimizer.float32_weight(p)
    if weights in EXACT:
        assert (weight - target).abs().max() <= bound
        # and the model sees the nearest 16-bit number
        assert (p.float() - target).abs().max() <= bound + torch.finfo(half).eps / 2
        return
    # In the mean: a step of d between two numbers a unit apart has a variance of at most min(d * unit, unit**2 / 4).
    # 16 comparisons at ALARM, 2e-8 in all. The bound is less than a sixth of the way.
    step = float(unit(weights, half, 0.9))
    chance = mean_bound(200 * min(lr * step, step**2 / 4), step, n)
    assert bound + chance <= (1 - target) / 6
    assert abs(float(weight.double().mean()) - target) <= bound + chance
    assert ((p.double() - weight.double()).abs() <= torch.finfo(half).eps / 2).all()


@pytest.mark.parametrize("weights", KEEPING)
@pytest.mark.parametrize("product", [2.0**-22, 2.0**-20, 1e-5])
def test_p03_weight_decay_alone_follows_float32(half: torch.dtype, backend: str, weights: str, product: float) -> None:
    n = 256 if weights in EXACT else 2**17 if backend == "cpu" else 2**13
    start = torch.rand(n).add(0.5).to(half)
    p, reference = param(start, half), param(start.float(), torch.float32)
    options: dict[str, Any] = {"lr": product, "weight_decay": 1.0, "backend": backend}
    a, b = halfstep.AdamW([p], weights=weights, **options), halfstep.AdamW([reference], **options)
    for _ in range(300):
        p.grad, reference.grad = torch.zeros_like(p), torch.zeros_like(reference)
        a.step()
        b.step()
    # (1 - product)**300: each step rounds the factor by half an ulp below 1, and the weight by half of its own
    want = start.double() * (1 - product) ** 300
    bound = 300 * (ULP / 4 + ULP / 2) * start.double()
    assert ((reference - want).abs() <= bound).all()
    assert (reference < start).all()
    weight = a.float32_weight(p)
    if weights in EXACT:
        assert_same(weight, reference.detach())
        return
    # in the mean, as above: steps of at most 1.5 * product, the units those of 1 to 2; 24 comparisons at ALARM
    step = float(unit(weights, half, 1.5))
    chance = mean_bound(300 * min(1.5 * product * step, step**2 / 4), step, n)
    off = float((weight.double() - want).mean())
    assert abs(off) <= float(bound.mean()) + chance
    if backend == "cpu":  # where so many weights are decayed that standing still would be seen
        assert float(bound.mean()) + chance < float((start.double() - want).mean())


def test_rounded_loses_what_its_docstring_says(half: torch.dtype, backend: str) -> None:
    p = param(torch.ones(4), half)
    optimizer = halfstep.AdamW([p], lr=7e-6, weight_decay=0.0, weights="rounded", backend=backend)
    for _ in range(200):
        p.grad = torch.ones(4, dtype=half)
        optimizer.step()
    assert_same(p.detach(), torch.ones(4, dtype=half))


# ---------------------------------------------------------------------- P05


@pytest.mark.parametrize("weights", EXACT)
def test_p05_a_thousand_steps_equal_float32_bit_for_bit(half: torch.dtype, backend: str, weights: str) -> None:
    generator = torch.Generator().manual_seed(3)
    # in float16 split16 is exact from 2**-16 on: these weights stay above it, which is checked at the end
    start = ((torch.rand(600, generator=generator) + 2) * torch.randn(600, generator=generator).sign()).to(half)
    p, reference = param(start, half), param(start.float(), torch.float32)

    def optimizers() -> tuple[halfstep.AdamW, halfstep.AdamW, halfstep.GradScaler]:
        options: dict[str, Any] = {"lr": 3e-4, "weight_decay": 0.05, "backend": backend}
        return (
            halfstep.AdamW([p], weights=weights, **options),
            halfstep.AdamW([reference], **options),
            halfstep.GradScaler(init_scale=2.0**10, growth_interval=50),
        )

    a, b, scaler = optimizers()
    skipped = 0
    for step in range(1000):
        if step == 500:
            saved = [thing.state_dict() for thing in (a, b, scaler)]
            a, b, scaler = optimizers()
            for thing, state in zip((a, b, scaler), saved, strict=True):
                thing.load_state_dict(state)
        grad = torch.randn(600, generator=generator) * torch.randn(600, generator=generator).exp()
        if step % 97 == 5:
            grad[step % 600] = float("inf")
        scaler.scale(torch.zeros(()))
        feed(p, grad * scaler.get_scale())
        scaler.step(a)
        scaler.update()
        skipped += scaler.skipped(a)
        assert scaler.skipped(a) == (step % 97 == 5)
        if not scaler.skipped(a):
            reference.grad = grad
            b.step()
        if step % 100 == 99:
            assert_same(a.float32_weight(p), reference.detach())
    assert skipped == 11
    assert_same(a.float32_weight(p), reference.detach())
    for name in ("exp_avg", "exp_avg_sq"):
        assert_same(a.state[p][name], b.state[reference][name])
    assert a.state[p]["step"] == 1000 - skipped
    assert reference.abs().min() >= 2.0**-16
    assert not torch.equal(reference, start.float())


def test_p05_float32_follows_float64(backend: str) -> None:
    generator = torch.Generator().manual_seed(4)
    start = torch.rand(1000, generator=generator) + 1
    p = param(start, torch.float32)
    lr, (beta1, beta2), eps, decay, steps = 1e-3, (0.9, 0.999), 1e-8, 0.01, 1000
    optimizer = halfstep.AdamW([p], lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=decay, backend=backend)
    weight, m, v = start.double(), torch.zeros(1000).double(), torch.zeros(1000).double()
    for step in range(1, steps + 1):
        # magnitudes between 1/2 and 1, of any sign
        grad = torch.rand(1000, generator=generator).add(1).mul(0.5)
        grad *= torch.randn(1000, generator=generator).sign()
        p.grad = grad
        optimizer.step()
        m = beta1 * m + (1 - beta1) * grad.double()
        v = beta2 * v + (1 - beta2) * grad.double() ** 2
        denominator = (v / (1 - beta2**step)).sqrt() + eps
        weight = weight * (1 - lr * decay) - lr * (m / (1 - beta1**step)) / denominator
    # With u = 2**-24 the unit roundoff and |g| in [1/2, 1]: the first average rounds 4 times a step at magnitude <= 2
    # and errors shrink by beta1, so it is off by 8u / (1 - beta1) = 80u at most, 160u after the bias correction (whose
    # least value is 1 - beta1, when the average is off by 8u only: 80u). The second, of magnitude in [1/4, 1] after
    # correction, rounds 5 times at magnitude (1 - beta2) or less but for its last addition, and is off by
    # 10u / (1 - beta2) = 1e4 u relative to 1/4 in the worst case, of which the root takes half: 2e4 u.
    # So a quotient of at most 2 is off by 4.1e4 u, a step by lr * 4.1e4 u, and by 3 roundings at the weight's size, 3.
    u = 2.0**-24
    bound = steps * (lr * 4.1e4 * u + 3 * 3 * u)
    assert (p.double() - weight).abs().max() <= bound
    assert (weight - start).abs().min() > 0


def test_p05_a_step_is_within_a_few_ulps_of_torch(backend: str) -> None:
    generator = torch.Generator().manual_seed(5)
    start = torch.randn(5000, generator=generator)
    ours, theirs = param(start, torch.float32), param(start, torch.float32)
    options: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.01}
    a = halfstep.AdamW([ours], backend=backend, **options)
    b = torch.optim.AdamW([theirs], foreach=False, **options)
    for _ in range(200):
        grad = torch.randn(5000, generator=generator)
        ours.data.copy_(theirs)
        ours.grad, theirs.grad = grad.clone(), grad.clone()
        a.step()
        b.step()
        # from the same weight, each rounds it twice at its own size; the quotient of averages that grew apart by their
        # roundings is off by less than 1e-3 of itself (the derivation above gives 2.5e-3 for 1e4 steps of the worst
        # case), and Adam's quotient is at most 7.3
        bound = 2 * ULP * theirs.abs() + 1e-3 * 7.3 * 1e-3
        assert ((ours - theirs).abs() <= bound).all()
    assert_within_ulps(a.state[ours]["exp_avg"], b.state[theirs]["exp_avg"], at=5.0)


def assert_within_ulps(a: Tensor, b: Tensor, at: float) -> None:
    # each step rounds at magnitude `at` four times in either, and errors shrink by beta1 = 0.9
    assert (a - b).abs().max() <= 2 * 4 * at * ULP / 2 / (1 - 0.9)


# ---------------------------------------------------------------------- P09


@pytest.mark.parametrize("weights", WEIGHTS)
def test_p09_a_saturated_weight_is_counted_reported_and_comes_back(backend: str, weights: str) -> None:
    half, largest = torch.float16, 65504.0
    p = param(torch.tensor([[largest * 0.99, -largest * 0.99, 1.0]]), half)
    optimizer = halfstep.AdamW(
        [("layer.weight", p)], lr=largest / 50, weight_decay=0.0, weights=weights, backend=backend, betas=(0.0, 0.9)
    )
    out = torch.tensor([[-1.0, 1.0, 0.0]], dtype=half)
    p.grad = out.clone()
    with pytest.warns(
        RuntimeWarning, match=r"layer\.weight: 2 of 3 weights went past 65504, the largest torch\.float16"
    ):
        optimizer.step()
    assert_same(p.detach(), torch.tensor([[largest, -largest, 1.0]], dtype=half))
    assert optimizer.saturated() == {"layer.weight": 2}
    assert "saturated in the last step: 2 weights of layer.weight" in optimizer.explain()
    for _ in range(3):  # said once, counted always
        p.grad = out.clone()
        optimizer.step()
    assert p.isfinite().all()
    assert optimizer.saturated() == {"layer.weight": 2}
    for _ in range(12):
        p.grad = -out
        optimizer.step()
    assert optimizer.saturated() == {}
    assert (p[0, :2].abs() < largest).all()
    assert "saturated" not in optimizer.explain()
