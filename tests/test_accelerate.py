"""halfstep in Accelerate: scaled, clipped, accumulated, saved and loaded as a plain loop of its own would be."""

import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("accelerate", reason="halfstep[accelerate] brings it")

import accelerate
from accelerate.state import AcceleratorState
from accelerate.utils import GradScalerKwargs

import halfstep
from frameworks import batches, example_losses, gpt2, llama, told_without
from halfstep.integrations.accelerate import Accelerator, install
from harness import assert_equal

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
LOSS_IS_INFINITE = 2


def accelerator_of(*, amp: bool = False, **options: Any) -> Any:
    """An accelerator on the CPU; with ``amp`` as mixed_precision="fp16" makes it on a GPU."""
    made: Any = accelerate.Accelerator(cpu=True, **options)
    if amp:
        made.native_amp, made.state._mixed_precision = True, "fp16"
        made.scaler = torch.amp.GradScaler("cpu")  # pyright: ignore[reportPrivateImportUsage]
    return made


class Run:
    """A model, its optimizer and scheduler, prepared, and the steps they take."""

    def __init__(self, accelerator: Any, model: Any, optimizer: Any, clip: float = 0.5) -> None:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
        self.accelerator, self.clip = accelerator, clip
        self.model, self.optimizer, self.scheduler = accelerator.prepare(model, optimizer, scheduler)
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.skipped: list[bool] = []

    def go(self, numbers: range, overflow: int | None = None) -> "Run":
        for number, batch in enumerate(batches(numbers.stop)):
            if number not in numbers:
                continue
            with self.accelerator.accumulate(self.model):
                loss = self.model(**batch).loss
                self.accelerator.backward(loss * float("inf") if number == overflow else loss)
                if self.accelerator.sync_gradients:
                    self.norms.append(float(self.accelerator.clip_grad_norm_(self.model.parameters(), self.clip)))
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            self.losses.append(loss.item())
            self.skipped.append(self.optimizer.step_was_skipped)
        return self

    def kept(self) -> Any:
        inner = self.optimizer.optimizer
        return [*self.model.parameters()], inner.state_dict(), self.accelerator.scaler.state_dict()


def plain(model: Any, optimizer: Any, scaler: Any, numbers: range, every: int, overflow: int | None) -> list[float]:
    """The loop that Accelerate's comes to: clipped at 0.5, stepped every few batches."""
    rate, norms = optimizer.param_groups[0]["lr"], []
    for number, batch in enumerate(batches(numbers.stop)):
        loss = model(**batch).loss / every
        scaler.scale(loss * float("inf") if number == overflow else loss).backward()
        if (number + 1) % every == 0:
            scaler.unscale_(optimizer)
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
            scaler.step(optimizer)
            if not scaler.skipped(optimizer):
                rate *= 0.95
                optimizer.param_groups[0]["lr"] = rate
            scaler.update()
            optimizer.zero_grad()
    return norms


# ---------------------------------------------------------------------- without halfstep, and with it


