"""Moments in 8 bits, as someone else would add them: 7 or 8 bits of a float's own, and a block's exponent.

Unlike block8's, a value is rounded to the nearest, and a square is kept as it is; so slow averages stall.
"""

import torch

from halfstep.contracts import Format, Part
from halfstep.formats import Kinds
from halfstep.formats.plain import INFINITY, MAGNITUDE, SIGN
from halfstep.primitives import bits, from_bits, select, to_i32


def measure_half8(value):
    b = bits(value)
    magnitude = b & MAGNITUDE
    magnitude = select(magnitude >= INFINITY, INFINITY - 1, magnitude + 0x80000)
    return (magnitude & -2) | ((b >> 31) & 1)


def store_half8(kept, largest):
    exponent = select(largest < 0x07800000, 0, (largest >> 23) - 15)
    code = (kept >> 20) - to_i32(exponent << 3)
    return select(code < 0, 0, code) | to_i32((kept & 1) << 7), exponent


def load_half8(code, exponent):
    magnitude = code & 127
    b = select(magnitude == 0, 0, to_i32((magnitude + to_i32(exponent << 3)) << 20))
    return from_bits(b | (code & SIGN))


_PARTS = (Part("half", torch.int8), Part("shared", torch.uint8, shared=True))
HALF8 = Kinds(*[Format("half8", _PARTS, load_half8, store_half8, measure=measure_half8)] * 2)
