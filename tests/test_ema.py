"""The average of the float32 weights: what it is, that nothing else changes by it, and that it is saved whole."""

import copy
import itertools
import pickle
import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

import halfstep
from halfstep import backends
from halfstep.contracts import Job, Plan
from halfstep.ema import EMA
from halfstep.engine import HalfOptimizer
from halfstep.formats import FLOAT32, GRADS, WEIGHTS
from halfstep.rules.average import AVERAGE
from harness import CPU, assert_same, load, store
from harness import run as execute
from test_written import WRITES
from training import OPTIMIZERS, Snapshot, assert_alike, drive, gradients, make, members, params, through_file

INF, NAN = float("inf"), float("nan")
SHAPES = ((5, 3), (7,), (), (2, 3, 4), (0,), (64, 65))
TIES = {torch.bfloat16: 1 + 2.0**-8, torch.float16: 1 + 2.0**-11}


def over(dtype: torch.dtype) -> list[Parameter]:
    """Params of every shape, one transposed and one a view with gaps among them."""
    square = torch.linspace(-2, 2, 54).to(dtype)
    transposed, gaps = Parameter(square[:35].view(5, 7).t()), Parameter(square.clone().view(6, 9)[:, ::2])
    assert not transposed.is_contiguous()
    assert not gaps.is_contiguous()
    return [*params(dtype, SHAPES), transposed, gaps]


def run(half: torch.dtype, backend: str, weights: str = "split16", **options: Any) -> tuple[HalfOptimizer, EMA]:
    """An optimizer over such params and their averages."""
    optimizer = make("SGD", over(half), **{"lr": 1e-2, "weights": weights, "backend": backend, **options})
    return optimizer, EMA(optimizer, 0.9)


def trained(optimizer: HalfOptimizer, ema: EMA, numbers: Iterable[int]) -> None:
    for number in numbers:
        drive(optimizer, [number])
        ema.update()


def averages(optimizer: HalfOptimizer, ema: EMA) -> list[Tensor]:
    return [ema.float32_weight(param) for param in members(optimizer)]


def weights_of(optimizer: HalfOptimizer) -> list[Tensor]:
    return [optimizer.float32_weight(param) for param in members(optimizer)]


def moved(average: Tensor, weight: Tensor, decay: float) -> Tensor:
    """The average a step on, as anyone would write it."""
    return average + (weight - average) * torch.tensor(1 - decay, dtype=torch.float32)


def bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).clone()


class Bytes:
    """Every byte of an optimizer's params and states, and where they lie."""

    def __init__(self, optimizer: HalfOptimizer) -> None:
        self.optimizer = optimizer
        self.before = self._now()

    def _now(self) -> list[tuple[Tensor, int, Any]]:
        tensors = members(self.optimizer)
        for state in self.optimizer.state.values():
            tensors += [part for part in state.values() if isinstance(part, Tensor)]
        return [(bytes_of(tensor), tensor.data_ptr(), tensor.stride()) for tensor in tensors]

    def check(self) -> None:
        for (now, *place), (before, *placed) in zip(self._now(), self.before, strict=True):
            assert torch.equal(now, before)
            assert place == placed


# ---------------------------------------------------------------------- the average


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_it_averages_the_float32_weights(weights: str, dtype: torch.dtype, backend: str) -> None:
    optimizer, ema = run(dtype, backend, weights)
    want = weights_of(optimizer)
    for got, start in zip(averages(optimizer, ema), want, strict=True):
        assert_same(got, start)
    for number in range(4):
        trained(optimizer, ema, [number])
        want = [moved(a, weight, 0.9) for a, weight in zip(want, weights_of(optimizer), strict=True)]
        for got, average in zip(averages(optimizer, ema), want, strict=True):
            assert_same(got, average)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_whatever_the_optimizer(name: str, half: torch.dtype) -> None:
    optimizer = make(name, params(half), backend="eager")
    ema = EMA(optimizer, 0.5)
    want = weights_of(optimizer)
    trained(optimizer, ema, [0])
    for got, a, weight in zip(averages(optimizer, ema), want, weights_of(optimizer), strict=True):
        assert_same(got, moved(a, weight, 0.5))


