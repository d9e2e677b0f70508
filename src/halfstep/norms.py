"""The norm of all of an optimizer's gradients, and the clip by it that a step does."""

import itertools
import math
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfstep import backends
from halfstep.backends.pieces import chunks as chunks_of
from halfstep.contracts import CHUNK
from halfstep.formats import GRADS
from halfstep.gradients import everywhere, graded, params_of, there
from halfstep.shards import Spread, agreed, spread_of
from halfstep.tensors import checked_grad

#: How many chunks are summed at a time, a power of two: their sums take 8 MiB at most, however large the model.
WINDOW = 2**20


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


def squares(optimizer: torch.optim.Optimizer) -> Squares:
    """Read all gradients as they are, once, and sum their squares in float64.

    Neighbours among the sums of all chunks, in the order of the params, are added in pairs, and so on with what is
    left: the same bits from every backend. Of sharded params each process sums what it has, and these sums are added in
    one order; where any process has a gradient that is not finite the total is not in all. Nothing waits for a device.

    Raises:
        TypeError: a gradient is sparse, or of a dtype that no step takes; or a param is FSDP1's.
    """
    over, kinds = everywhere(optimizer), []
    whole, parts = _total(optimizer, None, kinds), [_total(optimizer, each, kinds) for each in over]
    if not over:
        return Squares(whole, kinds)
    # of what has no gradients the sum is on the CPU
    device = next((number.device for number in (whole, *parts) if number.device.type != "cpu"), whole.device)
    total, parts = there(whole, device), [there(part, device) for part in parts]
    bad = agreed((~torch.stack([total, *parts]).isfinite()).any().double(), over)
    for each, part in zip(over, parts, strict=True):
        total = total + each.summed(part)
    return Squares(torch.where((bad > 0) & total.isfinite(), math.inf, total), kinds)


def _total(optimizer: torch.optim.Optimizer, which: Spread | None, kinds: list[tuple[list[str], Tensor]]) -> Tensor:
    """The sum of the squares of what lies here of the params that are spread so; ``kinds`` takes their kinds."""
    totals, waiting, requested = [], None, ""
    for window in _windows(optimizer, which):
        sums = _sums(window, kinds)
        if waiting is None:
            waiting, requested = sums[:0], window[0][0]
        *whole, waiting = _split(torch.cat([waiting, sums.to(waiting.device)]) if len(waiting) else sums)
        totals += [backends.total(sums, requested) for sums in whole]
    if waiting is None:
        return torch.zeros((), dtype=torch.float64)
    rest = backends.total(waiting, requested)
    return backends.total(torch.stack([*totals, rest]), requested) if totals else rest


def _windows(optimizer: torch.optim.Optimizer, which: Spread | None) -> Iterator[list[tuple[str, str, Tensor]]]:
    """Gradients of params that are spread so, each with its group's backend and its param's name.

    They come in lists of about `WINDOW` chunks.
    """
    window, chunks = [], 0
    for group, name, param in graded(optimizer):
        if spread_of(param) != which:
            continue
        grad = checked_grad(name, param).detach()
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
        optimizer, grad, version: who has them, and the first of them, if any, to see whether they are still the same.
    """

    norm: float | Tensor
    max_norm: float
    inverse: float | Tensor
    optimizer: torch.optim.Optimizer
    grad: Tensor | None
    version: int

    @classmethod
    def of(
        cls, optimizer: torch.optim.Optimizer, norm: float | Tensor, max_norm: float, inverse: float | Tensor
    ) -> "Clip":
        """Return the clip of the gradients that ``optimizer`` has now; it may have none where other processes have."""
        grad = _first(optimizer)
        # the optimizer that steps keeps this, and would keep itself
        who = weakref.proxy(optimizer)
        return cls(norm, max_norm, inverse, who, grad, 0 if grad is None else grad._version)

    def holds(self) -> bool:
        """Whether it is for the gradients that there are now, and not for earlier ones.

        Raises:
            RuntimeError: they are the same tensors with other values.
        """
        same = _first(self.optimizer) is self.grad
        if same and self.grad is not None and self.grad._version != self.version:
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


def _first(optimizer: torch.optim.Optimizer) -> Tensor | None:
    """The first gradient, or None where there is none."""
    return next((param.grad for param in params_of(optimizer) if param.grad is not None), None)


def overflowed(total: Tensor) -> Tensor:
    """Return float32 1 where a sum or norm is not finite, else 0, on its device, as torch's scaler keeps it."""
    return (~total.isfinite()).float()
