"""EMA: an average of the float32 weights over time, to evaluate with in their place."""

from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from halfstep import backends
from halfstep.backends.eager import convert
from halfstep.checkpoint import decode
from halfstep.contracts import Job, Kernel, Plan
from halfstep.engine import HalfOptimizer
from halfstep.formats import FLOAT32, GRADS, PLAIN
from halfstep.gradients import innermost
from halfstep.rules.average import AVERAGE
from halfstep.shards import local, spread, taken
from halfstep.tensors import type_of


@dataclass(slots=True)
class _Kept:
    """A param's average, and the count of its steps when that was last brought up to date."""

    average: Tensor
    step: int


class _Member(NamedTuple):
    """A param of the optimizer, with its group and name, and what is kept of it."""

    group: dict[str, Any]
    name: str
    param: Tensor
    kept: _Kept


class EMA:
    r"""Average an optimizer's float32 weights over its steps, for evaluations and for the model that is released.

    $a_t = a_{t-1} + (1-\delta)\,(\theta_t - a_{t-1})$, from $a_0 = \theta_0$; $\theta$ is the weight that the optimizer
    keeps, param and remainder, not the param alone: in 16 bits a change so small is rounded away.

    Call `update` after each step, and evaluate within `swap`. The average takes 4 bytes a weight. A param that joins
    the optimizer later begins at the first call after; buffers are no params, and are not averaged.

    Args:
        optimizer: one of halfstep's, or a wrapper that has it as ``.optimizer``; its model is loaded already.
        decay: $\delta$, at least 0 and less than 1.

    Raises:
        TypeError: ``optimizer`` is not halfstep's.
        ValueError: ``decay`` lies outside.

    Exactness:
        In float32, each operation rounded once: the same bits on every backend.

    Source:
        Polyak & Juditsky 1992; `torch.optim.swa_utils.AveragedModel` averages the params as they are.
    """

    def __init__(self, optimizer: HalfOptimizer, decay: float = 0.999) -> None:
        inner = innermost(optimizer)
        if not isinstance(inner, HalfOptimizer):
            raise TypeError(
                f"optimizer is {type_of(inner)}: must be one of halfstep's, which "
                "keeps float32 weights to average; for others use torch.optim.swa_utils.AveragedModel(model)"
            )
        self._optimizer, self._decay = inner, _checked(decay)
        self._kept: dict[Tensor, _Kept] = {}
        self._members()

    @_disable_dynamo
    @torch.no_grad()
    def update(self) -> None:
        r"""Move the average of each param that was stepped since the last call, by $1-\delta$ of what it is off.

        Where a step was skipped, or there was none, the average stays. With ``capturable`` it waits once for the device
        that counts the steps.

        Raises:
            ValueError: a param has another shape or device than its average; nothing has changed then.
            RuntimeError: called within `swap`.
        """
        self._refuse_swapped("the averages cannot be updated")
        members, batches = self._members(), defaultdict[Kernel, list[tuple[_Kept, int, Job]]](list)
        scalars = 1.0, *AVERAGE.scalars({"decay": self._decay}, 0)
        # models have thousands of params, and few formats
        kernels: dict[tuple[int, torch.device, str], Kernel] = {}
        for member, step in zip(members, self._steps([member.param for member in members]), strict=True):
            group, name, param, kept = member
            if step == kept.step:
                continue
            _check(member)
            weight, (own, *beside) = self._optimizer._slots.weight(group, name, param)
            key = id(weight), param.device, group["backend"]
            if key not in kernels:
                plan = Plan(AVERAGE, weight, (FLOAT32,), GRADS[param.dtype], param.device)
                kernels[key] = backends.kernel(plan, group["backend"])
            # the rule looks at no gradient: the param stands in its place
            here, *rest = map(local, (own, *beside, kept.average))
            batches[kernels[key]].append((kept, step, Job(here, here, tuple(rest), scalars)))
        for kernel, batch in batches.items():
            kernel([job for *_, job in batch])
            for kept, step, _ in batch:
                kept.step = step

    @contextmanager
    def swap(self) -> Generator[None]:
        """Let the params hold their averages within a ``with``, and have their own bits again after it.

        An average is rounded to the nearest number of the param's dtype, and kept at the largest where it lies past it.
        Params are written in place, and a copy of each is held meanwhile. What is saved inside is the averaged model.

        Raises:
            ValueError: a param has another shape or device than its average; nothing has changed then.
            RuntimeError: called within another `swap` of the optimizer's params; inside, also the optimizer's ``step``
                and ``load_state_dict``.
        """
        self._refuse_swapped("the params cannot be swapped")
        members = self._members()
        for member in members:
            _check(member)
        own = [(here := local(member.param).detach(), here.clone()) for member in members]
        handles = (
            self._optimizer.register_step_pre_hook(_refuse_step),
            self._optimizer.register_load_state_dict_pre_hook(_refuse_load),
        )
        try:
            for _, _, param, kept in members:
                convert(FLOAT32, (local(kept.average),), PLAIN[param.dtype], (local(param).detach(),))
            yield
        finally:
            for handle in handles:
                handle.remove()
            for here, bits in own:
                here.copy_(bits)

    def float32_weight(self, param: Tensor) -> Tensor:
        """Return the average of a param's weight: float32, shaped like it, as a tensor of its own.

        Args:
            param: one of the optimizer's.

        Raises:
            ValueError: ``param`` is none of the optimizer's.
        """
        for member in self._members():
            if member.param is param:
                return member.kept.average.clone()
        raise ValueError(f"the param of shape {tuple(param.shape)} is none of the optimizer's: pass one of its groups'")

    def _float32_weights(self) -> Iterator[tuple[Tensor, Callable[[], Tensor]]]:
        """Give each param, and what makes its average, as an optimizer gives its weights."""
        for member in self._members():
            yield member.param, member.kept.average.clone

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Return the decay, and by each param's place in the optimizer's groups its average and the steps it has seen.

        As in torch the tensors are those in use. Save it beside the model's and the optimizer's.
        """
        kept = {member.param: member.kept for member in self._members()}
        state = {place: {"average": kept[p].average, "step": kept[p].step} for p, (place, _) in self._places().items()}
        return {"decay": self._decay, "state": state}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the decay and the averages that `state_dict` gave, in tensors of our own.

        Raises:
            ValueError: they do not fit the optimizer's params, by name; nothing has changed then.
        """
        top = _mapping("the loaded state", state_dict, ("decay", "state"))
        try:
            decay = _checked(top["decay"])
        except ValueError as error:
            raise ValueError(f"the loaded state does not fit: {error}") from None
        states, places = top["state"], self._places()
        if not isinstance(states, Mapping):
            raise ValueError(
                f"'state' of the loaded state is a {type(states).__name__}, not a dict with an entry a param"
            )
        if missing := [name for place, name in places.values() if place not in states]:
            raise ValueError(
                f"the loaded state has no entry for {', '.join(missing[:5])}: give the optimizer the params that the "
                "saved one had"
            )
        if extra := sorted(map(repr, states.keys() - {place for place, _ in places.values()})):
            raise ValueError(
                f"the loaded state has entries for {', '.join(extra[:5])}, and the optimizer no params there: add them "
                "by add_param_group first, where they came late"
            )
        checked = {param: _entry(name, states[place], param) for param, (place, name) in places.items()}
        made = {
            param: _Kept(spread(average.to(param.device, copy=True).contiguous(), param.shape, param), step)
            for param, (average, step) in checked.items()
        }
        self._kept, self._decay = made, decay

    # ------------------------------------------------------------------ the optimizer's params

    def _places(self) -> dict[Tensor, tuple[int, str]]:
        """Each param's place in the optimizer's groups and its name; of places in one group the last, as in torch."""
        return {param: (place, name) for place, (_, _, name, param) in enumerate(self._optimizer._named())}

    @torch.no_grad()
    def _members(self) -> list[_Member]:
        """Each of the optimizer's params once; the average of one that is new begins as its weight."""
        found = {param: (group, name) for _, group, name, param in self._optimizer._named()}
        if new := [param for param in found if param not in self._kept]:
            self._refuse_swapped("no average can begin")
            for param, step in zip(new, self._steps(new), strict=True):
                self._kept[param] = _Kept(decode(*self._optimizer._slots.weight(*found[param], param)), step)
        return [_Member(group, name, param, self._kept[param]) for param, (group, name) in found.items()]

    def _steps(self, params: Sequence[Tensor]) -> list[int]:
        """How many steps each param has had; a device that counts them is asked once for all."""
        states = map(self._optimizer.state.get, params)
        steps: list[Any] = [state.get("step", 0) if state else 0 for state in states]
        counting = defaultdict[torch.device, list[int]](list)
        for k, step in enumerate(steps):
            if isinstance(step, Tensor):
                counting[step.device].append(k)
        for places in counting.values():
            for k, step in zip(places, torch.stack([steps[k] for k in places]).tolist(), strict=True):
                steps[k] = int(step)
        return steps

    def _refuse_swapped(self, what: str) -> None:
        # a hook is no part of a copy of the optimizer, whose params nobody swaps back
        if _refuse_step in self._optimizer._optimizer_step_pre_hooks.values():
            raise RuntimeError(
                f"{what} within EMA.swap(), where the optimizer's params hold averages: leave its `with`"
            )


