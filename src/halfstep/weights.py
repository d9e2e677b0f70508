"""The float32 weights behind a 16-bit model: in from a checkpoint with the bits that 16 drop, and out."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from halfstep import checkpoint, report
from halfstep.backends.eager import bind, convert
from halfstep.contracts import Counter
from halfstep.engine import HalfOptimizer
from halfstep.formats import FLOAT32
from halfstep.gradients import innermost
from halfstep.safe import load_safetensors
from halfstep.shards import local, taken
from halfstep.slots import Slot
from halfstep.tensors import type_of


@runtime_checkable
class Weights(Protocol):
    """Who knows float32 weights: an optimizer of ours, or an average of its weights."""

    def _float32_weights(self) -> Iterator[tuple[Tensor, Callable[[], Tensor]]]:
        """Give each param, and what makes its float32 weight."""
        ...


def float32_state_dict(model: nn.Module, optimizer: Weights | Iterable[Weights]) -> dict[str, Any]:
    """Return the model's state_dict with its float32 weights, as the same model in float32 loads it.

    Args:
        model: the 16-bit model.
        optimizer: what knows the weights of its params, or several: optimizers of ours, or an `EMA`, whose averages are
            then taken.

    Returns:
        All entries of ``model.state_dict()``: optimised params as float32 weights, other 16-bit tensors widened, all
        else as it is, in tensors of their own. Tied names share one.

    Raises:
        TypeError: ``optimizer`` knows no float32 weights.

    Exactness:
        The very weights that the next step starts from.
    """
    known = {param: weight for owner in _owners(optimizer, Weights) for param, weight in owner._float32_weights()}
    made: dict[int, Tensor] = {}
    state: dict[str, Any] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            state[name] = copy.deepcopy(value)
            continue
        if id(value) not in made:
            if value in known:
                made[id(value)] = known[value]()
            else:
                wide = value.dtype in (torch.float16, torch.bfloat16)
                made[id(value)] = value.detach().to(torch.float32 if wide else value.dtype, copy=True)
        state[name] = made[id(value)]
    return state


def load_weights(
    model: nn.Module, optimizer: HalfOptimizer | Iterable[HalfOptimizer], float32_state: Mapping[str, Any] | str | Path
) -> None:
    """Load a float32 checkpoint into a 16-bit model, and into its optimizer what 16 bits drop of it.

    Moments and counts of steps stay. Before the first step states begin here, with no step counted.

    Args:
        model: the 16-bit model; it is written in place.
        optimizer: the one over its params, or several. What none of them has is rounded to the model's dtype.
        float32_state: names and tensors, or a file of them, of safetensors or torch.save. Of tied names one is enough.

    Raises:
        ValueError: names are missing or unknown, or a tensor does not fit; nothing has changed then.
        TypeError: ``optimizer`` is none of ours.

    Exactness:
        ``optimizer.float32_weight(param)`` is the checkpoint's weight as far as the format of its weights holds it.
    """
    owners = {
        param: (owner, place, group, name)
        for owner in _owners(optimizer, HalfOptimizer)
        for place, (_, group, name, param) in enumerate(owner._named())
    }
    given = _read(float32_state) if isinstance(float32_state, str | Path) else float32_state
    targets = model.state_dict(keep_vars=True)
    _check(targets, given)
    writes: list[_Write | tuple[Tensor, Tensor]] = []
    for name, target in _once(targets, given):
        if target in owners:
            owner, place, group, label = owners[target]
            slot = owner._slots.of(group, label, target)
            writes.append(_Write(owner, place, group, slot, target, given[name]))
        else:
            writes.append((target, given[name]))
    extra = {name: value for name, value in given.items() if _is_extra(name) or not isinstance(value, Tensor)}
    if extra:
        # extra state is set by the modules themselves
        model.load_state_dict(extra, strict=False)
    saturated: list[tuple[_Write, int]] = []
    with torch.no_grad():
        for write in writes:
            if isinstance(write, _Write):
                saturated.append((write, write()))
            else:
                target, value = write
                local(target).copy_(taken(value, target))
    # a warning may be an error, and comes when all is written
    for write, count in saturated:
        if count:
            report.warn_of_saturation(write.slot.name, write.param, count)


def _owners(optimizer: Any, kind: type[Any]) -> list[Any]:
    several = isinstance(optimizer, Iterable) and not isinstance(innermost(optimizer), kind)
    owners = [innermost(each) for each in (optimizer if several else [optimizer])]
    for owner in owners:
        if not isinstance(owner, kind):
            raise TypeError(
                f"optimizer is {type_of(owner)}: must be one of halfstep's, or a "
                "list of such: the weights of other optimizers are their params"
            )
    return owners


def _read(file: str | Path) -> Mapping[str, Any]:
    file = Path(file)
    if file.suffix == ".safetensors":
        found = load_safetensors(file)
    else:
        found = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    if not isinstance(found, Mapping):
        raise ValueError(f"{file} holds a {type(found).__name__}, not names and tensors")
    return found


def _once(targets: Mapping[str, Any], given: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Each tensor of the model once, under a name that is given."""
    seen: set[int] = set()
    for name, target in targets.items():
        if isinstance(target, Tensor) and name in given and id(target) not in seen and not _is_extra(name):
            seen.add(id(target))
            yield name, target


