"""Processes that train together over gloo, as many as a test asks for, under a time limit.

They are forked from a server that has imported everything, so that they start in a moment.
"""

import datetime
import io
import multiprocessing
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "torch",
        "torch.distributed.fsdp",
        "torch.distributed.checkpoint.state_dict",
        "torch.distributed.tensor.parallel",
        "torch.distributed.optim",
        "halfstep",
        "halfstep.backends.cpu",
    ]
)
#: How long a collective waits for others, and all processes together have.
PATIENCE, LIMIT = 20, 90


class Outcome(NamedTuple):
    """How a process ended: what its function returned, or the text of what it raised, and its exit status."""

    value: Any
    error: str
    status: int | None


def together(function: Callable[..., Any], count: int, *args: Any) -> list[Any]:
    """Call ``function(*args)`` in ``count`` processes of one group; return what each returned.

    Tensors come back as they are on the CPU. Anything raised in one is raised here.
    """
    found = outcomes(function, count, *args)
    # one that others waited for ends them too
    errors = {rank: outcome.error for rank, outcome in enumerate(found) if outcome.error}
    first = {rank: error for rank, error in errors.items() if "Connection closed by peer" not in error} or errors
    assert not errors, "\n".join(f"process {rank} of {count}:\n{error}" for rank, error in first.items())
    assert {outcome.status for outcome in found} == {0}
    return [outcome.value for outcome in found]


def outcomes(function: Callable[..., Any], count: int, *args: Any) -> list[Outcome]:
    """Call ``function(*args)`` in ``count`` processes of one group; return how each ended. None may hang."""
    with tempfile.TemporaryDirectory() as folder:
        pipes = [_CONTEXT.Pipe(duplex=False) for _ in range(count)]
        processes = [
            _CONTEXT.Process(target=_run, args=(function, args, rank, count, f"{folder}/store", pipes[rank][1]))
            for rank in range(count)
        ]
        for process in processes:
            process.start()
        for _, sender in pipes:
            sender.close()
        found, end = {}, time.monotonic() + LIMIT
        waiting: dict[Any, int] = {receiver: rank for rank, (receiver, _) in enumerate(pipes)}
        while waiting and (left := end - time.monotonic()) > 0:
            for receiver in wait(list(waiting), left):
                rank = waiting.pop(receiver)
                try:
                    file, error = receiver.recv()  # type: ignore[union-attr]
                except EOFError:  # it was killed
                    file, error = b"", ""
                found[rank] = torch.load(io.BytesIO(file), weights_only=False) if file else None, error
        hang = sorted(waiting.values())
        for process in processes:
            if hang:
                process.kill()
            process.join()
        assert not hang, f"of {count} processes {hang} had not ended after {LIMIT} s; others: {found}"
        return [Outcome(*found[rank], status=processes[rank].exitcode) for rank in range(count)]


def _run(
    function: Callable[..., Any], args: Sequence[Any], rank: int, count: int, store: str, sender: Connection
) -> None:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=PATIENCE)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count, timeout=limit)
    try:
        value = function(*args)
    except BaseException:
        sender.send((b"", traceback.format_exc()))
        raise SystemExit(1) from None
    # as bytes: what tensors share with another process ends with this one
    file = io.BytesIO()
    torch.save(value, file)
    sender.send((file.getvalue(), ""))
    dist.destroy_process_group()
