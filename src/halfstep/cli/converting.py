"""What `halfstep convert` makes of a file: other formats, torch's state, float32 weights."""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from halfstep import foreign, loading
from halfstep.cli.errors import InputError
from halfstep.conversions import Conversion, summary
from halfstep.engine import HalfOptimizer
from halfstep.files import write_atomically
from halfstep.formats import MOMENTS, WEIGHTS
from halfstep.optimizers import SGD, Adam, Lion
from halfstep.options import TORCHS
from halfstep.safe import load_safetensors, save_safetensors
from halfstep.torch_state import torch_state_dict

SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
AIMS = ("halfstep", "torch", "float32")

#: What a state keeps of a param says whose it is, by the names of its moments.
_KINDS: tuple[tuple[tuple[str, ...], type[HalfOptimizer]], ...] = (
    (("exp_avg", "exp_avg_sq"), Adam),
    (("exp_avg",), Lion),
    (("momentum_buffer",), SGD),
    ((), SGD),
)


def read(file: Path) -> Any:
    """Read a checkpoint without running any code that it may hold, and without loading it whole where it can be mapped.

    Raises:
        InputError: it cannot be read.
    """
    if not file.exists():
        raise InputError(f"IN {file}: there is no such file")
    try:
        if file.suffix == ".safetensors":
            return load_safetensors(file)
        return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        # torch.load answers with half a dozen kinds of exceptions to a file that is not its own
        what = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"IN {file}: cannot be read as a checkpoint: {what}") from error


def write(file: Path, content: Any) -> None:
    """Write a checkpoint: the whole file or nothing.

    Raises:
        InputError: it holds what the file's format cannot keep.
    """
    try:
        if file.suffix == ".safetensors":
            save_safetensors(content, file)
        else:
            write_atomically(file, lambda temporary: torch.save(content, temporary))
    except ValueError as error:
        raise InputError(f"OUT {file}: {error}") from error


def _is_state(node: Any) -> bool:
    return isinstance(node, Mapping) and "state" in node and "param_groups" in node


def _is_model(node: Any) -> bool:
    """Whether this is a model's state: names and tensors, some of them of floats, and what modules keep besides."""
    if not isinstance(node, Mapping) or not all(isinstance(name, str) for name in node):
        return False
    tensors = [value for name, value in node.items() if not name.endswith("_extra_state")]
    alike = all(isinstance(value, Tensor) for value in tensors)
    return alike and any(value.is_floating_point() for value in tensors)


def _found(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], bool]]:
    """The path of each optimizer's state (True) and each model's (False) in a checkpoint."""
    if _is_state(node) or _is_model(node):
        yield path, _is_state(node)
    elif isinstance(node, Mapping):
        for key, value in node.items():
            yield from _found(value, (*path, key))
    elif isinstance(node, list | tuple):
        for key, value in enumerate(node):
            yield from _found(value, (*path, key))


