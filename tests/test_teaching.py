"""AdamFP16 and WeightDecay: the teaching implementation's names, signatures, defaults and formulas."""

import copy
import inspect
import itertools
import math
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import halfstep
from halfstep import AdamFP16, GradScalerFP16, WeightDecay
from training import drive, members, params

KINDS = {
    "decoupled": WeightDecay(0.1),
    "absolute": WeightDecay(0.01, absolute=True),
    "l2": WeightDecay(0.1, weight_decouple=False),
}


def written_out(
    weight: Tensor,
    grads: list[Tensor],
    decay: WeightDecay,
    optimized: bool,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-16,
) -> Tensor:
    """The teaching implementation's formulas, in float64."""
    theta = weight.double()
    m, v = torch.zeros_like(theta), torch.zeros_like(theta)
    beta1, beta2 = betas
    for t, grad in enumerate(grads, 1):
        g = grad.double()
        if not decay.weight_decouple:
            g = g + decay.weight_decay * theta
        elif decay.absolute:
            theta = theta * (1 - decay.weight_decay)
        else:
            theta = theta * (1 - lr * decay.weight_decay)
        m = m * beta1 + (1 - beta1) * g
        v = v * beta2 + (1 - beta2) * g * g
        correction1, correction2 = 1 - beta1**t, 1 - beta2**t
        if optimized:
            theta = theta - lr * math.sqrt(correction2) / correction1 * m / (v.sqrt() + eps)
        else:
            theta = theta - lr / correction1 * m / ((v / correction2).sqrt() + eps)
    return theta


@pytest.mark.parametrize("optimized", [True, False])
@pytest.mark.parametrize("eps", [1e-16, 1e-3])
@pytest.mark.parametrize("decay", KINDS.values(), ids=KINDS)
def test_the_formulas(decay: WeightDecay, optimized: bool, eps: float, half: torch.dtype, backend: str) -> None:
    steps, lr = 20, 1e-2
    start = torch.randn(50).to(half)
    # of one sign for each element, so that the average of the gradients never cancels
    grads = [
        (torch.rand(50) + 0.5).to(half) * torch.where(torch.arange(50) % 2 == 0, 1, -1).to(half) for _ in range(steps)
    ]
    group = {"params": [Parameter(start.clone())], "backend": backend}
    optimizer = AdamFP16([group], lr=lr, eps=eps, weight_decay=decay, optimized_update=optimized)
    (param,) = members(optimizer)
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
    want = written_out(start, grads, decay, optimized, lr, eps=eps)
    # Each step rounds about 12 results of float32 by up to 2**-24 of themselves, and both averages carry at most what
    # their 20 steps added. A step moves the weight by 2 lr at most, so the moves differ by 2 lr steps (12 + 2 steps)
    # 2**-24 at most, and the weight itself, at most 5, was rounded twice in each step.
    tolerance = steps * (2 * lr * (12 + 2 * steps) + 2 * 5) * 2.0**-24
    off = (optimizer.float32_weight(param).double() - want).abs().max().item()
    assert off <= tolerance
    # the bound is sharp enough to tell the forms apart
    for other, form in itertools.product(KINDS.values(), (True, False)):
        if other is not decay or (form is not optimized and eps == 1e-3):
            assert (want - written_out(start, grads, other, form, lr, eps=eps)).abs().max().item() > 10 * tolerance
    assert param.dtype is half


