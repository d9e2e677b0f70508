"""Whom a step through the scaler tells, who may read gradients on its way, and what an error in between leaves."""

import copy
from typing import Any

import pytest
import torch
from torch.nn import Parameter
from torch.optim.lr_scheduler import StepLR
from torch.optim.optimizer import register_optimizer_step_pre_hook

import halfstep
from scaled import WAYS, Wrapper, adamw, assert_same, backward, iterate, param, snapshot, step

INF = float("inf")


# ---------------------------------------------------------------------- whom it calls


@pytest.mark.parametrize("way", WAYS)
def test_the_step_is_called_once_through_the_instance_and_never_when_skipped(half: torch.dtype, way: str) -> None:
    ours = param([1.0], half)
    optimizer, scaler, calls = adamw([ours]), halfstep.GradScaler(), []
    original = optimizer.step

    def counted(*args: Any, **kwargs: Any) -> str:
        calls.append((args, kwargs))
        original(*args, **kwargs)
        return "returned"

    optimizer.step = counted  # pyright: ignore[reportAttributeAccessIssue]
    backward(scaler, [ours], [[0.5]])
    assert step(scaler, optimizer, way) == "returned"
    scaler.update()
    optimizer.zero_grad()
    backward(scaler, [ours], [[INF]])
    assert step(scaler, optimizer, way) is None
    assert calls == [((), {})]
    assert "_inverse_scale" not in vars(optimizer)
    assert len(scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]) == 1  # which wrappers read


@pytest.mark.parametrize("way", WAYS)
def test_p31_schedulers_see_the_steps(half: torch.dtype, way: str) -> None:
    ours = param([1.0], half)
    optimizer, scaler = adamw([ours]), halfstep.GradScaler()
    schedule = StepLR(optimizer, 1, gamma=0.5)
    for _ in range(3):  # without a step seen before it, schedule.step() warns
        backward(scaler, [ours], [[0.5]])
        step(scaler, optimizer, way)
        scaler.update()
        schedule.step()
        optimizer.zero_grad()
    assert optimizer.param_groups[0]["lr"] == 0.01 / 8


@pytest.mark.parametrize("whose", ["instance", "global", "subclass", "wrapper"])
def test_p31_who_reads_gradients_before_the_step_finds_them_unscaled(half: torch.dtype, whose: str) -> None:
    seen = []

    def read(optimizer: Any) -> None:
        for group in optimizer.param_groups:
            seen.extend(p.grad.clone() for p in group["params"])

    class Reading(halfstep.AdamW):
        def step(self, closure: Any = None) -> Any:
            read(self)
            return super().step(closure)

    class ReadingWrapper(Wrapper):
        def step(self, *args: Any) -> Any:
            read(self)
            return super().step(*args)

    ours, plain = param([1.0], half), param([1.0], half)
    optimizer: Any = (Reading if whose == "subclass" else halfstep.AdamW)([ours], lr=0.01)
    through: Any = ReadingWrapper(optimizer) if whose == "wrapper" else optimizer
    scaler = halfstep.GradScaler()
    hook = None
    if whose == "instance":
        hook = optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: read(optimizer))
    if whose == "global":
        hook = register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: read(optimizer))
    backward(scaler, [ours], [[2.0**-12]])
    try:
        scaler.step(through)
    finally:
        if hook:
            hook.remove()
    assert_same(seen, [torch.tensor([2.0**-12])])
    assert ours.grad is None
    scaler.update()
    reference = adamw([plain])
    iterate(scaler, reference, [plain], [[2.0**-12]])
    assert torch.equal(optimizer.float32_weight(ours), reference.float32_weight(plain))


