"""What the tests of sharded params share: nets, the gradients of a global batch, and all that came of a run."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from halfstep.shards import local, taken

#: the global batch, in pieces that 1, 2 and 4 processes can share
PIECES = 4
#: the step in which a gradient of the last process overflows
OVERFLOW = 2


class Net(nn.Module):
    """Tensors in blocks, of rows that no number of processes divides, with fewer rows than processes, and a scalar."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(256, 18), nn.Linear(18, 3, bias=False)
        self.gain = nn.Parameter(torch.ones(()))
        self.to(dtype)


def loss_of(net: Sequence[Tensor], inputs: Tensor) -> Tensor:
    """The loss of a net by its float32 params in the order of their names in the module."""
    gain, first, bias, second = net
    return (((inputs @ first.T + bias).relu() @ second.T) * gain - inputs[:, :3].sin()).square().mean()


def shard(model: nn.Module, mesh: Any, placements: Sequence[Any]) -> None:
    """Shard all params of a model but scalars; along a dim that one has not it is replicated."""
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False)):
            if param.dim():
                own = [p if not isinstance(p, Shard) or p.dim < param.dim() else Replicate() for p in placements]
                spread = distribute_tensor(param.detach(), mesh, own, src_data_rank=None)
                setattr(module, name, nn.Parameter(spread))


def whole(tensors: Sequence[Any]) -> list[Tensor]:
    """Whole tensors, gathered as integers, since gloo knows not every dtype, and all at once."""
    bits, places = [], []
    for tensor in tensors:
        places.append(torch.zeros(tensor.shape, dtype=torch.int32))
        here = local(tensor.detach())
        if here.is_floating_point():
            here = here.view({2: torch.int16, 4: torch.int32}[here.itemsize])
        box = taken(places[-1], tensor) if isinstance(tensor, DTensor) else places[-1]
        # of replicas one speaks
        first = not isinstance(tensor, DTensor) or _speaks(tensor)
        box.copy_(here * first)
        bits.append(places[-1].flatten())
    if any(isinstance(tensor, DTensor) for tensor in tensors):
        flat = torch.cat(bits)
        shared = torch.cat(
            [torch.full((b.numel(),), isinstance(t, DTensor)) for b, t in zip(bits, tensors, strict=True)]
        )
        sent = torch.where(shared, flat, 0)
        dist.all_reduce(sent)
        bits = list(torch.where(shared, sent, flat).split([b.numel() for b in bits]))
    return [_from_bits(each.view(tensor.shape), tensor.dtype) for each, tensor in zip(bits, tensors, strict=True)]


def _speaks(tensor: DTensor) -> bool:
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    return all(not c or not p.is_replicate() for c, p in zip(coordinate, tensor.placements, strict=True))


def _from_bits(bits: Tensor, dtype: torch.dtype) -> Tensor:
    if not dtype.is_floating_point:
        return bits.to(dtype)
    return bits.to({2: torch.int16, 4: torch.int32}[dtype.itemsize]).view(dtype)


def gradients(nets: Sequence[Sequence[Any]], step: int, scale: float) -> list[list[Tensor]]:
    """The scaled gradients of each net over the global batch.

    Each process takes those of its own pieces, and all pieces are added in one order.
    """
    flat = [param for net in nets for param in net]
    weights = [param.float().requires_grad_() for param in whole(flat)]
    rank, count = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    found = torch.zeros(PIECES, sum(weight.numel() for weight in weights))
    for piece in range(rank, PIECES, count):
        generator = torch.Generator().manual_seed(100 * step + piece)
        inputs = torch.randn(4, 256, generator=generator)
        loss = sum(loss_of(weights[k : k + 4], inputs) for k in range(0, len(weights), 4)) * (scale / PIECES)
        found[piece] = torch.cat([grad.flatten() for grad in torch.autograd.grad(loss, weights)])  # type: ignore[arg-type]
    if count > 1:
        bits = found.view(torch.int32)
        dist.all_reduce(bits)
    total = found[0]
    for piece in found[1:]:
        total = total + piece
    parts = total.split([weight.numel() for weight in weights])
    grads = [part.view(weight.shape) for part, weight in zip(parts, weights, strict=True)]
    return [grads[k : k + 4] for k in range(0, len(grads), 4)]


def give(param: Any, grad: Tensor) -> None:
    """Give a param its part of a gradient."""
    if isinstance(param, DTensor):
        param.grad = distribute_tensor(grad.to(param.dtype), param.device_mesh, param.placements, src_data_rank=None)
    else:
        param.grad = grad.to(param.dtype)


def train(optimizer: Any, nets: Sequence[Sequence[Any]], scaler: Any, steps: Iterable[int]) -> None:
    """Train nets in the fast way and with `unscale_` in turn; in one step a gradient of the last process overflows."""
    for step in steps:
        scale = scaler.scale(torch.ones(())).item()
        for net, grads in zip(nets, gradients(nets, step, scale), strict=True):
            if step == OVERFLOW:
                grads[1][-1, 0] = torch.inf
            for param, grad in zip(net, grads, strict=True):
                give(param, grad)
        if step % 2:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.skipped(optimizer) is (step == OVERFLOW)
        optimizer.zero_grad()


def come_to(optimizer: Any) -> list[dict[str, Any]]:
    """What each param of an optimizer has come to, in whole tensors."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    found = []
    for param in params:
        state = optimizer.state[param]
        tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
        values = whole([param, *tensors.values()])
        rest = {key: value for key, value in state.items() if not isinstance(value, Tensor)}
        found.append(dict(zip(["param", *tensors], values, strict=True)) | rest)
    return found
