"""P24 to P26: every dtype, layout and view is stepped in place, or refused before anything has changed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from halfstep.formats import MOMENTS, WEIGHTS
from harness import assert_same
from training import OPTIMIZERS, SHAPES, Snapshot, drive, gradients, make, members, params


def twin(optimizer: Any) -> Any:
    """The same optimizer over contiguous params of their own, with the same state."""
    other = make(
        type(optimizer).__name__,
        [Parameter(p.detach().clone(memory_format=torch.contiguous_format)) for p in members(optimizer)],
        **{k: v for k, v in optimizer.param_groups[0].items() if k not in ("params", "param_names")},
    )
    assert all(p.is_contiguous() for p in members(other))
    return other


LAYOUTS: dict[str, Callable[[torch.dtype], Tensor]] = {
    "0-dim": lambda d: torch.tensor(1.5, dtype=d),
    "0-dim of a vector": lambda d: torch.randn(5).to(d)[2],
    "empty": lambda d: torch.empty(0, 3, dtype=d),
    "one element": lambda d: torch.randn(1, 1, 1).to(d),
    "transposed": lambda d: torch.randn(5, 7).to(d).t(),
    "permuted": lambda d: torch.randn(3, 4, 5).to(d).permute(2, 0, 1),
    "channels last": lambda d: torch.randn(2, 3, 5, 4).to(d).contiguous(memory_format=torch.channels_last),
    "every other": lambda d: torch.randn(20, 6).to(d)[::2, 1::3],
    "a column": lambda d: torch.randn(20, 6).to(d)[:, 3],
    "a slice": lambda d: torch.randn(100).to(d)[7:30],
    "columns side by side": lambda d: torch.randn(9, 8).to(d)[:, 2:5],
    "odd strides": lambda d: torch.randn(60).to(d).as_strided((3, 4), (17, 2), 5),
    "transposed, large": lambda d: torch.randn(300, 64).to(d).t(),
    "channels last, large": lambda d: torch.randn(8, 40, 4, 4).to(d).contiguous(memory_format=torch.channels_last),
    "expanded ones": lambda d: torch.randn(4, 1, 3).to(d).as_strided((4, 1, 3), (3, 0, 1)),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_p25_every_layout_is_stepped_in_place(
    layout: Callable[[torch.dtype], Tensor], half: torch.dtype, backend: str
) -> None:
    for weights, moments in [*((name, "float32") for name in WEIGHTS), *(("split16", name) for name in MOMENTS)]:
        # a param of its own beside it: what is copied and what is not go through one step
        view = Parameter(layout(half))
        formats = {"weights": weights, "moments": moments}
        optimizer = make("AdamW", [view, *params(half, [(11,)])], **formats, backend=backend, lr=0.1)
        strides, address = view.stride(), view.data_ptr()
        straight = twin(optimizer)
        drive(optimizer, range(4))
        drive(straight, range(4))
        assert (view.stride(), view.data_ptr()) == (strides, address)
        for param, other in zip(members(optimizer), members(straight), strict=True):
            assert_same(param.detach().contiguous(), other.detach())
            assert_same(optimizer.float32_weight(param), straight.float32_weight(other))
            for part in optimizer.state[param].values():
                assert not isinstance(part, Tensor) or part.is_contiguous()


def test_p25_what_lies_between_the_elements_of_a_view_is_not_touched(half: torch.dtype, backend: str) -> None:
    buffer = torch.full((10, 8), 7.0, dtype=half)
    param = Parameter(buffer[2:8:2, 1:6:2])
    optimizer = make("AdamW", [param], backend=backend, lr=0.5)
    drive(optimizer, range(1))
    mask = torch.zeros(10, 8, dtype=torch.bool)
    mask[2:8:2, 1:6:2] = True
    assert (buffer[~mask] == 7).all()
    assert (buffer[mask] != 7).all()


@pytest.mark.parametrize("size", [3, 17, 1000])
def test_p25_slices_of_a_flat_buffer(size: int, half: torch.dtype, backend: str) -> None:
    buffer = torch.randn(5 * size).to(half)
    slices = [Parameter(part) for part in buffer.split(size)]
    optimizer = make("AdamW", slices, backend=backend, lr=0.1)
    straight = twin(optimizer)
    drive(optimizer, range(3))
    drive(straight, range(3))
    assert_same(buffer, torch.cat([p.detach() for p in members(straight)]))


def test_p25_gradients_of_any_strides(half: torch.dtype, backend: str) -> None:
    grads = {
        "transposed": torch.randn(5, 4).to(half).t(),
        "expanded": torch.tensor(0.5, dtype=half).expand(4, 5),
        "a row expanded": torch.randn(5).to(half).expand(4, 5),
        "every other": torch.randn(8, 10).to(half)[::2, ::2],
    }
    for grad in grads.values():
        one, other = (make("AdamW", params(half, [(4, 5)]), backend=backend) for _ in range(2))
        members(one)[0].grad, members(other)[0].grad = grad, grad.contiguous()
        one.step()
        other.step()
        assert_same(members(one)[0].detach(), members(other)[0].detach())
        assert_same(one.float32_weight(members(one)[0]), other.float32_weight(members(other)[0]))


def test_p25_one_param_used_twice_is_stepped_once(half: torch.dtype, backend: str) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(6, 4, dtype=half)
            self.head = nn.Linear(4, 6, bias=False, dtype=half)
            self.head.weight = self.embedding.weight

    model = Tied()
    optimizer = make("AdamW", model.named_parameters(), backend=backend)
    out = model.head(model.embedding(torch.tensor([1, 2])))
    out.float().square().sum().backward()
    optimizer.step()
    assert model.head.weight is model.embedding.weight
    assert optimizer.state[model.head.weight]["step"] == 1


def test_p25_a_param_twice_in_a_group_is_stepped_once(half: torch.dtype, backend: str) -> None:
    (param,), (alone,) = params(half, [(5,)]), params(half, [(5,)])
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = make("AdamW", [param, param], backend=backend)
    other = make("AdamW", [alone], backend=backend)
    for p in (param, alone):
        p.grad = torch.ones_like(p)
    optimizer.step()
    other.step()
    assert optimizer.state[param]["step"] == 1
    assert_same(param.detach(), alone.detach())


@pytest.mark.parametrize("start", [0, 3000])
def test_p25_params_over_one_storage_are_stepped_in_turn(start: int, half: torch.dtype, backend: str) -> None:
    # large enough for several threads; what they share is written by both, in the order of the groups
    size = 2**15
    shared, apart = torch.randn(size + start).to(half), torch.randn(size + start).to(half)
    apart.copy_(shared)
    tied = [Parameter(shared[:size]), Parameter(shared[start:])]
    optimizer = make("AdamW", tied, backend=backend, lr=0.1)
    first, second = (make("AdamW", [Parameter(p)], backend=backend, lr=0.1) for p in (apart[:size], apart[start:]))
    for number in range(3):
        gradients(optimizer, number)
        members(first)[0].grad, members(second)[0].grad = tied[0].grad, tied[1].grad
        optimizer.step()
        first.step()
        second.step()
    assert_same(shared, apart)
    assert tied[0].data_ptr() == shared.data_ptr()


@pytest.mark.parametrize(
    "view",
    [
        lambda d: torch.ones(1, dtype=d).expand(3),
        lambda d: torch.ones(4, 1, dtype=d).expand(4, 3),
        lambda d: torch.ones(9, dtype=d).as_strided((4, 3), (2, 1)),
        lambda d: torch.ones(9, dtype=d).unfold(0, 3, 2),
    ],
    ids=["one", "columns", "windows", "unfolded"],
)
def test_p25_elements_that_share_memory_are_refused(view: Any, half: torch.dtype) -> None:
    with pytest.raises(ValueError, match=r"w is a view of shape \(.*\) with strides \(.*\), in which elements"):
        make("AdamW", [("w", Parameter(view(half)))])
    # nor when it becomes one later
    optimizer = make("AdamW", [("w", Parameter(view(half).contiguous()))])
    (param,) = members(optimizer)
    param.data = view(half)
    param.grad = torch.ones_like(param)
    with pytest.raises(ValueError, match=r"elements share memory: .*param.contiguous\(\)"):
        optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_p24_three_dtypes_in_one_optimizer(name: str, backend: str) -> None:
    dtypes = (torch.float16, torch.bfloat16, torch.float32)
    mixed = make(name, [p for dtype in dtypes for p in params(dtype)], backend=backend)
    single = [make(name, params(dtype), backend=backend) for dtype in dtypes]
    drive(mixed, range(3))
    # the same gradients: each optimizer of one dtype sees those of its place in the mixture
    for k, optimizer in enumerate(single):
        place = slice(k * len(SHAPES), (k + 1) * len(SHAPES))
        for number in range(3):
            gradients(mixed, number)
            for param, other in zip(members(optimizer), members(mixed)[place], strict=True):
                param.grad = other.grad
            optimizer.step()
        for param, other in zip(members(optimizer), members(mixed)[place], strict=True):
            assert_same(param.detach(), other.detach())
            assert_same(optimizer.float32_weight(param), mixed.float32_weight(other))


@pytest.mark.parametrize("weights", WEIGHTS)
def test_p24_a_float32_param_is_its_own_weight(weights: str, backend: str) -> None:
    optimizer = make("AdamW", params(torch.float32), weights=weights, backend=backend)
    drive(optimizer, range(2))
    for param in members(optimizer):
        assert set(optimizer.state[param]) == {"step", "exp_avg", "exp_avg_sq"}
        weight = optimizer.float32_weight(param)
        assert_same(weight, param.detach())
        assert weight.data_ptr() != param.data_ptr()
    assert f"weights float32 (weights='{weights}' is for 16-bit params)" in optimizer.explain()


@pytest.mark.parametrize("grad", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_p24_gradients_of_another_dtype(dtype: torch.dtype, grad: torch.dtype, backend: str) -> None:
    # values that every dtype holds: what is stepped must not depend on how they came
    values = torch.tensor([0.5, -2.0, 0.25])
    results = []
    for kind in (dtype, grad):
        param = Parameter(torch.tensor([1.0, 2.0, -3.0]).to(dtype))
        optimizer = make("AdamW", [param], backend=backend)
        param.grad_dtype = None
        for _ in range(2):
            param.grad = values.to(kind)
            optimizer.step()
        results.append((param.detach(), optimizer.float32_weight(param)))
    for one, other in zip(*results, strict=True):
        assert_same(one, other)


def test_p24_gradients_kept_in_float32_by_torch(half: torch.dtype, backend: str) -> None:
    param = Parameter(torch.ones(3, dtype=half))
    param.grad_dtype = torch.float32
    optimizer = make("AdamW", [param], backend=backend)
    for _ in range(4):
        (param * torch.tensor(30000.0, dtype=half)).sum().backward()
    assert param.grad is not None
    assert param.grad.dtype is torch.float32
    optimizer.step()
    assert_same(optimizer.state[param]["exp_avg_sq"], torch.full((3,), 0.0) + param.grad.square() * torch.tensor(1e-3))


def sparse(half: torch.dtype) -> Tensor:
    layer = nn.Embedding(4, 3, sparse=True, dtype=half)
    layer(torch.tensor([1, 1])).float().sum().backward()
    return layer.weight


def test_p26_sparse_gradients_are_refused_before_anything_changed(half: torch.dtype, backend: str) -> None:
    first, last = params(half, [(3,), (4,)])
    optimizer = make("AdamW", [("a", first), ("e", sparse(half)), ("z", last)], backend=backend)
    for param in (first, last):
        param.grad = torch.ones_like(param)
    for _ in range(2):
        before = Snapshot(optimizer)
        with pytest.raises(TypeError, match=r"the gradient of e is sparse \(torch.sparse_coo\): .*SparseAdam"):
            optimizer.step()
        before.check()
        # and once more with a state there
        embedding, members(optimizer)[1].grad = members(optimizer)[1].grad, None
        optimizer.step()
        members(optimizer)[1].grad = embedding


BAD_PARAMS: dict[str, tuple[Callable[[], Tensor], str]] = {
    "complex": (lambda: Parameter(torch.ones(2, dtype=torch.complex64)), "w is torch.complex64: .*torch.optim"),
    "complex half": (lambda: torch.ones(2, dtype=torch.complex32), "w is torch.complex32: .*torch.optim"),
    "float64": (lambda: Parameter(torch.ones(2, dtype=torch.float64)), r"w is torch.float64: .*model.float\(\)"),
    "integers": (lambda: torch.ones(2, dtype=torch.int32), "w is torch.int32: halfstep steps float16, bfloat16 and"),
    "float8": (lambda: torch.ones(2).to(torch.float8_e5m2), "w is torch.float8_e5m2: halfstep steps float16"),
    "sparse": (lambda: torch.eye(3).to_sparse(), r"w has the layout torch.sparse_coo: .*param.to_dense\(\)"),
}


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize(("param", "text"), BAD_PARAMS.values(), ids=BAD_PARAMS)
def test_p26_params_of_other_kinds_are_refused(param: Callable[[], Tensor], text: str, half: torch.dtype) -> None:
    with pytest.raises(TypeError, match=text):
        make("AdamW", [("w", param())])
    optimizer = make("AdamW", [("v", p) for p in params(half, [(3,)])])
    before = Snapshot(optimizer)
    with pytest.raises(TypeError, match=text):
        optimizer.add_param_group({"params": [("w", param())]})
    before.check()


def test_p26_gradients_of_other_dtypes_are_refused(half: torch.dtype, backend: str) -> None:
    param = Parameter(torch.ones(3, dtype=half))
    param.grad_dtype = None
    optimizer = make("AdamW", [("w", param)], backend=backend)
    param.grad = torch.ones(3, dtype=torch.float64)
    before = Snapshot(optimizer)
    with pytest.raises(
        TypeError, match=r"gradient of w is torch.float64: must be .* param.grad = param.grad.float\(\)"
    ):
        optimizer.step()
    before.check()


def test_p26_a_step_that_writes_what_a_graph_still_needs_is_noticed(half: torch.dtype, backend: str) -> None:
    # as with torch's optimizers, a backward through values from before the step raises and does not mislead
    param = Parameter(torch.ones(3, dtype=half))
    optimizer = make("AdamW", [param], backend=backend)
    loss = (param * param).sum()
    param.grad = torch.ones_like(param)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