def test_p31_a_hook_may_change_what_is_stepped(half: torch.dtype) -> None:
    ours, reference = param([1.0], half), param([1.0], torch.float32)
    optimizer, single = adamw([ours]), adamw([reference])

    def clip(*_: Any) -> None:
        torch.nn.utils.clip_grad_norm_([ours], 0.5)

    optimizer.register_step_pre_hook(clip)
    scaler = halfstep.GradScaler(init_scale=16.0)
    for g in (4.0, 0.25):
        iterate(scaler, optimizer, [ours], [[g]])
        reference.grad = torch.tensor([g])
        torch.nn.utils.clip_grad_norm_([reference], 0.5)
        single.step()
    assert torch.equal(optimizer.float32_weight(ours), reference.detach())


@pytest.mark.parametrize("unscale", ["inner", "wrapper", "neither"])
@pytest.mark.parametrize("through", ["inner", "wrapper"])
def test_p14_a_wrapper_and_what_it_wraps_are_one_optimizer(half: torch.dtype, unscale: str, through: str) -> None:
    ours, plain = param([1.0], half), param([1.0], half)
    inner, scaler = adamw([ours]), halfstep.GradScaler()
    wrapper: Any = Wrapper(inner)
    either: dict[str, Any] = {"inner": inner, "wrapper": wrapper}
    reference = adamw([plain])
    for grad in (2.0**-10, INF, 2.0**-12):
        inner.zero_grad()
        backward(scaler, [ours], [[grad]])
        if unscale != "neither":
            scaler.unscale_(either[unscale])
            assert grad == INF or ours.grad.item() == grad
        scaler.step(either[through])
        for view in either.values():
            assert scaler.skipped(view) is (grad == INF)
            with pytest.raises(RuntimeError, match=r"step\(\) has already been called"):
                scaler.step(view)
        scaler.update()
        assert scaler.skipped(wrapper) is (grad == INF)
        iterate(halfstep.GradScaler(), reference, [plain], [[grad]])
    assert wrapper.calls == (2 if through == "wrapper" else 0)
    assert scaler.get_scale() == 2.0**15
    assert torch.equal(inner.float32_weight(ours), reference.float32_weight(plain))


# ---------------------------------------------------------------------- errors in between


@pytest.mark.parametrize("where", ["straight", "unscaled", "hooked"])
def test_p11_a_step_that_raised_can_be_tried_again(half: torch.dtype, where: str) -> None:
    ours, plain = param([1.0], half), param([1.0], half)
    optimizer, scaler = adamw([ours]), halfstep.GradScaler()
    reference = adamw([plain])
    for p, o in ((ours, optimizer), (plain, reference)):
        iterate(halfstep.GradScaler(), o, [p], [[0.5]])
    before = snapshot(optimizer)
    original = type(optimizer).step

    def broken(*_: Any) -> None:
        raise KeyboardInterrupt("stopped")

    if where == "hooked":
        hook = optimizer.register_step_pre_hook(broken)
    else:
        optimizer.step = broken  # pyright: ignore[reportAttributeAccessIssue]
    optimizer.zero_grad()
    backward(scaler, [ours], [[0.25]])
    with pytest.raises(KeyboardInterrupt, match="stopped"):
        step(scaler, optimizer, where)
    assert_same(snapshot(optimizer), before)
    assert "_inverse_scale" not in vars(optimizer)
    assert not scaler.skipped(optimizer)
    if where == "hooked":
        hook.remove()
    else:
        del optimizer.step
    assert type(optimizer).step is original
    scaler.step(optimizer)
    scaler.update()
    assert ours.grad_dtype is half
    iterate(halfstep.GradScaler(), reference, [plain], [[0.25]])
    assert_same(snapshot(optimizer), snapshot(reference))


