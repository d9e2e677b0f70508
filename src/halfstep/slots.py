"""What an optimizer knows of a param: what stays from step to step, and what is due in one."""

import operator
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfstep import checkpoint
from halfstep.contracts import Format, Kernel, Moment, Plan, Rule
from halfstep.formats import GRADS, PLAIN
from halfstep.options import choices
from halfstep.schedule import Coming
from halfstep.shards import lines, local, placements_of
from halfstep.tensors import check_param


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
    #: where in the whole tensor what lies here is, as a `Counter` has it
    lines: tuple[int, int, int]
    #: how it is spread over processes; of a whole one None
    placements: Any
    #: the state's, and what lies here of each
    tensors: tuple[Tensor, ...] = ()
    locals: tuple[Tensor, ...] = ()
    kernels: dict[torch.dtype, Kernel] = field(default_factory=dict)

    def plan(self, grad: torch.dtype) -> Plan:
        """Return what steps it with a gradient of this dtype."""
        return Plan(self.rule, self.weight, self.moments, GRADS[grad], self.device)

    def take(self, state: Mapping[str, Any]) -> None:
        """Take the tensors of a state that was checked."""
        self.tensors = tuple(state[key] for key in self.kept)
        self.locals = tuple(map(local, self.tensors))

    def fits(self, param: Tensor, state: Mapping[str, Any] | None, of: "Options") -> bool:
        """Whether this is still so of ``param`` in a group of these options, and ``state`` the one that was checked."""
        if self.options != of.options or self.rule is not of.rule or self.dtype is not param.dtype:
            return False
        if self.shape != param.shape or self.device != param.device:
            return False
        if self.placements is not placements_of(param):
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
    """A param that this step will step, checked; ``grad`` is what lies here of its gradient."""

    group: dict[str, Any]
    slot: Slot
    param: Tensor
    grad: Tensor
    state: dict[str, Any] | None
    step: int
    scalars: tuple[float, ...]
    coming: Coming | None
    place: int


class Slots:
    """What is known of each of an optimizer's params, derived from its groups and its state.

    Args:
        optimizer: theirs, which this does not keep alive: its state is too large to wait for a collector of garbage.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = weakref.proxy(optimizer)
        self._known: dict[Tensor, Slot] = {}

    def options(self, group: Mapping[str, Any]) -> Options:
        """Return what a group's options say of how its params are stepped."""
        options = group["weights"], group["moments"], group["backend"], group["seed"]
        return Options(options, self._optimizer._rule(group), Tensor if group["capturable"] else int)

    def known(self, param: Tensor) -> Slot | None:
        """Return what was known of ``param`` when it was last looked at."""
        return self._known.get(param)

    def of(self, group: dict[str, Any], name: str, param: Tensor) -> Slot:
        """Return what is known of ``param``, checked against what it is now.

        Raises:
            TypeError, ValueError: it is not what it was, or no state of its fits; the text says what differs.
        """
        slot, state = self._known.get(param), self._optimizer.state.get(param)
        if slot and slot.fits(param, state, self.options(group)):
            return slot
        if slot and state and slot.dtype is not param.dtype:
            raise TypeError(
                f"{name} was {slot.dtype} at its first step and is {param.dtype} now: change a model's dtype first and "
                "make its optimizer after, or take the weights over by optimizer.float32_weight(param)"
            )
        check_param(name, param)
        group.update(choices(group))
        rule, weight, moments = self._optimizer._formats(group, param)
        kept = checkpoint.layout(param.shape, weight, list(zip(rule.moments, moments, strict=True)))
        random = any(format.random for format in (weight, *moments))
        slot = Slot(
            name=name,
            options=self.options(group).options,
            dtype=param.dtype,
            device=param.device,
            shape=param.shape,
            rule=rule,
            weight=weight,
            moments=moments,
            kept=kept,
            random=random,
            lines=_lines(name, param) if random else (0, 0, 0),
            placements=placements_of(param),
        )
        if state:
            if reason := checkpoint.mismatch(state, param, weight, kept):
                raise ValueError(
                    f"{name} cannot be stepped: {reason}. After changing an option, a device or a state by hand, call "
                    "optimizer.load_state_dict(optimizer.state_dict()), which converts; a moment that was never kept "
                    "starts in a new optimizer"
                )
            slot.take(state)
            state["step"] = checkpoint.counted(state["step"], _counts_on(group, param))
        self._known[param] = slot
        return slot

    def begin(self, group: Mapping[str, Any], slot: Slot, param: Tensor, place: int) -> dict[str, Any]:
        """Make the state of a param that has had no step; ``place`` is the param's in the groups."""
        moments = list(zip(slot.rule.moments, slot.moments, strict=True))
        step = checkpoint.counted(0, _counts_on(group, param))
        state = checkpoint.fresh(param, slot.weight, moments, step, place if slot.random else None)
        slot.take(state)
        self._optimizer.state[param] = state
        return state

    def weight(self, group: dict[str, Any], name: str, param: Tensor) -> tuple[Format, tuple[Tensor, ...]]:
        """Return the format of a param's weight and its parts: the param, and what is kept beside it."""
        slot = self.of(group, name, param)
        if not self._optimizer.state.get(param):
            return PLAIN[param.dtype], (param,)
        return slot.weight, (param, *slot.tensors[: len(slot.weight.parts) - 1])

    def moments(
        self, group: dict[str, Any], name: str, param: Tensor
    ) -> tuple[int, list[tuple[Moment, Format, tuple[Tensor, ...]]]]:
        """Return how often a stepped param was stepped, and each of its moments with its format and parts."""
        slot, state = self.of(group, name, param), self._optimizer.state[param]
        moments = zip(slot.rule.moments, slot.moments, strict=True)
        parts = [(m, format, tuple(state[checkpoint.key(part, m)] for part in format.parts)) for m, format in moments]
        return int(state["step"]), parts


def _counts_on(group: Mapping[str, Any], param: Tensor) -> torch.device | None:
    """The device that counts a param's steps, or None where the host does."""
    return param.device if group["capturable"] else None


def _lines(name: str, param: Tensor) -> tuple[int, int, int]:
    try:
        return lines(param)
    except ValueError as error:
        raise ValueError(f"{name} is {error}") from None
