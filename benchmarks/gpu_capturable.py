"""Whether steps that the device counts wait for nothing, go into a CUDA graph, and are the host's bit for bit."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

import halfstep
from gpu_stages import CPU, INF, Differs, Run, assert_same, content, short
from halfstep.bench.subjects import MAIN

#: matrices, of which one is large enough for blocks and one has rows that no access of 16 bytes divides, and others
SHAPES = ((300, 768), (64, 66), (129,), ())
WARM, WATCHED = 3, 5
MAX_NORM = 1.0


def asynchronous(run: Run) -> dict[str, Any]:
    """Step without waiting for the device, skips included, and compare with the steps that the host counts."""
    if run.device.type == "cuda":
        _waits_raise(run.device)
    checked = [f"{weights} × {moments}, {short(dtype)}" for weights, moments, dtype in _settings()]
    for setting in _settings():
        _follows(*setting, run.device)
    watched = "no step waited" if run.device.type == "cuda" else "waits are not watched here"
    return {"says": f"{len(checked)} settings have the bits of the default mode; {watched}", "checked": checked}


def _settings() -> Iterator[tuple[str, str, torch.dtype]]:
    return ((*pair, dtype) for pair in MAIN for dtype in (torch.bfloat16, torch.float16))


def _follows(weights: str, moments: str, dtype: torch.dtype, device: torch.device) -> None:
    both = []
    for capturable in (True, False):
        params = [Parameter(content(shape, 50 + k, 0.1).to(device, dtype)) for k, shape in enumerate(SHAPES)]
        options = {"weights": weights, "moments": moments, "backend": "gpu", "capturable": capturable}
        scaler = halfstep.GradScaler(device.type, init_scale=2.0**6, growth_interval=3)
        both.append((halfstep.AdamW(params, lr=1e-2, **options), scaler, params))
    total, bad = WARM + WATCHED + 2, WARM + WATCHED
    # each step has gradients of its own, at other addresses, as backward makes them after zero_grad
    grads = [
        [content(shape, 10 * n + k, 1.0).clamp(-50, 50).to(device, dtype) for k, shape in enumerate(SHAPES)]
        for n in range(total)
    ]
    grads[bad][1][5, 7] = INF
    # the host's own scalars are sent to the device before anything is watched
    zero = torch.zeros((), device=device)
    norms = [
        [_step(*one, zero, grads[n]) for n in range(WARM)] + _watched(device, one, zero, grads[WARM:], first)
        for one, first in zip(both, (True, False), strict=True)
    ]
    where = f"{weights} × {moments}, {short(dtype)}"
    for n, (mine, theirs) in enumerate(zip(*norms, strict=True)):
        assert_same(f"{where}: norm of step {n}", mine, theirs)
    _alike(where, both[0], both[1])
    counted = int(both[0][0].state[both[0][2][0]]["step"])
    if counted != total - 1:
        raise Differs(f"{where}: {counted} steps are counted of {total} with one skipped")


def _watched(device: torch.device, one: Any, zero: Tensor, grads: Sequence[Any], watch: bool) -> list[Tensor]:
    with _no_waiting(device if watch else CPU):
        return [_step(*one, zero, each) for each in grads]


def _step(optimizer: Any, scaler: Any, params: Sequence[Tensor], loss: Tensor, grads: Sequence[Tensor]) -> Tensor:
    scaler.scale(loss)
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    norm = halfstep.clip_grad_norm_(optimizer, MAX_NORM, scaler)
    scaler.step(optimizer)
    scaler.update()
    return norm


def _alike(where: str, mine: Any, theirs: Any) -> None:
    """Raise unless two of (optimizer, scaler, params) are the same, counts of steps by their value."""
    for k, (a, b) in enumerate(zip(mine[2], theirs[2], strict=True)):
        assert_same(f"{where}: param {k}", a, b)
        states = mine[0].state[a], theirs[0].state[b]
        for key, value in states[0].items():
            if key == "step" or not isinstance(value, Tensor):
                if int(value) != int(states[1][key]):
                    raise Differs(f"{where}: {key} of param {k} is {int(value)}, not {int(states[1][key])}")
            else:
                assert_same(f"{where}: {key} of param {k}", value, states[1][key])
    if mine[1].state_dict() != theirs[1].state_dict():
        raise Differs(f"{where}: the scaler is {mine[1].state_dict()}, not {theirs[1].state_dict()}")


@contextmanager
def _no_waiting(device: torch.device) -> Iterator[None]:
    """Let whatever waits for the device raise."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _waits_raise(device: torch.device) -> None:
    """Raise unless a wait would be noticed."""
    one = torch.ones((), device=device)
    with _no_waiting(device), suppress(RuntimeError):
        one.item()
        raise Differs("torch.cuda.set_sync_debug_mode('error') let a wait pass")