def test_stock_float16_raises_under_native_amp() -> None:
    accelerator, model = accelerator_of(amp=True), gpt2(F16)
    run = Run(accelerator, model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(ValueError, match=r"^Attempting to unscale FP16 gradients\.$"):
        run.go(range(1))


def test_stock_float16_becomes_nan_without() -> None:
    model = gpt2(F16)
    run = Run(accelerator_of(), model, torch.optim.AdamW(model.parameters(), lr=1e-3)).go(range(8))
    assert run.losses[-1] != run.losses[-1]


@pytest.mark.parametrize("make", [gpt2, llama])
def test_16_bits_train_as_float32_does(make: Any) -> None:
    def losses(dtype: torch.dtype) -> Tensor:
        accelerator, model = accelerator_of(), make(dtype)
        if dtype is F16:
            install(accelerator)
        kind = torch.optim.AdamW if dtype is F32 else halfstep.AdamW
        return torch.tensor(Run(accelerator, model, kind(model.parameters(), lr=2e-3)).go(range(100)).losses)

    want = losses(F32)
    assert want[-10:].mean() < 0.75 * want[:5].mean()
    for dtype in (F16, BF16):
        # at every step; forward and backward round to 8 or 11 bits, the optimizer does not
        assert ((losses(dtype) - want).abs() / want).max() < 0.01, dtype


@pytest.mark.parametrize("amp", [False, True])
@pytest.mark.parametrize("every", [1, 2])
def test_p11_it_is_a_plain_loop_bit_for_bit(amp: bool, every: int) -> None:
    accelerator = install(accelerator_of(amp=amp, gradient_accumulation_steps=every), init_scale=2.0**12)
    model = gpt2(F16)
    overflow = 5
    run = Run(accelerator, model, halfstep.AdamW(model.parameters(), lr=1e-2)).go(range(10), overflow)
    other = gpt2(F16)
    scaler = halfstep.GradScaler(init_scale=2.0**12)
    optimizer = halfstep.AdamW(other.parameters(), lr=1e-2)
    # under autocast the loss is computed in float32, and so are its batches' means
    around = torch.autocast("cpu", F16) if amp else torch.autocast("cpu", enabled=False)
    with around:
        norms = plain(other, optimizer, scaler, range(10), every, overflow)
    assert [norm for norm in run.norms if norm == norm] == [norm for norm in norms if norm == norm]
    assert len(run.norms) == 10 // every
    states = run.kept(), ([*other.parameters()], optimizer.state_dict(), scaler.state_dict())
    for got, want in zip(*states, strict=True):
        for state in (got, want):
            if isinstance(state, dict):
                # what the scheduler added
                [group.pop("initial_lr", None) for group in state.get("param_groups", ())]
        assert_equal(got, want)
    assert scaler.get_scale() == 2.0**11
    assert run.skipped[overflow]
    assert run.scheduler.get_last_lr() == [optimizer.param_groups[0]["lr"]]


def test_p04_the_norm_is_float32s() -> None:
    norms = []
    for dtype in (F32, F16):
        accelerator, model = accelerator_of(), gpt2(dtype)
        if dtype is F16:
            install(accelerator)
        kind = torch.optim.AdamW if dtype is F32 else halfstep.AdamW
        norms.append(Run(accelerator, model, kind(model.parameters(), lr=0.0)).go(range(4)).norms)
    for want, got in zip(*norms, strict=True):
        # each gradient is rounded to 11 bits, backward's own roundings add up to several of those
        assert got == pytest.approx(want, rel=2**-8)


def test_clipping_by_value_sees_unscaled_gradients() -> None:
    accelerator, model = install(accelerator_of()), gpt2(F16)
    model, optimizer = accelerator.prepare(model, halfstep.AdamW(model.parameters()))
    accelerator.backward(model(**next(batches(1))).loss)
    accelerator.clip_grad_value_(model.parameters(), 1e-3)
    grads = [param.grad for param in model.parameters()]
    assert {grad.dtype for grad in grads} == {F32}
    assert max(grad.abs().max().item() for grad in grads) == pytest.approx(1e-3)
    assert sum(int((grad.abs() < 1e-3).sum()) for grad in grads) > 1000
    optimizer.step()
    assert not optimizer.step_was_skipped


# ---------------------------------------------------------------------- several optimizers


def test_p14_two_optimizers_of_one_loss_move_the_scale_once() -> None:
    accelerator = install(accelerator_of(), init_scale=2.0**12)
    torch.manual_seed(0)
    models = [nn.Linear(8, 8).half(), nn.Linear(8, 8).half()]
    others = [nn.Linear(8, 8).half(), nn.Linear(8, 8).half()]
    for model, other in zip(models, others, strict=True):
        other.load_state_dict(model.state_dict())
    optimizers = [halfstep.AdamW(model.parameters(), lr=1e-2) for model in models]
    alone = [halfstep.AdamW(model.parameters(), lr=1e-2) for model in others]
    *models, first, second = accelerator.prepare(*models, *optimizers)
    scaler = halfstep.GradScaler(init_scale=2.0**12)

    def loss_of(number: int, one: Any, two: Any) -> Tensor:
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(number)).half()
        # the first model alone overflows at the second step
        return (one(x).float() * (float("inf") if number == 1 else 1)).pow(2).mean() + two(x).float().pow(2).mean()

    for number in range(4):
        accelerator.backward(loss_of(number, *models))
        # each clip unscales what it clips
        norms = [accelerator.clip_grad_norm_(model.parameters(), 0.5) for model in models]
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
        scaler.scale(loss_of(number, *others)).backward()
        for optimizer, model, norm in zip(alone, others, norms, strict=True):
            scaler.unscale_(optimizer)
            assert_equal(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5), norm)
            scaler.step(optimizer)
        scaler.update()
        for optimizer in alone:
            optimizer.zero_grad()
        assert [first.step_was_skipped, second.step_was_skipped] == [number == 1, False]
        assert accelerator.scaler.state_dict() == scaler.state_dict()
        for model, other in zip(models, others, strict=True):
            assert_equal([*model.parameters()], [*other.parameters()])
    assert scaler.get_scale() == 2.0**11


