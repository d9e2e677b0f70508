"""Float16 in Accelerate: a gradient scaler of halfstep's, whatever the accelerator's mixed_precision."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

try:
    import accelerate
except ImportError as error:
    raise ImportError(
        "halfstep.integrations.accelerate needs Accelerate: pip install 'halfstep[accelerate]'"
    ) from error

from halfstep.gradients import innermost, params_of
from halfstep.integrations.scaling import FrameworkScaler

#: what scales by itself
_SCALING = (accelerate.DistributedType.DEEPSPEED, accelerate.DistributedType.MEGATRON_LM)


def install(accelerator: Any, **scaler: Any) -> Any:
    """Let an Accelerator train float16 weights by an optimizer of halfstep's; call this before ``prepare``.

    Its ``backward`` scales the loss, its clipping sees unscaled gradients, and its optimizers leave out steps whose
    gradients are not finite, for which its schedulers stand still; with ``mixed_precision`` "fp16" as with "no".
    ``save_state`` and ``load_state`` include the scaler. bfloat16 needs no scaler, so no ``install``.

    Args:
        accelerator: an `accelerate.Accelerator`.
        scaler: options as `halfstep.GradScaler` takes them, before those of a ``GradScalerKwargs`` handler.

    Returns:
        ``accelerator``; ``accelerator.scaler.skipped(optimizer)`` tells of the last step.

    Raises:
        RuntimeError: an optimizer has been prepared already, with another scaler; or, later, gradients are clipped
            amid accumulation.
        ValueError: DeepSpeed or Megatron-LM scales by itself; or an option lies outside what the scaler takes.

    Exactness:
        As `halfstep.GradScaler`'s. Several optimizers may share one backward pass: the scale moves once for all.
    """
    if accelerator._optimizers:
        raise RuntimeError(
            "an optimizer was prepared before install(accelerator): it keeps the scaler of then, so install first"
        )
    if accelerator.distributed_type in _SCALING:
        raise ValueError(f"{accelerator.distributed_type} scales gradients by itself and takes no scaler")
    handler = accelerator.scaler_handler
    options = {"device": accelerator.device.type, **(handler.to_kwargs() if handler else {}), **scaler}
    accelerator.scaler = FrameworkScaler(**options)
    unscaling = _Unscaling(accelerator)
    accelerator.unscale_gradients = unscaling.unscale_gradients
    accelerator.clip_grad_norm_ = unscaling.clip_grad_norm_
    accelerator.clip_grad_value_ = unscaling.clip_grad_value_
    return accelerator


class _Unscaling:
    """An accelerator's methods that unscale: its own do so with native AMP alone, and twice where one clips twice."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        self._norm, self._value = accelerator.clip_grad_norm_, accelerator.clip_grad_value_
        #: while params are clipped, the optimizers that have them
        self._clipped: list[Any] | None = None

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Unscale the gradients of an optimizer, of several, or of all that were prepared."""
        if not self._accelerator.sync_gradients:
            raise RuntimeError(
                "gradients are unscaled or clipped while they are accumulated, and more are to come: do it "
                "`if accelerator.sync_gradients:`"
            )
        if optimizer is None:
            optimizer = self._accelerator._optimizers if self._clipped is None else self._clipped
        for each in optimizer if isinstance(optimizer, list | tuple) else [optimizer]:
            self._accelerator.scaler.unscale_(innermost(each))

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor | None:
        """Clip the norm of unscaled gradients."""
        return self._clip(self._norm, parameters, max_norm, norm_type=norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clip unscaled gradients one by one."""
        return self._clip(self._value, parameters, clip_value)

    def _clip(self, clip: Callable[..., Any], parameters: Any, *args: Any, **kwargs: Any) -> Any:
        """Clip, and let what the accelerator unscales on the way be these params' optimizers."""
        params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        self._clipped = [each for each in self._accelerator._optimizers if _shares(params_of(each), params)]
        try:
            return clip(params, *args, **kwargs)
        finally:
            self._clipped = None


def _shares(some: Iterable[Any], others: Iterable[Any]) -> bool:
    """Whether a param is among both."""
    return not {id(param) for param in some}.isdisjoint(map(id, others))


class Accelerator(accelerate.Accelerator):
    """An `accelerate.Accelerator` that trains float16 weights by an optimizer of halfstep's: see `install`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        install(self)
