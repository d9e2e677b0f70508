"""A param of 16 bits and 4 more in a byte, as someone else would add it: bfloat16 alone, with random bits."""

import torch

from halfstep.contracts import Format, Part
from halfstep.formats.plain import INFINITY, MAGNITUDE, NAN
from halfstep.primitives import bits, from_bits, select, to_i32


def load_dithered(param, nibble):
    return from_bits(to_i32(param << 16) | to_i32((nibble & 15) << 12))


def store_dithered(weight, random):
    b = bits(weight)
    magnitude = b & MAGNITUDE
    b = select(magnitude < INFINITY - 0x10000, b + (random >> 4), b)
    b = select(magnitude > INFINITY, NAN, b)
    return b >> 16, (b >> 12) & 15


DITHERED = {
    torch.bfloat16: Format(
        "dithered", (Part("", torch.bfloat16), Part("nibble", torch.int8)), load_dithered, store_dithered, random=True
    )
}
