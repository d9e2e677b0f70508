"""Params of which each process has a part: torch's DTensors, as FSDP2 and tensor parallelism make them.

Kernels work on the part that lies here. What is kept of it is spread as the param is, so that checkpoints find it. All
processes of a mesh decide and count alike: what one finds in its parts, `agreed` tells the others.
"""

import functools
import itertools
import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from halfstep.backends.pieces import pairwise
from halfstep.contracts import BLOCK


def sharded(tensor: Any) -> bool:
    """Whether a tensor's parts lie in several processes, one of them maybe here."""
    if type(tensor) is Parameter or type(tensor) is Tensor:
        return False
    # its module takes most of a second to import, and who has such tensors has it
    api = sys.modules.get("torch.distributed.tensor")
    return api is not None and isinstance(tensor, api.DTensor)


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that lies here, in its own memory: of one that is no DTensor the tensor itself."""
    if not sharded(tensor):
        return tensor
    # to_local() makes a view each time, which takes 30 times as long
    part: Any = tensor._local_tensor  # pyright: ignore[reportAttributeAccessIssue]
    return part.wait() if type(part).__name__ == "AsyncCollectiveTensor" else part


def placements_of(tensor: Any) -> tuple[Any, ...] | None:
    """Return how a tensor is spread along each dim of its mesh, the same object as long as it is, or None."""
    return tensor.placements if sharded(tensor) else None


def spread(part: Tensor, shape: Sequence[int], like: Tensor) -> Tensor:
    """Return a tensor of this whole ``shape``, spread as ``like`` is, of which ``part`` lies here."""
    if not sharded(like):
        return part
    api: Any = sys.modules["torch.distributed.tensor"]
    whole = {"shape": torch.Size(shape), "stride": _strides(shape)}
    return api.DTensor.from_local(part, *_mesh_and_placements(like), run_check=False, **whole)


def taken(tensor: Tensor, like: Tensor) -> Tensor:
    """Return what lies here of a tensor, one spread as ``like`` is or a whole one, where ``like`` is.

    Raises:
        ValueError: it is spread otherwise; the text is a clause that begins with how.
    """
    if alike(tensor, like):
        return local(tensor)
    if sharded(tensor):
        raise ValueError(
            f"{described(tensor)}, the param {described(like)}: torch.distributed.checkpoint moves it, or pass what "
            "full_tensor() returns"
        )
    shape, offset = _box(tuple(tensor.shape), *_mesh_and_placements(like))
    return tensor[tuple(slice(first, first + size) for first, size in zip(offset, shape, strict=True))]


def alike(tensor: Tensor, other: Tensor) -> bool:
    """Whether both are spread over the same processes in the same way, or neither is."""
    if sharded(tensor) and sharded(other):
        return _mesh_and_placements(tensor) == _mesh_and_placements(other)
    return sharded(tensor) is sharded(other)


def respread(tensor: Any, like: Any) -> Tensor:
    """Return a tensor spread as ``like`` is, by all processes of their mesh together.

    Raises:
        ValueError: they have no mesh in common; the text is a clause that begins with how it is spread.
    """
    if not (sharded(tensor) and sharded(like) and tensor.device_mesh == like.device_mesh):
        raise ValueError(f"{described(tensor)}, the param {described(like)}")
    return tensor.redistribute(placements=like.placements)


def described(tensor: Tensor) -> str:
    """Say how a tensor is spread."""
    if not sharded(tensor):
        return "whole"
    mesh, placements = _mesh_and_placements(tensor)
    return f"spread as {', '.join(map(repr, placements))} over processes {mesh.mesh.tolist()}"


def unfit(param: Tensor) -> str:
    """Say why a param cannot be stepped as it is spread, or nothing where it can."""
    if not sharded(param):
        return ""
    mesh, placements = _mesh_and_placements(param)
    if any(placement.is_partial() for placement in placements):
        return "each process has but a summand of it: redistribute it as Shard or Replicate first"
    for k, placement in enumerate(placements):
        factor = getattr(placement, "split_factor", None)
        later = math.prod(mesh.size(j) for j in range(k + 1, mesh.ndim) if _dim(placements[j]) == _dim(placement))
        if factor is not None and factor != later:
            return "what a process has of it is no box of the whole: shard it over one mesh, from left to right"
    return ""


def lines(param: Tensor) -> tuple[int, int, int]:
    """Return where in the whole a param's part lies, as `halfstep.contracts.Counter` has it: start, length, pitch.

    Raises:
        ValueError: it is cut along two dims behind the first; the text is a clause that begins so.
    """
    return _lines(tuple(param.shape), *_mesh_and_placements(param)) if sharded(param) else (0, 0, 0)


def keeps_blocks(param: Tensor) -> bool:
    """Whether no process has a part of a block of a row: the same answer in all."""
    return not sharded(param) or _keeps_blocks(tuple(param.shape), *_mesh_and_placements(param))


def _mesh_and_placements(tensor: Any) -> tuple[Any, tuple[Any, ...]]:
    return tensor.device_mesh, tensor.placements


def _dim(placement: Any) -> int | None:
    """The dim that a placement cuts."""
    return getattr(placement, "dim", None)


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    return torch.empty(shape, device="meta").stride()


@functools.lru_cache(maxsize=4096)
def _box(shape: tuple[int, ...], mesh: Any, placements: tuple[Any, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape of this process's part of a tensor, and where in each dim it begins."""
    utils: Any = sys.modules["torch.distributed.tensor._utils"]
    return utils.compute_local_shape_and_global_offset(shape, mesh, placements)


