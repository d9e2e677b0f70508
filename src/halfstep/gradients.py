"""An optimizer's gradients: named, refused, widened to float32, dropped, and looked through for what is not finite."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from halfstep.engine import HalfOptimizer
from halfstep.tensors import check_grad, named


def graded(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    """Each param that has a gradient, once, under its name."""
    seen = set()
    for index, group in enumerate(optimizer.param_groups):
        for name, param in named(group, index):
            if param.grad is not None and param not in seen:
                seen.add(param)
                yield name, param


def check(optimizer: HalfOptimizer) -> None:
    """Raise for a gradient that no step takes."""
    for name, param in graded(optimizer):
        check_grad(name, param.grad)


def refuse_float16(optimizer: torch.optim.Optimizer) -> None:
    """Raise where an optimizer that is not halfstep's would step in float16; torch's fused ones do so in silence."""
    for name, param in graded(optimizer):
        if torch.float16 in (param.dtype, param.grad.dtype):
            raise ValueError(
                f"Attempting to unscale FP16 gradients. {type(optimizer).__name__} would step {name} in float16, where "
                "small gradients and updates are lost. Keep the model and change one line: optimizer = "
                "halfstep.AdamW(...), which works on float32 weights; or give the scaler allow_fp16=True to unscale in "
                "float16 all the same"
            )


def widen(optimizer: HalfOptimizer, widened: dict[Tensor, torch.dtype | None]) -> None:
    """Replace each 16-bit gradient by its float32 value, noting in ``widened`` what the param's grad_dtype was."""
    for _, param in graded(optimizer):
        if param.grad.dtype is not torch.float32:
            grad = param.grad.detach().float()
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


def not_finite(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Name the params whose gradients are not finite, and say which: "NaN", or "infinite" alone."""
    names = {}
    for name, param in graded(optimizer):
        values = param.grad.coalesce().values() if param.grad.is_sparse else param.grad
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
