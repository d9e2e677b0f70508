"""How a number is kept between steps: one file a format."""

from collections.abc import Mapping

import torch

from halfstep.contracts import Format
from halfstep.formats.master32 import MASTER32
from halfstep.formats.plain import FLOAT32, PLAIN, ROUNDED
from halfstep.formats.split import SPLIT16

WEIGHTS: dict[str, Mapping[torch.dtype, Format]] = {"split16": SPLIT16, "master32": MASTER32, "rounded": ROUNDED}
"""What ``weights=`` may name: for each 16-bit dtype of the param, the format. Tests run each on every backend."""

MOMENTS: dict[str, Format] = {"float32": FLOAT32}
"""What ``moments=`` may name."""

GRADS: Mapping[torch.dtype, Format] = PLAIN
"""How a gradient of each dtype is read."""


def weight_format(weights: str, dtype: torch.dtype) -> Format:
    """Return the format of a weight whose param has ``dtype``; a float32 param is its own weight."""
    return FLOAT32 if dtype is torch.float32 else WEIGHTS[weights][dtype]
