"""halfstep in Lightning's Trainer and in Fabric: scaled, clipped, accumulated and saved as a plain loop would be."""

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR, OneCycleLR, ReduceLROnPlateau
from torch.utils.data import DataLoader

pytest.importorskip("lightning", reason="halfstep[lightning] brings it")

import lightning
import lightning_fabric
import pytorch_lightning
from lightning.pytorch.loops.optimization.automatic import Closure
from lightning.pytorch.plugins import MixedPrecision

import halfstep
from frameworks import batches, example_losses, gpt2, llama, told_without
from halfstep.integrations import pytorch_lightning as other_package
from halfstep.integrations.lightning import Float16FabricPrecision, Float16Precision
from harness import assert_equal
from training import members

pytestmark = [
    # Lightning's own use of torch, and its advice
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore::pytorch_lightning.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*`tensorboardX` has been removed"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
]

F16, F32 = torch.float16, torch.float32
INF = float("inf")
#: far enough below 2**16 that nothing overflows but what is made to
OPTIONS: dict[str, Any] = {"init_scale": 2.0**12, "growth_interval": 3}


def trainer(folder: Path, *, package: Any = lightning, **options: Any) -> Any:
    """A Trainer on the CPU that says and writes nothing."""
    quiet = dict.fromkeys(("enable_progress_bar", "enable_model_summary", "enable_checkpointing", "logger"), False)
    return package.Trainer(
        **{"accelerator": "cpu", "devices": 1, "max_epochs": 1, "default_root_dir": folder, **quiet, **options}
    )


def fit(run: Any, module: Any, data: list[Any], **options: Any) -> Any:
    """Train on batches, and return the module."""
    run.fit(module, DataLoader(data, batch_size=None), **options)  # type: ignore[arg-type]
    return module


def text(count: int, bad: tuple[int, ...] = ()) -> list[dict[str, Tensor]]:
    """Batches of text; the loss of those that are ``bad`` is to be infinite."""
    return [
        {**batch, "times": torch.tensor(INF if number in bad else 1.0)} for number, batch in enumerate(batches(count))
    ]


def noise(count: int, bad: tuple[int, ...] = ()) -> list[tuple[Tensor, Tensor]]:
    """Inputs of `Two`, each with the factor of a loss."""
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(4, 8, generator=generator), torch.tensor(INF if number in bad else 1.0)) for number in range(count)
    ]


def loss_of(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return model(input_ids=batch["input_ids"], labels=batch["labels"]).loss * batch["times"]


class Language(lightning.LightningModule):
    """A language model in automatic optimization."""

    def __init__(self, model: Any, kind: Any = halfstep.AdamW, lr: float = 2e-3, **options: Any) -> None:
        super().__init__()
        self.model, self.losses = model, []
        self.make = functools.partial(kind, lr=lr, **options)

    def training_step(self, batch: Any, number: int) -> Tensor:
        loss = loss_of(self.model, batch)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return self.make(self.model.parameters())


class Two(lightning.LightningModule):
    """Two layers with an optimizer each, in manual optimization."""

    def __init__(self, way: Callable[["Two", Any, int], None], schedule: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.layers, self.way, self.schedule = layers(), way, schedule

    def training_step(self, batch: Any, number: int) -> None:
        self.way(self, batch, number)

    def configure_optimizers(self) -> Any:
        optimizers = [halfstep.AdamW(layer.parameters(), lr=1e-2) for layer in self.layers]
        return (optimizers, [ExponentialLR(each, 0.5) for each in optimizers]) if self.schedule else optimizers


class One(lightning.LightningModule):
    """One layer in automatic optimization, with a scheduler."""

    def __init__(self, schedule: Callable[[Any], Any] | None = None) -> None:
        super().__init__()
        self.layer, self.schedule, self.rates = layers()[0], schedule, []

    def training_step(self, batch: Any, number: int) -> Tensor | None:
        x, times = batch
        self.log("loss", 1.0)
        return squares(self.layer, x) * times

    def configure_optimizers(self) -> Any:
        optimizer = halfstep.AdamW(self.parameters(), lr=1.0)
        return {"optimizer": optimizer, **({"lr_scheduler": self.schedule(optimizer)} if self.schedule else {})}

    def on_train_batch_start(self, batch: Any, number: int) -> None:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])