def test_it_moves_where_an_average_of_16_bits_stands_still(backend: str) -> None:
    param = Parameter(torch.ones(10, 10, dtype=torch.bfloat16))
    optimizer = make("SGD", [param], lr=0.5, backend=backend)
    ema, model = EMA(optimizer), nn.ParameterList([param])
    torchs = AveragedModel(model, avg_fn=get_ema_avg_fn(0.999))
    torchs.update_parameters(model)  # its first only copies
    for number in range(200):
        param.grad = torch.full_like(param, 0.0 if number else -1.0)
        optimizer.step()
        ema.update()
        torchs.update_parameters(model)
    assert_same(param.detach(), torch.full((10, 10), 1.5, dtype=torch.bfloat16))
    (theirs,) = torchs.module.parameters()
    assert_same(theirs.detach(), torch.ones(10, 10, dtype=torch.bfloat16))
    want = torch.full((10, 10), 1.5 - 0.5 * 0.999**200)
    # three operations an update round numbers under 2, by 2**-24 at most each: 600 * 2**-24 < 2**-14
    torch.testing.assert_close(ema.float32_weight(param), want, rtol=0, atol=2.0**-14)


def test_params_alike_are_averaged_in_one_call(half: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    compiled = backends.kernel

    def kernel(plan: Any, requested: str) -> Any:
        inner = compiled(plan, requested)
        if plan.rule is not AVERAGE:
            return inner
        return lambda jobs: (calls.append(len(jobs)), inner(jobs))[1]

    monkeypatch.setattr(backends, "kernel", kernel)
    optimizer = make("AdamW", [*params(half), *params(torch.float32)], backend="eager")
    ema = EMA(optimizer)
    trained(optimizer, ema, range(2))
    assert calls == [4, 4] * 2


@pytest.mark.parametrize("weights", WEIGHTS)
def test_nothing_but_the_average_is_written(weights: str, half: torch.dtype, backend: str) -> None:
    written = [*params(half, [(40,)] * len(WRITES)), *(Parameter(torch.randn(40, 2).to(half)[:, 0]) for _ in WRITES)]
    optimizer = make("SGD", [*written, *over(half)], lr=1e-2, weights=weights, backend=backend)
    ema = EMA(optimizer, 0.9)
    trained(optimizer, ema, range(2))
    drive(optimizer, [2])
    for state in optimizer.state.values():
        if "remainder" in state:
            state["remainder"].fill_(-128)
    with torch.no_grad():  # from outside, beside what is kept of another weight
        for write, param in zip([*WRITES.values()] * 2, written, strict=True):
            write(param)
    before, want = Bytes(optimizer), [*zip(averages(optimizer, ema), weights_of(optimizer), strict=True)]
    ema.update()
    before.check()
    for got, (average, weight) in zip(averages(optimizer, ema), want, strict=True):
        assert_same(got, moved(average, weight, 0.9))


def test_either_neighbour_of_a_tie_stays(half: torch.dtype, backend: str) -> None:
    param = Parameter(torch.ones(2, 40, dtype=half).t())
    optimizer = make("SGD", [param], weights="master32", backend=backend)
    ema = EMA(optimizer, 0.5)
    drive(optimizer, range(1))
    optimizer.state[param]["master"].fill_(TIES[half])
    with torch.no_grad():
        param[:, 0], param[:, 1] = 1.0, 1 + torch.finfo(half).eps
    before = Bytes(optimizer)
    ema.update()
    before.check()
    assert_same(ema.float32_weight(param), torch.full((40, 2), (1.0 + TIES[half]) / 2))


@pytest.mark.parametrize("weights", WEIGHTS)
def test_what_lies_past_the_largest_is_no_event(weights: str, half: torch.dtype, backend: str) -> None:
    largest = torch.finfo(torch.float32).max
    past = torch.full((40,), 65530.0 if half is torch.float16 else largest)
    plan = Plan(AVERAGE, WEIGHTS[weights][half], (FLOAT32,), GRADS[half], CPU)
    parts, average = store(plan.weight, past, "eager"), torch.full((40,), largest)
    want = moved(average, load(plan.weight, parts, "eager"), 1 - 2.0**-10)
    param, *beside = parts
    assert execute(plan, [Job(param, param, (*beside, average), (1.0, 2.0**-10))], backend) == [0]
    assert_same(average, want)


# ---------------------------------------------------------------------- when it moves


def test_a_skipped_step_is_left_out(half: torch.dtype, backend: str) -> None:
    optimizer, ema = run(half, backend)
    scaler = halfstep.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))
    want = averages(optimizer, ema)
    for number in range(6):
        gradients(optimizer, number)
        skipped = number in (0, 3)
        if skipped:
            members(optimizer)[1].grad[2] = INF  # type: ignore[index]
        if backend == "eager":  # the way through float32 gradients
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        assert scaler.skipped(optimizer) == skipped
        scaler.update()
        optimizer.zero_grad()
        ema.update()
        if not skipped:
            want = [moved(a, weight, 0.9) for a, weight in zip(want, weights_of(optimizer), strict=True)]
        for got, average in zip(averages(optimizer, ema), want, strict=True):
            assert_same(got, average)


