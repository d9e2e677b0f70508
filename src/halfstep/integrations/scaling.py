"""The scaler that frameworks are given: they update it after each optimizer's step."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from halfstep.scaler import GradScaler


class FrameworkScaler(GradScaler):
    """A `halfstep.GradScaler` for loops that update it after each optimizer's step: one iteration moves the scale once.

    An iteration begins with the first `scale` after an update. Until the next one begins, gradients are unscaled by
    what they were scaled by, however the scale has moved, and each further update takes the place of the one before.

    Args:
        options: as `halfstep.GradScaler` takes them.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        #: once this iteration has been updated: the scale that its gradients bear, and what an update moves as it was
        self._borne: Tensor | None = None
        self._before: list[Tensor] = []

    def scale(self, outputs: Any) -> Any:
        """Multiply by the scale; the first time after an update an iteration begins."""
        self._begin()
        return super().scale(outputs)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by what they were scaled by, unless this iteration has done so."""
        if not self._enabled or self._state(optimizer)["stage"] is OptState.UNSCALED:
            return
        with self._as_borne():
            super().unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Step the optimizer unless a gradient of its own is infinite or NaN."""
        with self._as_borne():
            return super().step(optimizer, *args, **kwargs)

    def inverse_of(self, optimizer: torch.optim.Optimizer) -> float | Tensor:
        """Return what unscales the gradients of ``optimizer`` as they are now."""
        with self._as_borne():
            return super().inverse_of(optimizer)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Move the scale by what all optimizers that stepped in this iteration have found so far."""
        if not self._enabled:
            return
        moving = [*self._check_scale_growth_tracker("update"), self._patience]
        if self._borne is None:
            self._before = [number.clone() for number in moving]
            self._borne = self._before[0]
        elif new_scale is None:
            for number, before in zip(moving, self._before, strict=True):
                number.copy_(before)
        super().update(new_scale)
        if new_scale is not None:
            self._before = [number.clone() for number in moving]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, with which an iteration begins."""
        self._begin()
        super().load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        self._begin()
        return super().__getstate__()

    def _begin(self) -> None:
        """Begin an iteration where the last one was updated."""
        if self._borne is not None:
            self._borne = None
            super()._forget()

    def _forget(self) -> None:
        """Keep what is known of the iteration's optimizers: others may have to step yet."""

    @contextmanager
    def _as_borne(self) -> Iterator[None]:
        """Let the scale be what the gradients of this iteration bear."""
        if self._borne is None:
            yield
            return
        moved, self._scale = self._scale, self._borne
        try:
            yield
        finally:
            self._scale = moved