def squares(layer: Any, x: Tensor) -> Tensor:
    return layer(x).float().pow(2).mean()


def layers() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])


@contextmanager
def computing(dtype: torch.dtype) -> Iterator[None]:
    """As Lightning's half precision computes: what a model makes meanwhile is in ``dtype``."""
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(F32)


def kept(model: nn.Module, optimizers: list[Any], scaler: Any) -> list[Any]:
    """What a run comes to: weights, the optimizers' states and the scaler's."""
    return [[*model.parameters()], [optimizer.state_dict() for optimizer in optimizers], scaler.state_dict()]


def norm_of(optimizer: Any) -> float:
    """The norm of an optimizer's gradients as they are."""
    grads: list[Any] = [param.grad for param in members(optimizer)]
    return sum(float(grad.double().pow(2).sum()) for grad in grads) ** 0.5


# ---------------------------------------------------------------------- without halfstep, and with it


def test_stock_true_half_becomes_nan(tmp_path: Path) -> None:
    module = Language(gpt2(F32), torch.optim.AdamW)
    fit(trainer(tmp_path, precision="16-true"), module, text(8))
    assert module.losses[-1] != module.losses[-1]


def test_the_stock_scaler_raises(tmp_path: Path) -> None:
    module = Language(gpt2(F16), torch.optim.AdamW)
    with pytest.raises(ValueError, match=r"^Attempting to unscale FP16 gradients\.$"):
        fit(trainer(tmp_path, plugins=MixedPrecision("16-mixed", "cpu")), module, text(1))


def halves(plugin: Any) -> list[tuple[dict[str, Any], float]]:
    """Options of 16 bits, and how far from float32's its losses may lie at any step.

    Forward and backward round to 11 or 8 bits, the optimizer does not: seen were 0.0003 and 0.001. The scale is one
    that no gradient overflows at, since a step that is left out is a step behind. At twice the learning rate float32
    itself, from weights 2**-12 apart, comes to losses that differ by 0.013.
    """
    return [({"plugins": plugin(init_scale=2.0**12)}, 0.001), ({"precision": "bf16-true"}, 0.005)]


def test_16_bits_train_as_float32_does_in_the_trainer(tmp_path: Path) -> None:
    def losses(kind: Any, **options: Any) -> Tensor:
        module = Language(llama(F32), kind, lr=1e-3)
        fit(trainer(tmp_path, gradient_clip_val=1.0, **options), module, text(100))
        return torch.tensor(module.losses)

    want = losses(torch.optim.AdamW)
    assert want[-10:].mean() < 0.75 * want[:5].mean()
    for options, bound in halves(Float16Precision):
        assert ((losses(halfstep.AdamW, **options) - want).abs() / want).max() < bound, options


def test_16_bits_train_as_float32_does_in_fabric() -> None:
    def losses(kind: Any, **options: Any) -> Tensor:
        fabric, seen = lightning.Fabric(accelerator="cpu", devices=1, **options), []
        model = gpt2(F32)
        model, optimizer = fabric.setup(model, kind(model.parameters(), lr=1e-3))
        for batch in batches(100):
            loss = model(**batch).loss
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.item())
        return torch.tensor(seen)

    want = losses(torch.optim.AdamW)
    assert want[-10:].mean() < 0.75 * want[:5].mean()
    for options, bound in halves(Float16FabricPrecision):
        assert ((losses(halfstep.AdamW, **options) - want).abs() / want).max() < bound, options


