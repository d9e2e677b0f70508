"""One stored number for each value: float32 itself, or the nearest 16-bit number, which keeps no small update."""

import torch

from halfstep.contracts import Format, Part
from halfstep.primitives import bits, from_bits, narrow_f16, select, to_i32, widen_f16

SIGN = -0x80000000
MAGNITUDE = 0x7FFFFFFF
INFINITY = 0x7F800000
NAN = 0x7FC00000
INFINITY_BF16 = 0x7F80
INFINITY_F16 = 0x7C00
NAN_BF16 = 0x7FC0
NAN_F16 = 0x7E00

#: The float32 bits from which a finite value is nearer to infinity than to the largest bfloat16 or float16 (65504).
SATURATES_BF16 = 0x7F7F8000
SATURATES_F16 = 0x477FF000


def load_float32(value):
    return value


def store_float32(value):
    return (value,)


def load_bf16(param):
    return from_bits(to_i32(param << 16))


def load_f16(param):
    return widen_f16(param)


def saturates_bf16(value):
    magnitude = bits(value) & MAGNITUDE
    return (magnitude >= SATURATES_BF16) & (magnitude < INFINITY)


def saturates_f16(value):
    magnitude = bits(value) & MAGNITUDE
    return (magnitude >= SATURATES_F16) & (magnitude < INFINITY)


def store_bf16(value):
    """The nearest bfloat16, ties to even; finite values saturate, NaN becomes one pattern."""
    b = bits(value)
    magnitude = b & MAGNITUDE
    # what would round to infinity stays below it
    b = select(saturates_bf16(value), (b & SIGN) | (SATURATES_BF16 - 1), b)
    b = select(magnitude > INFINITY, NAN, b)
    return (to_i32(b + 0x7FFF + ((b >> 16) & 1)) >> 16,)


def store_f16(value):
    """The nearest float16, ties to even; finite values saturate, NaN becomes one pattern."""
    b = bits(value)
    magnitude = b & MAGNITUDE
    settled = select(saturates_f16(value), SATURATES_F16 - 1, magnitude)
    # float16's conversion never meets a NaN: what it makes of one differs by machine
    settled = select(magnitude > INFINITY, 0, settled)
    half = narrow_f16(from_bits(settled)) | ((b & SIGN) >> 16)
    return (select(magnitude > INFINITY, NAN_F16, half),)


FLOAT32 = Format("float32", (Part("", torch.float32),), load_float32, store_float32)
"""A float32 number as it is: 4 bytes, exact. A float32 param is its own weight; moments are kept so by default."""

ROUNDED_BF16 = Format("rounded", (Part("", torch.bfloat16),), load_bf16, store_bf16, saturates_bf16)
ROUNDED_F16 = Format("rounded", (Part("", torch.float16),), load_f16, store_f16, saturates_f16)

ROUNDED = {torch.bfloat16: ROUNDED_BF16, torch.float16: ROUNDED_F16}
"""The nearest 16-bit number and nothing else: no extra byte, and an update under half an ulp is lost."""

PLAIN = {torch.float32: FLOAT32, **ROUNDED}
"""One stored number of each dtype: how gradients are read."""
