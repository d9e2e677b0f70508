"""The sum of a gradient's squares as machine code, one pass over memory: what its check and its norm are made of.

A chunk's 1,024 squares are added as a tree: its second half to its first, then of what is left the second half to the
first, until one is left. Any number of lanes can do that, and all get the same bits.
"""

import functools
from collections.abc import Callable

import numba
import numpy as np

from halfstep.backends.loops import accesses, jit, number_of, wide
from halfstep.backends.texts import filled
from halfstep.backends.traced import bind
from halfstep.contracts import CHUNK, Format

#: Lanes of a chunk whose first additions need no memory between them; what they leave goes on in a buffer.
LANES = 64

_KERNEL = """
def kernel(addresses, offsets, sizes, tensor, begin, end, sums):
    wide()
    buffer = empty(CHUNK, float64)
    for chunk in range(begin, end):
        while chunk >= offsets[tensor + 1]:
            tensor += 1
        address, first = addresses[tensor], (chunk - offsets[tensor]) * CHUNK
        size = sizes[tensor] - first
        if size >= CHUNK:
            for i in range(LANES):
                buffer[i] = {tree}
        else:
            for i in range(CHUNK):
                buffer[i] = 0.0
            for i in range(size):
                buffer[i] = square(float64(load(read(address, first + i))))
            {rows}
        {lanes}
        sums[chunk] = buffer[0]
"""


def _tree(row: int = 0, rows: int = 1) -> str:
    """The squares of every ``rows``-th row of ``LANES`` from ``row`` on, added as the tree has it."""
    if rows * LANES == CHUNK:
        return f"square(float64(load(read(address, first + {row * LANES} + i))))"
    return f"({_tree(row, 2 * rows)} + {_tree(row + rows, 2 * rows)})"


def _halvings(width: int, end: int) -> list[str]:
    """Loops that add the second half of ``width`` numbers to the first, down to ``end`` of them."""
    found = []
    while width > end:
        width //= 2
        found += [f"for i in range({width}):", f"    buffer[i] += buffer[i + {width}]"]
    return found


@jit
def _square(x):
    return x * x


@functools.cache
def compile_squares(grad: Format) -> Callable[..., None]:
    """Return a kernel that sums the squares of gradients in chunks.

    It takes the address of each gradient, where its chunks begin in the sum of all, and its size; then the tensor of
    the first chunk, the first and the last chunk to do, and where the sums go.
    """
    number = number_of(grad.parts[0].dtype)
    read, _ = accesses(number, 0, 1)
    names = {"empty": np.empty, "float64": np.float64, "CHUNK": CHUNK, "LANES": LANES, "wide": wide}
    names |= {"load": bind(grad.load), "read": read, "square": _square}
    text = _KERNEL.replace("{tree}", _tree())
    exec(filled(text, rows=_halvings(CHUNK, LANES), lanes=_halvings(LANES, 1)), names)
    row = numba.int64[::1]
    return jit(numba.void(row, row, row, numba.int64, numba.int64, numba.int64, numba.float64[::1]))(names["kernel"])
