"""P29: every error names what is wrong, its value, what is allowed and the way out; and it changes nothing."""

import json
import math
import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import Parameter

from halfstep.backends import BACKENDS
from halfstep.formats import MOMENTS, WEIGHTS
from harness import assert_same
from training import OPTIMIZERS, Snapshot, assert_alike, drive, gradients, make, members, params

NUMBER = "must be 0, or a float32 number from 1.4e-45 to 3.4e+38"
LISTED = {
    "weights": ", ".join(map(repr, WEIGHTS)),
    "moments": ", ".join(map(repr, MOMENTS)),
    "backend": ", ".join(map(repr, ("auto", *BACKENDS))),
}
BAD_OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "negative lr": ({"lr": -1.0}, f"lr=-1.0: {NUMBER}"),
    "nan lr": ({"lr": math.nan}, f"lr=nan: {NUMBER}"),
    "infinite lr": ({"lr": math.inf}, f"lr=inf: {NUMBER}"),
    "lr past float32": ({"lr": 1e39}, f"lr=1e+39: {NUMBER}"),
    "a nan tensor": ({"lr": torch.tensor(math.nan)}, f"lr=tensor(nan): {NUMBER}"),
    "a text": ({"lr": "1e-3"}, "lr='1e-3': must be a number, or a tensor of one element"),
    "no lr": ({"lr": None}, "lr=None: must be a number, or a tensor of one element"),
    "lrs": ({"lr": torch.ones(2)}, "lr=tensor([1., 1.]): must be a number, or a tensor of one element"),
    "negative eps": ({"eps": -1e-8}, f"eps=-1e-08: {NUMBER}"),
    "eps that is 0 in float32": ({"eps": 1e-50}, f"eps=1e-50: {NUMBER}"),
    "negative weight decay": ({"weight_decay": -0.1}, f"weight_decay=-0.1: {NUMBER}"),
    "beta of 1": ({"betas": (1.0, 0.999)}, "betas[0]=1.0: must be at least 0 and less than 1"),
    "negative beta": ({"betas": (0.9, -0.1)}, "betas[1]=-0.1: must be at least 0 and less than 1"),
    "negative seed": ({"seed": -1}, "seed=-1: must be an int, at least 0 and less than 2**64"),
    "a seed too large": ({"seed": 2**64}, f"seed={2**64}: must be an int, at least 0 and less than 2**64"),
    "half a seed": ({"seed": 0.5}, "seed=0.5: must be an int, at least 0 and less than 2**64"),
    "a truth for a seed": ({"seed": True}, "seed=True: must be an int, at least 0 and less than 2**64"),
    "nan beta": ({"betas": (0.9, math.nan)}, "betas[1]=nan: must be at least 0 and less than 1"),
    "beta of text": ({"betas": ("a", 0.9)}, "betas[0]='a': must be a number"),
    "one beta": ({"betas": (0.9,)}, "betas=(0.9,): must be two numbers, as in (0.9, 0.999)"),
    "a bare beta": ({"betas": 0.9}, "betas=0.9: must be two numbers, as in (0.9, 0.999)"),
    "a format": ({"weights": "split17"}, f"weights='split17': must be one of {LISTED['weights']}"),
    "a dtype as weights": ({"weights": torch.float32}, f"weights=torch.float32: must be one of {LISTED['weights']}"),
    "moments": ({"moments": "float64"}, f"moments='float64': must be one of {LISTED['moments']}"),
    "a moments dtype": ({"moments": torch.float64}, f"moments=torch.float64: must be one of {LISTED['moments']}"),
    "no moments": ({"moments": None}, f"moments=None: must be one of {LISTED['moments']}"),
    "a backend": ({"backend": "cuda"}, f"backend='cuda': must be one of {LISTED['backend']}"),
    "a list": ({"backend": ["cpu"]}, f"backend=['cpu']: must be one of {LISTED['backend']}"),
}


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        (name, bad)
        for name in OPTIMIZERS
        for bad, (option, _) in BAD_OPTIONS.items()
        if option.keys() <= make(name, params(torch.float16)).defaults.keys()
    ],
)
def test_p29_an_option_that_is_not_allowed(name: str, bad: str) -> None:
    option, text = BAD_OPTIONS[bad]
    with pytest.raises(ValueError, match=re.escape(text)):
        make(name, params(torch.float16), **option)
    if name != "AdamFP16":  # which has other arguments
        with pytest.raises(ValueError, match=re.escape(text)):
            OPTIMIZERS[name](params(torch.float16), **option)  # type: ignore[call-arg]
    optimizer = make(name, params(torch.float16))
    drive(optimizer, range(1))
    before = Snapshot(optimizer)
    with pytest.raises(ValueError, match=re.escape(text)):
        optimizer.add_param_group({"params": params(torch.float16), **option})
    before.check()
    drive(optimizer, range(1))


