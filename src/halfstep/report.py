"""What an optimizer tells a person: its tensors as a table, their bytes, and weights that went out of range."""

import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from halfstep import backends
from halfstep.backends.pieces import part_shape
from halfstep.contracts import Part, Plan
from halfstep.formats import too_small
from halfstep.shards import local

_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Line:
    """A param and how it is stepped: the place of its group, the group's options and its plan."""

    group: int
    options: Mapping[str, Any]
    param: Tensor
    plan: Plan

    def memory(self) -> dict[str, int]:
        """Return its bytes, by what they are for."""
        param = local(self.param)
        grad = param.nbytes if self.param.grad is None else local(self.param.grad).nbytes
        weight = sum(_nbytes(part, param) for part in self.plan.weight.parts[1:])
        moments = sum(_nbytes(part, param) for format in self.plan.moments for part in format.parts)
        return {"param": param.nbytes, "grad": grad, "weight": weight, "moments": moments}

    def row(self) -> tuple[str, ...]:
        """Return what sets it apart from other tensors in the table."""
        plan = self.plan
        moments = ", ".join(dict.fromkeys(format.name for format in plan.moments)) or "none"
        dtype = str(self.param.dtype).removeprefix("torch.")
        return str(self.group), dtype, plan.rule.name, plan.weight.name, moments, self._choice().backend.name

    def runs(self) -> str:
        """Say who steps it, and why not a faster one."""
        backend, reason = self._choice()
        return f"backend {backend.name}: {backend.describe(self.plan)}{f' ({reason})' if reason else ''}"

    def _choice(self) -> backends.Choice:
        return backends.choose(self.plan.device, self.plan.dtypes, self.options["backend"])

    def exceptions(self) -> list[str]:
        """Say in what the tensor did not get what its group asks for, and why."""
        found = []
        if self.plan.weight.name != self.options["weights"]:
            found.append(f"weights {self.plan.weight.name} (weights={self.options['weights']!r} is for 16-bit params)")
        asked = self.options["moments"]
        for name in dict.fromkeys(format.name for format in self.plan.moments if format.name != asked):
            reason = too_small(self.param.shape) or "rows that processes share amid a block"
            found.append(f"moments {name} (moments={asked!r} is not for tensors with {reason})")
        return found


def _nbytes(part: Part, param: Tensor) -> int:
    return torch.Size(part_shape(part, param.shape)).numel() * part.dtype.itemsize


def memory(lines: Iterable[Line]) -> dict[str, int]:
    """Return the bytes of all tensors together, by what they are for, and their total."""
    sums = Counter({"param": 0, "grad": 0, "weight": 0, "moments": 0})
    for line in lines:
        sums.update(line.memory())
    return {**sums, "total": sums.total()}


def table(lines: Sequence[Line]) -> list[str]:
    """Return the table's lines: sums, a row for each group of like tensors, who runs them, and every exception."""
    alike: dict[tuple[str, ...], list[Line]] = {}
    for line in lines:
        alike.setdefault(line.row(), []).append(line)
    head = ("group", "params", "rule", "weights", "moments", "backend", "tensors", "elements", "MiB", "bytes each")
    rows = [head, *((*row, *_sums(same)) for row, same in alike.items())]
    if len(alike) > 1:
        rows.append(("all", "", "", "", "", "", *_sums(lines)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    texts = [
        "  ".join(
            cell.ljust(width) if column < 6 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    runs = dict.fromkeys(line.runs() for line in lines)
    exceptions = Counter(f"group {line.group}: {text}" for line in lines for text in line.exceptions())
    counted = [f"{text}: {count} tensor{'s' if count > 1 else ''}" for text, count in exceptions.items()]
    return [*texts, *runs, *counted]


def _sums(lines: Sequence[Line]) -> tuple[str, ...]:
    """Return number of tensors, elements, MiB and bytes an element."""
    elements, total = sum(local(line.param).numel() for line in lines), memory(lines)["total"]
    each = f"{total / elements:.2f}" if elements else "-"
    return str(len(lines)), f"{elements:,}", f"{total / _MIB:,.1f}", each


def warn_of_saturation(name: str, param: Tensor, count: int) -> None:
    """Warn that ``count`` weights of a param are kept at the largest number of its dtype."""
    warnings.warn(
        f"{name}: {count} of {local(param).numel()} weights went past {torch.finfo(param.dtype).max:g}, the largest "
        f"{param.dtype}, and stay there until their gradients turn. Lower lr, raise weight_decay, or keep "
        "this param in a wider dtype. Further ones are counted by optimizer.saturated()",
        RuntimeWarning,
        stacklevel=_levels_to_the_caller(),
    )


def _levels_to_the_caller() -> int:
    """How far up lies the first frame that is neither ours nor torch's, counted as a warning of the caller's counts."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in ("halfstep", "torch"):
        level, frame = level + 1, frame.f_back
    return level
