"""Parts and a state_dict: what the optimizer keeps for a param, made, read, checked and converted between formats."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from halfstep.backends.eager import convert
from halfstep.backends.pieces import part_shape
from halfstep.contracts import Counter, Format, Moment, Part
from halfstep.formats import FLOAT32, MOMENTS, PLAIN, WEIGHTS

#: What a float32 part may be loaded from: torch keeps a 16-bit param's moments in 16 bits.
WIDENS = (torch.float16, torch.bfloat16, torch.float64)
#: The first use of random bits in a conversion, far from those of a step.
_CONVERSION = 16
#: How the teaching implementation's `AdamFP16` calls the float32 copy.
_ALIASES = {"master": "fp32_copy"}


def key(part: Part, moment: Moment | None = None) -> str:
    """Return the name under which a part lies in a param's state."""
    return "_".join(filter(None, (moment.name if moment else "", part.name)))


def _weight_keys() -> set[str]:
    """Every name under which any format keeps a part of the weight beside the param."""
    return {key(part) for formats in WEIGHTS.values() for format in formats.values() for part in format.parts[1:]}


def decode(format: Format, parts: Sequence[Tensor]) -> Tensor:
    """Return the float32 values that ``parts`` hold, as a contiguous tensor of its own."""
    return convert(format, parts, FLOAT32)[0]


