"""The scaler and the clip where params are sharded: one decision and one norm in all processes, and none waits."""

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import halfstep
from halfstep.shards import local
from harness import assert_same
from ranks import together
from spreading import give, whole

SHAPES = ((9, 5), (2, 4), (7,))


def sharded(mesh: DeviceMesh, seed: int, dtype: torch.dtype = torch.float16) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
    placements = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]
    return [nn.Parameter(distribute_tensor(value, mesh, placements, src_data_rank=None)) for value in values]


def plain(seed: int, dtype: torch.dtype = torch.float16) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def give_all(params: list[nn.Parameter], seed: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        grad = torch.randn(param.shape, generator=generator) * scale
        give(param, grad)


def one_iteration(optimizer: Any, scaler: Any, how: str) -> tuple[bool, bool, float]:
    """Step in one of three ways; return whether it was skipped, whether a param moved, and the scale."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    before = [local(param).detach().clone() for param in params]
    scaler.scale(torch.ones(()))
    if how == "unscaled":
        scaler.unscale_(optimizer)
    elif how == "clipped":
        halfstep.clip_grad_norm_(optimizer, 1.0, scaler)
    scaler.step(optimizer)
    scaler.update()
    moved = any(not torch.equal(b, local(p).detach()) for b, p in zip(before, params, strict=True))
    assert all(param.grad is None or param.grad.dtype is param.dtype for param in params)
    return scaler.skipped(optimizer), moved, scaler.get_scale()


WAYS = ("straight", "unscaled", "clipped")


def overflows(how: str) -> list[Any]:
    """In turn let nothing overflow, a shard of process 1, and a plain param of process 1 that others have whole."""
    mesh, found = init_device_mesh("cpu", (2,)), []
    for where in ("nowhere", "shard", "plain"):
        own = plain(0) + sharded(mesh, 1)
        optimizer, scaler = halfstep.AdamW(own, lr=1e-2, backend="eager"), halfstep.GradScaler(init_scale=2.0**8)
        give_all(own, 2)
        if dist.get_rank() == 1 and where != "nowhere":
            local(own[0 if where == "plain" else 3].grad).view(-1)[-1] = torch.inf if where == "shard" else torch.nan
        found.append(one_iteration(optimizer, scaler, how))
        give_all(own, 3)
        found.append(one_iteration(optimizer, scaler, how))
    return found


@pytest.mark.parametrize("how", WAYS)
def test_p11_one_processes_overflow_skips_all(how: str) -> None:
    fine, after = (False, True, 2.0**8), (False, True, 2.0**7)
    skipped = (True, False, 2.0**7)
    for found in together(overflows, 2, how):
        assert found == [fine, fine, skipped, after, skipped, after]


#: two meshes that share a process, and two of which one lies in the other
TWO = {"a chain": ([0, 1], [1, 2]), "nested": ([0, 1], [0, 1, 2])}


def meshes_that_differ(how: str, ranks: tuple[list[int], list[int]]) -> list[tuple[bool, float]]:
    """Each process has the params of its meshes, the last of four one of its own; in turn each one's overflows.

    Each time once with all gradients, and once with none in process 2.
    """
    rank, found = dist.get_rank(), []
    meshes = [DeviceMesh("cpu", each) for each in ranks]
    for culprit, lacking in itertools.product(range(4), (None, 2)):
        mine = [sharded(mesh, k) for k, (mesh, each) in enumerate(zip(meshes, ranks, strict=True)) if rank in each]
        # in another order in each process
        own = plain(rank) if rank == 3 else list(itertools.chain(*(mine if rank else reversed(mine))))
        optimizer = halfstep.AdamW(own, lr=1e-2, backend="eager")
        scaler = halfstep.GradScaler(init_scale=2.0**8)
        give_all(own, 3)
        if rank == culprit:
            local(own[0].grad).view(-1)[:1] = torch.inf
        if rank == lacking:
            optimizer.zero_grad()
        skipped, moved, scale = one_iteration(optimizer, scaler, how)
        assert moved is not (skipped or rank == lacking)
        found.append((skipped, scale))
    return found


@pytest.mark.parametrize("meshes", TWO)
@pytest.mark.parametrize("how", WAYS)
def test_p11_processes_whose_params_differ_decide_alike_and_do_not_wait(how: str, meshes: str) -> None:
    found = together(meshes_that_differ, 4, how, TWO[meshes])
    for k, (culprit, lacking) in enumerate(itertools.product(range(4), (None, 2))):
        three, alone = ((each[k] for each in some) for some in (found[:3], found[3:]))
        overflow, fine = (True, 2.0**7), (False, 2.0**8)
        assert set(three) == {overflow if culprit < 3 and culprit != lacking else fine}, (culprit, lacking)
        assert set(alone) == {overflow if culprit == 3 else fine}


def clipped(own: list[nn.Parameter], how: str) -> tuple[float, list[Tensor], list[Tensor]]:
    """Clip to 0.1 and step; return the norm, the params and the moments."""
    optimizer, scaler = halfstep.AdamW(own, lr=1e-2, backend="eager"), halfstep.GradScaler(init_scale=2.0**8)
    give_all(own, 2, 2.0**8)
    scaler.scale(torch.ones(()))
    if how != "fused":
        scaler.unscale_(optimizer)
    if how == "stock":
        norm: Any = torch.nn.utils.clip_grad_norm_(own, 0.1)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    else:
        norm = halfstep.clip_grad_norm_(optimizer, 0.1, scaler)
    scaler.step(optimizer)
    scaler.update()
    return float(norm), whole(own), whole([optimizer.state[param]["exp_avg"] for param in own])


def clipped_each_way(shape: tuple[int, ...]) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", shape)
    mixed = {how: clipped(plain(0) + sharded(mesh, 1), how) for how in ("fused", "after unscale_")}
    # torch's clip takes no plain params beside them
    return {**mixed, "stock": clipped(sharded(mesh, 1), "stock")}


@pytest.mark.parametrize(("count", "shape"), [(2, (2,)), (3, (3,)), (4, (2, 2))])
def test_p04_the_norm_is_that_of_the_whole(count: int, shape: tuple[int, ...]) -> None:
    mixed, alone = clipped(plain(0) + plain(1), "fused"), clipped(plain(1), "stock")
    for found in together(clipped_each_way, count, shape):
        for how, (norm, *tensors) in found.items():
            expected, *others = alone if how == "stock" else mixed
            # torch adds 60 squares in float32; ours are added in float64 and then rounded
            assert norm == pytest.approx(expected, rel=(60 if how == "stock" else 1) * 2**-23)
            for one, two in zip(itertools.chain(*others), itertools.chain(*tensors), strict=True):
                # and with the norm the factor, and what follows from it
                ulps = (60 if how == "stock" else 2) * 2**-23 + (2**-9 if one.dtype is torch.float16 else 0)
                assert torch.allclose(one.float(), two.float(), rtol=ulps, atol=0)


def stock(fused: bool) -> list[Any]:
    """Torch's own AdamW over float32 params, sharded beside plain, which torch's own scaler refuses."""
    mesh, found = init_device_mesh("cpu", (2,)), []
    for overflow in (False, True):
        own = plain(0, torch.float32) + sharded(mesh, 1, torch.float32)
        optimizer = torch.optim.AdamW([{"params": own[:3]}, {"params": own[3:]}], lr=1e-2, foreach=False)
        scaler = halfstep.GradScaler(init_scale=2.0**8)
        give_all(own, 2)
        if overflow and dist.get_rank() == 0:
            local(own[0].grad)[0, 0] = torch.inf
        found.append(one_iteration(optimizer, scaler, "unscaled" if fused else "straight"))
    return found


@pytest.mark.parametrize("unscaled", [False, True])
def test_p17_other_optimizers_over_sharded_and_plain_params(unscaled: bool) -> None:
    for found in together(stock, 2, unscaled):
        assert found == [(False, True, 2.0**8), (True, False, 2.0**7)]


def refused() -> str:
    mesh = init_device_mesh("cpu", (2,))
    summand = nn.Parameter(DTensor.from_local(torch.ones(4, dtype=torch.float16), mesh, [Partial()], run_check=False))
    with pytest.raises(ValueError, match="summand") as caught:
        halfstep.AdamW([summand])
    param = sharded(mesh, 1)[0]
    optimizer = halfstep.AdamW([param], lr=1e-2, backend="eager")
    # a gradient of which each process has a summand is added up first
    summands = DTensor.from_local(torch.full((9, 5), 0.5, dtype=torch.float16), mesh, [Partial()], run_check=False)
    param.grad = summands
    optimizer.step()
    moment = whole([optimizer.state[param]["exp_avg"]])[0]
    assert_same(moment, torch.full((9, 5), 1.0) * torch.tensor(1 - 0.9))
    return str(caught.value)


def test_p29_what_cannot_be_stepped_is_refused_by_name() -> None:
    for text in together(refused, 2):
        assert text == (
            "param 0 of group 0 is spread as Partial(sum) over processes [0, 1], and each process has but a summand of "
            "it: redistribute it as Shard or Replicate first"
        )


# ------------------------------------------------------------------ torch's own engines


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 9), nn.Linear(9, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.second(self.first(inputs).tanh())


def pieces(step: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(4, 8, generator=generator).to(dtype) for _ in range(4)]


def losses(model: Any, piece: Tensor) -> Tensor:
    return model(piece).float().square().mean()


def reference(accumulate: bool, dtype: torch.dtype) -> list[Tensor]:
    """One process over both halves of each batch, whose gradients are rounded as two processes round theirs."""
    model = Model().to(dtype)
    optimizer, scaler = (
        halfstep.AdamW(model.parameters(), lr=1e-2, backend="eager"),
        halfstep.GradScaler(init_scale=2.0**8),
    )
    for step in range(6):
        shares = []
        for rank in range(2):
            mine = pieces(step, dtype)[2 * rank : 2 * rank + (2 if accumulate else 1)]
            for piece in mine:
                scaler.scale(losses(model, piece)).backward()
            shares.append([param.grad for param in model.parameters()])
            optimizer.zero_grad()
        for param, one, two in zip(model.parameters(), *shares, strict=True):
            param.grad = (one / 2 + two / 2).to(param.dtype)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return [param.detach() for param in model.parameters()]


def with_ddp(dtype: torch.dtype, accumulate: bool, views: bool, static: bool, how: str) -> list[Tensor]:
    model = Model().to(dtype)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=views, static_graph=static)
    optimizer, scaler = (
        halfstep.AdamW(model.parameters(), lr=1e-2, backend="eager"),
        halfstep.GradScaler(init_scale=2.0**8),
    )
    for step in range(6):
        mine = pieces(step, dtype)[2 * dist.get_rank() :][: 2 if accumulate else 1]
        for piece in mine[:-1]:
            with wrapped.no_sync():
                scaler.scale(losses(wrapped, piece)).backward()
        scaler.scale(losses(wrapped, mine[-1])).backward()
        if how == "unscaled":
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=how != "kept")
    return [param.detach() for param in model.parameters()]


def ddp(dtype: torch.dtype) -> dict[Any, list[Tensor]]:
    flags = (False, True)
    ways = itertools.product(flags, flags, flags, ("straight", "unscaled", "kept"))
    # a static graph takes part in each backward, so nothing accumulates
    return {way: with_ddp(dtype, *way) for way in ways if not (way[0] and way[2])}


def test_ddp_gives_the_bits_of_one_process(half: torch.dtype) -> None:
    alone = {accumulate: reference(accumulate, half) for accumulate in (False, True)}
    for found in together(ddp, 2, half):
        assert len(found) == 18
        for (accumulate, *way), params in found.items():
            for one, two in zip(alone[accumulate], params, strict=True):
                assert torch.equal(one, two), (accumulate, way)


def with_fsdp(dtype: torch.dtype, accumulate: bool, how: str) -> list[Tensor]:
    model: Any = Model().to(dtype)
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model.first, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer, scaler = (
        halfstep.AdamW(model.parameters(), lr=1e-2, backend="eager"),
        halfstep.GradScaler(init_scale=2.0**8),
    )
    for step in range(6):
        mine = pieces(step, dtype)[2 * dist.get_rank() :][: 2 if accumulate else 1]
        for number, piece in enumerate(mine, start=1):
            model.set_requires_gradient_sync(number == len(mine))
            scaler.scale(losses(model, piece)).backward()
        if how == "unscaled":
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=how != "kept")
    return whole(list(model.parameters()))


def fsdp(dtype: torch.dtype) -> dict[Any, list[Tensor]]:
    ways = [(accumulate, how) for accumulate in (False, True) for how in ("straight", "unscaled", "kept")]
    return {way: with_fsdp(dtype, *way) for way in ways}


def test_fsdp2_gives_the_bits_of_one_process(half: torch.dtype) -> None:
    alone = reference(False, half)
    for found in together(fsdp, 2, half):
        for (accumulate, how), params in found.items():
            if not accumulate:
                for one, two in zip(alone, params, strict=True):
                    assert torch.equal(one, two), how
            else:
                for one, two in zip(found[True, "straight"], params, strict=True):
                    assert torch.equal(one, two), how


def with_fsdp1() -> str:
    model = FullyShardedDataParallel(Model(), use_orig_params=True, device_id=torch.device("cpu"))
    optimizer, scaler = halfstep.AdamW(model.parameters(), lr=1e-2, backend="eager"), halfstep.GradScaler()
    scaler.scale(model(torch.ones(4, 8)).sum()).backward()
    before = [param.detach().clone() for param in model.parameters()]
    with pytest.raises(TypeError, match="FullyShardedDataParallel") as caught:
        scaler.step(optimizer)
    with pytest.raises(TypeError, match="FullyShardedDataParallel"):
        halfstep.clip_grad_norm_(optimizer, 1.0, scaler)
    assert all(map(torch.equal, before, model.parameters()))
    return str(caught.value)


def test_slices_that_do_not_say_who_has_the_rest_are_refused() -> None:
    for text in together(with_fsdp1, 2):
        assert text.endswith("shard the model by torch.distributed.fsdp.fully_shard instead")
