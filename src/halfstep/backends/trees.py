"""The sum of a gradient's squares in Triton: chunk by chunk, as a tree, and the tree above the chunks.

A chunk's second half is added to its first, then of what is left the second half to the first, until one is left; and
of all chunks' sums neighbours are added in pairs. A reduction of Triton's own would add in an order of its own.
"""

import functools
from typing import Any

import triton
import triton.language as tl

from halfstep.backends.jitted import KINDS, WIDE, bind, from_text, read_row
from halfstep.backends.texts import filled
from halfstep.contracts import CHUNK, Format

#: How many chunks a program adds up; the lanes of a chunk whose first additions are within a thread; and how many sums
#: a program of the tree above takes.
CHUNKS, LANES, SUMS = 16, 64, 256
#: What the table says of a gradient: its address, how many elements it has, its first tile, how many tiles may be read
#: 16 bytes at a time, the place of its first sum and that of its kind.
COLUMNS = ("address", "size", "first_tile", "wide_tiles", "sum", "gradient")
#: The types of the arguments of the two kernels.
TYPES = ("*i32", "*i64", "*fp64", "*i32")
TOTAL_TYPES = ("*fp64", "i64", "*fp64")

_KERNEL = """
def halfstep_squares(tensors, table, sums, kinds):
    tensor = tl.load(tensors + tl.program_id(0)).to(tl.int64)
    {known}
    tile = tl.program_id(0) - first_tile
    chunk, lane = tile * CHUNKS + tl.arange(0, CHUNKS), tl.arange(0, LANES)[None, :]
    start = chunk * CHUNK
    if tile < wide_tiles:
        i, end = tl.multiple_of(start, WIDE)[:, None] + lane, size // WIDE * WIDE
        pointers = tl.multiple_of(address.to(tl.pointer_type(kind)), WIDE) + i
        {wide}
    else:
        i, end = start[:, None] + lane, size
        pointers = address.to(tl.pointer_type(kind)) + i
        {narrow}
    for level in tl.static_range(LEVELS):
        halves = tl.permute(tl.reshape(total, (CHUNKS, 2, LANES // 2 >> level)), (0, 2, 1))
        first, second = tl.split(halves)
        total = first + second
    total = tl.reshape(total, (CHUNKS,))
    tl.store(sums + sum + chunk, total, mask=start < size)
    worst = tl.max(tl.where(total != total, 2, tl.where(total == float("inf"), 1, 0)), 0)
    if worst > 0:
        tl.atomic_max(kinds + gradient, worst, sem="relaxed")
"""


@triton.jit
def halfstep_total(numbers, count, totals, WIDTH: tl.constexpr, LEVELS: tl.constexpr):
    """Add each ``WIDTH`` neighbours of ``count`` numbers in pairs, ``LEVELS`` times over."""
    i = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    total = tl.load(numbers + i, mask=i < count, other=0.0)
    for level in tl.static_range(LEVELS):  # pyright: ignore[reportGeneralTypeIssues]
        first, second = tl.split(tl.reshape(total, (WIDTH // 2 >> level, 2)))
        total = first + second
    tl.store(totals + tl.program_id(0) + tl.arange(0, 1), tl.reshape(total, (1,)))


#: What it is compiled for.
TOTAL_CONSTANTS = {"WIDTH": SUMS, "LEVELS": SUMS.bit_length() - 1}


@triton.jit
def _square(x):
    return x * x


def _tree(widened: str, row: int = 0, rows: int = 1) -> str:
    """The squares of every ``rows``-th row of ``LANES`` from ``row`` on, added as the tree has it."""
    if rows * LANES == CHUNK:
        at = row * LANES
        return f"square(load(tl.load(pointers + {at}, mask=i + {at} < end, other=0){widened}).to(tl.float64))"
    return f"({_tree(widened, row, 2 * rows)} + {_tree(widened, row + rows, 2 * rows)})"


@functools.cache
def squares_of(grad: Format) -> Any:
    """Return the kernel of the sums of the squares of gradients' chunks.

    It takes the gradient of each tile; a row for each gradient with what `COLUMNS` names; where the sums go; and where
    to say of each gradient what is not finite in it: 1 where one of its numbers is infinite, 2 where one is NaN.
    """
    kind = KINDS[grad.parts[0].dtype]
    tree = f"total = {_tree('' if kind is tl.float32 else '.to(tl.int32)')}"
    constants = {"CHUNK": CHUNK, "CHUNKS": CHUNKS, "LANES": LANES, "LEVELS": LANES.bit_length() - 1, "WIDE": WIDE}
    names = {name: tl.constexpr(value) for name, value in constants.items()}
    names |= {"load": bind(grad.load), "kind": kind, "square": _square}
    return from_text(filled(_KERNEL, known=read_row(COLUMNS), wide=[tree], narrow=[tree]), "halfstep_squares", names)