def _refuse_step(*_: Any) -> NoReturn:
    raise RuntimeError("the optimizer cannot step within EMA.swap(), where its params hold averages: leave its `with`")


def _refuse_load(*_: Any) -> NoReturn:
    raise RuntimeError(
        "the optimizer cannot load a state within EMA.swap(), where its params hold averages: leave its `with`"
    )


def _checked(decay: Any) -> float:
    if not (isinstance(decay, int | float) and 0 <= decay < 1):
        raise ValueError(f"decay={decay!r}: must be a number, at least 0 and less than 1, such as 0.999")
    return float(decay)


def _check(member: _Member) -> None:
    """Raise for a param that its average does not fit any more."""
    param, average = member.param, member.kept.average
    if average.shape != param.shape or average.device != param.device:
        raise ValueError(
            f"{member.name} has shape {tuple(param.shape)} on {param.device}, its average {tuple(average.shape)} on "
            f"{average.device}: after a change of device call ema.load_state_dict(ema.state_dict()), and after one of "
            "shape make a new EMA"
        )


def _mapping(what: str, saved: Any, keys: Sequence[str]) -> Mapping[str, Any]:
    """Return ``saved``; raise unless it is a dict with these keys."""
    if not isinstance(saved, Mapping):
        raise ValueError(f"{what} is a {type(saved).__name__}, not a dict with {' and '.join(map(repr, keys))}")
    if saved.keys() != set(keys):
        has = ", ".join(map(repr, list(saved)[:5])) or "nothing"
        raise ValueError(f"{what} has {has}, not {' and '.join(map(repr, keys))}: pass what EMA.state_dict() gave")
    return saved


def _entry(name: str, saved: Any, param: Tensor) -> tuple[Tensor, int]:
    """Return the average and the count of steps of a param's entry; raise where they do not fit."""
    entry = _mapping(f"the entry for {name}", saved, ("average", "step"))
    average, step = entry["average"], entry["step"]
    if not isinstance(average, Tensor):
        raise ValueError(f"the average for {name} is a {type(average).__name__}, not a tensor")
    if average.dtype is not torch.float32 or average.layout is not torch.strided:
        raise ValueError(
            f"the average for {name} is {average.dtype}, {average.layout}, not torch.float32, torch.strided"
        )
    if average.shape != param.shape:
        raise ValueError(f"the average for {name} has shape {tuple(average.shape)}, the param {tuple(param.shape)}")
    if type(step) is not int or step < 0:
        raise ValueError(f"the step for {name} is {step!r}, not a count of steps")
    try:
        return taken(average.detach(), param), step
    except ValueError as error:
        raise ValueError(f"the average for {name} is {error}") from None
