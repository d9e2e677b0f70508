"""The tensors of a step: their names, what is taken, and which may be stepped together; and a loss's tensors."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from halfstep.formats import GRADS, PLAIN
from halfstep.shards import alike, described, local, respread, sharded, unfit


def named(group: Mapping[str, Any], index: int) -> Iterator[tuple[str, Tensor]]:
    """Each param of a group under its name, or under group and position where the optimizer was given no names."""
    names = group.get("param_names") or [f"param {k} of group {index}" for k in range(len(group["params"]))]
    return zip(names, group["params"], strict=True)


def check_param(name: str, param: Tensor) -> None:
    """Raise for a param that no step takes."""
    if param.dtype not in PLAIN:
        raise TypeError(
            f"{name} is {param.dtype}: halfstep steps float16, bfloat16 and float32 params. Cast the model "
            "(model.half(), model.bfloat16(), model.float()) or give this param to an optimizer of torch.optim"
        )
    if param.layout is not torch.strided:
        raise TypeError(
            f"{name} has the layout {param.layout}: halfstep steps dense params. Make it one with param.to_dense(), or "
            "give it to an optimizer of torch.optim"
        )
    if reason := unfit(param):
        raise ValueError(f"{name} is {described(param)}, and {reason}")
    if _overlaps(local(param)):
        raise ValueError(
            f"{name} is a view of shape {tuple(param.shape)} with strides {param.stride()}, in which elements share "
            "memory: make it a tensor of its own with param.contiguous()"
        )


def checked_grad(name: str, param: Tensor) -> Tensor:
    """Return what lies here of a param's gradient; raise where no step takes it.

    A gradient that is sharded otherwise than its param, such as one of which each process has a summand, is first made
    alike by all processes together, and takes its place.
    """
    grad = param.grad
    assert grad is not None
    if sharded(param) or sharded(grad):
        grad = _made_alike(name, param, grad)
    if grad.layout is not torch.strided:
        raise TypeError(
            f"the gradient of {name} is sparse ({grad.layout}): halfstep takes dense ones. Build the module with "
            "sparse=False, or give this param to torch.optim.SparseAdam or SGD"
        )
    if grad.dtype not in GRADS:
        raise TypeError(
            f"the gradient of {name} is {grad.dtype}: must be float16, bfloat16 or float32; cast it, as in "
            "param.grad = param.grad.float()"
        )
    param = local(param)
    # from before its param was given other values by `param.data = ...`
    if grad.shape != param.shape or grad.device != param.device:
        raise ValueError(
            f"{name} has shape {tuple(param.shape)} on {param.device}, its gradient {tuple(grad.shape)} on "
            f"{grad.device}: drop the gradient with zero_grad() after replacing a param's data"
        )
    return grad


def _made_alike(name: str, param: Tensor, grad: Tensor) -> Tensor:
    """Return what lies here of a gradient, spread as its param is."""
    if not alike(grad, param):
        try:
            param.grad = grad = respread(grad.detach(), param)
        except ValueError as error:
            raise TypeError(
                f"the gradient of {name} is {error}; drop it with zero_grad() after sharding a model, so that the next "
                "backward makes it anew"
            ) from None
    return local(grad)


def _overlaps(tensor: Tensor) -> bool:
    """Whether elements of ``tensor`` may share memory: a stride falls short of what the smaller ones span."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            return tensor.numel() > 0
        reach += stride * (size - 1)
    return False


class Turns:
    """Who is stepped in which turn: params that reach into the same memory never in the same one."""

    def __init__(self) -> None:
        self._alone: dict[int, Tensor] = {}
        self._spans: defaultdict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)

    def take(self, param: Tensor) -> int:
        """Return the first turn in which no param before shares memory with this one."""
        # of what fills its storage the address is the storage's
        own = param.storage_offset() == 0
        storage = param.data_ptr() if own else param.untyped_storage().data_ptr()
        first = self._alone.setdefault(storage, param)
        if first is param:
            return 0
        if not self._spans[storage, 0]:
            self._spans[storage, 0].append(_span(first))
        turn = 0
        while not _insert(self._spans[storage, turn], _span(param)):
            turn += 1
        return turn


def _span(param: Tensor) -> tuple[int, int]:
    """The addresses from a param's first byte to behind its last."""
    reach = sum(stride * (size - 1) for stride, size in zip(param.stride(), param.shape, strict=True))
    start = param.data_ptr()
    return start, start + ((reach + 1) * param.itemsize if param.numel() else 0)


def _insert(spans: list[tuple[int, int]], span: tuple[int, int]) -> bool:
    """Put ``span`` among the disjoint, sorted ``spans``; do not where it meets one of them, and return False."""
    place = bisect_left(spans, span)
    if (place and spans[place - 1][1] > span[0]) or (place < len(spans) and spans[place][0] < span[1]):
        return False
    spans.insert(place, span)
    return True


def materialized(outputs: Any) -> Any:
    """Make a list of every iterator, which can be read only once."""
    if isinstance(outputs, Tensor):
        return outputs
    if isinstance(outputs, str | Mapping) or not isinstance(outputs, Iterable) or hasattr(outputs, "_fields"):
        raise ValueError(
            f"outputs must be a Tensor or an iterable of Tensors, not {type(outputs).__name__}: pass the loss itself"
        )
    return (type(outputs) if isinstance(outputs, list | tuple) else list)(map(materialized, outputs))


def tensors_in(outputs: Any) -> list[Tensor]:
    """Return every tensor of what was `materialized`, however deep."""
    if isinstance(outputs, Tensor):
        return [outputs]
    return [tensor for output in outputs for tensor in tensors_in(output)]


def type_of(thing: Any) -> str:
    """Return the type of an argument, for an error."""
    return f"a {type(thing).__module__}.{type(thing).__qualname__}"
