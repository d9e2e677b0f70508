"""P20: a state of another format converts, and one that fits nothing is refused before anything has changed."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfstep import checkpoint
from halfstep.formats import MOMENTS, WEIGHTS, moment_format
from halfstep.rules.adam import ADAM
from harness import assert_same
from training import OPTIMIZERS, SHAPES, Snapshot, assert_alike, drive, make, members, params, through_file

PAIRS = [(a, b) for a in WEIGHTS for b in WEIGHTS if a != b]


def follow(target: Any, source: Any) -> None:
    """Give the params of ``target`` the values of those of ``source``, as loading the model does."""
    for param, other in zip(members(target), members(source), strict=True):
        param.data.copy_(other)


def room(weights: str, weight: Tensor, half: torch.dtype) -> Tensor:
    """How far from a float32 weight a format may keep it: chance decides between the two neighbours that it holds."""
    if weights == "master32":
        return torch.zeros_like(weight)
    # float16's split16 is exact from 2**-16 on and within 2**-40 below
    if weights == "split16":
        return torch.full_like(weight, 2.0**-40 if half is torch.float16 else 0.0)
    least = -14 if half is torch.float16 else -126
    exponent = (torch.frexp(weight.abs()).exponent - 1).clamp(min=least)
    units = torch.finfo(half).eps * (2.0**-8 if weights == "split8" else 0.5 if weights == "rounded" else 1.0)
    return units * 2.0**exponent


@pytest.mark.parametrize(("old", "new"), PAIRS)
def test_p20_every_format_converts_to_every_other(old: str, new: str, half: torch.dtype) -> None:
    source, target = make("AdamW", params(half), weights=old), make("AdamW", params(half, seed=1), weights=new)
    drive(source, range(5))
    follow(target, source)
    state = through_file(source.state_dict())
    target.load_state_dict(state)
    assert target.param_groups[0]["weights"] == new
    for param, other in zip(members(target), members(source), strict=True):
        assert param.dtype is half
        held = WEIGHTS[new][half].parts[1:]
        stream = ["stream"] if {"split8", "stochastic"} & {old, new} else []
        numbers = {"step", "mantissa", *stream}
        assert set(target.state[param]) == {*numbers, "exp_avg", "exp_avg_sq", *(part.name for part in held)}
        for key in ("exp_avg", "exp_avg_sq"):
            assert_same(target.state[param][key], source.state[other][key])
        weight, kept = source.float32_weight(other), target.float32_weight(param)
        assert ((kept - weight).abs() <= room(new, weight, half)).all()
        if new == "rounded":
            assert_same(param.detach(), weight.to(half))
    drive(target, range(5, 7))
    target.load_state_dict(target.state_dict())  # and what was converted is a state of its own


@pytest.mark.parametrize("name", [name for name, cls in OPTIMIZERS.items() if cls.rule.moments])
@pytest.mark.parametrize(("old", "new"), [(a, b) for a in MOMENTS for b in MOMENTS if a != b])
def test_p20_every_format_of_moments_converts_to_every_other(
    name: str, old: str, new: str, half: torch.dtype, backend: str
) -> None:
    # large enough for blocks, with a short one at a row's end; transposed; and too small
    def over(seed: int) -> list[nn.Parameter]:
        first, second, third = params(half, [(40, 150), (64, 70), (9,)], seed)
        return [first, nn.Parameter(second.detach().t()), third]

    options = {"backend": backend, "weights": "split8", "momentum": 0.9}
    source, target = make(name, over(0), moments=old, **options), make(name, over(1), moments=new, **options)
    drive(source, range(5))
    follow(target, source)
    state = through_file(source.state_dict())
    target.load_state_dict(state)
    again = make(name, over(2), moments=new, **options)
    follow(again, source)
    again.load_state_dict(state)
    assert_alike(again, target)  # chance comes from the state
    rule = target._rule(target.param_groups[0])
    for param, other in zip(members(target), members(source), strict=True):
        assert target.state[param]["stream"] == source.state[other]["stream"]
        assert_same(target.float32_weight(param), source.float32_weight(other))
        for moment in rule.moments:
            formats = [moment_format(each, moment, param.shape) for each in (old, new)]
            was, now = (
                checkpoint.decode(
                    format, [optimizer.state[each][checkpoint.key(part, moment)] for part in format.parts]
                )
                for format, optimizer, each in zip(formats, (source, target), (other, param), strict=True)
            )
            assert was.count_nonzero() > was.numel() * 0.99
            # bfloat16 has steps of 2**-7 at most; a signed code of 2**-3, and of a square's root 2**-4, so that it is
            # off by (1 + 2**-4)**2 - 1; a value under 2**-14.8 of its block's largest becomes 0 or the least code
            step = {"float32": 0.0, "bfloat16": 2.0**-7, "block8": (1 + 2.0**-4) ** 2 - 1}[formats[1].name]
            small = was.abs() < was.abs().max() * 2.0 ** (-28 if moment.square else -14)
            small &= formats[1].measure is not None
            assert ((now - was).abs() <= step * was.abs())[~small].all()
            assert small.sum() < was.numel() / 50
    drive(target, range(5, 7))
    target.load_state_dict(target.state_dict())


def test_p20_what_the_new_format_holds_is_not_changed(half: torch.dtype, backend: str) -> None:
    # block8 to float32 and back is the same codes, whatever chance says; likewise split8 through master32
    first = make("AdamW", params(half, [(64, 100)]), weights="split8", moments="block8", backend=backend)
    drive(first, range(3))
    middle = make("AdamW", params(half, [(64, 100)]), weights="master32", moments="float32", backend=backend, seed=5)
    back = make("AdamW", params(half, [(64, 100)]), weights="split8", moments="block8", backend=backend)
    for target, source in ((middle, first), (back, middle)):
        follow(target, source)
        target.load_state_dict(through_file(source.state_dict()))
    (was,), (now,) = members(first), members(back)
    assert_same(was.detach(), now.detach())
    for name, tensor in first.state[was].items():
        if isinstance(tensor, Tensor):
            assert_same(tensor, back.state[now][name])


def test_p20_a_tie_is_converted_to_the_bit(half: torch.dtype, backend: str) -> None:
    # master32 rounds ties to even, split16 away from zero: the param itself has to change
    tie = torch.tensor([1 + 2.0**-8, -1 - 2.0**-8] if half is torch.bfloat16 else [1 + 2.0**-11, -1 - 2.0**-11])
    source = make("AdamW", [nn.Parameter(tie.to(half))], weights="master32", backend=backend)
    drive(source, range(1))
    (param,) = members(source)
    param.data.copy_(tie.to(half))
    source.state[param]["master"].copy_(tie)
    target = make("AdamW", [nn.Parameter(tie.to(half))], weights="split16", backend=backend)
    address = members(target)[0].data_ptr()
    target.load_state_dict(source.state_dict())
    assert_same(source.float32_weight(param), tie)
    # float16's remainder holds one unit less, 2**-27, which is nothing to a float32 beside 1
    assert_same(target.float32_weight(members(target)[0]), tie)
    assert members(target)[0].data_ptr() == address
    back = make("AdamW", [nn.Parameter(members(target)[0].detach().clone())], weights="master32", backend=backend)
    back.load_state_dict(target.state_dict())
    assert_same(back.float32_weight(members(back)[0]), tie)


def test_p20_the_live_formats_win_and_the_hyperparameters_load(half: torch.dtype) -> None:
    source = make("AdamW", params(half), weights="master32", lr=0.5, betas=[0.8, 0.9], weight_decay=0.25, eps=1e-4)
    target = make("AdamW", params(half), weights="split16", backend="eager", lr=1e-3)
    drive(source, range(1))
    target.load_state_dict(through_file(source.state_dict()))
    (group,) = target.param_groups
    assert (group["weights"], group["moments"], group["backend"]) == ("split16", "float32", "eager")
    assert (group["lr"], group["betas"], group["weight_decay"], group["eps"]) == (0.5, (0.8, 0.9), 0.25, 1e-4)


@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_p20_no_dtype_and_no_bit_changes(weights: str, moments: str, half: torch.dtype) -> None:
    shapes = [*SHAPES, (70, 64)]
    source, target = (
        make("AdamW", [*params(half, shapes), *params(torch.float32, shapes)], weights=weights, moments=moments)
        for _ in range(2)
    )
    drive(source, range(3))
    follow(target, source)
    target.load_state_dict(through_file(source.state_dict()))
    assert_alike(target, source)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", [name for name, cls in OPTIMIZERS.items() if cls.rule is ADAM])
def test_p20_torchs_state_loads(name: str, dtype: torch.dtype, half: torch.dtype) -> None:
    theirs = torch.optim.AdamW(params(dtype), lr=0.5, betas=(0.8, 0.9), foreach=True, capturable=False)
    for number in range(3):
        for param in members(theirs):
            param.grad = torch.full_like(param, 1.0 + number)
        theirs.step()
    ours = make(name, params(half))
    ours.load_state_dict(through_file(theirs.state_dict()))
    for param, other in zip(members(ours), members(theirs), strict=True):
        state = ours.state[param]
        assert state["step"] == 3
        assert type(state["step"]) is int
        for key in ("exp_avg", "exp_avg_sq"):
            assert_same(state[key], theirs.state[other][key].float())
        assert_same(ours.float32_weight(param), param.detach().float())
    assert ours.param_groups[0]["lr"] == 0.5
    assert ours.param_groups[0]["weights"] == ours.defaults["weights"]
    drive(ours, range(2))


def test_p20_torchs_way_of_decay_does_not_change_an_adamw(half: torch.dtype) -> None:
    theirs = torch.optim.Adam(params(torch.float32), weight_decay=0.1)
    ours, plain = make("AdamW", params(half)), make("Adam", params(half))
    for optimizer in (ours, plain):
        optimizer.load_state_dict(theirs.state_dict())
        assert optimizer.param_groups[0]["weight_decay"] == 0.1
    assert ours.param_groups[0]["decoupled_weight_decay"]
    plain.load_state_dict(torch.optim.AdamW(params(torch.float32)).state_dict())
    assert plain.param_groups[0]["decoupled_weight_decay"]


def teaching(half: torch.dtype, moments: torch.dtype = torch.float32) -> dict[str, Any]:
    """A state as the teaching implementation keeps it."""
    entries = {
        k: {
            "step": 7,
            "exp_avg": torch.full(param.shape, 0.5, dtype=moments),
            "exp_avg_sq": torch.full(param.shape, 0.25, dtype=moments),
            "fp32_copy": param.detach().float() * (1 + 2.0**-14),
        }
        for k, param in enumerate(params(half))
    }
    group = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-16, "weight_decay": 0.0, "params": list(entries)}
    return {"state": entries, "param_groups": [group]}


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("name", [name for name, cls in OPTIMIZERS.items() if cls.rule is ADAM])
def test_p20_the_teaching_implementations_state_loads(name: str, weights: str, half: torch.dtype) -> None:
    optimizer, state = make(name, params(half), weights=weights), teaching(half)
    optimizer.load_state_dict(through_file(state))
    for param, entry in zip(members(optimizer), state["state"].values(), strict=True):
        kept = optimizer.state[param]
        assert kept["step"] == 7
        assert "fp32_copy" not in kept
        assert_same(kept["exp_avg"], entry["exp_avg"])
        if WEIGHTS[weights][half].parts[1:]:
            weight = entry["fp32_copy"]
            assert ((optimizer.float32_weight(param) - weight).abs() <= room(weights, weight, half)).all()
    drive(optimizer, range(2))


def test_p20_a_format_set_by_hand_converts_through_the_state(half: torch.dtype, backend: str) -> None:
    source = make("AdamW", params(half), weights="master32", backend=backend)
    drive(source, range(3))
    kept = [source.float32_weight(param) for param in members(source)]
    source.param_groups[0]["weights"] = "split16"
    with pytest.raises(ValueError, match=r"param 0 of group 0 cannot be .* no 'remainder'.*load_state"):
        drive(source, range(1))
    source.load_state_dict(source.state_dict())
    for param, weight in zip(members(source), kept, strict=True):
        assert ((source.float32_weight(param) - weight).abs() <= room("split16", weight, half)).all()
    drive(source, range(1))
    assert "split16" in source.explain()
    # nor is a part dropped in silence
    source.param_groups[0]["weights"] = "rounded"
    with pytest.raises(ValueError, match=r"its state has 'remainder', a part that another format keeps"):
        drive(source, range(1))


def entry(state: dict[str, Any]) -> dict[str, Any]:
    """The saved entry of the last param but one."""
    return state["state"][2]


def with_float(state: dict[str, Any]) -> None:
    entry(state)["remainder"] = entry(state)["remainder"].int()


REFUSED: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a shape": (
        lambda s: entry(s).update(exp_avg=torch.zeros(9)),
        r"the state for c does not fit: its 'exp_avg' has shape \(9,\), the param \(\)",
    ),
    "the remainder's shape": (
        lambda s: entry(s).update(remainder=torch.zeros(9, dtype=torch.int16)),
        r"the state for c does not fit: its 'remainder' has shape \(9,\), the param \(\)",
    ),
    "a stream": (
        lambda s: entry(s).update(stream=-1),
        r"the state for c does not fit: its stream is -1, not the number of a stream of random bits",
    ),
    "a seed": (
        lambda s: s["param_groups"][0].update(seed="x"),
        r"group 0 of the loaded state does not fit: seed='x': must be an int",
    ),
    "a dtype": (
        with_float,
        r"for c does not fit: it holds 'remainder' in torch.int32, which no format of a torch.b?float16 param keeps "
        r"with a mantissa of 2[36]: it is of weights='split16' beside a torch.b?float16 param",
    ),
    "a moment's dtype": (
        lambda s: entry(s).update(exp_avg=torch.zeros((), dtype=torch.int8)),
        r"the state for c does not fit: its 'exp_avg' is torch.int8, not torch.float32",
    ),
    "a moment missing": (
        lambda s: entry(s).pop("exp_avg_sq"),
        r"the state for c does not fit: it has no 'exp_avg_sq'; besides its step it has nothing",
    ),
    "another rule's": (
        lambda s: s["state"].update({2: {"step": 3, "momentum_buffer": torch.zeros(())}}),
        r"the state for c does not fit: it has no 'exp_avg'; besides its step it has 'momentum_buffer'",
    ),
    "no step": (lambda s: entry(s).pop("step"), r"the state for c does not fit: its step is None, not a count"),
    "half a step": (lambda s: entry(s).update(step=1.5), r"for c does not fit: its step is 1.5, not a count of steps"),
    "a step back": (lambda s: entry(s).update(step=-1), r"for c does not fit: its step is -1, not a count of steps"),
    "no number": (lambda s: entry(s).update(step=torch.tensor(torch.nan)), r"its step is tensor\(nan\), not a count"),
    "amsgrad": (
        lambda s: s["param_groups"][0].update(amsgrad=True),
        r"group 0 of the loaded state does not fit: amsgrad=True: AMSGrad is not offered; .* torch.optim",
    ),
    "a key too many": (
        lambda s: entry(s).update(max_exp_avg_sq=torch.zeros(())),
        r"the state for c does not fit: it has 'max_exp_avg_sq', for which there is no use here: take that out of the",
    ),
    "a remainder missing": (
        lambda s: entry(s).pop("remainder"),
        r"the state for c does not fit: it is of weights='split16' beside a torch.b?float16 param.*, and what that "
        r"keeps beside the param is missing",
    ),
    "a mantissa": (
        lambda s: entry(s).update(mantissa=5),
        r"the state for c does not fit: its mantissa is 5, which no format has",
    ),
    "NaN": (
        lambda s: entry(s)["exp_avg"].fill_(torch.nan),
        r"the state for c does not fit: its 'exp_avg' holds NaN: .*; load an earlier state, or start",
    ),
    "a square below 0": (
        lambda s: entry(s)["exp_avg_sq"].fill_(-1e-30),
        r"the state for c does not fit: its 'exp_avg_sq' holds -1e-30, and an average of squares has no sign",
    ),
    "a sparse moment": (
        lambda s: s["state"][0].update(exp_avg=s["state"][0]["exp_avg"].to_sparse()),
        r"the state for a does not fit: its 'exp_avg' has the layout torch.sparse_coo, not torch.strided",
    ),
    "no entry": (lambda s: s["state"].update({2: [1]}), r"the state for c does not fit: it is a list, not a dict"),
    "an entry too many": (
        lambda s: s["state"].update({"shared": {}}),
        r"the loaded state has entries for 'shared', which no group of it lists: take them out",
    ),
    "a param twice": (lambda s: s["param_groups"][0]["params"].__setitem__(0, 1), r"state name a param twice"),
    "no number of a param": (
        lambda s: s["param_groups"][0]["params"].__setitem__(0, []),
        r"the groups of the loaded state name a param \[\], neither a number nor a name",
    ),
    "no states": (lambda s: s.pop("state"), r"the loaded state has no 'state': it has 'param_groups'\. Pass what"),
    "states in a list": (lambda s: s.update(state=[]), r"'state' of the loaded state is a list, not a dict"),
    "groups in a dict": (lambda s: s.update(param_groups={}), r"'param_groups' of the loaded state is a dict, not a"),
    "no group": (lambda s: s.update(param_groups=[7]), r"group 0 of the loaded state is no dict with a list of"),
    "a later layout": (
        lambda s: s["param_groups"][0].update(layout=99),
        r"group 0 of the loaded state does not fit: layout=99: this version reads 1 to 2; update halfstep",
    ),
    "a rate": (
        lambda s: s["param_groups"][0].update(lr=torch.inf),
        r"group 0 of the loaded state does not fit: lr=inf: must be finite",
    ),
    "betas": (
        lambda s: s["param_groups"][0].update(betas=(1.0, 0.9)),
        r"group 0 of the loaded state does not fit: betas\[0\]=1.0: must be at least 0 and less than 1",
    ),
    "names": (
        lambda s: s["param_groups"][0].update(param_names="ab"),
        r"group 0 of the loaded state does not fit: param_names='ab': must be a list of 4 names",
    ),
    "groups": (
        lambda s: s["param_groups"].append({"params": [9]}),
        r"the loaded state has groups of \[4, 1\] params, this optimizer of \[4\]: .* add_param_group",
    ),
    "params": (
        lambda s: s["param_groups"][0]["params"].pop(),
        r"the loaded state has groups of \[3\] params, this optimizer of \[4\]",
    ),
}


@pytest.mark.parametrize(("spoil", "text"), REFUSED.values(), ids=REFUSED)
def test_p20_a_state_that_fits_nothing_changes_nothing(spoil: Any, text: str, half: torch.dtype) -> None:
    names = "abcd"
    source = make("AdamW", zip(names, params(half), strict=True), lr=0.5)
    target = make("AdamW", zip(names, params(half, seed=1), strict=True))
    drive(source, range(2))
    drive(target, range(3))
    state = copy.deepcopy(source.state_dict())
    spoil(state)
    before = Snapshot(target)
    with pytest.raises(ValueError, match=text):
        target.load_state_dict(state)
    before.check()
    assert not target._optimizer_load_state_dict_pre_hooks
    assert not target._optimizer_load_state_dict_post_hooks
    drive(target, range(1))


def test_p20_a_float32_param_refuses_what_is_kept_beside_16_bits(half: torch.dtype) -> None:
    source, target = make("AdamW", params(half)), make("AdamW", params(torch.float32))
    drive(source, range(2))
    before = Snapshot(target)
    with pytest.raises(ValueError, match=r"param 0 of group 0 does .* holds 'remainder'.*float32_state_dict"):
        target.load_state_dict(source.state_dict())
    before.check()


def test_p20_a_user_hook_that_raises_changes_nothing(half: torch.dtype) -> None:
    target = make("AdamW", params(half))
    drive(target, range(2))

    def refuse(*_: Any) -> None:
        raise KeyError("mine")

    target.register_load_state_dict_pre_hook(refuse)
    before = Snapshot(target)
    with pytest.raises(KeyError, match="mine"):
        target.load_state_dict(target.state_dict())
    before.check()
    assert len(target._optimizer_load_state_dict_pre_hooks) == 1
