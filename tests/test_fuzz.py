"""P20: whatever was done to a state, it loads as a whole or changes nothing, and what loads can be stepped."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import halfstep
from halfstep.engine import HalfOptimizer
from training import Snapshot, drive, make, params

SHAPES = ((64, 64), (3, 2), ())
#: optimizer, dtype and options of the states that are spoiled, and of the optimizers that they are loaded into
KINDS: list[tuple[str, torch.dtype, dict[str, Any]]] = [
    ("AdamW", torch.bfloat16, {}),
    ("AdamW", torch.float16, {"weights": "split8", "moments": "block8"}),
    ("AdamFP16", torch.float16, {"weights": "master32", "moments": "bfloat16"}),
    ("Lion", torch.bfloat16, {"weights": "stochastic", "moments": "block8"}),
    ("SGD", torch.bfloat16, {"momentum": 0.9}),
    ("AdamW", torch.float32, {}),
]
#: what stands where something else belongs
JUNK: list[Any] = [
    *(None, True, -1, 0, 3, 255, 2**70, 1.5, -1e300, float("nan"), float("inf"), "x", "split8", b"x", 1j),
    *((), [], {}, [0, 0], (0.9, 0.999), {"step": 1}, {0: {}}, object, range(3)),
    *(torch.tensor(2.0), torch.tensor([1, 2]), torch.zeros(64, 64), torch.zeros(0), torch.ones(3, 2) * 1j),
    torch.zeros(3, 2).to_sparse(),
]
KEYS: list[Any] = [
    "step",
    "exp_avg",
    "remainder",
    "master",
    "mantissa",
    "stream",
    "params",
    "lr",
    "layout",
    0,
    99,
    "x",
    None,
]
#: what is done to a tensor
CHANGES: list[Callable[[Tensor], Tensor]] = [
    lambda t: t.flatten(),
    lambda t: t.reshape(-1)[:-1],
    lambda t: t.unsqueeze(0),
    lambda t: t.expand(2, *t.shape),
    lambda t: t.mT if t.dim() > 1 else t,
    lambda t: t.double(),
    lambda t: t.half(),
    lambda t: t.to(torch.bfloat16),
    lambda t: t.to(torch.int8),
    lambda t: t.to(torch.int64),
    lambda t: t.bool(),
    lambda t: torch.full_like(t, 255 if t.dtype is torch.uint8 else -1),
    lambda t: torch.full_like(t, torch.nan) if t.is_floating_point() else t,
    lambda t: torch.full_like(t, torch.inf) if t.is_floating_point() else t,
    lambda t: t.requires_grad_() if t.is_floating_point() else t,
    lambda t: torch.nn.Parameter(t, requires_grad=False),
]


def built(kind: int, seed: int) -> HalfOptimizer:
    name, dtype, options = KINDS[kind]
    over = params(dtype, SHAPES, seed)
    return make(name, [{"params": over[:2], **options}, {"params": over[2:], "lr": 0.5, **options}])


def stepped(kind: int) -> dict[str, Any]:
    optimizer = built(kind, 0)
    drive(optimizer, range(2))
    return optimizer.state_dict()


STATES = [stepped(kind) for kind in range(len(KINDS))]


def torchs() -> dict[str, Any]:
    over = params(torch.float32, SHAPES)
    optimizer = torch.optim.AdamW([{"params": over[:2]}, {"params": over[2:], "lr": 0.5}])
    drive(optimizer, range(2))
    return optimizer.state_dict()


def others() -> list[dict[str, Any]]:
    """States as bitsandbytes (8 bits and 32) and optimi keep them, by the keys that test_foreign.py sees in theirs."""
    codes = torch.arange(64 * 64).remainder(256).to(torch.uint8).view(64, 64)
    eight = {f"{part}{k}": t for k in (1, 2) for part, t in (("state", codes), ("qmap", torch.rand(256)))}
    eight |= {"absmax1": torch.ones(16), "absmax2": torch.ones(16)}
    wide = [{"step": 2, "state1": torch.ones(shape), "state2": torch.ones(shape)} for shape in SHAPES[1:]]
    theirs = {0: {"step": 2, "__bnb_optimizer_quant_state__": eight}, 1: wide[0], 2: wide[1]}
    rates = {"lr": 1e-3, "eps": 1e-8, "weight_decay": 0.1, "foreach": None}
    bnb = {**rates, "betas": (0.9, 0.999), "alpha": 0.0, "t_alpha": None, "t_beta3": None}
    averages = [dict.fromkeys(("exp_avg", "exp_avg_sq", "kahan_comp"), torch.ones(shape)) for shape in SHAPES]
    optimi = {**rates, "beta1": 0.9, "beta2": 0.99, "kahan_sum": True, "decouple_wd": True, "decouple_lr": False}
    optimi |= {"max_lr": None, "gradient_release": False, "setup": True, "step": torch.tensor(2, dtype=torch.int32)}
    return [
        {"state": state, "param_groups": [{**group, "params": [0, 1]}, {**group, "params": [2]}]}
        for state, group in ((theirs, bnb), (dict(enumerate(averages)), optimi))
    ]


STATES += [torchs(), *others()]


def places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of everything in nested dicts and lists, from the root."""
    found = [path]
    if isinstance(node, dict | list | tuple):
        for key, value in list(node.items() if isinstance(node, dict) else enumerate(node)):
            found += places(value, (*path, key))
    return found


