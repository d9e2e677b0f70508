"""P07: stored moments follow their average, up and down; no loss curve shows it where they do not."""

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from chance import mean_bound
from halfstep import backends
from halfstep.backends import eager
from halfstep.backends.pieces import part_shape
from halfstep.contracts import Counter, Format, Job, Moment, Plan, Rule
from halfstep.formats import FLOAT32, MOMENTS
from halfstep.formats.block8 import SQUARE, load_square, store_square
from halfstep.primitives import bits, select, sqrt
from halfstep.rules.adam import ADAM
from halfstep.rules.lion import LION
from harness import CPU, GROUP, load

#: an entry's gradient beside the block's largest; the last is where a signed code counts, as below any exponent
RATIOS = (1.0, 2.0**-5, 2.0**-8, 2.0**-10, 2.0**-13, 2.0**-14, 2.0**-15)
#: the largest gradient: between two numbers that a code can hold, the next one up is 1.375 for either moment
GRAD = 1.3
#: no average passes it, since a store goes no further than the next number
MOST = 1.375
#: what a rounding to float32 moves a value by, relatively
ROUNDING = 2.0**-24


@dataclass(frozen=True)
class Case:
    """A rule, its moments' betas, and how long the gradient is 1, then -1, then 0."""

    rule: Rule
    group: Mapping[str, Any]
    betas: tuple[float, ...]
    phases: tuple[int, int, int]

    def signs(self) -> Iterator[float]:
        for sign, steps in zip((1.0, -1.0, 0.0), self.phases, strict=True):
            yield from (sign for _ in range(steps))

    def looks(self) -> set[int]:
        """The steps after which the averages are compared."""
        ends = np.cumsum((0, *self.phases))
        places = (2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)
        return {int(start) + k for start, end in itertools.pairwise(ends) for k in places if start + k < end} | {
            int(end) for end in ends[1:]
        }


def adam(beta1: float, beta2: float, phases: tuple[int, int, int]) -> Case:
    return Case(ADAM, GROUP | {"betas": (beta1, beta2), "weight_decay": 0.0}, (beta1, beta2), phases)


def lion(phases: tuple[int, int, int]) -> Case:
    return Case(LION, GROUP | {"betas": (0.9, 0.99), "weight_decay": 0.0}, (0.99,), phases)


#: the compiled backend's are long enough for the averages to arrive; eager, with the same bits, runs a part of them
CASES = {
    "cpu": {
        "0.9-0.999": adam(0.9, 0.999, (2500, 60, 1500)),
        "0.95-0.9999": adam(0.95, 0.9999, (6000, 100, 3000)),
        "lion-0.99": lion((600, 400, 300)),
    },
    "eager": {
        "0.9-0.999": adam(0.9, 0.999, (100, 40, 60)),
        "0.95-0.9999": adam(0.95, 0.9999, (100, 60, 60)),
        "lion-0.99": lion((150, 120, 60)),
    },
}
ROWS = {"cpu": 256, "eager": 64}


def kept(moments: str, rule: Rule) -> tuple[Format, ...]:
    return tuple(MOMENTS[moments].of(moment) for moment in rule.moments)


@dataclass(frozen=True)
class Look:
    """One comparison: a moment after a step, for the entries of one ratio; in units of that ratio, or of its square."""

    moment: Moment
    beta: float
    step: int
    ratio: float
    mean: float
    average: float
    n: int


def averages(case: Case, formats: tuple[Format, ...], backend: str, ratios: tuple[float, ...] = RATIOS) -> list[Look]:
    """Step many equal entries through a case; compare their means with the float64 average of the same gradients."""
    shape = (ROWS[backend], 128)
    ratio = torch.tensor(ratios)[torch.arange(128) % len(ratios)].expand(shape)
    kernel = backends.kernel(Plan(case.rule, FLOAT32, formats, FLOAT32, CPU), backend)
    states = [[torch.zeros(part_shape(part, shape), dtype=part.dtype) for part in f.parts] for f in formats]
    flat, weight = tuple(part for state in states for part in state), torch.zeros(shape)
    grads = {sign: (ratio * GRAD * sign).contiguous() for sign in (1.0, -1.0, 0.0)}
    want, looks, found = [0.0] * len(formats), case.looks(), []
    for step, sign in enumerate(case.signs(), start=1):
        kernel([Job(weight, grads[sign], flat, (1.0, *case.rule.scalars(case.group, step)), Counter(1, 2, step))])
        for k, (moment, beta) in enumerate(zip(case.rule.moments, case.betas, strict=True)):
            want[k] += (1 - beta) * (((GRAD * sign) ** 2 if moment.square else GRAD * sign) - want[k])
        if step not in looks:
            continue
        for moment, format, state, beta, average in zip(
            case.rule.moments, formats, states, case.betas, want, strict=True
        ):
            value = load(format, state, "eager").double()
            for r in ratios:
                these = value[ratio == r] / (r * r if moment.square else r)
                found.append(Look(moment, beta, step, r, float(these.mean()), average, these.numel()))
    return found


