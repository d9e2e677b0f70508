"""Loss scales: what they may be, and how they are rounded."""

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


def rounded(number: float | Tensor) -> float:
    """Round as the scale itself is rounded, or a scale at a bound would lie beyond it."""
    return torch.tensor(float(number), dtype=torch.float32, device="cpu").item()