def test_it_moves_once_a_step(half: torch.dtype, backend: str) -> None:
    optimizer, ema = run(half, backend)
    start = averages(optimizer, ema)
    ema.update()
    for got, average in zip(averages(optimizer, ema), start, strict=True):
        assert_same(got, average)
    trained(optimizer, ema, range(3))
    want = averages(optimizer, ema)
    ema.update()
    for got, average in zip(averages(optimizer, ema), want, strict=True):
        assert_same(got, average)
    # two steps are one move, by the weight as it is now
    drive(optimizer, [3, 4])
    ema.update()
    for got, average, weight in zip(averages(optimizer, ema), want, weights_of(optimizer), strict=True):
        assert_same(got, moved(average, weight, 0.9))


def test_each_param_by_its_own_steps(half: torch.dtype, backend: str) -> None:
    one, frozen = params(half, [(6, 5)] * 2)
    optimizer = make("SGD", [one, frozen], backend=backend, lr=0.1)
    ema = EMA(optimizer, 0.5)
    for number in range(4):
        gradients(optimizer, number)
        if number < 3:
            frozen.grad = None
        before = ema.float32_weight(one), ema.float32_weight(frozen)
        with torch.no_grad():
            frozen += 1  # from outside; no step has seen it
        optimizer.step()
        ema.update()
        assert_same(ema.float32_weight(one), moved(before[0], optimizer.float32_weight(one), 0.5))
        still = before[1] if number < 3 else moved(before[1], optimizer.float32_weight(frozen), 0.5)
        assert_same(ema.float32_weight(frozen), still)


def test_a_step_that_only_looks_for_states_is_none(half: torch.dtype, backend: str) -> None:
    optimizer, ema = run(half, backend)
    want = averages(optimizer, ema)
    for param in members(optimizer):
        param.grad = torch.zeros_like(param)
    rate, optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"], 0.0
    optimizer.step()
    optimizer.param_groups[0]["lr"] = rate
    assert all(state["step"] == 0 for state in optimizer.state.values())
    with torch.no_grad():
        members(optimizer)[0].add_(1)
    ema.update()
    for got, average in zip(averages(optimizer, ema), want, strict=True):
        assert_same(got, average)


def test_it_begins_at_any_step(half: torch.dtype, backend: str) -> None:
    optimizer, _ = run(half, backend)
    drive(optimizer, range(2))
    ema = EMA(optimizer, 0.5)
    want = weights_of(optimizer)
    with torch.no_grad():
        members(optimizer)[0].add_(1)
    ema.update()
    for got, average in zip(averages(optimizer, ema), want, strict=True):
        assert_same(got, average)
    assert {entry["step"] for entry in ema.state_dict()["state"].values()} == {2}


