"""Random bits for stochastic rounding, from a counter: a hash of who rounds what, and when.

A stream is keyed by the run's seed, the tensor, the step and the use; within it the element's index in the whole tensor
is the counter. So the bits are the same on every backend, and however the tensor is cut.
"""

from halfstep.primitives import to_i32

#: The multipliers of lowbias32 (Chris Wellons, "Prospecting for Hash Functions", 2018), as signed integers.
FIRST = 0x7FEB352D
SECOND = 0x846CA68B - 2**32
#: The first 32 fractional bits of the golden ratio. Here it keeps two halves of a key apart where those of a seed are
#: equal.
GOLDEN = 0x9E3779B9 - 2**32


def scrambled(x):
    """lowbias32: each bit of the result depends on each of ``x``, and no two ``x`` give the same."""
    return finished(to_i32((x ^ ((x >> 16) & 0xFFFF)) * FIRST))


def finished(x):
    x = to_i32((x ^ ((x >> 15) & 0x1FFFF)) * SECOND)
    return x ^ ((x >> 16) & 0xFFFF)


def keyed(key, number):
    return scrambled(to_i32(key + number))


def stream_key(seed_low, seed_high, stream, step, use):
    """The 64 bits that key the stream of a pair of uses, as two integers that each depend on all."""
    key = keyed(keyed(keyed(keyed(scrambled(seed_low), seed_high), stream), step), use)
    fold = keyed(keyed(keyed(keyed(scrambled(seed_high ^ GOLDEN), seed_low), stream), step), use)
    return key, fold


def random_bits(index, key, fold):
    """32 random bits, 16 for each use of a pair, for the element with these low 32 bits of its index.

    Where the index has more than 32 bits, both halves of the key are ``keyed`` by the high ones. It is lowbias32 with
    half of the key before and half amid it. Two streams are the same words in two orders: neighbours of one may be
    neighbours in the other, and two runs of $n$ elements share some with a chance of about $2n / 2^{32}$, but what
    rounds an element twice has nothing in common.
    """
    x = to_i32(index ^ key)
    return finished(to_i32((x ^ ((x >> 16) & 0xFFFF)) * FIRST + fold))


def first_half(random):
    return random & 0xFFFF


def second_half(random):
    return (random >> 16) & 0xFFFF
