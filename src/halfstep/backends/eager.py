"""PyTorch operators: the definition of what is right, on every device, in bounded temporary memory."""

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from halfstep import primitives
from halfstep.backends.pieces import Rows, kinds, pairwise, put_back, rows, spans, taken
from halfstep.contracts import BLOCK, CHUNK, NOWHERE, Backend, Counter, Format, Job, Kernel, Part, Plan
from halfstep.formats.counter import first_half, keyed, random_bits, second_half, stream_key

#: Elements computed at a time, a number of chunks. A step holds some 30 temporaries of 4 bytes each and a few of 8:
#: under 64 MiB.
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


_SAME_SIZE = {1: torch.int8, 2: torch.int16}


def _seen(part: Tensor) -> Tensor:
    """A stored part as numbers: float32 and integers as they are, other floats as their bits."""
    if part.dtype is torch.float32 or not part.dtype.is_floating_point:
        return part
    return part.view(_SAME_SIZE[part.element_size()])


def read(part: Tensor) -> Tensor:
    """What ``load`` sees of a stored part: float32 as it is, anything else in int32."""
    seen = _seen(part)
    return seen if seen.dtype is torch.float32 else seen.to(torch.int32)


def write(part: Tensor, value: Tensor) -> None:
    """Keep what ``store`` gave in a stored part: float32 as it is, of an integer the low bits."""
    _seen(part).copy_(value)


def _low(number: int) -> int:
    """The low 32 bits of a Python integer, signed."""
    return (number + 2**31) % 2**32 - 2**31


#: keys are made of Python's integers, not of tensors
_stream_key = primitives.bind(stream_key, WORDS | {"to_i32": _low})


def _spans(shape: Sequence[int], in_blocks: bool) -> Iterator[tuple[int, int]]:
    """Where the spans of a tensor begin and end; with blocks in them they respect rows."""
    return spans(shape, PIECE, rows(shape).length if in_blocks else 1)


