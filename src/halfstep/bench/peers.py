"""Other libraries' AdamW for params of 16 bits, where they are installed; each is imported only when it is timed."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch.nn import Parameter

from halfstep.bench.shapes import Tensors
from halfstep.bench.subjects import DTYPES, LR, stepped
from halfstep.bench.timing import Subject

DECAY = 0.01


@dataclass(frozen=True)
class Peer:
    """Another library's optimizer.

    Args:
        package: what is installed.
        label: what is timed.
        dtype: of its params.
        make: makes the optimizer.
        writes_grads: whether its step changes the gradients, which others share.
    """

    package: str
    label: str
    dtype: str
    make: Callable[[list[Parameter]], torch.optim.Optimizer]
    writes_grads: bool = False

    def step(self, tensors: Tensors) -> Subject:
        """Return its step.

        Raises:
            RuntimeError: its step leaves the params as they are, or not finite, or changes gradients that others share.
            Exception: whatever the library raises where it cannot be had.
        """
        params = tensors.params(DTYPES[self.dtype], own_grads=self.writes_grads)
        # a param starts as a copy of its gradient
        before = params[0].detach().clone()
        subject = stepped(self.label, self.dtype, "peer", self.make(params))
        # what does nothing is fast
        if torch.equal(params[0], before) or not params[0].isfinite().all():
            raise RuntimeError("its step leaves the params as they are, or not finite")
        if not self.writes_grads and not torch.equal(tensors.grads(params[0].dtype)[0], before):
            raise RuntimeError("its step changes gradients that others share; say so in halfstep.bench.peers")
        return subject

    def version(self) -> str | None:
        """Return the version that is installed."""
        try:
            return version(self.package)
        except PackageNotFoundError:
            return None


def _labml(params: list[Parameter]) -> torch.optim.Optimizer:
    from labml_nn.optimizers import WeightDecay  # pyright: ignore[reportMissingImports]
    from labml_nn.optimizers.adam_fp16 import AdamFP16  # pyright: ignore[reportMissingImports]

    return AdamFP16(params, lr=LR, weight_decay=WeightDecay(DECAY))


def _deepspeed(params: list[Parameter]) -> torch.optim.Optimizer:
    # It compiles its step when first used, with a ninja that was installed beside Python but need not be on the path.
    beside = str(Path(sys.executable).parent)
    if beside not in os.environ.get("PATH", "").split(os.pathsep):
        os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), beside])
    from deepspeed.ops.adam import DeepSpeedCPUAdam  # pyright: ignore[reportMissingImports]

    return DeepSpeedCPUAdam(params, lr=LR, weight_decay=DECAY, adamw_mode=True)


def _optimi(params: list[Parameter]) -> torch.optim.Optimizer:
    from optimi import AdamW  # pyright: ignore[reportMissingImports]

    return AdamW(params, lr=LR, weight_decay=DECAY, kahan_sum=True)


def _bitsandbytes(params: list[Parameter]) -> torch.optim.Optimizer:
    from bitsandbytes.optim.adamw import AdamW8bit  # pyright: ignore[reportMissingImports]

    return AdamW8bit(params, lr=LR, weight_decay=DECAY)


def _torchao(params: list[Parameter]) -> torch.optim.Optimizer:
    from torchao.optim import _AdamW  # pyright: ignore[reportMissingImports]

    return _AdamW(params, lr=LR, weight_decay=DECAY, bf16_stochastic_round=True)


def _torchao_8bit(params: list[Parameter]) -> torch.optim.Optimizer:
    from torchao.optim import AdamW8bit  # pyright: ignore[reportMissingImports]

    return AdamW8bit(params, lr=LR, weight_decay=DECAY)


TEACHING = "labml-nn AdamFP16"
PEERS = (
    Peer("labml-nn", TEACHING, "float16", _labml),
    Peer("deepspeed", "DeepSpeed CPUAdam", "bfloat16", _deepspeed),
    Peer("torch-optimi", "optimi AdamW, Kahan", "bfloat16", _optimi, writes_grads=True),
    Peer("bitsandbytes", "bitsandbytes AdamW8bit", "bfloat16", _bitsandbytes),
    Peer("torchao", "torchao AdamW, stochastic", "bfloat16", _torchao),
    Peer("torchao", "torchao AdamW8bit", "bfloat16", _torchao_8bit),
)
