"""Parts and a state_dict: what the optimizer keeps for a param, made, read, checked and converted between formats."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from halfstep.backends.eager import decode, encode
from halfstep.contracts import Format, Moment, Part
from halfstep.formats import MOMENTS, PLAIN, WEIGHTS, weight_format

#: What a float32 part may be loaded from: torch keeps a 16-bit param's moments in 16 bits.
WIDENS = (torch.float16, torch.bfloat16, torch.float64)
#: How the teaching implementation's `AdamFP16` calls the float32 copy.
_ALIASES = {"master": "fp32_copy"}


def key(part: Part, moment: Moment | None = None) -> str:
    """Return the name under which a part lies in a param's state."""
    return "_".join(filter(None, (moment.name if moment else "", part.name)))


def layout(weight: Format, moments: Sequence[tuple[Moment, Format]]) -> dict[str, torch.dtype]:
    """Return the key and dtype of every part in a param's state, in the order in which a job carries them."""
    kept = {key(part): part.dtype for part in weight.parts[1:]}
    return kept | {key(part, moment): part.dtype for moment, format in moments for part in format.parts}


def fresh(param: Tensor, weight: Format, moments: Sequence[tuple[Moment, Format]]) -> dict[str, Any]:
    """Return the state of a param before its first step: the weight is the param, the moments are zero."""
    state: dict[str, Any] = {"step": 0}
    if weight.parts[1:]:
        parts = encode(weight, decode(PLAIN[param.dtype], (param,)))
        state |= {key(part): kept for part, kept in zip(weight.parts[1:], parts[1:], strict=True)}
    for moment, format in moments:
        zeros = torch.zeros(param.shape, dtype=torch.float32, device=param.device)
        # float32 parts are the zeros themselves
        parts = (zeros,) if format is PLAIN[torch.float32] else encode(format, zeros)
        state |= {key(part, moment): kept for part, kept in zip(format.parts, parts, strict=True)}
    return state


def mismatch(state: Mapping[str, Any], param: Tensor, kept: Mapping[str, torch.dtype]) -> str | None:
    """Say how ``state`` differs from what ``kept`` asks for beside ``param``, or None when it fits."""
    for name, dtype in kept.items():
        tensor = state.get(name)
        if not isinstance(tensor, Tensor):
            return f"its state has no {name!r}"
        if tensor.dtype is not dtype:
            return f"{name!r} in its state is {tensor.dtype}, not {dtype}"
        if tensor.shape != param.shape:
            return f"{name!r} in its state has shape {tuple(tensor.shape)}, the param {tuple(param.shape)}"
        if tensor.device != param.device:
            return f"{name!r} in its state is on {tensor.device}, the param on {param.device}"
        if not tensor.is_contiguous():
            return f"{name!r} in its state is not contiguous"
    return None


def restore(
    saved: Mapping[str, Any],
    saved_group: Mapping[str, Any],
    param: Tensor,
    weight: Format,
    moments: Sequence[tuple[Moment, Format]],
) -> tuple[dict[str, Any], Tensor | None]:
    """Turn a param's saved state into one of the formats asked for, exactly where the format is the same.

    Args:
        saved: the param's entry under "state": ours in any format, torch's or the teaching implementation's.
        saved_group: the group under "param_groups" that it belongs to.
        param: the live param; nothing is written to it.
        weight: the format to keep its weight in.
        moments: the rule's moments and the format to keep each in.

    Returns:
        The state, contiguous copies on the param's device, and what the param has to become: None where it stays. It
        changes only where the two formats round a tie differently.

    Raises:
        ValueError: ``saved`` fits neither; the text says what differs.
    """
    state: dict[str, Any] = {"step": _step(saved)}
    source = _source(saved, saved_group, param)
    written = None
    if source is None:
        state |= fresh(param, weight, ())| {"step": state["step"]}
    else:
        parts = [_copy(saved, key(part), param, part.dtype) for part in source.parts[1:]]
        if source is not weight:
            written, *parts = encode(weight, decode(source, (param, *parts)))
            written = None if torch.equal(written.view(torch.int16), param.view(torch.int16)) else written
        state |= {key(part): kept for part, kept in zip(weight.parts[1:], parts, strict=True)}
    from_format = MOMENTS[saved_group.get("moments", "float32")]
    for moment, format in moments:
        parts = [_copy(saved, key(part, moment), param, part.dtype) for part in from_format.parts]
        if from_format is not format:
            parts = encode(format, decode(from_format, parts))
        state |= {key(part, moment): kept for part, kept in zip(format.parts, parts, strict=True)}
    return state, written


def _step(saved: Mapping[str, Any]) -> int:
    step = saved.get("step")
    if not isinstance(step, int | float | Tensor) or float(step) != int(step) or step < 0:
        raise ValueError(f"its step is {step!r}, not a count of steps")
    return int(step)


def _source(saved: Mapping[str, Any], group: Mapping[str, Any], param: Tensor) -> Format | None:
    """Return the format in which ``saved`` keeps the weight, or None where the param alone is the weight."""
    name = group.get("weights", "master32" if "fp32_copy" in saved else "rounded")
    formats = WEIGHTS.get(name)
    if formats is None:
        raise ValueError(f"it was saved with weights={name!r}, which is none of {', '.join(map(repr, WEIGHTS))}")
    parts = formats[torch.bfloat16].parts[1:]
    if not any(key(part) in saved or _ALIASES.get(key(part)) in saved for part in parts):
        return None
    if param.dtype not in formats:
        raise ValueError(
            f"it was saved as {name!r} beside a 16-bit param, and this param is {param.dtype}. Load it over the 16-bit "
            "model, and copy optimizer.float32_weight(param) into the other one"
        )
    return formats[param.dtype]


def _copy(saved: Mapping[str, Any], name: str, param: Tensor, dtype: torch.dtype) -> Tensor:
    """Copy a saved tensor to the param's device; a float may widen to ``dtype``, nothing else is cast."""
    tensor = saved.get(name, saved.get(_ALIASES.get(name, name)))
    if not isinstance(tensor, Tensor):
        raise ValueError(f"the saved state has no {name!r}; it has {', '.join(map(repr, saved)) or 'nothing'}")
    if tensor.shape != param.shape:
        raise ValueError(f"the saved {name!r} has shape {tuple(tensor.shape)}, the param {tuple(param.shape)}")
    if tensor.dtype is not dtype and not (dtype is torch.float32 and tensor.dtype in WIDENS):
        raise ValueError(f"the saved {name!r} is {tensor.dtype}, not {dtype}")
    return torch.empty(param.shape, dtype=dtype, device=param.device).copy_(tensor)