def test_what_people_write_as_a_number(half: torch.dtype) -> None:
    read = json.loads('{"lr": 1e-3, "betas": [0.5, 0.75], "eps": 1e-8, "weight_decay": 0}')
    arrays = {
        "lr": np.float32(0.5),
        "betas": (np.float64(0.5), 0.75),
        "eps": np.float32(0.25),
        "weight_decay": np.int64(1),
    }
    tensors = {"lr": torch.tensor(1e-3), "betas": (torch.tensor(0.5), torch.tensor([0.75])), "eps": 0.0}
    for options in (read, arrays, tensors):
        optimizer = make("AdamW", params(half), **options)
        (group,) = optimizer.param_groups
        assert group["betas"] == (0.5, 0.75)
        assert all(type(group[key]) is float for key in ("eps", "weight_decay"))
        drive(optimizer, range(2))
        torch.testing.assert_close(float(group["lr"]), float(options["lr"]))


def test_p29_hyperparameters_that_turn_bad_change_nothing(half: torch.dtype, backend: str) -> None:
    for key, value in {"lr": math.nan, "eps": math.inf, "betas": (0.9, math.nan), "weight_decay": math.inf}.items():
        optimizer = make("AdamW", [{"params": params(half)}, {"params": params(half)}], backend=backend)
        drive(optimizer, range(2))
        optimizer.param_groups[1][key] = value
        gradients(optimizer, 2)
        before = Snapshot(optimizer)
        text = f"group 1 cannot be stepped with .*{re.escape(f'{key}={value}')}.*: what .* must be finite .*scheduler"
        with pytest.raises(ValueError, match=text):
            optimizer.step()
        before.check()


def test_a_schedule_may_go_a_little_below_zero(half: torch.dtype, backend: str) -> None:
    # a cosine in floats ends at -1e-20, and torch's optimizers do not mind; nor does a state saved then
    optimizer = make("AdamW", params(half), backend=backend)
    drive(optimizer, range(1))
    optimizer.param_groups[0]["lr"] = -1e-20
    drive(optimizer, range(1))
    optimizer.load_state_dict(optimizer.state_dict())
    drive(optimizer, range(1))


def test_p29_options_set_by_hand_are_checked_at_the_next_step(half: torch.dtype, backend: str) -> None:
    for key, value in {"weights": "split17", "moments": torch.float64, "backend": "none"}.items():
        optimizer = make("AdamW", params(half), backend=backend)
        drive(optimizer, range(1))
        optimizer.param_groups[0][key] = value
        gradients(optimizer, 1)
        before = Snapshot(optimizer)
        with pytest.raises(ValueError, match=re.escape(f"{key}={value!r}: must be one of {LISTED[key]}")):
            optimizer.step()
        before.check()
    optimizer = make("AdamW", params(half), backend="eager")
    optimizer.param_groups[0].update(moments=torch.float32, backend=backend)
    drive(optimizer, range(1))
    assert optimizer.param_groups[0]["moments"] == "float32"
    assert f"backend {backend}" in optimizer.explain()