CLIPS: dict[str, dict[str, Any]] = {
    "none": {},
    "norm": {"gradient_clip_val": 0.5},
    "value": {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"},
}


def plain(model: Any, optimizer: Any, scaler: Any, data: list[Any], every: int = 1, clip: str = "none") -> None:
    """The loop that the Trainer's comes to."""
    for number, batch in enumerate(data):
        with computing(F16):
            loss = loss_of(model, batch) / every
        scaler.scale(loss).backward()
        if (number + 1) % every == 0:
            if clip != "none":
                scaler.unscale_(optimizer)
            if clip == "norm":
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            if clip == "value":
                torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("every", [1, 2])
def test_p11_the_trainer_is_a_plain_loop_bit_for_bit(tmp_path: Path, every: int, clip: str) -> None:
    data, plugin = text(10, bad=(5,)), Float16Precision(**OPTIONS)
    run = trainer(tmp_path, plugins=plugin, accumulate_grad_batches=every, **CLIPS[clip])
    module = fit(run, Language(gpt2(F32)), data)
    model = gpt2(F32).half()
    optimizer, scaler = halfstep.AdamW(model.parameters(), lr=2e-3), halfstep.GradScaler(**OPTIONS)
    plain(model, optimizer, scaler, data, every, clip)
    assert_equal(kept(module.model, run.optimizers, run.scaler), kept(model, [optimizer], scaler))
    # one overflow, and in 10 steps two growths, in 5 none
    assert scaler.get_scale() == 2.0 ** (13 if every == 1 else 11)
    assert run.scaler is plugin.scaler


@pytest.mark.parametrize("clip", CLIPS)
def test_p11_fabric_is_a_plain_loop_bit_for_bit(clip: str) -> None:
    data, plugin = text(10, bad=(5,)), Float16FabricPrecision(**OPTIONS)
    fabric = lightning.Fabric(accelerator="cpu", devices=1, plugins=plugin)
    model = gpt2(F32)
    wrapped, ours = fabric.setup(model, halfstep.AdamW(model.parameters(), lr=2e-3))
    for batch in data:
        fabric.backward(loss_of(wrapped, batch))
        if clip == "norm":
            # Fabric's default raises for the overflow
            fabric.clip_gradients(wrapped, ours, max_norm=0.5, error_if_nonfinite=False)
        if clip == "value":
            fabric.clip_gradients(wrapped, ours, clip_val=1e-3)
        ours.step()
        ours.zero_grad()
    other = gpt2(F32).half()
    optimizer, scaler = halfstep.AdamW(other.parameters(), lr=2e-3), halfstep.GradScaler(**OPTIONS)
    plain(other, optimizer, scaler, data, clip=clip)
    assert_equal(kept(model, [ours], plugin.scaler), kept(other, [optimizer], scaler))


# ---------------------------------------------------------------------- what hooks and clipping see


def test_p04_hooks_see_the_norm_that_float32_has(tmp_path: Path) -> None:
    class Watched(Language):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            norms[-1].append(norm_of(optimizer))

        def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
            super().configure_gradient_clipping(optimizer, *args, **kwargs)
            clipped[-1].append(norm_of(optimizer))

    norms: list[list[float]] = []
    clipped: list[list[float]] = []
    for kind, options in ((torch.optim.AdamW, {}), (halfstep.AdamW, {"plugins": Float16Precision()})):
        norms.append([])
        clipped.append([])
        fit(trainer(tmp_path, gradient_clip_val=0.5, **options), Watched(gpt2(F32), kind, lr=0.0), text(4))
    assert len(norms[0]) == 4
    # each gradient is rounded to 11 bits, backward's own roundings add up to several of those
    assert norms[1] == pytest.approx(norms[0], rel=2**-8)
    # torch divides by the norm and a millionth
    assert clipped == [pytest.approx([0.5] * 4, rel=1e-5)] * 2


@pytest.mark.parametrize("who", ["module", "callback", "configure_gradient_clipping", "nobody"])
def test_gradients_are_float32_where_a_hook_is_given_them_and_nowhere_else(tmp_path: Path, who: str) -> None:
    seen: list[Any] = []

    def look(module: One) -> None:
        seen.append([param.grad for param in module.parameters()])

    class Callback(lightning.Callback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            look(pl_module)

    class Hooked(One):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            look(self)

    class Clipping(One):
        def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
            look(self)

    class Stepped(One):
        def configure_optimizers(self) -> Any:
            made = super().configure_optimizers()
            # where gradients were unscaled they are dropped after this
            made["optimizer"].register_step_post_hook(lambda *_: look(self))
            return made

    kinds = {"module": Hooked, "configure_gradient_clipping": Clipping, "callback": One, "nobody": Stepped}
    module, data = kinds[who](), noise(2)
    callbacks = [Callback()] if who == "callback" else []
    fit(trainer(tmp_path, plugins=Float16Precision(**OPTIONS), callbacks=callbacks), module, data)
    layer = layers()[0].half()
    squares(layer, data[0][0].half()).mul(2.0**12).backward()
    scaled = [param.grad for param in layer.parameters()]
    want = scaled if who == "nobody" else [grad.float() / 2.0**12 for grad in scaled if grad is not None]
    assert len(seen) == 2
    assert_equal(seen[0], want)


def test_a_training_step_without_a_loss_changes_nothing(tmp_path: Path) -> None:
    class Sometimes(One):
        def training_step(self, batch: Any, number: int) -> Tensor | None:
            before.append([param.detach().clone() for param in self.parameters()])
            return super().training_step(batch, number) if number % 3 == 1 else None

    def rates(optimizer: Any) -> Any:
        return {"scheduler": ExponentialLR(optimizer, 0.5), "interval": "step"}

    for clip in ({}, {"gradient_clip_val": 0.5}):
        before: list[Any] = []
        run = trainer(tmp_path, plugins=Float16Precision(), **clip)
        Closure.warning_cache.clear()
        with pytest.warns(UserWarning, match="`training_step` returned `None`"):
            module = fit(run, Sometimes(rates), noise(5))
        # 0 and 2, 3 moved nothing; 1 did
        assert_equal(before[1], before[0])
        assert_equal(before[4], before[2])
        assert not torch.equal(before[1][0], before[2][0])
        # the scheduler moves as in float32
        assert module.rates == [0.5**number for number in range(5)]


def test_gradients_before_a_batch_without_a_loss_are_stepped_as_in_float32(tmp_path: Path) -> None:
    class Half(One):
        def training_step(self, batch: Any, number: int) -> Tensor | None:
            return super().training_step(batch, number) if number % 2 == 0 else None

    run = trainer(tmp_path, plugins=Float16Precision(), accumulate_grad_batches=2)
    Closure.warning_cache.clear()
    with pytest.warns(UserWarning, match="`training_step` returned `None`"):
        fit(run, Half(), noise(4))
    assert {state["step"] for state in run.optimizers[0].state.values()} == {2}


def test_a_module_may_run_the_closure_by_itself(tmp_path: Path) -> None:
    class Own(Language):
        def optimizer_step(self, epoch: int, number: int, optimizer: Any, optimizer_closure: Any) -> None:
            optimizer_closure()
            # gradients of the first of two batches are let go
            if number % 2:
                optimizer.step()

    data, plugin = text(4, bad=(3,)), Float16Precision(**OPTIONS)
    run = trainer(tmp_path, plugins=plugin)
    module = fit(run, Own(gpt2(F32)), data)
    model = gpt2(F32).half()
    optimizer, scaler = halfstep.AdamW(model.parameters(), lr=2e-3), halfstep.GradScaler(**OPTIONS)
    plain(model, optimizer, scaler, data[1::2])
    assert_equal(kept(module.model, run.optimizers, run.scaler), kept(model, [optimizer], scaler))


# ---------------------------------------------------------------------- manual optimization


def manual(folder: Path, way: Any, data: list[Any], **options: Any) -> tuple[Two, Any]:
    """Train `Two` in a way of its own."""
    run = trainer(folder, plugins=Float16Precision(**OPTIONS))
    module = fit(run, Two(way, **options), data)
    return module, run


def by_hand(way: Callable[..., None], data: list[Any]) -> list[Any]:
    """Train the layers of `Two` with a scaler, and return what the run comes to."""
    both, scaler = layers().half(), halfstep.GradScaler(**OPTIONS)
    optimizers = [halfstep.AdamW(layer.parameters(), lr=1e-2) for layer in both]
    for number, (x, times) in enumerate(data):
        way(both, optimizers, scaler, x.half(), times, number)
    return kept(both, optimizers, scaler)


@pytest.mark.parametrize("overflows", [0, 1])
@pytest.mark.parametrize("clip", [False, True])
def test_p14_two_optimizers_of_one_backward_move_the_scale_once(tmp_path: Path, overflows: int, clip: bool) -> None:
    def loss(both: Any, x: Tensor, times: Tensor) -> Tensor:
        parts = [squares(layer, x) for layer in both]
        parts[overflows] = parts[overflows] * times
        return parts[0] + parts[1]

    def way(self: Two, batch: Any, number: int) -> None:
        optimizers: Any = self.optimizers()
        self.manual_backward(loss(self.layers, *batch))
        for optimizer in optimizers:
            if clip:
                self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()
            scaler: Any = self.trainer.scaler
            skipped.append(scaler.skipped(optimizer))

    def hand(both: Any, optimizers: Any, scaler: Any, x: Tensor, times: Tensor, number: int) -> None:
        scaler.scale(loss(both, x, times)).backward()
        for optimizer in optimizers:
            if clip:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(members(optimizer), 0.1)
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()

    skipped: list[bool] = []
    # growths at the third step and the eighth: the second optimizer steps when the scale has moved already
    data = noise(9, bad=(4,))
    module, run = manual(tmp_path, way, data)
    assert_equal(kept(module.layers, run.optimizers, run.scaler), by_hand(hand, data))
    assert [place for place, each in enumerate(skipped) if each] == [2 * 4 + overflows]
    assert run.scaler.get_scale() == 2.0**13


def test_a_backward_for_each_of_two_optimizers(tmp_path: Path) -> None:
    def way(self: Two, batch: Any, number: int) -> None:
        (x, times), (first, second) = batch, self.layers
        makes, judges = self.optimizers()  # type: ignore[misc]
        makes.zero_grad()
        self.manual_backward(squares(second, first(x)))
        makes.step()
        judges.zero_grad()
        self.manual_backward(squares(second, first(x).detach()) * times)
        judges.step()

    def hand(both: Any, optimizers: Any, scaler: Any, x: Tensor, times: Tensor, number: int) -> None:
        (first, second), (makes, judges) = both, optimizers
        makes.zero_grad()
        scaler.scale(squares(second, first(x))).backward()
        scaler.step(makes)
        scaler.update()
        judges.zero_grad()
        scaler.scale(squares(second, first(x).detach()) * times).backward()
        scaler.step(judges)
        scaler.update()

    data = noise(6, bad=(2,))
    module, run = manual(tmp_path, way, data)
    assert_equal(kept(module.layers, run.optimizers, run.scaler), by_hand(hand, data))
    # of 12 updates the sixth falls, the third, the ninth and the twelfth grow
    assert run.scaler.get_scale() == 2.0**14


@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_manual_accumulation_clips_what_is_unscaled(tmp_path: Path, closure: bool, algorithm: str) -> None:
    def way(self: Two, batch: Any, number: int) -> None:
        x, times = batch
        optimizer: Any = self.optimizers()[0]  # type: ignore[index]

        def backward() -> Tensor:
            loss = squares(self.layers[0], x) * times
            self.manual_backward(loss)
            return loss

        if number % 2 == 0:
            backward()
        elif closure:
            # then Lightning's own order: closure, hooks, step
            assert optimizer.step(closure=backward).item() > 0
            optimizer.zero_grad()
        else:
            backward()
            self.clip_gradients(optimizer, gradient_clip_val=1e-2, gradient_clip_algorithm=algorithm)
            optimizer.step()
            optimizer.zero_grad()

    def hand(both: Any, optimizers: Any, scaler: Any, x: Tensor, times: Tensor, number: int) -> None:
        scaler.scale(squares(both[0], x) * times).backward()
        if number % 2:
            if not closure:
                scaler.unscale_(optimizers[0])
                if algorithm == "norm":
                    torch.nn.utils.clip_grad_norm_(members(optimizers[0]), 1e-2)
                else:
                    torch.nn.utils.clip_grad_value_(members(optimizers[0]), 1e-2)
            scaler.step(optimizers[0])
            scaler.update()
            optimizers[0].zero_grad()

    data = noise(8, bad=(2,))
    module, run = manual(tmp_path, way, data)
    assert_equal(kept(module.layers, run.optimizers, run.scaler), by_hand(hand, data))
    assert run.scaler.get_scale() == 2.0**11


def test_what_manual_optimization_calls_itself_is_held(tmp_path: Path) -> None:
    def way(self: Two, batch: Any, number: int) -> None:
        x, times = batch
        optimizer: Any = self.optimizers()[0]  # type: ignore[index]
        optimizer.zero_grad()
        self.manual_backward(squares(self.layers[0], x) * times)
        optimizer.step()
        self.lr_schedulers()[0].step()  # type: ignore[index]
        rates.append(optimizer.param_groups[0]["lr"])

    rates: list[float] = []
    manual(tmp_path, way, noise(5, bad=(0, 3)), schedule=True)
    assert rates == [0.01, 0.005, 0.0025, 0.0025, 0.00125]


# ---------------------------------------------------------------------- schedulers


def test_skipped_steps_do_not_advance_schedulers(tmp_path: Path) -> None:
    def rates(name: str, bad: tuple[int, ...], kind: Any, *args: Any, count: int = 6, **config: Any) -> list[float]:
        plugin = Float16Precision(init_scale=2.0**4)
        epochs = config.pop("max_epochs", 1)
        # the first step of all may be skipped: torch's warning of a wrong order would be an error here
        module = One(lambda optimizer: {"scheduler": kind(optimizer, *args), "interval": "step", **config})
        run = trainer(tmp_path / name, plugins=plugin, max_epochs=epochs)
        fit(run, module, noise(count, bad))
        return [*module.rates, run.optimizers[0].param_groups[0]["lr"]]

    held = rates("step", (0, 3), ExponentialLR, 0.5)
    assert held == [1.0, 1.0, 0.5, 0.25, 0.25, 0.125, 0.0625]
    # asked after every second batch: held where both were skipped
    held = rates("twice", (1, 2, 3), ExponentialLR, 0.5, frequency=2)
    assert held == [1.0, 1.0, 0.5, 0.5, 0.5, 0.5, 0.25]
    healthy = rates("cycle", (), OneCycleLR, 1.0, 8, count=4)
    held = rates("held cycle", (0, 3), OneCycleLR, 1.0, 8, count=6)
    assert [held[place] for place in (0, 2, 3, 5, 6)] == healthy
    assert held[0] == held[1]
    assert held[3] == held[4]


def test_a_scheduler_of_epochs_moves_although_the_last_step_was_skipped(tmp_path: Path) -> None:
    module = One(lambda optimizer: ExponentialLR(optimizer, 0.5))
    fit(trainer(tmp_path, plugins=Float16Precision(), max_epochs=3), module, noise(2, bad=(1,)))
    assert module.rates == [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]


def test_a_scheduler_that_watches_a_measure_is_given_it(tmp_path: Path) -> None:
    def plateau(optimizer: Any) -> Any:
        return {"scheduler": ReduceLROnPlateau(optimizer, factor=0.5, patience=0), "monitor": "loss"}

    module = One(plateau)
    run = trainer(tmp_path, plugins=Float16Precision(), max_epochs=4)
    fit(run, module, noise(2, bad=(1,)))
    # the measure never falls; the first epoch's is the best until then
    assert module.rates[::2] == [1.0, 1.0, 0.5, 0.25]


def test_a_scheduler_that_is_not_torchs_is_let(tmp_path: Path) -> None:
    class Counting:
        def __init__(self, optimizer: Any) -> None:
            self.optimizer, self.count = optimizer, 0

        def step(self) -> None:
            self.count += 1

        def state_dict(self) -> dict[str, Any]:
            return {"count": self.count}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.count = state["count"]

    class Own(One):
        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            scheduler.step()

    module = Own(lambda optimizer: {"scheduler": Counting(optimizer), "interval": "step"})
    run = trainer(tmp_path, plugins=Float16Precision())
    fit(run, module, noise(3, bad=(1,)))
    assert run.lr_scheduler_configs[0].scheduler.state_dict() == {"count": 3}


# ---------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("formats", [{}, {"weights": "split8", "moments": "block8"}], ids=str)
def test_p19_the_trainer_goes_on_bit_for_bit(tmp_path: Path, formats: dict[str, Any]) -> None:
    class Scheduled(Language):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return [optimizer], [{"scheduler": ExponentialLR(optimizer, 0.9), "interval": "step"}]

    def run(epochs: int, **resumed: Any) -> tuple[Any, Any]:
        made = trainer(tmp_path, plugins=Float16Precision(**OPTIONS), max_epochs=epochs, gradient_clip_val=0.5)
        module = fit(made, Scheduled(gpt2(F32), **formats), text(6, bad=(3,)), **resumed)
        return made, module

    def end(made: Any, module: Any) -> Any:
        rates = [config.scheduler.state_dict() for config in made.lr_scheduler_configs]
        return kept(module.model, made.optimizers, made.scaler), rates

    first, _ = run(1)
    first.save_checkpoint(file := tmp_path / "six.ckpt")
    assert torch.load(file, weights_only=True)["Float16Precision"] == first.scaler.state_dict()
    assert_equal(end(*run(2, ckpt_path=file)), end(*run(2)), ordered=False)


def test_p19_fabric_goes_on_bit_for_bit(tmp_path: Path) -> None:
    def make() -> Any:
        plugin, model = Float16FabricPrecision(**OPTIONS), gpt2(F32)
        fabric = lightning.Fabric(accelerator="cpu", devices=1, plugins=plugin)
        model, optimizer = fabric.setup(model, halfstep.AdamW(model.parameters(), lr=2e-3))
        return fabric, {"model": model, "optimizer": optimizer, "scaler": plugin.scaler}

    def go(fabric: Any, state: Any, data: list[Any]) -> None:
        for batch in data:
            fabric.backward(loss_of(state["model"], batch))
            state["optimizer"].step()
            state["optimizer"].zero_grad()

    def end(state: Any) -> Any:
        return kept(state["model"], [state["optimizer"]], state["scaler"])

    data = text(12, bad=(4, 9))
    fabric, whole = make()
    go(fabric, whole, data)
    fabric, state = make()
    go(fabric, state, data[:6])
    fabric.save(tmp_path / "six.ckpt", state)
    fabric, state = make()
    fabric.load(tmp_path / "six.ckpt", state)
    go(fabric, state, data[6:])
    assert_equal(end(state), end(whole))


# ---------------------------------------------------------------------- Fabric


def test_p14_two_optimizers_in_fabric_move_the_scale_once() -> None:
    plugin = Float16FabricPrecision(**OPTIONS)
    fabric = lightning.Fabric(accelerator="cpu", devices=1, plugins=plugin)
    pairs = [fabric.setup(layer, halfstep.AdamW(layer.parameters(), lr=1e-2)) for layer in layers()]
    data = noise(5, bad=(3,))

    def hand(both: Any, optimizers: Any, scaler: Any, x: Tensor, times: Tensor, number: int) -> None:
        scaler.scale(squares(both[0], x) * times + squares(both[1], x)).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()

    for x, times in data:
        fabric.backward(squares(pairs[0][0], x) * times + squares(pairs[1][0], x))
        for _, optimizer in pairs:
            optimizer.step()
            optimizer.zero_grad()
    models = nn.ModuleList([model.module for model, _ in pairs])
    assert_equal(kept(models, [optimizer for _, optimizer in pairs], plugin.scaler), by_hand(hand, data))


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_scheduler_in_fabric_is_held_by_hand(wrapped: bool) -> None:
    plugin, layer = Float16FabricPrecision(), layers()[0]
    fabric = lightning.Fabric(accelerator="cpu", devices=1, plugins=plugin)
    inner = halfstep.AdamW(layer.parameters(), lr=1.0)
    model, optimizer = fabric.setup(layer, inner)
    over: Any = optimizer if wrapped else inner
    scheduler = halfstep.hold_scheduler(ExponentialLR(over, 0.5), plugin.scaler)
    rates = []
    for x, times in noise(4, bad=(0, 2)):
        fabric.backward(squares(model, x) * times)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        rates.append(inner.param_groups[0]["lr"])
    assert rates == [1.0, 0.5, 0.5, 0.25]


# ---------------------------------------------------------------------- errors, packages, processes, examples


@pytest.mark.parametrize("clip", [{}, {"gradient_clip_val": 1.0}], ids=["", "clip"])
@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": True}], ids=str)
def test_p17_a_stock_optimizer_is_named_before_anything_changes(tmp_path: Path, options: Any, clip: Any) -> None:
    told = r"^Attempting to unscale FP16 gradients\. AdamW would step .*optimizer = halfstep\.AdamW"
    module = Language(gpt2(F32), torch.optim.AdamW, **options)
    before = copy.deepcopy(module.model).half().state_dict()
    with pytest.raises(ValueError, match=told):
        fit(trainer(tmp_path, plugins=Float16Precision(), **clip), module, text(1))
    assert_equal(dict(module.model.state_dict()), dict(before))

    fabric, model = lightning.Fabric(accelerator="cpu", devices=1, plugins=Float16FabricPrecision()), gpt2(F32)
    wrapped, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), **options))
    fabric.backward(loss_of(wrapped, text(1)[0]))
    act = functools.partial(fabric.clip_gradients, wrapped, optimizer, max_norm=1.0) if clip else optimizer.step
    with pytest.raises(ValueError, match=told):
        act()
    assert_equal(dict(model.state_dict()), dict(before))


