"""The scale: what scale() takes, how it moves, its bounds, its floor, and float16 outputs."""

import re
from collections import UserDict, namedtuple
from typing import Any

import pytest
import torch

import halfstep
from scaled import adamw, assert_same, backward, iterate, param, scales, snapshot

INF, NAN = float("inf"), float("nan")


# ---------------------------------------------------------------------- what scale() takes


def test_scale_takes_what_torchs_takes() -> None:
    a, b = torch.tensor([1.0, 2.0]), torch.tensor(3.0, dtype=torch.bfloat16)
    for outputs in (a, b, [a, b], (a, b), [a, (b, [a])], []):
        assert str(halfstep.GradScaler().scale(outputs)) == str(torch.amp.GradScaler("cpu").scale(outputs))
    ours, torchs = halfstep.GradScaler(), torch.amp.GradScaler("cpu")
    assert_same(ours.scale(x for x in (a, b)), torchs.scale(x for x in (a, b)))
    assert_same(ours.scale([(x for x in (a, b))])[0], ours.scale([a, b]))


Output = namedtuple("Output", "loss logits")


@pytest.mark.parametrize(
    ("outputs", "kind"),
    [
        ({"loss": torch.ones(())}, "dict"),
        (UserDict(loss=1), "UserDict"),
        ("loss", "str"),
        (1.0, "float"),
        (None, "NoneType"),
        (Output(torch.ones(()), torch.ones(2)), "Output"),
    ],
)
@pytest.mark.parametrize("inside", [False, True])
def test_scale_refuses_what_is_no_tensor(outputs: Any, kind: str, inside: bool) -> None:
    scaler = halfstep.GradScaler()
    with pytest.raises(
        ValueError, match=f"^outputs must be a Tensor or an iterable of Tensors, not {kind}: pass the loss itself$"
    ):
        scaler.scale([torch.ones(()), outputs] if inside else outputs)
    assert scaler._scale is None


# ---------------------------------------------------------------------- how it moves


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"growth_interval": 1},
        {"growth_interval": 3},
        {"growth_interval": 2, "growth_factor": 1.1, "backoff_factor": 0.3},
        {"growth_interval": 10**12, "init_scale": 7.0},
    ],
    ids=str,
)
def test_the_scale_moves_as_torchs(options: dict[str, Any]) -> None:
    events = "....x...xx......x.....x.x.x......"
    ours = halfstep.GradScaler("cpu", **options, max_scale=2.0**60)
    torchs = torch.amp.GradScaler("cpu", **options)
    assert scales(ours, events) == scales(torchs, events)
    assert ours._get_growth_tracker() == torchs._get_growth_tracker()
    for call in ("get_growth_factor", "get_backoff_factor", "get_growth_interval", "is_enabled"):
        assert getattr(ours, call)() == getattr(torchs, call)()


def test_the_scale_moves_as_torchs_under_another_default_dtype() -> None:
    """float16 as the default dtype, which a person who trains in it may set, must not round the factor."""
    torch.set_default_dtype(torch.float16)
    try:
        ours, torchs = (
            kind("cpu", growth_factor=1.1, growth_interval=1) for kind in (halfstep.GradScaler, torch.amp.GradScaler)
        )
        assert scales(ours, "...x") == scales(torchs, "...x")
    finally:
        torch.set_default_dtype(torch.float32)


def test_hysteresis_counts_overflows_before_a_back_off() -> None:
    full, half, quarter = 1024.0, 512.0, 256.0
    scaler = halfstep.GradScaler(init_scale=full, hysteresis=3, growth_interval=4)
    # an overflow here and there counts as well as three in a row; once spent, each backs off, until a growth
    assert scales(scaler, "x.x.x") == [full] * 4 + [half]
    assert scales(scaler, "x") == [quarter]
    assert scales(scaler, "....") == [quarter] * 3 + [half]
    assert scales(scaler, "xxx") == [half, half, quarter]