def allowed(look: Look, moments: str) -> tuple[float, float]:
    r"""How far the mean may lie below and above the average, in units of the entry's ratio (or of its square).

    A store takes a value to one of its neighbours, $\Delta$ apart, the expectation being the value itself. So the mean
    differs from the average by a martingale in which a deviation of k steps ago counts $\beta^k$. A step moves a moment
    by $d \le 2 (1-\beta) G$; between two neighbours that leaves a variance of at most
    $\min(d \Delta, \Delta^2 / 4)$, and over all steps $1 / (1-\beta^2)$ times as much.

    The root of a square: its $\Delta$ is at most $s/16$, the square's $2 s \Delta + \Delta^2 \le 0.13\, v$, and its
    variance $d_s \Delta (2s + \Delta)^2 \le 0.14\, (1-\beta)\, G^4$ with $d_s = (1-\beta) |g^2 - v| / 2s$. (Where the
    first steps pass several numbers, $v'^2 / 256$ with $v' \le 9 (1-\beta) G^2$, which is less.) Squares are kept too
    large: a root goes up with a probability of at most $p + \frac3{256} p (1-p)$, which raises its square by
    $\frac3{256} p (1-p) (2s + \Delta) \Delta$, and its variance does by $p (1-p) \Delta^2$. With $p \Delta = d_s$ and
    $s = c \Delta$ that is, beside the drift $2 s d_s$, no more than $\frac1{2c} (1 + \frac3{256} (2c+1)) < 1/23$ for
    the c from 16 to 32. So the average is off upwards by no more than $G^2 / 23$, that part of the largest
    $|g^2 - v|$.

    Under $2^{-14}$ of the largest a signed code counts in eighths of that, and a second rounding comes to the first.

    Of what decides, 16 random bits, all below is cut off: $2^{-16} \Delta$ a store; and float32's roundings, 3 to 5 a
    step. Both add up over $1 / (1-\beta)$ steps.
    """
    beta, size = look.beta, MOST**2 if look.moment.square else MOST
    memory = min(look.step, 1 / (1 - beta))
    below = above = 5 * ROUNDING * size * memory
    if moments == "block8" and look.moment.square:
        below += 2.0**-16 * 2 * size / 16 * memory
        above += size / 23
        variance, span = 0.14 * size**2 / (1 + beta), 0.13 * size
    elif moments == "float32":
        variance = span = 0.0
    else:
        span = size / 8 if moments == "block8" else size * 2.0**-7
        if moments == "block8" and look.ratio < 2.0**-14:
            # the golden ratio's multiples are even to 16 of 2**16, whatever the first rounding did
            below += 2.0**-12 * 2.0**-17 / look.ratio * memory
            above += 2.0**-12 * 2.0**-17 / look.ratio * memory
            span += 2.0**-17 / look.ratio
        below += 2.0**-16 * span * memory
        above += 2.0**-16 * span * memory
        variance = min(2 * span * size / (1 + beta), span**2 / 4 / (1 - beta**2))
    chance = mean_bound(variance, span, look.n)
    return below + chance, above + chance


def assert_followed(looks: list[Look], moments: str) -> None:
    """Raise where a moment left its average. Some 3,000 comparisons in this file, each at ALARM: 3e-6 for all."""
    assert looks
    for look in looks:
        below, above = allowed(look, moments)
        # the bounds are worth something: a thirteenth of what the average can be
        assert max(below, above) <= MOST**2 / (8 if look.n < 4000 else 13), look
        assert -below <= look.mean - look.average <= above, (look, below, above)


@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize("name", CASES["cpu"])
def test_p07_moments_follow_their_average(name: str, moments: str, backend: str) -> None:
    case = CASES[backend][name]
    looks = averages(case, kept(moments, case.rule), backend)
    # a square has 2**-30 of the largest where its gradient has 2**-15: that is under its range, and kept larger
    assert_followed([look for look in looks if look.ratio >= 2.0**-14 or not look.moment.square], moments)
    # there was something to follow: the average rose, turned and fell
    seen = [look.average for look in looks if look.moment is case.rule.moments[0]]
    assert max(seen) > 0.7 * GRAD
    assert min(seen) < -0.3 * GRAD
    assert abs(seen[-1]) < 0.6 * GRAD


