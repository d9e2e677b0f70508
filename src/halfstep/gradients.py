"""An optimizer's gradients: named, refused, widened to float32, dropped, and looked through for what is not finite."""

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_pre_hooks

from halfstep.engine import HalfOptimizer
from halfstep.shards import Spread, agreed, local, sharded, spread, spreads
from halfstep.tensors import checked_grad, named


def graded(optimizer: torch.optim.Optimizer) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Each param that has a gradient, once, with its group and under its name."""
    seen = set()
    for index, group in enumerate(optimizer.param_groups):
        for name, param in named(group, index):
            if param.grad is not None and param not in seen:
                seen.add(param)
                yield group, name, param


def innermost(optimizer: Any) -> Any:
    """Return the optimizer behind wrappers, which keep it as ``.optimizer`` (Accelerate's) or ``.optim`` (torch's)."""
    while True:
        inner = getattr(optimizer, "optimizer", None) or getattr(optimizer, "optim", None)
        if not isinstance(inner, torch.optim.Optimizer):
            return optimizer
        optimizer = inner


def holder(optimizer: Any) -> Any:
    """Return who has all params in its groups: an optimizer within ZeRO has those alone that this process steps."""
    return optimizer if hasattr(optimizer, "param_groups") else innermost(optimizer)


def params_of(optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    """All of an optimizer's params."""
    return itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)


class Here(NamedTuple):
    """An optimizer as torch's scaler looks at it, with what lies here of its gradients."""

    param_groups: list[dict[str, list[Tensor]]]

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> "Here":
        """Let a tensor stand for each sharded param, one that has for its gradient the part that lies here."""
        return cls([{"params": [cls._stand_in(param) for _, _, param in graded(optimizer)]}])

    @staticmethod
    def _stand_in(param: Any) -> Tensor:
        if not sharded(param):
            return param
        grad = local(param.grad)
        stand_in = grad.detach()
        stand_in.grad = grad
        return stand_in


def everywhere(optimizer: torch.optim.Optimizer) -> list[Spread]:
    """Return over which processes an optimizer's params are spread, who are to decide alike.

    Raises:
        TypeError: a param is FSDP1's, a plain tensor that does not say who has the rest.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return []
    for param in params_of(optimizer):
        if getattr(param, "_fsdp_flattened", False):
            raise TypeError(
                "a param is a slice that FullyShardedDataParallel made, which does not say who has the rest, so that "
                "processes could not decide alike: shard the model by torch.distributed.fsdp.fully_shard instead"
            )
    return spreads(params_of(optimizer))


def found_everywhere(
    optimizer: torch.optim.Optimizer, look: Callable[[Any], dict[torch.device, Tensor]]
) -> dict[torch.device, Tensor]:
    """Return by device what ``look`` finds in an optimizer's gradients: flags, which are 1 where one of any process is.

    Args:
        optimizer: whose gradients are looked at.
        look: looks at what has the optimizer's ``param_groups``, with the parts of its gradients that lie here.
    """
    over = everywhere(optimizer)
    found = look(Here.of(optimizer) if over else optimizer)
    if over:
        first, *others = found.values()
        joined = agreed(torch.stack([first, *(there(other, first.device) for other in others)]).amax(), over)
        for flag in found.values():
            flag.copy_(joined, non_blocking=True)
    return found


def capturable(optimizer: Any) -> bool:
    """Whether the host must not wait for the device that steps: an optimizer of ours was told so."""
    inner = innermost(optimizer)
    return isinstance(inner, HalfOptimizer) and inner.capturable


def watched(optimizer: Any) -> bool:
    """Whether gradients may be read on the way into the step, so that they must be float32 and unscaled by then."""
    inner = innermost(optimizer)
    own_step = inspect.unwrap(type(inner).step) is not inspect.unwrap(HalfOptimizer.step)
    return bool(optimizer is not inner or own_step or inner._optimizer_step_pre_hooks or _global_optimizer_pre_hooks)


def check(optimizer: torch.optim.Optimizer) -> None:
    """Raise for a gradient that no step takes."""
    for _, name, param in graded(optimizer):
        checked_grad(name, param)


def refuse_float16(optimizer: torch.optim.Optimizer) -> None:
    """Raise where an optimizer that is not halfstep's would step in float16; torch's fused ones do so in silence."""
    for _, name, param in graded(optimizer):
        if torch.float16 in (param.dtype, param.grad.dtype):
            raise float16_error(
                optimizer,
                name,
                "optimizer = halfstep.AdamW(...), which works on float32 weights; or give the scaler allow_fp16=True "
                "to unscale in float16 all the same",
            )


def float16_error(optimizer: torch.optim.Optimizer, name: str, change: str) -> ValueError:
    """Return what tells of an optimizer that would step ``name`` in float16, and of the line to change."""
    return ValueError(
        f"Attempting to unscale FP16 gradients. {type(innermost(optimizer)).__name__} would step {name} in float16, "
        f"where small gradients and updates are lost. Keep the model and change one line: {change}"
    )


def widen(optimizer: torch.optim.Optimizer, widened: dict[Tensor, torch.dtype | None]) -> None:
    """Replace each 16-bit gradient by its float32 value, noting in ``widened`` what the param's grad_dtype was."""
    for _, _, param in graded(optimizer):
        if param.grad.dtype is not torch.float32:
            grad = spread(local(param.grad).detach().float(), param.shape, param)
            # only without a grad may grad_dtype change, and None alone lets a 16-bit param hold a float32 grad
            widened.setdefault(param, param.grad_dtype)
            param.grad = None
            param.grad_dtype = None
            param.grad = grad


def drop(widened: Mapping[Any, torch.dtype | None]) -> None:
    """Drop the gradients of these params and restore their grad_dtype: the next backward finds them as they were."""
    for param, dtype in widened.items():
        param.grad = None
        param.grad_dtype = dtype


def there(number: Tensor, device: torch.device) -> Tensor:
    """Return a number without dimensions on ``device``, without waiting for that."""
    if number.device.type == "cpu":
        return torch.full((), number.item(), dtype=number.dtype, device=device)
    return number.to(device, non_blocking=True)


def not_finite(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Name the params whose gradients are not finite, and say which: "NaN", or "infinite" alone."""
    names = {}
    for _, name, param in graded(optimizer):
        values = param.grad.coalesce().values() if param.grad.is_sparse else local(param.grad)
        if values.isnan().any():
            names[name] = "NaN"
        elif values.isinf().any():
            names[name] = "infinite"
    return names


def described(names: Mapping[str, str]) -> str:
    """Say what `not_finite` found, and what to do."""
    infinite, nan = ([name for name, how in names.items() if how == kind] for kind in ("infinite", "NaN"))
    told = []
    if infinite:
        told.append(f"infinite in {_listed(infinite)}, so look at what grew in the model or lower min_scale")
    if nan:
        told.append(f"NaN in {_listed(nan)}, which no scale mends: look for it in the data and the loss")
    return f"gradients are {'; '.join(told)}" if told else "a gradient on another rank is not finite"


def _listed(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
