"""What an optimizer knows of a param: what stays from step to step, and what is due in one."""

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

    def holds(self, state: Mapping[str, Any], counts: type) -> bool:
        """Whether ``state`` is the one that was checked, with steps counted in ``counts``."""
        same = all(state.get(key) is tensor for key, tensor in zip(self.kept, self.tensors, strict=True))
        return same and type(state.get("step")) is counts and ("stream" in state or not self.random)


class Due(NamedTuple):
    """A param that this step will step, checked."""

    slot: Slot
    param: Tensor
    grad: Tensor
    step: int
    scalars: tuple[float, ...]
    coming: Coming | None
    place: int
    seed: int
