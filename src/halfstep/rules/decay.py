"""Weight decay, which rules share: decoupled, as a factor on the weight, or L2, as a pull on the gradient."""

from collections.abc import Mapping
from typing import Any

from halfstep.primitives import select


def pulled(grad, weight, l2):
    #: $g_t \leftarrow g_t + \lambda_2\,\theta_{t-1}$
    pull = weight * l2
    # an infinite weight that is not decayed, infinity times 0, leaves its gradient alone
    return grad + select(pull == pull, pull, 0.0)


def decoupled(group: Mapping[str, Any]) -> float:
    r"""The factor $d = 1 - \eta\lambda$ on the weight."""
    return 1 - group["lr"] * float(group["weight_decay"])


def decay_scalars(group: Mapping[str, Any], absolute: bool = False) -> tuple[float, float]:
    r"""The factor $d$ on the weight and the share $\lambda_2$ of it in the gradient.

    Decoupled, as above or where ``absolute`` $d = 1 - \lambda$, and $\lambda_2 = 0$; L2, $1$ and $\lambda$.
    """
    weight_decay = float(group["weight_decay"])
    if not group["decoupled_weight_decay"]:
        return 1.0, weight_decay
    return 1 - weight_decay if absolute else decoupled(group), 0.0
