"""Stochastic gradient descent, plain or with momentum (Sutskever et al. 2013), as torch defines it."""

from collections.abc import Mapping
from typing import Any

from halfstep.contracts import Moment, Rule
from halfstep.rules.decay import decay_scalars, pulled


def sgd(weight, grad, decay, l2, lr):
    #: $\theta_t = d\,\theta_{t-1} - \eta\, g_t$
    weight = weight * decay - pulled(grad, weight, l2) * lr
    return (weight,)


def sgd_momentum(weight, grad, momentum_buffer, decay, l2, lr, momentum, undamped, direct, through):
    grad = pulled(grad, weight, l2)
    #: $b_t = \mu\, b_{t-1} + (1-\tau)\, g_t$, and $b_1 = g_1$
    momentum_buffer = momentum_buffer * momentum + grad * undamped
    #: $\theta_t = d\,\theta_{t-1} - \eta\, b_t$, or with Nesterov's look ahead $- \eta\,(g_t + \mu\, b_t)$
    weight = weight * decay - (grad * direct + momentum_buffer * through) * lr
    return weight, momentum_buffer


def sgd_scalars(group: Mapping[str, Any], step: int) -> tuple[float, ...]:
    r"""The scalars of any step: $d$, $\lambda_2$, $\eta$."""
    return *decay_scalars(group), group["lr"]


def momentum_scalars(group: Mapping[str, Any], step: int) -> tuple[float, ...]:
    r"""Those of plain SGD, then $\mu$, $1-\tau$ (1 at the first step), and the step's shares of $g_t$ and $b_t$."""
    factor = float(group["momentum"])
    undamped = 1.0 if step == 1 else 1 - float(group["dampening"])
    return (*sgd_scalars(group, step), factor, undamped, *((1.0, factor) if group["nesterov"] else (0.0, 1.0)))


SGD = Rule("sgd", (), sgd, sgd_scalars)
SGD_MOMENTUM = Rule("sgd_momentum", (Moment("momentum_buffer", signed=True),), sgd_momentum, momentum_scalars)
