"""SGD beside torch's, Lion beside its formula, and both on 16-bit params beside themselves in float32."""

import inspect
import itertools
from typing import Any

import pytest
import torch

import halfstep
from halfstep.formats import WEIGHTS
from harness import assert_same

U = 2.0**-24  # float32's unit roundoff
STEPS = 100


def gradients(n: int = 300) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(n, generator=generator) for _ in range(STEPS)]


def trained(optimizer: Any, param: torch.nn.Parameter, grads: list[torch.Tensor]) -> None:
    for grad in grads:
        param.grad = None
        param.grad_dtype = None
        param.grad = grad.clone()
        optimizer.step()


SGDS = [
    {"momentum": momentum, "dampening": dampening, "nesterov": nesterov, "weight_decay": decay, "maximize": maximize}
    for momentum, dampening, nesterov, decay, maximize in itertools.product(
        (0.0, 0.9), (0.0, 0.3), (False, True), (0.0, 0.1), (False, True)
    )
    if not (nesterov and (momentum == 0 or dampening))
]


@pytest.mark.parametrize("options", SGDS, ids=lambda options: "-".join(f"{k}={v}" for k, v in options.items() if v))
def test_sgd_is_torchs(options: dict[str, Any], backend: str) -> None:
    start = torch.randn(300)
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    trained(halfstep.SGD([ours], lr=1e-2, backend=backend, **options), ours, gradients())
    trained(torch.optim.SGD([theirs], lr=1e-2, foreach=False, **options), theirs, gradients())
    # With |g| < 5, the decay's pull 0.1 |w| < 1 and mu = 0.9, a buffer stays below 60. It rounds 4 times a step in
    # either, and errors shrink by mu: 2 * 4 * 60u / (1 - 0.9) at most. A step adds lr (1 + mu) of that and 3 roundings
    # of either at the weight's size, below 8.
    bound = STEPS * (1e-2 * 1.9 * 8 * 60 * U / 0.1 + 2 * 3 * 8 * U)
    assert (ours - theirs).abs().max() <= bound
    assert (ours - start).abs().max() > 100 * bound


def test_sgd_decays_the_weight_where_it_is_decoupled(backend: str) -> None:
    param = torch.nn.Parameter(torch.ones(4))
    optimizer = halfstep.SGD([param], lr=0.5, weight_decay=0.25, decoupled_weight_decay=True, backend=backend)
    trained(optimizer, param, [torch.full((4,), 2.0)])
    assert_same(param.detach(), torch.full((4,), 1 - 0.5 * 0.25 - 0.5 * 2.0))


def test_sgd_keeps_a_buffer_only_for_momentum(half: torch.dtype, backend: str) -> None:
    beside = {"step", "mantissa", "remainder"}
    for momentum, kept in ((0.0, beside), (0.9, {*beside, "momentum_buffer"})):
        param = torch.nn.Parameter(torch.ones(4, dtype=half))
        optimizer = halfstep.SGD([param], momentum=momentum, backend=backend)
        trained(optimizer, param, [torch.ones(4)])
        assert set(optimizer.state[param]) == kept
        assert f" {'sgd_momentum' if momentum else 'sgd'} " in optimizer.explain()


def test_a_group_has_a_momentum_of_its_own(backend: str) -> None:
    plain, moved = (torch.nn.Parameter(torch.ones(4)) for _ in range(2))
    groups = [{"params": [plain]}, {"params": [moved], "momentum": 0.5}]
    optimizer = halfstep.SGD(groups, lr=0.25, backend=backend)
    for _ in range(2):
        plain.grad, moved.grad = torch.ones(4), torch.ones(4)
        optimizer.step()
    assert_same(plain.detach(), torch.full((4,), 0.5))
    assert_same(moved.detach(), torch.full((4,), 1 - 0.25 - 0.25 * 1.5))


def test_p29_nesterov_needs_a_momentum() -> None:
    param = torch.nn.Parameter(torch.ones(4))
    bad: list[dict[str, Any]] = [{}, {"momentum": 0.9, "dampening": 0.1}]
    text = r"nesterov=True: needs momentum > 0 and dampening 0, and these are .*; set them, or leave nesterov out"
    for options in bad:
        with pytest.raises(ValueError, match=text):
            halfstep.SGD([param], nesterov=True, **options)
    with pytest.raises(ValueError, match=r"momentum=-0\.5: must be 0, or a float32 number"):
        halfstep.SGD([param], momentum=-0.5)