class _Span:
    """A span of a tensor: its parts, flat, the blocks in it, and its random bits."""

    def __init__(self, shape: Sequence[int], start: int, stop: int, counter: Counter, device: torch.device) -> None:
        self.start, self.stop, self.counter, self.device = start, stop, counter, device
        self._rows = rows(shape)
        # whole rows, or a part of one
        self._line = Rows(min(self._rows.length, stop - start))

    def of(self, part: Part, tensor: Tensor) -> Tensor:
        """The span of a part, a copy where it is not contiguous; of a shared one, which is, an entry for each block."""
        if part.shared:
            return tensor.view(-1)[self._rows.block(self.start) : self._rows.block(self.stop)]
        return taken(tensor, self.start, self.stop)

    def cut(self, format: Format, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The span of each part of a format."""
        return [self.of(part, tensor) for part, tensor in zip(format.parts, tensors, strict=True)]

    def load(self, format: Format, parts: Sequence[Tensor]) -> Tensor:
        """The values that the span's parts hold in ``format``."""
        seen = [self._spread(read(t)) if p.shared else read(t) for p, t in zip(format.parts, parts, strict=True)]
        return bind(format.load)(*seen)

    def store(self, format: Format, value: Tensor, random: Tensor | None) -> list[Tensor]:
        """What ``format`` keeps of the span's values, an entry for each block of a shared part."""
        bits = () if random is None else (random,)
        if format.measure is None:
            return list(bind(format.store)(value, *bits))
        measured = bind(format.measure)(value, *bits)
        *kept, shared = bind(format.store)(measured, self._spread(self._largest(measured)))
        return [*kept, shared.view(-1, self._line.length)[:, ::BLOCK].reshape(-1)]

    def _spread(self, shared: Tensor) -> Tensor:
        """An entry for each block, repeated for each element of it."""
        blocks = shared.view(-1, self._line.blocks, 1).expand(-1, -1, BLOCK)
        return blocks.reshape(len(blocks), -1)[:, : self._line.length].reshape(-1)

    def _largest(self, measured: Tensor) -> Tensor:
        """The largest of each block."""
        lines = measured.view(-1, self._line.length)
        lines = torch.nn.functional.pad(lines, (0, -self._line.length % BLOCK))
        return lines.view(len(lines), -1, BLOCK).amax(-1)

    def random(self, use: int) -> Tensor:
        """16 random bits for each element, of the stream of ``use``."""
        counter = self.counter
        numbers = (counter.seed, counter.seed >> 32, counter.stream, counter.step)
        key, fold = _stream_key(*map(_low, numbers), use // 2)
        index = torch.arange(self.start, self.stop, device=self.device)
        if counter.length:
            index = index // counter.length * counter.pitch + index % counter.length
        index += counter.start
        words = (bind(keyed)(half, (index >> 32).to(torch.int32)) for half in (key, fold))
        return bind(second_half if use % 2 else first_half)(bind(random_bits)(index.to(torch.int32), *words))


@torch.no_grad()
def values(format: Format, parts: Sequence[Tensor]) -> Iterator[Tensor]:
    """Give the float32 values that ``parts`` hold, a span of bounded size at a time, in row-major order.

    Args:
        format: the format of ``parts``.
        parts: shared ones are contiguous, others have any strides.
    """
    for start, stop in _spans(parts[0].shape, bool(format.measure)):
        span = _Span(parts[0].shape, start, stop, NOWHERE, parts[0].device)
        yield span.load(format, span.cut(format, parts))


@torch.no_grad()
def convert(
    source: Format,
    parts: Sequence[Tensor],
    target: Format,
    made: Sequence[Tensor | None],
    counter: Counter = NOWHERE,
    use: int = 0,
    watch: Callable[[Tensor, Tensor], object] | None = None,
) -> None:
    """Write what ``target`` keeps for the values that ``parts`` hold in ``source``.

    Args:
        source: the format of ``parts``.
        parts: shared ones are contiguous, others have any strides.
        target: the format to keep the values in.
        made: where its parts go, or None for what is not wanted; these may be tensors of ``parts``.
        counter, use: where the random bits come from, where ``target`` takes some.
        watch: sees the values of each span, and then what ``target`` has of them.
    """
    shape, device = parts[0].shape, parts[0].device
    for start, stop in _spans(shape, bool(source.measure or target.measure)):
        span = _Span(shape, start, stop, counter, device)
        value = span.load(source, span.cut(source, parts))
        kept = span.store(target, value, span.random(use) if target.random else None)
        pieces = []
        for part, tensor, number in zip(target.parts, made, kept, strict=True):
            wanted = tensor is not None
            pieces.append(span.of(part, tensor) if wanted else number.new_empty(number.shape, dtype=part.dtype))
            write(pieces[-1], number)
            if wanted and not part.shared:
                put_back(tensor, start, stop, pieces[-1])
        if watch:
            watch(value, span.load(target, pieces))


class Eager(Backend):
    """The backend of PyTorch's own operators."""

    name = "eager"
    capturable = False

    def refuses(self, device: torch.device, dtypes: Collection[torch.dtype]) -> str | None:
        return None

    def describe(self, plan: Plan) -> str:
        roots = "" if has_float64(plan.device) else ", whose own square root is used: it has no float64"
        return f"PyTorch operators on {plan.device}{roots}"

    def compile(self, plan: Plan) -> Kernel:
        update = bind(plan.rule.update)
        observes, uses = plan.rule.observes, plan.uses
        saturates = bind(plan.weight.saturates) if plan.weight.saturates and not observes else None
        # the first of the formats whose parts are written
        first = int(observes)

        def step(job: Job) -> Tensor | int:
            saturated: Tensor | int = 0
            factor, *scalars = job.scalars
            for start, stop in _spans(job.param.shape, plan.in_blocks):
                span = _Span(job.param.shape, start, stop, job.counter, job.param.device)
                param, rest = taken(job.param, start, stop), iter(job.state)
                kept = [[param, *(span.of(part, next(rest)) for part in plan.weight.parts[1:])]]
                kept += [[span.of(part, next(rest)) for part in format.parts] for format in plan.moments]
                values = [span.load(format, parts) for format, parts in zip(plan.formats, kept, strict=True)]
                grad = span.load(plan.grad, [taken(job.grad, start, stop)]) * factor
                new = update(values[0], grad, *values[1:], *scalars)
                if saturates:
                    saturated = saturated + saturates(new[0]).sum()
                for format, parts, value, use in zip(
                    plan.formats[first:], kept[first:], new, uses[first:], strict=True
                ):
                    stored = span.store(format, value, None if use is None else span.random(use))
                    for part, number in zip(parts, stored, strict=True):
                        write(part, number)
                if not observes:
                    put_back(job.param, start, stop, param)
            return saturated

        return lambda jobs: [step(job) for job in jobs]

    def squares(self, grad: Format, grads: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        found = [_squares(grad, g, start, stop) for g in grads for start, stop in spans(g.shape, PIECE)]
        sums = torch.cat(found) if found else torch.zeros(0, dtype=torch.float64, device=grads[0].device)
        return sums, kinds(sums, grads)

    def total(self, sums: Tensor) -> Tensor:
        return pairwise(sums)


def _squares(format: Format, grad: Tensor, start: int, stop: int) -> Tensor:
    """The sums of the squares of a span's chunks."""
    values = bind(format.load)(read(taken(grad, start, stop)))
    values = (values if has_float64(values.device) else values.cpu()).double()
    sums = torch.nn.functional.pad(values, (0, -len(values) % CHUNK)).view(-1, CHUNK).square()
    while sums.shape[1] > 1:
        first, second = sums.chunk(2, 1)
        sums = first + second
    return sums.view(-1)


BACKEND = Eager()