@pytest.mark.parametrize("kind", [Float16Precision, Float16FabricPrecision])
def test_p29_options_are_the_scalers(kind: Any) -> None:
    assert kind(init_scale=2.0**7, min_scale=2.0**-3).scaler.state_dict()["min_scale"] == 2.0**-3
    assert kind(init_scale=2.0**7).scaler.get_scale() == 2.0**7
    with pytest.raises(ValueError, match=r"^init_scale=0\.0: must lie between"):
        kind(init_scale=0.0)
    with pytest.raises(TypeError, match="initial_scale"):
        kind(initial_scale=1.0)
    # what it is for is said once
    assert kind().precision == "16-true"


def test_pytorch_lightning_has_its_own(tmp_path: Path) -> None:
    class Same(pytorch_lightning.LightningModule):
        training_step: Any = One.training_step
        configure_optimizers: Any = One.configure_optimizers
        on_train_batch_start: Any = One.on_train_batch_start

        def __init__(self) -> None:
            super().__init__()
            self.layer, self.rates = layers()[0], []
            self.schedule: Any = lambda optimizer: {"scheduler": ExponentialLR(optimizer, 0.5), "interval": "step"}

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            grads: list[Any] = [param.grad for param in members(optimizer)]
            dtypes.extend(grad.dtype for grad in grads)

    dtypes: list[torch.dtype] = []
    ends = []
    for package, plugins in ((lightning, Float16Precision), (pytorch_lightning, other_package.Float16Precision)):
        run = trainer(tmp_path, package=package, plugins=plugins(**OPTIONS), gradient_clip_val=0.1)
        schedule = Same().schedule
        module = fit(run, Same() if package is pytorch_lightning else One(schedule), noise(6, bad=(3,)))
        ends.append((kept(module, run.optimizers, run.scaler), module.rates))
    assert_equal(*ends)
    assert set(dtypes) == {F32}
    assert ends[0][1][-1] == 0.5**4
    with pytest.raises(Exception, match="Found invalid type for plugin"):
        trainer(tmp_path, package=pytorch_lightning, plugins=Float16Precision())


