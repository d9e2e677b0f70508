"""PyTorch operators: the definition of what is right, on every device, in bounded temporary memory."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from halfstep import primitives
from halfstep.backends.pieces import pieces
from halfstep.contracts import Backend, Format, Job, Kernel, Plan

#: Elements computed at a time. A step holds fewer than 30 temporaries of 4 bytes each, two of them 8: under 32 MiB.
PIECE = 2**18


@functools.cache
def has_float64(device: torch.device) -> bool:
    """Whether ``device`` computes in float64; MPS and some XPUs do not."""
    try:
        torch.ones(1, dtype=torch.float64, device=device).sqrt_()
    except (TypeError, RuntimeError):
        return False
    return True


def _sqrt(x: Tensor) -> Tensor:
    # On the CPU torch.sqrt of float32 is not correctly rounded. Rounding float64's root to float32 is.
    return x.double().sqrt_().float() if has_float64(x.device) else x.sqrt()


def _div(a: Tensor, b: Tensor | float) -> Tensor:
    # division by a number would multiply by its rounded inverse on some devices
    return a / torch.as_tensor(b, dtype=torch.float32, device=a.device).expand_as(a)


WORDS: dict[str, Callable[..., Any]] = {
    "sqrt": _sqrt,
    "div": _div,
    "bits": lambda x: x.view(torch.int32),
    "from_bits": lambda b: b.view(torch.float32),
    "to_i32": lambda b: b.to(torch.int32),
    "to_f32": lambda b: b.to(torch.float32),
    "select": torch.where,
    "widen_f16": lambda half: half.to(torch.int16).view(torch.float16).to(torch.float32),
    "narrow_f16": lambda x: x.to(torch.float16).view(torch.int16).to(torch.int32),
}


@functools.cache
def bind(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` over tensors."""
    return primitives.bind(function, WORDS)


_SAME_SIZE = {2: torch.int16, 4: torch.int32, 1: torch.int8}


def read(part: Tensor) -> Tensor:
    """What ``load`` sees of a stored part: float32 as it is, anything else as its bits in int32."""
    if part.dtype is torch.float32:
        return part
    return part.view(_SAME_SIZE[part.element_size()]).to(torch.int32)


def write(part: Tensor, value: Tensor) -> None:
    """Keep what ``store`` gave in a stored part: float32 as it is, of an integer the low bits."""
    (part if part.dtype is torch.float32 else part.view(_SAME_SIZE[part.element_size()])).copy_(value)


def _pieces(tensor: Tensor, flat: Sequence[Tensor]) -> Iterator[tuple[Tensor, list[Tensor], Any]]:
    """Each piece of ``tensor``, shaped; the same piece of contiguous ``flat`` ones shaped like it; and its box."""
    flat = [t.view(-1) for t in flat]
    for box, start, stop in pieces(tensor.shape, PIECE):
        piece = tensor[box]
        yield piece, [t[start:stop].view(piece.shape) for t in flat], box


@torch.no_grad()
def convert(source: Format, parts: Sequence[Tensor], target: Format, skip: int = 0) -> list[Tensor]:
    """Return, contiguous, what ``target`` keeps for the values that ``parts`` hold in ``source``.

    Args:
        source: the format of ``parts``.
        parts: the first may have any strides; the others are contiguous.
        target: the format to keep the values in; its first ``skip`` parts are not made.
        skip: how many.
    """
    first, *rest = (part.detach() for part in parts)
    made = [torch.empty(first.shape, dtype=part.dtype, device=first.device) for part in target.parts[skip:]]
    if not made:
        return made
    load, store = bind(source.load), bind(target.store)
    for piece, flat, _ in _pieces(first, (*rest, *made)):
        values = store(load(read(piece), *map(read, flat[: len(rest)])))
        for part, value in zip(flat[len(rest) :], values[skip:], strict=True):
            write(part, value)
    return made


class Eager(Backend):
    """The backend of PyTorch's own operators."""

    name = "eager"

    def refuses(self, plan: Plan) -> str | None:
        return None

    def describe(self, plan: Plan) -> str:
        roots = "" if has_float64(plan.device) else ", whose own square root is used: it has no float64"
        return f"PyTorch operators on {plan.device}{roots}"

    def compile(self, plan: Plan) -> Kernel:
        load_grad, update = bind(plan.grad.load), bind(plan.rule.update)
        formats = (plan.weight, *plan.moments)
        loads = [bind(format.load) for format in formats]
        stores = [bind(format.store) for format in formats]
        saturates = bind(plan.weight.saturates) if plan.weight.saturates else None
        ends = [sum(len(f.parts) for f in formats[: k + 1]) for k in range(len(formats))]
        spans = [slice(end - len(f.parts), end) for f, end in zip(formats, ends, strict=True)]

        def step(job: Job) -> Tensor | int:
            saturated: Tensor | int = 0
            factor, *scalars = job.scalars
            for param, state, box in _pieces(job.param, job.state):
                parts = [param, *state]
                values = [load(*map(read, parts[span])) for load, span in zip(loads, spans, strict=True)]
                grad = load_grad(read(job.grad[box])) * factor
                weight, *moments = update(values[0], grad, *values[1:], *scalars)
                if saturates:
                    saturated = saturated + saturates(weight).sum()
                for store, span, value in zip(stores, spans, (weight, *moments), strict=True):
                    for part, kept in zip(parts[span], store(value), strict=True):
                        write(part, kept)
            return saturated

        return lambda jobs: [step(job) for job in jobs]


BACKEND = Eager()