def test_hysteresis_starts_the_growth_anew_all_the_same() -> None:
    scaler = halfstep.GradScaler(init_scale=1024.0, hysteresis=2, growth_interval=3)
    assert scales(scaler, "..x...") == [1024.0] * 5 + [2048.0]


@pytest.mark.parametrize("bad", [NAN, INF])
def test_p12_the_scale_never_reaches_zero(half: torch.dtype, bad: float) -> None:
    ours = param([1.0], half)
    optimizer, scaler = adamw([("w", ours)]), halfstep.GradScaler()
    iterate(scaler, optimizer, [ours], [[0.5]])
    before, seen = snapshot(optimizer), []
    said = "NaN in w, which no scale mends" if bad is NAN else "infinite in w, so look at what grew"

    def train() -> None:
        for _ in range(400):
            iterate(scaler, optimizer, [ours], [[bad]])
            seen.append(scaler.get_scale())

    with pytest.warns(RuntimeWarning, match=f"^A step was skipped at the smallest scale, .*{said}") as warned:
        train()
    assert len(warned) == 1
    assert warned[0].filename.endswith("scaled.py")  # where update() was called
    assert seen == [max(2.0 ** (15 - k), 2.0**-14) for k in range(400)]
    assert_same(snapshot(optimizer), before)
    scaler.set_growth_interval(1)
    for k in range(20):
        iterate(scaler, optimizer, [ours], [[0.5]])
        assert not scaler.skipped(optimizer)
        assert scaler.get_scale() == 2.0 ** (-13 + k)
    assert optimizer.state[ours]["step"] == 21
    assert ours.item() < 1.0


def test_p12_the_scale_never_reaches_infinity(half: torch.dtype) -> None:
    ours = param([1.0], half)
    optimizer, scaler = adamw([ours]), halfstep.GradScaler(growth_interval=1, max_scale=2.0**18)
    tiny = 2.0**-20 if half is torch.float16 else 2.0**-40
    for _ in range(300):
        iterate(scaler, optimizer, [ours], [[tiny]])
    assert scaler.get_scale() == 2.0**18
    assert optimizer.state[ours]["step"] == 300
    assert scales(halfstep.GradScaler(growth_interval=1), "." * 300)[-1] == 2.0**24
    widest = halfstep.GradScaler(growth_interval=1, min_scale=2.0**-126, max_scale=2.0**126)
    assert max(scales(widest, "." * 300)) == 2.0**126
    with pytest.warns(RuntimeWarning, match="smallest scale"):
        assert min(scales(widest, "x" * 300)) == 2.0**-126
    iterate(widest, optimizer, [ours], [[0.5]])
    assert torch.isfinite(ours).all()


# ---------------------------------------------------------------------- the floor


def overflow_at_floor(scaler: halfstep.GradScaler, grads: list[Any], named: bool, clip: bool = False) -> None:
    params = [param([1.0, 1.0], torch.bfloat16) for _ in grads]
    optimizer = adamw([(f"layer.{k}", p) for k, p in enumerate(params)] if named else params)
    backward(scaler, params, grads)
    if clip:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(params, 1.0)
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("named", [False, True])
def test_p12_the_floor_names_params_and_tells_nan_from_infinity(named: bool, clip: bool) -> None:
    scaler = halfstep.GradScaler(init_scale=1.0, min_scale=1.0, at_floor="raise")
    names = "layer.1 layer.2 layer.3" if named else "param 1 of group 0,param 2 of group 0,param 3 of group 0"
    infinite, nan, both = names.split() if named else names.split(",")
    text = (
        f"A step was skipped at the smallest scale, 1: gradients are infinite in {infinite}, so look at what grew in "
        f"the model or lower min_scale; NaN in {nan}, {both}, which no scale mends: look for it in the data and the "
        "loss."
    )
    for _ in range(2):  # raised each time
        with pytest.raises(RuntimeError, match=f"^{re.escape(text)}$"):
            overflow_at_floor(scaler, [[1.0, 1.0], [1.0, INF], [NAN, 1.0], [NAN, INF]], named, clip)
    assert scaler.get_scale() == 1.0
    overflow_at_floor(scaler, [[1.0, 1.0]], named, clip)  # and the update was done


