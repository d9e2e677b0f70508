"""What a param group may say: checked once, where it enters, and kept in one form."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from halfstep import backends
from halfstep.formats import MOMENTS, WEIGHTS

_WAYS_OUT = {
    "amsgrad": "AMSGrad is not offered; leave it out, or use torch.optim with float32 params",
    "foreach": "all tensors are stepped together anyhow; leave it out, or choose with backend=",
    "fused": "the step is one pass over memory anyhow; leave it out, or choose with backend=",
    "differentiable": "a step cannot be differentiated; leave it out, or use torch.optim with float32 params",
}

_FLAGS = (
    "capturable", "maximize", "nesterov", "decoupled_weight_decay", "absolute_weight_decay", "optimized_update",
)  # fmt: skip

TORCHS = {"amsgrad": False, "foreach": None, "fused": None, "capturable": False, "differentiable": False}
"""Options of torch's groups: all but ``capturable`` ask for nothing here, and are there for those who read them."""

LIVE = ("weights", "moments", "backend", "layout", "foreach", "fused", "capturable", "differentiable")
"""Options that say how the live optimizer works; a loaded state does not change them."""


def checked(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's options as they are kept: numbers as floats, ``lr`` also as a tensor, a dtype by its name.

    Raises:
        ValueError: an option has a value that is not allowed.
    """
    refuse(group)
    kept = {**group, **choices(group)}
    for name in _FLAGS:
        if name in group:
            kept[name] = _flag(name, group[name])
    for name in ("lr", "eps", "weight_decay", "momentum"):
        if name in group:
            number = _number(name, group[name])
            # what float32 would round to 0 divides by 0 later
            if not (number == 0 or 2.0**-149 <= number <= torch.finfo(torch.float32).max):
                raise ValueError(f"{name}={group[name]!r}: must be 0, or a float32 number from 1.4e-45 to 3.4e+38")
            kept[name] = group[name] if name == "lr" and isinstance(group[name], Tensor) else number
    if "dampening" in group:
        kept["dampening"] = _number("dampening", group["dampening"])
        if not math.isfinite(kept["dampening"]):
            raise ValueError(f"dampening={group['dampening']!r}: must be finite")
    if group.get("nesterov") and not (kept["momentum"] > 0 and kept["dampening"] == 0):
        raise ValueError(
            f"nesterov={group['nesterov']!r}: needs momentum > 0 and dampening 0, and these are {kept['momentum']} and "
            f"{kept['dampening']}; set them, or leave nesterov out"
        )
    if "betas" in group:
        kept["betas"] = _betas(group["betas"])
    return kept


def choices(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's formats and backend by their names, and its seed; raise where one has no meaning."""
    kept = {name: group[name] for name in ("weights", "moments", "backend")}
    if isinstance(kept["moments"], torch.dtype):
        kept["moments"] = str(kept["moments"]).removeprefix("torch.")
    for (name, value), allowed in zip(kept.items(), (WEIGHTS, MOMENTS, ("auto", *backends.BACKENDS)), strict=True):
        if not isinstance(value, str) or value not in allowed:
            raise ValueError(f"{name}={group[name]!r}: must be one of {', '.join(map(repr, allowed))}")
    if type(group["seed"]) is not int or not 0 <= group["seed"] < 2**64:
        raise ValueError(f"seed={group['seed']!r}: must be an int, at least 0 and less than 2**64")
    return {**kept, "seed": group["seed"]}


def refuse(group: Mapping[str, Any]) -> None:
    """Raise for an option of torch's that has no meaning here, unless it asks for nothing."""
    for name, way_out in _WAYS_OUT.items():
        if _flag(name, group.get(name)):
            raise ValueError(f"{name}={group[name]!r}: {way_out}")


def _flag(name: str, value: Any) -> bool:
    if isinstance(value, bool | None):
        return bool(value)
    raise ValueError(f"{name}={value!r}: must be True or False")


def _number(name: str, value: Any) -> float:
    try:
        if isinstance(value, str):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{name}={value!r}: must be a number, or a tensor of one element") from None


def loaded(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a loaded group's options as `checked` does; ``lr`` may be a little less than 0, as schedulers leave it.

    Raises:
        ValueError: an option has a value that is not allowed.
    """
    if not math.isfinite(_number("lr", group["lr"])):
        raise ValueError(f"lr={group['lr']!r}: must be finite")
    return {**checked({**group, "lr": 0.0}), "lr": group["lr"]}


def _betas(betas: Any) -> tuple[float, ...]:
    if not isinstance(betas, list | tuple) or len(betas) != 2:
        raise ValueError(f"betas={betas!r}: must be two numbers, as in (0.9, 0.999)")
    kept = tuple(_number(f"betas[{k}]", beta) for k, beta in enumerate(betas))
    for k, beta in enumerate(kept):
        if not 0 <= beta < 1:
            raise ValueError(f"betas[{k}]={betas[k]!r}: must be at least 0 and less than 1")
    return kept
