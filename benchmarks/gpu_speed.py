"""How fast the GPU checks and steps, beside a copy of its memory, torch in float32 and FlashOptim."""

import functools
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

import halfstep
from gpu_stages import Run
from halfstep.bench.shapes import Shape, gpt2, one
from halfstep.bench.subjects import COMPACT, EXACT, FUSED, LR, bytes_moved, halfstep_label
from halfstep.norms import squares

PARAMS = (10**6, 10**7, 10**8, 10**9)
SETTINGS = (EXACT, ("split16", "block8"), COMPACT)
ROUNDS, WARMUP = 21, 5
#: bytes of the copy, and of what is written to empty the cache before each call on tensors that would fit in it
COPIED, FLUSHED, FITS = 2**31, 2**28, 10**7
#: bytes a param that must be free: torch's float32 params, gradients and averages, and some more
ROOM = 20
#: seconds left for the stage behind this one
RESERVE = 45
NEVER = 2**30

CHECK, STEP, WHOLE, ASYNCHRONOUS = "check", "step", "whole", "asynchronous whole"
FLASH, COMPILED = "flashoptim FlashAdamW", "torch AdamW compiled"


class Timed(NamedTuple):
    """A call to time: what it is of an iteration, and the bytes a param that it reads and writes at the least."""

    what: str
    call: Callable[[], object]
    moved: float


#: makes params and an optimizer of a shape, and yields what is to be timed, one after the other
Maker = Callable[[Shape, torch.device], Iterator[Timed]]


def speed(run: Run) -> dict[str, Any]:
    """Time every subject on every shape; what is not timed is named, with the reason."""
    shapes = [*map(one, PARAMS[: 1 if run.quick else None]), gpt2()]
    rows: list[dict[str, Any]] = []
    absent: dict[str, str] = {}
    copy = _copied(run.device)
    result = {"says": "", "copy_gigabytes_a_second": copy, "rows": rows, "not_timed": absent}
    # what matters most comes first: the time may be up before the last
    for makers in ((*OURS, (FUSED, torch_fused, 0)), ((FLASH, flashoptim, 20),), ((COMPILED, torch_compiled, 60),)):
        for shape in shapes:
            for label, make, seconds in makers:
                why = _why_not(shape, run, seconds)
                try:
                    if not why:
                        rows += _measured(label, make, shape, run.device)
                except Exception as error:
                    # Other libraries fail in any way they like, and memory may be short: the run goes on.
                    why = f"{type(error).__name__}: {error}"[:500]
                    if make in MUST and not isinstance(error, torch.OutOfMemoryError):
                        result["failed"] = f"{label}, {shape.title}: {why}"
                if why:
                    absent[f"{label}, {shape.title}"] = why
                _free(run.device)
            _compare(rows, copy)
            result["says"] = f"{len(rows)} timed, {len(absent)} not; a copy moves {copy:.0f} GB/s"
            run.keep(result)
    return result


def _why_not(shape: Shape, run: Run, seconds: float) -> str:
    if run.left() < RESERVE + seconds:
        return "the time was up"
    free, _ = torch.cuda.mem_get_info(run.device)
    if free < ROOM * shape.params:
        return f"{free / 1e9:.1f} GB of memory are free, {ROOM * shape.params / 1e9:.1f} are wanted"
    return ""


def _measured(label: str, make: Maker, shape: Shape, device: torch.device) -> list[dict[str, Any]]:
    rows = []
    flush = torch.empty(FLUSHED, dtype=torch.uint8, device=device) if shape.params <= 1.1 * FITS else None
    for what, call, moved in make(shape, device):
        rows.append(_row(label, what, shape, moved, *timed(call, flush)))
        # it holds the memory that the next one may need
        del call
    return rows


def timed(call: Callable[[], object], flush: Tensor | None) -> tuple[float, float]:
    """Return the median milliseconds that the device takes from a call's begin to its end, and that the host takes."""
    for _ in range(WARMUP):
        call()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(ROUNDS)]
    host = []
    torch.cuda.synchronize()
    gc.collect()
    gc.disable()
    try:
        for begin, end in events:
            if flush is not None:
                flush.zero_()
            begin.record()
            began = time.perf_counter()
            call()
            host.append(1e3 * (time.perf_counter() - began))
            end.record()
    finally:
        gc.enable()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in events), statistics.median(host)


