"""The scaler's arguments, signatures and devices, and a scaler that is disabled."""

import inspect
import re
from typing import Any

import pytest
import torch

import halfstep
from scaled import adamw, param, scales

NAN = float("nan")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"min_scale": 0.0},
            "min_scale=0.0, max_scale=16777216.0: must be 2**-126 <= min_scale <= max_scale <= 2**126",
        ),
        ({"min_scale": 2.0**-127}, "min_scale=5.877471754111438e-39, max_scale=16777216.0: must be"),
        ({"max_scale": 1e300}, "min_scale=6.103515625e-05, max_scale=1e+300: must be"),
        ({"max_scale": NAN}, "min_scale=6.103515625e-05, max_scale=nan: must be"),
        ({"min_scale": 8.0, "max_scale": 4.0}, "min_scale=8.0, max_scale=4.0: must be"),
        ({"init_scale": 2.0**25}, "init_scale=33554432.0: must lie between min_scale=6.10352e-05 and"),
        ({"init_scale": NAN}, "init_scale=nan: must lie between"),
        ({"hysteresis": 0}, "hysteresis=0: must be a whole number >= 1"),
        ({"hysteresis": 1.5}, "hysteresis=1.5: must be a whole number >= 1"),
        ({"at_floor": "ignore"}, "at_floor='ignore': must be 'warn' or 'raise'"),
        ({"backoff_factor": 0.0}, "backoff_factor=0.0: must be greater than 0 and less than 1"),
        ({"backoff_factor": NAN}, "backoff_factor=nan: must be greater than 0 and less than 1"),
    ],
    ids=str,
)
def test_p29_arguments_are_refused_by_name(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
        halfstep.GradScaler(**options)


@pytest.mark.parametrize("options", [{"growth_factor": 1.0}, {"backoff_factor": 1.0}], ids=str)
def test_p16_factors_are_refused_in_torchs_words(options: dict[str, Any]) -> None:
    with pytest.raises(AssertionError) as torchs:
        torch.amp.GradScaler("cpu", **options)
    with pytest.raises(AssertionError, match=f"^{re.escape(str(torchs.value))}$"):
        halfstep.GradScaler(**options)


def test_signatures() -> None:
    ours, torchs = (
        list(inspect.signature(kind).parameters.values()) for kind in (halfstep.GradScaler, torch.amp.GradScaler)
    )
    assert [(p.name, p.default) for p in ours[1:6]] == [(p.name, p.default) for p in torchs[1:]]
    assert ours[0].name == torchs[0].name
    teaching = list(inspect.signature(halfstep.GradScalerFP16).parameters.values())
    assert [(p.name, p.default) for p in teaching] == [(p.name, p.default) for p in ours[1:6]] + [("device", None)]
    assert teaching[-1].kind is inspect.Parameter.KEYWORD_ONLY
    scaler = halfstep.GradScalerFP16(8.0, 3.0, 0.25, 2, device="cpu")
    assert isinstance(scaler, halfstep.GradScaler)
    assert scales(scaler, "..x") == [8.0, 24.0, 6.0]
    assert not halfstep.GradScalerFP16(enabled=False).is_enabled()


def test_the_device_is_the_first_losss() -> None:
    scaler = halfstep.GradScaler()
    scaler.scale(torch.ones((), device="meta"))
    assert scaler._device == "meta"
    assert scaler._scale is not None
    assert scaler._scale.device.type == "meta"
    scaler = halfstep.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    assert scaler._device == "cpu"


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), "xpu", "mps", "meta", torch.device("cpu", 0)], ids=str)
def test_other_devices_are_taken_by_name(device: Any) -> None:
    scaler = halfstep.GradScaler(device)
    assert scaler.is_enabled()
    assert scaler._device == torch.device(device).type


def test_an_unknown_device_is_refused_by_its_name() -> None:
    with pytest.raises(RuntimeError, match="device type at start of device string: gpu"):
        halfstep.GradScaler("gpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="what happens where CUDA is missing")
@pytest.mark.parametrize("device", ["cuda", "cuda:0", torch.device("cuda")], ids=str)
def test_cuda_without_cuda_warns_and_disables_as_torch(device: Any) -> None:
    with pytest.warns(UserWarning, match="CUDA is not available") as torchs:
        torch.amp.GradScaler("cuda")
    with pytest.warns(UserWarning, match=f"^{re.escape(str(torchs[0].message))}$"):
        scaler = halfstep.GradScaler(device)
    assert not scaler.is_enabled()
    assert halfstep.GradScaler("cuda", enabled=False).is_enabled() is False


def test_a_disabled_scaler_stays_out_of_the_way(half: torch.dtype) -> None:
    ours, plain = param([1.0], half), param([1.0], half)
    optimizer, scaler = adamw([ours]), halfstep.GradScaler(enabled=False)
    loss = ours.float().sum()
    outputs = {"loss": loss}
    assert scaler.scale(loss) is loss
    assert scaler.scale(outputs) is outputs
    loss.backward()
    scaler.unscale_(optimizer)
    assert ours.grad is not None
    assert ours.grad.dtype is half
    assert scaler.step(optimizer, lambda: 5.0) == 5.0  # a closure is the optimizer's own affair now
    scaler.update()
    scaler.update(0.0)
    assert not scaler.skipped(optimizer)
    assert scaler.get_scale() == 1.0
    assert scaler.state_dict() == {}
    scaler.load_state_dict({"scale": NAN})
    plain.grad = torch.ones(1, dtype=half)
    reference = adamw([plain])
    reference.step()
    assert torch.equal(ours, plain)
