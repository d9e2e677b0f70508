"""A float32 copy of the weight beside the param: 4 bytes, exact, and the param wins where someone wrote it."""

import torch

from halfstep.contracts import Format, Part
from halfstep.formats.plain import (
    MAGNITUDE,
    SATURATES_BF16,
    SATURATES_F16,
    SIGN,
    load_bf16,
    load_f16,
    saturates_bf16,
    saturates_f16,
    store_bf16,
    store_f16,
)
from halfstep.primitives import bits, from_bits, select, to_i32, widen_f16

# The copy holds as long as the param is a nearest neighbour of it; of two equally near, either will do, since a param
# rounded elsewhere may have gone the other way. Otherwise the param was written from outside and is the truth. NaN
# needs no case of its own: a NaN on one side only is no neighbour, and on both sides either answer is NaN.


def load_master_bf16(param, master):
    b = bits(master)
    magnitude = b & MAGNITUDE
    magnitude = select(saturates_bf16(master), SATURATES_BF16 - 1, magnitude)
    sign = (b & SIGN) >> 16
    # the nearest neighbour is the sum's upper half, with ties away from zero and towards it
    away = (to_i32(magnitude + 0x8000) >> 16) | sign
    toward = (to_i32(magnitude + 0x7FFF) >> 16) | sign
    return select((param == away) | (param == toward), master, load_bf16(param))


def load_master_f16(param, master):
    (nearest,) = store_f16(master)
    magnitude = select(saturates_f16(master), SATURATES_F16 - 1, bits(master) & MAGNITUDE)
    target = from_bits(magnitude)
    distance = bits(widen_f16(param & 0x7FFF) - target) & MAGNITUDE
    least = bits(widen_f16(nearest & 0x7FFF) - target) & MAGNITUDE
    same_sign = (param & SIGN) == (bits(master) & SIGN)
    near = (param == nearest) | (same_sign & (distance == least))
    return select(near, master, load_f16(param))


def store_master_bf16(weight):
    (param,) = store_bf16(weight)
    return param, weight


def store_master_f16(weight):
    (param,) = store_f16(weight)
    return param, weight


MASTER_BF16 = Format(
    "master32",
    (Part("", torch.bfloat16), Part("master", torch.float32)),
    load_master_bf16,
    store_master_bf16,
    saturates_bf16,
)
MASTER_F16 = Format(
    "master32",
    (Part("", torch.float16), Part("master", torch.float32)),
    load_master_f16,
    store_master_f16,
    saturates_f16,
)

MASTER32 = {torch.bfloat16: MASTER_BF16, torch.float16: MASTER_F16}