def test_a_param_that_joins_begins_as_it_is(half: torch.dtype, backend: str) -> None:
    first, late = params(half, [(6, 5)] * 2)
    optimizer = make("SGD", [first], backend=backend, lr=0.1)
    ema = EMA(optimizer, 0.5)
    trained(optimizer, ema, range(2))
    optimizer.add_param_group({"params": [late]})
    drive(optimizer, [2])
    ema.update()
    want = optimizer.float32_weight(late)
    assert_same(ema.float32_weight(late), want)
    trained(optimizer, ema, [3])
    assert_same(ema.float32_weight(late), moved(want, optimizer.float32_weight(late), 0.5))


# ---------------------------------------------------------------------- swap


@pytest.mark.parametrize("weights", ["split16", "split8", "master32", "rounded"])
def test_swap_gives_the_averages_and_takes_them_back(weights: str, half: torch.dtype, backend: str) -> None:
    optimizer, ema = run(half, backend, weights)
    trained(optimizer, ema, range(3))
    never = params(half, [(4, 4)])[0]
    optimizer.add_param_group({"params": [never]})
    with torch.no_grad():
        members(optimizer)[0][0] = NAN
        members(optimizer)[-1][1] = -INF
        # a NaN that no rounding leaves
        members(optimizer)[1].view(torch.int16)[0] = -1
    drive(optimizer, [3])
    before, want = Bytes(optimizer), averages(optimizer, ema)
    with ema.swap():
        for param, average in zip(members(optimizer), want, strict=True):
            # none of these is past the dtype's largest
            assert_same(param.detach(), average.to(half))
        places = [(param.data_ptr(), param.stride()) for param in members(optimizer)]
    before.check()
    assert places == [(param.data_ptr(), param.stride()) for param in members(optimizer)]
    for got, average in zip(averages(optimizer, ema), want, strict=True):
        assert_same(got, average)


def test_swap_leaves_alone_what_was_never_stepped(half: torch.dtype, backend: str) -> None:
    optimizer, ema = run(half, backend)
    before = Bytes(optimizer)
    with ema.swap():
        before.check()
    before.check()


def test_swap_changes_nothing_of_the_run(half: torch.dtype, backend: str) -> None:
    runs = [run(half, backend, "split8", seed=3) for _ in range(2)]
    for number in range(4):
        for optimizer, ema in runs:
            trained(optimizer, ema, [number])
        with runs[0][1].swap():
            pass
    assert_alike(runs[0][0], runs[1][0])
    for one, other in zip(averages(*runs[0]), averages(*runs[1]), strict=True):
        assert_same(one, other)


def test_swap_saturates(half: torch.dtype, backend: str) -> None:
    largest = torch.finfo(half).max
    param = Parameter(torch.full((4,), largest, dtype=half))
    optimizer = make("SGD", [param], backend=backend)
    ema = EMA(optimizer)
    state = ema.state_dict()
    past = torch.tensor([largest * 1.00390625, -largest * 1.00390625, INF, -largest])  # 65759.9375 in float16
    assert past[0] > largest
    state["state"][0]["average"] = past
    ema.load_state_dict(state)
    with ema.swap():
        assert_same(param.detach(), torch.tensor([largest, -largest, INF, -largest]).to(half))


def test_swap_ends_with_an_exception_as_well(half: torch.dtype, backend: str) -> None:
    optimizer, ema = run(half, backend)
    trained(optimizer, ema, range(3))
    before = Bytes(optimizer)

    def interrupted() -> None:
        with ema.swap(), torch.no_grad():
            for param in members(optimizer):
                param.fill_(7)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    before.check()
    trained(optimizer, ema, [3])


