"""The scalars of every step to come, on the device: one that counts its steps itself waits for no host.

A rule's scalars are linear in the learning rate, and with the number of the step they change for a while only: Adam's
bias corrections end where $\beta^t$ no longer shows in float64. So the host computes them once, as far as they change;
a device's own powers would not be the host's.
"""

import functools
from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from halfstep.contracts import Rule

#: What of a group has no part in a table of its scalars.
_OTHERS = ("lr", "params", "param_names")
#: No scalar changes from here on.
_FAR = 2**62
#: The longest table: 2 MiB for each scalar's two columns, and seconds to compute.
_MOST = 2**22


class LearningRate:
    r"""A learning rate $\eta$ that is not known yet, or what a rule made of it: ``at`` $+\,\eta\,\cdot$ ``slope``."""

    def __init__(self, at: float = 0.0, slope: float = 1.0) -> None:
        self.at, self.slope = at, slope

    def __mul__(self, factor: float) -> "LearningRate":
        return LearningRate(self.at * factor, self.slope * factor)

    def __add__(self, other: float) -> "LearningRate":
        return LearningRate(self.at + other, self.slope)

    def __sub__(self, other: float) -> "LearningRate":
        return LearningRate(self.at - other, self.slope)

    def __rsub__(self, other: float) -> "LearningRate":
        return LearningRate(other - self.at, -self.slope)

    __rmul__, __radd__ = __mul__, __add__

    def __float__(self) -> float:
        raise TypeError("a rule's scalars take group['lr'] as it is, not as a float: a device may not know it yet")


def _pair(scalar: Any) -> tuple[float, float]:
    return (scalar.at, scalar.slope) if isinstance(scalar, LearningRate) else (float(scalar), 0.0)


@functools.lru_cache(maxsize=32)
def _rows(rule: Rule, options: tuple[tuple[str, Hashable], ...]) -> np.ndarray:
    """A rule's scalars, (steps, 2, scalars): what stands alone and what the learning rate is multiplied by."""
    group = {**dict(options), "lr": LearningRate()}

    def row(step: int) -> list[tuple[float, float]]:
        return [_pair(scalar) for scalar in rule.scalars(group, step)]

    # the first step from which on they are what they are for good
    last, low, high = row(_FAR), 1, 1
    while row(high) != last:
        low, high = high + 1, 2 * high
        if high > _MOST:
            betas = ", ".join(f"{name}={value!r}" for name, value in options if name == "betas")
            raise ValueError(
                f"capturable=True: the scalars of {rule.name} change for more than {_MOST} steps with {betas}; bring "
                "them further from 1, or leave capturable out"
            )
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if row(middle) == last else (middle + 1, high)
    return np.array([row(step) for step in range(1, high + 1)]).transpose(0, 2, 1).copy()


class Coming(NamedTuple):
    """What an `Ahead` has beside the count of steps."""

    rows: Tensor
    lr: Tensor
    factor: Tensor
    skip: Tensor


class Schedule:
    """What an optimizer's steps need on its devices: at one place from step to step, as a CUDA graph wants it."""

    def __init__(self) -> None:
        #: of each group and device what its table was made for, and that
        self._tables: dict[Any, tuple[Any, Tensor]] = {}
        self._numbers: dict[Any, Tensor] = {}

    def of(
        self, rule: Rule, index: int, group: Mapping[str, Any], device: torch.device, factor: Any, skip: Tensor | None
    ) -> Coming:
        """Return what steps a group's params on ``device``.

        Args:
            rule, index, group: the group's rule, its place and its options as they are.
            device: the params'.
            factor: what the step multiplies the gradient by, a number or a tensor of any device.
            skip: not 0 where the step is to be left out.
        """
        sign = -1 if group["maximize"] else 1
        rate = self._number(("lr", index), group["lr"], device)
        factor = self._number(("factor", sign), factor * sign, device)
        if skip is None:
            skip = self._numbers.setdefault(("never", device), torch.zeros((), device=device))
        return Coming(self._table(rule, index, group, device), rate, factor, skip.to(device, non_blocking=True))

    def _table(self, rule: Rule, index: int, group: Mapping[str, Any], device: torch.device) -> Tensor:
        """Float64 (steps, 2, scalars) for a group's options as they are, but for the learning rate."""
        named = ((name, tuple(v) if isinstance(v, list) else v) for name, v in group.items() if name not in _OTHERS)
        options = tuple((name, value) for name, value in named if isinstance(value, Hashable))
        made_for, table = self._tables.get((index, device), (None, None))
        if table is None or made_for != (rule, options):
            table = torch.tensor(_rows(rule, options), device=device)
            self._tables[index, device] = (rule, options), table
        return table

    def _number(self, name: Hashable, value: float | Tensor, device: torch.device) -> Tensor:
        """A number as float64 on a device: of a tensor there what it holds when the device comes to it."""
        place = self._numbers.get((name, device))
        if place is None:
            place = self._numbers[name, device] = torch.empty((), dtype=torch.float64, device=device)
        if isinstance(value, Tensor) and value.device.type != "cpu":
            return place.copy_(value.detach().view(()), non_blocking=True)
        return place.fill_(float(value))
