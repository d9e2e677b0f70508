"""What the tests of the optimizers share: every optimizer by its name, params, and steps that can be repeated."""

import inspect
import io
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

import halfstep
from halfstep.engine import HalfOptimizer
from harness import assert_same

OPTIMIZERS: dict[str, type[HalfOptimizer]] = {
    name: value for name, value in vars(halfstep).items() if inspect.isclass(value) and issubclass(value, HalfOptimizer)
}
SHAPES = ((5, 3), (7,), (), (2, 3, 4))


def params(dtype: torch.dtype, shapes: Iterable[Sequence[int]] = SHAPES, seed: int = 0) -> list[Parameter]:
    """Params of random values."""
    generator = torch.Generator().manual_seed(seed)
    return [Parameter(torch.randn(tuple(shape), generator=generator).to(dtype)) for shape in shapes]


def make(name: str, over: Iterable[Any], **options: Any) -> HalfOptimizer:
    """The optimizer called ``name`` with options that are not among every one's arguments."""
    over = list(over)
    key = "params" if not isinstance(over[0], dict) else None
    groups = [{"params": over}] if key else over
    return OPTIMIZERS[name]([{**options, **group} for group in groups])  # type: ignore[call-arg]


def members(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def gradients(optimizer: torch.optim.Optimizer, number: int) -> None:
    """Give each param the gradient of step ``number``."""
    generator = torch.Generator().manual_seed(1000 + number)
    for param in members(optimizer):
        grad = torch.randn(param.shape, generator=generator) * 10.0 ** ((number % 5) - 3)
        param.grad = grad.to(param.dtype)


def drive(optimizer: torch.optim.Optimizer, numbers: Iterable[int]) -> None:
    """Step through the gradients of ``numbers``."""
    for number in numbers:
        gradients(optimizer, number)
        optimizer.step()
        optimizer.zero_grad()


def through_file(value: Any) -> Any:
    """Save and load as a checkpoint is."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def assert_alike(a: torch.optim.Optimizer, b: torch.optim.Optimizer) -> None:
    """Raise unless params, state and options are the same, bit for bit."""
    assert options(a) == options(b)
    for one, other in zip(members(a), members(b), strict=True):
        assert_same(one.detach(), other.detach())
        assert_states(a.state.get(one, {}), b.state.get(other, {}))


def assert_states(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert list(a) == list(b)
    for key, value in a.items():
        if isinstance(value, Tensor):
            assert_same(value, b[key])
        else:
            assert type(value) is type(b[key])
            assert value == b[key], key


def options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


class Tied(nn.Module):
    """A tensor under two names, a buffer of floats and one of integers, and a param that nobody optimises."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(70, 64), nn.Linear(64, 70)
        self.head.weight = self.embedding.weight
        self.norm, self.frozen = nn.BatchNorm1d(70), nn.Linear(3, 2)
        self.frozen.requires_grad_(False)


class Snapshot:
    """All that a refused call must leave as it was: values, state, the very tensors, groups."""

    def __init__(self, optimizer: HalfOptimizer) -> None:
        self.optimizer, self.groups = optimizer, options(optimizer)
        self.params = [(param, param.detach().clone(), param.data_ptr()) for param in members(optimizer)]
        self.state = {
            param: {k: (v, v.clone() if isinstance(v, Tensor) else v) for k, v in state.items()}
            for param, state in optimizer.state.items()
        }

    def check(self) -> None:
        assert options(self.optimizer) == self.groups
        now = members(self.optimizer)
        assert len(now) == len(self.params)
        for param, (same, value, address) in zip(now, self.params, strict=True):
            assert param is same
            assert param.data_ptr() == address
            assert_same(param.detach(), value)
        states = {param: state for param, state in self.optimizer.state.items() if state}
        assert list(states) == list(self.state)
        for param, state in states.items():
            assert list(state) == list(self.state[param])
            for key, value in state.items():
                same, copy = self.state[param][key]
                assert value is same or value == same
                if isinstance(value, Tensor):
                    assert_same(value, copy)