def test_swap_is_for_one_at_a_time(half: torch.dtype) -> None:
    optimizer, ema = run(half, "eager")
    other = EMA(optimizer, 0.5)
    trained(optimizer, ema, range(2))
    other.update()
    drive(optimizer, [2])
    before = Bytes(optimizer)
    gradients(optimizer, 3)
    with ema.swap():
        inside = Bytes(optimizer)
        with pytest.raises(
            RuntimeError, match=r"^the optimizer cannot step within EMA.swap\(\), .*: leave its `with`$"
        ):
            optimizer.step()
        with pytest.raises(RuntimeError, match=r"^the optimizer cannot load a state within EMA.swap\(\), .*its `with`"):
            optimizer.load_state_dict(optimizer.state_dict())
        for average in (ema, other):
            with pytest.raises(
                RuntimeError, match=r"^the averages cannot be updated within EMA.swap\(\), .*its `with`"
            ):
                average.update()
            with pytest.raises(RuntimeError, match=r"^the params cannot be swapped within EMA.swap\(\), .*its `with`"):
                average.swap().__enter__()
        with pytest.raises(RuntimeError, match=r"^no average can begin within EMA.swap\(\), .*its `with`"):
            EMA(optimizer)
        inside.check()
    before.check()
    optimizer.load_state_dict(optimizer.state_dict())
    ema.update()
    optimizer.step()
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_load_state_dict_pre_hooks


def test_a_scalers_step_is_refused_too(half: torch.dtype) -> None:
    optimizer, ema = run(half, "eager")
    scaler = halfstep.GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    gradients(optimizer, 0)
    with ema.swap(), pytest.raises(RuntimeError, match="cannot step within EMA"):
        scaler.step(optimizer)
    assert not optimizer.state


def test_swap_where_params_share_memory(half: torch.dtype, backend: str) -> None:
    flat = torch.randn(50).to(half)
    # a flat buffer's, and two that overlap
    views = [Parameter(flat[:20].view(4, 5)), Parameter(flat[20:40]), Parameter(flat[30:50])]
    optimizer = make("SGD", views, backend=backend, lr=0.1)
    ema = EMA(optimizer, 0.5)
    trained(optimizer, ema, range(3))
    before = bytes_of(flat)
    with ema.swap():
        assert not torch.equal(bytes_of(flat), before)
        for view in (views[0], views[2]):
            assert_same(view.detach(), ema.float32_weight(view).to(half))
    assert torch.equal(bytes_of(flat), before)


def test_swap_in_an_evaluation(half: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1)).to(half)
    optimizer = make("SGD", model.parameters(), lr=0.1)
    ema = EMA(optimizer, 0.5)
    trained(optimizer, ema, range(3))
    inputs = torch.randn(3, 4).to(half)
    averaged = copy.deepcopy(model)
    for param, own in zip(averaged.parameters(), model.parameters(), strict=True):
        param.data.copy_(ema.float32_weight(own))
    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad):
        before = Bytes(optimizer)
        with mode(), ema.swap():
            assert_same(model(inputs).detach(), averaged(inputs).detach())
        with ema.swap(), mode():
            saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        before.check()
        for name, tensor in averaged.state_dict().items():
            assert_same(saved[name], tensor)
    # and training goes on
    model(inputs).float().sum().backward()
    optimizer.step()


def test_a_graph_from_before_a_swap_is_refused_inside(half: torch.dtype) -> None:
    param = params(half, [(3,)])[0]
    optimizer = make("AdamW", [param])
    ema = EMA(optimizer, 0.5)
    trained(optimizer, ema, range(2))
    loss = (param * param).sum()
    with ema.swap(), pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# ---------------------------------------------------------------------- state


class Run:
    """A model, its optimizer, its scaler and its averages."""

    def __init__(self, start: int, half: torch.dtype, decay: float, **options: Any) -> None:
        torch.manual_seed(start)
        self.model = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 70), nn.Tanh(), nn.Linear(70, 1)).to(half)
        self.optimizer = make("SGD", self.model.parameters(), lr=1e-2, **options)
        self.scaler, self.half = halfstep.GradScaler("cpu", init_scale=2.0**13), half
        self.ema = EMA(self.optimizer, decay)
        self.parts: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer, "ema": self.ema}
        self.parts["scaler"] = self.scaler

    def train(self, numbers: range) -> None:
        for number in numbers:
            generator = torch.Generator().manual_seed(number)
            inputs, targets = torch.randn(8, 6, generator=generator), torch.randn(8, 1, generator=generator)
            loss = (self.model(inputs.to(self.half)).float() - targets).square().mean()
            self.scaler.scale(loss * (INF if number % 5 == 2 else 1.0)).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
            self.ema.update()