STATE = "in its state"
BROKEN_STATES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "gone": (lambda s: s.pop("exp_avg"), "its state has no 'exp_avg'"),
    "no tensor": (lambda s: s.update(exp_avg=None), "its state has no 'exp_avg'"),
    "a dtype": (
        lambda s: s.update(exp_avg=s["exp_avg"].double()),
        f"'exp_avg' {STATE} is torch.float64, not torch.float32",
    ),
    "a shape": (
        lambda s: s.update(exp_avg=torch.zeros(2)),
        rf"'exp_avg' {STATE} has shape \(2,\), the param \(4, 3\)",
    ),
    "a device": (
        lambda s: s.update(exp_avg=s["exp_avg"].to("meta")),
        f"'exp_avg' {STATE} is on meta, the param on cpu",
    ),
    "strides": (lambda s: s.update(exp_avg=torch.zeros(3, 4).t()), "'exp_avg' in its state is not contiguous"),
    "a step": (lambda s: s.update(step=torch.tensor(2.5)), r"its step is tensor\(2.5000\), not a count of steps"),
    "no step": (lambda s: s.pop("step"), "its step is None, not a count of steps"),
}


@pytest.mark.parametrize(("spoil", "text"), BROKEN_STATES.values(), ids=BROKEN_STATES)
def test_p29_a_state_broken_by_hand_is_refused(spoil: Any, text: str, half: torch.dtype, backend: str) -> None:
    optimizer = make("AdamW", [("w", params(half, [(4, 3)])[0])], backend=backend)
    (param,) = members(optimizer)
    drive(optimizer, range(2))
    spoil(optimizer.state[param])
    gradients(optimizer, 2)
    before = param.detach().clone()
    with pytest.raises(ValueError, match=rf"w cannot be stepped: {text}.*load_state_dict\(optimizer.state_dict\(\)\)"):
        optimizer.step()
    assert_same(param.detach(), before)


def test_a_state_replaced_or_edited_by_hand_counts(half: torch.dtype, backend: str) -> None:
    one, other = (make("AdamW", params(half), backend=backend) for _ in range(2))
    for optimizer, replace in ((one, True), (other, False)):
        drive(optimizer, range(2))
        for param in members(optimizer):
            state = optimizer.state[param]
            if replace:
                state["exp_avg"] = torch.full_like(state["exp_avg"], 0.5)
                optimizer.state[param] = dict(state)
            else:
                state["exp_avg"].fill_(0.5)
        drive(optimizer, range(2))
    assert_alike(one, other)


def test_a_state_that_is_cleared_starts_anew(half: torch.dtype, backend: str) -> None:
    optimizer = make("AdamW", params(half), backend=backend)
    drive(optimizer, range(3))
    optimizer.state.clear()
    fresh = make("AdamW", [Parameter(p.detach().clone()) for p in members(optimizer)], backend=backend)
    drive(optimizer, range(2))
    drive(fresh, range(2))
    assert_alike(optimizer, fresh)
    # one param's alone
    del optimizer.state[members(optimizer)[0]]
    drive(optimizer, range(1))
    assert [optimizer.state[p]["step"] for p in members(optimizer)][:2] == [1, 3]


def test_p29_a_param_of_another_optimizer(half: torch.dtype) -> None:
    optimizer = make("AdamW", params(half))
    with pytest.raises(
        ValueError, match=r"the param of shape \(4,\) is none of this optimizer's: pass one of its groups'"
    ):
        optimizer.float32_weight(torch.ones(4, dtype=half))


def test_the_float32_weight_is_what_the_next_step_starts_from(half: torch.dtype, backend: str) -> None:
    for weights in WEIGHTS:
        optimizer = make("AdamW", params(half), weights=weights, backend=backend, lr=0.0, weight_decay=0.0)
        for number in range(3):
            for param in members(optimizer):
                weight = optimizer.float32_weight(param)
                assert (weight.dtype, weight.shape, weight.is_contiguous()) == (torch.float32, param.shape, True)
                assert not weight.requires_grad
                assert_same(weight.to(half), param.detach())
                weight.fill_(9)  # a tensor of its own
            before = [optimizer.float32_weight(param) for param in members(optimizer)]
            drive(optimizer, [number])
            for param, weight in zip(members(optimizer), before, strict=True):
                assert_same(optimizer.float32_weight(param), weight)


