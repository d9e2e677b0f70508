"""Write the file of one layout version: states of many formats, and what three more steps make of each.

A file is made once, by the version of halfstep that first writes its layout, and then only read:

    python tests/golden/make.py tests/golden/layout2.pt.gz
"""

import gzip
import hashlib
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import halfstep

#: Optimizer, dtype and options of each case; the names are what `restored` is asked for.
CASES: dict[str, tuple[str, torch.dtype, dict[str, Any]]] = {
    f"{name}-{weights}-{moments}-{str(dtype).removeprefix('torch.')}": (
        name,
        dtype,
        {"weights": weights, "moments": moments, "seed": 11},
    )
    for dtype in (torch.float16, torch.bfloat16)
    for name, weights, moments in (
        ("AdamW", "split16", "float32"),
        ("AdamW", "split8", "block8"),
        ("AdamW", "master32", "bfloat16"),
        ("AdamFP16", "rounded", "float32"),
        ("Lion", "stochastic", "block8"),
        ("SGD", "split16", "bfloat16"),
    )
}
SHAPES = ((64, 64), (7,))
STEPS = 3


def optimizer(case: str, params: list[Tensor]) -> Any:
    """Make a case's optimizer over ``params``."""
    name, _, options = CASES[case]
    momentum = {"momentum": 0.9} if name == "SGD" else {}
    return getattr(halfstep, name)([{"params": params, "lr": 1e-3, **momentum, **options}])


def step(made: Any, grads: list[Tensor], numbers: range) -> None:
    """Step through gradients that follow from ``grads`` alone."""
    for number in numbers:
        for group in made.param_groups:
            for param, grad in zip(group["params"], grads, strict=True):
                # rolled and scaled by a power of two, which every machine does with the same bits
                param.grad = (grad.roll(number) * 2.0 ** -(number % 4)).to(param.dtype)
        made.step()


def tensors(made: Any) -> Iterator[Tensor]:
    """Each param, its float32 weight and its moments' tensors, in a fixed order."""
    for group in made.param_groups:
        for param in group["params"]:
            yield param.detach()
            yield made.float32_weight(param)
            state = made.state[param]
            yield from (state[key] for key in sorted(state) if key.startswith(("exp_avg", "momentum")))


def digest(made: Any) -> str:
    """Return a digest of all bits that training goes on with."""
    found = hashlib.sha256()
    for tensor in tensors(made):
        found.update(str(tensor.dtype).encode())
        found.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def main(file: Path) -> None:
    """Write the file."""
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator) for shape in SHAPES]
    grads = [torch.randn(shape, generator=generator).bfloat16().float() for shape in SHAPES]
    content: dict[str, Any] = {"grads": grads, "cases": {}}
    for case, (_, dtype, _) in CASES.items():
        made = optimizer(case, [torch.nn.Parameter(value.to(dtype)) for value in start])
        step(made, grads, range(STEPS))
        params = [param.detach().clone() for group in made.param_groups for param in group["params"]]
        buffer = io.BytesIO()
        torch.save(made.state_dict(), buffer)
        buffer.seek(0)
        state = torch.load(buffer, weights_only=True)
        step(made, grads, range(STEPS, 2 * STEPS))
        content["cases"][case] = {"params": params, "state": state, "then": digest(made)}
    scaler = halfstep.GradScaler("cpu", init_scale=2.0**10, growth_interval=5, hysteresis=2)
    content["scaler"] = scaler.state_dict()
    buffer = io.BytesIO()
    torch.save(content, buffer)
    file.write_bytes(gzip.compress(buffer.getvalue(), mtime=0))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