def assert_averages(a: EMA, b: EMA) -> None:
    one, other = a.state_dict(), b.state_dict()
    assert one["decay"] == other["decay"]
    assert list(one["state"]) == list(other["state"])
    for mine, theirs in zip(one["state"].values(), other["state"].values(), strict=True):
        assert_same(mine["average"], theirs["average"])
        assert mine["step"] == theirs["step"]


@pytest.mark.parametrize("weights", WEIGHTS)
def test_six_and_six_steps_are_twelve(weights: str, half: torch.dtype, backend: str) -> None:
    options = {"weights": weights, "backend": backend, "seed": 7}
    whole, first = (Run(0, half, 0.9, **options) for _ in range(2))
    whole.train(range(12))
    first.train(range(6))
    second = Run(1, half, 0.5, **options)
    second.train(range(2))
    saved = through_file({name: part.state_dict() for name, part in first.parts.items()})
    for name, part in second.parts.items():
        part.load_state_dict(saved[name])
    assert_averages(second.ema, first.ema)
    second.ema.update()  # no step has been since
    assert_averages(second.ema, first.ema)
    second.train(range(6, 12))
    assert_alike(second.optimizer, whole.optimizer)
    assert_averages(second.ema, whole.ema)
    assert second.ema.state_dict()["decay"] == 0.9


def test_a_state_says_what_it_is(half: torch.dtype) -> None:
    one, two, three = params(half, [(2, 3), (4,), ()])
    optimizer = make("AdamW", [{"params": [one, two]}, {"params": [three]}])
    ema = EMA(optimizer)
    one.grad = torch.ones_like(one)
    optimizer.step()
    ema.update()
    state = ema.state_dict()
    assert state.keys() == {"decay", "state"}
    assert state["decay"] == 0.999
    assert [entry["step"] for entry in state["state"].values()] == [1, 0, 0]
    for place, param in enumerate((one, two, three)):
        assert state["state"][place].keys() == {"average", "step"}
        assert_same(state["state"][place]["average"], ema.float32_weight(param))


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
def test_a_param_named_twice_is_averaged_once(half: torch.dtype, backend: str) -> None:
    one, two = params(half, [(2, 3), (4,)])
    optimizer = make("SGD", [one, one, two], backend=backend)
    ema = EMA(optimizer, 0.5)
    before = ema.float32_weight(one)
    trained(optimizer, ema, range(1))
    assert_same(ema.float32_weight(one), moved(before, optimizer.float32_weight(one), 0.5))
    assert list(ema.state_dict()["state"]) == [1, 2] == [*optimizer.state_dict()["state"]]
    with ema.swap():
        pass
    ema.load_state_dict(through_file(ema.state_dict()))


def test_what_is_loaded_is_copied(half: torch.dtype, backend: str) -> None:
    optimizer, ema = run(half, backend)
    trained(optimizer, ema, range(2))
    state = copy.deepcopy(ema.state_dict())
    # in whatever order of memory it comes
    state["state"][0]["average"] = state["state"][0]["average"].t().contiguous().t()
    kept = copy.deepcopy(state)
    ema.load_state_dict(state)
    trained(optimizer, ema, range(2, 4))
    for place, entry in state["state"].items():
        assert_same(entry["average"], kept["state"][place]["average"])
        assert ema.state_dict()["state"][place]["average"].is_contiguous()
    got = ema.float32_weight(members(optimizer)[0])
    got.fill_(0)
    assert not torch.equal(ema.float32_weight(members(optimizer)[0]), got)


def changed(*path: Any, to: Any) -> Callable[[dict[str, Any]], object]:
    def change(state: dict[str, Any]) -> object:
        for key in path[:-1]:
            state = state[key]
        return state.pop(path[-1]) if to is ... else state.__setitem__(path[-1], to)

    return change


