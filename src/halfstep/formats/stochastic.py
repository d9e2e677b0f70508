"""The param alone, rounded up or down by chance: no extra byte, and no update is lost in the mean.

A value between two numbers that can be kept becomes the upper one with a probability of its distance from the lower
one: random bits are added where bits will be dropped, and their carry decides. What can be kept is kept.
"""

import torch

from halfstep.contracts import Format, Part
from halfstep.formats.plain import (
    INFINITY,
    INFINITY_BF16,
    INFINITY_F16,
    MAGNITUDE,
    NAN_BF16,
    NAN_F16,
    SIGN,
    load_bf16,
    load_f16,
    saturates_bf16,
    saturates_f16,
)
from halfstep.primitives import bits, select, to_i32

MANTISSA = 0x007FFFFF
IMPLICIT = 0x00800000
#: From a float32's biased exponent to a float16's: 112 less.
REBASED = 112 * 2**23


def counted_bf16(magnitude, random, more):
    """How many units of a bfloat16 with ``more`` further bits of mantissa make up a magnitude, given in float32 bits.

    A bfloat16's units are its bits read as an integer: 1 more is the next number, across exponents too.
    """
    return to_i32(magnitude + (random >> more)) >> (16 - more)


def counted_f16(magnitude, random, more):
    """How many units of a float16 with ``more`` further bits of mantissa make up a magnitude, given in float32 bits.

    Under 2**-14 a float16's units are all $2^{-24}$, so more bits are dropped; what lies below $2^{-40}$ is cut off.
    """
    exponent = magnitude >> 23
    normal = to_i32(magnitude - REBASED + (random >> (more + 3))) >> (13 - more)
    down = select(exponent < 113, 113 - exponent, 0)
    down = select(down > 27, 27, down)
    fixed = to_i32(((magnitude & MANTISSA) | IMPLICIT) << 3) >> down
    small = to_i32(fixed + (random >> more)) >> (16 - more)
    return select(exponent < 113, small, normal)


def signed(param, b, nan):
    """``param`` with the sign of float32 bits; a NaN has none, since which it has differs by machine."""
    return select((b & MAGNITUDE) > INFINITY, nan, param | ((b & SIGN) >> 16))


def settled(count, magnitude, largest, infinity, nan):
    """``count`` where a finite magnitude ends at ``largest``, and infinity and NaN are what they are."""
    count = select(count > largest, largest, count)
    count = select(magnitude == INFINITY, infinity, count)
    return select(magnitude > INFINITY, nan, count)


def param_of(value, count, infinity, nan):
    b = bits(value)
    return signed(settled(count, b & MAGNITUDE, infinity - 1, infinity, nan), b, nan)


def store_stochastic_bf16(value, random):
    count = counted_bf16(bits(value) & MAGNITUDE, random, 0)
    return (param_of(value, count, INFINITY_BF16, NAN_BF16),)


def store_stochastic_f16(value, random):
    count = counted_f16(bits(value) & MAGNITUDE, random, 0)
    return (param_of(value, count, INFINITY_F16, NAN_F16),)


STOCHASTIC_BF16 = Format(
    "stochastic", (Part("", torch.bfloat16),), load_bf16, store_stochastic_bf16, saturates_bf16, random=True
)
STOCHASTIC_F16 = Format(
    "stochastic", (Part("", torch.float16),), load_f16, store_stochastic_f16, saturates_f16, random=True
)

STOCHASTIC = {torch.bfloat16: STOCHASTIC_BF16, torch.float16: STOCHASTIC_F16}

BFLOAT16 = Format("bfloat16", (Part("", torch.bfloat16),), load_bf16, store_stochastic_bf16, random=True)
"""A moment in 2 bytes. Rounded to the nearest, a second moment would never decay at beta2 = 0.999."""
