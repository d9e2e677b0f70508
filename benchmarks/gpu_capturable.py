"""Whether steps that the device counts wait for nothing, go into a CUDA graph, and are the host's bit for bit."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

import halfstep
from gpu_stages import INF, Differs, Run, assert_same, content, short
from halfstep.bench.subjects import MAIN

#: matrices that are large enough for blocks, one of them with rows that no access of 16 bytes divides, and others
SHAPES = ((300, 768), (64, 66), (129,), ())
WARM, WATCHED = 3, 5
MAX_NORM = 1.0


class Setting(NamedTuple):
    """Formats, the params' dtype, shapes and device."""

    weights: str
    moments: str
    dtype: torch.dtype
    shapes: Sequence[tuple[int, ...]]
    device: torch.device

    @property
    def name(self) -> str:
        """What tells it from the others."""
        return f"{self.weights} × {self.moments}, {short(self.dtype)}"

    def made(self, capturable: bool, lr: float | Tensor, growth_interval: int) -> "Parts":
        """Return an optimizer, its scaler and its params: the same ones each time."""
        params = [Parameter(self.some(k, 50, 0.1).to(self.dtype)) for k in range(len(self.shapes))]
        optimizer = halfstep.AdamW(
            params, lr=lr, weights=self.weights, moments=self.moments, backend="gpu", capturable=capturable
        )
        scaler = halfstep.GradScaler(self.device.type, init_scale=2.0**6, growth_interval=growth_interval)
        return Parts(optimizer, scaler, params)

    def some(self, k: int, number: int, scale: float = 1.0) -> Tensor:
        """Return float32 values for the param ``k``, which in 16 bits and scaled are finite."""
        return content(self.shapes[k], 100 * number + k, scale).clamp(-50, 50).to(self.device)


class Parts(NamedTuple):
    """What a step changes."""

    optimizer: halfstep.AdamW
    scaler: halfstep.GradScaler
    params: Sequence[Tensor]


def asynchronous(run: Run) -> dict[str, Any]:
    """Step without waiting for the device, skips included, and compare with the steps that the host counts."""
    if run.device.type == "cuda":
        _waits_raise(run.device)
    checked = []
    for setting in _settings(run):
        _follows(setting)
        checked.append(setting.name)
    watched = "no step waited" if run.device.type == "cuda" else "waits are not watched here"
    return {"says": f"{len(checked)} settings have the bits of the default mode; {watched}", "checked": checked}


def _settings(run: Run) -> list[Setting]:
    halves = (torch.bfloat16, torch.float16)
    made = [Setting(*pair, dtype, SHAPES[run.quick :], run.device) for pair in MAIN for dtype in halves]
    return made[:1] if run.quick else made


def _follows(setting: Setting) -> None:
    mine, theirs = (setting.made(capturable, 1e-2, growth_interval=3) for capturable in (True, False))
    total, bad = WARM + WATCHED + 2, WARM + WATCHED
    # each step has gradients of its own, at other addresses, as backward makes them after zero_grad
    grads = [[setting.some(k, n).to(setting.dtype) for k in range(len(setting.shapes))] for n in range(total)]
    grads[bad][0][5, 7] = INF
    loss = torch.zeros((), device=setting.device)
    norms = [_step(mine, loss, each) for each in grads[:WARM]]
    with _no_waiting(setting.device):
        norms += [_step(mine, loss, each) for each in grads[WARM:]]
    for n, (norm, each) in enumerate(zip(norms, grads, strict=True)):
        assert_same(f"{setting.name}: norm of step {n}", norm, _step(theirs, loss, each))
    _alike(setting.name, mine, theirs)
    counted = int(mine.optimizer.state[mine.params[0]]["step"])
    if counted != total - 1:
        raise Differs(f"{setting.name}: {counted} steps are counted of {total} with one skipped")


def _step(parts: Parts, loss: Tensor, grads: Sequence[Tensor]) -> Tensor:
    """A step on gradients that are taken as those of the scaled loss; the norm of the unscaled ones."""
    optimizer, scaler, params = parts
    scaler.scale(loss)
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    norm = halfstep.clip_grad_norm_(optimizer, MAX_NORM, scaler)
    scaler.step(optimizer)
    scaler.update()
    return norm


def _alike(where: str, mine: Parts, theirs: Parts) -> None:
    """Raise unless both are the same, counts of steps by their value."""
    for k, (a, b) in enumerate(zip(mine.params, theirs.params, strict=True)):
        assert_same(f"{where}: param {k}", a, b)
        states = mine.optimizer.state[a], theirs.optimizer.state[b]
        for key, value in states[0].items():
            if key == "step" or not isinstance(value, Tensor):
                if int(value) != int(states[1][key]):
                    raise Differs(f"{where}: {key} of param {k} is {int(value)}, not {int(states[1][key])}")
            else:
                assert_same(f"{where}: {key} of param {k}", value, states[1][key])
    scalers = mine.scaler.state_dict(), theirs.scaler.state_dict()
    if scalers[0] != scalers[1]:
        raise Differs(f"{where}: the scaler is {scalers[0]}, not {scalers[1]}")


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
    one, passed = torch.ones((), device=device), False
    with _no_waiting(device), suppress(RuntimeError):
        one.item()
        passed = True
    if passed:
        raise Differs("torch.cuda.set_sync_debug_mode('error') let a wait pass")


# ---------------------------------------------------------------------- graph

REPLAYS, OVERFLOWS = 10, 5


class Toy:
    """A loss whose gradients are known exactly, one elementwise product each: the inputs times the scale."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self.inputs = [torch.zeros(shape, device=setting.device) for shape in setting.shapes]
        self.rate = torch.tensor(1e-2, device=setting.device)
        self.parts = setting.made(True, self.rate, growth_interval=4)
        self.norm = self.rate

    def feed(self, number: int) -> None:
        """Put the inputs and the learning rate of a step where a graph reads them."""
        for k, x in enumerate(self.inputs):
            x.copy_(self._setting.some(k, number))
        if number == WARM + OVERFLOWS:
            self.inputs[0][5, 7] = INF
        self.rate.fill_(1e-2 / (number + 1))

    def begin(self) -> None:
        """Drop the gradients: the next backward makes new ones."""
        self.parts.optimizer.zero_grad(set_to_none=True)

    def iterate(self) -> None:
        """One whole iteration, from the loss to the scale."""
        optimizer, scaler, params = self.parts
        losses = [(param.float() * x).sum() for param, x in zip(params, self.inputs, strict=True)]
        scaler.scale(torch.stack(losses).sum()).backward()
        self.norm = halfstep.clip_grad_norm_(optimizer, MAX_NORM, scaler)
        scaler.step(optimizer)
        scaler.update()


def graph(run: Run) -> dict[str, Any]:
    """Capture an iteration in a CUDA graph, replay it on other inputs and rates, and compare with the same uncaptured.

    One replay's gradients are not finite.
    """
    checked = []
    for setting in _settings(run):
        _replays(setting.name, Toy(setting), Toy(setting))
        checked.append(setting.name)
    return {"says": f"{REPLAYS} replays of {len(checked)} settings have the bits of the same steps", "checked": checked}


def _replays(where: str, captured: Toy, plain: Toy) -> None:
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
