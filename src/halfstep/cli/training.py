"""One model in training: its steps, and its validation loss."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

import halfstep
from halfstep.cli.gpt import GPT, generate, loss_of
from halfstep.cli.settings import Settings
from halfstep.cli.text import Text
from halfstep.products import float32_products, native_float16_products

VALIDATION_BATCH = 32

Rate = Callable[[int], float]
MakeOptimizer = Callable[[Iterable[tuple[str, torch.nn.Parameter]]], torch.optim.Optimizer]


class Training:
    """A model, an optimizer and a scaler, and the text that they work on.

    A step is `backward`, `unscale` and `apply`, apart so that each can be watched. Nothing in step ``n`` depends on
    anything but the state, the seed and ``n``.

    Args:
        settings: the run's arguments.
        text: what to learn from.
        dtype: of the parameters; the initial values are the same float32 ones for every dtype, cast.
        make_optimizer: builds the optimizer from the named parameters.
        rate: the learning rate of each step, counted from 1.
        scaled: whether the loss is scaled; without, the scaler passes everything through.
    """

    def __init__(
        self,
        settings: Settings,
        text: Text,
        dtype: torch.dtype,
        make_optimizer: MakeOptimizer,
        rate: Rate,
        scaled: bool,
    ) -> None:
        self.settings = settings
        self.text = text
        self.dtype = dtype
        self.rate = rate
        self.device = settings.torch_device
        self.model = GPT(settings.sizes.shape, settings.seed).to(self.device, dtype)
        self.optimizer = make_optimizer(self.model.named_parameters())
        self.scaler = halfstep.GradScaler(self.device.type, enabled=scaled)
        sizes = settings.sizes
        self._validation = text.validation_windows(sizes.validation_windows, sizes.window).to(self.device)

    def backward(self, step: int) -> float:
        """Compute the gradients of step ``step``, counted from 1, and return its loss."""
        sizes = self.settings.sizes
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate(step)
        tokens = self.text.batch(self.settings.seed, step, sizes.batch, sizes.window).to(self.device)
        with self._products():
            loss = loss_of(self.model, tokens)
            self.scaler.scale(loss).backward()
        return loss.item()

    def unscale(self) -> None:
        """Unscale the gradients and clip their norm, where clipping is asked for."""
        if self.settings.clip:
            self.scaler.unscale_(self.optimizer)
            clip_grad_norm_(self.model.parameters(), self.settings.clip)

    def apply(self) -> bool:
        """Update the weights and the loss scale, and tell whether the step was skipped."""
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return self.scaler.skipped(self.optimizer)

    def finish(self) -> None:
        """Wait for the device, and drop the gradients."""
        self.synchronize()
        self.optimizer.zero_grad()

    def synchronize(self) -> None:
        """Wait until the device has done what it was given; times mean something after that."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    @torch.no_grad()
    def validation_loss(self) -> float:
        """Return the mean loss over the held-out windows, in nats a byte.

        The model computes in its own dtype, the cross entropy in float32.
        """
        total = 0.0
        with self._products():
            for windows in self._validation.split(VALIDATION_BATCH):
                total += loss_of(self.model, windows).item() * len(windows)
        return total / len(self._validation)

    def sample(self) -> str:
        """Return generated text that starts with a line's end; the seed decides it."""
        with self._products():
            text = generate(self.model, b"\n", self.settings.sizes.sample, self.settings.seed)
        if text is None:
            return "(no sample: the model's outputs are not finite)\n"
        # What is not text could change a terminal's state.
        decoded = text.decode("utf-8", errors="replace").strip("\n")
        return "".join(char if char.isprintable() or char in "\n\t" else "\ufffd" for char in decoded) + "\n"

    def finite(self) -> bool:
        """Tell whether every weight is finite."""
        return all(bool(param.isfinite().all()) for param in self.model.parameters())

    def bytes_a_parameter(self) -> float:
        """Return what weights, gradients and optimizer state hold now, in bytes, divided by the number of weights."""
        params = list(self.model.parameters())
        gradients = [param.grad for param in params if param.grad is not None]
        held = sum(map(_bytes, [*params, *gradients, *_tensors(self.optimizer.state)]))
        return held / sum(param.numel() for param in params)

    def _products(self) -> AbstractContextManager[None]:
        return float32_products() if computes_in_float32(self.dtype, self.device) else nullcontext()


def rising(settings: Settings) -> Rate:
    """Return the rate of a run that may be extended: it rises over the warmup, and stays."""
    return lambda step: settings.lr * min(1.0, step / settings.sizes.warmup)


def rising_and_falling(lr: float, warmup: int, steps: int) -> Rate:
    """Return the rate of a run whose end is known: it rises over the warmup, and falls in a line to the last step.

    Where it stays high to the end, the last loss is a draw: runs that differ in one rounding end 0.3 % apart.
    """
    return lambda step: lr * min(1.0, step / warmup, (steps + 1 - step) / max(1, steps - warmup))


def computes_in_float32(dtype: torch.dtype, device: torch.device) -> bool:
    """Tell whether products of ``dtype`` on ``device`` are better computed in float32."""
    return dtype == torch.float16 and device.type == "cpu" and not native_float16_products()


def halfstep_adamw(settings: Settings, weights: str) -> MakeOptimizer:
    """Return a maker of `halfstep.AdamW` with ``weights``, and the run's other arguments."""
    kept = {"weights": weights, "moments": settings.moments, "seed": settings.seed}
    return lambda params: halfstep.AdamW(params, lr=settings.lr, **kept)


def _tensors(state: Any) -> Iterable[Tensor]:
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, dict):
        for item in state.values():
            yield from _tensors(item)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