@functools.lru_cache(maxsize=4096)
def _lines(shape: tuple[int, ...], mesh: Any, placements: tuple[Any, ...]) -> tuple[int, int, int]:
    here, offset = _box(shape, mesh, placements)
    if not math.prod(here):
        return 0, 0, 0
    start = sum(first * stride for first, stride in zip(offset, _strides(shape), strict=True))
    cut = [dim for dim in range(1, len(shape)) if here[dim] != shape[dim]]
    if len(cut) > 1:
        raise ValueError(
            f"cut along dims {' and '.join(map(str, cut))}, and its formats take random bits, which follow each "
            "element's place in the whole: shard it along the first and one further dim at most, or choose "
            "weights='split16', moments='float32'"
        )
    return (start, math.prod(here[cut[0] :]), math.prod(shape[cut[0] :])) if cut else (start, 0, 0)


@functools.lru_cache(maxsize=4096)
def _keeps_blocks(shape: tuple[int, ...], mesh: Any, placements: tuple[Any, ...]) -> bool:
    cuts = [k for k, placement in enumerate(placements) if (_dim(placement) or 0) > 0]
    if any(_dim(placements[k]) != 1 for k in cuts):
        return False
    # each process along the dims of the mesh that cut rows, the first along the others
    coordinates = itertools.product(*(range(mesh.size(k)) if k in cuts else (0,) for k in range(mesh.ndim)))
    return not cuts or all(_cuts_between_blocks(shape, mesh, placements, each) for each in coordinates)


def _cuts_between_blocks(
    shape: tuple[int, ...], mesh: Any, placements: tuple[Any, ...], coordinate: tuple[int, ...]
) -> bool:
    """Whether the part of a row that one process has is whole blocks, and just those that it has of a shared part."""
    utils: Any = sys.modules["torch.distributed.tensor._utils"]
    inner, row = math.prod(shape[2:]), math.prod(shape[1:])
    found = []
    for length in (shape[1], -(-row // BLOCK)):
        size, first = utils._compute_local_shape_and_global_offset(
            (shape[0], length), mesh.shape, list(coordinate), placements
        )
        found.append((size[1], first[1]))
    (size, first), (blocks, place) = found
    return blocks == -(-size * inner // BLOCK) and (not size or place * BLOCK == first * inner)


# ------------------------------------------------------------------ what all processes do alike


class Spread(NamedTuple):
    """Over which processes tensors are spread: a mesh, and those of its dims along which each has another part."""

    mesh: Any
    dims: tuple[int, ...]

    def summed(self, total: Tensor) -> Tensor:
        """Return the sum of all processes' float64 numbers, added in one order in each."""
        for dim in self.dims:
            if self.mesh.size(dim) > 1:
                own = _there(total, self.mesh).view(1)
                found = [torch.empty_like(own) for _ in range(self.mesh.size(dim))]
                torch.distributed.all_gather(found, own, group=self.mesh.get_group(dim))
                total = pairwise(torch.cat(found)).to(total.device, non_blocking=True)
        return total


def spread_of(tensor: Tensor) -> Spread | None:
    """Return over which processes a tensor is spread, or None where it is whole."""
    if not sharded(tensor):
        return None
    mesh, placements = _mesh_and_placements(tensor)
    return Spread(mesh, tuple(k for k, placement in enumerate(placements) if _dim(placement) is not None))


def spreads(params: Iterable[Tensor]) -> list[Spread]:
    """Return over which processes any of ``params`` are spread, in an order that is the same in each process.

    Smaller meshes come first: what is found in one is known to all of a larger that holds it.
    """
    kinds: dict[tuple[int, tuple[Any, ...]], Tensor] = {}
    for param in params:
        if sharded(param):
            mesh, placements = _mesh_and_placements(param)
            kinds.setdefault((id(mesh), placements), param)
    found = {spread for param in kinds.values() if (spread := spread_of(param))}
    return sorted(found, key=lambda each: (*_order(each.mesh), each.dims))


def _order(mesh: Any) -> tuple[Any, ...]:
    return mesh.size(), mesh.mesh_dim_names or (), mesh.mesh.flatten().tolist(), mesh.shape


def agreed(flag: Tensor, over: Sequence[Spread]) -> Tensor:
    """Return the largest of all processes' numbers, which are 0 or more; nothing waits.

    Each mesh is asked in turn, by all its processes in the same order, so that none waits for another for ever. Where
    the largest holds all processes, all know then. Where none does, meshes may overlap: what was found in a later one
    is carried back.
    """
    meshes = list(dict.fromkeys(spread.mesh for spread in over))
    if meshes and meshes[-1].size() < torch.distributed.get_world_size():
        meshes += reversed(meshes)
    joined = flag
    for mesh in meshes:
        joined = _there(joined, mesh).clone()
        for dim in range(mesh.ndim):
            if mesh.size(dim) > 1:
                torch.distributed.all_reduce(joined, torch.distributed.ReduceOp.MAX, group=mesh.get_group(dim))
    return joined.to(flag.device, non_blocking=True)


def _there(number: Tensor, mesh: Any) -> Tensor:
    """A number on a device that ``mesh`` communicates by."""
    return number if number.device.type == mesh.device_type else number.to(mesh.device_type)