def _is_extra(name: Any) -> bool:
    """Whether a module makes this entry itself, with ``get_extra_state``, be it a tensor or not."""
    return isinstance(name, str) and name.rpartition(".")[2] == "_extra_state"


def _check(targets: Mapping[str, Any], given: Any) -> None:
    """Raise unless what is given fits the model."""
    if not isinstance(given, Mapping):
        raise ValueError(f"float32_state is a {type(given).__name__}: must be names and tensors, or the path of a file")
    present = {id(target) for name, target in targets.items() if name in given}
    missing = [name for name, target in targets.items() if name not in given and id(target) not in present]
    extra = [str(name) for name in given if name not in targets]
    if missing or extra:
        lacks = [f"lacks {_listed(missing)}"] if missing else []
        has = [f"has {_listed(extra)}, unknown to the model"] if extra else []
        raise ValueError(
            f"float32_state {' and '.join(lacks + has)}. To load a part of it, complete it with what there is: "
            "{**halfstep.float32_state_dict(model, optimizer), **part}"
        )
    first: dict[int, str] = {}
    for name, target in targets.items():
        value = given.get(name)
        if name not in given or not isinstance(target, Tensor) or _is_extra(name):
            continue
        if not isinstance(value, Tensor):
            raise ValueError(f"float32_state[{name!r}] is a {type(value).__name__}, not a tensor")
        if value.shape != target.shape:
            raise ValueError(
                f"float32_state[{name!r}] has shape {tuple(value.shape)}, and the model's is {tuple(target.shape)}"
            )
        alike = value.is_floating_point() == target.is_floating_point() and value.is_complex() == target.is_complex()
        if not alike or value.layout is not torch.strided:
            raise ValueError(
                f"float32_state[{name!r}] is {value.dtype} of layout {value.layout}, and the model's {target.dtype}"
            )
        try:
            taken(value, target)
        except ValueError as error:
            raise ValueError(f"float32_state[{name!r}] is {error}") from None
        if value.is_meta:
            raise ValueError(
                f"float32_state[{name!r}] is on the meta device and has no values: load the checkpoint onto the CPU"
            )
        other = first.setdefault(id(target), name)
        if other != name and not torch.equal(_bits(given[other], target), _bits(value, target)):
            raise ValueError(f"float32_state[{name!r}] differs from {other!r}, which is the same tensor in the model")


def _bits(value: Tensor, target: Tensor) -> Tensor:
    """What makes two tensors the same, NaN included: the bits that are loaded, in float32 where 16 would hide some."""
    dtype = torch.float32 if target.dtype in (torch.float16, torch.bfloat16) else target.dtype
    return taken(value.detach(), target).to(target.device, dtype).contiguous().view(-1).view(torch.uint8)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(map(repr, names[:5])) + more


class _Write(NamedTuple):
    """A weight on its way into a param and its optimizer, checked."""

    owner: HalfOptimizer
    place: int
    group: dict[str, Any]
    slot: Slot
    param: Tensor
    value: Tensor

    def __call__(self) -> int:
        """Write it, and return how many weights saturate."""
        owner, place, group, slot, param, value = self
        format, state = slot.weight, owner.state.get(param)
        if not state and len(format.parts) > 1:
            state = owner._slots.begin(group, slot, param, place)
        stream, step = (state.get("stream", place), int(state["step"])) if state else (place, 0)
        counter = Counter(group["seed"], stream, step, *slot.lines)
        beside = [local(state[checkpoint.key(part)]) for part in format.parts[1:]] if state else []
        value = taken(value.detach(), param).to(device=param.device, dtype=torch.float32)
        convert(FLOAT32, (value,), format, (local(param).detach(), *beside), counter, checkpoint.CONVERSION)
        torch.autograd.graph.increment_version(param)
        return int(bind(format.saturates)(value).sum()) if format.saturates else 0
