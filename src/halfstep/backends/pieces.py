"""Cutting a tensor into pieces of bounded size that follow its logical row-major order, whatever its strides."""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

Box: TypeAlias = tuple[int | slice, ...]


class Piece(NamedTuple):
    """A box of a tensor, and where its elements lie in row-major order: from ``start`` up to ``stop``."""

    box: Box
    start: int
    stop: int


def pieces(shape: Sequence[int], limit: int) -> Iterator[Piece]:
    """Cut a tensor of ``shape`` into boxes of at most ``limit`` elements that cover it in row-major order.

    Every box takes whole the dimensions behind the one that it cuts, so ``tensor[box]`` flattened is a contiguous run
    of the tensor flattened. An empty tensor has no pieces.
    """
    if math.prod(shape) == 0:
        return
    # the first dimension from which on the rest fits
    cut = next((d for d in range(len(shape)) if math.prod(shape[d + 1 :]) <= limit), 0)
    inner = math.prod(shape[cut + 1 :])
    rows = shape[cut] if shape else 1
    step = max(1, limit // inner)
    start = 0
    for outer in itertools.product(*(range(n) for n in shape[:cut])):
        for first in range(0, rows, step):
            last = min(first + step, rows)
            stop = start + (last - first) * inner
            yield Piece((*outer, slice(first, last)) if shape else (), start, stop)
            start = stop
