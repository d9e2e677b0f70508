"""What became of weights and moments that were loaded in another format: counted, and told."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Conversion:
    """What became of a param's weight, or of one of its moments, when a state in another format was loaded.

    Args:
        param: its name.
        what: ``"weight"``, or the moment's name.
        source: the format in which it came, or its dtype where it was one number.
        target: the format in which it is now.
        values: how many there are.
        rounded: how many the new format could not hold as they were.
        largest: by how much the worst of these is off.
    """

    param: str
    what: str
    source: str
    target: str
    values: int
    rounded: int
    largest: float


class Rounding:
    """Counts the values that a conversion changes, and how far the worst is off."""

    def __init__(self) -> None:
        self._rounded, self._largest = 0, 0.0

    def __call__(self, values: Tensor, kept: Tensor) -> None:
        """Compare ``values`` with what was ``kept`` of them."""
        off = (values != kept) & ~(values.isnan() & kept.isnan())
        if rounded := int(off.sum()):
            self._rounded += rounded
            self._largest = max(self._largest, (values - kept)[off].abs().max().item())

    def found(self) -> tuple[int, float]:
        """Return how many were rounded, and by how much at most."""
        return self._rounded, self._largest


def summary(conversions: Iterable[Conversion]) -> list[str]:
    """Return a line for each kind of conversion, all params together."""
    alike: defaultdict[tuple[str, str, str], list[Conversion]] = defaultdict(list)
    for conversion in conversions:
        alike[conversion.what, conversion.source, conversion.target].append(conversion)
    lines = []
    for (what, source, target), same in alike.items():
        rounded, values = sum(each.rounded for each in same), sum(each.values for each in same)
        tensors = f"{len(same)} tensor{'s' if len(same) > 1 else ''}"
        off = f"{rounded:,} rounded, by {max(each.largest for each in same):.2g} at most" if rounded else "all exact"
        lines.append(f"{what}: {source} to {target}, {tensors}, {values:,} values, {off}")
    return lines