def spoil(draw: Callable[[st.SearchStrategy], Any], state: Any) -> Any:
    """Change one thing in a state, anywhere."""
    path = draw(st.sampled_from(places(state)))
    if not path:
        return copy.deepcopy(draw(st.sampled_from(JUNK))) if draw(st.integers(0, 9)) == 0 else state
    node = state
    for key in path[:-1]:
        node = node[key]
    if isinstance(node, tuple):
        return state
    key, value = path[-1], node[path[-1]]
    what = draw(st.sampled_from(["replace", "delete", "rename", "add", "change", "change"]))
    if what == "change" and isinstance(value, Tensor) and value.layout is torch.strided:
        node[key] = draw(st.sampled_from(CHANGES))(value)
    elif what == "delete":
        del node[key]
    elif what == "rename" and isinstance(node, dict):
        node[draw(st.sampled_from(KEYS))] = node.pop(key)
    elif what == "add" and isinstance(node, dict):
        node[draw(st.sampled_from(KEYS))] = copy.deepcopy(draw(st.sampled_from(JUNK)))
    else:
        node[key] = copy.deepcopy(draw(st.sampled_from(JUNK)))
    return state


@pytest.mark.filterwarnings("ignore:.*weights went past:RuntimeWarning", "ignore:Casting complex values:UserWarning")
@settings(max_examples=2500, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_p20_a_spoiled_state_loads_as_a_whole_or_changes_nothing(data: st.DataObject) -> None:
    state = copy.deepcopy(data.draw(st.sampled_from(STATES)))
    for _ in range(data.draw(st.integers(1, 3))):
        state = spoil(data.draw, state)
    optimizer = built(data.draw(st.integers(0, len(KINDS) - 1)), 1)
    if data.draw(st.booleans()):
        drive(optimizer, range(1))
    before = Snapshot(optimizer)
    refused = refusal(lambda: optimizer.load_state_dict(state))
    if refused:
        before.check()
        assert "loaded state" in refused or "the state for param" in refused
        drive(optimizer, range(5, 6))
        return
    built_like(optimizer).load_state_dict(optimizer.state_dict())
    # the numbers of a group may be sound one by one, and not together
    refused = refusal(lambda: drive(optimizer, range(5, 6)))
    assert refused is None or "cannot be stepped with" in refused


def refusal(act: Callable[[], object], *errors: type[Exception]) -> str | None:
    """What an act refuses itself with: no other kind of error may come of it."""
    try:
        act()
    except (ValueError, *errors) as error:
        return str(error)
    return None


def built_like(optimizer: HalfOptimizer) -> HalfOptimizer:
    """A fresh optimizer of the same kind over the same weights."""
    groups = [
        {**group, "params": [nn.Parameter(param.detach().clone()) for param in group["params"]]}
        for group in optimizer.param_groups
    ]
    return make(type(optimizer).__name__, [{**group, "lr": 0.1} for group in groups])


@pytest.mark.filterwarnings("ignore:the loaded scale:UserWarning", "ignore:Casting complex values:UserWarning")
@settings(max_examples=500, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_p20_a_spoiled_scalers_state_loads_as_a_whole_or_changes_nothing(data: st.DataObject) -> None:
    state: Any = halfstep.GradScaler("cpu", init_scale=2.0**10, hysteresis=3).state_dict()
    for _ in range(data.draw(st.integers(1, 3))):
        state = spoil(data.draw, state) if isinstance(state, dict) else state
    scaler = halfstep.GradScaler("cpu")
    if data.draw(st.booleans()):
        scaler.scale(torch.ones(()))
    before = scaler.state_dict()
    refused = refusal(lambda: scaler.load_state_dict(state), RuntimeError)
    if refused:
        assert scaler.state_dict() == before
        assert any(words in refused for words in ("loaded state", "state dict is empty", "min_scale="))
        return
    scaler.load_state_dict(scaler.state_dict())
    param = nn.Parameter(torch.ones(2, dtype=torch.float16))
    optimizer = halfstep.AdamW([param])
    scaler.scale((param.float() * 1e-3).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
