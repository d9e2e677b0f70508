"""What the tests of the scaler share: gradients of any given values, made by backward, and what a step changes."""

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

import halfstep
from halfstep.engine import HalfOptimizer

WAYS = ("straight", "unscaled")


def param(values: Any, dtype: torch.dtype) -> Any:
    """A param with these values; typed so that its gradient need not be asked for None."""
    return Parameter(torch.as_tensor(values, dtype=torch.float32).to(dtype))


def backward(scaler: torch.amp.GradScaler, params: Sequence[Tensor], grads: Sequence[Any]) -> None:
    """Give each param its gradient, scaled and in its own dtype, by the backward of a float32 loss."""
    losses = [(p.float() * torch.as_tensor(g, dtype=torch.float32)).sum() for p, g in zip(params, grads, strict=True)]
    scaler.scale(torch.stack(losses).sum()).backward()


def iterate(
    scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, params: Sequence[Tensor], grads: Sequence[Any]
) -> None:
    """One straight iteration on these gradients."""
    optimizer.zero_grad()
    backward(scaler, params, grads)
    scaler.step(optimizer)
    scaler.update()


def step(scaler: torch.amp.GradScaler, optimizer: Any, way: str) -> Any:
    """Step by one of the two ways."""
    if way == "unscaled":
        scaler.unscale_(optimizer)
    return scaler.step(optimizer)


def scales(scaler: torch.amp.GradScaler, events: str) -> list[float]:
    """The scale after each iteration: "." a healthy one, "x" an overflow."""
    ours = param([1.0], torch.float32)
    optimizer, seen = torch.optim.SGD([ours], lr=0.0), []
    for event in events:
        iterate(scaler, optimizer, [ours], [[float("inf") if event == "x" else 1.0]])
        seen.append(scaler.get_scale())
    return seen


def snapshot(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Copies of every param and of every tensor and number of its state."""
    kept = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            kept.append(p.detach().clone())
            kept += [
                torch.as_tensor(copy.deepcopy(optimizer.state[p][key])) for key in sorted(optimizer.state.get(p, ()))
            ]
    return kept


def assert_same(a: Iterable[Tensor], b: Iterable[Tensor]) -> None:
    """Raise unless both are equal, tensor by tensor, dtype by dtype."""
    for index, (x, y) in enumerate(zip(a, b, strict=True)):
        assert (x.dtype, x.shape) == (y.dtype, y.shape), f"tensor {index} differs in dtype or shape"
        assert torch.equal(x, y), f"tensor {index} differs: {x}, {y}"


class Wrapper:
    """An optimizer behind ``.optimizer``, as Accelerate wraps one."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.calls = 0

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def step(self, *args: Any) -> Any:
        self.calls += 1
        return self.optimizer.step(*args)


def adamw(params: Any, **options: Any) -> HalfOptimizer:
    """AdamW that moves visibly."""
    return halfstep.AdamW(params, **{"lr": 0.01, **options})
