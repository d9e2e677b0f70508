"""`float32_products`: the same results to a rounding, and nothing else changed."""

import copy
import types

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep.products import float32_products, native_float16_products

HALF = torch.float16


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).half()


def linear(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return functional.linear(x, w, b)


def attention(mask: Tensor | None, causal: bool):
    return lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)


MASK = torch.ones(6, 6, dtype=torch.bool).tril()
QKV = [(2, 3, 6, 8)] * 3
CASES = {
    "linear": (linear, [(5, 8), (7, 8), (7,)]),
    "linear on three dimensions": (linear, [(2, 5, 8), (7, 8), (7,)]),
    "linear without bias": (functional.linear, [(2, 5, 8), (7, 8)]),
    "matmul": (torch.matmul, [(2, 3, 5, 8), (2, 3, 8, 4)]),
    "matrix and vector": (torch.mv, [(5, 8), (8,)]),
    "dot": (torch.dot, [(8,), (8,)]),
    "einsum": (lambda a, b: torch.einsum("bij,bjk->bik", a, b), [(2, 5, 8), (2, 8, 4)]),
    "addmm": (torch.addmm, [(5, 4), (5, 8), (8, 4)]),
    "baddbmm": (torch.baddbmm, [(2, 5, 4), (2, 5, 8), (2, 8, 4)]),
    "addbmm": (torch.addbmm, [(5, 4), (2, 5, 8), (2, 8, 4)]),
    "addmv": (torch.addmv, [(5,), (5, 8), (8,)]),
    "addr": (torch.addr, [(5, 8), (5,), (8,)]),
    "conv1d": (functional.conv1d, [(2, 4, 9), (3, 4, 3), (3,)]),
    "conv2d": (functional.conv2d, [(2, 4, 9, 9), (3, 4, 3, 3), (3,)]),
    "conv2d, same": (lambda x, w, b: functional.conv2d(x, w, b, padding="same"), [(2, 4, 9, 9), (3, 4, 3, 3), (3,)]),
    "conv3d": (functional.conv3d, [(1, 2, 5, 5, 5), (3, 2, 3, 3, 3), (3,)]),
    "transposed convolution": (functional.conv_transpose2d, [(2, 4, 5, 5), (4, 3, 3, 3), (3,)]),
    "time-first convolution": (torch.conv_tbc, [(9, 2, 4), (3, 4, 3), (3,)]),
    "causal attention": (attention(None, True), QKV),
    "masked attention": (attention(MASK, False), QKV),
    "attention with added mask": (attention(torch.zeros(6, 6, dtype=HALF), False), QKV),
}


