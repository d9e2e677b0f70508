"""What the statistical tests share: how far chance goes, and the random bits once more, in plain numpy.

Every test states how often it would fail if its bits were truly random. They are not: seeds are fixed, so a test that
passes passes always, and the rate says what a failure after a change is worth.
"""

import math

import numpy as np
import torch
from torch import Tensor

from halfstep.contracts import Counter

#: the chance of a false alarm in one comparison: with ten thousand of them in all tests together 1e-5
ALARM = 1e-9
#: its logarithm for a bound on both sides
ODDS = math.log(2 / ALARM)


def mean_bound(variance: float, span: float, n: int) -> float:
    r"""How far the mean of n numbers may lie from what is expected, but for a chance of `ALARM`.

    Bernstein's inequality, and Freedman's where each number's expectation depends on those before it: with variances
    of at most $V$ and deviations of at most $R$, $P(|\bar x - \mu| \ge t) \le 2 \exp(-n t^2 / (2V + 2Rt/3))$. Solved
    for $t$ it gives at most $\sqrt{2 V L / n} + 2 R L / 3n$.
    """
    return math.sqrt(2 * variance * ODDS / n) + 2 * span * ODDS / (3 * n)


def assert_counts_are_even(counts: Tensor, expected: float) -> None:
    r"""Raise unless counts that ought to be equal differ as chance would have them; `ALARM` on each side.

    Pearson's statistic follows a chi-square with $k$ degrees of freedom where 60 and more are expected in each cell;
    for that $P(X - k \ge 2\sqrt{kx} + 2x) \le e^{-x}$ and $P(k - X \ge 2\sqrt{kx}) \le e^{-x}$ (Laurent and Massart,
    2000).
    """
    assert expected >= 60
    freedom, x = counts.numel() - 1, -math.log(ALARM)
    statistic = float(((counts.double() - expected) ** 2).sum() / expected)
    assert freedom - 2 * math.sqrt(freedom * x) <= statistic <= freedom + 2 * math.sqrt(freedom * x) + 2 * x, statistic


def lowbias32(x: int) -> int:
    """Chris Wellons's hash as he gives it, over Python's integers."""
    x ^= x >> 16
    x = x * 0x7FEB352D % 2**32
    x ^= x >> 15
    x = x * 0x846CA68B % 2**32
    return x ^ x >> 16


def key_of(counter: Counter, use: int) -> tuple[int, int]:
    """The 64 bits that key a pair of uses, as two halves, over Python's integers."""
    low, high = counter.seed % 2**32, counter.seed % 2**64 // 2**32
    found = []
    for half, other in ((low, high), (high ^ 0x9E3779B9, low)):
        half = lowbias32(half)
        for number in (other, counter.stream, counter.step, use // 2):
            half = lowbias32((half + number) % 2**32)
        found.append(half)
    return found[0], found[1]


def words(counter: Counter, use: int, n: int) -> Tensor:
    """The 32-bit words behind a use and its pair for n elements, in int64: the definition in 64-bit arithmetic."""
    key, fold = key_of(counter, use)
    place = np.arange(n, dtype=np.uint64)
    length, pitch, start = (np.uint64(number) for number in (counter.length or max(n, 1), counter.pitch, counter.start))
    index = start + place // length * pitch + place % length
    keys, folds = (
        np.array([lowbias32((half + high) % 2**32) for high in range(2**3)], dtype=np.uint64) for half in (key, fold)
    )
    low32, high = np.uint64(2**32 - 1), index >> np.uint64(32)
    assert high.max(initial=0) < len(folds)
    x = index & low32 ^ keys[high.astype(np.int64)]
    x ^= x >> np.uint64(16)
    x = x * np.uint64(0x7FEB352D) + folds[high.astype(np.int64)] & low32
    x ^= x >> np.uint64(15)
    x = x * np.uint64(0x846CA68B) & low32
    return torch.from_numpy((x ^ x >> np.uint64(16)).astype(np.int64))


def random_bits(counter: Counter, use: int, n: int) -> Tensor:
    """The 16 random bits of a use for n elements, in int64."""
    return words(counter, use, n) >> 16 * (use % 2) & 0xFFFF
