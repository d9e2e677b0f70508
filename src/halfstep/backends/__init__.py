"""Who runs a plan: one file a backend. Here a plan's backend is chosen, and the choice explained."""

import functools
import importlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from halfstep.contracts import Backend, Format, Kernel, Plan

BACKENDS = {"cpu": "cpu", "gpu": "cuda", "eager": None}
"""Every backend by its name, the fastest first, and the type of device for which it is chosen unasked; None for any."""


class Unavailable(RuntimeError):
    """A backend was asked for by name and cannot run the tensors."""


class Choice(NamedTuple):
    """A plan's backend and why it was taken: the reasons for which faster ones were not, or an empty text."""

    backend: Backend
    reason: str


@functools.cache
def load(name: str) -> Backend | str:
    """Return the backend called ``name``, or say why it is missing here. Its compiler is imported now, not before."""
    try:
        return importlib.import_module(f"halfstep.backends.{name}").BACKEND
    except ImportError as error:
        return f"{error.name or 'its compiler'} cannot be imported ({error})"


@functools.cache
def choose(device: torch.device, dtypes: frozenset[torch.dtype], requested: str) -> Choice:
    """Choose who runs tensors of ``dtypes`` on ``device``: who was requested, or with "auto" the fastest that can.

    Raises:
        Unavailable: the one requested cannot run them; the text says why and what would.
    """
    reasons = []
    fitting = [name for name, kind in BACKENDS.items() if kind in (device.type, None)]
    for name in fitting if requested == "auto" else (requested,):
        backend = load(name)
        reason = backend if isinstance(backend, str) else backend.refuses(device, dtypes)
        if reason is None and not isinstance(backend, str):
            return Choice(backend, "; ".join(reasons))
        reasons.append(f"not {name}: {reason}")
    raise Unavailable(f"backend={requested!r} cannot run here: {reasons[0]}. Use backend='auto' or 'eager'.")


@functools.cache
def kernel(plan: Plan, requested: str) -> Kernel:
    """Return the compiled kernel of ``plan`` on its chosen backend."""
    return choose(plan.device, plan.dtypes, requested).backend.compile(plan)


def squares(grad: Format, grads: Sequence[Tensor], requested: str) -> tuple[Tensor, Tensor]:
    """Return what `Backend.squares` says of ``grads``, all of one dtype and device."""
    return choose(grads[0].device, frozenset({grads[0].dtype}), requested).backend.squares(grad, grads)


def total(sums: Tensor, requested: str) -> Tensor:
    """Return the sum of the sums of chunks: `Backend.total`."""
    return choose(sums.device, frozenset({sums.dtype}), requested).backend.total(sums)
