"""P10: as many processes as params may be sharded over, the bits are those of one."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import halfstep
from halfstep.formats import MOMENTS, WEIGHTS
from halfstep.shards import local
from harness import assert_equal
from ranks import together
from spreading import Net, come_to, shard, train
from training import OPTIMIZERS, make

#: every format of a weight in both 16-bit dtypes, with each of a moment in turn
EVERY = [
    (dtype, weights, [*MOMENTS][(turn + k) % len(MOMENTS)])
    for turn, dtype in enumerate((torch.float16, torch.bfloat16))
    for k, weights in enumerate(WEIGHTS)
]


def trained(
    name: str,
    formats: list[Any],
    steps: int,
    shape: tuple[int, ...] = (),
    placements: Any = (),
    backend: str = "eager",
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Train a net in each of ``formats`` by one optimizer, over a mesh of this shape; return what came of it."""
    nets, groups = [], []
    for dtype, weights, moments in formats:
        net = Net(dtype)
        if shape:
            shard(net, init_device_mesh("cpu", shape), placements)
        nets.append(list(net.parameters()))
        groups.append({"params": nets[-1], "weights": weights, "moments": moments})
    optimizer = make(name, groups, seed=5, lr=1e-2, momentum=0.9, backend=backend)
    scaler = halfstep.GradScaler(init_scale=2.0**10)
    train(optimizer, nets, scaler, range(steps))
    return come_to(optimizer), scaler.state_dict()


@pytest.fixture(scope="module")
def alone() -> Any:
    return trained("AdamW", EVERY, 50)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_p10_any_number_of_processes_gives_the_bits_of_one(count: int, alone: Any) -> None:
    for found, scaler in together(trained, count, "AdamW", EVERY, 50, (count,), [Shard(0)]):
        assert_equal(found, alone[0])
        assert scaler == alone[1]


#: what rounds by chance, and what does not, with a float32 param between
SOME = [
    (torch.float16, "split8", "block8"),
    (torch.float32, "split8", "block8"),
    (torch.bfloat16, "split16", "float32"),
    (torch.bfloat16, "stochastic", "bfloat16"),
    (torch.float16, "split8", "float32"),
]


def of_every_optimizer() -> list[Any]:
    return [trained(name, SOME[:3], 6, (3,), [Shard(0)]) for name in OPTIMIZERS]


def test_p10_every_optimizer() -> None:
    alone = [trained(name, SOME[:3], 6) for name in OPTIMIZERS]
    for found in together(of_every_optimizer, 3):
        for one, other in zip(alone, found, strict=True):
            assert_equal(other[0], one[0])
            assert other[1] == one[1]


MESHES = {
    "replicas of shards": [Replicate(), Shard(0)],
    "rows cut on a block": [Shard(0), Shard(1)],
    "rows cut alone": [Shard(1), Replicate()],
    "rows cut twice over": [Shard(0), Shard(0)],
    "as FSDP cuts what tensor parallelism has cut": [_StridedShard(0, split_factor=2), Shard(0)],
    "replicas alone": [Replicate(), Replicate()],
}


def over_every_mesh() -> list[Any]:
    return [trained("AdamW", SOME, 6, (2, 2), placements) for placements in MESHES.values()]


def test_p10_every_mesh() -> None:
    alone = trained("AdamW", SOME, 6)
    for found in together(over_every_mesh, 4):
        for params, scaler in found:
            assert_equal(params, alone[0])
            assert scaler == alone[1]


def test_p10_by_the_cpus_own_kernels() -> None:
    # rows cut: the whole index of an element is not that of the part
    alone = trained("AdamW", SOME[:1], 6)
    for found, scaler in together(trained, 2, "AdamW", SOME[:1], 6, (2,), [Shard(1)], "cpu"):
        assert_equal(found, alone[0])
        assert scaler == alone[1]


def explained() -> tuple[str, dict[str, int], int]:
    net = Net(torch.float16)
    shard(net, init_device_mesh("cpu", (4,)), [Shard(1)])
    optimizer = halfstep.AdamW(net.parameters(), moments="block8", backend="eager")
    for param in net.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    held = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return optimizer.explain(), optimizer.memory(), sum(local(tensor).nbytes for tensor in held)


def test_p30_rows_cut_amid_a_block_keep_float32_moments() -> None:
    cut = [(dtype, weights, "block8") for dtype, weights, _ in SOME[:2]]
    as_float32 = [(dtype, weights, "float32") for dtype, weights, _ in SOME[:2]]
    alone = trained("AdamW", as_float32, 6)
    for found, scaler in together(trained, 4, "AdamW", cut, 6, (4,), [Shard(1)]):
        assert_equal(found, alone[0])
        assert scaler == alone[1]
    for text, memory, held in together(explained, 4):
        assert "(moments='block8' is not for tensors with rows that processes share amid a block): 1 tensor" in text
        assert memory["weight"] + memory["moments"] == held
