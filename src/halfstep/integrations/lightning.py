"""Float16 in Lightning's Trainer and in Fabric: what their "16-true" lacks, a gradient scaler.

`Trainer(plugins=Float16Precision())` takes the place of `Trainer(precision="16-true")`, and
`Fabric(plugins=Float16FabricPrecision())` that of `Fabric(precision="16-true")`. bfloat16 needs no scaler:
`precision="bf16-true"` with an optimizer of halfstep's is all. Who imports `pytorch_lightning` takes both from
`halfstep.integrations.pytorch_lightning`.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

try:
    from lightning.fabric.plugins.precision.half import HalfPrecision as FabricHalfPrecision
    from lightning.pytorch.plugins.precision.half import HalfPrecision
    from lightning.pytorch.utilities.model_helpers import is_overridden
except ImportError as error:
    raise ImportError("halfstep.integrations.lightning needs Lightning: pip install 'halfstep[lightning]'") from error

from halfstep.integrations.scaling import FrameworkScaler
from halfstep.schedulers import hold_scheduler


class Float16Mixin:
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


class TrainerMixin(Float16Mixin):
    """Let a ``HalfPrecision`` of the Trainer scale: see `Float16Precision`."""

    #: the package's own, which knows its modules and callbacks
    is_overridden: Callable[..., bool]
    #: whether a backward has given gradients that no step has taken; manual optimization may step several times
    _owed = False

    def connect(self, model: Any, optimizers: list[Optimizer], lr_schedulers: list[Any]) -> tuple[Any, Any, Any]:
        """Hold the schedulers where steps are skipped; those that are not torch's move as they will."""
        self._owed = False
        for config in lr_schedulers:
            if isinstance(config.scheduler, LRScheduler):
                hold_scheduler(config.scheduler, self.scaler)
        plugins: Any = super()
        return plugins.connect(model, optimizers, lr_schedulers)

    def pre_backward(self, tensor: Tensor, module: Any) -> Tensor:
        """Scale the loss."""
        self._owed = True
        plugins: Any = super()
        return plugins.pre_backward(self.scaler.scale(tensor), module)

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Run the closure, unscale where hooks are given the gradients, clip, and step."""
        plugins: Any = super()
        result = closure()
        if model.automatic_optimization and not self._owed:
            # training_step returned None: without gradients the step does nothing, as in float32
            plugins._after_closure(model, optimizer)
            optimizer.step(**kwargs)
            return result
        # what nobody looks at stays in 16 bits
        if self._looked_at(model):
            self.unscale_gradients(optimizer)
        plugins._after_closure(model, optimizer)
        self.scaler.step(optimizer, **kwargs)
        self.scaler.update()
        self._owed = not model.automatic_optimization
        return result

    def clip_gradients(self, optimizer: Any, clip_val: float = 0.0, *args: Any, **kwargs: Any) -> None:
        """Clip the unscaled gradients, also where manual optimization asks for it before the step."""
        if clip_val > 0 and self._owed:
            self.unscale_gradients(optimizer)
        plugins: Any = super()
        plugins.clip_gradients(optimizer, clip_val, *args, **kwargs)

    def _looked_at(self, model: Any) -> bool:
        """Whether a hook is given the gradients before the step."""
        hooks = [(each, "on_before_optimizer_step") for each in (model, *model.trainer.callbacks)]
        return any(self.is_overridden(hook, each) for each, hook in [*hooks, (model, "configure_gradient_clipping")])


class FabricMixin(Float16Mixin):
    """Let a ``HalfPrecision`` of Fabric scale: see `Float16FabricPrecision`."""

    def backward(self, tensor: Tensor, model: Any, *args: Any, **kwargs: Any) -> None:
        """Run backward from the scaled loss."""
        plugins: Any = super()
        plugins.backward(self.scaler.scale(tensor), model, *args, **kwargs)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Step, unless a gradient is not finite."""
        returned = self.scaler.step(optimizer, **kwargs)
        self.scaler.update()
        return returned


class Float16Precision(TrainerMixin, HalfPrecision):
    """Train in float16 in Lightning's Trainer, with an optimizer of halfstep's.

    The loss is scaled, hooks before the step and clipping see unscaled gradients, a step whose gradients are not finite
    is left out, and schedulers stand still for it. Checkpoints hold the scaler's state.

    Args:
        scaler: options as `halfstep.GradScaler` takes them.

    Raises:
        ValueError: an option lies outside what the scaler takes; while training, float16 gradients of an optimizer that
            is not halfstep's.

    Exactness:
        As `halfstep.GradScaler`'s. Several optimizers may share one backward pass: the scale moves once for all.
    """

    is_overridden = staticmethod(is_overridden)


class Float16FabricPrecision(FabricMixin, FabricHalfPrecision):
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
