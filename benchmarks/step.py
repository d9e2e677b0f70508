"""Time a step of one large tensor in every format against the machine's memory: python benchmarks/step.py [params].

A step moves bytes, so its limit is the memory. The triad (a = b + s c on float32, 12 bytes an element) measures that
limit in the same run, interleaved with the steps; each figure is the median over the rounds.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

import halfstep
from halfstep.formats import WEIGHTS

ROUNDS = 11


def optimizer(weights: str, dtype: torch.dtype, n: int) -> tuple[Callable[[], None], int]:
    """A step to time, and the bytes it moves for each param: what it reads and what it writes."""
    param = torch.nn.Parameter(torch.randn(n).to(dtype))
    param.grad = torch.randn(n).to(dtype)
    stepped = halfstep.AdamW([param], lr=1e-4, weights=weights, backend="cpu")
    stepped.step()
    kept = [value for value in stepped.state[param].values() if isinstance(value, torch.Tensor)]
    return stepped.step, param.grad.element_size() + 2 * sum(t.element_size() for t in [param, *kept])


def main() -> None:
    """Print one line a format: milliseconds, GB/s, and its time over the triad's for the same bytes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("params", nargs="?", type=int, default=2**25, help="parameters in the tensor (default 2**25)")
    n = parser.parse_args().params
    a, b, c = torch.empty(n), torch.randn(n), torch.randn(n)
    steps: dict[str, tuple[Callable[[], object], int]] = {"triad": (lambda: torch.add(b, c, alpha=2.0, out=a), 12)}
    for weights in WEIGHTS:
        for dtype in (torch.bfloat16, torch.float16):
            steps[f"{weights} {str(dtype).removeprefix('torch.')}"] = optimizer(weights, dtype, n)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, (step, _) in steps.items():
            start = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - start)
    print(f"{n:,} params, {torch.get_num_threads()} threads, torch {torch.__version__}, median of {ROUNDS}")
    print(f"{'':>20} {'ms':>8} {'bytes':>6} {'GB/s':>6}  time / triad's for as many bytes")
    for name, (_, moved) in steps.items():
        time_ = statistics.median(seconds[name])
        pairs = zip(seconds[name], seconds["triad"], strict=True)
        ratio = statistics.median(s / moved / (t / 12) for s, t in pairs)
        print(f"{name:>20} {time_ * 1e3:8.1f} {moved:6} {moved * n / time_ / 1e9:6.1f}  {ratio:.2f}")


if __name__ == "__main__":
    main()
