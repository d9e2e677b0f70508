"""What each format of a weight keeps, and what it makes of a param that someone else wrote."""

import pytest
import torch

from halfstep.contracts import Format
from halfstep.formats import WEIGHTS
from halfstep.formats.split import SPLIT_BF16, SPLIT_F16
from harness import HERE, WEIGHT_FORMATS, assert_same, float_of, load, specials, spread, store

BF16_END = float_of(0x7F7F8000)  # from here a float32 is nearer to infinity than to the largest bfloat16
HALF_FORMATS = {name: format for name, format in WEIGHT_FORMATS.items() if name != "float32"}
MASTERS = {name: format for name, format in HALF_FORMATS.items() if format.name == "master32"}
SPLITS = {name: format for name, format in HALF_FORMATS.items() if format.name in ("split16", "split8")}
#: test_rounding.py tells of those that round by chance
NEAREST = {name: format for name, format in HALF_FORMATS.items() if not format.random}

pytestmark = pytest.mark.parametrize("backend", HERE)


def largest(format: Format) -> float:
    return torch.finfo(format.parts[0].dtype).max


def assert_exact(format: Format, values: torch.Tensor, backend: str) -> None:
    assert_same(load(format, store(format, values, backend), backend), values)


def test_split16_in_bfloat16_is_exact(backend: str) -> None:
    values = torch.cat([specials(), spread(300_000)])
    assert_exact(SPLIT_BF16, values[(values.abs() < BF16_END) | ~values.isfinite()], backend)


def test_split16_in_float16_is_exact_from_2_to_the_minus_16(backend: str) -> None:
    values = torch.cat([specials(), spread(300_000), torch.rand(100_000) * 2e-3, torch.randn(100_000) * 1e4])
    inside = (values.abs() >= 2.0**-16) & (values.abs() < 65520)
    assert int(inside.sum()) > 150_000
    assert_exact(SPLIT_F16, values[inside | ~values.isfinite()], backend)


def test_split16_in_float16_is_within_2_to_the_minus_40_below(backend: str) -> None:
    values = torch.cat([specials(), spread(100_000), (torch.rand(300_000) - 0.5) * 2.0**-15])
    values = values[values.abs() < 2.0**-16]
    loaded = load(SPLIT_F16, store(SPLIT_F16, values, backend), backend)
    assert (loaded.double() - values.double()).abs().max() <= 2.0**-40
    assert_same(loaded.signbit(), values.signbit())


@pytest.mark.parametrize("format", MASTERS.values(), ids=MASTERS)
def test_master32_is_exact(format: Format, backend: str) -> None:
    assert_exact(format, torch.cat([specials(), spread(300_000)]), backend)


@pytest.mark.parametrize("format", NEAREST.values(), ids=NEAREST)
def test_the_param_is_the_nearest_number(format: Format, backend: str) -> None:
    values = torch.cat([specials(), spread(300_000)])
    values = values[values.isfinite()]
    param, dtype = store(format, values, backend)[0].float(), format.parts[0].dtype
    nearest = values.to(dtype).float()
    # where it is not torch's own rounding it is as near, on the other side of a tie, or torch's is infinite
    other = (param != nearest) & nearest.isfinite()
    assert_same((param - values).double().abs()[other], (nearest - values).double().abs()[other])
    assert (param[nearest.isinf()].abs() == largest(format)).all()
    if format.name != "split16" or dtype is torch.float16:
        assert not other.any()


@pytest.mark.parametrize("format", HALF_FORMATS.values(), ids=HALF_FORMATS)
def test_p09_finite_saturates_and_infinity_and_nan_stay(format: Format, backend: str) -> None:
    values = torch.tensor([3.4e38, -3.4e38, float("inf"), -float("inf"), float("nan"), 1.0])
    stored = store(format, values, backend)
    param = stored[0].float()
    assert_same(param[:4], torch.tensor([1, -1, 1, -1]) * torch.tensor([largest(format)] * 2 + [float("inf")] * 2))
    assert param[4].isnan()
    assert param[5] == 1
    loaded = load(format, stored, backend)
    assert_same(loaded[2:], values[2:])
    assert (loaded[:2].abs() >= largest(format)).all()
    assert loaded.abs()[:2].isfinite().all()