def test_a_clip_leaves_other_optimizers_gradients_as_they_are() -> None:
    accelerator = install(accelerator_of())
    models = [nn.Linear(4, 4).half(), nn.Linear(4, 4).half()]
    *models, _, _ = accelerator.prepare(*models, *(halfstep.AdamW(model.parameters()) for model in models))
    accelerator.backward(sum(model(torch.ones(2, 4).half()).float().sum() for model in models))
    accelerator.clip_grad_norm_(models[0].weight, 1.0)
    assert models[0].bias.grad.dtype is F32
    assert models[1].weight.grad.dtype is F16
    accelerator.unscale_gradients()
    assert models[1].weight.grad.dtype is F32


# ---------------------------------------------------------------------- saved and loaded


@pytest.mark.parametrize("formats", [("split16", "float32"), ("split8", "block8")])
def test_p19_save_state_and_load_state_go_on_bit_for_bit(formats: tuple[str, str], tmp_path: Path) -> None:
    weights, moments = formats

    def fresh(seed: int) -> Run:
        accelerator, model = install(accelerator_of(), init_scale=2.0**12, growth_interval=3), llama(F16, seed)
        return Run(accelerator, model, halfstep.AdamW(model.parameters(), lr=1e-2, weights=weights, moments=moments))

    whole = fresh(0).go(range(10), LOSS_IS_INFINITE)
    first = fresh(0).go(range(5), LOSS_IS_INFINITE)
    first.accelerator.save_state(str(tmp_path))
    assert (tmp_path / "scaler.pt").exists()
    AcceleratorState._reset_state(True)
    second = fresh(1)
    second.accelerator.load_state(str(tmp_path))
    second.go(range(5, 10))
    assert_equal(second.kept(), whole.kept(), ordered=False)
    assert second.scheduler.get_last_lr() == whole.scheduler.get_last_lr()
    assert whole.accelerator.scaler.get_scale() > 2.0**11


# ---------------------------------------------------------------------- what it takes, and what not


def test_the_scalers_options_come_from_the_handler_and_the_call() -> None:
    handler = GradScalerKwargs(init_scale=2.0**9, growth_interval=7)
    accelerator = install(accelerator_of(kwargs_handlers=[handler]), growth_interval=5, hysteresis=2)
    scaler = accelerator.scaler
    assert isinstance(scaler, halfstep.GradScaler)
    assert (scaler.get_scale(), scaler.get_growth_interval(), scaler.state_dict()["hysteresis"]) == (2.0**9, 5, 2)
    with pytest.raises(ValueError, match="init_scale=0"):
        install(accelerator_of(), init_scale=0.0)
    assert isinstance(Accelerator(cpu=True).scaler, halfstep.GradScaler)


def test_p29_what_is_prepared_already_is_refused() -> None:
    accelerator, model = accelerator_of(), nn.Linear(2, 2).half()
    accelerator.prepare(halfstep.AdamW(model.parameters()))
    with pytest.raises(RuntimeError, match=r"prepared before install\(accelerator\).*install first"):
        install(accelerator)
    assert accelerator.scaler is None


def test_p29_who_scales_by_himself_is_refused() -> None:
    accelerator = accelerator_of()
    accelerator.state.distributed_type = accelerate.DistributedType.DEEPSPEED
    with pytest.raises(ValueError, match="DEEPSPEED scales gradients by itself and takes no scaler"):
        install(accelerator)
    assert accelerator.scaler is None


def test_p29_a_clip_amid_accumulation_is_refused() -> None:
    accelerator, model = install(accelerator_of(gradient_accumulation_steps=2)), gpt2(F16)
    model, _ = accelerator.prepare(model, halfstep.AdamW(model.parameters()))
    with accelerator.accumulate(model):
        accelerator.backward(model(**next(batches(1))).loss)
        with pytest.raises(RuntimeError, match=r"while they are accumulated.*`if accelerator\.sync_gradients:`"):
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
    assert {param.grad.dtype for param in model.parameters()} == {F16}