def test_p07_a_small_entry_starts_beside_a_large_one(backend: str) -> None:
    # a step offers it 2**-12 * (1 - 0.99), which no exponent of the block reaches; in the mean it must rise all the
    # same
    case = lion((150, 0, 0))
    large, n = torch.zeros(64, 128), 64 * 127
    large[:, 0] = GRAD
    format = MOMENTS["block8"].signed
    kernel = backends.kernel(Plan(LION, FLOAT32, (format,), FLOAT32, CPU), backend)
    state = tuple(torch.zeros(part_shape(part, large.shape), dtype=part.dtype) for part in format.parts)
    weight, want = torch.zeros(large.shape), 0.0
    for step in range(1, 301):
        grad = large if step <= 150 else large + (large == 0) * GRAD * 2.0**-12
        scalars = (1.0, *LION.scalars(case.group, step))
        kernel([Job(weight, grad, state, scalars, Counter(3, 4, step))])
        want += (step > 150) * 0.01 * (GRAD * 2.0**-12 - want)
    small = load(format, state, "eager")[:, 1:].double()
    # a unit is an eighth of 2**-14, since the largest lies between 1 and 2; a store deviates by no more, 100 of them
    # count, and the counting of 9 bits drops 2**-9 of a unit each
    unit = 2.0**-17
    bound = mean_bound(unit**2 / 4 / (1 - 0.99**2), unit, n) + 100 * unit * 2.0**-9
    assert bound < want / 5
    assert abs(float(small.mean()) - want) <= bound


#: block8's docstring counts to the first order in w / 2bv^2, which is about 0.04; the second is its square
BEYOND = 0.002


def lengthened(square: Format) -> tuple[float, float]:
    """How much longer Adam's steps are with roots kept as ``square``, and how far chance may take that."""
    shape, beta, rest, steps = (1024, 128), 0.999, 2000, 4000
    generator = torch.Generator().manual_seed(9)
    group, plan = GROUP | {"betas": (0.9, beta)}, Plan(ADAM, FLOAT32, (FLOAT32, square), FLOAT32, CPU)
    kernel = backends.kernel(plan, "cpu")
    weight, average, longer, looks = torch.zeros(shape), torch.zeros(shape), 0.0, 0
    state = (torch.zeros(shape), *(torch.zeros(part_shape(part, shape), dtype=part.dtype) for part in square.parts))
    for step in range(1, steps + 1):
        grad = torch.randn(shape, generator=generator)
        kernel([Job(weight, grad, state, (1.0, *ADAM.scalars(group, step)), Counter(5, 6, step))])
        average.lerp_(grad.square(), 1 - beta)
        if step > rest and step % 500 == 0:
            longer += float((average / load(square, list(state[1:]), "eager")).double().sqrt().mean()) - 1
            looks += 1
    # The variance of a ratio is 1/4 of that of v, w / 2b with w = |d| (2s + D) D, in which d is the root's drift
    # b |g^2 - v| / 2s, E |g^2 - v| = 0.97 v and D / s at most 1/16: 0.97 * 0.13 / 2 v^2
    return longer / looks, mean_bound(0.97 * 0.13 / 2 / 4, 0.25, weight.numel())


def test_p07_the_steps_that_a_kept_square_makes_are_right_in_the_mean() -> None:
    longer, chance = lengthened(SQUARE)
    assert abs(longer) <= BEYOND + chance


def measure_even(value, random):
    """block8's measure, if it kept the mean of the root itself."""
    root = bits(sqrt(value))
    return select(root == 0, 0, root + (random << 3))


def test_p07_steps_that_are_too_long_would_be_seen() -> None:
    longer, chance = lengthened(replace(SQUARE, measure=measure_even))
    assert longer > BEYOND + chance


# ---------------------------------------------------------------------- what would be seen


def half_way(random):
    return (random & 0) | 0x8000


@pytest.mark.parametrize("name", CASES["eager"])
@pytest.mark.parametrize("moments", ["bfloat16", "block8"])
def test_p07_rounding_to_the_nearest_would_be_seen(name: str, moments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager, "first_half", half_way)
    monkeypatch.setattr(eager, "second_half", half_way)
    case = CASES["eager"][name]
    with pytest.raises(AssertionError, match="Look"):
        assert_followed(averages(case, kept(moments, case.rule), "eager"), moments)


def measure_early(value, random):
    """block8's measure, where what is rounded up may not pass the exponent that the value had before."""
    root = bits(sqrt(value))
    kept = root + (random << 3)
    return select((kept >> 23) > (root >> 23), root | 0x7FFFFF, kept)


def test_p07_an_exponent_from_before_the_rounding_would_be_seen() -> None:
    # the block's largest can then never grow past a power of two, and sqrt(v) stays where it was
    early = Format("block8", SQUARE.parts, load_square, store_square, measure=measure_early, random=True)
    signed = MOMENTS["block8"].signed
    case = adam(0.9, 0.999, (1000, 1, 1))
    looks = averages(case, (signed, early), "cpu")
    stuck = [look for look in looks if look.moment.square and look.step == 1000 and look.ratio == 1]
    assert math.sqrt(stuck[0].mean) < 0.6 * math.sqrt(stuck[0].average)
    with pytest.raises(AssertionError, match="Look"):
        assert_followed(looks, "block8")
