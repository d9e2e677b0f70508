"""The contracts: what a rule, a format, a plan and a backend are. Nothing here computes.

A *rule* says WHAT is computed in float32, a *format* HOW a float32 value is kept between steps, a *backend* WHO runs
both. A *plan* is one choice of the three that many tensors share, so that one call can step them all.
"""

import functools
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

BLOCK = 128
"""How many neighbours within a row, all that stands behind dim 0, share one entry of a shared part."""
CHUNK = 1024
"""How many elements of a gradient have the sum of their squares taken by itself."""


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
        scalars: ``scalars(group, step) -> numbers``, computed in float64 from a param group and the number of this step
            (from 1); each is rounded once to float32. ``group["lr"]``, a number, may be multiplied by others, and added
            to or subtracted from them, and nothing else. In the long run they do not change with the step.
        observes: ``update`` leaves the weight alone: it returns the moments only, and nothing of the weight is written.
    """

    name: str
    moments: tuple[Moment, ...]
    update: Callable[..., Any]
    scalars: Callable[[Mapping[str, Any], int], tuple[Any, ...]]
    observes: bool = False


@dataclass(frozen=True)
class Part:
    """One stored tensor of a format, shaped like the param, or ``(shape[0], blocks in a row)`` where it is shared.

    ``load`` and ``store`` see float32 parts as float32, others as integers: a float's bits in int32, an integer itself.

    Args:
        name: its key in the optimizer's state; behind a moment's name and an underscore where that is not empty.
        dtype: of the stored tensor.
        shared: it has one entry for each block of a row.
        largest: no store leaves an integer above it.
    """

    name: str
    dtype: torch.dtype
    shared: bool = False
    largest: int | None = None


@dataclass(frozen=True)
class Format:
    """How one float32 value is kept. A weight's first part is the param itself.

    Where neighbours share a part, `measure` says of each value what matters, and the largest of it in a block decides.

    Args:
        name: how messages call it.
        parts: what is stored; one that is shared comes last.
        load: ``load(*parts) -> value``.
        store: ``store(value) -> (*parts,)``; with a shared part ``store(measured, largest)``, whose last result must
            follow from ``largest`` alone.
        saturates: ``saturates(value) -> bool``, an event that backends count: the value lies past the largest that the
            param can hold and is kept there; None where that cannot be.
        measure: ``measure(value) -> int``, not negative; only with a shared part. The largest of a block is its
            ``largest``.
        random: ``store``, or ``measure`` where there is one, takes 16 random bits, an integer, behind the value.
    """

    name: str
    parts: tuple[Part, ...]
    load: Callable[..., Any]
    store: Callable[..., tuple[Any, ...]]
    saturates: Callable[[Any], Any] | None = None
    measure: Callable[..., Any] | None = None
    random: bool = False


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

    @property
    def formats(self) -> tuple[Format, ...]:
        """The formats of all that is kept: the weight's, then each moment's."""
        return (self.weight, *self.moments)

    @property
    def parts(self) -> tuple[Part, ...]:
        """All that is kept of a tensor, the param first, and last its gradient."""
        return tuple(part for format in (*self.formats, self.grad) for part in format.parts)

    @property
    def scalars(self) -> int:
        """How many scalars a step takes: the gradient's factor, and what the update has beside all else."""
        return self.rule.update.__code__.co_argcount - 1 - len(self.moments)

    @property
    def dtypes(self) -> frozenset[torch.dtype]:
        """The dtypes of all tensors of a step."""
        return frozenset(part.dtype for part in self.parts)

    @functools.cached_property
    def in_blocks(self) -> bool:
        """Whether neighbours share a part of what is kept, so that a row is worked on in whole blocks."""
        return any(format.measure for format in self.formats)

    @property
    def uses(self) -> tuple[int | None, ...]:
        """For each of `formats` the number of its stream of random bits, or None where it takes none."""
        numbers = itertools.count()
        return tuple(next(numbers) if format.random else None for format in self.formats)

    @functools.cached_property
    def pairs(self) -> int:
        """How many pairs of uses there are; one hash serves a pair."""
        return (sum(format.random for format in self.formats) + 1) // 2