def test_the_signatures_are_the_teaching_ones() -> None:
    def of(function: Any) -> list[tuple[str, Any]]:
        return [(p.name, p.default) for p in inspect.signature(function).parameters.values()]

    assert [(name, default) for name, default in of(AdamFP16) if name != "weight_decay"] == [
        ("params", inspect.Parameter.empty),
        ("lr", 1e-3),
        ("betas", (0.9, 0.999)),
        ("eps", 1e-16),
        ("optimized_update", True),
        ("defaults", None),
    ]
    assert list(inspect.signature(AdamFP16).parameters).index("weight_decay") == 4
    decay = inspect.signature(AdamFP16).parameters["weight_decay"].default
    assert isinstance(decay, WeightDecay)
    assert vars(decay) == vars(WeightDecay())
    assert of(WeightDecay) == [("weight_decay", 0.0), ("weight_decouple", True), ("absolute", False)]
    scaler = of(GradScalerFP16)
    names = ["init_scale", "growth_factor", "backoff_factor", "growth_interval", "enabled", "device"]
    assert [name for name, _ in scaler] == names
    assert [default for _, default in scaler] == [2.0**16, 2.0, 0.5, 2000, True, None]
    assert inspect.signature(GradScalerFP16).parameters["device"].kind is inspect.Parameter.KEYWORD_ONLY


def test_the_defaults(half: torch.dtype) -> None:
    (group,) = AdamFP16(params(half)).param_groups
    assert group["weights"] == "master32"
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (1e-3, (0.9, 0.999), 1e-16, 0.0)
    assert group["optimized_update"]
    (group,) = AdamFP16(params(half), defaults={"weights": "split16", "note": 3}).param_groups
    assert (group["weights"], group["note"]) == ("split16", 3)


def test_the_options_of_a_group(half: torch.dtype) -> None:
    one, other = params(half, [(3,), (3,)])
    optimizer = AdamFP16([{"params": [one]}, {"params": [other], "optimized_update": False, **KINDS["l2"].defaults()}])
    assert [group["optimized_update"] for group in optimizer.param_groups] == [True, False]
    assert [group["decoupled_weight_decay"] for group in optimizer.param_groups] == [True, False]
    twin = copy.deepcopy(optimizer)
    drive(optimizer, range(3))
    drive(twin, range(3))
    for a, b in zip(members(optimizer), members(twin), strict=True):
        assert torch.equal(a, b)


def test_grad_fp32_maps_to_the_gradients_between_unscale_and_step(half: torch.dtype) -> None:
    model = torch.nn.Linear(3, 1).to(half)
    bias = Parameter(torch.zeros(1))
    optimizer, scaler = AdamFP16([*model.parameters(), bias]), GradScalerFP16(init_scale=4.0)
    assert not optimizer.grad_fp32
    loss = (model(torch.ones(1, 3, dtype=half)).float() + bias).sum()
    scaler.scale(loss).backward()
    assert not optimizer.grad_fp32
    scaler.unscale_(optimizer)
    grads = optimizer.grad_fp32
    assert isinstance(grads, MappingProxyType)
    assert set(grads) == set(model.parameters())
    for param, grad in grads.items():
        assert grad is param.grad
        assert grad.dtype is torch.float32
        assert torch.equal(grad, torch.ones_like(grad))
    assert not hasattr(grads, "__setitem__")
    scaler.step(optimizer)
    assert not optimizer.grad_fp32


def test_p29_what_is_no_weight_decay_is_refused(half: torch.dtype) -> None:
    with pytest.raises(TypeError, match=r"weight_decay=0.1: must be a WeightDecay, as WeightDecay\(0.1\)"):
        AdamFP16(params(half), weight_decay=0.1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"weight_decay=-0.5: must be 0, or a float32 number"):
        AdamFP16(params(half), weight_decay=WeightDecay(-0.5))


def test_p29_a_weight_decay_that_computes_is_refused(half: torch.dtype) -> None:
    class Mine(WeightDecay):
        def __call__(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
            return grad

    with pytest.raises(TypeError, match=r"weight_decay=Mine\(...\) defines __call__, which is not run: .*forms, or"):
        AdamFP16(params(half), weight_decay=Mine(0.1))

    class Named(WeightDecay):
        """A subclass that only sets the arguments is one of the three forms."""

        def __init__(self) -> None:
            super().__init__(0.25, absolute=True)

    (group,) = AdamFP16(params(half), weight_decay=Named()).param_groups
    assert (group["weight_decay"], group["absolute_weight_decay"]) == (0.25, True)
    assert halfstep.WeightDecay is WeightDecay
