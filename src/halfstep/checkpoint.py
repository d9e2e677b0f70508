"""A param's state: its parts, made, read, checked and converted between formats."""

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from halfstep.backends.eager import convert, values
from halfstep.backends.pieces import part_shape
from halfstep.contracts import Counter, Format, Moment, Part
from halfstep.conversions import Conversion, Rounding
from halfstep.formats import FLOAT32, MOMENTS, PLAIN, WEIGHTS
from halfstep.shards import alike, described, lines, local, spread, taken

LAYOUT = 2
"""The version of the layout in which states are written, kept in each param group.

1. It stands nowhere. A param has ``step``, its formats' parts under `key`, and ``stream`` where a format takes chance.
2. A 16-bit param has ``mantissa``, too.
"""

#: What a float32 part may be loaded from: torch keeps a 16-bit param's moments in 16 bits.
WIDENS = (torch.float16, torch.bfloat16, torch.float64)
#: The first use of random bits in a conversion, far from those of a step: the weight's.
CONVERSION = 16


def key(part: Part, moment: Moment | None = None) -> str:
    """Return the name under which a part lies in a param's state."""
    return "_".join(filter(None, (moment.name if moment else "", part.name)))


@functools.cache
def mantissa(weight: Format) -> int | None:
    """Return the bits of mantissa that the weight behind a 16-bit param is kept with, or None for a float32 param.

    It tells formats apart whose parts look alike, and says beside what dtype of param they were kept.
    """
    param, *beside = weight.parts
    if param.dtype is torch.float32:
        return None
    floats = [part.dtype for part in beside if part.dtype.is_floating_point]
    further = sum(8 * part.dtype.itemsize for part in beside if not part.dtype.is_floating_point)
    return further + max(round(-math.log2(torch.finfo(dtype).eps)) for dtype in (floats or [param.dtype]))


def _kept_with(bits: Any) -> list[str]:
    """Return which formats have a mantissa of so many bits, in words."""
    return [
        f"weights={name!r} beside a {dtype} param"
        for name, formats in WEIGHTS.items()
        for dtype, format in formats.items()
        if mantissa(format) == bits
    ]


def _weight_keys() -> set[str]:
    """Every name under which any format keeps a part of the weight beside the param."""
    return {key(part) for formats in WEIGHTS.values() for format in formats.values() for part in format.parts[1:]}


def decode(format: Format, parts: Sequence[Tensor]) -> Tensor:
    """Return the float32 values that ``parts`` hold, as a contiguous tensor of its own, spread as they are."""
    first, *rest = map(local, parts)
    made = torch.empty(first.shape, dtype=torch.float32, device=first.device)
    convert(format, (first, *rest), FLOAT32, (made,))
    return spread(made, parts[0].shape, parts[0])


