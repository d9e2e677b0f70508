"""The teaching implementation's names, with its signatures and its formulas: labml.ai's annotated 16-bit Adam."""

from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from halfstep.engine import HalfOptimizer
from halfstep.rules.adam import ADAM
from halfstep.scaler import GradScaler


class WeightDecay:
    r"""Say how `AdamFP16` decays its weights.

    Decoupled, $\theta \leftarrow (1 - \eta\lambda)\,\theta$ before the step, or $(1 - \lambda)\,\theta$ where
    ``absolute``; otherwise L2, $g \leftarrow g + \lambda\,\theta$.

    Args:
        weight_decay: $\lambda$, >= 0.
        weight_decouple: decay the weight itself rather than its gradient.
        absolute: leave the learning rate out; means nothing with L2.

    Source:
        labml.ai's ``WeightDecay``. There ``__call__`` computes; here the compiled rule does, so a subclass cannot.
    """

    def __init__(self, weight_decay: float = 0.0, weight_decouple: bool = True, absolute: bool = False) -> None:
        self.weight_decay = weight_decay
        self.weight_decouple = weight_decouple
        self.absolute = absolute

    def defaults(self) -> dict[str, Any]:
        """Return the options of a param group that this decay stands for."""
        return {
            "weight_decay": self.weight_decay,
            "decoupled_weight_decay": self.weight_decouple,
            "absolute_weight_decay": self.absolute,
        }


class AdamFP16(HalfOptimizer):
    r"""Step as the teaching implementation does: Adam on a float32 copy of each 16-bit param.

    $\theta_t = \theta_{t-1} - \eta\,\frac{\sqrt{1-\beta_2^t}}{1-\beta_1^t}\,\frac{m_t}{\sqrt{v_t} + \epsilon}$, or with
    ``optimized_update=False`` Adam's own $\eta\,\hat m_t / (\sqrt{\hat v_t} + \epsilon)$.

    Args:
        params: as `AdamW` takes them.
        lr, betas, eps: as in Adam; ``eps`` stands beside the bare root with ``optimized_update``.
        weight_decay: a `WeightDecay`.
        optimized_update: which of the two forms.
        defaults: further defaults of param groups, such as ``{"weights": "split16"}``.

    Raises:
        TypeError: ``weight_decay`` is no `WeightDecay`, or a subclass that computes in ``__call__``.

    Source:
        labml.ai's ``AdamFP16``. It keeps its master and moments in float32 through ``load_state_dict``, lets clipping
        between ``unscale_`` and ``step`` count, and never replaces a param's storage.
    """

    rule = ADAM

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-16,
        weight_decay: WeightDecay = WeightDecay(),  # noqa: B008, the teaching implementation's signature; never changed
        optimized_update: bool = True,
        defaults: dict[str, Any] | None = None,
    ) -> None:
        if not isinstance(weight_decay, WeightDecay):
            raise TypeError(f"weight_decay={weight_decay!r}: must be a WeightDecay, as WeightDecay({weight_decay!r})")
        if callable(weight_decay):
            raise TypeError(
                f"weight_decay={type(weight_decay).__name__}(...) defines __call__, which is not run: the step is "
                "compiled. Choose among WeightDecay's own three forms, or write a rule (halfstep.rules)"
            )
        kept = {"weights": "master32", "moments": "float32", "backend": "auto", "seed": 0, "maximize": False}
        rates = {"lr": lr, "betas": betas, "eps": eps, "optimized_update": optimized_update}
        super().__init__(params, {**kept, **(defaults or {}), **rates, **weight_decay.defaults()})

    @property
    def grad_fp32(self) -> MappingProxyType[Tensor, Tensor]:
        """The float32 gradients of 16-bit params, read-only, between the scaler's ``unscale_`` and ``step``."""
        params = (param for group in self.param_groups for param in group["params"] if param.grad is not None)
        half = (p for p in params if p.dtype is not torch.float32 and p.grad.dtype is torch.float32)
        return MappingProxyType({param: param.grad for param in half})


class GradScalerFP16(GradScaler):
    """`GradScaler` under the teaching implementation's name and signature.

    Args:
        init_scale, growth_factor, backoff_factor, growth_interval, enabled, device: as `GradScaler` takes them.

    Source:
        labml.ai's ``GradScalerFP16``. Float32 gradients lie in ``.grad``; float16 ones of another library's optimizer,
        unscaled in 16 bits there, are refused (``GradScaler(allow_fp16=True)`` takes them).
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        device: str | torch.device | None = None,
    ) -> None:
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
