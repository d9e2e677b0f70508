"""P02, P03, P05, P06, P09: what comes out of many steps."""

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import halfstep
from halfstep import backends
from halfstep.contracts import Job, Plan
from halfstep.formats import FLOAT32, WEIGHTS
from halfstep.rules.adam import ADAM
from harness import MOMENT_FORMATS, assert_same

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


# ---------------------------------------------------------------------- P02


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("gradient", [0.0, 2.0**-24, -(2.0**-24), 1e-30])
def test_p02_zero_and_tiny_gradients_give_no_nan(
    half: torch.dtype, backend: str, weights: str, gradient: float
) -> None:
    start = torch.randn(8, 64)
    p = param(start, half)
    before = p.detach().clone()
    optimizer = halfstep.AdamW([p], lr=1e-3, eps=1e-8, weight_decay=0.0, weights=weights, backend=backend)
    grad = torch.randn(8, 64).to(half)
    grad[3] = gradient
    for _ in range(20):
        p.grad = grad.clone()
        optimizer.step()
    weight = optimizer.float32_weight(p)
    assert weight.isfinite().all()
    assert not torch.equal(p[0], before[0])
    if grad[3].count_nonzero() == 0:
        assert_same(p[3].detach(), before[3])
        assert_same(weight[3], before[3].float())
    # |update| <= lr for a gradient that never changes, whatever its size
    assert (weight[3] - before[3].float()).abs().max() <= 20 * 1e-3 * (1 + 1e-3)


# ---------------------------------------------------------------------- P03


@pytest.mark.parametrize("weights", KEEPING)
@pytest.mark.parametrize(("lr", "target"), [(1e-4, 0.98), (7e-6, 0.9986)])
def test_p03_small_updates_add_up(half: torch.dtype, backend: str, weights: str, lr: float, target: float) -> None:
    p = param(torch.ones(100), half)
    optimizer = halfstep.AdamW([p], lr=lr, weight_decay=0.0, weights=weights, backend=backend)
    for _ in range(200):
        p.grad = torch.ones(100, dtype=half)
        optimizer.step()
    # a constant gradient of 1 moves by lr / (1 + eps) a step; each step rounds the weight and the update, a float32 ulp
    # of 1 at most between them, and the moments' own roundings change the update by less than 1e-4 of it
    bound = 200 * (ULP + lr * 1e-4)
    assert (optimizer.float32_weight(p) - target).abs().max() <= bound
    # and the model sees the nearest 16-bit number
    assert (p.float() - target).abs().max() <= bound + torch.finfo(half).eps / 2


@pytest.mark.parametrize("weights", KEEPING)
@pytest.mark.parametrize("product", [2.0**-22, 2.0**-20, 1e-5])
def test_p03_weight_decay_alone_follows_float32(half: torch.dtype, backend: str, weights: str, product: float) -> None:
    start = torch.rand(256).add(0.5).to(half)
    p, reference = param(start, half), param(start.float(), torch.float32)
    options: dict[str, Any] = {"lr": product, "weight_decay": 1.0, "backend": backend}
    a, b = halfstep.AdamW([p], weights=weights, **options), halfstep.AdamW([reference], **options)
    for _ in range(300):
        p.grad, reference.grad = torch.zeros_like(p), torch.zeros_like(reference)
        a.step()
        b.step()
    assert_same(a.float32_weight(p), reference.detach())
    # (1 - product)**300: each step rounds the factor by half an ulp below 1, and the weight by half of its own
    want = start.double() * (1 - product) ** 300
    assert ((reference - want).abs() <= 300 * (ULP / 4 + ULP / 2) * start.double()).all()
    assert (reference < start).all()


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


# ---------------------------------------------------------------------- P06


def adams_bound(beta1: float, beta2: float) -> float:
    """Adam's own bound on |update| / lr, by Cauchy and Schwarz, where beta1**2 < beta2."""
    return (1 - beta1) / math.sqrt(1 - beta2) / math.sqrt(1 - beta1**2 / beta2)