def _at(node: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        node = node[key]
    return node


def _replaced(node: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A checkpoint with another value at ``path``; the rest is shared."""
    if not path:
        return value
    key, *rest = path
    new = _replaced(node[key], tuple(rest), value)
    if isinstance(node, Mapping):
        return {name: new if name == key else kept for name, kept in node.items()}
    return type(node)(new if place == key else kept for place, kept in enumerate(node))


class Conversions:
    """A checkpoint on its way to another format.

    Args:
        content: the checkpoint: a model's state, an optimizer's, or both and more in dicts and lists.
        weights, moments: the formats to convert to, None for those that it is in.
        aim: what it becomes, of `AIMS`.

    Raises:
        InputError: what was asked for cannot be had of this checkpoint.
    """

    def __init__(self, content: Any, weights: str | None, moments: str | None, aim: str) -> None:
        for name, value, allowed in (("weights", weights, WEIGHTS), ("moments", moments, MOMENTS), ("to", aim, AIMS)):
            if value is not None and value not in allowed:
                raise InputError(f"--{name} {value}: must be one of {', '.join(allowed)}")
        if aim != "halfstep" and (weights or moments):
            raise InputError(f"--to {aim}: is float32 throughout; leave --weights and --moments out")
        self._content, self._aim = content, aim
        #: options that say where and how a run steps, and not what: the conversion, on this machine, has its own
        self._kept = ("param_names", *TORCHS, *(["backend"] if aim == "halfstep" else []))
        self._asked = {name: value for name, value in (("weights", weights), ("moments", moments)) if value}
        found = list(_found(content))
        self._states = [path for path, is_state in found if is_state]
        self._models = [path for path, is_state in found if not is_state]
        self.conversions: list[Conversion] = []
        if not found:
            raise InputError("IN: holds neither a model's state nor an optimizer's")
        if self._asked and not self._states:
            raise InputError("IN: holds no optimizer's state, so there are no formats to convert")
        if aim == "torch" and not self._states:
            raise InputError("--to torch: IN holds no optimizer's state; for its weights give --to float32")
        if aim == "float32" and len(self._models) != 1:
            raise InputError(f"--to float32: IN holds {len(self._models)} models' states, and one is needed")

    @property
    def params(self) -> int:
        """How many params there are to convert."""
        if not self._asked and self._aim == "halfstep":
            return 0
        return sum(len(group["params"]) for path in self._states for group in self._groups(path))

    def summary(self) -> list[str]:
        """Return what was converted and rounded, in lines."""
        return summary(self.conversions)

    def convert(self, done: Callable[[str], object]) -> Any:
        """Return the checkpoint as it was asked for; ``done`` hears the name of each param that is.

        Raises:
            InputError: a state does not fit its params, or it cannot be told whose it is.
        """
        content = self._content
        if not self._asked and self._aim == "halfstep":
            return content
        float32: dict[int, Tensor] = {}
        for path in self._states:
            names = self._names(path)
            try:
                state, weights = self._state(path, names, done)
            except ValueError as error:
                raise InputError(f"IN: {error}") from error
            content = _replaced(content, path, state)
            for name, weight in weights.items():
                float32[_place(_at(self._content, self._models[0])[name])] = weight
        for path in self._models:
            content = _replaced(content, path, self._model(_at(self._content, path), float32))
        return _at(content, self._models[0]) if self._aim == "float32" else content

    def _groups(self, path: tuple[Any, ...]) -> list[dict[str, Any]]:
        try:
            groups, _ = loading.parts(_at(self._content, path))
        except ValueError as error:
            raise InputError(f"IN: {error}") from error
        return groups

    def _names(self, path: tuple[Any, ...]) -> list[str] | None:
        """The model's name for each param of a state, or None where there is no model."""
        if not self._models:
            return None
        where = ".".join(map(str, path)) or "the optimizer's state"
        groups, way_out = self._groups(path), "save it from an optimizer of named params (model.named_parameters())"
        if len(self._models) > 1:
            raise InputError(f"IN: holds {len(self._models)} models' states, and it is not told whose {where} is")
        model = _at(self._content, self._models[0])
        count = sum(len(group["params"]) for group in groups)
        if all("param_names" in group for group in groups):
            names = [name for group in groups for name in group["param_names"]]
            if len(names) != count:
                raise InputError(f"IN: {where} has {count} params and {len(names)} names of them; {way_out}")
            if missing := [name for name in names if name not in model]:
                raise InputError(f"IN: {where} names params that the model has not: {', '.join(missing[:5])}")
            return names
        alone: dict[int, str] = {}
        for name, value in model.items():
            if isinstance(value, Tensor) and value.is_floating_point():
                alone.setdefault(_place(value), name)
        if len(groups) > 1 or count != len(alone):
            raise InputError(
                f"IN: {where} has {count} params without names in {len(groups)} groups, the model {len(alone)} "
                f"tensors: it cannot be told which belongs to which; {way_out}"
            )
        return list(alone.values())

    def _state(
        self, path: tuple[Any, ...], names: list[str] | None, done: Callable[[str], object]
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """A state converted, and what its params become: their 16 bits, or float32 weights."""
        groups, states = loading.parts(_at(self._content, path))
        new_states, new_groups, weights, places = {}, [], {}, itertools.count()
        for group in groups:
            converted = {**_options(group), **self._asked}
            for number, place in zip(group["params"], places, strict=False):
                saved = states.get(number, {})
                name = names[place] if names else f"param {number}"
                param = self._param(name, saved, names)
                optimizer = self._optimizer(name, param, group, saved)
                _, weight, moments = optimizer._formats(optimizer.param_groups[0], param)
                # a param's stream of random bits is its place among all, not that among one
                placed = {"stream": place} if saved and any(format.random for format in (weight, *moments)) else {}
                one = {**placed, **saved}
                optimizer.load_state_dict({"state": {0: one}, "param_groups": [{**_options(group), "params": [0]}]})
                self.conversions += optimizer.conversions()
                made = optimizer.state_dict() if self._aim == "halfstep" else torch_state_dict(optimizer)
                if 0 in made["state"]:
                    new_states[number] = made["state"][0]
                converted = made["param_groups"][0]
                if names:
                    weights[name] = param.detach() if self._aim == "halfstep" else optimizer.float32_weight(param)
                done(name)
            kept = {name: group[name] for name in self._kept if name in group}
            new_groups.append({**converted, **kept, "params": list(group["params"])})
        return {"state": new_states, "param_groups": new_groups}, weights

    def _param(self, name: str, saved: Mapping[str, Any], names: list[str] | None) -> nn.Parameter:
        """A param of its own memory; where there is no model, of the shape that its state shows."""
        if names:
            value = _at(self._content, self._models[0])[name]
            return nn.Parameter(value.clone(), requires_grad=False)
        if self._asked.get("weights") or self._aim == "torch" or "remainder" in saved or "master" in saved:
            raise ValueError(
                f"{name} cannot be converted without the model: the float32 weight is in both; give a checkpoint "
                "that holds the model's state beside the optimizer's"
            )
        shapes = [tensor.shape for key, tensor in saved.items() if _moment(key) and isinstance(tensor, Tensor)]
        # of 7 bits of mantissa beside nothing or of 10 the dtype is of no account: nothing of the weight is kept
        dtype = torch.bfloat16 if "mantissa" in saved else torch.float32
        return nn.Parameter(torch.zeros(shapes[0] if shapes else (), dtype=dtype), requires_grad=False)

    def _optimizer(
        self, name: str, param: nn.Parameter, group: Mapping[str, Any], saved: Mapping[str, Any]
    ) -> HalfOptimizer:
        """An optimizer of the kind that ``saved`` is of, with the group's options, in the formats asked for."""
        formats = {key: group[key] for key in ("weights", "moments") if key in group}
        entry = foreign.entry(saved, group, param)
        moments = {moment for moment in map(_moment, entry) if moment}
        kinds = [kind for names, kind in _KINDS if set(names) == moments]
        if not kinds:
            raise ValueError(f"the state for {name} has {', '.join(map(repr, saved))}, of no optimizer that is known")
        momentum = {"momentum": 0.9} if "momentum_buffer" in moments else {}
        make: Any = kinds[0]
        # all other options come with the state
        return make([{**formats, **momentum, **self._asked, "params": [(name, param)]}])

    def _model(self, model: Mapping[str, Any], float32: Mapping[int, Tensor]) -> dict[str, Any]:
        """A model's state with what its params have become."""
        made: dict[str, Any] = {}
        widened: defaultdict[int, list[Tensor]] = defaultdict(list)
        for name, value in model.items():
            if isinstance(value, Tensor) and _place(value) in float32:
                value = float32[_place(value)]
            elif (
                self._aim != "halfstep" and isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16)
            ):
                same = widened[_place(value)]
                if not same:
                    same.append(value.float())
                value = same[0]
            made[name] = value
        return made


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def _moment(key: str) -> str | None:
    """The moment that a key of a state belongs to, if any; of two that begin alike the longer."""
    moments = sorted({name for names, _ in _KINDS for name in names}, key=len, reverse=True)
    return next((name for name in moments if key == name or key in (f"{name}_code", f"{name}_exponent")), None)


def _place(tensor: Tensor) -> int:
    """What tied tensors have in common."""
    return tensor.data_ptr() if tensor.numel() else id(tensor)
