"""Learning-rate schedulers that stand still while steps are skipped."""

from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from halfstep.gradients import innermost
from halfstep.scaler import GradScaler
from halfstep.tensors import type_of


def hold_scheduler(scheduler: LRScheduler, scaler: GradScaler) -> LRScheduler:
    """Let a learning-rate scheduler stand still where the scaler skipped its optimizer's step.

    From then on ``scheduler.step()`` does nothing while the optimizer has not stepped since the scheduler last moved,
    its steps having been skipped. One that moves once an epoch is held only where the whole epoch was skipped.

    Args:
        scheduler: any of `torch.optim.lr_scheduler`; call its ``step`` after the scaler's, as without this.
        scaler: what steps ``scheduler.optimizer``, or a wrapper of that.

    Returns:
        ``scheduler`` itself, of a class derived from its own; its ``state_dict`` is as it was.

    Raises:
        TypeError: an argument is not what it says.

    Exactness:
        With a ``capturable`` optimizer the host sees no skip, and nothing is held.
    """
    if not isinstance(scheduler, LRScheduler):
        raise TypeError(f"scheduler is {type_of(scheduler)}: must be one of torch.optim.lr_scheduler")
    if not isinstance(scaler, GradScaler):
        raise TypeError(f"scaler is {type_of(scaler)}: must be the halfstep.GradScaler that steps")
    kind, optimizer, stepped = type(scheduler), innermost(scheduler.optimizer), False

    def note(*_: Any) -> None:
        nonlocal stepped
        stepped = True

    def step(self: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal stepped
        if stepped or not scaler.skipped(optimizer):
            stepped = False
            kind.step(self, *args, **kwargs)

    optimizer.register_step_post_hook(note)
    # an attribute would be saved along with the scheduler's state
    scheduler.__class__ = type(kind.__name__, (kind,), {"step": step, "__module__": kind.__module__})
    return scheduler