def layout(
    shape: Sequence[int], weight: Format, moments: Sequence[tuple[Moment, Format]]
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return key, dtype and shape of every part in the state of a param, in the order in which a job carries them."""
    parts = [(key(part), part) for part in weight.parts[1:]]
    parts += [(key(part, moment), part) for moment, format in moments for part in format.parts]
    return {name: (part.dtype, part_shape(part, shape)) for name, part in parts}


def _head(weight: Format, step: int | Tensor, stream: int | None) -> dict[str, Any]:
    """What a param's state begins with, before its parts."""
    numbers = {"step": step, "stream": stream, "mantissa": mantissa(weight)}
    return {name: number for name, number in numbers.items() if number is not None}


def _new(parts: Sequence[Part], param: Tensor) -> list[Tensor]:
    """What lies here of a param's parts, empty."""
    param = local(param)
    return [torch.empty(part_shape(part, param.shape), dtype=part.dtype, device=param.device) for part in parts]


def _keyed(
    parts: Sequence[Part], tensors: Sequence[Tensor], param: Tensor, moment: Moment | None = None
) -> dict[str, Tensor]:
    """Parts under their names, spread as their param is."""
    pairs = zip(parts, tensors, strict=True)
    return {key(part, moment): spread(tensor, part_shape(part, param.shape), param) for part, tensor in pairs}


def fresh(
    param: Tensor,
    weight: Format,
    moments: Sequence[tuple[Moment, Format]],
    step: int | Tensor = 0,
    stream: int | None = None,
) -> dict[str, Any]:
    """Return a param's state before its first step: the weight is the param, the moments are zero."""
    state, here = _head(weight, step, stream), local(param).detach()
    # every format keeps both exactly, so chance has no part in it
    beside = _new(weight.parts[1:], param)
    if beside:
        convert(PLAIN[param.dtype], (here,), weight, (None, *beside))
    state |= _keyed(weight.parts[1:], beside, param)
    zeros = torch.zeros((), dtype=torch.float32, device=here.device).expand(here.shape)
    for moment, format in moments:
        made = _new(format.parts, param)
        convert(FLOAT32, (zeros,), format, made)
        state |= _keyed(format.parts, made, param, moment)
    return state


def mismatch(
    state: Mapping[str, Any], param: Tensor, weight: Format, kept: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
) -> str | None:
    """Say how ``state`` differs from what ``weight`` and ``kept`` ask for beside ``param``, or None when it fits."""
    try:
        count(state.get("step"))
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
        if not alike(tensor, param):
            return f"{name!r} in its state is {described(tensor)}, the param {described(param)}"
        if not local(tensor).is_contiguous():
            return f"{name!r} in its state is not contiguous"
    for name in sorted(_weight_keys().intersection(state).difference(kept)):
        return f"its state has {name!r}, a part that another format keeps beside a param"
    if state.get("mantissa", mantissa(weight)) != mantissa(weight):
        return f"its state is of {_of(state['mantissa'])}"
    return None


def _of(bits: Any) -> str:
    """Say which formats have this mantissa."""
    return " or ".join(_kept_with(bits) or ["no format"]) + f" (its mantissa is {bits!r})"


def _misfit(tensor: Tensor, shape: tuple[int, ...], param: Tensor) -> str:
    """Say that a part has not the ``shape`` that belongs to ``param``."""
    if shape == param.shape:
        return f"shape {tuple(tensor.shape)}, the param {shape}"
    return f"shape {tuple(tensor.shape)}, not {shape}, which belongs to the param's {tuple(param.shape)}"


class Entry:
    """A param's saved state, checked against what is asked for: nothing of it is made yet, and nothing written.

    Args:
        name: the param's.
        saved: its entry under "state": ours in any format and layout, or torch's. In which formats it is shows by its
            parts and its ``mantissa``.
        param: the live param.
        weight: the format to keep its weight in.
        moments: the rule's moments and the format to keep each in.
        seed: what random bits are drawn with, where one of these formats takes some.
        stream: the param's number for them, unless ``saved`` has one.
        held: the live weight, its format and parts, for a ``saved`` that says nothing of it.

    Raises:
        ValueError: ``saved`` does not fit; the text says what differs.
    """

    def __init__(
        self,
        name: str,
        saved: Mapping[str, Any],
        param: Tensor,
        weight: Format,
        moments: Sequence[tuple[Moment, Format]],
        seed: int,
        stream: int,
        held: tuple[Format, Sequence[Tensor]],
    ) -> None:
        self._name, self._param, self._target = name, param, weight
        # DCP says so of what its file does not have
        saved = {name: value for name, value in saved.items() if not (isinstance(value, dict) and not value)}
        self._step = count(saved.pop("step", None))
        self._stream = None
        random = weight.random or any(format.random for _, format in moments)
        if "stream" in saved or random:
            self._stream = _stream(saved.pop("stream", stream))
        self._counter = Counter(seed, self._stream or 0, self._step, *(lines(param) if random else ()))
        self._weight = self._weight_in(saved) or (held[0], [local(part).detach() for part in held[1]])
        self._moments = [(moment, format, *self._moment_in(saved, moment, format)) for moment, format in moments]
        if saved:
            raise ValueError(
                f"it has {', '.join(map(repr, saved))}, for which there is no use here: take that out of the state, or "
                "load it into an optimizer of the kind that it was saved from"
            )

    def _weight_in(self, saved: dict[str, Any]) -> tuple[Format, Sequence[Tensor]] | None:
        """Take the weight's parts out of ``saved``; return them behind the param, and their format."""
        param, bits = self._param, saved.pop("mantissa", None)
        if bits is not None and (type(bits) is not int or not _kept_with(bits)):
            raise ValueError(f"its mantissa is {bits!r}, which no format has")
        held = sorted(_weight_keys().intersection(saved))
        if not held:
            if bits in (None, *map(mantissa, PLAIN.values())):
                return (PLAIN[param.dtype], (local(param).detach(),)) if bits else None
            raise ValueError(f"it is of {_of(bits)}, and what that keeps beside the param is missing")
        if param.dtype is torch.float32:
            raise ValueError(
                f"it holds {', '.join(map(repr, held))}, kept beside a 16-bit param, and this param is torch.float32. "
                "Load it over the 16-bit model, and load halfstep.float32_state_dict(model, optimizer) into this one"
            )
        formats = (self._target, *(each[param.dtype] for each in WEIGHTS.values() if param.dtype in each))
        source = _source(saved, [format for format in formats if bits in (None, mantissa(format))])
        if source is None:
            found = ", ".join(f"{name!r} in {getattr(saved[name], 'dtype', type(saved[name]))}" for name in held)
            text = f"it holds {found}, which no format of a {param.dtype} param keeps"
            if bits is not None:
                text += (
                    f" with a mantissa of {bits}: it is of {_of(bits)}. Load it over such params with such weights (a "
                    "library that casts what it loads must, too), and go on from there by load_state_dict into another "
                    "format, or to another dtype by halfstep.float32_state_dict and halfstep.load_weights"
                )
            raise ValueError(text)
        return source, (local(param).detach(), *_take(saved, source.parts[1:], param))

    def _moment_in(self, saved: dict[str, Any], moment: Moment, format: Format) -> tuple[Format, list[Tensor]]:
        """Take a moment's parts out of ``saved``; return their format and them."""
        source = _source(saved, (format, *(formats.of(moment) for formats in MOMENTS.values())), moment)
        parts = _take(saved, (source or format).parts, self._param, moment)
        source = source or format
        if source is FLOAT32:
            # what is narrower is read as it is
            source = PLAIN.get(parts[0].dtype, FLOAT32)
        for span in values(source, _seen(source, parts)):
            if not span.numel():
                continue
            low, high = span.aminmax()
            if low.isnan() or high.isnan():
                raise ValueError(
                    f"its {moment.name!r} holds NaN: the run had already gone wrong when it was saved; load an earlier "
                    "state, or start in a new optimizer without it"
                )
            if moment.square and low < 0:
                raise ValueError(f"its {moment.name!r} holds {low.item():g}, and an average of squares has no sign")
        return source, parts

    def made(self, conversions: list[Conversion]) -> dict[str, Any]:
        """Return the state, of tensors of its own on the param's device; add to ``conversions`` what was converted."""
        param, target = self._param, self._target
        state = _head(target, self._step, self._stream)
        source, parts = self._weight
        beside = _new(target.parts[1:], param)
        self._convert(conversions, "weight", source, parts, target, (None, *beside), CONVERSION)
        state |= _keyed(target.parts[1:], beside, param)
        for use, (moment, format, source, parts) in enumerate(self._moments, start=CONVERSION + 1):
            made = _new(format.parts, param)
            self._convert(conversions, moment.name, source, parts, format, made, use)
            state |= _keyed(format.parts, made, param, moment)
        return state

    def _convert(
        self,
        conversions: list[Conversion],
        what: str,
        source: Format,
        parts: Sequence[Tensor],
        target: Format,
        made: Sequence[Tensor | None],
        use: int,
    ) -> None:
        seen, rounding = _seen(source, parts, self._param.device), Rounding()
        narrowed = [pair for pair in zip(parts, seen, strict=True) if pair[0].dtype is torch.float64]
        for part, narrow in narrowed:
            rounding(part, narrow.to(part))
        if source is target:
            for part, tensor in zip(seen, made, strict=True):
                if tensor is not None:
                    tensor.copy_(part)
        else:
            convert(source, seen, target, made, self._counter, use, rounding)
        # where a param is all that there was of a weight, nothing was converted
        if narrowed or (source is not target and (what != "weight" or len(parts) > 1)):
            name = str(parts[0].dtype).removeprefix("torch.") if len(parts) == 1 else source.name
            elements = local(self._param).numel()
            conversions.append(Conversion(self._name, what, name, target.name, elements, *rounding.found()))

    def write(self) -> None:
        """Give the param what its weight has become, where the two formats may round it differently."""
        source, parts = self._weight
        if source is not self._target and len(parts) > 1:
            made = (local(self._param).detach(), *(None for _ in self._target.parts[1:]))
            convert(source, _seen(source, parts, self._param.device), self._target, made, self._counter, CONVERSION)


def _seen(source: Format, parts: Sequence[Tensor], device: torch.device | None = None) -> list[Tensor]:
    """Saved parts as a format reads them: of its dtypes, on ``device``, and themselves where they are so."""
    return [tensor.to(device=device, dtype=part.dtype) for part, tensor in zip(source.parts, parts, strict=True)]


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
    """Take a format's parts out of ``saved``, as they are, or what lies here of them."""
    found = []
    for part in parts:
        name = key(part, moment)
        tensor = saved.pop(name, None)
        if not isinstance(tensor, Tensor):
            rest = ", ".join(map(repr, saved)) or "nothing"
            raise ValueError(f"it has no {name!r}; besides its step it has {rest}. Start in a new optimizer without it")
        shape = part_shape(part, param.shape)
        if tensor.shape != shape:
            raise ValueError(f"its {name!r} has {_misfit(tensor, shape, param)}")
        if not _reads(part.dtype, tensor.dtype):
            raise ValueError(f"its {name!r} is {tensor.dtype}, not {part.dtype}")
        if tensor.layout is not torch.strided:
            raise ValueError(f"its {name!r} has the layout {tensor.layout}, not {torch.strided}")
        try:
            tensor = taken(tensor.detach(), param)
        except ValueError as error:
            raise ValueError(f"its {name!r} is {error}") from None
        if part.largest is not None and tensor.numel() and (largest := int(tensor.max())) > part.largest:
            raise ValueError(f"its {name!r} holds {largest}, and no more than {part.largest} is ever stored there")
        found.append(tensor.contiguous() if part.shared else tensor)
    return found


def counted(step: Any, device: torch.device | None) -> int | Tensor:
    """Return a count of steps as the host has it, or where a device counts as int64 on that."""
    if isinstance(step, Tensor) and device == step.device and step.dtype is torch.int64 and not step.dim():
        return step
    steps = count(step)
    return steps if device is None else torch.full((), steps, dtype=torch.int64, device=device)


def count(step: Any) -> int:
    """Return a saved count of steps, a number or a tensor of one, as an integer.

    Raises:
        ValueError: it is none.
    """
    try:
        steps = int(step)
        if steps == step and 0 <= steps < 2**63:
            return steps
    except (TypeError, ValueError, RuntimeError, OverflowError):
        pass
    raise ValueError(f"its step is {step!r}, not a count of steps")


def _stream(stream: Any) -> int:
    if type(stream) is int and 0 <= stream < 2**31:
        return stream
    raise ValueError(f"its stream is {stream!r}, not the number of a stream of random bits")
