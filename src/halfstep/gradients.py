"""An optimizer's gradients: named, refused, widened to float32, dropped, and looked through for what is not finite."""

import inspect
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_pre_hooks

from halfstep import backends
from halfstep.backends.pieces import chunks as chunks_of
from halfstep.contracts import CHUNK
from halfstep.engine import HalfOptimizer
from halfstep.formats import GRADS
from halfstep.tensors import check_grad, named

#: How many chunks are summed at a time, a power of two: their sums take 8 MiB at most, however large the model.
WINDOW = 2**20


def graded(optimizer: torch.optim.Optimizer) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Each param that has a gradient, once, with its group and under its name."""
    seen = set()
    for index, group in enumerate(optimizer.param_groups):
        for name, param in named(group, index):
            if param.grad is not None and param not in seen:
                seen.add(param)
                yield group, name, param


def innermost(optimizer: Any) -> Any:
    """Return the optimizer behind wrappers, which keep it as ``.optimizer`` (Accelerate's does)."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return optimizer


def capturable(optimizer: Any) -> bool:
    """Whether the host must not wait for the device that steps: an optimizer of ours was told so."""
    inner = innermost(optimizer)
    return isinstance(inner, HalfOptimizer) and inner.capturable


def watched(optimizer: Any) -> bool:
    """Whether gradients may be read on the way into the step, so that they must be float32 and unscaled by then."""
    inner = innermost(optimizer)
    own_step = inspect.unwrap(type(inner).step) is not inspect.unwrap(HalfOptimizer.step)
    return bool(optimizer is not inner or own_step or inner._optimizer_step_pre_hooks or _global_optimizer_pre_hooks)


def check(optimizer: HalfOptimizer) -> None:
    """Raise for a gradient that no step takes."""
    for _, name, param in graded(optimizer):
        check_grad(name, param.grad)


def refuse_float16(optimizer: torch.optim.Optimizer) -> None:
    """Raise where an optimizer that is not halfstep's would step in float16; torch's fused ones do so in silence."""
    for _, name, param in graded(optimizer):
        if torch.float16 in (param.dtype, param.grad.dtype):
            raise ValueError(
                f"Attempting to unscale FP16 gradients. {type(optimizer).__name__} would step {name} in float16, where "
                "small gradients and updates are lost. Keep the model and change one line: optimizer = "
                "halfstep.AdamW(...), which works on float32 weights; or give the scaler allow_fp16=True to unscale in "
                "float16 all the same"
            )


def widen(optimizer: HalfOptimizer, widened: dict[Tensor, torch.dtype | None]) -> None:
    """Replace each 16-bit gradient by its float32 value, noting in ``widened`` what the param's grad_dtype was."""
    for _, _, param in graded(optimizer):
        if param.grad.dtype is not torch.float32:
            grad = param.grad.detach().float()
            # only without a grad may grad_dtype change, and None alone lets a 16-bit param hold a float32 grad
            widened.setdefault(param, param.grad_dtype)
            param.grad = None
            param.grad_dtype = None
            param.grad = grad


def drop(widened: Mapping[Any, torch.dtype | None]) -> None:
    """Drop the gradients of these params and restore their grad_dtype: the next backward finds them as they were."""
    for param, dtype in widened.items():
        param.grad = None
        param.grad_dtype = dtype


class Squares(NamedTuple):
    """What one read of all gradients tells: the sum of their squares, and what is not finite.

    Args:
        total: float64, no dimensions, on the gradients' device, or on the first of several; not finite where a gradient
            is not.
        kinds: names of params, and of each one's gradient 0 where it is finite, 1 where infinite, 2 where NaN.
    """

    total: Tensor
    kinds: list[tuple[list[str], Tensor]]

    def not_finite(self) -> dict[str, str]:
        """Name the params whose gradients are not finite, and say which: "NaN", or "infinite" alone."""
        found: dict[str, int] = {}
        for names, kinds in self.kinds:
            for name, kind in zip(names, kinds.tolist(), strict=True):
                found[name] = max(kind, found.get(name, 0))
        return {name: ("infinite", "NaN")[kind - 1] for name, kind in found.items() if kind}


def squares(optimizer: HalfOptimizer) -> Squares:
    """Read all gradients as they are, once, and sum their squares in float64.

    Neighbours among the sums of all chunks, in the order of the params, are added in pairs, and so on with what is
    left: the same bits from every backend. Nothing waits for a device.

    Raises:
        TypeError: a gradient is sparse, or of a dtype that no step takes.
    """
    totals, kinds, waiting, requested = [], [], None, ""
    for window in _windows(optimizer):
        sums = _sums(window, kinds)
        if waiting is None:
            waiting, requested = sums[:0], window[0][0]
        *whole, waiting = _split(torch.cat([waiting, sums.to(waiting.device)]) if len(waiting) else sums)
        totals += [backends.total(sums, requested) for sums in whole]
    if waiting is None:
        return Squares(torch.zeros((), dtype=torch.float64), [])
    rest = backends.total(waiting, requested)
    return Squares(backends.total(torch.stack([*totals, rest]), requested) if totals else rest, kinds)


def _windows(optimizer: HalfOptimizer) -> Iterator[list[tuple[str, str, Tensor]]]:
    """All gradients, each with its group's backend and its param's name, in lists of about `WINDOW` chunks."""
    window, chunks = [], 0
    for group, name, param in graded(optimizer):
        check_grad(name, param.grad)
        grad = param.grad.detach()
        for piece in grad.view(-1).split(WINDOW * CHUNK) if grad.is_contiguous() else [grad]:
            window.append((group["backend"], name, piece))
            chunks += chunks_of(piece)
            if chunks >= WINDOW:
                yield window
                window, chunks = [], 0
    if window:
        yield window


def _sums(window: Sequence[tuple[str, str, Tensor]], kinds: list[tuple[list[str], Tensor]]) -> Tensor:
    """The sums of the squares of each gradient's chunks, in order, whoever takes them; ``kinds`` takes their kinds."""
    places = [0, *itertools.accumulate(chunks_of(grad) for _, _, grad in window)]
    batches: dict[Any, list[int]] = {}
    for k, (requested, _, grad) in enumerate(window):
        batches.setdefault((requested, grad.dtype, grad.device), []).append(k)
    sums = None
    for (requested, dtype, _), batch in batches.items():
        found, kind = backends.squares(GRADS[dtype], [window[k][2] for k in batch], requested)
        kinds.append(([window[k][1] for k in batch], kind))
        if len(batches) == 1:
            return found
        if sums is None:
            sums = torch.zeros(places[-1], dtype=torch.float64, device=found.device)
        sizes = [places[k + 1] - places[k] for k in batch]
        for k, piece in zip(batch, found.to(sums.device, non_blocking=True).split(sizes), strict=True):
            sums[places[k] : places[k + 1]] = piece
    assert sums is not None
    return sums


def _split(sums: Tensor) -> list[Tensor]:
    """Cut what is a whole window's from the front; the last is what is left, maybe nothing."""
    whole = len(sums) // WINDOW * WINDOW
    return [*(sums[:whole].split(WINDOW) if whole else ()), sums[whole:]]


@dataclass(frozen=True)
class Clip:
    """A clip that the next step does, and the gradients that it is for.

    Args:
        norm: of the unscaled gradients; a tensor where nothing waits for the device.
        max_norm: what it should not exceed.
        inverse: what the step multiplies these gradients by to unscale them, likewise.
        param, grad, version: a param with a gradient, to see whether the gradients are still the same.
    """

    norm: float | Tensor
    max_norm: float
    inverse: float | Tensor
    param: Tensor
    grad: Tensor
    version: int

    @classmethod
    def of(
        cls, optimizer: HalfOptimizer, norm: float | Tensor, max_norm: float, inverse: float | Tensor
    ) -> "Clip | None":
        """Return the clip of the gradients that ``optimizer`` has now, or None where it has none."""
        for _, _, param in graded(optimizer):
            return cls(norm, max_norm, inverse, param, param.grad, param.grad._version)
        return None

    def holds(self) -> bool:
        """Whether it is for the gradients that there are now, and not for earlier ones.

        Raises:
            RuntimeError: they are the same tensors with other values.
        """
        same = self.param.grad is self.grad
        if same and self.grad._version != self.version:
            raise RuntimeError(
                "the gradients have changed since clip_grad_norm_ took their norm: call it after the last backward and "
                "right before the step"
            )
        return same

    def check(self, inverse: float | Tensor) -> None:
        """Raise unless ``inverse`` is what the gradients were said to be unscaled by, as far as the host knows."""
        if isinstance(inverse, Tensor) and isinstance(self.inverse, Tensor):
            return
        if isinstance(inverse, Tensor) or isinstance(self.inverse, Tensor):
            raise RuntimeError(
                "clip_grad_norm_ was not given the scaler that steps, or not the one that does: call "
                "clip_grad_norm_(optimizer, max_norm, scaler) with it"
            )
        if inverse != self.inverse:
            raise RuntimeError(
                f"clip_grad_norm_ took gradients scaled by {1 / self.inverse:g}, and they are scaled by "
                f"{1 / inverse:g}: call clip_grad_norm_(optimizer, max_norm, scaler) with the scaler that steps"
            )

    def factor(self, inverse: float | Tensor) -> float | Tensor:
        """Return what the step multiplies the gradients by, besides ``inverse``; 1 where they are others.

        Raises:
            RuntimeError: the gradients changed, are not finite, or were not scaled as was said.
        """
        if not self.holds():
            return 1.0
        self.check(inverse)
        if isinstance(self.norm, Tensor):
            return (self.max_norm / (self.norm + 1e-6)).clamp(max=1.0)
        if not math.isfinite(self.norm):
            raise RuntimeError(
                f"the gradients' norm is {self.norm}, so that nothing can be clipped to: leave the step out "
                "(zero_grad()), or step by a halfstep.GradScaler, which does that by itself"
            )
        return min(1.0, self.max_norm / (self.norm + 1e-6))

    def skip(self) -> Tensor | None:
        """Return on the device whether the norm is not finite, where the host does not wait to know."""
        return overflowed(self.norm) if isinstance(self.norm, Tensor) and self.holds() else None


def overflowed(total: Tensor) -> Tensor:
    """Return float32 1 where a sum or norm is not finite, else 0, on its device, as torch's scaler keeps it."""
    return (~total.isfinite()).float()


def there(number: Tensor, device: torch.device) -> Tensor:
    """Return a number without dimensions on ``device``, without waiting for that."""
    if number.device.type == "cpu":
        return torch.full((), number.item(), dtype=number.dtype, device=device)
    return number.to(device, non_blocking=True)


def not_finite(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Name the params whose gradients are not finite, and say which: "NaN", or "infinite" alone."""
    names = {}
    for _, name, param in graded(optimizer):
        values = param.grad.coalesce().values() if param.grad.is_sparse else param.grad
        if values.isnan().any():
            names[name] = "NaN"
        elif values.isinf().any():
            names[name] = "infinite"
    return names


def described(names: Mapping[str, str]) -> str:
    """Say what `not_finite` found, and what to do."""
    infinite, nan = ([name for name, how in names.items() if how == kind] for kind in ("infinite", "NaN"))
    told = []
    if infinite:
        told.append(f"infinite in {_listed(infinite)}, so look at what grew in the model or lower min_scale")
    if nan:
        told.append(f"NaN in {_listed(nan)}, which no scale mends: look for it in the data and the loss")
    return f"gradients are {'; '.join(told)}" if told else "a gradient on another rank is not finite"


def _listed(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
