"""Cutting a tensor into spans of bounded size along its logical row-major order, whatever its strides."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from halfstep.contracts import BLOCK, CHUNK, Part

Box: TypeAlias = tuple[int | slice, ...]


class Rows(NamedTuple):
    """The rows of a tensor, all that stands behind dim 0."""

    length: int

    @property
    def blocks(self) -> int:
        """How many blocks a row is cut into."""
        return -(-self.length // BLOCK)

    def block(self, element: int) -> int:
        """Return the number of the block that begins at ``element`` of the tensor in row-major order."""
        row, place = divmod(element, self.length)
        return row * self.blocks + place // BLOCK


def rows(shape: Sequence[int]) -> Rows:
    """Return the rows of a tensor that has ``shape``; one without elements has rows of 1."""
    return Rows(max(1, math.prod(shape[1:])))


def part_shape(part: Part, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of a part that is kept for a tensor of ``shape``."""
    if not part.shared:
        return tuple(shape)
    first = shape[0] if shape else 1
    return first, rows(shape).blocks if math.prod(shape[1:]) else 0


def spans(shape: Sequence[int], limit: int, length: int = 1) -> Iterator[tuple[int, int]]:
    """Cut the row-major order of a tensor into spans ``(start, stop)`` of at most ``limit`` elements.

    A span is a number of whole lines of ``length`` elements, of which the tensor is made, or lies within one line and
    begins on a block of it; where lines are longer than ``limit`` that is at least `BLOCK`.
    """
    total = math.prod(shape)
    if length <= limit:
        step = limit // length * length
        yield from ((start, min(start + step, total)) for start in range(0, total, step))
    else:
        step = limit // BLOCK * BLOCK
        for line in range(0, total, length):
            yield from ((start, min(start + step, line + length)) for start in range(line, line + length, step))


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Cut the elements from ``start`` up to ``stop`` in row-major order into boxes, in that order."""
    if not shape:
        yield ()
        return
    inner = math.prod(shape[1:])
    (first, offset), (last, rest) = divmod(start, inner), divmod(stop, inner)
    if first == last:
        yield from ((first, *box) for box in boxes(shape[1:], offset, rest))
        return
    if offset:
        yield from ((first, *box) for box in boxes(shape[1:], offset, inner))
        first += 1
    if first < last:
        yield (slice(first, last),)
    if rest:
        yield from ((last, *box) for box in boxes(shape[1:], 0, rest))


def taken(tensor: Tensor, start: int, stop: int) -> Tensor:
    """Return a span of a tensor, flat and contiguous: a view of it where it is contiguous itself, else a copy."""
    if tensor.is_contiguous():
        return tensor.view(-1)[start:stop]
    cut = [tensor[box].contiguous().view(-1) for box in boxes(tensor.shape, start, stop)]
    return cut[0] if len(cut) == 1 else torch.cat(cut)


def put_back(tensor: Tensor, start: int, stop: int, span: Tensor) -> None:
    """Write into a tensor what has become of a span that was `taken` of it."""
    if tensor.is_contiguous():
        return
    done = 0
    for box in boxes(tensor.shape, start, stop):
        piece = tensor[box]
        piece.copy_(span[done : done + piece.numel()].view(piece.shape))
        done += piece.numel()


def pairwise(sums: Tensor) -> Tensor:
    """Add neighbours in pairs, and zeros to them where some are missing, until one number is left."""
    sums = torch.nn.functional.pad(sums, (0, 2 ** max(len(sums) - 1, 0).bit_length() - len(sums)))
    while len(sums) > 1:
        pairs = sums.view(-1, 2)
        sums = pairs[:, 0] + pairs[:, 1]
    return sums.view(())


def chunks(grad: Tensor) -> int:
    """Return how many chunks a gradient has."""
    return -(-grad.numel() // CHUNK)


def kinds(sums: Tensor, grads: Sequence[Tensor]) -> Tensor:
    """Say of each gradient, by the sums of its chunks: 0 where it is finite, 1 where it is infinite, 2 where NaN."""
    found = torch.zeros(len(grads), dtype=torch.int32, device=sums.device)
    kind = sums.isinf().int() + 2 * sums.isnan().int()
    if kind.any():
        for k, part in enumerate(kind.split(list(map(chunks, grads)))):
            found[k] = part.max() if len(part) else 0
    return found
