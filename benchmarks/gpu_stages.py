"""What the stages of benchmarks/gpu.py share, and the two that need little: on what it runs, and a training."""

import json
import os
import platform
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

import halfstep
from halfstep.backends import jitted
from halfstep.cli.files import write_json
from halfstep.cli.machine import describe
from halfstep.cli.settings import Settings
from halfstep.cli.text import load_text
from halfstep.cli.training import MakeOptimizer, Training, halfstep_adamw, rising_and_falling

CPU = torch.device("cpu")
INF = float("inf")
_WIDTHS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Differs(RuntimeError):
    """What should have the same bits has others."""


@dataclass(frozen=True)
class Run:
    """A stage's place in a run.

    Args:
        file: the JSON of all stages.
        stage: its name in there.
        ends: when the time is up, as `time.time` has it.
        quick: do a small part, to see that it works.
    """

    file: Path
    stage: str
    ends: float
    quick: bool = False

    @property
    def device(self) -> torch.device:
        """The GPU, or the CPU for Triton's interpreter."""
        return CPU if jitted.INTERPRETED else torch.device("cuda", 0)

    def left(self) -> float:
        """The seconds that are left."""
        return self.ends - time.time()

    def keep(self, result: dict[str, Any]) -> None:
        """Write what the stage knows so far; whatever ends its process later, this stays."""
        report = json.loads(self.file.read_text(encoding="utf-8"))
        report["stages"][self.stage] = result
        write_json(self.file, report)


def assert_same(what: str, mine: Tensor, theirs: Tensor) -> None:
    """Raise unless both have one dtype, shape and bits; where both are NaN their bits may differ."""
    a, b = mine.detach().cpu(), theirs.detach().cpu()
    if a.dtype is not b.dtype or a.shape != b.shape:
        raise Differs(f"{what}: {a.dtype} {tuple(a.shape)} is not {b.dtype} {tuple(b.shape)}")
    width = _WIDTHS[a.element_size()]
    unlike = a.contiguous().view(width) != b.contiguous().view(width)
    if a.is_floating_point():
        unlike &= ~(a.isnan() & b.isnan())
    if unlike.any():
        where = tuple(unlike.nonzero()[0].tolist())
        count, first = int(unlike.sum()), f"first at {where}: {a[where].item()!r}, {b[where].item()!r}"
        raise Differs(f"{what}: {count} of {unlike.numel()} differ, {first}")


def content(shape: Sequence[int], seed: int, scale: float, wild: bool = False) -> Tensor:
    """Return float32 values of many sizes, on the CPU; ``wild`` ones have any bits at all."""
    generator = torch.Generator().manual_seed(seed)
    if wild:
        bits = torch.randint(-(2**31), 2**31, tuple(shape), generator=generator, dtype=torch.int64)
        return bits.to(torch.int32).view(torch.float32)
    spread = torch.randn(tuple(shape), generator=generator).exp()
    return torch.randn(tuple(shape), generator=generator) * spread * scale


def short(dtype: torch.dtype) -> str:
    """Return a dtype's name as people type it."""
    return str(dtype).removeprefix("torch.")


# ---------------------------------------------------------------------- machine


def machine(run: Run) -> dict[str, Any]:
    """Say what it runs on."""
    found: dict[str, Any] = {
        "machine": describe(run.device),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "triton": triton.__version__,
        "halfstep": halfstep.__version__,
    }
    if run.device.type == "cuda":
        about = torch.cuda.get_device_properties(run.device)
        found |= {
            "device": about.name,
            "memory_bytes": about.total_memory,
            "multiprocessors": about.multi_processor_count,
            "capability": f"{about.major}.{about.minor}",
            "cuda": torch.version.cuda,
            "driver": _driver(),
        }
    return found | {"says": found["machine"]}


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.split()[0]
    return None


# ---------------------------------------------------------------------- training

STEPS = 200


def training(run: Run) -> dict[str, Any]:
    """Train the model of `halfstep train` in float16 by halfstep and in float32 by torch: the distance of their losses.

    Raises:
        RuntimeError: a loss is not finite.
    """
    settings = Settings(out=run.file.parent, dtype="float16", steps=20 if run.quick else STEPS, device=run.device.type)
    text = load_text(None, settings.sizes.window)
    rate = rising_and_falling(settings.lr, settings.sizes.warmup, settings.steps)

    def torch_adamw(params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW([param for _, param in params], lr=settings.lr)

    ways: dict[str, tuple[torch.dtype, MakeOptimizer, bool]] = {
        "float32": (torch.float32, torch_adamw, False),
        "float16": (torch.float16, halfstep_adamw(settings, settings.weights), True),
    }
    result: dict[str, Any] = {"steps": settings.steps}
    for name, (dtype, make, scaled) in ways.items():
        result[name] = _trained(Training(settings, text, dtype, make, rate, scaled))
        run.keep(result)
    losses = {name: result[name]["validation_loss"] for name in ways}
    if not all(abs(loss) < INF for loss in losses.values()):
        raise RuntimeError(f"a loss is not finite: {losses}")
    result["percent_from_float32"] = 100 * (losses["float16"] / losses["float32"] - 1)
    told = ", ".join(f"{name} {loss:.4f}" for name, loss in losses.items())
    return result | {"says": f"after {settings.steps} steps {told}: {result['percent_from_float32']:+.2f} %"}


def _trained(training: Training) -> dict[str, Any]:
    began, loss, skipped = time.perf_counter(), INF, 0
    for step in range(1, training.settings.steps + 1):
        loss = training.backward(step)
        training.unscale()
        skipped += training.apply()
        training.finish()
    return {
        "loss": loss,
        "seconds": round(time.perf_counter() - began, 2),
        "validation_loss": training.validation_loss(),
        "skipped": skipped,
        "scale": training.scaler.get_scale() if training.scaler.is_enabled() else None,
    }