def test_saturated_weights_are_counted_and_told_once(half: torch.dtype, backend: str) -> None:
    param = Parameter(torch.tensor([torch.finfo(half).max, 1.0, -torch.finfo(half).max]).to(half))
    # past the largest 16-bit number, not past float32's own
    lr = 1e36 if half is torch.bfloat16 else 1e4
    optimizer = make("AdamW", [("w", param)], lr=lr, weight_decay=0.0, backend=backend)
    param.grad = torch.tensor([-1.0, -1.0, 1.0]).to(half)
    largest = re.escape(f"{torch.finfo(half).max:g}")
    text = rf"w: 2 of 3 weights went past {largest}.*largest {half}.* Lower lr.* wider dtype.*optimizer.saturated\(\)"
    with pytest.warns(RuntimeWarning, match=text) as caught:
        optimizer.step()
    assert [warning.filename for warning in caught] == [__file__]
    assert optimizer.saturated() == {"w": 2}
    assert "saturated in the last step: 2 weights of w" in optimizer.explain()
    optimizer.param_groups[0]["lr"] = lr / 10
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
    assert optimizer.saturated() == {"w": 2}
    param.grad.neg_()
    optimizer.param_groups[0]["betas"] = (0.0, 0.0)
    optimizer.step()
    assert optimizer.saturated() == {}
    assert "saturated" not in optimizer.explain()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_params_without_requires_grad_and_empty_groups(name: str, half: torch.dtype) -> None:
    frozen, moving = params(half, [(3,), (3,)])
    frozen.requires_grad_(False)
    optimizer = make(name, [{"params": [frozen]}, {"params": []}, {"params": [moving]}])
    (moving * 2).float().sum().backward()
    optimizer.step()
    assert list(optimizer.state) == [moving]
    with pytest.raises(ValueError, match="empty parameter list"):
        OPTIMIZERS[name]([])  # type: ignore[call-arg]


def test_params_made_in_inference_mode_are_left_alone(half: torch.dtype) -> None:
    with torch.inference_mode():
        made = torch.ones(3, dtype=half)
    (moving,) = params(half, [(3,)])
    optimizer = make("AdamW", [made, moving])
    moving.grad = torch.ones_like(moving)
    optimizer.step()
    assert_same(made, torch.ones(3, dtype=half))


def test_params_made_on_meta_are_stepped_once_they_are_real(half: torch.dtype, backend: str) -> None:
    with torch.device("meta"):
        model = torch.nn.Linear(3, 2, dtype=half)
    optimizer = make("AdamW", model.parameters())
    assert "on meta" in optimizer.explain()
    real = torch.nn.Linear(3, 2, dtype=half)
    for param, other in zip(model.parameters(), real.parameters(), strict=True):
        torch.utils.swap_tensors(param, Parameter(other.detach().clone()))
    late = make("AdamW", real.parameters())
    drive(optimizer, range(2))
    drive(late, range(2))
    for param, other in zip(members(optimizer), members(late), strict=True):
        assert_same(param.detach(), other.detach())


def test_p29_the_group_is_the_persons_own_dict(half: torch.dtype) -> None:
    # as with torch's: what a person holds on to is what the optimizer reads
    group: dict[str, Any] = {"params": iter(params(half)), "lr": 1}
    optimizer = make("AdamW", params(half))
    optimizer.add_param_group(group)
    assert optimizer.param_groups[1] is group
    assert group["lr"] == 1.0
    with pytest.raises(TypeError, match="param_group must be a dict"):
        optimizer.add_param_group([group])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": group["params"]})
    assert len(optimizer.param_groups) == 2