@pytest.mark.parametrize("amp", [False, True])
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": True}], ids=str)
def test_p17_a_stock_optimizer_is_named_before_anything_changes(amp: bool, clip: bool, options: Any) -> None:
    accelerator, model = install(accelerator_of(amp=amp)), gpt2(F16)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), **options))
    before = [param.detach().clone() for param in model.parameters()]
    accelerator.backward(model(**next(batches(1))).loss)
    act = functools.partial(accelerator.clip_grad_norm_, model.parameters(), 1.0) if clip else optimizer.step
    with pytest.raises(
        ValueError, match=r"^Attempting to unscale FP16 gradients\. AdamW would step .*optimizer = halfstep\.AdamW"
    ):
        act()
    assert_equal([param.detach() for param in model.parameters()], before)


def test_p17_a_stock_optimizer_of_float32_weights_is_stepped() -> None:
    accelerator, model = install(accelerator_of()), gpt2(F32)
    run = Run(accelerator, model, torch.optim.AdamW(model.parameters(), lr=1e-2)).go(range(6), LOSS_IS_INFINITE)
    assert run.skipped == [number == LOSS_IS_INFINITE for number in range(6)]
    assert run.losses[-1] < run.losses[0]


def test_the_fused_clip_and_the_weights_are_reached_through_the_wrapper() -> None:
    accelerator, model = install(accelerator_of()), gpt2(F16)
    model, optimizer = accelerator.prepare(model, halfstep.AdamW(model.parameters()))
    accelerator.backward(model(**next(batches(1))).loss)
    norm = halfstep.clip_grad_norm_(optimizer, 1.0, accelerator.scaler)
    assert {param.grad.dtype for param in model.parameters()} == {F16}
    scale = accelerator.scaler.get_scale()
    squares = sum(float(param.grad.double().div(scale).pow(2).sum()) for param in model.parameters())
    assert norm.item() == pytest.approx(squares**0.5)
    optimizer.step()
    weights = halfstep.float32_state_dict(model, optimizer)
    assert {weight.dtype for weight in weights.values()} == {F32}
    assert not accelerator.scaler.skipped(optimizer)


def test_the_example_is_the_float32_script_with_three_other_lines() -> None:
    want, got = example_losses("accelerate", "--cpu", "--steps", "20")
    # as in the test above
    assert got == pytest.approx(want, rel=0.01)


SCRIPT = """
import os, sys, torch, halfstep
from accelerate import Accelerator
from halfstep.integrations.accelerate import install

accelerator = install(Accelerator(cpu=True), init_scale=2.0**12)
torch.manual_seed(accelerator.process_index)
model = torch.nn.Linear(8, 8).half()
optimizer = halfstep.AdamW(model.parameters(), lr=1e-2)
model, optimizer = accelerator.prepare(model, optimizer)
for step in range(4):
    # one process's batch overflows at the second step
    bad = float("inf") if step == 1 and accelerator.process_index == 1 else 1.0
    accelerator.backward(model(torch.randn(4, 8).half()).float().pow(2).mean() * bad)
    norm = accelerator.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    assert optimizer.step_was_skipped == (step == 1)
accelerator.save_state(sys.argv[1])
# the first process writes
accelerator.wait_for_everyone()
accelerator.load_state(sys.argv[1])
weights = accelerator.gather(torch.stack([param.detach().double().sum() for param in model.parameters()])[None])
if accelerator.is_main_process:
    print(accelerator.num_processes, accelerator.scaler.get_scale(), torch.equal(weights[0], weights[1]), flush=True)
accelerator.wait_for_everyone()
# torch's threads of a process group now and then abort Python's own end, stock optimizers' runs as well
os._exit(0)
"""


def test_p11_two_processes_that_accelerate_launch_decide_alike(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    # torch's launcher, which is behind --multi_gpu; for CPUs alone Accelerate's own wants MPI
    launch = "-m accelerate.commands.launch --multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no"
    launch += " --dynamo_backend no --num_cpu_threads_per_process 1 --main_process_port 0"
    command = [sys.executable, *launch.split(), str(script), str(tmp_path / "state")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["2", "2048.0", "True"]


def test_p29_without_the_library_the_import_says_what_to_install() -> None:
    told = "ImportError: halfstep.integrations.accelerate needs Accelerate: pip install 'halfstep[accelerate]'"
    assert told_without("accelerate", "accelerate") == told
