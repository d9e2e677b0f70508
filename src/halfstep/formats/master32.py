"""A float32 copy of the weight beside the param: 4 bytes, exact, and the param wins where someone wrote it."""

import torch

from halfstep.contracts import Format, Part
from halfstep.formats.plain import (
    INFINITY,
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
# rounded elsewhere may have gone the other way. Otherwise the param was written from outside and is the truth. NaN has
# no neighbours: beside a copy that is NaN the param is the truth, which is NaN as well unless it was written.


def load_master_bf16(param, master):
    b = bits(master)
    magnitude = b & MAGNITUDE
    sign = (b & SIGN) >> 16
    settled = select(saturates_bf16(master), SATURATES_BF16 - 1, magnitude)
    # the nearest neighbour is the sum's upper half, with ties away from zero and towards it
    away = (to_i32(settled + 0x8000) >> 16) | sign
    toward = (to_i32(settled + 0x7FFF) >> 16) | sign
    near = ((param == away) | (param == toward)) & (magnitude <= INFINITY)
    return select(near, master, load_bf16(param))


def load_master_f16(param, master):
    (nearest,) = store_f16(master)
    b = bits(master)
    magnitude = from_bits(select(saturates_f16(master), SATURATES_F16 - 1, b & MAGNITUDE))
    distance = magnitude_of(widen_f16(param & 0x7FFF) - magnitude)
    least = magnitude_of(widen_f16(nearest & 0x7FFF) - magnitude)
    # comparing floats: an infinite copy has no other neighbour, and a NaN none
    tied = (distance == least) & ((param & SIGN) == (b & SIGN))
    return select((param == nearest) | tied, master, load_f16(param))


def magnitude_of(value):
    return from_bits(bits(value) & MAGNITUDE)


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
