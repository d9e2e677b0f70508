"""RMSprop (Tieleman & Hinton 2012), as someone else would add it: a rule of one moment."""

from collections.abc import Mapping
from typing import Any

from halfstep.contracts import Moment, Rule
from halfstep.primitives import div, sqrt


def rmsprop(weight, grad, square_avg, one_minus_alpha, lr, eps):
    #: $v_t = v_{t-1} + (1-\alpha)\,(g_t^2 - v_{t-1})$
    square_avg = square_avg + (grad * grad - square_avg) * one_minus_alpha
    #: $\theta_t = \theta_{t-1} - \eta\, g_t / (\sqrt{v_t} + \epsilon)$
    return weight - lr * div(grad, sqrt(square_avg) + eps), square_avg


def scalars(group: Mapping[str, Any], step: int) -> tuple[float, ...]:
    return 1 - group["alpha"], group["lr"], group["eps"]


RMSPROP = Rule("rmsprop", (Moment("square_avg", square=True),), rmsprop, scalars)