def test_the_floor_speaks_of_every_optimizer_and_shortens_a_long_list() -> None:
    scaler = halfstep.GradScaler(init_scale=1.0, min_scale=1.0, at_floor="raise")
    params = [param([1.0], torch.bfloat16) for _ in range(7)]
    first = adamw([(f"a{k}", p) for k, p in enumerate(params[:1])])
    second = torch.optim.SGD([(f"b{k}", p) for k, p in enumerate(params[1:])])
    backward(scaler, params, [[INF]] * 7)
    scaler.step(first)
    scaler.step(second)
    with pytest.raises(RuntimeError, match="infinite in a0, b0, b1, b2, b3 and 2 more, so look"):
        scaler.update()


@pytest.mark.parametrize("reach", ["init", "backoff", "load", "update"])
def test_the_floor_is_noticed_however_it_was_reached(reach: str) -> None:
    floor = 0.1  # which float32 rounds up
    scaler = halfstep.GradScaler(init_scale=floor if reach == "init" else 0.3, min_scale=floor, at_floor="raise")
    overflow = [[INF, 1.0]]
    if reach == "backoff":
        overflow_at_floor(scaler, overflow, False)
        overflow_at_floor(scaler, overflow, False)
    if reach == "load":
        scaler.load_state_dict({**scaler.state_dict(), "scale": floor})
    if reach == "update":
        overflow_at_floor(scaler, [[1.0, 1.0]], False)
        scaler.update(floor)
    with pytest.raises(RuntimeError, match=r"at the smallest scale, 0\.1"):
        overflow_at_floor(scaler, overflow, False)


def test_the_floor_is_not_told_before_it_is_reached() -> None:
    scaler = halfstep.GradScaler(init_scale=1.5, min_scale=1.0, hysteresis=2, at_floor="raise")
    for _ in range(2):
        overflow_at_floor(scaler, [[INF, 1.0]], False)
    with pytest.raises(RuntimeError, match="at the smallest scale, 1:"):
        overflow_at_floor(scaler, [[INF, 1.0]], False)


def test_a_scale_at_a_bound_that_float32_rounds_is_within_it() -> None:
    scaler = halfstep.GradScaler(init_scale=0.3, min_scale=0.1, max_scale=0.3)
    scales(scaler, ".")
    scaler.update(scaler.get_scale())
    halfstep.GradScaler(min_scale=0.1, init_scale=0.2, max_scale=0.3).load_state_dict(scaler.state_dict())


# ---------------------------------------------------------------------- a scale by hand


@pytest.mark.parametrize("new_scale", [1024.0, 1024, torch.tensor(1024.0), torch.tensor([1024.0])], ids=repr)
def test_update_sets_a_scale(new_scale: Any) -> None:
    scaler = halfstep.GradScaler()
    scaler.scale(torch.ones(()))
    scaler.update(new_scale)
    assert scaler.get_scale() == 1024.0
    if isinstance(new_scale, torch.Tensor):
        new_scale.fill_(1.0)
        assert scaler.get_scale() == 1024.0


@pytest.mark.parametrize("new_scale", [0.0, -1.0, INF, NAN, 2.0**25, 2.0**-15, torch.tensor(INF)], ids=str)
def test_update_refuses_a_scale_out_of_bounds(new_scale: Any) -> None:
    scaler = halfstep.GradScaler()
    scaler.scale(torch.ones(()))
    text = f"new_scale={float(new_scale)!r}: must lie between min_scale=6.10352e-05 and max_scale=1.67772e+07, which"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
        scaler.update(new_scale)
    assert scaler.get_scale() == 2.0**16


