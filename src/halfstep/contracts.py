"""The contracts: what a rule, a format, a plan and a backend are. Nothing here computes.

A *rule* says WHAT is computed in float32, a *format* HOW a float32 value is kept between steps, a *backend* WHO runs
both. A *plan* is one choice of the three that many tensors share, so that one call can step them all.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Moment:
    """A running average that a rule keeps for each weight.

    Args:
        name: its key in the optimizer's state, as torch names it (``exp_avg``).
        signed: it takes both signs.
        square: it averages squares, so it is never negative and its square root is what matters.
    """

    name: str
    signed: bool = False
    square: bool = False


@dataclass(frozen=True)
class Rule:
    """An optimizer's arithmetic.

    Args:
        name: how messages call it.
        moments: what it keeps beside each weight, in the order in which ``update`` takes them.
        update: ``update(weight, grad, *moments, *scalars) -> (weight, *moments)``, float32 throughout, written with
            operators and ``halfstep.primitives`` alone.
        scalars: ``scalars(group, step) -> floats``, computed in float64 from a param group and the number of this step
            (from 1); each is rounded once to float32.
    """

    name: str
    moments: tuple[Moment, ...]
    update: Callable[..., Any]
    scalars: Callable[[Mapping[str, Any], int], tuple[float, ...]]


@dataclass(frozen=True)
class Part:
    """One stored tensor of a format. ``load`` and ``store`` see float32 parts as float32, others as bits in int32.

    Args:
        name: its key in the optimizer's state; behind a moment's name and an underscore where that is not empty.
        dtype: of the stored tensor.
    """

    name: str
    dtype: torch.dtype


@dataclass(frozen=True)
class Format:
    """How one float32 value is kept. A weight's first part is the param itself.

    Args:
        name: how messages call it.
        parts: what is stored.
        load: ``load(*parts) -> value``.
        store: ``store(value) -> (*parts,)``.
        saturates: ``saturates(value) -> bool``, an event that backends count: the value lies past the largest that the
            param can hold and is kept there; None where that cannot be.
    """

    name: str
    parts: tuple[Part, ...]
    load: Callable[..., Any]
    store: Callable[..., tuple[Any, ...]]
    saturates: Callable[[Any], Any] | None = None


@dataclass(frozen=True)
class Plan:
    """What the tensors of one call to a backend share.

    Args:
        rule: the update.
        weight: the weight's format; its first part is the param.
        moments: a format for each of the rule's moments.
        grad: the format in which gradients are read.
        device: where all of it lies.
    """

    rule: Rule
    weight: Format
    moments: tuple[Format, ...]
    grad: Format
    device: torch.device


@dataclass(frozen=True, slots=True)
class Job:
    """One tensor's step under a plan.

    Args:
        param: the model's own tensor, any strides.
        grad: shaped like ``param``, any strides.
        state: the other parts of the weight, then each moment's parts; contiguous, in the param's logical row-major
            order.
        scalars: the factor on the gradient, then the rule's scalars.
    """

    param: Tensor
    grad: Tensor
    state: tuple[Tensor, ...]
    scalars: tuple[float, ...]


Kernel = Callable[[Sequence[Job]], Sequence[Tensor | int]]
"""Steps every job in place and returns each one's count of saturated weights, a tensor where only the device knows."""


class Backend(Protocol):
    """Who runs a plan."""

    name: str

    def refuses(self, plan: Plan) -> str | None:
        """Say why this backend cannot run ``plan``, or None when it can."""
        ...

    def describe(self, plan: Plan) -> str:
        """Say in a few words what runs ``plan``."""
        ...

    def compile(self, plan: Plan) -> Kernel:
        """Return the kernel of ``plan``; nothing is stepped yet."""
        ...
