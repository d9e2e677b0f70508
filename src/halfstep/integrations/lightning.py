"""Float16 in Lightning's Trainer and in Fabric: what their "16-true" lacks, a gradient scaler.

`Trainer(plugins=Float16Precision())` takes the place of `Trainer(precision="16-true")`, and
`Fabric(plugins=Float16FabricPrecision())` that of `Fabric(precision="16-true")`. bfloat16 needs no scaler:
`precision="bf16-true"` with an optimizer of halfstep's is all.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

try:
    from lightning.fabric.plugins.precision.half import HalfPrecision as FabricHalfPrecision
    from lightning.pytorch.plugins.precision.half import HalfPrecision
except ImportError as error:
    raise ImportError("halfstep.integrations.lightning needs Lightning: pip install 'halfstep[lightning]'") from error

from halfstep.integrations.scaling import FrameworkScaler
from halfstep.schedulers import hold_scheduler


class _Float16:
    """What both plugins have: a scaler, and its state as the plugin's own."""

    def __init__(self, **scaler: Any) -> None:
        super().__init__()
        #: the `halfstep.GradScaler`; ``scaler.skipped(optimizer)`` tells of the last step
        self.scaler = FrameworkScaler(**scaler)

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the scale, once an iteration; they are float32 until the step."""
        self.scaler.unscale_(optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Return the scaler's state."""
        return self.scaler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a scaler's state."""
        self.scaler.load_state_dict(state_dict)


class Float16Precision(_Float16, HalfPrecision):
    """Train in float16 in Lightning's Trainer, with an optimizer of halfstep's.

    The loss is scaled, gradients are unscaled before hooks and clipping see them, a step whose gradients are not finite
    is left out, and schedulers stand still for it. Checkpoints hold the scaler's state.

    Args:
        scaler: options as `halfstep.GradScaler` takes them.

    Raises:
        ValueError: an option lies outside what the scaler takes; while training, float16 gradients of an optimizer that
            is not halfstep's.

    Exactness:
        As `halfstep.GradScaler`'s. Several optimizers may share one backward pass: the scale moves once for all.
    """

    def connect(self, model: Any, optimizers: list[Optimizer], lr_schedulers: list[Any]) -> tuple[Any, Any, Any]:
        """Hold the schedulers where steps are skipped."""
        for config in lr_schedulers:
            hold_scheduler(config.scheduler, self.scaler)
        return super().connect(model, optimizers, lr_schedulers)

    def pre_backward(self, tensor: Tensor, module: Any) -> Tensor:
        """Scale the loss."""
        return super().pre_backward(self.scaler.scale(tensor), module)

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Run the closure, unscale, let hooks and clipping have the gradients, and step."""
        result = closure()
        # a training_step that returned None had no backward
        stepping = result is not None or not model.automatic_optimization
        if stepping:
            self.unscale_gradients(optimizer)
        self._after_closure(model, optimizer)
        if stepping:
            self.scaler.step(optimizer, **kwargs)
            self.scaler.update()
        return result

    def clip_gradients(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Clip the unscaled gradients, also where manual optimization asks for it before the step."""
        self.unscale_gradients(optimizer)
        super().clip_gradients(optimizer, *args, **kwargs)


class Float16FabricPrecision(_Float16, FabricHalfPrecision):
    """Train in float16 in Fabric, with an optimizer of halfstep's.

    `fabric.backward` scales, `fabric.clip_gradients` unscales, and the optimizer's ``step`` leaves out what is not
    finite. Fabric saves what it is given: put ``scaler`` into the state, as ``{"scaler": plugin.scaler, ...}``.

    Args:
        scaler: options as `halfstep.GradScaler` takes them.

    Raises:
        ValueError: as `Float16Precision`.

    Exactness:
        As `Float16Precision`'s.
    """

    def backward(self, tensor: Tensor, model: Any, *args: Any, **kwargs: Any) -> None:
        """Run backward from the scaled loss."""
        super().backward(self.scaler.scale(tensor), model, *args, **kwargs)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Step, unless a gradient is not finite."""
        returned = self.scaler.step(optimizer, **kwargs)
        self.scaler.update()
        return returned
