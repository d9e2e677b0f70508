"""See what happens to a float16 model today, and with halfstep: python examples/stock_fp16.py (seconds, on a CPU)."""

from collections.abc import Callable

import torch
from torch import nn

import halfstep

torch.manual_seed(0)
DATA, LABELS = torch.randn(512, 64), torch.randint(10, (512,))


def train(
    dtype: torch.dtype, make: Callable[..., torch.optim.Optimizer], scaler: torch.amp.GradScaler, steps: int = 200
) -> str:
    """Fit noise with a small network; return its last loss, or the error that ended it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10)).to(dtype)
    optimizer = make(model.parameters(), lr=1e-3)
    loss = torch.zeros(())
    for step in range(steps):
        loss = nn.functional.cross_entropy(model(DATA.to(dtype)).float(), LABELS)
        scaler.scale(loss).backward()
        try:
            scaler.step(optimizer)
        except ValueError as error:
            return f"ValueError: {error}"
        scaler.update()
        optimizer.zero_grad()
        if loss.isnan():
            return f"loss is NaN at step {step + 1}"
    return f"loss {loss.item():.4g} after {steps} steps, scale {scaler.get_scale():g}"


def small_updates(dtype: torch.dtype, make: Callable[..., torch.optim.Optimizer]) -> str:
    """Move a weight of 1 by 1000 updates of 1e-4; it should arrive at 0.9."""
    param = nn.Parameter(torch.ones(1, dtype=dtype))
    optimizer = make([param], lr=1e-4, weight_decay=0.0, eps=1e-4)
    for _ in range(1000):
        param.grad = torch.ones_like(param)
        optimizer.step()
    return f"1 - 1000 * 1e-4 = {param.item():.4g}"


def main() -> None:
    """Print a line for each way."""
    stock, none = torch.optim.AdamW, torch.amp.GradScaler("cpu", enabled=False)

    def fused(params: object, lr: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=lr, fused=True)  # pyright: ignore[reportArgumentType]

    print("float32, torch AdamW:                    ", train(torch.float32, stock, none))
    print("float16, torch AdamW and GradScaler:     ", train(torch.float16, stock, torch.amp.GradScaler("cpu")))
    print("float16, torch AdamW alone:              ", train(torch.float16, stock, none))
    print("float16, torch fused AdamW and GradScaler:", train(torch.float16, fused, torch.amp.GradScaler("cpu")))
    print("float16, torch AdamW, small updates:     ", small_updates(torch.float16, stock))
    print("bfloat16, torch AdamW, small updates:    ", small_updates(torch.bfloat16, stock))
    print("float16, halfstep:                       ", train(torch.float16, halfstep.AdamW, halfstep.GradScaler()))
    print("float16, halfstep, small updates:        ", small_updates(torch.float16, halfstep.AdamW))
    print("bfloat16, halfstep, small updates:       ", small_updates(torch.bfloat16, halfstep.AdamW))


if __name__ == "__main__":
    main()