@pytest.mark.parametrize("way", WAYS)
def test_p26_a_gradient_that_no_step_takes_is_refused_before_anything_changes(half: torch.dtype, way: str) -> None:
    table, dense = Parameter(torch.ones(4, 2).to(half)), param([1.0], half)
    optimizer, scaler = adamw([("dense", dense), ("table", table)]), halfstep.GradScaler()
    loss = torch.nn.functional.embedding(torch.tensor([1, 1]), table, sparse=True).sum().float() + dense.float().sum()
    scaler.scale(loss / 4096).backward()
    grad = dense.grad.clone()
    with pytest.raises(TypeError, match="the gradient of table is sparse"):
        step(scaler, optimizer, way)
    assert torch.equal(dense.grad, grad)
    assert not optimizer.state
    table.grad = None
    step(scaler, optimizer, way)
    scaler.update()
    assert optimizer.state[dense]["step"] == 1


@pytest.mark.parametrize("anew", [False, True])
def test_widening_that_fails_half_way_is_made_good(
    half: torch.dtype, anew: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = [param([1.0], half), param([1.0], half)]
    optimizer, scaler = adamw(params), halfstep.GradScaler()
    backward(scaler, params, [[0.5], [0.5]])
    original, calls = torch.Tensor.float, []

    def failing(tensor: torch.Tensor) -> torch.Tensor:
        calls.append(tensor)
        if len(calls) == 3:  # the inverse scale, the first gradient, the second
            raise MemoryError("no memory for it")
        return original(tensor)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "float", failing)
        with pytest.raises(MemoryError, match="no memory for it"):
            scaler.unscale_(optimizer)
    assert all(p.grad is not None for p in params)
    if anew:
        optimizer.zero_grad()
        backward(scaler, params, [[0.5], [0.5]])
    scaler.unscale_(optimizer)
    assert [p.grad.item() for p in params] == [0.5, 0.5]
    scaler.step(optimizer)
    assert [p.grad_dtype for p in params] == [half, half]


# ---------------------------------------------------------------------- compiled


# Dynamo itself looks at the .grad of what a resumed function holds
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("way", WAYS)
def test_p31_inside_a_compiled_training_function_the_same_bits(half: torch.dtype, backend: str, way: str) -> None:
    x = torch.randn(4, 8).to(half)
    start = torch.nn.Linear(8, 8).to(half)
    results, traced = [], set()
    for compiled in (False, True):
        model = copy.deepcopy(start)
        optimizer, scaler = adamw(model.parameters(), backend=backend), halfstep.GradScaler(growth_interval=2)

        def train(x: torch.Tensor, model: Any, optimizer: Any, scaler: Any) -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(x).float() ** 2).mean()
            scaler.scale(loss).backward()
            step(scaler, optimizer, way)
            scaler.update()
            return loss

        def trace(module: Any, _: Any) -> Any:
            traced.update(str(node.target) for node in module.graph.nodes)
            return module.forward

        function = torch.compile(train, backend=trace) if compiled else train
        for k in range(5):
            function(x * (INF if k == 2 else 1), model, optimizer, scaler)
        assert scaler.get_scale() == 2.0**17
        results.append(snapshot(optimizer))
    assert_same(*results)
    assert traced  # the forward, and nothing of the scaler's
    assert not any("_amp_" in name for name in traced)


@pytest.mark.parametrize("way", WAYS)
def test_what_wraps_a_step_may_change_the_rate_first(half: torch.dtype, way: str) -> None:
    # warm-ups are written so: the step takes what the group holds when it begins
    taken = []
    for early in (False, True):
        ours = param([1.0, -2.0], half)
        optimizer, scaler = adamw([ours]), halfstep.GradScaler(init_scale=4.0)
        (group,), original = optimizer.param_groups, optimizer.step

        def warmed(group: Any = group, original: Any = original) -> Any:
            group["lr"] = 0.125
            return original()

        if early:
            group["lr"] = 0.125
        else:
            optimizer.step = warmed  # pyright: ignore[reportAttributeAccessIssue]
        backward(scaler, [ours], [[0.5, 3.0]])
        step(scaler, optimizer, way)
        taken.append(ours.detach())
    assert_same(taken[:1], taken[1:])
