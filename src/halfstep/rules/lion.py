"""Lion (Chen et al. 2023, arXiv:2302.06675): the sign of an average, with decoupled weight decay."""

from collections.abc import Mapping
from typing import Any

from halfstep.contracts import Moment, Rule
from halfstep.primitives import select
from halfstep.rules.decay import decoupled


def lion(weight, grad, exp_avg, one_minus_beta1, one_minus_beta2, decay, lr):
    #: $c_t = m_{t-1} + (1-\beta_1)\,(g_t - m_{t-1})$
    blend = exp_avg + (grad - exp_avg) * one_minus_beta1
    #: $\theta_t = d\,\theta_{t-1} - \eta\,\mathrm{sign}(c_t)$; the sign of 0 is 0, and of NaN NaN
    sign = select(blend > 0.0, 1.0, select(blend < 0.0, -1.0, blend))
    weight = weight * decay - sign * lr
    #: $m_t = m_{t-1} + (1-\beta_2)\,(g_t - m_{t-1})$
    exp_avg = exp_avg + (grad - exp_avg) * one_minus_beta2
    return weight, exp_avg


def scalars(group: Mapping[str, Any], step: int) -> tuple[float, ...]:
    r"""The scalars of any step: $1-\beta_1$, $1-\beta_2$, $d = 1 - \eta\lambda$, $\eta$."""
    beta1, beta2 = map(float, group["betas"])
    return 1 - beta1, 1 - beta2, decoupled(group), group["lr"]


LION = Rule("lion", (Moment("exp_avg", signed=True),), lion, scalars)