def stale_remainders(format: Format) -> torch.Tensor:
    """Remainders that another weight may have left: all where there are few."""
    dtype = format.parts[1].dtype
    few = [-32768, -32767, -129, -128, -1, 0, 1, 127, 128, 32766, 32767]
    return torch.arange(-128, 128).to(dtype) if dtype is torch.int8 else torch.tensor(few, dtype=dtype)


def half_ulps(params: torch.Tensor) -> torch.Tensor:
    """Half the distance from finite params to the next ones away from zero, in float64."""
    info = torch.finfo(params.dtype)
    exponent = torch.frexp(params.double().abs().clamp(info.smallest_normal, info.max)).exponent - 1
    return torch.ldexp(torch.full(params.shape, info.eps / 2, dtype=torch.float64), exponent)


@pytest.mark.parametrize("format", SPLITS.values(), ids=SPLITS)
def test_p22_a_written_param_wins_beside_any_remainder(format: Format, backend: str) -> None:
    dtype = format.parts[0].dtype
    params = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    value, bound = params.double(), half_ulps(params)
    finite, zero = value.isfinite(), value == 0
    for stale in stale_remainders(format):
        loaded = load(format, [params, torch.full(params.shape, int(stale), dtype=stale.dtype)], backend)
        assert torch.equal(loaded.isfinite(), finite)
        assert ((loaded.double() - value).abs() <= bound)[finite].all()
        assert_same(loaded[~finite], params[~finite].float())
        assert torch.equal(loaded.signbit()[finite], params.signbit()[finite])
        # a zero that was written beside what a negative remainder would take below it is zero
        if stale <= 0:
            assert_same(loaded[zero], params[zero].float())


@pytest.mark.parametrize("format", MASTERS.values(), ids=MASTERS)
def test_p22_a_master_holds_exactly_where_the_param_is_a_nearest_neighbour(format: Format, backend: str) -> None:
    dtype, generator = format.parts[0].dtype, torch.Generator().manual_seed(1)
    masters = torch.cat([specials(), spread(50_000, generator), torch.randn(50_000, generator=generator)])
    params = masters.to(dtype)
    # ties in plenty: a master half way between two neighbours
    half = params.float() + (torch.nextafter(params, torch.full_like(params, 3e4)).float() - params.float()) / 2
    masters = torch.cat([masters, half[half.isfinite()]])
    own = store(format, masters, backend)[0]
    for shift in (-2, -1, 0, 1, 2):
        params = (own.view(torch.int16) + shift).view(dtype)
        loaded = load(format, [params, masters], backend)
        # in float64, where every difference is exact once what saturates is as near to the end as it can be
        target = masters.double().clamp(-largest(format), largest(format))
        distance, least = (params.double() - target).abs(), (own.double() - target).abs()
        holds = (distance == least) & (params.signbit() == masters.signbit()) & params.isfinite() & masters.isfinite()
        holds |= params.view(torch.int16) == own.view(torch.int16)
        assert_same(loaded, torch.where(holds, masters, params.float()))
        assert bool(holds.any()) == (abs(shift) <= 1)


@pytest.mark.parametrize("format", MASTERS.values(), ids=MASTERS)
def test_p22_a_master_that_is_nan_yields_to_a_written_param(format: Format, backend: str) -> None:
    dtype = format.parts[0].dtype
    masters = torch.tensor([0x7FC00000, 0x7F800001, 0x7FFFFFFF, -1, -0x400000], dtype=torch.int32).view(torch.float32)
    for value in (0.0, -0.0, 1.0, float("inf"), -float("inf"), largest(format)):
        params = torch.full(masters.shape, value, dtype=dtype)
        assert_same(load(format, [params, masters], backend), params.float())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", WEIGHTS["split16"], ids=str)
def test_every_float32_survives_split16(dtype: torch.dtype, backend: str) -> None:
    if backend == "eager":
        pytest.skip("every mantissa is compared between backends in test_parity; all 2**32 on the compiled one")
    format, mantissas = WEIGHTS["split16"][dtype], torch.arange(2**23, dtype=torch.int32)
    low, high = {torch.bfloat16: (0.0, BF16_END), torch.float16: (2.0**-16, 65520.0)}[dtype]
    for exponent in range(255):
        for sign in (0, -(2**31)):
            values = ((mantissas | (exponent << 23)) | sign).view(torch.float32)
            values = values[(values.abs() >= low) & (values.abs() < high)]
            if values.numel():
                assert_exact(format, values, backend)
