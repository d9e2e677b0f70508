"""The learning rate of each step."""

from pathlib import Path

import pytest

from halfstep.cli.settings import Settings
from halfstep.cli.training import rising, rising_and_falling


def test_the_rate_rises_and_stays() -> None:
    rate = rising(Settings(out=Path("unused"), lr=0.5, steps=300))
    assert [rate(step) for step in (1, 25, 50, 51, 300, 1000)] == [0.01, 0.25, 0.5, 0.5, 0.5, 0.5]


def test_the_rate_of_a_run_with_a_known_end_falls_in_a_line() -> None:
    rate = rising_and_falling(0.5, 50, 300)
    assert [rate(step) for step in (1, 25, 50, 51)] == [0.01, 0.25, 0.5, 0.5]
    # 250 steps on the way down, the last of them as high as one 250th
    assert rate(176) == pytest.approx(0.25, rel=1e-15)
    assert rate(300) == pytest.approx(0.5 / 250, rel=1e-15)


@pytest.mark.parametrize("steps", [1, 2, 49, 50, 51])
def test_a_run_as_short_as_its_warmup_still_moves(steps: int) -> None:
    rate = rising_and_falling(0.5, 50, steps)
    assert all(0 < rate(step) <= 0.5 for step in range(1, steps + 1))
