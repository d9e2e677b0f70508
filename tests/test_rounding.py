"""Formats that round by chance: what they can hold is kept, all else becomes a neighbour, in the mean itself."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from chance import mean_bound
from halfstep.backends import eager
from halfstep.contracts import Format
from halfstep.formats import MOMENTS, WEIGHTS
from harness import COUNTER, HERE, assert_same, load, specials, spread, store


@dataclass(frozen=True)
class Grid:
    """The numbers that a format can hold: so many significant bits, with a unit that shrinks no more below 2**least."""

    format: Format
    significant: int
    least: int
    #: the largest number
    end: float
    #: how many of the bits that are dropped count: split8 in float16 cuts off what lies below 2**-40
    counted: int = 16

    def around(self, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The number at or next below each magnitude, the unit there and the distance in units, all in float64."""
        magnitude = values.double().abs()
        exponent = (torch.frexp(magnitude).exponent - 1).clamp(min=self.least)
        exponent = torch.where(magnitude == 0, self.least, exponent)
        unit = torch.ldexp(torch.ones_like(magnitude), exponent - self.significant + 1)
        count = magnitude / unit
        return count.floor() * unit, unit, count - count.floor()


BF16, F16 = torch.bfloat16, torch.float16
LARGEST = {BF16: (2 - 2.0**-7) * 2.0**127, F16: 65504.0}
# from half a unit of the param past its largest number on a weight rounds to infinity, so split8 ends one of its own
# units before
GRIDS = {
    "split8-bfloat16": Grid(WEIGHTS["split8"][BF16], 16, -126, LARGEST[BF16] + 2.0**119 - 2.0**112),
    "split8-float16": Grid(WEIGHTS["split8"][F16], 19, -14, 65520 - 2.0**-3, 8),
    "stochastic-bfloat16": Grid(WEIGHTS["stochastic"][BF16], 8, -126, LARGEST[BF16]),
    "stochastic-float16": Grid(WEIGHTS["stochastic"][F16], 11, -14, 65504.0),
    "moments-bfloat16": Grid(MOMENTS["bfloat16"].signed, 8, -126, LARGEST[BF16]),
}
each = pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
on_each = pytest.mark.parametrize("backend", HERE)
SOME = {
    "normal": lambda g: torch.randn(40_000, generator=g),
    "small": lambda g: torch.randn(40_000, generator=g) * 2.0**-14,
    "float16's subnormal": lambda g: torch.randn(40_000, generator=g) * 2.0**-20,
    "under float16's least": lambda g: torch.randn(40_000, generator=g) * 2.0**-27,
    "large": lambda g: torch.randn(40_000, generator=g) * 1e4,
}


def rounded(grid: Grid, values: Tensor, backend: str, step: int = 1) -> Tensor:
    """What comes back of ``values``, kept with the random bits of this step."""
    return load(grid.format, store(grid.format, values, backend, replace(COUNTER, step=step)), backend)


@functools.cache
def every() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    values = torch.cat([specials(), spread(100_000, generator), *(make(generator) for make in SOME.values())])
    return values[values.isfinite()]


def test_every_format_that_takes_random_bits_is_here() -> None:
    found = [format for formats in WEIGHTS.values() for format in formats.values() if format.random]
    found += [f for kinds in MOMENTS.values() for f in (kinds.signed, kinds.square) if f.random and not f.measure]
    assert set(found) == {grid.format for grid in GRIDS.values()}


@on_each
@each
def test_what_can_be_held_is_kept_whatever_the_bits(grid: Grid, backend: str) -> None:
    lower = grid.around(every())[0]
    held = lower.float().copysign(every())
    # float32's own subnormals cannot hold the lower number of every float32
    held = held[(held.double().abs() == lower) & (lower <= grid.end)]
    assert held.numel() > 200_000
    for step in range(4):
        assert_same(rounded(grid, held, backend, step), held)


@on_each
@each
def test_all_else_becomes_one_of_two_neighbours(grid: Grid, backend: str) -> None:
    values = every()
    lower, unit, distance = grid.around(values)
    up = 0
    for step in range(4):
        got = rounded(grid, values, backend, step)
        assert got.isfinite().all()
        magnitude = got.double().abs()
        above = magnitude == (lower + unit).clamp(max=grid.end)
        assert ((magnitude == lower.clamp(max=grid.end)) | (above & (distance > 0))).all()
        assert_same(got.signbit(), values.signbit())
        up += int(above[distance > 0].sum())
    assert up > 10_000


