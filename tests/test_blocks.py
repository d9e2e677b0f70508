"""block8 as it is defined: codes, exponents, blocks, and what each value becomes."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from chance import mean_bound, random_bits
from halfstep.contracts import Counter, Format
from halfstep.formats import MOMENTS
from harness import COUNTER, HERE, assert_same, load, specials, spread, store

SIGNED, SQUARE = MOMENTS["block8"]
LENGTHS = (1, 63, 64, 127, 128, 129, 300)
INF = math.inf

each = pytest.mark.parametrize("format", [SIGNED, SQUARE], ids=("signed", "square"))
pytestmark = pytest.mark.parametrize("backend", HERE)


def blocks(length: int) -> list[slice]:
    """A row's blocks: each begins 128 after the one before, and the last ends with the row."""
    return [slice(a, min(a + 128, length)) for a in range(0, length, 128)]


def defined(format: Format, values: Tensor, counter: Counter) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, exponents and what they decode to, as the definition has them: block by block, in Python's way of numbers.

    A float32 with biased exponent E and mantissa M is the integer 2**23 E + M; here it is taken apart by ``frexp``.
    """
    increments = random_bits(counter, 0, values.numel()).view(values.shape).numpy()
    rows, length = values.shape
    mantissa = 4 if format is SQUARE else 3
    dropped = 23 - mantissa
    codes, exponents = np.zeros((rows, length), np.int64), np.zeros((rows, len(blocks(length))), np.int64)
    decoded = np.zeros((rows, length))
    for row in range(rows):
        for k, block in enumerate(blocks(length)):
            x = values[row, block].double().numpy()
            # the correctly rounded root: float64's own, rounded once more, is (53 >= 2 * 24 + 2 bits)
            kept = np.sqrt(x).astype(np.float32).astype(np.float64) if format is SQUARE else np.abs(x)
            fraction, power = np.frexp(np.where(kept == 0, 2.0**-149, kept))  # a zero has no exponent to take
            biased = np.maximum(power + 126, 1)
            bits = np.where(
                power + 126 >= 1, (biased << 23) + ((fraction * 2 - 1) * 2**23).astype(np.int64), kept * 2.0**149
            )
            # 16 random bits under the last bit that is kept: r = bits(x) + increment, below what the format ends at
            end = (127 + 64) << 23 if format is SQUARE else 255 << 23
            increment = increments[row, block].astype(np.int64)
            if format is SQUARE:  # of p and 1 - p, as 12 bits, 3/256 of the product
                increment += (increment >> 4) * (4096 - (increment >> 4)) * 3 >> 16
            r = np.minimum(bits.astype(np.int64) + (increment << dropped - 16), end - 1)
            r = np.where(kept == 0, 0, r) if format is SQUARE else r
            e = max((int(r.max()) >> 23) - 15, 0)
            code = (r >> dropped) - (e << mantissa)
            if format is SQUARE:
                code = np.where(kept == 0, 0, np.maximum(code, 1))
            else:
                # under the second exponent it counts that one's eighths, of which 9 more bits are rounded by chance
                eighths = np.ldexp(1 + (r >> 20 & 7) / 8, (r >> 23) - e + 2)
                chance = ((r >> 4) * 0x9E3779B9 % 2**32 >> 23) / 512
                count = np.where(r < 2**23, 0, np.floor(np.floor(eighths * 512) / 512 + chance)).astype(np.int64)
                code = np.where(code < 8, count, code)
            # a code is the upper bits of a float: its exponent less e, its mantissa's first bits
            whole = code + (e << mantissa)
            value = np.ldexp(1 + (whole & (1 << mantissa) - 1) / 2**mantissa, (whole >> mantissa) - 127)
            if format is SIGNED:
                value = np.where(code < 8, np.ldexp(code.astype(np.float64), e - 127 - 2), value)
            value = np.where(code == 0, 0.0, value)
            negative = np.signbit(x) & (format is SIGNED)
            codes[row, block] = np.where(negative, code - 128, code)
            exponents[row, k] = e
            decoded[row, block] = np.where(negative, -value, value) if format is SIGNED else value * value
    assert codes.min() >= (-128 if format is SIGNED else 0)
    assert codes.max() <= (127 if format is SIGNED else 255)
    return (
        torch.from_numpy(codes).to(format.parts[0].dtype),
        torch.from_numpy(exponents).to(torch.uint8),
        torch.from_numpy(decoded).float(),
    )


def some(rows: int, length: int, kind: str) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    values = torch.randn(rows, length, generator=generator)
    if kind == "far apart":
        values *= torch.randn(rows, length, generator=generator).mul(4).exp()
    elif kind == "tiny":
        values *= 2.0**-140
    elif kind == "zeros":
        values *= torch.rand(rows, length, generator=generator) < 0.3
        values[0] = 0
    elif kind == "any bits":
        values = torch.cat([specials(), spread(rows * length, generator)])
        values = values[torch.randperm(len(values), generator=generator)][: rows * length].view(rows, length)
        values = torch.where(values.isfinite(), values, 1.0)
    elif kind == "beside a power of two":  # of which some round up into the next exponent, and take the block with them
        values = 2 - torch.rand(rows, length, generator=generator) * 2.0**-4
        values[:, 1:] *= 2.0**-12
    return values


KINDS = ("alike", "far apart", "tiny", "zeros", "any bits", "beside a power of two")


def of(format: Format, values: Tensor) -> Tensor:
    return values.abs() if format is SQUARE else values


@each
@pytest.mark.parametrize("kind", KINDS)
def test_block8_is_as_defined(kind: str, format: Format, backend: str) -> None:
    for length in LENGTHS:
        values = of(format, some(max(3, 600 // length), length, kind))
        for step in range(3):
            counter = replace(COUNTER, step=step)
            parts = store(format, values, backend, counter)
            codes, exponents, decoded = defined(format, values, counter)
            assert_same(parts[0], codes)
            assert_same(parts[1], exponents)
            assert_same(load(format, parts, backend), decoded)


@each
def test_code_0_is_0_whatever_the_exponent(format: Format, backend: str) -> None:
    # 240 is that of infinity, and the largest there is
    codes = torch.zeros(241, 128, dtype=format.parts[0].dtype)
    codes[:, 1] = -128 if format is SIGNED else 0
    exponents = torch.arange(241).to(torch.uint8).view(241, 1)
    want = torch.zeros(241, 128)
    want[:, 1] = -0.0 if format is SIGNED else 0.0
    assert_same(load(format, [codes, exponents], backend), want)


def test_a_square_that_is_not_0_is_never_0(backend: str) -> None:
    values = torch.full((64, 128), 1e-30)
    values[:, 0] = 1e30
    values[:, 1] = 0.0
    codes, exponents = store(SQUARE, values, backend)
    assert (codes[:, 2:] == 1).all()
    assert (codes[:, 1] == 0).all()
    loaded = load(SQUARE, [codes, exponents], backend)
    # code 1 is the root's 2**(e - 127) * 17 / 16, with e that of 1e15 less 15
    lowest = (2.0 ** (math.floor(math.log2(1e15)) - 15) * 17 / 16) ** 2
    assert_same(loaded[:, 2:], torch.full((64, 126), lowest))
    assert_same(loaded[:, 1], torch.zeros(64))
    # in a block without others, what is positive is kept as it is
    assert (load(SQUARE, store(SQUARE, torch.full((3, 128), 2.0**-149), backend), backend) > 0).all()


def test_a_signed_value_under_the_range_is_right_in_the_mean(backend: str) -> None:
    # the block's largest is 1: from 2**-14 on codes are floats, below they count 2**-17
    unit, n, steps = 2.0**-17, 512 * 127, 8
    for size in (2.0**-15, 2.0**-15 * 1.3, 2.0**-17 * 0.9, 2.0**-19, 2.0**-24 * 1.7):
        values = torch.full((512, 128), -size)
        values[:, 0] = 1.0
        total = 0.0
        for step in range(steps):
            got = load(SIGNED, store(SIGNED, values, backend, replace(COUNTER, step=step)), backend)[:, 1:].double()
            assert set((got / unit).unique().tolist()) <= {-float(k) for k in range(9)}
            # two roundings, the first to an eighth of the value, the second to a unit
            assert float((got + size).abs().max()) <= size / 8 + unit
            total += float(got.mean()) / steps
        # ALARM each; the second rounding has 9 bits and the first 16, and the golden ratio is even to 16 of 2**16
        bound = mean_bound(unit**2 / 4 + (size / 16) ** 2, size / 8 + unit, n * steps)
        assert abs(total + size) <= bound + unit * 2.0**-9


def test_every_root_stays_below_2_to_the_64(backend: str) -> None:
    mantissas = torch.cat([torch.arange(0, 2**23, 65521), torch.tensor([2**23 - 1])])
    values = (torch.arange(255).view(-1, 1) << 23 | mantissas).to(torch.int32).view(torch.float32)
    for step in range(3):
        codes, exponents = store(SQUARE, values, backend, replace(COUNTER, step=step))
        top = ((exponents.int().repeat_interleave(128, 1)[:, : values.shape[1]] << 4) + codes.int()).max()
        assert int(top) <= (127 + 63 << 4) + 15
        assert load(SQUARE, [codes, exponents], backend).isfinite().all()


@each
def test_the_largest_code_never_overflows(format: Format, backend: str) -> None:
    # just below a power of two nearly all round up into the next exponent, for which the block's must make room
    fractions = 2 - 2.0 ** -torch.arange(1.0, 24)
    powers = 2.0 ** torch.arange(-126, 127, 11)
    values = of(format, (fractions * powers.view(-1, 1)).repeat(40, 1))
    got = load(format, store(format, values, backend), backend)
    kept, root = (got.double().sqrt(), values.double().sqrt()) if format is SQUARE else (got.double(), values.double())
    unit = 2.0**-4 if format is SQUARE else 2.0**-3
    big = root >= root.amax(1, keepdim=True) * 2.0**-14
    assert ((kept - root).abs() <= unit * root)[big].all()


def neighbours(format: Format, values: Tensor) -> tuple[Tensor, Tensor]:
    """The number below each magnitude (of a square the root's) and the unit there, in float64."""
    kept = values.double().sqrt().float().double() if format is SQUARE else values.double().abs()
    unit = torch.ldexp(torch.ones_like(kept), torch.frexp(kept).exponent - (5 if format is SQUARE else 4))
    return (kept / unit).floor() * unit, unit


@each
def test_a_value_becomes_a_neighbour_and_is_right_in_the_mean(format: Format, backend: str) -> None:
    generator = torch.Generator().manual_seed(8)
    shape, steps = (300, 128), 12
    # from the largest, 1, down to 2**-14, in the middle of the range of 2**-14.8
    values = of(format, torch.rand(shape, generator=generator) * 15 - 14).exp2()
    values = torch.where(values < 1, values, 1 / values)
    values = values if format is SIGNED else values.square()
    values[:, 5] = 1.0
    values *= torch.where(torch.rand(shape, generator=generator) < 0.5, -1.0, 1.0) if format is SIGNED else 1.0
    lower, unit = neighbours(format, values)
    target = values.double().sqrt().float().double() if format is SQUARE else values.double().abs()
    total = torch.zeros(shape, dtype=torch.float64)
    for step in range(steps):
        got = load(format, store(format, values, backend, replace(COUNTER, step=step)), backend).double()
        kept = got.sqrt() if format is SQUARE else got.abs()
        assert ((kept == lower) | ((kept == lower + unit) & (lower < target))).all()
        assert_same(got.signbit(), values.signbit())
        total += (kept - target) / unit
    # by the place between two numbers, and by the size: 8 + 7 comparisons at ALARM for each of 4 cases, 6e-8 in all;
    # 16 bits decide, and what the distance has below them is cut off. A root goes up more often, by 3/256 of p (1 - p).
    place, size = ((target - lower) / unit * 8).long().clamp(max=7), torch.frexp(target).exponent // 2
    for group in (*(place == k for k in range(8)), *(size == k for k in range(-6, 1))):
        n, p = int(group.sum()), ((target - lower) / unit)[group]
        if n:
            spread = float((p * (1 - p)).mean())
            raised = 3 / 256 * spread if format is SQUARE else 0.0
            bound = mean_bound(spread + raised, 1, n * steps) + 2.0**-15
            assert abs(float(total[group].mean()) / steps - raised) <= bound


@each
def test_blocks_lie_within_a_row_and_leave_each_other_alone(format: Format, backend: str) -> None:
    for length in LENGTHS:
        values = of(format, some(8, length, "far apart"))
        before = load(format, store(format, values, backend), backend)
        for block in blocks(length):
            changed = values.clone()
            changed[3, block] *= 1e6
            codes, exponents = store(format, changed, backend)
            after = load(format, [codes, exponents], backend)
            others = torch.ones(8, length, dtype=torch.bool)
            others[3, block] = False
            assert_same(after[others], before[others])
            assert exponents.shape == (8, len(blocks(length)))


def test_rows_of_more_dimensions_are_all_that_stands_behind_the_first(backend: str) -> None:
    values = some(6, 300, "far apart")
    flat = store(SIGNED, values, backend)
    for shape in ((6, 3, 100), (6, 2, 3, 50), (6, 300, 1)):
        parts = store(SIGNED, values.view(shape), backend)
        assert_same(parts[0].view(6, 300), flat[0])
        assert_same(parts[1], flat[1])


@each
@pytest.mark.parametrize("bad", [math.nan, INF, -INF])
def test_nan_and_infinity_take_their_block_and_no_other(bad: float, format: Format, backend: str) -> None:
    values = of(format, some(8, 300, "alike"))
    before = load(format, store(format, values, backend), backend)
    values[2, 130] = bad
    got = load(format, store(format, values, backend), backend)
    block = torch.zeros(8, 300, dtype=torch.bool)
    block[2, 128:256] = True
    assert_same(got[~block], before[~block])
    neighbours = got[2, 128:256][torch.arange(128) != 2]
    if format is SIGNED:
        # the block's range is then that of infinity: the others fall below it
        assert_same(got[2, 130], torch.tensor(bad))
        assert (neighbours == 0).all()
    elif bad == INF:
        # a root ends below 2**64, and the others stay above 0: as divisors they are too large, never nothing
        assert 2.0**126 < float(got[2, 130]) < INF
        assert ((neighbours > 0) & neighbours.isfinite()).all()
    else:  # the root of what is negative is NaN; beside it the others' squares pass float32
        assert got[2, 130].isnan()
        assert (neighbours == INF).all()


def shapes(parts: Sequence[Tensor]) -> list[tuple[int, ...]]:
    return [tuple(part.shape) for part in parts]


@each
def test_a_block_costs_one_byte_more(format: Format, backend: str) -> None:
    for length, count in zip(LENGTHS, (1, 1, 1, 1, 1, 2, 3), strict=True):
        parts = store(format, of(format, some(5, length, "alike")), backend)
        assert shapes(parts) == [(5, length), (5, count)]
        assert [part.element_size() for part in parts] == [1, 1]