def layout(
    shape: Sequence[int], weight: Format, moments: Sequence[tuple[Moment, Format]]
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return key, dtype and shape of every part in the state of a param, in the order in which a job carries them."""
    parts = [(key(part), part) for part in weight.parts[1:]]
    parts += [(key(part, moment), part) for moment, format in moments for part in format.parts]
    return {name: (part.dtype, part_shape(part, shape)) for name, part in parts}


def fresh(param: Tensor, weight: Format, moments: Sequence[tuple[Moment, Format]]) -> dict[str, Tensor]:
    """Return every part of a param's state before its first step: the weight is the param, the moments are zero."""
    # every format keeps both exactly, so chance has no part in it
    state = _keyed(weight.parts[1:], convert(PLAIN[param.dtype], (param,), weight, skip=1))
    zeros = torch.zeros((), dtype=torch.float32, device=param.device).expand(param.shape)
    for moment, format in moments:
        state |= _keyed(format.parts, convert(FLOAT32, (zeros,), format), moment)
    return state


def mismatch(
    state: Mapping[str, Any], param: Tensor, kept: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
) -> str | None:
    """Say how ``state`` differs from what ``kept`` asks for beside ``param``, or None when it fits."""
    try:
        _step(state.get("step"))
    except ValueError as error:
        return str(error)
    if type(state.get("stream", 0)) is not int:
        return f"its stream is {state['stream']!r}, not an int"
    for name, (dtype, shape) in kept.items():
        tensor = state.get(name)
        if not isinstance(tensor, Tensor):
            return f"its state has no {name!r}"
        if tensor.dtype is not dtype:
            return f"{name!r} in its state is {tensor.dtype}, not {dtype}"
        if tensor.shape != shape:
            return f"{name!r} in its state has {_misfit(tensor, shape, param)}"
        if tensor.device != param.device:
            return f"{name!r} in its state is on {tensor.device}, the param on {param.device}"
        if not tensor.is_contiguous():
            return f"{name!r} in its state is not contiguous"
    for name in sorted(_weight_keys().intersection(state).difference(kept)):
        return f"its state has {name!r}, a part that another format keeps beside a param"
    return None


def _misfit(tensor: Tensor, shape: tuple[int, ...], param: Tensor) -> str:
    """Say that a part has not the ``shape`` that belongs to ``param``."""
    if shape == param.shape:
        return f"shape {tuple(tensor.shape)}, the param {shape}"
    return f"shape {tuple(tensor.shape)}, not {shape}, which belongs to the param's {tuple(param.shape)}"


def restore(
    saved: Mapping[str, Any],
    param: Tensor,
    weight: Format,
    moments: Sequence[tuple[Moment, Format]],
    seed: int,
    stream: int,
) -> tuple[dict[str, Any], Tensor | None]:
    """Turn a param's saved state into one of the formats asked for, exactly where the format is the same.

    Args:
        saved: the param's entry under "state": ours in any format, torch's or the teaching implementation's. In which
            formats it is shows by its parts.
        param: the live param; nothing is written to it.
        weight: the format to keep its weight in.
        moments: the rule's moments and the format to keep each in.
        seed: what random bits are drawn with, where one of these formats takes some.
        stream: the param's number for them, unless ``saved`` has one.

    Returns:
        The state, contiguous copies on the param's device, and what the param has to become: None where it stays. It
        changes only where the two formats round differently.

    Raises:
        ValueError: ``saved`` fits neither; the text says what differs.
    """
    saved = dict(saved)
    for name, alias in _ALIASES.items():
        if alias in saved:
            saved[name] = saved.pop(alias)
    state: dict[str, Any] = {"step": _step(saved.pop("step", None))}
    if "stream" in saved or weight.random or any(format.random for _, format in moments):
        state["stream"] = stream = _stream(saved.pop("stream", stream))
    counter = Counter(seed, stream, state["step"])
    written, parts = _weight(saved, param, weight, counter)
    state |= _keyed(weight.parts[1:], parts)
    for use, (moment, format) in enumerate(moments, start=_CONVERSION + 1):
        source = _source(saved, (format, *(formats.of(moment) for formats in MOMENTS.values())), moment)
        parts = _take(saved, source.parts if source else format.parts, param, moment)
        if source and source is not format:
            parts = convert(source, parts, format, 0, counter, use)
        state |= _keyed(format.parts, parts, moment)
    # what others keep beside ours stays, as it is
    state |= {
        name: value.to(param.device, copy=True) if isinstance(value, Tensor) else copy.deepcopy(value)
        for name, value in saved.items()
    }
    return state, written


def _weight(
    saved: dict[str, Any], param: Tensor, weight: Format, counter: Counter
) -> tuple[Tensor | None, Sequence[Tensor]]:
    """Return what the param has to become, or None where it stays, and the parts of the weight beside it."""
    held = sorted(_weight_keys().intersection(saved))
    source = _source(saved, (weight, *(formats[param.dtype] for formats in WEIGHTS.values() if param.dtype in formats)))
    if held and param.dtype is torch.float32:
        raise ValueError(
            f"it holds {', '.join(map(repr, held))}, kept beside a 16-bit param, and this param is torch.float32. "
            "Load it over the 16-bit model, and copy optimizer.float32_weight(param) into the other one"
        )
    if held and source is None:
        found = ", ".join(f"{name!r} in {getattr(saved[name], 'dtype', type(saved[name]))}" for name in held)
        raise ValueError(f"it holds {found}, which no format of a {param.dtype} param keeps")
    if source is None:
        return None, convert(PLAIN[param.dtype], (param,), weight, skip=1)
    parts = _take(saved, source.parts[1:], param)
    if source is weight:
        return None, parts
    written, *parts = convert(source, (param, *parts), weight, 0, counter, _CONVERSION)
    return None if torch.equal(written.view(torch.int16), param.detach().view(torch.int16)) else written, parts


def _source(saved: Mapping[str, Any], formats: Iterable[Format], moment: Moment | None = None) -> Format | None:
    """Return the first of ``formats`` whose parts, those beside a param where it is a weight, ``saved`` holds."""
    for format in formats:
        parts = format.parts if moment else format.parts[1:]
        tensors = [(saved.get(key(part, moment)), part.dtype) for part in parts]
        if tensors and all(isinstance(t, Tensor) and _reads(dtype, t.dtype) for t, dtype in tensors):
            return format
    return None


def _reads(dtype: torch.dtype, saved: torch.dtype) -> bool:
    """Whether a part of ``dtype`` can be read from a saved one: a float may widen to float32, nothing else is cast."""
    return saved is dtype or (dtype is torch.float32 and saved in WIDENS)


def _take(saved: dict[str, Any], parts: Sequence[Part], param: Tensor, moment: Moment | None = None) -> list[Tensor]:
    """Take a format's parts out of ``saved``, as contiguous copies on the param's device."""
    taken = []
    for part in parts:
        name = key(part, moment)
        tensor = saved.pop(name, None)
        if not isinstance(tensor, Tensor):
            found = ", ".join(map(repr, saved)) or "nothing"
            raise ValueError(
                f"it has no {name!r}; besides its step it has {found}. Start in a new optimizer without it"
            )
        shape = part_shape(part, param.shape)
        if tensor.shape != shape:
            raise ValueError(f"its {name!r} has {_misfit(tensor, shape, param)}")
        if not _reads(part.dtype, tensor.dtype):
            raise ValueError(f"its {name!r} is {tensor.dtype}, not {part.dtype}")
        taken.append(torch.empty(shape, dtype=part.dtype, device=param.device).copy_(tensor.detach()))
    return taken


def counted(step: Any, device: torch.device | None) -> int | Tensor:
    """Return a count of steps as the host has it, or where a device counts as int64 on that."""
    if isinstance(step, Tensor) and device == step.device and step.dtype is torch.int64 and not step.dim():
        return step
    count = _step(step)
    return count if device is None else torch.full((), count, dtype=torch.int64, device=device)


def _step(step: Any) -> int:
    try:
        count = int(step)
        if count == step and count >= 0:
            return count
    except (TypeError, ValueError, RuntimeError, OverflowError):
        pass
    raise ValueError(f"its step is {step!r}, not a count of steps")


def _stream(stream: Any) -> int:
    if type(stream) is int and 0 <= stream < 2**31:
        return stream
    raise ValueError(f"its stream is {stream!r}, not the number of a stream of random bits")


def _keyed(parts: Sequence[Part], tensors: Sequence[Tensor], moment: Moment | None = None) -> dict[str, Tensor]:
    return {key(part, moment): tensor for part, tensor in zip(parts, tensors, strict=True)}