def test_lightning_fabric_has_its_own() -> None:
    ends = []
    kinds = {lightning: Float16FabricPrecision, lightning_fabric: other_package.Float16FabricPrecision}
    for package, kind in kinds.items():
        plugin, layer = kind(**OPTIONS), layers()[0]
        fabric: Any = package.Fabric(accelerator="cpu", devices=1, plugins=plugin)
        model, optimizer = fabric.setup(layer, halfstep.AdamW(layer.parameters(), lr=1e-2))
        for x, times in noise(4, bad=(1,)):
            fabric.backward(squares(model, x) * times)
            optimizer.step()
            optimizer.zero_grad()
        ends.append(kept(layer, [optimizer], plugin.scaler))
    assert_equal(*ends)


def test_the_example_is_the_float32_script_with_three_other_lines(tmp_path: Path) -> None:
    want, got = example_losses("lightning", "--steps", "10", "--out", str(tmp_path))
    # as in the test above of losses
    assert got == pytest.approx(want, rel=0.001)


@pytest.mark.parametrize(
    ("module", "library"), [("lightning", "Lightning"), ("pytorch_lightning", "PyTorch Lightning")]
)
def test_p29_without_the_library_the_import_says_what_to_install(module: str, library: str) -> None:
    told = f"ImportError: halfstep.integrations.{module} needs {library}: pip install 'halfstep[lightning]'"
    assert told_without(module, module) == told
