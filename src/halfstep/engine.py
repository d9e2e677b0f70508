"""HalfOptimizer: from param groups to plans, and from plans to the backend that steps them."""

import math
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from halfstep import backends, checkpoint
from halfstep.backends.eager import decode
from halfstep.contracts import Format, Job, Kernel, Plan, Rule
from halfstep.formats import GRADS, MOMENTS, PLAIN, WEIGHTS, weight_format

#: Options that describe how the live optimizer works; a loaded state does not change them.
LIVE = ("weights", "moments", "backend")
_HYPERPARAMETERS: dict[str, tuple[Callable[[float], bool], str]] = {
    "lr": (lambda x: 0 <= x < math.inf, "a finite number >= 0"),
    "eps": (lambda x: 0 <= x < math.inf, "a finite number >= 0"),
    "weight_decay": (lambda x: 0 <= x < math.inf, "a finite number >= 0"),
}


@dataclass(slots=True)
class _Slot:
    """What stays the same from step to step for one param."""

    name: str
    options: tuple[str, ...]
    dtype: torch.dtype
    device: torch.device
    weight: Format
    moments: tuple[Format, ...]
    kept: Mapping[str, torch.dtype]
    tensors: tuple[Tensor, ...] = ()
    kernels: dict[torch.dtype, Kernel] = field(default_factory=dict)


def named(group: Mapping[str, Any], index: int) -> Iterator[tuple[str, Tensor]]:
    """Each param of a group under its name, or under group and position where the optimizer was given no names."""
    names = group.get("param_names") or [f"param {k} of group {index}" for k in range(len(group["params"]))]
    return zip(names, group["params"], strict=True)


