"""Loss scales: what they may be, how they are rounded, and what a saved scaler may say."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

#: The largest power of two that float16 holds: the gradient of a scaled float16 output is the scale itself.
FLOAT16_CAP = 2.0**15
#: Between this and its inverse a scale and its inverse are normal float32 numbers.
LEAST = 2.0**-126


def bounds(min_scale: float, max_scale: float) -> tuple[float, float]:
    """Return both in float32; raise unless they can bound a scale."""
    low, high = rounded(min_scale), rounded(max_scale)
    if not LEAST <= low <= high <= 1 / LEAST:
        raise ValueError(
            f"min_scale={min_scale!r}, max_scale={max_scale!r}: must be 2**-126 <= min_scale <= max_scale <= 2**126"
        )
    return low, high


def _whole(least: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and least <= value < 2**31


def _real(low: float, high: float) -> Callable[[Any], bool]:
    return lambda value: type(value) in (int, float) and low < value < high


#: What each entry of a scaler's state may be, in words and as a test.
_ENTRIES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "scale": ("a number above 0 and finite", _real(0, math.inf)),
    "growth_factor": ("a number above 1 and finite", _real(1, math.inf)),
    "backoff_factor": ("a number above 0 and below 1", _real(0, 1)),
    "growth_interval": ("a whole number", _whole(-(2**31))),
    "_growth_tracker": ("a whole number, at least 0", _whole(0)),
    "min_scale": ("a number", _real(-math.inf, math.inf)),
    "max_scale": ("a number", _real(-math.inf, math.inf)),
    "hysteresis": ("a whole number, at least 1", _whole(1)),
    "_hysteresis_tracker": ("a whole number, at least 0", _whole(0)),
}


def completed(saved: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return a scaler's saved state with what it lacks, where it is torch's, from our ``own``.

    Raises:
        ValueError: an entry is missing, unknown or has no meaning; the text names it.
    """
    if not isinstance(saved, Mapping):
        raise ValueError(f"the loaded state is a {type(saved).__name__}, not the dict of a scaler's state")
    state = {**own, **saved}
    state.setdefault("_hysteresis_tracker", state["hysteresis"])
    for name, (allowed, fits) in _ENTRIES.items():
        if name not in state:
            raise ValueError(f"the loaded state of a scaler has no {name!r}: it has {', '.join(map(repr, state))}")
        if not fits(state[name]):
            raise ValueError(
                f"{name}={state[name]!r} in the loaded state: must be {allowed}; load an earlier state, or start from "
                "a new GradScaler()"
            )
    if extra := sorted(set(map(str, state)) - set(_ENTRIES)):
        raise ValueError(f"the loaded state has {', '.join(map(repr, extra))}, which no scaler keeps: take that out")
    low, high = bounds(state["min_scale"], state["max_scale"])
    return {**state, "min_scale": low, "max_scale": high}


def rounded(number: float | Tensor) -> float:
    """Round as the scale itself is rounded, or a scale at a bound would lie beyond it."""
    return torch.tensor(float(number), dtype=torch.float32, device="cpu").item()
