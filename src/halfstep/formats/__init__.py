"""How a number is kept between steps: one file a format."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from halfstep.contracts import Format, Moment
from halfstep.formats.block8 import SIGNED, SQUARE
from halfstep.formats.master32 import MASTER32
from halfstep.formats.plain import FLOAT32, PLAIN, ROUNDED
from halfstep.formats.split import SPLIT8, SPLIT16
from halfstep.formats.stochastic import BFLOAT16, STOCHASTIC


class Kinds(NamedTuple):
    """The format of a moment by its kind: one that averages squares, and any other."""

    signed: Format
    square: Format

    def of(self, moment: Moment) -> Format:
        """Return the format that keeps ``moment``."""
        return self.square if moment.square else self.signed


WEIGHTS: dict[str, Mapping[torch.dtype, Format]] = {
    "split16": SPLIT16,
    "split8": SPLIT8,
    "master32": MASTER32,
    "stochastic": STOCHASTIC,
    "rounded": ROUNDED,
}
"""What ``weights=`` may name: for each 16-bit dtype of the param, the format. Tests run each on every backend."""

MOMENTS: dict[str, Kinds] = {
    "float32": Kinds(FLOAT32, FLOAT32),
    "bfloat16": Kinds(BFLOAT16, BFLOAT16),
    "block8": Kinds(SIGNED, SQUARE),
}
"""What ``moments=`` may name: for each kind of moment, the format. Tests run each on every backend."""

GRADS: Mapping[torch.dtype, Format] = PLAIN
"""How a gradient of each dtype is read."""


def weight_format(weights: str, dtype: torch.dtype) -> Format:
    """Return the format of a weight whose param has ``dtype``; a float32 param is its own weight."""
    return FLOAT32 if dtype is torch.float32 else WEIGHTS[weights][dtype]


def moment_format(moments: str, moment: Moment, shape: Sequence[int], whole_blocks: bool = True) -> Format:
    """Return the format of a moment of a tensor that has ``shape`` as a whole; blocks are for large ones alone.

    Nor are they for one that is cut amid them, so that not all are ``whole_blocks``.
    """
    format = MOMENTS[moments].of(moment)
    return FLOAT32 if format.measure and (too_small(shape) or not whole_blocks) else format


def too_small(shape: Sequence[int]) -> str:
    """Say why blocks are not for a tensor of this shape, or nothing where they are."""
    if len(shape) < 2:
        return "fewer than 2 dimensions"
    if math.prod(shape) < 4096:
        return "under 4,096 elements"
    return "rows under 64 elements" if math.prod(shape[1:]) < 64 else ""
