"""Train a small GPT in 16 bits with FSDP2 on several processes; stop it anywhere, and go on with any number of them.

    torchrun --standalone --nproc-per-node 2 examples/fsdp_train.py --out run

It runs on GPUs if there are any, else on the CPU, and with plain `python` as one process. See also
docs/guides/distributed.md.
"""

import argparse
import contextlib
import datetime
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import halfstep
from halfstep.cli.gpt import GPT, Shape, loss_of
from halfstep.cli.text import load_text
from halfstep.products import float32_products, native_float16_products

SIZES = {"steps": 200, "save_every": 100, "batch": 16, "layers": 4, "width": 128, "context": 128}


def arguments(line: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train a small GPT in 16 bits with FSDP2.")
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="bfloat16")
    parser.add_argument("--weights", default="split16", help="what is kept beside each 16-bit weight")
    parser.add_argument("--moments", default="float32", help="how the optimizer keeps its averages")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--out", type=Path, default=Path("fsdp-run"), help="folder that all processes see")
    for name, default in SIZES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, help=f"default {default}")
    return parser.parse_args(line)


def main() -> None:
    """Join the other processes, train, and leave the group, whatever happens."""
    args, cuda = arguments(), torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    # torchrun tells each process in the environment who it is; without torchrun it is alone
    alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}  # pyright: ignore[reportPrivateImportUsage]
    options: Any = {} if "RANK" in os.environ else alone
    if cuda:
        torch.cuda.set_device(device)
        options["device_id"] = device
    # how long the others wait for a process that hangs; of one that dies they know at once
    patience = datetime.timedelta(minutes=5)
    dist.init_process_group("nccl" if cuda else "gloo", timeout=patience, **options)
    try:
        train(args, device)
    finally:
        dist.destroy_process_group()


