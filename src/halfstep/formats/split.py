"""The param and a *remainder*, the bits that it drops: float32's precision in 2 more bytes, or half of them in 1.

In bfloat16 the weight's bits, read as an integer, are $b = 2^{16} p + r$ with $p$ the param's bits and $r$ an int16. In
float16 the remainder counts $2^{-16}$ ulps of the param. Both count away from zero. An int8 keeps the first 8 of these
bits, $b = 2^8 p + r$ with $b$ the weight's units of a 16-bit float that has 8 more bits, rounded by chance.
"""

import torch

from halfstep.contracts import Format, Part
from halfstep.formats.plain import (
    INFINITY,
    INFINITY_BF16,
    INFINITY_F16,
    MAGNITUDE,
    NAN,
    NAN_BF16,
    NAN_F16,
    SATURATES_BF16,
    SATURATES_F16,
    SIGN,
    saturates_bf16,
    saturates_f16,
)
from halfstep.formats.stochastic import REBASED, counted_bf16, counted_f16, settled, signed
from halfstep.primitives import bits, from_bits, narrow_f16, select, to_f32, to_i32, widen_f16

#: 1.5 * 2**23: adding it rounds a float below 2**22 to an integer, ties to even, which its low bits then hold.
ROUND = 12582912.0
ROUND_BITS = 0x4B400000
#: 256 of these make up a float16's least unit, 2**-24.
UNIT = 2.0**-32


def load_split_bf16(param, remainder):
    magnitude = to_i32((param & 0x7FFF) << 16)
    weight = to_i32(magnitude + remainder)
    # No store leaves a remainder that takes zero below zero, or moves infinity or NaN: the param was written since.
    weight = select(weight < 0, 0, weight)
    weight = select(magnitude >= INFINITY, magnitude, weight)
    return from_bits(weight | (param & SIGN))


def store_split_bf16(weight):
    b = bits(weight)
    b = select(saturates_bf16(weight), (b & SIGN) | (SATURATES_BF16 - 1), b)
    b = select((b & MAGNITUDE) > INFINITY, NAN, b)
    # Ties go away from zero: with ties to even an even param has 65,537 preimages, one more than the remainder tells.
    remainder = to_i32(b << 16) >> 16
    return to_i32(b - remainder) >> 16, remainder


def exponent_f16(magnitude):
    """The biased float32 exponent whose ulp is a float16's; float16's subnormals share the ulp of 2**-14."""
    exponent = bits(magnitude) >> 23
    return select(exponent < 113, 113, exponent)


def load_split_f16(param, remainder):
    magnitude = widen_f16(param & 0x7FFF)
    #: $|w| = |p| + r \cdot 2^{-16}\,\mathrm{ulp}(p)$
    unit = from_bits(to_i32((exponent_f16(magnitude) - 26) << 23))
    weight = bits(magnitude + to_f32(remainder) * unit)
    weight = select(weight < 0, 0, weight)
    return from_bits(weight | (param & SIGN))


def store_split_f16(weight):
    b = bits(weight)
    magnitude = b & MAGNITUDE
    finite = select(saturates_f16(weight), SATURATES_F16 - 1, magnitude)
    finite = select(magnitude >= INFINITY, 0, finite)
    param = narrow_f16(from_bits(finite))
    nearest = widen_f16(param)
    #: $r = (|w| - |p|) \cdot 2^{16} / \mathrm{ulp}(p)$; the difference and the scaling are exact
    count = (from_bits(finite) - nearest) * from_bits(to_i32((280 - exponent_f16(nearest)) << 23))
    remainder = to_i32(bits(count + ROUND) - ROUND_BITS)
    # a tie that went down to an even param; one unit less still decodes to the same float32 from 2**-16 on
    remainder = select(remainder > 32767, 32767, remainder)
    param = select(magnitude == INFINITY, INFINITY_F16, param) | ((b & SIGN) >> 16)
    return select(magnitude > INFINITY, NAN_F16, param), remainder


def joined8(param, remainder):
    """The units behind a param and its remainder; the remainder of a param that was written since may be any."""
    count = to_i32(to_i32((param & 0x7FFF) << 8) + remainder)
    return select(count < 0, 0, count)


def parted8(weight, count, infinity, nan):
    b = bits(weight)
    # what is finite ends at the last unit that rounds to a finite param
    count = settled(count, b & MAGNITUDE, infinity * 256 - 129, infinity * 256, nan * 256)
    # a remainder that rounds up carries into the param
    return signed(to_i32(count + 128) >> 8, b, nan), to_i32(count << 24) >> 24


def load_split8_bf16(param, remainder):
    #: $|w| = |p| + r \cdot 2^{-8}\,\mathrm{ulp}(p)$
    nearest = to_i32(param << 16)
    magnitude = nearest & MAGNITUDE
    weight = to_i32(magnitude + to_i32(remainder << 8))
    # not below 0: the remainder of a param that was written since may be any
    weight = select(weight < 0, 0, weight)
    return from_bits(select(magnitude < INFINITY, weight, magnitude) | (nearest & SIGN))


def store_split8_bf16(weight, random):
    count = counted_bf16(bits(weight) & MAGNITUDE, random, 8)
    return parted8(weight, count, INFINITY_BF16, NAN_BF16)


def load_split8_f16(param, remainder):
    count = joined8(param, remainder)
    #: from $2^{-14}$ on units are float32 bits; below, each is $2^{-32}$
    normal = to_i32(count << 5) + REBASED
    magnitude = select(count < 0x40000, bits(to_f32(count) * UNIT), normal)
    magnitude = select((param & 0x7FFF) >= INFINITY_F16, bits(widen_f16(param & 0x7FFF)), magnitude)
    return from_bits(magnitude | (param & SIGN))


def store_split8_f16(weight, random):
    count = counted_f16(bits(weight) & MAGNITUDE, random, 8)
    return parted8(weight, count, INFINITY_F16, NAN_F16)


SPLIT_BF16 = Format(
    "split16",
    (Part("", torch.bfloat16), Part("remainder", torch.int16)),
    load_split_bf16,
    store_split_bf16,
    saturates_bf16,
)
SPLIT_F16 = Format(
    "split16",
    (Part("", torch.float16), Part("remainder", torch.int16)),
    load_split_f16,
    store_split_f16,
    saturates_f16,
)

SPLIT16 = {torch.bfloat16: SPLIT_BF16, torch.float16: SPLIT_F16}

SPLIT8_BF16 = Format(
    "split8",
    (Part("", torch.bfloat16), Part("remainder", torch.int8)),
    load_split8_bf16,
    store_split8_bf16,
    saturates_bf16,
    random=True,
)
SPLIT8_F16 = Format(
    "split8",
    (Part("", torch.float16), Part("remainder", torch.int8)),
    load_split8_f16,
    store_split8_f16,
    saturates_f16,
    random=True,
)

SPLIT8 = {torch.bfloat16: SPLIT8_BF16, torch.float16: SPLIT8_F16}