BAD: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no decay": (
        changed("decay", to=...),
        "the loaded state has 'state', not 'decay' and 'state': pass what EMA.state",
    ),
    "another's": (
        changed("param_groups", to=[]),
        "the loaded state has 'decay', 'state', 'param_groups', not 'decay' ",
    ),
    "NaN decay": (
        changed("decay", to=NAN),
        "the loaded state does not fit: decay=nan: must be a number, at least 0 and",
    ),
    "decay of 1": (changed("decay", to=1), "the loaded state does not fit: decay=1: must be a number, at least 0 and"),
    "a list": (changed("state", to=[]), "'state' of the loaded state is a list, not a dict with an entry a param"),
    "one less": (
        changed("state", 1, to=...),
        "the loaded state has no entry for b.weight: give the optimizer the param",
    ),
    "one more": (
        changed("state", 2, to={}),
        "the loaded state has entries for 2, and the optimizer no params there: ad",
    ),
    "no dict": (changed("state", 1, to=3), "the entry for b.weight is a int, not a dict with 'average' and 'step'"),
    "no step": (changed("state", 1, "step", to=...), "the entry for b.weight has 'average', not 'average' and 'step'"),
    "a key more": (
        changed("state", 1, "x", to=0),
        "the entry for b.weight has 'average', 'step', 'x', not 'average' an",
    ),
    "no tensor": (changed("state", 1, "average", to=[1.0]), "the average for b.weight is a list, not a tensor"),
    "16 bits": (
        changed("state", 1, "average", to=torch.zeros(3, 2, dtype=torch.bfloat16)),
        "the average for b.weight is torch.bfloat16, torch.strided, not torch.float32, torch.strided",
    ),
    "sparse": (
        changed("state", 1, "average", to=torch.zeros(3, 2).to_sparse()),
        "the average for b.weight is torch.float32, torch.sparse_coo, not torch.float32, torch.strided",
    ),
    "another shape": (
        changed("state", 1, "average", to=torch.zeros(2, 3)),
        "the average for b.weight has shape (2, 3), the param (3, 2)",
    ),
    "a negative step": (changed("state", 1, "step", to=-1), "the step for b.weight is -1, not a count of steps"),
    "a broken step": (changed("state", 1, "step", to=1.0), "the step for b.weight is 1.0, not a count of steps"),
    "a bool": (changed("state", 1, "step", to=True), "the step for b.weight is True, not a count of steps"),
}


def two_named(half: torch.dtype) -> tuple[HalfOptimizer, EMA]:
    a, b = params(half, [(4,), (3, 2)])
    optimizer = halfstep.AdamW([("a.weight", a), ("b.weight", b)])
    ema = EMA(optimizer, 0.75)
    trained(optimizer, ema, range(2))
    return optimizer, ema


@pytest.mark.parametrize(("change", "text"), BAD.values(), ids=BAD)
def test_a_state_that_does_not_fit_changes_nothing(
    change: Callable[[dict[str, Any]], object], text: str, half: torch.dtype
) -> None:
    optimizer, ema = two_named(half)
    state = copy.deepcopy(ema.state_dict())
    for entry in state["state"].values():
        entry["average"] += 1
        entry["step"] += 1
    state["decay"] = 0.5
    change(state)
    before, kept = Snapshot(optimizer), copy.deepcopy((optimizer, ema))[1]
    with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
        ema.load_state_dict(state)
    before.check()
    assert_averages(ema, kept)


@pytest.mark.parametrize("state", [None, [], 3, torch.zeros(2)])
def test_a_state_is_a_dict(state: Any) -> None:
    _, ema = two_named(torch.float16)
    text = rf"^the loaded state is a {type(state).__name__}, not a dict with 'decay' and 'state'$"
    with pytest.raises(ValueError, match=text):
        ema.load_state_dict(state)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_a_copy_goes_on_the_same(copied: Any, half: torch.dtype, backend: str) -> None:
    whole = run(half, backend)
    trained(*whole, range(3))
    twin: tuple[HalfOptimizer, EMA] = copied(whole)
    assert not {*members(twin[0])} & {*members(whole[0])}
    before = copied(whole)
    trained(*whole, range(3, 6))
    assert_averages(twin[1], before[1])  # nothing is shared
    trained(*twin, range(3, 6))
    assert_alike(twin[0], whole[0])
    assert_averages(twin[1], whole[1])
    with whole[1].swap():
        inside: tuple[HalfOptimizer, EMA] = copied(whole)
    # a copy from inside holds the averages for good
    trained(*inside, range(6, 7))


