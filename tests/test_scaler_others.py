"""The scaler with optimizers that are not halfstep's: float16 refused, everything else as torch's scaler does it."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import optim
from torch.nn import Parameter

import halfstep
from scaled import Wrapper, adamw, assert_same, backward, param, snapshot

INF = float("inf")
OPTIMIZERS: dict[str, Callable[..., optim.Optimizer]] = {
    "SGD": functools.partial(optim.SGD, lr=0.1, momentum=0.9),
    "AdamW": functools.partial(optim.AdamW, lr=0.01, foreach=False),
    "AdamW-foreach": functools.partial(optim.AdamW, lr=0.01, foreach=True),
    "AdamW-fused": functools.partial(optim.AdamW, lr=0.01, fused=True),
    "SGD-fused": functools.partial(optim.SGD, lr=0.1, fused=True),
    "Adagrad-fused": functools.partial(optim.Adagrad, lr=0.1, fused=True),
    "RMSprop": functools.partial(optim.RMSprop, lr=0.01),
}
FUSED = [name for name in OPTIMIZERS if name.endswith("fused")]


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_p17_float32_and_bfloat16_as_with_torchs_scaler(name: str, dtype: torch.dtype, clip: bool) -> None:
    def run(scaler: torch.amp.GradScaler) -> tuple[list[torch.Tensor], list[Any]]:
        generator = torch.Generator().manual_seed(3)
        params = [param(torch.randn(shape, generator=generator), dtype) for shape in ((3, 2), (5,))]
        optimizer, seen = OPTIMIZERS[name](params), []
        for k in range(8):
            grads = [torch.randn(p.shape, generator=generator) for p in params]
            if k in (2, 5):
                grads[1][0] = INF if k == 2 else float("nan")
            backward(scaler, params, grads)
            if clip:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(params, 0.5)
            scaler.step(optimizer)
            seen += [p.grad.clone().nan_to_num(7.0) for p in params if p.grad is not None]
            assert all(p.grad is not None and p.grad.dtype is dtype for p in params)
            scaler.update()
            seen.append(torch.tensor(scaler.get_scale()))
            optimizer.zero_grad()
        return snapshot(optimizer), seen

    ours = run(halfstep.GradScaler("cpu", growth_interval=2))
    torchs = run(torch.amp.GradScaler("cpu", growth_interval=2))
    assert_same(ours[0], torchs[0])
    assert_same(ours[1], torchs[1])


@pytest.mark.parametrize("kind", [optim.SparseAdam, functools.partial(optim.SGD, lr=0.1)], ids=["SparseAdam", "SGD"])
@pytest.mark.parametrize("grad", [0.5, INF])
def test_p17_sparse_gradients_as_with_torchs_scaler(kind: Any, grad: float) -> None:
    def run(scaler: torch.amp.GradScaler) -> list[torch.Tensor]:
        table = Parameter(torch.arange(8.0).reshape(4, 2))
        optimizer = kind([table])
        for _ in range(2):
            rows = torch.nn.functional.embedding(torch.tensor([1, 1, 3]), table, sparse=True)
            scaler.scale((rows * grad).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return [*snapshot(optimizer), torch.tensor(scaler.get_scale())]

    assert_same(run(halfstep.GradScaler()), run(torch.amp.GradScaler("cpu")))


def test_p17_a_closure_as_with_torchs_scaler() -> None:
    """LBFGS takes its closure by position, past the scaler; nothing there is ours to change."""

    def run(scaler: torch.amp.GradScaler) -> list[torch.Tensor]:
        ours = param([1.0, 2.0], torch.float32)
        optimizer = optim.LBFGS([ours], max_iter=3)
        for _ in range(3):

            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                loss = (ours**4).sum()
                loss.backward()
                return loss

            optimizer.zero_grad()
            scaler.scale((ours**4).sum()).backward()
            scaler.step(optimizer, closure)
            scaler.update()
        with pytest.raises(RuntimeError, match="Closure use is not currently supported"):
            scaler.step(optimizer, closure=lambda: None)
        return [ours.detach(), torch.tensor(scaler.get_scale())]

    assert_same(run(halfstep.GradScaler()), run(torch.amp.GradScaler("cpu")))


def test_p15_no_gradients_is_no_error_for_others() -> None:
    ours = param([1.0], torch.float32)
    optimizer, scaler = optim.SGD([ours], lr=0.1), halfstep.GradScaler()
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    scaler.update()
    assert not scaler.skipped(optimizer)
    assert ours.item() == 1.0


def test_p14_a_mixed_pair_skips_the_one_that_overflowed(half: torch.dtype) -> None:
    good, bad = param([1.0], half), param([1.0], torch.float32)
    mine, other, scaler = adamw([good]), optim.SGD([bad], lr=0.1), halfstep.GradScaler()
    backward(scaler, [good, bad], [[0.5], [INF]])
    scaler.step(mine)
    scaler.step(other)
    scaler.update()
    assert (scaler.skipped(mine), scaler.skipped(other)) == (False, True)
    assert (good.item() < 1.0, bad.item()) == (True, 1.0)
    assert bad.grad is not None  # as torch leaves it
    assert scaler.get_scale() == 2.0**15


# ---------------------------------------------------------------------- float16

REFUSED = (
    r"^Attempting to unscale FP16 gradients\. {kind} would step {name} in float16, where small gradients and updates "
    r"are lost\. Keep the model and change one line: optimizer = halfstep\.AdamW\(\.\.\.\), which works on float32 "
    r"weights; or give the scaler allow_fp16=True to unscale in float16 all the same$"
)


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("call", ["unscale_", "step"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_p17_float16_is_refused_before_any_gradient_is_touched(name: str, call: str, wrapped: bool) -> None:
    params = [param([1.0], torch.float32), param([2.0, 3.0], torch.float16)]
    optimizer = OPTIMIZERS[name]([("first", params[0]), ("second.weight", params[1])])
    scaler = halfstep.GradScaler()
    backward(scaler, params, [[0.5], [0.25, 0.5]])
    grads, before = [p.grad.clone() for p in params], snapshot(optimizer)
    text = REFUSED.format(kind=type(optimizer).__name__, name="second.weight")
    for _ in range(2):
        with pytest.raises(ValueError, match=text):
            getattr(scaler, call)(Wrapper(optimizer) if wrapped else optimizer)
    assert_same([p.grad for p in params], grads)
    assert_same(snapshot(optimizer), before)
    # the one line changed, it goes on from the gradients that there are
    mine = adamw(params)
    getattr(scaler, call)(mine)
    scaler.step(mine) if call == "unscale_" else None
    scaler.update()
    assert [mine.state[p]["step"] for p in params] == [1, 1]


@pytest.mark.parametrize("name", FUSED)
def test_p17_torch_itself_steps_fused_float16_in_silence(name: str) -> None:
    """Why the fused path needs a refusal of its own: should torch come to refuse, this says so."""
    ours = param([1.0], torch.float16)
    optimizer, scaler = OPTIMIZERS[name]([ours]), torch.amp.GradScaler("cpu")
    backward(scaler, [ours], [[0.5]])
    scaler.step(optimizer)


def test_p17_the_teaching_scaler_refuses_likewise() -> None:
    ours = param([1.0], torch.float16)
    optimizer, scaler = optim.SGD([ours], lr=0.1), halfstep.GradScalerFP16()
    backward(scaler, [ours], [[0.5]])
    with pytest.raises(ValueError, match=REFUSED.format(kind="SGD", name="param 0 of group 0")):
        scaler.step(optimizer)


def test_p17_float16_params_with_float32_gradients_are_refused_too() -> None:
    """Torch looks at the gradient alone, and SGD then adds it to the float16 param, where it is lost."""
    ours = param([1.0], torch.float16)
    ours.grad_dtype = torch.float32
    optimizer, scaler = optim.SGD([ours], lr=0.1), halfstep.GradScaler()
    backward(scaler, [ours], [[0.5]])
    with pytest.raises(ValueError, match=REFUSED.format(kind="SGD", name="param 0 of group 0")):
        scaler.step(optimizer)


@pytest.mark.parametrize("call", ["unscale_", "step"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_p17_allow_fp16_unscales_in_place_unconverted(name: str, call: str) -> None:
    ours, plain = (param([1.0, 2.0], torch.float16) for _ in range(2))
    optimizer, reference = OPTIMIZERS[name]([ours]), OPTIMIZERS[name]([plain])
    scaler = halfstep.GradScaler(init_scale=4.0, allow_fp16=True)
    for grad in ([0.5, 0.25], [INF, 0.25], [0.125, 2.0**-24]):
        backward(scaler, [ours], [grad])
        held = ours.grad
        if call == "unscale_":
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert ours.grad is held
        assert held.dtype is torch.float16
        assert scaler.skipped(optimizer) is (INF in grad)
        if INF not in grad:
            plain.grad = torch.tensor(grad, dtype=torch.float16)
            reference.step()
        optimizer.zero_grad()
    # fused kernels divide inside, in float32
    tolerance = 2.0**-10 if name.endswith("fused") else 0.0
    assert torch.allclose(ours, plain, rtol=tolerance, atol=0.0)
    if tolerance == 0.0:
        assert torch.equal(ours, plain)
    assert scaler.get_scale() == 2.0


def test_p17_allow_fp16_leaves_halfsteps_own_as_they_are() -> None:
    ours = param([1.0], torch.float16)
    optimizer, scaler = adamw([ours]), halfstep.GradScaler(allow_fp16=True)
    backward(scaler, [ours], [[2.0**-26]])
    scaler.unscale_(optimizer)
    assert ours.grad.dtype is torch.float32
    assert ours.grad.item() == 2.0**-26


def test_p17_allow_fp16_coalesces_sparse_gradients_as_torch() -> None:
    table = Parameter(torch.ones(3, 2).half())
    optimizer, scaler = optim.SGD([table], lr=0.1), halfstep.GradScaler(init_scale=2.0**15, allow_fp16=True)
    rows = torch.nn.functional.embedding(torch.tensor([1, 1]), table, sparse=True)
    scaler.scale(rows.float().sum()).backward()  # 2**15 twice overflows once it is summed
    scaler.step(optimizer)
    assert scaler.skipped(optimizer)


def test_unscaled_gradients_of_others_stay_after_update() -> None:
    ours = param([1.0], torch.bfloat16)
    optimizer, scaler = optim.SGD([ours], lr=0.1), halfstep.GradScaler()
    backward(scaler, [ours], [[0.5]])
    scaler.unscale_(optimizer)
    scaler.update()
    assert ours.grad is not None
    assert ours.grad.tolist() == [0.5]
