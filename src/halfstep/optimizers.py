"""The optimizers: their signatures and defaults. What they compute is in `rules`."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from halfstep.contracts import Rule
from halfstep.engine import HalfOptimizer
from halfstep.options import LIVE
from halfstep.rules.adam import ADAM
from halfstep.rules.lion import LION
from halfstep.rules.sgd import SGD as PLAIN_SGD
from halfstep.rules.sgd import SGD_MOMENTUM


class Adam(HalfOptimizer):
    r"""Step as `torch.optim.Adam` does in float32, on params of 16 bits.

    $\theta_t = d\,\theta_{t-1} - \alpha_t\, m_t / (a_t \sqrt{v_t} + \epsilon)$, written out in `halfstep.rules.adam`.

    Args:
        params: float16, bfloat16 or float32 params, named pairs, or group dicts; any shape, device and strides, sharded
            (`DTensor`) or not.
        lr, betas, eps, weight_decay, maximize, decoupled_weight_decay: as in torch; ``lr`` may be a tensor.
        capturable: on a GPU, steps are counted there and nothing waits for it, so that a CUDA graph can hold a step;
            of what a replay is to see change, ``lr`` has to be a tensor on the device.
        amsgrad, foreach, differentiable, fused: accepted at None or False.
        weights: how a 16-bit param's float32 weight is kept: "split16" (2 bytes more), "split8" (1), "master32" (4),
            "stochastic" (0, exact in the mean) or "rounded" (0, updates under half an ulp are lost).
        moments: how the averages are kept: "float32" (8 bytes), "bfloat16" (4) or "block8" (2.02; float32 in tensors
            of fewer than 2 dimensions, 4,096 elements or 64 in a row), or a `torch.dtype`.
        backend: "auto", or by name "cpu", "gpu" or "eager".
        seed: of the random bits that "split8", "stochastic", "bfloat16" and "block8" round with.

    Raises:
        ValueError, TypeError: an argument or a param is none of these.

    Exactness:
        With "split16" (float16: from 2**-16 on) or "master32" and float32 moments, bit for bit our own step on float32
        params.
    """

    rule = ADAM

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        weights: str = "split16",
        moments: str | torch.dtype = "float32",
        backend: str = "auto",
        seed: int = 0,
    ) -> None:
        rates = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        form = {"decoupled_weight_decay": decoupled_weight_decay, "absolute_weight_decay": False}
        unused = {"amsgrad": amsgrad, "foreach": foreach, "fused": fused}
        unused |= {"capturable": capturable, "differentiable": differentiable}
        kept = {"weights": weights, "moments": moments, "backend": backend, "seed": seed}
        super().__init__(params, {**rates, **form, "optimized_update": False, **unused, **kept})


class AdamW(Adam):
    """Step as `torch.optim.AdamW` does in float32, on params of 16 bits; see `Adam` for the arguments."""

    # as torch's AdamW, which stays decoupled whatever state it loads
    _live = (*LIVE, "decoupled_weight_decay")

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        weights: str = "split16",
        moments: str | torch.dtype = "float32",
        backend: str = "auto",
        seed: int = 0,
    ) -> None:
        unused = {"foreach": foreach, "capturable": capturable, "differentiable": differentiable, "fused": fused}
        kept = {"weights": weights, "moments": moments, "backend": backend, "seed": seed}
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            decoupled_weight_decay=True,
            **unused,
            **kept,
        )


class Lion(HalfOptimizer):
    r"""Step by the sign of an average of gradients, with decoupled weight decay.

    $\theta_t = (1 - \eta\lambda)\,\theta_{t-1} - \eta\,\mathrm{sign}(\beta_1 m_{t-1} + (1-\beta_1)\, g_t)$ and
    $m_t = \beta_2 m_{t-1} + (1-\beta_2)\, g_t$; one moment, so 4 bytes a parameter less than `AdamW`.

    Args:
        params, capturable, weights, moments, backend, seed: as `Adam` takes them.
        lr: $\eta$; a third to a tenth of what Adam takes, since every weight moves by all of it.
        betas, weight_decay, maximize: $(\beta_1, \beta_2)$, $\lambda$, and whether to climb.

    Raises:
        ValueError, TypeError: an argument or a param is none of these.

    Exactness:
        As `Adam`'s.

    Source:
        Chen et al. 2023, arXiv:2302.06675, algorithm 2.
    """

    rule = LION

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        capturable: bool = False,
        weights: str = "split16",
        moments: str | torch.dtype = "float32",
        backend: str = "auto",
        seed: int = 0,
    ) -> None:
        rates = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        kept = {"weights": weights, "moments": moments, "backend": backend, "seed": seed}
        super().__init__(params, {**rates, "capturable": capturable, **kept})


class SGD(HalfOptimizer):
    r"""Step as `torch.optim.SGD` does in float32, on params of 16 bits, with L2 or decoupled weight decay.

    $b_t = \mu\, b_{t-1} + (1-\tau)\, g_t$ with $b_1 = g_1$, and $\theta_t = d\,\theta_{t-1} - \eta\, b_t$, or with
    ``nesterov`` $- \eta\,(g_t + \mu\, b_t)$. Without momentum nothing is kept but the weight.

    Args:
        params, capturable, weights, moments, backend, seed: as `Adam` takes them.
        lr, momentum, dampening, weight_decay, nesterov, maximize: as in torch.
        foreach, differentiable, fused: accepted at None or False.
        decoupled_weight_decay: decay the weight by $\eta\lambda$ of itself rather than add $\lambda\theta$ to $g$.

    Raises:
        ValueError, TypeError: an argument or a param is none of these, or Nesterov's step lacks a momentum.

    Exactness:
        As `Adam`'s.
    """

    rule = SGD_MOMENTUM

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        weights: str = "split16",
        moments: str | torch.dtype = "float32",
        backend: str = "auto",
        seed: int = 0,
    ) -> None:
        rates = {"lr": lr, "momentum": momentum, "dampening": dampening, "nesterov": nesterov, "maximize": maximize}
        decay = {"weight_decay": weight_decay, "decoupled_weight_decay": decoupled_weight_decay}
        unused = {"foreach": foreach, "capturable": capturable, "differentiable": differentiable, "fused": fused}
        kept = {"weights": weights, "moments": moments, "backend": backend, "seed": seed}
        super().__init__(params, {**rates, **decay, **unused, **kept})

    def _rule(self, group: Mapping[str, Any]) -> Rule:
        return SGD_MOMENTUM if group["momentum"] else PLAIN_SGD
