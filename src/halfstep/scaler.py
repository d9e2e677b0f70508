"""GradScaler: torch's, for 16-bit gradients, with bounds and a memory."""

import math
import warnings
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim.optimizer import _global_optimizer_pre_hooks

from halfstep.engine import HalfOptimizer, check_grad, named

#: The largest power of two that float16 holds: the gradient of a scaled float16 output is the scale itself.
_FLOAT16_CAP = 2.0**15


class GradScaler(torch.amp.GradScaler):
    r"""Scale the loss so that small float16 gradients survive, and hand the optimizer float32 ones.

    The gradient of ``scale(loss)`` is $s\,g$ in 16 bits; the step uses $g = \mathrm{float32}(s\,g) / s$. A step whose
    gradients are not finite is left out and $s$ falls; after ``growth_interval`` steps without one it rises.

    Args:
        device: a device type such as "cpu" or "cuda"; None takes the first loss's. "cuda" without CUDA warns and disables.
        init_scale, growth_factor, backoff_factor, growth_interval, enabled: as in torch.
        min_scale, max_scale: the scale stays between them (float32 powers of two keep the division exact).
        hysteresis: the number of overflows before a back-off; it is full again after the scale has grown.
        at_floor: what an overflow at ``min_scale`` does in `update`: "warn" once, or "raise" each time.
        allow_fp16: for optimizers other than halfstep's, unscale float16 gradients in place instead of raising.

    Raises:
        ValueError: an argument lies outside what it says.

    Exactness:
        With a scale that is a power of two, both ways of a step (with `unscale_` and without) give the same bits.

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
        if not 0 < min_scale <= max_scale < math.inf:
            raise ValueError(f"min_scale={min_scale!r}, max_scale={max_scale!r}: must be finite, 0 < min_scale <= max_scale")
        if not min_scale <= init_scale <= max_scale:
            raise ValueError(f"init_scale={init_scale!r}: must lie between min_scale={min_scale} and max_scale={max_scale}")
        if not (isinstance(hysteresis, int) and hysteresis >= 1):
            raise ValueError(f"hysteresis={hysteresis!r}: must be a whole number >= 1, the overflows before a back-off")
        if at_floor not in ("warn", "raise"):
            raise ValueError(f"at_floor={at_floor!r}: must be 'warn' or 'raise'")
        if not 0 < backoff_factor < math.inf:
            raise ValueError(f"backoff_factor={backoff_factor!r}: must be greater than 0 and less than 1")
        name = "cpu" if device is None else torch.device(device).type
        super().__init__(name, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self._device_open = device is None
        self._min_scale, self._max_scale = float(min_scale), float(max_scale)
        self._hysteresis = self._init_patience = hysteresis
        self._patience: Tensor | None = None
        self._at_floor = at_floor
        self._allow_fp16 = allow_fp16
        self._float16_output = self._scaled = False
        self._floor: str | None = None
        self._floor_told = False
        self._converted: dict[int, list[tuple[Tensor, torch.dtype | None]]] = {}
        self._found: weakref.WeakKeyDictionary[Any, list[Tensor]] = weakref.WeakKeyDictionary()

    # ------------------------------------------------------------------ the loop, in order

    def scale(self, outputs: Any) -> Any:
        """Multiply a loss, or each of an iterable of outputs, by the scale.

        While an output is float16 the scale is held at 2**15 or below: its own gradient is the scale, and must be finite.
        """
        if not self._enabled:
            return outputs
        if isinstance(outputs, Iterable) and not isinstance(outputs, Tensor | list | tuple):
            outputs = list(outputs)
        tensors = list(_tensors(outputs))
        if self._scale is None and tensors:
            self._lazy_init_scale_growth_tracker(tensors[0].device)
        if any(tensor.dtype is torch.float16 for tensor in tensors):
            self._float16_output = True
            # outputs of one iteration share one scale: what is scaled already stays right
            if self._scale is not None and not self._scaled:
                self._scale.clamp_(max=max(_FLOAT16_CAP, self._min_scale))
        self._scaled = True
        return super().scale(outputs)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale and check them; each 16-bit one of halfstep's own becomes float32.

        Such a gradient lies in ``.grad`` until `step`, stepping or skipping, drops it; clip or read it in between.

        Raises:
            RuntimeError: called twice, or after `step`, since the last `update`.
            ValueError: float16 gradients of an optimizer that is not halfstep's.
            TypeError: a gradient is sparse.
        """
        super().unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Step the optimizer unless a gradient is infinite or NaN; then leave everything as it was.

        Without `unscale_` before, no float32 gradient comes to exist: one pass checks, the step itself divides.

        Returns:
            What ``optimizer.step`` returned; None where it was skipped.

        Raises:
            RuntimeError: called twice since the last `update`, or with a closure.
            ValueError: float16 gradients of an optimizer that is not halfstep's, fused ones included.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        inner = _innermost(optimizer)
        state = self._per_optimizer_states[id(optimizer)]
        straight = False
        if isinstance(inner, HalfOptimizer):
            if any(arg is not None for arg in args):
                raise RuntimeError("Closure use is not currently supported if GradScaler is enabled.")
            # a hook before the step may read gradients: those of the unscaled way are what it expects
            hooked = bool(inner._optimizer_step_pre_hooks or _global_optimizer_pre_hooks)
            straight = state["stage"] is OptState.READY and not hooked
        else:
            self._refuse_float16(optimizer)
        try:
            if straight:
                scale, _ = self._check_scale_growth_tracker("step")
                self._check_inf_per_device(optimizer)
                state["stage"] = OptState.UNSCALED
                inner._inverse_scale = 1.0 / scale.item()
            returned = super().step(optimizer, *args, **kwargs)
        except BaseException:
            if straight:
                state["stage"] = OptState.READY
            raise
        finally:
            inner.__dict__.pop("_inverse_scale", None)
        self._found[inner] = list(state["found_inf_per_device"].values())
        self._note_floor(inner)
        self._drop(id(inner))
        return returned

    def skipped(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether the last `step` of this optimizer, or of the one it wraps, was left out; False before any."""
        if not self._enabled:
            return False
        return any(found.item() for found in self._found.get(_innermost(optimizer), ()))

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
            scale.fill_(self._checked(new_scale))
        else:
            states = self._per_optimizer_states.values()
            found = [f.to(scale.device) for state in states for f in state["found_inf_per_device"].values()]
            if not found:
                raise AssertionError("No inf checks were recorded prior to update.")
            self._move(scale, tracker, torch.stack(found).sum() > 0)
        for key in list(self._converted):
            self._drop(key)
        self._per_optimizer_states.clear()
        self._float16_output = self._scaled = False
        floor, self._floor = self._floor, None
        if floor and self._at_floor == "raise":
            raise RuntimeError(floor)
        if floor and not self._floor_told:
            self._floor_told = True
            warnings.warn(floor + " This is said once.", RuntimeWarning, stacklevel=2)

    # ------------------------------------------------------------------ how

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        super()._lazy_init_scale_growth_tracker(dev)
        self._patience = torch.full((), self._init_patience, dtype=torch.int32, device=dev)
        if self._device_open:
            self._device, self._device_open = dev.type, False

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        # torch calls this twice over: to unscale, and with allow_fp16 and a scale of 1 only to check
        inner = _innermost(optimizer)
        if isinstance(inner, HalfOptimizer):
            for name, param in _graded(inner):
                check_grad(name, param.grad)
            if not allow_fp16:
                self._convert(inner)
        elif not allow_fp16:
            self._refuse_float16(optimizer)
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16 or self._allow_fp16)
        # no param had a gradient: nothing overflowed
        return found or {found_inf.device: found_inf}

    def _convert(self, optimizer: HalfOptimizer) -> None:
        """Replace each 16-bit gradient by its float32 value, still scaled."""
        converted = self._converted.setdefault(id(optimizer), [])
        for _, param in _graded(optimizer):
            grad = param.grad
            if grad.dtype is torch.float32:
                continue
            # only without a grad may grad_dtype change, and None alone lets a 16-bit param hold a float32 grad
            converted.append((param, param.grad_dtype))
            param.grad = None
            param.grad_dtype = None
            param.grad = grad.detach().float()

    def _drop(self, key: int) -> None:
        """Drop the gradients that were converted, so that the next backward finds the param as it was."""
        for param, dtype in self._converted.pop(key, ()):
            param.grad = None
            param.grad_dtype = dtype

    def _refuse_float16(self, optimizer: torch.optim.Optimizer) -> None:
        if self._allow_fp16:
            return
        for name, param in _graded(optimizer):
            if param.grad.dtype is torch.float16:
                kind = type(_innermost(optimizer)).__name__
                raise ValueError(
                    f"Attempting to unscale FP16 gradients. {kind} would step {name} in float16, where small gradients "
                    "and updates are lost. Keep the model and change one line: optimizer = halfstep.AdamW(...), which "
                    "works on float32 weights; or give the scaler allow_fp16=True to unscale in float16 all the same"
                )

    def _move(self, scale: Tensor, tracker: Tensor, overflowed: Tensor) -> None:
        """Move the scale, its growth tracker and its patience, on the device, without waiting for it."""
        patience = self._patience
        assert patience is not None
        tracker.copy_(torch.where(overflowed, 0, tracker + 1))
        grows = tracker == self._growth_interval
        tracker.masked_fill_(grows, 0)
        patience.copy_(torch.where(overflowed, patience - 1, torch.where(grows, self._hysteresis, patience)))
        patience.clamp_(min=0)
        backs_off = overflowed & (patience == 0)
        factor = torch.where(backs_off, self._backoff_factor, torch.where(grows, self._growth_factor, 1.0))
        ceiling = min(self._max_scale, _FLOAT16_CAP) if self._float16_output else self._max_scale
        scale.copy_((scale * factor).clamp(self._min_scale, max(ceiling, self._min_scale)))

    def _note_floor(self, optimizer: Any) -> None:
        """Remember, by name, what overflowed at a scale that cannot fall."""
        if not self.skipped(optimizer) or self.get_scale() > self._min_scale:
            return
        infinite, nan = [], []
        for name, param in _graded(optimizer):
            values = param.grad.coalesce().values() if param.grad.is_sparse else param.grad
            if values.isnan().any():
                nan.append(name)
            elif values.isinf().any():
                infinite.append(name)
        told = []
        if infinite:
            told.append(f"infinite in {_listed(infinite)}: look at what grew in the model, or lower min_scale")
        if nan:
            told.append(f"NaN in {_listed(nan)}: no scale mends that, look for it in the data and the loss")
        self._floor = f"A step was skipped at the smallest scale, {self._min_scale:g}; gradients are {'; '.join(told)}."

    def _checked(self, new_scale: float | Tensor) -> float:
        if isinstance(new_scale, Tensor) and (new_scale.numel() != 1 or new_scale.requires_grad):
            raise AssertionError("new_scale should be a float or a 1-element tensor with requires_grad=False.")
        value = float(new_scale)
        if not self._min_scale <= value <= self._max_scale:
            raise ValueError(
                f"new_scale={value!r}: must lie between min_scale={self._min_scale} and max_scale={self._max_scale}, which "
                "GradScaler(min_scale=..., max_scale=...) sets"
            )
        return value

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Return torch's five entries and ``min_scale``, ``max_scale``, ``hysteresis``, ``_hysteresis_tracker``."""
        if not self._enabled:
            return {}
        bounds = {"min_scale": self._min_scale, "max_scale": self._max_scale, "hysteresis": self._hysteresis}
        return {**super().state_dict(), **bounds, "_hysteresis_tracker": self._get_patience()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of ours or of `torch.amp.GradScaler`, whose missing entries stay as they are here.

        A scale outside the bounds, as torch's own can fall to 0 or rise to infinity, is brought to the nearer one with a
        warning.

        Raises:
            RuntimeError: ``state_dict`` is empty, as a disabled scaler's is.
            ValueError: its scale is NaN.
        """
        if self._enabled and state_dict:
            low = float(state_dict.get("min_scale", self._min_scale))
            high = float(state_dict.get("max_scale", self._max_scale))
            saved = float(state_dict["scale"])
            if math.isnan(saved):
                raise ValueError("scale=nan in the loaded state: must be a number; start from a new GradScaler()")
            scale = min(max(saved, low), high)
            if scale != saved:
                warnings.warn(
                    f"the loaded scale {saved:g} lies outside {low:g} and {high:g}; it is {scale:g} now", stacklevel=2
                )
            state_dict = {**state_dict, "scale": scale}
            self._min_scale, self._max_scale = low, high
            self._hysteresis = int(state_dict.get("hysteresis", self._hysteresis))
            self._init_patience = int(state_dict.get("_hysteresis_tracker", self._hysteresis))
            if self._patience is not None:
                self._patience.fill_(self._init_patience)
        super().load_state_dict(state_dict)

    def _get_patience(self) -> int:
        return self._init_patience if self._patience is None else int(self._patience.item())

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        if self._enabled:
            state["_init_patience"], state["_patience"] = self._get_patience(), None
        del state["_found"]  # of optimizers that do not travel along
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._found = weakref.WeakKeyDictionary()


class GradScalerFP16(GradScaler):
    """`GradScaler` under the teaching implementation's name and signature.

    Args:
        init_scale, growth_factor, backoff_factor, growth_interval, enabled, device: as `GradScaler` takes them.

    Source:
        labml.ai's ``GradScalerFP16``. Any optimizer may be given, and float32 gradients lie in ``.grad``.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        device: str | torch.device | None = None,
    ) -> None:
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)


def _innermost(optimizer: Any) -> Any:
    """Return the optimizer behind wrappers, which keep it as ``.optimizer`` (Accelerate's does)."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return optimizer


def _graded(optimizer: torch.optim.Optimizer) -> Iterable[tuple[str, Any]]:
    """Each param that has a gradient, once, under its name."""
    seen = set()
    for index, group in enumerate(optimizer.param_groups):
        for name, param in named(group, index):
            if param.grad is not None and param not in seen:
                seen.add(param)
                yield name, param


def _tensors(outputs: Any) -> Iterable[Tensor]:
    if isinstance(outputs, Tensor):
        yield outputs
    elif isinstance(outputs, list | tuple):
        for output in outputs:
            yield from _tensors(output)


def _listed(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
