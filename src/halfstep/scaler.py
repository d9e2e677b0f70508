"""GradScaler: torch's, for 16-bit gradients, with bounds and a memory."""

import math
import warnings
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.amp.grad_scaler import OptState

from halfstep.engine import HalfOptimizer
from halfstep.floor import Floor
from halfstep.gradients import (
    capturable,
    check,
    drop,
    found_everywhere,
    graded,
    holder,
    innermost,
    not_finite,
    refuse_float16,
    there,
    watched,
    widen,
)
from halfstep.norms import Clip, Squares, overflowed, squares
from halfstep.scales import FLOAT16_CAP, bounds, completed, rounded
from halfstep.tensors import materialized, tensors_in


class GradScaler(torch.amp.GradScaler):
    r"""Scale the loss so that small float16 gradients survive, and hand the optimizer float32 ones.

    The gradient of ``scale(loss)`` is $s\,g$ in 16 bits; the step uses $g = \mathrm{float32}(s\,g) / s$. A step whose
    gradients are not finite is left out and $s$ falls; after ``growth_interval`` steps without one it rises.

    With a ``capturable`` optimizer nothing waits for the device, which leaves a step out by itself: the optimizer's own
    is called always, so that schedulers see no skip, and nothing is said at the floor.

    Args:
        device: a type such as "cpu" or "cuda"; None takes the first loss's. "cuda" without CUDA warns and disables.
        init_scale, growth_factor, backoff_factor, growth_interval, enabled: as in torch.
        min_scale, max_scale: the scale stays between them, 2**-126 and 2**126 at the widest.
        hysteresis: the number of overflows before a back-off; it is full again after the scale has grown.
        at_floor: what an overflow at ``min_scale`` does in `update`, by name: "warn" once, or "raise" each time.
        allow_fp16: for optimizers other than halfstep's, unscale float16 gradients in place instead of raising.

    Raises:
        ValueError: an argument lies outside what it says.

    Exactness:
        Both ways of a step (with `unscale_` and without) give the same bits; powers of two divide exactly.

    Source:
        `torch.amp.GradScaler`; hysteresis as in Megatron-LM's DynamicGradScaler.
    """

    def __init__(
        self,
        device: str | torch.device | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        min_scale: float = 2.0**-14,
        max_scale: float = 2.0**24,
        hysteresis: int = 1,
        at_floor: str = "warn",
        allow_fp16: bool = False,
    ) -> None:
        self._min_scale, self._max_scale = bounds(min_scale, max_scale)
        self._check("init_scale", init_scale)
        if not (isinstance(hysteresis, int) and hysteresis >= 1):
            raise ValueError(f"hysteresis={hysteresis!r}: must be a whole number >= 1, the overflows before a back-off")
        self._floor = Floor(at_floor)
        if not 0 < backoff_factor < math.inf:
            raise ValueError(f"backoff_factor={backoff_factor!r}: must be greater than 0 and less than 1")
        name = "cpu" if device is None else torch.device(device).type
        super().__init__(name, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self._device_open = device is None
        self._hysteresis = self._init_patience = hysteresis
        self._patience: Tensor | None = None
        self._allow_fp16 = allow_fp16
        self._float16_output = self._scaled = False
        self._floor.near = init_scale * backoff_factor <= self._min_scale
        #: the scale as the host last read it: the tensor, its version and the number
        self._read: tuple[Tensor, int, float] | None = None
        self._found: weakref.WeakKeyDictionary[Any, list[Tensor]] = weakref.WeakKeyDictionary()

    # ------------------------------------------------------------------ the loop, in order

    @_disable_dynamo
    def scale(self, outputs: Any) -> Any:
        """Multiply a loss, or each of an iterable of outputs, by the scale.

        While an output is float16 the scale is held at 2**15 or below: its own gradient is the scale and must be
        finite. Scale it first, or together with the others: the outputs of one iteration share one scale.

        Raises:
            ValueError: an output is no tensor.
        """
        if not self._enabled:
            return outputs
        outputs = materialized(outputs)
        tensors = tensors_in(outputs)
        if tensors:
            if self._scale is None:
                self._lazy_init_scale_growth_tracker(tensors[0].device)
            if any(tensor.dtype is torch.float16 for tensor in tensors):
                self._float16_output = True
                # outputs of one iteration share one scale: what is scaled already stays right
                if not self._scaled:
                    scale, _ = self._check_scale_growth_tracker("scale")
                    scale.clamp_(max=max(FLOAT16_CAP, self._min_scale))
            self._scaled = True
        return super().scale(outputs)

    @_disable_dynamo
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale and check them; each 16-bit one of halfstep's own becomes float32.

        Such a gradient lies in ``.grad`` until `step` (stepping or skipping) or `update` drops it; clip it before.

        Raises:
            RuntimeError: called twice, or after `step`, since the last `update`; or after a `clip_grad_norm_` that was
                not given this scaler.
            ValueError: float16 gradients of an optimizer that is not halfstep's.
            TypeError: a gradient is sparse, or a param a slice of FSDP1's.
        """
        if self._enabled:
            self._check_scale_growth_tracker("unscale_")
            self._state(optimizer)
        super().unscale_(optimizer)

    @_disable_dynamo
    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Step the optimizer unless a gradient is infinite or NaN; then leave everything as it was.

        Without `unscale_` before, no float32 gradient comes to exist: one pass checks, the step itself divides. Only
        where a step pre-hook, a wrapper or a subclass's own step may read gradients before, `unscale_` runs.

        Returns:
            What ``optimizer.step`` returned; None where it was skipped.

        Raises:
            RuntimeError: called twice since the last `update`, or with a closure; or after a `clip_grad_norm_` that
                was not given this scaler.
            ValueError: float16 gradients of an optimizer that is not halfstep's, fused ones included.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        inner = innermost(optimizer)
        if isinstance(inner, HalfOptimizer):
            if any(arg is not None for arg in args):
                raise RuntimeError("Closure use is not currently supported if GradScaler is enabled.")
        elif not self._allow_fp16:
            refuse_float16(holder(optimizer))
        self._check_scale_growth_tracker("step")
        state = self._state(optimizer)
        straight = state["stage"] is OptState.READY and isinstance(inner, HalfOptimizer) and not watched(optimizer)
        try:
            if straight:
                state["found_inf_per_device"] = self._read_through(inner)
                inner._inverse_scale = self.inverse_of(inner)
                state["stage"] = OptState.UNSCALED
            returned = super().step(optimizer, *args, **kwargs)
        finally:
            inner.__dict__.pop("_inverse_scale", None)
            inner.__dict__.pop("_skip", None)
            if straight and state["stage"] is not OptState.STEPPED:
                state["stage"] = OptState.READY  # it raised; the gradients are still scaled
        self._found[inner] = list(state["found_inf_per_device"].values())
        if not capturable(inner) and self.skipped(inner):
            inner.__dict__.pop("_clip", None)
            self._watch_floor(self.get_scale())
        drop(state.pop("widened", {}))
        return returned

    def inverse_of(self, optimizer: torch.optim.Optimizer) -> float | Tensor:
        """Return what unscales the gradients of ``optimizer`` as they are now: 1 where `unscale_` did it already.

        Where the optimizer is ``capturable`` it is a float64 tensor without dimensions.

        Raises:
            RuntimeError: called between `step` and `update`, when they may be either.
        """
        if not self._enabled:
            return 1.0
        stage = self._state(optimizer)["stage"]
        if stage is OptState.STEPPED:
            raise RuntimeError(
                "clip_grad_norm_() is being called after step(): call it between the last backward and step(), and "
                "update() before the next iteration"
            )
        scale, _ = self._check_scale_growth_tracker("clip_grad_norm_")
        if stage is not OptState.READY:
            return 1.0
        return 1.0 / (scale.double() if capturable(optimizer) else self._number(scale))

    def skipped(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether the last `step` of this optimizer, or of the one it wraps, was left out; False before any."""
        return any(found.item() for found in self._found.get(innermost(optimizer), ()))

    @_disable_dynamo
    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Let the scale fall after an overflow, or rise after ``growth_interval`` steps without; or set it.

        Raises:
            ValueError: ``new_scale`` lies outside min_scale and max_scale.
            AssertionError: nothing was checked since the last update.
            RuntimeError: an overflow at min_scale, with ``at_floor="raise"``; the update is done.
        """
        if not self._enabled:
            return
        scale, tracker = self._check_scale_growth_tracker("update")
        if new_scale is not None:
            if isinstance(new_scale, Tensor) and (new_scale.numel() != 1 or new_scale.requires_grad):
                raise AssertionError("new_scale should be a float or a 1-element tensor with requires_grad=False.")
            scale.fill_(self._check("new_scale", new_scale))
            self._watch_floor(float(new_scale))
        else:
            states = self._per_optimizer_states.values()
            found = [there(f, scale.device) for state in states for f in state["found_inf_per_device"].values()]
            if not found:
                raise AssertionError("No inf checks were recorded prior to update.")
            self._move(scale, tracker, torch.stack(found).amax())
        self._forget()
        self._floor.tell(self._min_scale)

    # ------------------------------------------------------------------ how

    def _forget(self) -> None:
        """End an iteration: what was noted of its outputs and optimizers, and what `unscale_` left in their params."""
        for state in self._per_optimizer_states.values():
            drop(state.pop("widened", {}))
        self._per_optimizer_states.clear()
        self._float16_output = self._scaled = False

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        super()._lazy_init_scale_growth_tracker(dev)
        self._patience = torch.full((), self._init_patience, dtype=torch.int32, device=dev)
        if self._device_open:
            self._device, self._device_open = torch.device(dev).type, False

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        # torch calls this twice over: to unscale, and with allow_fp16 and a scale of 1 only to check
        inner, optimizer, clip = innermost(optimizer), holder(optimizer), None
        if isinstance(inner, HalfOptimizer):
            check(optimizer)
            if not allow_fp16:
                clip = self._clip_of(inner)
                widen(optimizer, self._state(inner).setdefault("widened", {}))
        elif not (allow_fp16 or self._allow_fp16):
            refuse_float16(optimizer)
        unscale, asked = super()._unscale_grads_, (inv_scale, found_inf, allow_fp16 or self._allow_fp16)
        # where no param has a gradient nothing overflowed
        nothing = {found_inf.device: found_inf}
        found = found_everywhere(optimizer, lambda here: unscale(here, *asked) or nothing)
        if clip:  # its norm is that of what is unscaled
            inner._clip = Clip.of(optimizer, clip.norm, clip.max_norm, 1.0)
        self._look_at_floor(optimizer, found)
        return found

    def _read_through(self, optimizer: HalfOptimizer) -> dict[torch.device, Tensor]:
        """Return for each device that has gradients whether one of them all is not finite, as torch keeps it."""
        clip = self._clip_of(optimizer)
        read = None if clip else squares(optimizer)
        total = read.total if read else torch.as_tensor(clip and clip.norm, dtype=torch.float64)
        scale, _ = self._check_scale_growth_tracker("step")
        if total.device.type != "cpu" and not capturable(optimizer):
            # what the host has to know comes with one wait for the device
            norm, number = torch.stack((total, scale.to(total.device).double())).tolist()
            total, self._read = torch.tensor(norm, dtype=torch.float64), (scale, scale._version, number)
        devices = {param.grad.device for _, _, param in graded(optimizer)} or {scale.device}
        found = dict.fromkeys(devices, overflowed(total))
        self._look_at_floor(optimizer, found, read)
        return found

    def _maybe_opt_step(self, optimizer: Any, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        inner = innermost(optimizer)
        if not capturable(inner):
            return super()._maybe_opt_step(optimizer, optimizer_state, *args, **kwargs)
        first, *others = optimizer_state["found_inf_per_device"].values()
        inner._skip = torch.stack([first, *(there(other, first.device) for other in others)]).amax()
        return optimizer.step(*args, **kwargs)

    def _number(self, scale: Tensor) -> float:
        """The scale, read from its device where it has moved since the last time."""
        if self._read is None or self._read[0] is not scale or self._read[1] != scale._version:
            self._read = scale, scale._version, scale.item()
        return self._read[2]

    def _clip_of(self, optimizer: HalfOptimizer) -> Clip | None:
        """Return the clip that was asked for gradients as they are now."""
        clip = optimizer._clip
        if clip is None or not clip.holds():
            return None
        clip.check(self.inverse_of(optimizer))
        return clip

    def _look_at_floor(self, optimizer: Any, found: Mapping[Any, Tensor], read: Squares | None = None) -> None:
        """Note at the floor what overflowed, now: clipping may make NaN of infinity."""
        near = self._floor.near and not capturable(optimizer)
        if near and self.get_scale() <= self._min_scale and any(f.item() for f in found.values()):
            self._floor.note(read.not_finite() if read else not_finite(optimizer))

    def _state(self, optimizer: Any) -> dict[str, Any]:
        """Return what is known of an optimizer since the last update; a wrapper shares it with what it wraps."""
        inner = innermost(optimizer)
        state = self._per_optimizer_states[id(inner)]
        self._per_optimizer_states[id(optimizer)] = state
        # kept alive with it: a state is found by an id, which must not become another optimizer's
        state.setdefault("owners", {}).update({id(optimizer): optimizer, id(inner): inner})
        return state

    def _move(self, scale: Tensor, tracker: Tensor, overflowed: Tensor) -> None:
        """Move the scale as torch does, but within patience and bounds; all on the device, without waiting for it."""
        patience, before = self._patience, scale.clone()
        assert patience is not None
        torch._amp_update_scale_(  # pyright: ignore[reportPrivateImportUsage]
            scale, tracker, overflowed, self._growth_factor, self._backoff_factor, self._growth_interval
        )
        # the tracker returns to 0 after an overflow and after a growth
        grown = (overflowed == 0) & (tracker == 0)
        patience.sub_((overflowed > 0).int()).clamp_(min=0).masked_fill_(grown, self._hysteresis)
        kept = (overflowed > 0) & (patience > 0)
        ceiling = min(self._max_scale, FLOAT16_CAP) if self._float16_output else self._max_scale
        scale.copy_(torch.where(kept, before, scale).clamp_(self._min_scale, max(ceiling, self._min_scale)))

    def _watch_floor(self, scale: float) -> None:
        """Note whether an overflow at ``scale`` leads to the floor: only there do gradients get looked through."""
        self._floor.near = scale * self._backoff_factor <= self._min_scale

    def _check(self, name: str, scale: float | Tensor) -> float:
        if not self._min_scale <= rounded(scale) <= self._max_scale:
            raise ValueError(
                f"{name}={float(scale)!r}: must lie between min_scale={self._min_scale:g} and max_scale="
                f"{self._max_scale:g}, which GradScaler(min_scale=..., max_scale=...) sets"
            )
        return float(scale)

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Return torch's five entries and ``min_scale``, ``max_scale``, ``hysteresis``, ``_hysteresis_tracker``."""
        if not self._enabled:
            return {}
        bounds = {"min_scale": self._min_scale, "max_scale": self._max_scale, "hysteresis": self._hysteresis}
        return {**super().state_dict(), **bounds, "_hysteresis_tracker": self._get_patience()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of ours or of `torch.amp.GradScaler`, whose missing entries stay as they are here.

        A scale outside the bounds is brought to the nearer, with a warning.

        Raises:
            RuntimeError: ``state_dict`` is empty, as a disabled scaler's is.
            ValueError: an entry is missing, unknown or has no meaning, such as a scale of 0 or infinity, to which
                torch's can fall or rise; nothing has changed then.
        """
        if not self._enabled or (isinstance(state_dict, dict) and not state_dict):
            super().load_state_dict(state_dict)  # which says what is wrong
            return
        own = {"min_scale": self._min_scale, "max_scale": self._max_scale, "hysteresis": self._hysteresis}
        state = completed(state_dict, own)
        saved, low, high = rounded(state["scale"]), state["min_scale"], state["max_scale"]
        scale = min(max(saved, low), high)
        super().load_state_dict({**state, "scale": scale})
        self._min_scale, self._max_scale = low, high
        self._hysteresis, self._init_patience = state["hysteresis"], state["_hysteresis_tracker"]
        if self._patience is not None:
            self._patience.fill_(self._init_patience)
        self._watch_floor(scale)
        if scale != saved:
            warnings.warn(
                f"the loaded scale {saved:g} lies outside {low:g} and {high:g}; it is {scale:g} now", stacklevel=2
            )

    def _get_patience(self) -> int:
        return self._init_patience if self._patience is None else int(self._patience.item())

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        if self._enabled:
            state["_init_patience"], state["_patience"] = self._get_patience(), None
        del state["_found"]  # of optimizers that do not travel along
        state["_read"] = None
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._found = weakref.WeakKeyDictionary()