@dataclass(frozen=True, slots=True)
class Counter:
    """Where a tensor's random bits come from: from these numbers and each element's place, and from nothing else.

    A place is one in the row-major order of the whole tensor, of which this may be a part. Cut along dim 0 alone a part
    is contiguous there. Cut along one further dim it is made of lines that are, and its element ``i`` is the whole's
    ``start + i // length * pitch + i % length``.

    Args:
        seed: the run's, 64 bits.
        stream: the tensor's own number.
        step: the number of this step.
        start: the place of the first element.
        length: how many elements a line has; 0 where the part is contiguous in the whole. With a shared part it is all
            that stands behind dim 0 of this part.
        pitch: how far apart the beginnings of two neighbouring lines lie, at least ``length``; 0 where that is 0.
    """

    seed: int = 0
    stream: int = 0
    step: int = 0
    start: int = 0
    length: int = 0
    pitch: int = 0


NOWHERE = Counter()
"""The counter of what takes no random bits."""


@dataclass(frozen=True, slots=True)
class Ahead:
    r"""What a device that counts the steps itself finds the scalars of each by, without waiting for the host.

    All of it lies on the device, dimensionless where no shape is given. Scalars are linear in the learning rate $\eta$:
    with $n$ the number of the step, or that of the last row where there is none for it, they are
    ``rows[n - 1, 0]`` $+\,\eta\,\cdot$ ``rows[n - 1, 1]``, each operation in float64, rounded once to float32.

    Args:
        step: int64, the steps done so far; the kernel counts on.
        rows: float64, (rows, 2, scalars).
        lr: float64, $\eta$.
        factor: float64, the factor on the gradient.
        skip: float32; unless it is 0 nothing is stepped or counted.
    """

    step: Tensor
    rows: Tensor
    lr: Tensor
    factor: Tensor
    skip: Tensor


@dataclass(slots=True)
class Job:
    """One tensor's step under a plan.

    Args:
        param: the model's own tensor, any strides.
        grad: shaped like ``param``, any strides.
        state: the other parts of the weight, then each moment's parts; contiguous, in the param's logical row-major
            order.
        scalars: the factor on the gradient, then the rule's scalars; empty with ``ahead``.
        counter: where its random bits come from, where a format takes some; with ``ahead`` its step is 0.
        ahead: what stands for scalars and step on a device that counts for itself; only for a `Backend` that can.
    """

    param: Tensor
    grad: Tensor
    state: tuple[Tensor, ...]
    scalars: tuple[float, ...]
    counter: Counter = NOWHERE
    ahead: Ahead | None = None


Kernel = Callable[[Sequence[Job]], Sequence[Tensor | int]]
"""Steps every job in place and returns each one's count of saturated weights, a tensor where only the device knows."""


class Backend(Protocol):
    """Who runs a plan."""

    name: str
    capturable: bool
    """Whether it takes jobs with `Ahead`."""

    def refuses(self, device: torch.device, dtypes: Collection[torch.dtype]) -> str | None:
        """Say why this backend cannot run tensors of ``dtypes`` on ``device``, or None when it can."""
        ...

    def describe(self, plan: Plan) -> str:
        """Say in a few words what runs ``plan``."""
        ...

    def compile(self, plan: Plan) -> Kernel:
        """Return the kernel of ``plan``; nothing is stepped yet."""
        ...

    def squares(self, grad: Format, grads: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the sum of the squares of each `CHUNK` of gradients of one dtype and device, in float64.

        A tensor's chunks are cut from its logical row-major order and lie behind those of the tensor before it. The
        second half of a chunk, which zeros fill up, is added to the first, and so on with what is left.

        Beside it, of each gradient in integers: 0 where it is finite, 1 where it is infinite, 2 where it is NaN.
        """
        ...

    def total(self, sums: Tensor) -> Tensor:
        """Return the sum of float64 numbers: neighbours are added in pairs, zeros to them where some are missing."""
        ...
