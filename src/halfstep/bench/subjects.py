"""What is timed: the memory itself, halfstep in every format, torch in float32, and whole scaled and clipped steps."""

import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

import halfstep
from halfstep.bench.shapes import Tensors
from halfstep.bench.timing import Kind, Subject
from halfstep.formats import MOMENTS, WEIGHTS

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
#: the pairs that the targets are about: exact, and compact
EXACT, COMPACT = ("split16", "float32"), ("split8", "block8")
MAIN = (EXACT, COMPACT)
LR = 1e-4
#: more than all rounds, so that no scale changes between them
_NEVER = 2**30

TRIAD, IN_PLACE = "triad", "triad in place"
FUSED, FOREACH = "torch AdamW fused", "torch AdamW foreach"
#: what is added to the labels of whole steps, and of one tensor timed beside many
WHOLE, SINGLE = ", scaled and clipped", " in one tensor"


def pairs(dtype: str) -> Iterator[tuple[str, str]]:
    """Every pair of the registries of weights and moments that exists for params of ``dtype``."""
    return ((w, m) for w, m in itertools.product(WEIGHTS, MOMENTS) if DTYPES[dtype] in WEIGHTS[w])


def halfstep_label(weights: str, moments: str) -> str:
    """Return the label of `halfstep.AdamW` in a pair of formats."""
    return f"halfstep {weights} × {moments}"


def memory(params: int) -> list[Subject]:
    """Return the memory's own speed on float32, at 12 bytes an element: $a = b + s c$, and $b = b + s c$ in place.

    The first is STREAM's triad. It reads the lines of $a$ as well before it writes them, which STREAM does not count.
    A step writes where it has read, as the second does; that one is the limit that a step cannot pass.
    """
    a, b, c = torch.zeros(params), torch.ones(params), torch.ones(params)
    return [
        Subject(TRIAD, "float32", "memory", params, 12, lambda: torch.add(b, c, alpha=2.0, out=a)),
        Subject(IN_PLACE, "float32", "memory", params, 12, lambda: b.add_(c, alpha=2.0)),
    ]


def halfstep_step(tensors: Tensors, dtype: str, weights: str, moments: str, where: str = "") -> Subject:
    """Return a step of `halfstep.AdamW`; ``where`` is added to its label."""
    optimizer = halfstep_adamw(tensors.params(DTYPES[dtype]), weights, moments)
    return stepped(halfstep_label(weights, moments) + where, dtype, "halfstep", optimizer)


def torch_step(tensors: Tensors, fused: bool) -> Subject:
    """Return a step of `torch.optim.AdamW` on float32, fused or foreach."""
    optimizer = torch.optim.AdamW(tensors.params(torch.float32), lr=LR, fused=fused, foreach=not fused)
    return stepped(FUSED if fused else FOREACH, "float32", "torch", optimizer)


def halfstep_whole(tensors: Tensors, dtype: str, weights: str, moments: str) -> Subject:
    """Return halfstep's unscale, check, norm, clip, update and change of scale."""
    params = tensors.params(DTYPES[dtype])
    optimizer = halfstep_adamw(params, weights, moments)
    scaler = halfstep.GradScaler("cpu", growth_interval=_NEVER)
    scaler.scale(torch.zeros(()))
    bound = _bound(tensors, scaler)

    def step() -> None:
        halfstep.clip_grad_norm_(optimizer, bound, scaler)
        scaler.step(optimizer)
        scaler.update()

    label = halfstep_label(weights, moments) + WHOLE
    return Subject(label, dtype, "halfstep", _elements(params), None, step)


def torch_whole(tensors: Tensors) -> Subject:
    """Return the same of torch, with fused AdamW on float32."""
    params = tensors.params(torch.float32)
    optimizer = torch.optim.AdamW(params, lr=LR, fused=True)
    # it unscales in place: at a scale of 1 the gradients stay what they are
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=_NEVER)
    scaler.scale(torch.zeros(()))
    bound = _bound(tensors, scaler)

    def step() -> None:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(params, bound)
        scaler.step(optimizer)
        scaler.update()

    return Subject(FUSED + WHOLE, "float32", "torch", _elements(params), None, step)


def halfstep_adamw(params: list[Parameter], weights: str, moments: str, backend: str = "cpu") -> halfstep.AdamW:
    """Return halfstep's optimizer on a backend; "auto" could take another one in silence."""
    return halfstep.AdamW(params, lr=LR, weights=weights, moments=moments, backend=backend)


def stepped(label: str, dtype: str, kind: Kind, optimizer: torch.optim.Optimizer) -> Subject:
    """Return the subject of an optimizer's step, after a first one, which makes its state."""
    optimizer.step()
    params = _params(optimizer)
    elements = _elements(params)
    step: Callable[[], object] = optimizer.step
    return Subject(label, dtype, kind, elements, bytes_moved(optimizer) / elements, step)


def bytes_moved(optimizer: torch.optim.Optimizer) -> int:
    """Return what a step has to move: it reads the gradients, and reads and writes the params and all that is kept."""
    total = 0
    for param in _params(optimizer):
        assert param.grad is not None
        kept = [v for key, v in optimizer.state[param].items() if isinstance(v, Tensor) and key != "step"]
        total += param.grad.nbytes + 2 * sum(map(_nbytes, [param, *kept]))
    return total


def _nbytes(tensor: Tensor) -> int:
    # a tensor of another library may be a wrapper around those that hold its bytes
    if flatten := getattr(tensor, "__tensor_flatten__", None):
        return sum(_nbytes(getattr(tensor, name)) for name in flatten()[0])
    return tensor.nbytes


def _bound(tensors: Tensors, scaler: torch.amp.GradScaler) -> float:
    # Just above the norm, which 16 bits round: the gradients are multiplied all the same, by 1, and so stay as large
    # as they are, though torch writes them.
    return 1.01 * tensors.norm() / scaler.get_scale()


def _params(optimizer: torch.optim.Optimizer) -> list[Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _elements(params: Sequence[Tensor]) -> int:
    return sum(param.numel() for param in params)
