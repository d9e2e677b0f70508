"""States and weights as safetensors files: tensors under their names, and all else as JSON in the file's head."""

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from halfstep.files import write_atomically
from halfstep.shards import sharded

#: The entry of the file's head that says how a nested state is put together.
_HEAD = "halfstep"
#: What the head of every file begins with, as readers ask for it.
_FORMAT = {"format": "pt"}
#: What the format itself calls its head, so that no tensor can be called so.
_RESERVED = "__metadata__"
#: The dtypes that the format has a name for.
_DTYPES = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.bool}
    | {torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64}
    | {torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz}
    | {torch.float8_e8m0fnu, torch.float4_e2m1fn_x2}
)


def save_safetensors(state: Any, file: str | Path) -> None:
    """Write a state, or a dict of names and tensors, as a safetensors file; the whole file or nothing.

    Names and tensors, as `float32_state_dict` gives them, make a plain file that any reader opens. Of tied tensors the
    first is written, and the head names the others, as `safetensors.torch.save_model` does.

    Args:
        state: tensors, numbers, strings, None and dtypes, in dicts, lists and tuples, however deep.
        file: where it goes; what was there is replaced.

    Raises:
        ValueError: ``state`` holds something else; the text says where.

    Exactness:
        `load_safetensors` gives all of it back, type for type and bit for bit; dicts of a subclass as dicts.
    """
    tensors, tied = _Tensors(), {}
    if isinstance(state, Mapping) and state and all(_is_plain(name, value) for name, value in state.items()):
        for name, value in state.items():
            # the head has an entry of this name already, so that it cannot say what the tensor is tied to
            kept = tensors.add((name,), value.clone() if name in _FORMAT else value)
            if kept != name:
                tied[name] = kept
        head = {**_FORMAT, **tied}
    else:
        head = {**_FORMAT, _HEAD: json.dumps(_encoded(state, (), tensors))}
    write_atomically(Path(file), lambda temporary: save_file(tensors.named, temporary, head))


def load_safetensors(file: str | Path) -> Any:
    """Read what `save_safetensors` wrote, or the names and tensors of another's safetensors file.

    Args:
        file: the file, which is mapped: its tensors are read where they are used.

    Returns:
        The state, on the CPU.

    Raises:
        ValueError: it is no such file, or is cut short.
        OSError: it cannot be opened.
    """
    file = Path(file)
    if not file.is_file():
        raise FileNotFoundError(2, "there is no such file", str(file))
    try:
        with safe_open(file, framework="pt") as opened:
            head = opened.metadata() or {}
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118, it is no dict
        if _HEAD in head:
            return _decoded(json.loads(head[_HEAD]), tensors)
    except (SafetensorError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(f"{file} is no safetensors file that can be read, or is cut short: {error}") from error
    ties = [pair for pair in head.items() if pair not in _FORMAT.items()]
    return tensors | {name: tensors[kept] for name, kept in ties if kept in tensors and name not in tensors}


def _is_plain(name: Any, value: Any) -> bool:
    return isinstance(name, str) and name not in (_RESERVED, _HEAD) and isinstance(value, Tensor)


class _Tensors:
    """Tensors by the names under which a file keeps them; none of them shares memory."""

    def __init__(self) -> None:
        self.named: dict[str, Tensor] = {}
        self._names: dict[Any, str] = {}
        self._storages: set[int] = set()
        # what is gone would leave its address to another
        self._seen: list[Tensor] = []

    def add(self, path: tuple[Any, ...], tensor: Tensor) -> str:
        """Return the name for the tensor at ``path``: that of an earlier one, where it is the same memory."""
        if sharded(tensor):
            raise ValueError(
                f"{_where(path)} is a DTensor, of which each process has a part: let every process call full_tensor() "
                "on it and one of them save, or use torch.distributed.checkpoint"
            )
        if tensor.layout is not torch.strided or tensor.device.type == "meta":
            raise ValueError(f"{_where(path)} is a tensor of layout {tensor.layout} on {tensor.device}: make it dense")
        if tensor.dtype not in _DTYPES:
            raise ValueError(
                f"{_where(path)} is a tensor of {tensor.dtype}, which a safetensors file has no name for: cast it, or "
                "use torch.save"
            )
        self._seen.append(tensor)
        memory = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg()
        same = memory if tensor.numel() else id(tensor)
        if same not in self._names:
            names = itertools.chain(
                [".".join(map(str, path))], (f"{'.'.join(map(str, path))}#{k}" for k in itertools.count(2))
            )
            name = self._names[same] = next(name for name in names if name != _RESERVED and name not in self.named)
            storage = tensor.untyped_storage().data_ptr()
            # torch only marks what is conjugated or negated, and a file has no such marks
            tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
            # of what lies in one memory each has its own in the file
            self.named[name] = tensor.clone() if storage in self._storages else tensor
            self._storages.add(storage)
        return self._names[same]


def _where(path: tuple[Any, ...]) -> str:
    return f"the state's {'.'.join(map(str, path)) or 'top'}"


def _encoded(node: Any, path: tuple[Any, ...], tensors: _Tensors) -> Any:
    """A node as JSON: None, bools, ints and strings as they are, all else as a list that begins with its kind."""
    if isinstance(node, Tensor):
        return ["tensor", tensors.add(path, node)]
    if isinstance(node, torch.dtype):
        return ["dtype", str(node).removeprefix("torch.")]
    if node is None or type(node) in (bool, int, str):
        return node
    if type(node) is float:
        return ["float", node.hex()]
    if isinstance(node, Mapping):
        pairs = [(_encoded(k, (*path, k), tensors), _encoded(v, (*path, k), tensors)) for k, v in node.items()]
        return ["dict", *pairs]
    if type(node) in (list, tuple):
        kept = [_encoded(value, (*path, place), tensors) for place, value in enumerate(node)]
        return [type(node).__name__, *kept]
    raise ValueError(
        f"{_where(path)} is a {type(node).__name__}, which a safetensors file cannot keep: it has tensors, numbers, "
        "strings, None and dtypes, in dicts, lists and tuples"
    )


def _decoded(node: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(node, dict):
        raise ValueError("its head holds an object, which is written otherwise")
    if not isinstance(node, list):
        return node
    kind, *rest = node
    if kind == "tensor":
        return tensors[rest[0]]
    if kind == "dtype":
        if not isinstance(dtype := getattr(torch, rest[0]), torch.dtype):
            raise ValueError(f"its head names {rest[0]!r} as a dtype")
        return dtype
    if kind == "float":
        return float.fromhex(rest[0])
    if kind == "dict":
        return {_decoded(key, tensors): _decoded(value, tensors) for key, value in rest}
    return {"list": list, "tuple": tuple}[kind](_decoded(value, tensors) for value in rest)
