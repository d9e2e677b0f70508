"""Subjects timed round by round, each against what ran in the same round."""

import gc
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

#: seconds before each call: threads that a library leaves spinning would take a core from whoever is next
PAUSE = 0.005

Kind = Literal["memory", "halfstep", "torch", "peer"]


@dataclass(frozen=True)
class Subject:
    """Something to time.

    Args:
        label: what it is, such as "halfstep split16 × float32".
        dtype: of its params.
        kind: whose it is.
        params: elements that one call works on.
        moved: bytes an element that a call has to read and to write at the least; None where no single number says it.
        step: the call.
    """

    label: str
    dtype: str
    kind: Kind
    params: int
    moved: float | None
    step: Callable[[], object]

    @property
    def name(self) -> str:
        """The label and the dtype: what tells it from others of its run."""
        return f"{self.label}, {self.dtype}"


def measure(subjects: Sequence[Subject], rounds: int, warmup: int = 1) -> dict[str, list[float]]:
    """Call every subject once a round, and return the seconds of each by its name.

    Whatever the machine does beside, it does to all subjects of a round. They are called in another order each time,
    so that what one leaves in caches and clocks does not always fall to the same neighbour.
    """
    for _ in range(warmup):
        for subject in subjects:
            subject.step()
    seconds: dict[str, list[float]] = {subject.name: [] for subject in subjects}
    order = random.Random(0)
    # a collection would count the objects of all subjects, in the time of one
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for subject in order.sample(subjects, len(subjects)):
                time.sleep(PAUSE)
                began = time.perf_counter()
                subject.step()
                seconds[subject.name].append(time.perf_counter() - began)
    finally:
        gc.enable()
    return seconds


def paired_ratio(seconds: Iterable[float], reference: Iterable[float]) -> float:
    """Return the median over the rounds of a time divided by the reference's of the same round."""
    return statistics.median(mine / theirs for mine, theirs in zip(seconds, reference, strict=True))
