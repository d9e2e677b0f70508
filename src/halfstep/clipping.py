"""The norm of all gradients and the clip by it, fused with the step: no gradient is written."""

import math
from typing import Any

import torch
from torch import Tensor

from halfstep.engine import HalfOptimizer
from halfstep.gradients import holder, innermost
from halfstep.norms import Clip, squares
from halfstep.scaler import GradScaler
from halfstep.tensors import type_of


def clip_grad_norm_(optimizer: Any, max_norm: float, scaler: GradScaler | None = None) -> Tensor:
    r"""Let the next step clip: it multiplies the gradients $g$ by $\min(1, m / (\lVert g \rVert + 10^{-6}))$.

    Call it between the last backward and the step. The gradients stay as they are; one read of them checks and sums
    squares, and the step's own unscales, clips and updates. The step drops the clip, also where it is skipped.

    Args:
        optimizer: one of halfstep's, or a wrapper that has it as ``.optimizer``.
        max_norm: $m$, >= 0, in units of the unscaled gradients.
        scaler: what scaled the loss and will step; None where nothing is scaled.

    Returns:
        $\lVert g \rVert$, the 2-norm of all of the optimizer's gradients together, unscaled: float32, no dimensions, on
        the CPU. It is not finite where a gradient is not; then a scaler skips the step, and without one it raises. With
        ``capturable`` it stays on the device, nothing waits for it, and such a step is left out.

    Raises:
        TypeError: ``optimizer`` or ``scaler`` is not halfstep's, or a param is a slice of FSDP1's.
        ValueError: ``max_norm`` is negative or NaN.
        RuntimeError: the scaler has stepped and was not updated since.

    Exactness:
        Squares are added in float64, in one order on every backend. The factor and the scale's inverse are one number
        to the step, rounded once, where `torch.nn.utils.clip_grad_norm_` on float32 gradients rounds twice.
    """
    inner = innermost(optimizer)
    if not isinstance(inner, HalfOptimizer):
        raise TypeError(
            f"optimizer is {type_of(inner)}: must be one of halfstep's, whose step clips; for others use "
            "torch.nn.utils.clip_grad_norm_(params, max_norm) after scaler.unscale_(optimizer)"
        )
    if not isinstance(scaler, GradScaler | None):
        raise TypeError(f"scaler is {type_of(scaler)}: must be the halfstep.GradScaler that scaled the loss, or None")
    if not (isinstance(max_norm, int | float | Tensor) and max_norm >= 0):
        raise ValueError(f"max_norm={max_norm!r}: must be a number >= 0, the largest norm of the unscaled gradients")
    inverse = 1.0 if scaler is None else scaler.inverse_of(inner)
    owner = holder(optimizer)
    total = squares(owner).total
    # roots and products of float64 are rounded alike on the host and on a device
    norm = (total.sqrt() if inner.capturable else math.sqrt(total.item())) * inverse
    inner._clip = Clip.of(owner, norm, float(max_norm), inverse)
    return torch.as_tensor(norm).float()
