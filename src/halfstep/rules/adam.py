"""Adam (Kingma & Ba 2015), with decoupled (Loshchilov & Hutter 2019) or L2 weight decay."""

import math
from collections.abc import Mapping
from typing import Any

from halfstep.contracts import Moment, Rule
from halfstep.primitives import div, sqrt
from halfstep.rules.decay import decay_scalars, pulled


def adam(weight, grad, exp_avg, exp_avg_sq, one_minus_beta1, one_minus_beta2, decay, l2, step_size, denom_scale, eps):
    #: $g_t \leftarrow g_t + \lambda_2\,\theta_{t-1}$, L2 weight decay
    grad = pulled(grad, weight, l2)
    #: $m_t = m_{t-1} + (1-\beta_1)\,(g_t - m_{t-1})$
    exp_avg = exp_avg + (grad - exp_avg) * one_minus_beta1
    #: $v_t = v_{t-1} + (1-\beta_2)\,(g_t^2 - v_{t-1})$
    exp_avg_sq = exp_avg_sq + (grad * grad - exp_avg_sq) * one_minus_beta2
    #: $\theta_t = d\,\theta_{t-1} - \alpha_t\, m_t \,/\, (a_t\sqrt{v_t} + \epsilon)$
    weight = weight * decay - step_size * div(exp_avg, sqrt(exp_avg_sq) * denom_scale + eps)
    return weight, exp_avg, exp_avg_sq


def scalars(group: Mapping[str, Any], step: int) -> tuple[float, ...]:
    r"""The scalars of step number ``step``: $1-\beta_1$, $1-\beta_2$, $d$, $\lambda_2$, $\alpha_t$, $a_t$, $\epsilon$.

    Adam as published divides both averages by their bias corrections, $\alpha_t = \eta/(1-\beta_1^t)$ and
    $a_t = 1/\sqrt{1-\beta_2^t}$. With ``optimized_update`` the correction of the square root moves into the step,
    $\alpha_t = \eta\sqrt{1-\beta_2^t}/(1-\beta_1^t)$ and $a_t = 1$, so that epsilon stands beside the bare
    $\sqrt{v_t}$ (the paper's own remark at the end of its section 2).
    """
    lr, (beta1, beta2) = group["lr"], map(float, group["betas"])
    correction1, correction2 = 1 - beta1**step, math.sqrt(1 - beta2**step)
    if group["optimized_update"]:
        step_size, denom_scale = lr * (correction2 / correction1), 1.0
    else:
        step_size, denom_scale = lr * (1 / correction1), 1 / correction2
    decay = decay_scalars(group, absolute=group["absolute_weight_decay"])
    return 1 - beta1, 1 - beta2, *decay, step_size, denom_scale, float(group["eps"])


ADAM = Rule("adam", (Moment("exp_avg", signed=True), Moment("exp_avg_sq", square=True)), adam, scalars)
