r"""Moments in 8 bits each, and 8 more for the exponent that a block of neighbours shares.

A value's float32 bits plus random ones, $r$, are what is kept, cut. A block's exponent is
$e = \max(\lfloor\max r / 2^{23}\rfloor - 15, 0)$, a code $\lfloor r / 2^{23-k} \rfloor - 2^k e$: 4 bits of exponent,
$k$ of mantissa, a slice of float32's own. The exponent is taken behind the rounding: otherwise the largest value of a
block could not grow past it. NaN and infinity take their block with them.

Under a block's range averages go wrong. A first moment that became 0 there would stay 0, since a step offers it but
$(1-\beta)\,g$; so its lowest codes count from 0 on, and it is right in the mean however small. A second moment is a
divisor: 0 beside a first that lives on makes an update explode, so what is positive becomes the least code.

And a divisor's noise lengthens what is divided. Let a store keep the mean of $v^q$ and add the variance $w$ to $v$. In
an average that forgets at a rate $b$ these come to $w/2b$, and the mean of $v$ to $(1-q)\,w / 2bv$ above its own, so
that to this order the mean of $1/\sqrt v$ is off by $(\frac38 - \frac{1-q}2)\,w / 2bv^2$: nothing where $q$ is a
quarter. With the root's mean kept, $q = \frac12$, Adam's steps are half a percent too long.
"""

import torch

from halfstep.contracts import Format, Part
from halfstep.formats.counter import GOLDEN
from halfstep.formats.plain import INFINITY, MAGNITUDE, NAN, SIGN
from halfstep.primitives import bits, from_bits, select, sqrt, to_i32

#: The bits of 2**64, below which the root of a second moment stays, so that its square is finite.
ROOTS_END = 0x5F800000


def exponent_of(largest):
    exponent = to_i32((largest >> 23) - 15)
    return select(exponent < 0, 0, exponent)


def measure_signed(value, random):
    b = bits(value)
    magnitude = b & MAGNITUDE
    # what is finite stays so, and infinity is what it is
    end = select(magnitude < INFINITY, INFINITY - 1, magnitude)
    kept = to_i32(magnitude + to_i32(random << 4))
    kept = select(kept > end, end, kept)
    # the sign rides in the lowest bit, which the cut drops; a NaN has none, since which it has differs by machine
    return select(magnitude > INFINITY, NAN, (kept & -2) | ((b >> 31) & 1))


def store_signed(kept, largest):
    exponent = exponent_of(largest)
    code = to_i32((kept >> 20) - to_i32(exponent << 3))
    # The lowest exponent is no exponent: its codes count eighths of the one above, from 0 on. Chance rounds once more,
    # and is evenly spread whatever the first rounding did, as multiples of the golden ratio are.
    down = to_i32(-1 * (code >> 3))
    down = select(down < 0, 0, select(down > 31, 31, down))
    count = to_i32(((code & 7) | 8) << 8) >> down
    count = select(kept < 0x00800000, 0, count)
    low = to_i32(count + ((to_i32((kept >> 4) * GOLDEN) >> 23) & 511)) >> 9
    code = select(code < 8, low, code)
    return code | to_i32((kept & 1) << 7), exponent


def load_signed(code, exponent):
    count = code & 127
    start = to_i32(exponent << 3)
    low = from_bits(to_i32((start + count + 8) << 20)) - from_bits(to_i32((start + 8) << 20))
    magnitude = select(count < 8, low, from_bits(to_i32((start + count) << 20)))
    return from_bits(bits(magnitude) | (code & SIGN))


def measure_square(value, random):
    root = bits(sqrt(value)) & MAGNITUDE
    # To keep the mean of the root's root, c units from 0, what is p of a unit above the last goes up with a probability
    # of p + p (1 - p) / 4c. The c from 16 to 31 are taken alike, 3/256.
    upper = to_i32(random >> 4)
    raised = to_i32(random + (to_i32(to_i32(upper * to_i32(4096 - upper)) * 3) >> 16))
    kept = to_i32(root + to_i32(raised << 3))
    kept = select(kept > ROOTS_END - 1, ROOTS_END - 1, kept)
    kept = select(root == 0, 0, kept)
    return select(root > INFINITY, NAN, kept)


def store_square(kept, largest):
    exponent = exponent_of(largest)
    code = to_i32((kept >> 19) - to_i32(exponent << 4))
    # Only 0 is 0. As a divisor, what lies below the block's range may be too large, but never nothing.
    code = select(code < 1, 1, code)
    return select(kept == 0, 0, code), exponent


def load_square(code, exponent):
    root = from_bits(select(code == 0, 0, to_i32((code + to_i32(exponent << 4)) << 19)))
    return root * root


#: NaN's exponent is the largest.
_EXPONENT = Part("exponent", torch.uint8, shared=True, largest=(NAN >> 23) - 15)

SIGNED = Format(
    "block8", (Part("code", torch.int8), _EXPONENT), load_signed, store_signed, measure=measure_signed, random=True
)
"""Sign, 4 bits of exponent and 3 of mantissa; under $2^{-14}$ of the block's largest, counts of $2^{-17}$."""

SQUARE = Format(
    "block8", (Part("code", torch.uint8), _EXPONENT), load_square, store_square, measure=measure_square, random=True
)
"""The root of a value that is not negative, with 4 bits of exponent and 4 of mantissa."""