# ---------------------------------------------------------------------- graph

REPLAYS, OVERFLOWS = 10, 5


class Toy:
    """A loss whose gradients are known exactly, one elementwise product each: the inputs times the scale."""

    def __init__(self, weights: str, moments: str, dtype: torch.dtype, device: torch.device) -> None:
        self.params = [Parameter(content(shape, 50 + k, 0.1).to(device, dtype)) for k, shape in enumerate(SHAPES)]
        self.inputs = [torch.zeros(shape, device=device) for shape in SHAPES]
        self.rate = torch.tensor(1e-2, device=device)
        options = {"weights": weights, "moments": moments, "backend": "gpu", "capturable": True}
        self.optimizer = halfstep.AdamW(self.params, lr=self.rate, **options)
        self.scaler = halfstep.GradScaler(device.type, init_scale=2.0**6, growth_interval=4)
        self.norm = self.rate

    def feed(self, number: int) -> None:
        """Put the inputs and the learning rate of a step where a graph reads them."""
        for k, x in enumerate(self.inputs):
            x.copy_(content(x.shape, 10 * number + k, 1.0).clamp_(-50, 50))
        if number == WARM + OVERFLOWS:
            self.inputs[1][5, 7] = INF
        self.rate.fill_(1e-2 / (number + 1))

    def iterate(self) -> None:
        """One whole iteration, from the loss to the scale."""
        losses = [(param.float() * x).sum() for param, x in zip(self.params, self.inputs, strict=True)]
        self.scaler.scale(torch.stack(losses).sum()).backward()
        self.norm = halfstep.clip_grad_norm_(self.optimizer, MAX_NORM, self.scaler)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def begin(self) -> None:
        """Drop the gradients: the next backward makes new ones."""
        self.optimizer.zero_grad(set_to_none=True)

    @property
    def parts(self) -> tuple[Any, ...]:
        """What `_alike` compares."""
        return self.optimizer, self.scaler, self.params


def graph(run: Run) -> dict[str, Any]:
    """Capture an iteration in a CUDA graph, replay it on other inputs and rates, and compare with the same uncaptured.

    One replay's gradients are not finite.
    """
    checked = []
    for weights, moments, dtype in _settings():
        where = f"{weights} × {moments}, {short(dtype)}"
        captured, plain = (Toy(weights, moments, dtype, run.device) for _ in range(2))
        _replayed(where, captured, plain)
        checked.append(where)
    return {"says": f"{REPLAYS} replays of {len(checked)} settings have the bits of the same steps", "checked": checked}


def _replayed(where: str, captured: Toy, plain: Toy) -> None:
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for number in range(WARM):
            captured.begin()
            captured.feed(number)
            captured.iterate()
    torch.cuda.current_stream().wait_stream(aside)
    captured.begin()
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        captured.iterate()
    for number in range(WARM + REPLAYS):
        plain.begin()
        plain.feed(number)
        plain.iterate()
        if number >= WARM:
            captured.feed(number)
            recorded.replay()
            assert_same(f"{where}: norm of step {number}", captured.norm, plain.norm)
            _alike(f"{where}, step {number}", captured.parts, plain.parts)