class Log(TorchDispatchMode):
    """Collect the dtypes of every floating argument, by operation, below the mode under test."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, torch.dtype]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for argument in args:
            if isinstance(argument, Tensor) and argument.is_floating_point():
                self.seen.append((func.overloadpacket.__name__, argument.dtype))
        return func(*args, **(kwargs or {}))


def forward_and_backward(function, inputs: list[Tensor]) -> list[Tensor]:
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    result = function(*leaves)
    result.backward(numbers(*result.shape, seed=99).to(result.dtype))
    return [result.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_are_float32_ones_rounded(name: str) -> None:
    function, shapes = CASES[name]
    inputs = [numbers(*shape, seed=place) for place, shape in enumerate(shapes)]
    wide = function
    if name == "attention with added mask":
        wide = attention(torch.zeros(6, 6), False)
    expected = forward_and_backward(wide, [tensor.float() for tensor in inputs])
    with Log() as log, float32_products():
        got = forward_and_backward(function, inputs)
    assert [tensor.dtype for tensor in got] == [HALF] * len(expected)
    for ours, theirs in zip(got, expected, strict=True):
        if "attention" in name or name in ("time-first convolution", "addr"):
            # A backward that reads the rounded output, or takes several products, adds their roundings: each is at most
            # 2**-11 of a term, the terms are below 8 here, and fewer than 8 are added.
            assert (ours.float() - theirs).abs().max() <= 8 * 8 * 2**-11
        else:
            assert torch.equal(ours, theirs.half())
    products = {
        name for name, _ in log.seen if any(part in name for part in ("mm", "mv", "dot", "conv", "attention", "addr"))
    }
    assert products, "no product was seen, so the case tests nothing"
    assert not [entry for entry in log.seen if entry[0] in products and entry[1] == HALF]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("grad_mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(name: str, grad_mode) -> None:
    function, shapes = CASES[name]
    inputs = [numbers(*shape, seed=place) for place, shape in enumerate(shapes)]
    with float32_products():
        expected = function(*inputs)
        with grad_mode():
            assert torch.equal(function(*inputs), expected)


LAYERS = {
    "LSTM": lambda: nn.LSTM(4, 5),
    "GRU": lambda: nn.GRU(4, 5),
    "transformer layer": lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0),
    "transformer layer, fused for inference": lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).eval(),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_many_products_stay_close_to_float32(name: str) -> None:
    torch.manual_seed(0)
    half = LAYERS[name]().half()
    wide = copy.deepcopy(half).float()
    x = numbers(3, 2, 4)
    with torch.no_grad(), Log() as log, float32_products():
        got, expected = first(half(x)), first(wide(x.float()))
    assert got.dtype == HALF
    # Fewer than 16 roundings follow each other, each of at most 2**-11 of numbers below 8.
    assert (got.float() - expected).abs().max() <= 16 * 8 * 2**-11
    assert not [entry for entry in log.seen if ("mm" in entry[0] or "_fwd" in entry[0]) and entry[1] == HALF]


def first(result: Tensor | tuple[Tensor, ...]) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


def test_in_place_and_out_forms_write_their_own_storage() -> None:
    start, a, b = numbers(5, 4), numbers(5, 8, seed=1), numbers(8, 4, seed=2)
    expected = torch.addmm(start.float(), a.float(), b.float(), beta=0.5).half()
    in_place, out, empty = start.clone(), torch.empty(5, 4, dtype=HALF), torch.empty(0, dtype=HALF)
    with float32_products():
        assert in_place.addmm_(a, b, beta=0.5) is in_place
        assert torch.addmm(start, a, b, beta=0.5, out=out) is out
        torch.mm(a, b, out=empty)
    assert torch.equal(in_place, expected)
    assert torch.equal(out, expected)
    assert torch.equal(empty, (a.float() @ b.float()).half())


def test_sums_do_not_overflow_on_the_way() -> None:
    row = torch.tensor([[300.0, 300.0]], dtype=HALF)
    with float32_products():
        assert (row @ torch.tensor([[300.0], [-299.0]], dtype=HALF)).item() == 300.0
        assert (row @ row.T).item() == float("inf")


def test_other_dtypes_are_left_alone() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        a, b = numbers(33, 34).to(dtype), numbers(34, 35, seed=1).to(dtype)
        expected = a @ b
        with float32_products():
            assert torch.equal(a @ b, expected)
            assert (a @ b).dtype == dtype


def test_mixed_dtypes_raise_as_without_it() -> None:
    a, b = numbers(3, 4), numbers(4, 5).float()
    with pytest.raises(RuntimeError) as native:
        torch.mm(a, b)
    with float32_products(), pytest.raises(RuntimeError) as ours:
        torch.mm(a, b)
    assert str(ours.value) == str(native.value)


def test_it_ends_nests_and_decorates() -> None:
    a, b = numbers(3, 4), numbers(4, 5, seed=1)

    @float32_products()
    def product() -> Tensor:
        return a @ b

    with float32_products(), float32_products():
        nested = a @ b
    assert torch.equal(nested, (a.float() @ b.float()).half())
    assert torch.equal(product(), nested)
    with Log() as log:
        torch.mm(a, b)
    assert ("mm", HALF) in log.seen


def fake_onednn(monkeypatch: pytest.MonkeyPatch, answer: bool | None) -> None:
    operations = types.SimpleNamespace()
    if answer is not None:
        operations._is_mkldnn_fp16_supported = lambda: answer
    monkeypatch.setattr(torch.ops, "mkldnn", operations)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)


@pytest.mark.parametrize("answer", [True, False])
def test_native_is_what_onednn_says(monkeypatch: pytest.MonkeyPatch, answer: bool) -> None:
    fake_onednn(monkeypatch, answer)
    assert native_float16_products() is answer


def test_not_native_where_pytorch_cannot_say(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_onednn(monkeypatch, None)
    assert native_float16_products() is False


# Restoring PyTorch's flags warns of one that has no meaning here.
@pytest.mark.filterwarnings("ignore:TF32 acceleration")
def test_not_native_while_onednn_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_onednn(monkeypatch, True)
    with torch.backends.mkldnn.flags(enabled=False):
        assert native_float16_products() is False
