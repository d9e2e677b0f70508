"""Before anything is timed: a fast step gives the bits of the plain one, or there is nothing to report."""

from collections.abc import Iterator

import torch
from torch import Tensor

import halfstep
from halfstep.bench.shapes import Tensors
from halfstep.bench.subjects import DTYPES, halfstep_adamw

#: sizes that no vector width and no block divides
SIZES = ((5003,), (3, 7), (), (67, 129))
STEPS = 3

_WIDTHS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


class Red(RuntimeError):
    """What would be timed does not compute what it has to."""


def check(weights: str, moments: str, dtype: str) -> None:
    """Step a pair of formats on the backends "cpu" and "eager" from the same start, and compare every bit.

    Raises:
        Red: they differ; the text names the pair and the tensor.
        halfstep.backends.Unavailable: "cpu" cannot run the pair here.
    """
    steps = zip(_walk(weights, moments, dtype, "cpu"), _walk(weights, moments, dtype, "eager"), strict=True)
    for number, (fast, plain) in enumerate(steps, 1):
        for name, tensor in fast.items():
            if not _same(tensor, plain[name]):
                raise Red(
                    f"weights={weights!r}, moments={moments!r} on {dtype} params: backend 'cpu' differs from 'eager' "
                    f"in {name} after step {number}; nothing is timed and nothing written"
                )


def _walk(weights: str, moments: str, dtype: str, backend: str) -> Iterator[dict[str, Tensor]]:
    """Yield params and state after each step; the last one is scaled and clipped."""
    params = Tensors(SIZES).params(DTYPES[dtype])
    optimizer = halfstep_adamw(params, weights, moments, backend)
    scaler = halfstep.GradScaler("cpu", init_scale=16.0)
    scaler.scale(torch.zeros(()))
    for number in range(1, STEPS + 1):
        if number == STEPS:
            halfstep.clip_grad_norm_(optimizer, 1.0, scaler)
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        yield {
            f"the {name} of the param of shape {tuple(param.shape)}": tensor.detach()
            for param in params
            for name, tensor in {"weight": param, **optimizer.state[param]}.items()
            if isinstance(tensor, Tensor)
        }


def _same(a: Tensor, b: Tensor) -> bool:
    return a.dtype is b.dtype and torch.equal(a.view(_WIDTHS[a.element_size()]), b.view(_WIDTHS[b.element_size()]))