@pytest.mark.parametrize("new_scale", [torch.ones(2), torch.ones(1, requires_grad=True)])
def test_update_refuses_what_is_no_plain_number(new_scale: torch.Tensor) -> None:
    scaler = halfstep.GradScaler()
    scaler.scale(torch.ones(()))
    with pytest.raises(
        AssertionError, match=r"^new_scale should be a float or a 1-element tensor with requires_grad=False\.$"
    ):
        scaler.update(new_scale)


# ---------------------------------------------------------------------- float16 outputs


def half_loss(p: torch.Tensor, grad: float) -> torch.Tensor:
    """A loss of p's own dtype, with this gradient of each element."""
    return (p * torch.tensor(grad, dtype=p.dtype)).sum()


@pytest.mark.parametrize("form", [lambda x: x, lambda x: [x], lambda x: (y for y in [torch.ones(()), x])])
def test_p13_a_float16_loss_loses_no_step(form: Any) -> None:
    ours = param([1.0, 1.0], torch.float16)
    optimizer, scaler = adamw([ours]), halfstep.GradScaler(growth_interval=1)
    for k in range(4):
        scaled = scaler.scale(form(half_loss(ours, 0.5)))
        (scaled if isinstance(scaled, torch.Tensor) else scaled[-1]).backward()
        scaler.step(optimizer)
        assert not scaler.skipped(optimizer)
        scaler.update()
        assert scaler.get_scale() == 2.0**15
        assert optimizer.state[ours]["step"] == k + 1
        optimizer.zero_grad()
    assert torch.isfinite(ours).all()


def test_p13_the_scale_is_held_only_while_an_output_is_float16() -> None:
    scaler = halfstep.GradScaler(growth_interval=1)
    ours = param([1.0], torch.float16)
    optimizer = adamw([ours])
    for loss, expected in ((half_loss(ours, 0.5), 2.0**15), (half_loss(ours.float(), 0.25), 2.0**16)):
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == expected
    assert scales(halfstep.GradScaler(growth_interval=1), "..") == [2.0**17, 2.0**18]
    bfloat16 = halfstep.GradScaler()
    bfloat16.scale(torch.ones((), dtype=torch.bfloat16))
    assert bfloat16.get_scale() == 2.0**16


def test_p13_several_losses_of_one_iteration_share_a_scale() -> None:
    """A float16 loss after a float32 one meets a scale that is taken: one step at most is lost, none is wrong."""
    ours, reference = param([1.0], torch.float16), param([1.0], torch.float32)
    optimizer, single, scaler = adamw([ours]), adamw([reference]), halfstep.GradScaler(growth_interval=1)
    skipped = []
    for _ in range(5):
        first = scaler.scale(half_loss(ours.float(), 0.25))
        second = scaler.scale(half_loss(ours, 0.25))
        first.backward()  # after the second scale(): nothing that it saved may have changed
        second.backward()
        scaler.step(optimizer)
        scaler.update()
        skipped.append(scaler.skipped(optimizer))
        optimizer.zero_grad()
        if not skipped[-1]:
            reference.grad = torch.tensor([0.5])
            single.step()
    assert skipped == [True, False, False, False, False]
    assert scaler.get_scale() == 2.0**15
    assert torch.equal(optimizer.float32_weight(ours), reference.detach())


def test_p13_a_float16_loss_first_or_in_accumulation() -> None:
    ours = param([1.0], torch.float16)
    optimizer, scaler = adamw([ours]), halfstep.GradScaler()
    for loss in (half_loss(ours, 0.25), half_loss(ours.float(), 0.25), half_loss(ours, 0.25)):
        scaler.scale(loss).backward()
    assert ours.grad.item() == 0.75 * 2.0**15
    scaler.step(optimizer)
    assert not scaler.skipped(optimizer)


def test_a_floor_above_float16s_cap_stays_the_floor() -> None:
    scaler = halfstep.GradScaler(min_scale=2.0**17, init_scale=2.0**18)
    scaler.scale(torch.ones((), dtype=torch.float16))
    assert scaler.get_scale() == 2.0**17
