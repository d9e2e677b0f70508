"""What an optimizer knows of a param: what stays from step to step, and what is due in one."""

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfstep.contracts import Format, Kernel, Rule
from halfstep.schedule import Coming


@dataclass(slots=True)
class Slot:
    """What stays the same from step to step for one param."""

    name: str
    options: tuple[Any, ...]
    dtype: torch.dtype
    device: torch.device
    shape: torch.Size
    rule: Rule
    weight: Format
    moments: tuple[Format, ...]
    kept: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
    #: whether one of the formats takes random bits
    random: bool
    tensors: tuple[Tensor, ...] = ()
    kernels: dict[torch.dtype, Kernel] = field(default_factory=dict)

    def fits(self, param: Tensor, state: Mapping[str, Any] | None, of: "Options") -> bool:
        """Whether this is still so of ``param`` in a group of these options, and ``state`` the one that was checked."""
        if self.options != of.options or self.rule is not of.rule or self.dtype is not param.dtype:
            return False
        if self.shape != param.shape or self.device != param.device:
            return False
        if not state:
            return True
        # no frame of Python's for each of them: models have thousands
        same = all(map(operator.is_, map(state.get, self.kept), self.tensors))
        return same and type(state.get("step")) is of.counts and ("stream" in state or not self.random)


class Options(NamedTuple):
    """What a group's options say of how its params are stepped.

    Args:
        options: the options themselves: weights, moments, backend, seed.
        rule: the group's.
        counts: the type in which steps are counted.
    """

    options: tuple[Any, ...]
    rule: Rule
    counts: type


class Due(NamedTuple):
    """A param that this step will step, checked."""

    slot: Slot
    param: Tensor
    grad: Tensor
    state: dict[str, Any] | None
    step: int
    scalars: tuple[float, ...]
    coming: Coming | None
    place: int
    seed: int
