"""The model: the same start in every dtype, and no look ahead."""

import pytest
import torch

from halfstep.cli.gpt import GPT, Shape, generate, loss_of

SHAPE = Shape(layers=2, heads=2, width=16, context=12)


def tokens(length: int = 12) -> torch.Tensor:
    return torch.randint(0, 256, (3, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bit_weights_are_the_float32_ones_rounded(dtype: torch.dtype) -> None:
    half = dict(GPT(SHAPE, seed=1).to(dtype).named_parameters())
    for name, param in GPT(SHAPE, seed=1).named_parameters():
        assert torch.equal(half[name], param.to(dtype)), name


def test_initial_weights_follow_from_the_seed() -> None:
    first, second = GPT(SHAPE, seed=1), GPT(SHAPE, seed=2)
    assert not torch.equal(first.head.weight, second.head.weight)
    assert torch.equal(GPT(SHAPE, seed=1).head.weight, first.head.weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_forward_and_backward_in_every_dtype(dtype: torch.dtype) -> None:
    model = GPT(SHAPE, seed=0).to(dtype)
    assert model(tokens()).dtype == torch.float32
    loss = loss_of(model, tokens(13))
    loss.backward()
    # Nearly uniform at first: ln 256, and the logits' spread is a hundredth of that.
    assert loss.item() == pytest.approx(5.545, abs=0.1)
    for name, param in model.named_parameters():
        assert param.grad is not None, name
        assert param.grad.dtype == dtype
        assert param.grad.isfinite().all(), name


def test_no_byte_sees_a_later_one() -> None:
    model = GPT(SHAPE, seed=0)
    one = tokens()
    other = one.clone()
    other[:, 7:] = (other[:, 7:] + 1) % 256
    first, second = model(one), model(other)
    assert torch.equal(first[:, :7], second[:, :7])
    assert not torch.equal(first[:, 7:], second[:, 7:])


def test_a_sample_follows_from_the_seed_and_outgrows_the_context() -> None:
    model = GPT(SHAPE, seed=0).half()
    sample = generate(model, b"\n", 30, seed=4)
    assert sample is not None
    assert len(sample) == 31
    assert generate(model, b"\n", 30, seed=4) == sample
    assert generate(model, b"\n", 30, seed=5) != sample


def test_a_broken_model_gives_no_sample() -> None:
    model = GPT(SHAPE, seed=0)
    torch.nn.init.constant_(model.head.weight, float("nan"))
    assert generate(model, b"\n", 3, seed=0) is None