def updates(grads: list[Tensor], beta1: float, beta2: float, moments: str, backend: str) -> Tensor:
    """|update| / lr of every step before the weight is stored: each starts from a float32 weight of 0, at lr 1."""
    group = {"lr": 1.0, "betas": (beta1, beta2), "eps": 1e-30, "weight_decay": 0.0, "optimized_update": False}
    group |= {"decoupled_weight_decay": True, "absolute_weight_decay": False}
    format = MOMENT_FORMATS[moments]
    plan = Plan(ADAM, FLOAT32, (format, format), FLOAT32, torch.device("cpu"))
    kernel = backends.kernel(plan, backend)
    shape = grads[0].shape
    state = tuple(torch.zeros(shape, dtype=part.dtype) for _ in range(2) for part in format.parts)
    found = []
    for step, grad in enumerate(grads, start=1):
        weight = torch.zeros(shape)
        kernel([Job(weight, grad, state, (1.0, *ADAM.scalars(group, step)))])
        found.append(weight.abs())
    return torch.stack(found)


# The moments' roundings change an update by at most a part in 2.5e-3 / 1e4 * steps < 1e-3 of itself (derived for P05),
# bias corrections and the quotient by a few u.
FACTOR = 1 + 2e-3


def streams() -> dict[str, list[Tensor]]:
    """Gradients that have made such updates explode."""
    generator = torch.Generator().manual_seed(6)

    def randn() -> Tensor:
        return torch.randn(4, 256, generator=generator)

    far = torch.where(torch.arange(256) % 2 == 0, 1.0, 1e-5)
    signs = [1.0 if k < 100 else -1.0 for k in range(200)]
    return {
        "neighbours 1e5 apart": [randn() * far for _ in range(200)],
        "1e-12 to 1e12": [
            10.0 ** (torch.rand(4, 256, generator=generator) * 24 - 12) * randn().sign() for _ in range(200)
        ],
        "often exactly 0": [randn() * (torch.rand(4, 256, generator=generator) < 0.05) for _ in range(200)],
        "turning": [torch.full((4, 256), sign) for sign in signs],
        # equality in Cauchy and Schwarz: each gradient is beta2 / beta1 times the one before it
        "adversarial": [torch.full((4, 256), 1e15 * (0.9 / 0.999) ** (250 - k)) for k in range(250)],
    }


@pytest.mark.parametrize("moments", [name for name in MOMENT_FORMATS if name != "block8"])
@pytest.mark.parametrize("stream", streams())
def test_p06_no_update_explodes(stream: str, moments: str, backend: str) -> None:
    found = updates(streams()[stream], 0.9, 0.999, moments, backend)
    assert found.isfinite().all()
    assert found.max() <= FACTOR * adams_bound(0.9, 0.999)


def test_p06_the_adversarial_stream_comes_near_the_bound(backend: str) -> None:
    # so that the bound is tested and not a larger one; 250 steps leave the bias correction of v at 0.47
    grads = streams()["adversarial"]
    found = updates(grads, 0.9, 0.999, "float32", backend)
    reached = (1 - 0.9) / math.sqrt(1 - 0.999) / math.sqrt(1 - 0.81 / 0.999) * math.sqrt(1 - 0.999**250)
    assert found.max() >= 0.99 * reached


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.floats(-(2.0**40), 2.0**40, width=32, allow_subnormal=False), min_size=1, max_size=60),
    st.sampled_from([(0.9, 0.999), (0.95, 0.9999), (0.9, 0.95), (0.0, 0.99)]),
)
def test_p06_no_stream_of_gradients_makes_an_update_explode(stream: list[float], betas: tuple[float, float]) -> None:
    grads = [torch.tensor([g if g == 0 or abs(g) > 1e-12 else 0.0]) for g in stream]
    for moments, backend in itertools.product((m for m in MOMENT_FORMATS if m != "block8"), ("cpu", "eager")):
        found = updates(grads, *betas, moments, backend)
        assert found.isfinite().all()
        assert found.max() <= FACTOR * max(1.0, adams_bound(*betas))


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