@on_each
@each
@pytest.mark.parametrize("some", SOME)
def test_the_upper_neighbour_comes_as_often_as_it_is_near(grid: Grid, backend: str, some: str) -> None:
    values = SOME[some](torch.Generator().manual_seed(2)).abs()
    if some == "under float16's least" and "float16" not in str(grid.format.parts[0].dtype):
        return
    lower, unit, distance = grid.around(values)
    sums, steps = torch.zeros(values.numel(), dtype=torch.float64), 20
    for step in range(steps):
        sums += (rounded(grid, values, backend, step).double() - lower) / unit
    # Each is 1 with a chance of p and else 0, a variance of p (1 - p); in eighths of the distance, so that no error of
    # the one hides another's. 8 comparisons for each of 25 cases and 2 backends, at ALARM: 4e-7 for all. A number of
    # bits decides, and what p has below them is cut off.
    for eighth in range(8):
        inside = (distance >= eighth / 8) & (distance < (eighth + 1) / 8)
        n, p = int(inside.sum()), distance[inside]
        if n < 100:
            continue
        off = float((sums[inside] / steps - p).mean())
        assert abs(off) <= mean_bound(float((p * (1 - p)).mean()), 1, n * steps) + 2.0**-grid.counted, (eighth, off)


@each
def test_of_all_random_bits_as_many_round_up_as_the_distance_says(grid: Grid) -> None:
    # no chance at all: each of the 2**16 possible random numbers once, on the backend that takes them from a tensor
    values = torch.cat([make(torch.Generator().manual_seed(3))[:40] for make in SOME.values()])
    lower, unit, distance = grid.around(values)
    random = torch.arange(2**16, dtype=torch.int32)
    for value, low, size, p in zip(values, lower, unit, distance, strict=True):
        parts = eager.bind(grid.format.store)(value.expand(2**16).contiguous(), random)
        got = eager.bind(grid.format.load)(*(part + (random & 0) for part in parts)).double().abs()
        upper = math.floor(p * 2**grid.counted) * 2 ** (16 - grid.counted)
        assert int((got == low + size).sum()) == upper
        assert int((got == low).sum()) == 2**16 - upper


@on_each
@each
def test_nan_infinity_and_zero_are_what_they_are(grid: Grid, backend: str) -> None:
    inf, nan = math.inf, math.nan
    values = torch.tensor([inf, -inf, nan, -nan, 0.0, -0.0]).repeat(100)
    for step in range(4):
        assert_same(rounded(grid, values, backend, step), values)


@on_each
@each
def test_p09_a_finite_weight_never_becomes_infinite(grid: Grid, backend: str) -> None:
    end = torch.tensor(grid.end, dtype=torch.float64).float()
    largest = LARGEST[grid.format.parts[0].dtype]
    steps: list[Callable[[int], float]] = [lambda k: 1 + k * 2.0**-24, lambda k: 1 + k * 2.0**-14, lambda k: 2.0**k]
    values = torch.stack([end.double() * step(k) for step in steps for k in range(112)])
    values = torch.cat([values[values < 3.4028235e38].float(), torch.tensor([65504.0, 65520.0, 65536.0, 3.4028235e38])])
    for step in range(20):
        stored = store(grid.format, torch.cat([values, -values]), backend, replace(COUNTER, step=step))
        assert (stored[0].float().abs() <= largest).all()
        got = load(grid.format, stored, backend)
        assert got.isfinite().all()
        beyond = torch.cat([values, -values]).abs().double() >= grid.end
        assert (got.double().abs()[beyond] == grid.end).all()


@on_each
@pytest.mark.parametrize("name", [name for name in GRIDS if name.startswith("split8")])
def test_the_param_is_the_nearest_number_of_what_is_kept(name: str, backend: str) -> None:
    grid = GRIDS[name]
    param, remainder = store(grid.format, every(), backend)
    weight = load(grid.format, [param, remainder], backend)
    # rounding to the nearest of what is kept gives the param, or on a tie its neighbour; past float16's end infinity
    nearest = weight.to(param.dtype)
    tie = remainder == -128
    assert_same(nearest[~tie], param[~tie])
    off = (param.double() - weight.double()).abs()
    assert_same(off[tie], (nearest.double() - weight.double()).abs()[tie])


@on_each
@pytest.mark.parametrize("name", [name for name in GRIDS if name.startswith("split8")])
def test_a_carry_out_of_the_remainder_goes_into_the_param(name: str, backend: str) -> None:
    grid = GRIDS[name]
    # 1 and 127.5 of the 256 units that an ulp of the param has: 128 of them are written as the next param less 128
    ulp = torch.finfo(grid.format.parts[0].dtype).eps
    values = torch.full((10_000,), 1 + 127.5 / 256 * ulp)
    param, remainder = store(grid.format, values, backend)
    carried = param.float() == 1 + ulp
    assert_same(remainder, torch.where(carried, -128, 127).to(torch.int8))
    assert_same(param.float()[~carried], torch.ones(int((~carried).sum())))
    # half of them: a variance of 1/4, at ALARM
    assert abs(float(carried.double().mean()) - 0.5) <= mean_bound(0.25, 1, 10_000)
