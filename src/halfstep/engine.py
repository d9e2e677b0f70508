"""HalfOptimizer: from param groups to plans, and from plans to the backend that steps them."""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from halfstep import backends, checkpoint, report
from halfstep.checkpoint import LAYOUT
from halfstep.contracts import NOWHERE, Ahead, Counter, Format, Job, Kernel, Plan, Rule
from halfstep.conversions import Conversion, summary
from halfstep.formats import GRADS, moment_format, weight_format
from halfstep.loading import Loading, check_mapping
from halfstep.options import LIVE, TORCHS, checked
from halfstep.schedule import Coming, Schedule
from halfstep.shards import agreed, keeps_blocks, local, spreads
from halfstep.slots import Due, Slots
from halfstep.tensors import Turns, check_param, checked_grad, named

_LARGEST = torch.finfo(torch.float32).max


class HalfOptimizer(torch.optim.Optimizer):
    """The optimizer behind all of ours; a subclass names its `Rule` and its defaults.

    Args:
        params: params, ``(name, param)`` pairs or group dicts, as in torch; float16, bfloat16 or float32.
        defaults: the rule's hyperparameters, ``maximize``, and ``weights``, ``moments`` and ``backend``; each may be
            overridden by a param group.
    """

    rule: ClassVar[Rule]
    #: Options that a loaded state leaves as they are.
    _live: ClassVar[tuple[str, ...]] = LIVE
    #: What the step multiplies every gradient by, and where not 0 a reason on the device to leave it out; `GradScaler`
    #: sets them for the length of one step.
    _inverse_scale: float | Tensor = 1.0
    _skip: Tensor | None = None
    #: The `halfstep.norms.Clip` that `clip_grad_norm_` asks of the next step.
    _clip: Any = None

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        self._forget()
        super().__init__(params, checked({**TORCHS, "layout": LAYOUT, "seed": 0, **defaults}))

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._forget()
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("layout", LAYOUT)

    def _forget(self) -> None:
        """Drop what is derived from groups and state."""
        self._slots = Slots(self)
        #: whether a step was taken, or a state loaded: then no step only looks
        self._begun = False
        self._saturated: dict[str, int | Tensor] = {}
        self._warned: set[Tensor] = set()
        self._schedule = Schedule()
        self._conversions: list[Conversion] = []

    @property
    def capturable(self) -> bool:
        """Whether the device counts the steps, and the host never waits for it."""
        return all(group["capturable"] for group in self.param_groups)

    def _named(self) -> Iterator[tuple[int, dict[str, Any], str, Tensor]]:
        """Each param with the place of its group, the group and its name."""
        for index, group in enumerate(self.param_groups):
            for name, param in named(group, index):
                yield index, group, name, param

    # ------------------------------------------------------------------ groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of params, as in torch; where anything is wrong with it, the optimizer stays as it was.

        Raises:
            ValueError: an option has a value that is not allowed.
            TypeError: a param is neither float16, bfloat16 nor float32.
            halfstep.backends.Unavailable: the group asks for a backend that cannot run its params.
        """
        options = checked({**self.defaults, **param_group}) if isinstance(param_group, dict) else {}
        super().add_param_group(param_group)
        group = self.param_groups.pop()
        group.update({name: value for name, value in options.items() if name not in ("params", "param_names")})
        for name, param in named(group, len(self.param_groups)):
            check_param(name, param)
            if group["backend"] != "auto" or group["capturable"]:
                rule, weight, moments = self._formats(group, param)
                plan = Plan(rule, weight, moments, GRADS[param.dtype], param.device)
                backend, why = backends.choose(plan.device, plan.dtypes, group["backend"])
                if group["capturable"] and not backend.capturable:
                    raise ValueError(
                        f"capturable=True: {name} is on {param.device}, where the backend is {backend.name}"
                        f"{f' ({why})' if why else ''}; only a GPU counts its own steps: leave it out"
                    )
        if any(other["capturable"] != group["capturable"] for other in self.param_groups):
            raise ValueError(f"capturable={group['capturable']!r}: must be the same in all of an optimizer's groups")
        self.param_groups.append(group)

    def _rule(self, group: Mapping[str, Any]) -> Rule:
        """Return the rule of a group; a subclass in which an option decides it says which."""
        return self.rule

    def _formats(self, group: Mapping[str, Any], param: Tensor) -> tuple[Rule, Format, tuple[Format, ...]]:
        """Return a param's rule, and the formats of its weight and of its moments."""
        rule = self._rule(group)
        whole = keeps_blocks(param)
        moments = tuple(moment_format(group["moments"], moment, param.shape, whole) for moment in rule.moments)
        return rule, weight_format(group["weights"], param.dtype), moments

    # ------------------------------------------------------------------ the step

    @_disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every param that has a gradient. What cannot be stepped raises before anything has changed.

        Args:
            closure: evaluates the loss again and returns it; as in torch.

        Returns:
            What ``closure`` returned, or None.

        Raises:
            TypeError: a param's dtype changed after its first step, or its gradient is sparse or of another dtype.
            ValueError: a param's state does not fit it, or a group's hyperparameters are not finite.
            RuntimeError: `clip_grad_norm_` found no finite norm, or gradients have changed since.
        """
        if closure is None and not self._begun and not any(self.state.values()) and self._only_looks():
            return None
        self._begun = True
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing() and not self.capturable:
            raise RuntimeError("a step is captured in a CUDA graph only with capturable=True: give it to the optimizer")
        factor, skip = self._inverse_scale, self._skip
        if self._clip is not None:
            factor = factor * self._clip.factor(factor)
            skip = self._clip.skip() if skip is None else skip
        batches = self._gather(factor, skip)
        self._saturated, self._clip = {}, None
        for (kernel, _), batch in batches.items():
            counts = kernel([self._job(due) for due in batch])
            # backends write past autograd, which has to know: a graph that still needs the old values must not run
            torch.autograd.graph.increment_version([due.param for due in batch])
            for due, count in zip(batch, counts, strict=True):
                if due.coming is None:
                    (due.state or self.state[due.param])["step"] = due.step
                if isinstance(count, Tensor) or count:
                    self._note(due, count)
        return loss

    def _only_looks(self) -> bool:
        """Whether this first step has no learning rate and nothing but zeros for gradients; then states are made alone.

        torch.distributed.checkpoint steps so, to see what states there will be; no count of steps may come of it. Where
        params are sharded all processes look alike.
        """
        if any(float(group["lr"]) for group in self.param_groups):
            return False
        found = {param: (group, name, place) for place, (_, group, name, param) in enumerate(self._named())}
        grads = {param: local(param.grad) for param in found if param.grad is not None}
        steps = any(grad.layout is not torch.strided or bool(grad.count_nonzero()) for grad in grads.values())
        if agreed(torch.tensor(float(steps)), spreads(found)) or not grads:
            return False
        for param in grads:
            group, name, place = found[param]
            slot = self._slots.of(group, name, param)
            if param not in self.state:
                self._slots.begin(group, slot, param, place)
        return True

    def _gather(self, factor: float | Tensor, skip: Tensor | None) -> dict[tuple[Kernel, int], list[Due]]:
        """Check every tensor of this step and put together those that one kernel steps in one turn."""
        batches: defaultdict[tuple[Kernel, int], list[Due]] = defaultdict(list)
        turns, stepped, places = Turns(), set[int](), itertools.count()
        for index, group in enumerate(self.param_groups):
            scalars: dict[int, tuple[float, ...]] = {}
            coming: dict[torch.device, Coming] = {}
            options, capturable = self._slots.options(group), group["capturable"]
            for (name, param), place in zip(named(group, index), places, strict=False):
                grad = param.grad
                if grad is None or id(param) in stepped:
                    continue
                stepped.add(id(param))
                slot, state = self._slots.known(param), self.state.get(param)
                if slot is None or not slot.fits(param, state, options):
                    slot = self._slots.of(group, name, param)
                # models have thousands of params, nearly all of them like this
                plain = type(grad) is Tensor and grad.dtype in slot.kernels and grad.layout is torch.strided
                if not plain or slot.placements or grad.shape != slot.shape or grad.device != slot.device:
                    grad = checked_grad(name, param)
                if grad.dtype not in slot.kernels:
                    slot.kernels[grad.dtype] = backends.kernel(slot.plan(grad.dtype), group["backend"])
                if capturable:
                    if slot.device not in coming:
                        coming[slot.device] = self._schedule.of(slot.rule, index, group, slot.device, factor, skip)
                    due = Due(group, slot, param, grad, state, 0, (), coming[slot.device], place)
                else:
                    step = state["step"] + 1 if state else 1
                    if step not in scalars:
                        scalars[step] = self._scalars(index, group, step, factor)
                    due = Due(group, slot, param, grad, state, step, scalars[step], None, place)
                batches[slot.kernels[grad.dtype], turns.take(local(param))].append(due)
        return batches

    def _scalars(self, index: int, group: dict[str, Any], step: int, factor: Any) -> tuple[float, ...]:
        """Return the gradient's factor and the rule's scalars."""
        rate = {**group, "lr": float(group["lr"])}
        scalars = (-factor if group["maximize"] else factor, *self._rule(group).scalars(rate, step))
        if not all(abs(scalar) <= _LARGEST for scalar in scalars):
            numbers = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay") if name in group}
            raise ValueError(
                f"group {index} cannot be stepped with {', '.join(f'{n}={value!r}' for n, value in numbers.items())}: "
                "what follows from them must be finite in float32; look at what set them, such as a scheduler"
            )
        return scalars

    def _job(self, due: Due) -> Job:
        slot, coming, counter = due.slot, due.coming, NOWHERE
        state = due.state or self._slots.begin(due.group, slot, due.param, due.place)
        ahead = Ahead(state["step"], *coming) if coming else None
        if slot.random:
            counter = Counter(due.group["seed"], state.setdefault("stream", due.place), due.step, *slot.lines)
        return Job(local(due.param), due.grad, slot.locals, due.scalars, counter, ahead)

    def _note(self, due: Due, count: int | Tensor) -> None:
        """Keep a param's count of saturated weights; warn of the first, where that costs no wait for a device."""
        if isinstance(count, Tensor) and count.device.type == "cpu":
            count = int(count)
        if isinstance(count, int) and count == 0:
            return
        name, param = due.slot.name, due.param
        self._saturated[name] = count
        if isinstance(count, int) and param not in self._warned:
            self._warned.add(param)
            report.warn_of_saturation(name, param, count)

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
        for member, weight in self._float32_weights():
            if member is param:
                return weight()
        raise ValueError(
            f"the param of shape {tuple(param.shape)} is none of this optimizer's: pass one of its groups'"
        )

    def _float32_weights(self) -> Iterator[tuple[Tensor, Callable[[], Tensor]]]:
        """Give each param, and what makes its float32 weight."""
        for _, group, name, param in self._named():
            yield param, lambda held=(group, name, param): checkpoint.decode(*self._slots.weight(*held))

    def saturated(self) -> dict[str, int]:
        """Return how many weights of each param the last step kept at the largest number of its dtype, by name.

        Names stand only where the count is not 0. On a device other than the CPU this waits for the step to end. Of a
        sharded param the weights in this process count.
        """
        counts = {name: int(count) for name, count in self._saturated.items()}
        return {name: count for name, count in counts.items() if count}

    def memory(self) -> dict[str, int]:
        """Return the bytes of all that this process holds once every param was stepped, by what they are for.

        ``"param"``: the params; ``"grad"``: a gradient for each, where there is none now one of the param's dtype;
        ``"weight"``: what is kept of the weights beside the params; ``"moments"``; and ``"total"``.
        """
        return report.memory(self._lines())

    def explain(self) -> str:
        """Return a table: for each group of like tensors its rule, formats, backend and bytes, as `memory` counts them.

        Below it stands who runs what, why a tensor did not get what was asked, what the loaded state was converted to,
        and what saturated in the last step.
        """
        saturated = [
            f"saturated in the last step: {count} weights of {name}" for name, count in self.saturated().items()
        ]
        loaded = [f"loaded {line}" for line in summary(self._conversions)]
        return "\n  ".join([type(self).__name__, *report.table(self._lines()), *loaded, *saturated])

    def _lines(self) -> list[report.Line]:
        """What there is to tell of each param."""
        lines: dict[Tensor, report.Line] = {}
        for index, group, name, param in self._named():
            slot = self._slots.of(group, name, param)
            lines.setdefault(param, report.Line(index, group, param, slot.plan(param.dtype)))
        return list(lines.values())

    # ------------------------------------------------------------------ state

    def conversions(self) -> list[Conversion]:
        """Return what the last `load_state_dict` had to convert, and how many values were rounded on the way."""
        return self._conversions[:]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state: ours, or another library's that `halfstep.foreign` knows. No dtype is changed.

        The live optimizer's ``weights``, ``moments`` and ``backend`` stay, and a state in other formats is converted,
        which reads the params: load the model first. Hyperparameters load as in torch; those missing keep the defaults.

        Raises:
            ValueError: the state does not fit, by the name of the param or group; nothing has changed then.
        """
        check_mapping(state_dict)
        loaded: list[tuple[Loading, dict[Tensor, dict[str, Any]]]] = []

        def take(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
            own = self.param_groups, self.defaults, self._live
            loading = Loading(state_dict, *own, self._formats, self._slots.weight, self.state)
            loaded.append((loading, loading.made()))
            # torch puts the groups in place
            return {"state": {}, "param_groups": loading.groups}

        def give(_: Any) -> None:
            ((loading, states),) = loaded
            self.state.update(states)
            loading.write()
            self._conversions, self._begun = loading.conversions, True

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
