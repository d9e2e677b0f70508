"""An exponential moving average of the weight, which an evaluation uses in its place; no optimizer steps by it."""

from collections.abc import Mapping
from typing import Any

from halfstep.contracts import Moment, Rule


def average(weight, grad, average, one_minus_decay):
    #: $a_t = a_{t-1} + (1-\delta)\,(\theta_t - a_{t-1})$
    average = average + (weight - average) * one_minus_decay
    return (average,)


def scalars(group: Mapping[str, Any], step: int) -> tuple[float, ...]:
    r"""The scalar of any step: $1-\delta$, where $\delta$ is the decay."""
    return (1 - group["decay"],)


AVERAGE = Rule("average", (Moment("average", signed=True),), average, scalars, observes=True)