# ---------------------------------------------------------------------- arguments


class Wrapper:
    """What hands an optimizer on, as Accelerate's does."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer


def test_a_wrapped_optimizer_is_taken(half: torch.dtype) -> None:
    optimizer = make("AdamW", params(half))
    ema = EMA(Wrapper(optimizer), 0.5)  # type: ignore[arg-type]
    want = weights_of(optimizer)
    trained(optimizer, ema, range(1))
    for got, a, weight in zip(averages(optimizer, ema), want, weights_of(optimizer), strict=True):
        assert_same(got, moved(a, weight, 0.5))


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        (torch.optim.SGD([Parameter(torch.zeros(1))]), r"torch\.optim\.sgd\.SGD"),
        (Wrapper(torch.optim.SGD([Parameter(torch.zeros(1))])), r"torch\.optim\.sgd\.SGD"),
        (nn.Linear(1, 1), r"torch\.nn\.modules\.linear\.Linear"),
        (None, r"builtins\.NoneType"),
    ],
)
def test_other_optimizers_are_refused(given: Any, kind: str) -> None:
    with pytest.raises(
        TypeError, match=rf"^optimizer is a {kind}: must be one of halfstep's, .*\.AveragedModel\(model\)$"
    ):
        EMA(given)


@pytest.mark.parametrize("decay", [1.0, 1, True, -0.1, NAN, INF, "0.9", None, torch.tensor(0.9)])
def test_a_decay_that_is_none_is_refused(decay: Any) -> None:
    optimizer = make("AdamW", params(torch.float16))
    text = f"decay={decay!r}: must be a number, at least 0 and less than 1, such as 0.999"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        EMA(optimizer, decay)


def test_without_decay_it_is_the_weight(half: torch.dtype, backend: str) -> None:
    # up to the two roundings of a + (w - a), which are exact where the weights lie close
    param = Parameter(torch.ones(50, dtype=half))
    optimizer = make("SGD", [param], backend=backend, lr=1e-3)
    ema = EMA(optimizer, 0)
    trained(optimizer, ema, range(3))
    assert_same(ema.float32_weight(param), optimizer.float32_weight(param))


def test_a_param_of_another_is_refused(half: torch.dtype) -> None:
    _, ema = run(half, "eager")
    with pytest.raises(ValueError, match=r"^the param of shape \(3,\) is none of the optimizer's: pass one of its gr"):
        ema.float32_weight(torch.zeros(3))


@pytest.mark.parametrize(("shape", "device"), [((2, 3), "cpu"), ((3, 2), "meta")], ids=["shape", "device"])
def test_a_param_that_has_changed_is_named(shape: tuple[int, int], device: str, half: torch.dtype) -> None:
    optimizer, ema = two_named(half)
    drive(optimizer, [2])
    a, b = members(optimizer)
    before, other = ema.float32_weight(a), torch.zeros(shape, device=device)
    ema._kept[b].average = other
    text = f"b.weight has shape (3, 2) on cpu, its average {shape} on {device}: after a change of device call ema.load_"
    for call in (ema.update, ema.swap().__enter__):
        with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
            call()
    assert_same(ema.float32_weight(a), before)
    assert not optimizer._optimizer_step_pre_hooks


def test_averages_differ_by_their_decay(half: torch.dtype, backend: str) -> None:
    optimizer = make("SGD", params(half), backend=backend, lr=0.1)
    all_ = [EMA(optimizer, decay) for decay in (0.0, 0.5, 0.9)]
    for number in range(3):
        drive(optimizer, [number])
        for ema in all_:
            ema.update()
    for one, other in itertools.pairwise(all_):
        for a, b in zip(averages(optimizer, one), averages(optimizer, other), strict=True):
            assert not torch.equal(a, b)