def _copied(device: torch.device) -> float:
    """The gigabytes a second that a copy on the device reads and writes."""
    source = torch.zeros(COPIED // 4, device=device)
    target = torch.empty_like(source)
    milliseconds, _ = timed(lambda: target.copy_(source), None)
    return 2 * source.nbytes / milliseconds / 1e6


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


# ---------------------------------------------------------------------- what is timed


def ours(weights: str, moments: str, shape: Shape, device: torch.device) -> Iterator[Timed]:
    """Halfstep's check, its step, and both with the change of scale; and these without the host."""
    params = _params(shape, torch.bfloat16, device)
    make = functools.partial(halfstep.AdamW, params, lr=LR, weights=weights, moments=moments, backend="gpu")
    optimizer = make()
    optimizer.step()
    step, check = bytes_moved(optimizer) / shape.params, params[0].itemsize
    yield Timed(CHECK, functools.partial(squares, optimizer), check)
    yield Timed(STEP, optimizer.step, step)
    yield Timed(WHOLE, _whole(optimizer, halfstep.GradScaler, device), step + check)
    del optimizer
    yield Timed(ASYNCHRONOUS, _whole(make(capturable=True), halfstep.GradScaler, device), step + check)


def torch_fused(shape: Shape, device: torch.device) -> Iterator[Timed]:
    """Torch's fused step on float32, and with its scaler, which reads and writes the gradients once more."""
    params = _params(shape, torch.float32, device)
    optimizer = torch.optim.AdamW(params, lr=LR, fused=True)
    optimizer.step()
    step = bytes_moved(optimizer) / shape.params
    yield Timed(STEP, optimizer.step, step)
    # the check reads and writes the gradients, and the step then writes them unscaled
    yield Timed(WHOLE, _whole(optimizer, torch.amp.GradScaler, device), step + 3 * params[0].itemsize)


def torch_compiled(shape: Shape, device: torch.device) -> Iterator[Timed]:
    """Torch's step on float32 as `torch.compile` makes it, its counts of steps and its rate on the device."""
    params = _params(shape, torch.float32, device)
    rate = torch.tensor(LR, device=device)
    optimizer = torch.optim.AdamW(params, lr=rate, foreach=True, capturable=True)
    optimizer.step()
    torch._dynamo.reset()
    compiled: Any = torch.compile(lambda: optimizer.step(), fullgraph=False)
    yield Timed(STEP, compiled, bytes_moved(optimizer) / shape.params)


def flashoptim(shape: Shape, device: torch.device) -> Iterator[Timed]:
    """FlashOptim's step on bfloat16, with weights of 24 bits and averages of 8, as it comes.

    Raises:
        RuntimeError: its step leaves the params as they are, or not finite; what does nothing is fast.
    """
    from flashoptim import FlashAdamW  # pyright: ignore[reportMissingImports]

    params = _params(shape, torch.bfloat16, device)
    before = params[0].detach().clone()
    held = torch.cuda.memory_allocated(device)
    optimizer = FlashAdamW(params, lr=LR, weight_decay=0.01)
    optimizer.step()
    # its averages are no tensors whose bytes could be asked for
    state = torch.cuda.memory_allocated(device) - held
    if torch.equal(params[0], before) or not params[0].isfinite().all():
        raise RuntimeError("its step leaves the params as they are, or not finite")
    del before
    yield Timed(STEP, optimizer.step, (3 * sum(param.nbytes for param in params) + 2 * state) / shape.params)


#: a label, what makes it, and the seconds that one shape may take
OURS = tuple((halfstep_label(*pair), functools.partial(ours, *pair), 0) for pair in SETTINGS)
#: what is no other library's, or what all else is set beside: that it cannot be timed is a failure
MUST: tuple[Maker, ...] = (*(make for _, make, _ in OURS), torch_fused)


def _whole(optimizer: Any, scaler_type: Callable[..., Any], device: torch.device) -> Callable[[], object]:
    # at a scale of 1 that stays, unscaling in place leaves the gradients what they are
    scaler = scaler_type(device.type, init_scale=1.0, growth_interval=NEVER)
    scaler.scale(torch.zeros((), device=device))

    def whole() -> None:
        scaler.step(optimizer)
        scaler.update()

    return whole


def _params(shape: Shape, dtype: torch.dtype, device: torch.device) -> list[Parameter]:
    generator = torch.Generator(device).manual_seed(0)

    def some(size: Sequence[int]) -> Tensor:
        return torch.empty(tuple(size), dtype=dtype, device=device).normal_(generator=generator)

    params = []
    for size in shape.sizes:
        params.append(Parameter(some(size)))
        params[-1].grad = some(size)
    return params


# ---------------------------------------------------------------------- what comes of it


def _row(label: str, what: str, shape: Shape, moved: float, device: float, host: float) -> dict[str, Any]:
    return {
        "shape": shape.title,
        "tensors": len(shape.sizes),
        "params": shape.params,
        "label": label,
        "what": what,
        "bytes_a_param": round(moved, 3),
        "milliseconds": device,
        "host_milliseconds": host,
        "gigabytes_a_second": moved * shape.params / device / 1e6,
    }


def _compare(rows: Sequence[dict[str, Any]], copy: float) -> None:
    """Add to each row its part of the copy's bandwidth, and how many times as fast as torch's fused step it is.

    A whole one, asynchronous or not, is set beside torch's whole one, which does not wait for the device either.
    """
    fused = {(row["shape"], row["what"]): row["milliseconds"] for row in rows if row["label"] == FUSED}
    for row in rows:
        theirs = fused.get((row["shape"], WHOLE if row["what"] == ASYNCHRONOUS else row["what"]))
        row["of_copy"] = row["gigabytes_a_second"] / copy
        row["times_torch_fused"] = theirs and theirs / row["milliseconds"]