class HalfOptimizer(torch.optim.Optimizer):
    """The optimizer behind all of ours; a subclass names its `Rule` and its defaults.

    Args:
        params: params, ``(name, param)`` pairs or group dicts, as in torch; float16, bfloat16 or float32.
        defaults: the rule's hyperparameters, ``maximize``, and ``weights``, ``moments`` and ``backend``; each may be
            overridden by a param group.
    """

    rule: ClassVar[Rule]
    #: What the step multiplies every gradient by; `GradScaler` sets it for the length of one step.
    _inverse_scale: float = 1.0

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        self._forget()
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._forget()
        super().__setstate__(state)

    def _forget(self) -> None:
        """Drop what is derived from groups and state."""
        self._slots: dict[Tensor, _Slot] = {}
        self._saturated: dict[Tensor, int | Tensor] = {}
        self._warned: set[Tensor] = set()

    # ------------------------------------------------------------------ groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of params, as in torch; every option is checked first.

        Raises:
            ValueError: an option has a value that is not allowed.
            TypeError: a param is neither float16, bfloat16 nor float32.
            halfstep.backends.Unavailable: the group asks for a backend that cannot run its params.
        """
        group = {**self.defaults, **param_group} if isinstance(param_group, dict) else param_group
        if isinstance(group, dict):
            options = self._checked(group)
            param_group = {**param_group, **{name: options[name] for name in LIVE if name in options}}
        super().add_param_group(param_group)
        index = len(self.param_groups) - 1
        try:
            for name, param in named(self.param_groups[index], index):
                _check_param(name, param)
                if self.param_groups[index]["backend"] != "auto":
                    self._plan(self._slot(self.param_groups[index], name, param), param.dtype)
        except Exception:
            self.param_groups.pop()
            raise

    def _checked(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Check a group's options and return them in the form in which they are kept."""
        for name, (allowed, text) in _HYPERPARAMETERS.items():
            if name in group and not allowed(_number(name, group[name])):
                raise ValueError(f"{name}={group[name]!r}: must be {text}")
        for k, beta in enumerate(group.get("betas", ())):
            if not 0 <= _number(f"betas[{k}]", beta) < 1:
                raise ValueError(f"betas[{k}]={beta!r}: must be at least 0 and less than 1")
        moments = group["moments"]
        if isinstance(moments, torch.dtype):
            moments = str(moments).removeprefix("torch.")
        for name, value, allowed in (
            ("weights", group["weights"], WEIGHTS),
            ("moments", moments, MOMENTS),
            ("backend", group["backend"], ("auto", *backends.BACKENDS)),
        ):
            if not isinstance(value, str) or value not in allowed:
                raise ValueError(f"{name}={group[name]!r}: must be one of {', '.join(map(repr, allowed))}")
        return {**group, "moments": moments}

    # ------------------------------------------------------------------ the step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every param that has a gradient. What cannot be stepped raises before anything has changed.

        Args:
            closure: evaluates the loss again and returns it; as in torch.

        Returns:
            What ``closure`` returned, or None.

        Raises:
            TypeError: a param's dtype changed after its first step, or its gradient is sparse or of another dtype.
            ValueError: a param's state does not fit it.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._saturated = {}
        for kernel, members in self._gather().items():
            jobs = [self._job(slot, group, param, grad) for slot, group, param, grad in members]
            for (slot, _, param, _), count in zip(members, kernel[0](jobs), strict=True):
                self._note(slot, param, count)
        return loss

    def _gather(self) -> dict[tuple[Kernel, int], list[tuple[_Slot, dict[str, Any], Tensor, Tensor]]]:
        """Check every tensor of this step and put together those that one kernel steps."""
        batches: defaultdict[tuple[Kernel, int], list[Any]] = defaultdict(list)
        stepped: set[Tensor] = set()
        # two params over one storage must not be stepped at the same time by two threads
        storages: Counter[int] = Counter()
        for index, group in enumerate(self.param_groups):
            for name, param in named(group, index):
                grad = param.grad
                if grad is None or param in stepped:
                    continue
                stepped.add(param)
                slot = self._slot(group, name, param)
                kernel = slot.kernels.get(grad.dtype)
                if grad.layout is not torch.strided or kernel is None:
                    check_grad(name, grad)
                    plan = self._plan(slot, grad.dtype)
                    kernel = slot.kernels[grad.dtype] = backends.kernel(plan, group["backend"])
                address = param.data_ptr()
                batches[kernel, storages[address]].append((slot, group, param, grad))
                storages[address] += 1
        return batches

    def _slot(self, group: Mapping[str, Any], name: str, param: Tensor) -> _Slot:
        """Return what is known of ``param``, checked against what it is now."""
        slot, state = self._slots.get(param), self.state.get(param)
        options = (group["weights"], group["moments"], group["backend"])
        if slot and slot.dtype is param.dtype and slot.device == param.device and slot.options == options:
            if not state or all(state.get(key) is kept for key, kept in zip(slot.kept, slot.tensors, strict=True)):
                return slot
        if slot and state and slot.dtype is not param.dtype:
            raise TypeError(
                f"{name} was {slot.dtype} at its first step and is {param.dtype} now: change a model's dtype first and "
                "make its optimizer after, or take the weights over by optimizer.float32_weight(param)"
            )
        _check_param(name, param)
        weight = weight_format(group["weights"], param.dtype)
        moments = (MOMENTS[group["moments"]],) * len(self.rule.moments)
        kept = checkpoint.layout(weight, list(zip(self.rule.moments, moments, strict=True)))
        slot = _Slot(name, options, param.dtype, param.device, weight, moments, kept)
        if state:
            if reason := checkpoint.mismatch(state, param, kept):
                raise ValueError(
                    f"{name} cannot be stepped: {reason}. Formats, dtypes and devices change by state_dict() and "
                    "load_state_dict(), which convert"
                )
            slot.tensors = tuple(state[key] for key in kept)
        self._slots[param] = slot
        return slot

    def _plan(self, slot: _Slot, grad: torch.dtype) -> Plan:
        plan = Plan(self.rule, slot.weight, slot.moments, GRADS[grad], slot.device)
        backends.choose(plan, slot.options[2])
        return plan

    def _job(self, slot: _Slot, group: dict[str, Any], param: Tensor, grad: Tensor) -> Job:
        state = self.state[param]
        if not state:
            moments = zip(self.rule.moments, slot.moments, strict=True)
            state.update(checkpoint.fresh(param, slot.weight, list(moments)))
            slot.tensors = tuple(state[key] for key in slot.kept)
        state["step"] += 1
        factor = -self._inverse_scale if group["maximize"] else self._inverse_scale
        return Job(param, grad, slot.tensors, (factor, *self.rule.scalars(group, state["step"])))

    def _note(self, slot: _Slot, param: Tensor, count: int | Tensor) -> None:
        """Keep a param's count of saturated weights; warn of the first, where that costs no wait for a device."""
        if isinstance(count, Tensor) and count.device.type == "cpu":
            count = int(count)
        if isinstance(count, int) and count == 0:
            return
        self._saturated[param] = count
        if isinstance(count, int) and param not in self._warned:
            self._warned.add(param)
            warnings.warn(
                f"{slot.name}: {count} of {param.numel()} weights went past {torch.finfo(param.dtype).max:g}, the largest "
                f"{param.dtype}, and stay there until their gradients turn. Lower lr, raise weight_decay, or keep "
                "this param in bfloat16 or float32. Further ones are counted by optimizer.saturated()",
                RuntimeWarning,
                stacklevel=5,
            )

    # ------------------------------------------------------------------ what a person asks

    def float32_weight(self, param: Tensor) -> Tensor:
        """Return the float32 weight behind a param, shaped like it, as a tensor of its own.

        Args:
            param: one of this optimizer's.

        Raises:
            ValueError: ``param`` is none of this optimizer's.

        Exactness:
            The very weight that the next step starts from.
        """
        for index, group in enumerate(self.param_groups):
            for name, member in named(group, index):
                if member is param:
                    slot = self._slot(group, name, param)
                    if not self.state.get(param):
                        return decode(PLAIN[param.dtype], (param.detach(),))
                    return decode(slot.weight, (param.detach(), *slot.tensors[: len(slot.weight.parts) - 1]))
        raise ValueError(f"the param of shape {tuple(param.shape)} is none of this optimizer's: pass one of its groups'")

    def saturated(self) -> dict[str, int]:
        """Return how many weights of each param the last step kept at the largest number of its dtype, by name.

        Names stand only where the count is not 0. On a device other than the CPU this waits for the step to end.
        """
        counts = {self._slots[param].name: int(count) for param, count in self._saturated.items()}
        return {name: count for name, count in counts.items() if count}

    def explain(self) -> str:
        """Return, for each group of tensors, its formats and backend, and why it did not get what was asked."""
        lines: dict[str, list[int]] = {}
        for index, group in enumerate(self.param_groups):
            for name, param in named(group, index):
                slot = self._slot(group, name, param)
                plan = self._plan(slot, param.dtype)
                backend, reason = backends.choose(plan, group["backend"])
                why = f", a {slot.dtype} param holds its own".replace("torch.", "") if not slot.weight.parts[1:] else ""
                text = (
                    f"{str(slot.dtype).removeprefix('torch.')} params: weights {slot.weight.name}"
                    f"{why if slot.weight.name != group['weights'] else ''}; moments {group['moments']}; "
                    f"backend {backend.name}: {backend.describe(plan)}{f' ({reason})' if reason else ''}"
                )
                lines.setdefault(f"group {index}: {{}} tensors, {{:,}} {text}", []).append(param.numel())
        head = f"{type(self).__name__}, rule {self.rule.name}"
        body = [line.format(len(sizes), sum(sizes)) for line, sizes in lines.items()]
        tail = [f"saturated in the last step: {count} weights of {name}" for name, count in self.saturated().items()]
        return "\n  ".join([head, *body, *tail])

    # ------------------------------------------------------------------ state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state: ours, torch's AdamW's, or the teaching implementation's. No dtype is changed.

        The live optimizer's ``weights``, ``moments`` and ``backend`` stay, and a state in other formats is converted,
        which reads the params: load the model first. Hyperparameters load as in torch; those missing keep the defaults.

        Raises:
            ValueError: the state fits no param it is meant for, by name, or asks for amsgrad; nothing has changed then.
        """
        restored: dict[Tensor, tuple[dict[str, Any], Tensor | None]] = {}
        before = [{name: group[name] for name in self._live} for group in self.param_groups]

        def take(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
            others = self._restore(state_dict, restored)
            return {**state_dict, "state": others}

        def give(_: Any) -> None:
            for group, live in zip(self.param_groups, before, strict=True):
                group.update(live)
                for name, default in self.defaults.items():
                    group.setdefault(name, default)
            for param, (state, written) in restored.items():
                self.state[param] = state
                if written is not None:
                    param.data.copy_(written)

        # last of the pre hooks, so that users' own are heard; first of the post hooks, so that theirs see all
        handles = (
            self.register_load_state_dict_pre_hook(take),
            self.register_load_state_dict_post_hook(give, prepend=True),
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            for handle in handles:
                handle.remove()

    #: Options that a loaded state leaves as they are.
    _live: ClassVar[tuple[str, ...]] = LIVE

    def _restore(self, state_dict: dict[str, Any], restored: dict[Tensor, Any]) -> dict[Any, Any]:
        """Convert what ``state_dict`` holds for our params into ``restored``; return what it holds beside."""
        others, groups = dict(state_dict["state"]), state_dict["param_groups"]
        if [len(g["params"]) for g in groups] != [len(g["params"]) for g in self.param_groups]:
            return others  # torch's own check comes next and raises
        for index, (saved_group, group) in enumerate(zip(groups, self.param_groups, strict=True)):
            if saved_group.get("amsgrad"):
                raise ValueError("amsgrad=True in the loaded state: not offered here; go on in torch.optim, or set it False")
            for number, (name, param) in zip(saved_group["params"], named(group, index), strict=True):
                saved = others.pop(number, None)
                if not saved:
                    continue
                weight = weight_format(group["weights"], param.dtype)
                moments = [(moment, MOMENTS[group["moments"]]) for moment in self.rule.moments]
                try:
                    restored[param] = checkpoint.restore(saved, saved_group, param, weight, moments)
                except ValueError as error:
                    raise ValueError(f"the state for {name} does not fit: {error}") from None
        return others


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{name}={value!r}: must be a number, or a tensor of one element") from None


def _check_param(name: str, param: Tensor) -> None:
    if param.dtype not in PLAIN:
        raise TypeError(
            f"{name} is {param.dtype}: halfstep steps float16, bfloat16 and float32 params. Cast the model "
            "(model.half(), model.bfloat16(), model.float()) or give this param to an optimizer of torch.optim"
        )
    if torch._debug_has_internal_overlap(param) == 1:
        raise ValueError(
            f"{name} is a view with strides {param.stride()}, in which elements share memory: make it a tensor of its own "
            "with param.contiguous()"
        )


def check_grad(name: str, grad: Tensor) -> None:
    """Raise for a gradient that no step takes; ``name`` is its param's."""
    if grad.layout is not torch.strided:
        raise TypeError(
            f"the gradient of {name} is sparse ({grad.layout}): halfstep takes dense ones. Build the module with "
            "sparse=False, or give this param to torch.optim.SparseAdam or SGD"
        )
    if grad.dtype not in GRADS:
        raise TypeError(f"the gradient of {name} is {grad.dtype}: must be float16, bfloat16 or float32")