def train(args: argparse.Namespace, device: torch.device) -> None:
    """Train until ``args.steps`` are done, from the newest checkpoint if there is one."""
    rank, ranks, window = dist.get_rank(), dist.get_world_size(), args.context + 1
    for name in SIZES:
        if getattr(args, name) < 1:
            refuse(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least 1")
    if args.batch % ranks:
        refuse(f"--batch {args.batch}: must be a multiple of {ranks}, the number of processes")
    if args.width % Shape.heads:
        refuse(f"--width {args.width}: must be a multiple of {Shape.heads}, the number of heads")
    try:
        text = load_text(None, window)
        # every process makes the same weights, and fully_shard leaves each its part of them
        model = GPT(Shape(args.layers, width=args.width, context=args.context), seed=0)
        model.to(device, getattr(torch, args.dtype))
        mesh = init_device_mesh(device.type, (ranks,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        # only now: these are the sharded params
        optimizer = halfstep.AdamW(model.parameters(), lr=args.lr, weights=args.weights, moments=args.moments)
    except ValueError as error:
        refuse(str(error))
    scaler = halfstep.GradScaler(device.type, enabled=args.dtype == "float16")  # bfloat16 needs none
    count = f"{sum(param.numel() for param in model.parameters()):,} parameters"
    fixed = f"{count} in {args.dtype}, weights={args.weights}, moments={args.moments}"
    say(f"{fixed}; {ranks} process{'es' * (ranks > 1)} ({dist.get_backend()})")

    if rank == 0:  # what a process left that died while it saved
        for partial in args.out.glob("step-*.partial"):
            shutil.rmtree(partial)
    dist.barrier()
    step = skipped = 0
    if folder := newest(args.out):
        step, skipped = resume(folder, (model, optimizer, scaler), fixed)
        for group in optimizer.param_groups:
            group["lr"] = args.lr
        say(f"going on from {folder}")

    # CPUs that cannot multiply in float16 do so in float32 and round, which is far faster than PyTorch's own way
    slow = args.dtype == "float16" and device.type == "cpu" and not native_float16_products()
    terminal, shown, since = sys.stdout.isatty(), step, time.perf_counter()
    with float32_products() if slow else contextlib.nullcontext():
        while step < args.steps:
            step += 1
            # the step alone chooses the batch, and each process takes its slice: any number of them sees the same data
            batch = text.batch(0, step, args.batch, window).tensor_split(ranks)[rank].to(device)
            loss = loss_of(model, batch)
            scaler.scale(loss).backward()
            halfstep.clip_grad_norm_(optimizer, 1.0, scaler)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            skipped += scaler.skipped(optimizer)
            mean = loss.detach() / ranks
            dist.all_reduce(mean)
            if terminal or step % 10 == 0 or step == args.steps:
                speed = (step - shown) * args.batch * args.context / (time.perf_counter() - since)
                now = f"step {step}/{args.steps}  loss {mean.item():.4f}  scale {scaler.get_scale():g}"
                now += f"  {speed:,.0f} tokens/s  {skipped} skipped"
                say(f"\r{now:<79}" if terminal else now, end="" if terminal and step < args.steps else "\n")
                shown, since = step, time.perf_counter()
            if step % args.save_every == 0 or step == args.steps:
                folder = save(args.out, (model, optimizer, scaler), fixed, step, skipped)
        # FSDP needs all processes in a forward; each takes all windows, so that the figure is that of one process
        with torch.no_grad():
            validation = loss_of(model, text.validation_windows(32, window).to(device)).item()
    say(f"checkpoint {folder}, validation loss {validation:.4f} after {step} steps")


Run = tuple[GPT, halfstep.AdamW, halfstep.GradScaler]


def contents(run: Run, fixed: str, step: int, skipped: int) -> dict[str, Any]:
    """Return what a checkpoint holds; of its tensors each process has its part."""
    model, optimizer, scaler = run
    weights, state = get_state_dict(model, optimizer)
    parts = {"model": weights, "optimizer": state, "scaler": scaler.state_dict()}
    return {**parts, "fixed": fixed, "step": step, "skipped": skipped}


def save(out: Path, run: Run, fixed: str, step: int, skipped: int) -> Path:
    """Write a checkpoint, which has its name only when it is whole, and keep the newest two; return its folder."""
    folder, partial = out / f"step-{step:06d}", out / f"step-{step:06d}.partial"
    state_dict_saver.save(contents(run, fixed, step, skipped), checkpoint_id=partial)
    dist.barrier()
    if dist.get_rank() == 0:
        # torch has seen to it that the files are on the disk; now their names
        sync(partial)
        partial.rename(folder)
        sync(out)
        for old in checkpoints(out)[:-2]:
            # half deleted, it must not look whole
            shutil.rmtree(old.rename(f"{old}.partial"))
    dist.barrier()
    return folder


def resume(folder: Path, run: Run, fixed: str) -> tuple[int, int]:
    """Load a checkpoint, each process its part, however many wrote it; return its step and how many were skipped."""
    held = {"fixed": ""}
    state_dict_loader.load(held, checkpoint_id=folder)
    if held["fixed"] != fixed:
        refuse(f"{folder} has {held['fixed']}, and this run {fixed}: ask for the same, or give another --out")
    # torch loads into tensors that are there, spread as they are
    whole = contents(run, fixed, 0, 0)
    state_dict_loader.load(whole, checkpoint_id=folder)
    model, optimizer, scaler = run
    set_state_dict(model, optimizer, model_state_dict=whole["model"], optim_state_dict=whole["optimizer"])
    scaler.load_state_dict(whole["scaler"])
    return whole["step"], whole["skipped"]


def checkpoints(out: Path) -> list[Path]:
    """Return all whole checkpoints, the oldest first."""
    return sorted(file.parent for file in out.glob("step-*/.metadata") if not file.parent.suffix)


def newest(out: Path) -> Path | None:
    """Return the newest whole checkpoint, or None."""
    return (checkpoints(out) or [None])[-1]


def sync(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def refuse(text: str) -> NoReturn:
    """End all processes, once the first has said why."""
    if dist.get_rank() == 0:
        print(f"fsdp_train.py: {text}", file=sys.stderr, flush=True)
    dist.barrier()
    sys.exit(1)


def say(text: str, end: str = "\n") -> None:
    """Print by the first process."""
    if dist.get_rank() == 0:
        print(text, end=end, flush=True)


if __name__ == "__main__":
    main()
