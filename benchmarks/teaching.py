"""Run the teaching implementation's AdamFP16 beside ours on the same gradients: python benchmarks/teaching.py [params].

It needs labml-nn 0.5.1: pip install "halfstep[teaching]", or without torchvision and torchtext, which nothing here
uses, pip install pyyaml and pip install --no-deps labml-nn==0.5.1 labml labml-helpers. Its scaler raises on today's
torch, so the gradients here are what a scaler would hand over.

With L2 decay a gradient and the decay sometimes cancel but for their last bits; Adam's first step is then lr in the
direction of whatever the rounding left, so single weights may differ by 2 lr.
"""

import argparse
import itertools
import statistics
import time

import torch
from labml_nn.optimizers import WeightDecay as TheirDecay  # pyright: ignore[reportMissingImports]
from labml_nn.optimizers.adam_fp16 import AdamFP16 as Theirs  # pyright: ignore[reportMissingImports]

import halfstep

STEPS = 50


Decay = tuple[float, bool, bool]


def run(n: int, dtype: torch.dtype, optimized_update: bool, decay: Decay) -> tuple[float, float, float]:
    """Step both; return the largest difference of weights over the largest weight, and each one's median seconds."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(n, generator=generator).to(dtype)
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    options = {"lr": 1e-3, "optimized_update": optimized_update}
    a = halfstep.AdamFP16([ours], weight_decay=halfstep.WeightDecay(*decay), **options)
    b = Theirs([theirs], weight_decay=TheirDecay(*decay), **options)
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(STEPS):
        grad = torch.randn(n, generator=generator).to(dtype)
        for optimizer, param, taken in zip((a, b), (ours, theirs), seconds, strict=True):
            param.grad = grad.clone()
            began = time.perf_counter()
            optimizer.step()
            taken.append(time.perf_counter() - began)
    copy = b.state[theirs]["fp32_copy"]
    difference = (a.float32_weight(ours) - copy).abs().max() / copy.abs().max()
    return float(difference), statistics.median(seconds[0]), statistics.median(seconds[1])


def main() -> None:
    """Print a line for each dtype, form of the update and weight decay, and the largest difference of all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("params", nargs="?", type=int, default=2**20, help="parameters (default 2**20)")
    n = parser.parse_args().params
    decays = {
        "none": (0.0, True, False),
        "decoupled": (0.1, True, False),
        "absolute": (1e-4, True, True),
        "L2": (0.1, False, False),
    }
    print(f"{n:,} params, {STEPS} steps, torch {torch.__version__}; differences over the largest weight")
    largest = 0.0
    for dtype, optimized, name in itertools.product((torch.float16, torch.bfloat16), (True, False), decays):
        difference, ours, theirs = run(n, dtype, optimized, decays[name])
        largest = max(largest, difference)
        print(
            f"{dtype!s:>15} optimized_update={optimized!s:<5} {name:>9}: {difference:.1e}; "
            f"{ours * 1e3:.2f} ms against {theirs * 1e3:.2f} ms, {theirs / ours:.1f} times as fast"
        )
    print(f"largest difference: {largest:.1e}")


if __name__ == "__main__":
    main()