def test_p29_a_momentum_that_comes_late_is_told_the_way_out(half: torch.dtype, backend: str) -> None:
    param = torch.nn.Parameter(torch.ones(4, dtype=half))
    optimizer = halfstep.SGD([("w", param)], lr=0.25, backend=backend)
    trained(optimizer, param, [torch.ones(4)])
    optimizer.param_groups[0]["momentum"] = 0.5
    with pytest.raises(ValueError, match=r"w cannot be stepped: .* no 'momentum_buffer'.* starts in a new optimizer"):
        optimizer.step()
    with pytest.raises(ValueError, match=r"for w does not fit: it has no 'momentum_buffer'.* Start in a new optimizer"):
        optimizer.load_state_dict(optimizer.state_dict())
    assert_same(param.detach(), torch.full((4,), 0.75, dtype=half))
    late = halfstep.SGD([("w", param)], lr=0.25, momentum=0.5, backend=backend)
    trained(late, param, [torch.ones(4), torch.ones(4)])
    assert_same(late.float32_weight(param), torch.full((4,), 0.75 - 0.25 - 0.25 * 1.5))


def test_sgds_signature_is_torchs() -> None:
    ours, theirs = (inspect.signature(cls).parameters for cls in (halfstep.SGD, torch.optim.SGD))
    assert [name for name in ours if name in theirs] == list(theirs)
    for name, parameter in theirs.items():
        assert ours[name].default == parameter.default, name
        assert ours[name].kind is parameter.kind, name


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("maximize", [False, True])
def test_lion_is_its_formula(decay: float, maximize: bool, backend: str) -> None:
    start = torch.randn(300)
    param = torch.nn.Parameter(start.clone())
    optimizer = halfstep.Lion([param], lr=1e-3, weight_decay=decay, maximize=maximize, backend=backend)
    trained(optimizer, param, gradients())
    weight, average = start.double(), torch.zeros(300).double()
    closest = torch.full((300,), torch.inf).double()
    for grad in gradients():
        grad = grad.double() * (-1 if maximize else 1)
        blend = 0.9 * average + 0.1 * grad
        closest = torch.minimum(closest, blend.abs())
        weight = weight * (1 - 1e-3 * decay) - 1e-3 * blend.sign()
        average = 0.99 * average + 0.01 * grad
    # |m| < 1 and |c| < 2: the average rounds 4 times a step at that size or less, and its errors shrink by 0.99, so it
    # is off by 4u / 0.01 at most, and a blend by that and 4 roundings of its own. Where no blend came as near to 0, no
    # sign can have turned, and what is left are 3 roundings a step at the weight's size, below 4.
    assert average.abs().max() < 1
    clear = closest > 4 * U / 0.01 + 4 * 2 * U
    assert clear.sum() > 200
    assert (param - weight).abs()[clear].max() <= STEPS * 3 * 4 * U


def test_lion_stands_still_where_nothing_pulls(half: torch.dtype, backend: str) -> None:
    param = torch.nn.Parameter(torch.ones(4, dtype=half))
    optimizer = halfstep.Lion([param], backend=backend)
    trained(optimizer, param, [torch.zeros(4)])
    assert_same(optimizer.float32_weight(param), torch.ones(4))


MAKERS: dict[str, Any] = {
    "lion": lambda params, **options: halfstep.Lion(params, lr=1e-3, weight_decay=0.1, **options),
    "sgd": lambda params, **options: halfstep.SGD(params, lr=1e-2, weight_decay=0.1, **options),
    "nesterov": lambda params, **options: halfstep.SGD(params, lr=1e-2, momentum=0.9, nesterov=True, **options),
}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("weights", [name for name in WEIGHTS if name in ("split16", "master32")])
def test_p05_on_16_bits_each_follows_itself_in_float32(
    name: str, weights: str, half: torch.dtype, backend: str
) -> None:
    start = (torch.rand(300) + 3).to(half)
    param, reference = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.float())
    optimizer = MAKERS[name]([param], weights=weights, backend=backend)
    trained(optimizer, param, gradients())
    trained(MAKERS[name]([reference], backend=backend), reference, gradients())
    assert_same(optimizer.float32_weight(param), reference.detach())
    assert reference.abs().min() >= 2.0**-16
    assert not torch.equal(reference, start.float())
