"""The random bits: the hash that is meant, even, and independent of everything that names another stream."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from chance import ALARM, ODDS, assert_counts_are_even, lowbias32, random_bits
from halfstep.backends import eager
from halfstep.backends.pieces import part_shape
from halfstep.contracts import Counter, Format, Job, Moment, Part, Plan, Rule
from halfstep.formats import FLOAT32, GRADS, MOMENTS, WEIGHTS
from halfstep.formats.counter import finished, scrambled
from halfstep.formats.counter import random_bits as hashed
from halfstep.rules.adam import ADAM
from harness import CPU, HERE, assert_same, copy, job, run

N = 2**19
MANY = 2**22  # 64 for each value of 16 bits
SEEN = 4  # as many uses as two pairs have


def _load(bits):
    return bits


def _store(value, random):
    return (random,)


def _measure(value, random):
    return random


def _keep(measured, largest):
    return measured, largest


def _nothing(weight, grad, *moments):
    return (weight, *moments)


def _four(weight, grad, a, b, c, d):
    return weight, grad, grad, grad, grad


#: formats that keep nothing but the random bits they are given
ECHO = Format("echo", (Part("", torch.int32),), _load, _store, random=True)
_SHARED = (Part("", torch.int32), Part("largest", torch.int32, shared=True))


def _load_shared(bits, largest):
    return bits


BLOCKS = Format("blocks", _SHARED, _load_shared, _keep, measure=_measure, random=True)
FOUR = Rule("four", tuple(Moment(f"use{k}") for k in range(SEEN)), _four, lambda group, step: ())


def seen(counter: Counter, shape: tuple[int, ...], backend: str, format: Format = ECHO) -> list[Tensor]:
    """The random bits of uses 0 to 3 that a backend gives the elements of a tensor."""
    plan = Plan(FOUR, FLOAT32, (format,) * SEEN, FLOAT32, CPU)
    parts = [torch.zeros(part_shape(part, shape), dtype=part.dtype) for _ in range(SEEN) for part in format.parts]
    run(plan, [Job(torch.zeros(shape), torch.zeros(shape), tuple(parts), (1.0,), counter)], backend)
    kept = parts[:: len(format.parts)]
    for part, largest in zip(kept, parts[1::2], strict=True) if format is BLOCKS else ():
        padded = torch.nn.functional.pad(part.view(shape[0], -1), (0, -part[0].numel() % 128), value=0)
        assert_same(largest, padded.view(shape[0], -1, 128).amax(-1))
    return [part.view(-1) for part in kept]


# ---------------------------------------------------------------------- the hash


def test_scrambled_is_lowbias32() -> None:
    inputs = [*range(300), *(2**k + d for k in range(33) for d in (-1, 0, 1)), 0xDEADBEEF, 0x9E3779B9]
    inputs = [x for x in inputs if 0 <= x < 2**32]
    got = eager.bind(scrambled)(torch.tensor(inputs, dtype=torch.int64).to(torch.int32)).long() & 0xFFFFFFFF
    assert got.tolist() == [lowbias32(x) for x in inputs]


def unscrambled(y: Tensor) -> Tensor:
    """The inverse of lowbias32, in int64: each of its five operations undone."""

    def times(x: Tensor, inverse: int) -> Tensor:
        low, high = x & 0xFFFF, x >> 16  # so that no product leaves 64 bits
        return low * inverse + (high * inverse << 16) & 0xFFFFFFFF

    y = y ^ y >> 16
    y = times(y, pow(0x846CA68B, -1, 2**32))
    y = y ^ y >> 15 ^ y >> 30
    y = times(y, pow(0x7FEB352D, -1, 2**32))
    return y ^ y >> 16


@pytest.mark.parametrize("first", [0, 2**31 - 2**20, 2**32 - 2**21])
def test_no_two_inputs_give_the_same(first: int) -> None:
    inputs = torch.arange(first, first + 2**21)
    outputs = eager.bind(scrambled)(inputs.to(torch.int32)).long() & 0xFFFFFFFF
    assert_same(unscrambled(outputs), inputs)


def test_no_two_elements_of_a_stream_have_the_same_word() -> None:
    # a permutation of 32 bits: over all elements each word comes once, so each half is exactly even in the end
    index = torch.arange(2**22).to(torch.int32)
    assert len(eager.bind(hashed)(index, 123456789, -987654321).unique()) == 2**22
    assert len(eager.bind(finished)(index).unique()) == 2**22


# ---------------------------------------------------------------------- the same on every backend

COUNTERS = {
    "zero": Counter(),
    "the first step": Counter(0, 0, 1),
    "the largest seed": Counter(2**64 - 1, 7, 12),
    "a seed past the signed": Counter(2**63, 1, 2),
    "a step past float32": Counter(5, 1, 2**24 + 1),
    "a step past int32": Counter(5, 1, 2**31 + 3),
    "a stream past 16 bits": Counter(5, 2**20 + 1, 9),
    "across 2**31": Counter(1, 2, 3, 2**31 - 196 - 300),
    "across 2**32": Counter(1, 2, 3, 2**32 - 196 - 300),
    "all at once": Counter(2**64 - 1, 2**31 - 1, 2**30 + 1, 2**32 - 196 - 300),
    "past 2**33": Counter(1, 2, 3, 2**33 + 300 * 7),
    "across 3 * 2**32": Counter(1, 2, 3, 3 * 2**32 - 300 - 88),
}


@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize("counter", COUNTERS.values(), ids=COUNTERS)
def test_p10_the_bits_are_those_of_the_definition(counter: Counter, backend: str) -> None:
    # rows of 300 make blocks that end at 128, 256 and 300: across 2**32 one begins 68 elements before it
    for shape, format in itertools.product([(1500,), (5, 300)], (ECHO, BLOCKS)):
        for use, bits in enumerate(seen(counter, shape, backend, format)):
            assert_same(bits.long(), random_bits(counter, use, 1500))


#: of a tensor cut along a further dim: indices go on elsewhere behind each line, far beyond 2**32 too, or pass it amid
#: one; in both 304 is a number of 16 bytes of any dtype
LINES = {
    "lines of a few": Counter(1, 2, 3, 5, 5, 7),
    "lines of some": Counter(1, 2, 3, 0, 19, 95),
    "as if uncut": Counter(1, 2, 3, 9, 152, 152),
    "of many blocks": Counter(1, 2, 3, 9, 760, 1501),
    "one line": Counter(1, 2, 3, 2**32 - 700, 1520, 2**33),
    "of a tile's rows": Counter(1, 2, 3, 0, 304, 912),
    "across 2**32 amid a row": Counter(2**64 - 1, 2, 3, 2**32 - 912 - 130, 304, 912),
    "across 2**32 between rows": Counter(1, 2, 3, 2**32 - 912 - 304, 304, 912),
    "pitch past 2**32": Counter(1, 2, 3, 17, 304, 2**32 + 7),
    "in each row a high word": Counter(1, 2, 3, 2**32 - 150, 304, 2**32),
    "last of a tile across 2**32": Counter(1, 2, 3, 2**32 - 4 * 912 - 129, 304, 912),
}


def assert_defined_along(counter: Counter, backend: str) -> None:
    """Raise unless a backend gives the elements of lines the random bits that are meant, and in blocks the same."""
    wants = [random_bits(counter, use, 1520) for use in range(SEEN)]
    kinds = [((1520,), ECHO), ((5, 304), ECHO), *([((5, 304), BLOCKS)] if counter.length == 304 else [])]
    for shape, format in kinds:
        for want, bits in zip(wants, seen(counter, shape, backend, format), strict=True):
            assert_same(bits.long(), want)


@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize("counter", LINES.values(), ids=LINES)
def test_p10_along_lines_the_bits_are_those_of_the_definition(counter: Counter, backend: str) -> None:
    assert_defined_along(counter, backend)


@pytest.mark.parametrize("backend", HERE)
def test_past_2_to_the_32_the_bits_are_others(backend: str) -> None:
    shape = (2**15,)
    for use in range(SEEN):
        streams = [seen(Counter(1, 2, 3, high * 2**32), shape, backend)[use] for high in range(4)]
        for a, b in itertools.combinations(streams, 2):
            # 2**15 pairs that agree by a chance of 2**-16: 0.5 expected, more than 20 with a chance under 1e-25
            assert int((a == b).sum()) <= 20


@pytest.mark.parametrize("moments", ["bfloat16", "block8"])
@pytest.mark.parametrize("start", [2**32 - 200, 2**32 - 196 - 300, 2**33 + 77, 3 * 2**32 - 450])
def test_p10_a_step_across_2_to_the_32_has_the_same_bits(start: int, moments: str, half: torch.dtype) -> None:
    plan = Plan(ADAM, WEIGHTS["split8"][half], tuple(MOMENTS[moments].of(m) for m in ADAM.moments), GRADS[half], CPU)
    want = job(plan, (5, 300), 3, 4)
    want = replace(want, counter=Counter(2**64 - 1, 3, 2**24 + 1, start))
    got, other = copy(want), copy(want)
    other = replace(other, counter=replace(want.counter, start=start + 2**32))
    for each, backend in ((want, "eager"), (got, "cpu"), (other, "cpu")):
        run(plan, [each], backend)
    for a, b in zip((want.param, *want.state), (got.param, *got.state), strict=True):
        assert_same(a, b)
    same = want.state[0] == other.state[0]
    assert not same.view(-1)[-300:].all(), "what lies past 2**32 was left out of the key"


# ---------------------------------------------------------------------- even

KEYS = [
    Counter(0, 0, 1),
    Counter(0, 0, 2),
    Counter(0, 1, 1),
    Counter(1, 0, 1),
    Counter(2**32 + 1, 0, 1),
    Counter(0x9E3779B99E3779B9, 0, 1),
    Counter(2**64 - 1, 5, 2**24 + 1),
    Counter(0, 0, 1, 2**32),
]


@pytest.mark.parametrize("counter", [KEYS[k] for k in (0, 1, 4, 6, 7)], ids=str)
def test_each_of_the_16_bits_is_even(counter: Counter) -> None:
    # 17 comparisons for each of 2 uses of 5 keys, each of a chance of at most 2 * ALARM: 4e-7 for all
    for bits in seen(counter, (MANY,), "cpu")[:2]:
        assert_counts_are_even(torch.bincount(bits, minlength=2**16), MANY / 2**16)
        for bit in range(16):
            # Hoeffding for n coins: sqrt(L / 2n)
            ones = float((bits >> bit & 1).double().mean())
            assert abs(ones - 0.5) <= math.sqrt(ODDS / 2 / MANY)


# ---------------------------------------------------------------------- independent


def correlation(a: Tensor, b: Tensor) -> float:
    """The correlation of two streams of 16 bits, times the root of how many there are: 1 is what chance gives."""
    x, y = ((bits.double() + 0.5) / 2**16 - 0.5 for bits in (a, b))
    return abs(float((x * y).mean()) * 12 * math.sqrt(a.numel()))


def assert_independent(a: Tensor, b: Tensor) -> None:
    """Raise unless two streams of 16 bits go their own ways; 2 * ALARM for each of 3 looks, and for the last 1e-10."""
    n = a.numel()
    for shift in (12, 0):  # the highest 4 bits of both, and the lowest
        joint = (a >> shift & 15) * 16 + (b >> shift & 15)
        assert_counts_are_even(torch.bincount(joint.long(), minlength=256), n / 256)
    # The correlation of n pairs has a standard deviation of 1 / sqrt(n). Each product is at most 3 of its own, so that
    # Bernstein's bound on 7 of them is 2 exp(-24.5 / (1 + 7 / sqrt(n))) < 1e-10.
    assert correlation(a, b) <= 7
    # how often both are the same, of n pairs with a chance of 2**-16 each: Bernstein with a variance of 2**-16
    same, expected = int((a == b).sum()), n / 2**16
    assert abs(same - expected) <= math.sqrt(2 * expected * ODDS) + 2 * ODDS / 3


@pytest.mark.parametrize("lag", [1, 2, 3, 4, 127, 128, 129, *(2**k for k in (8, 12, 16, 20))])
@pytest.mark.parametrize("counter", [KEYS[0], KEYS[6]], ids=str)
def test_neighbours_are_uncorrelated(counter: Counter, lag: int) -> None:
    for bits in seen(counter, (N + lag,), "cpu")[:2]:
        a, b = bits[:N], bits[lag:]
        # by chance at most 7: Bernstein's bound gives 1e-10, as above; pairs share elements, but each adds one that is
        # independent of all before
        assert correlation(a, b) <= 7
        # Two multiplications do not make neighbours independent: lowbias32's own bias, measured, is up to 2.5 % in the
        # 256 joint cells of 4 bits at lags of 256 and 4,096. More than 5 % would be another hash.
        for shift in (12, 0):
            joint = (a >> shift & 15) * 16 + (b >> shift & 15)
            cells = torch.bincount(joint.long(), minlength=256) / (N / 256)
            # chance alone, with 255 degrees of freedom and at ALARM: 255 + 2 sqrt(255 * 20.7) + 41 = 442
            assert float(((cells - 1) ** 2).mean()) <= 0.05**2 + 442 / N


#: what differs between two streams
OTHER: dict[str, Callable[[Counter], Counter]] = {
    "the next step": lambda c: replace(c, step=c.step + 1),
    "the step after": lambda c: replace(c, step=c.step + 2),
    "a step 2**16 later": lambda c: replace(c, step=c.step + 2**16),
    "the next stream": lambda c: replace(c, stream=c.stream + 1),
    "the stream after": lambda c: replace(c, stream=c.stream + 2),
    "stream and step by 1": lambda c: replace(c, stream=c.stream + 1, step=c.step + 1),
    "a step for a stream": lambda c: replace(c, stream=c.stream + 1, step=c.step - 1),
    "the next seed": lambda c: replace(c, seed=c.seed + 1),
    "the seed's high word": lambda c: replace(c, seed=c.seed + 2**32),
    "the seed's highest bit": lambda c: replace(c, seed=c.seed ^ 2**63),
    "the seed's words exchanged": lambda c: replace(c, seed=(c.seed >> 32) | (c.seed % 2**32) << 32),
    "stream and step exchanged": lambda c: replace(c, stream=c.step, step=c.stream),
    "past 2**32": lambda c: replace(c, start=c.start + 2**32),
    "past 2**33": lambda c: replace(c, start=c.start + 2**33),
}
#: a small one, and one whose words and numbers all differ
FROM = [Counter(0, 0, 1), Counter(0x123456789ABCDEF0, 3, 1000)]
differing = [(name, c) for name, change in OTHER.items() for c in FROM if change(c) != c]


@pytest.mark.parametrize(("name", "counter"), differing, ids=[f"{name}-{c.seed}" for name, c in differing])
def test_streams_are_independent(name: str, counter: Counter) -> None:
    ours, theirs = (seen(c, (N,), "cpu") for c in (counter, OTHER[name](counter)))
    for use, other in ((0, 0), (1, 1), (2, 2), (0, 1)):
        assert_independent(ours[use], theirs[other])


@pytest.mark.parametrize("counter", KEYS, ids=str)
def test_uses_are_independent(counter: Counter) -> None:
    # the first two are the halves of one hash
    for a, b in itertools.combinations(seen(counter, (N,), "cpu"), 2):
        assert_independent(a, b)


def words(counter: Counter, n: int) -> Tensor:
    """The 32-bit words behind the first pair of uses."""
    first, second, *_ = seen(counter, (n,), "cpu")
    return first.long() | second.long() << 16


def common(a: Tensor, b: Tensor) -> int:
    return len(np.intersect1d(a.numpy(), b.numpy(), assume_unique=True))


@pytest.mark.parametrize(("name", "counter"), differing, ids=[f"{name}-{c.seed}" for name, c in differing])
def test_no_stream_is_another_in_another_order(name: str, counter: Counter) -> None:
    n = 2**18
    a, b = words(counter, n), words(OTHER[name](counter), n)
    # Pairs of neighbours, 64 bits, in either order, meet by a chance of n * n / 2**64 = 4e-9. (All streams are
    # permutations of the same 2**32 words: somewhere each runs along another, and ranges of n meet once in 2**32 / 2n.)
    for first, second in ((a[:-1], a[1:]), (a[1:], a[:-1])):
        assert common(first - 2**31 << 32 | second, b[:-1] - 2**31 << 32 | b[1:]) == 0
    # nor do they share more than a few words: by chance n * n / 2**32 = 16
    assert common(a, b) <= n / 1024


def test_a_key_before_the_hash_alone_would_be_seen() -> None:
    # the trap that `random_bits` tells of: with all of the key before the hash, streams exchange their elements
    index = torch.arange(2**18).to(torch.int32)
    a, b = (eager.bind(scrambled)(index ^ key).long() for key in (0x12345678, 0x12340000))
    assert common(a, b) == 2**18
    c = eager.bind(scrambled)(index ^ 0x7654321).long()
    assert common(a, c) == 0


def test_a_stream_that_is_not_even_would_be_seen() -> None:
    bits = seen(Counter(0, 0, 1), (MANY,), "cpu")[0]
    # one value in 16 moved by 1, which shifts the mean of none of the upper bits
    skewed = torch.where((bits & 15) == 0, bits + 1, bits)
    with pytest.raises(AssertionError):
        assert_counts_are_even(torch.bincount(skewed, minlength=2**16), MANY / 2**16)
    with pytest.raises(AssertionError):
        assert_independent(bits, (bits + 1) % 2**16)
    assert ALARM < 1e-8
