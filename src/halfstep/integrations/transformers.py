"""16-bit weights in the Hugging Face Trainer: its optimizer and scaler are halfstep's, its arguments stay.

`from halfstep.integrations.transformers import Trainer` in place of `from transformers import Trainer` is all; other
trainers take `TrainerMixin` before them: `class Tuner(TrainerMixin, SomeTrainer): ...`.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

try:
    import transformers
except ImportError as error:
    raise ImportError(
        "halfstep.integrations.transformers needs Transformers: pip install 'halfstep[transformers]'"
    ) from error

from halfstep.engine import HalfOptimizer
from halfstep.gradients import float16_error, innermost, params_of
from halfstep.integrations.accelerate import install
from halfstep.integrations.scaling import FrameworkScaler
from halfstep.optimizers import SGD, AdamW, Lion

#: what takes the place of an ``optim``, and its formats; all others are the Trainer's own
_OPTIMIZERS: Mapping[str, tuple[type[HalfOptimizer], Mapping[str, Any]]] = {
    "adamw_torch": (AdamW, {}),
    "adamw_torch_fused": (AdamW, {}),
    "adamw_torch_8bit": (AdamW, {"moments": "block8"}),
    "adamw_8bit": (AdamW, {"moments": "block8"}),
    "adamw_bnb_8bit": (AdamW, {"moments": "block8"}),
    "lion_32bit": (Lion, {}),
    "lion_8bit": (Lion, {"moments": "block8"}),
    "sgd": (SGD, {}),
}
#: what TrainingArguments has a field for, and its name there
_FIELDS = {
    "lr": "learning_rate",
    "betas": "adam_beta1 and adam_beta2",
    "eps": "adam_epsilon",
    "weight_decay": "weight_decay",
}
#: as the Trainer's own optimizers read them
_BOOLS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
_READ: Mapping[type, tuple[str, Callable[[str], Any]]] = {
    bool: ("true or false", lambda text: _BOOLS[text.lower()]),
    int: ("a whole number", int),
    float: ("a number", float),
    str: ("a name", str),
}


class TrainerMixin:
    """Let a `transformers.Trainer` train 16-bit weights: its optimizer is halfstep's, and float16 gets a scaler.

    ``optim`` "adamw_torch" and "adamw_torch_fused" are `halfstep.AdamW`; "adamw_torch_8bit", "adamw_8bit" and
    "adamw_bnb_8bit" that with moments "block8"; "lion_32bit" and "lion_8bit" `halfstep.Lion`; "sgd" `halfstep.SGD`.
    ``optim_args`` takes their further arguments, as "weights=split8,moments=block8". Learning rate, betas, epsilon,
    weight decay and ``seed`` are those of the arguments. An optimizer that is given explicitly stays, and so does a
    scaler that ``install(trainer.accelerator, ...)`` of `halfstep.integrations.accelerate` made.

    Raises:
        ValueError: before training, ``optim_args`` names no argument of the optimizer, or a value that is none; or an
            optimizer that is not halfstep's would step float16 weights.

    Exactness:
        As the optimizer's. ``resume_from_checkpoint`` goes on bit for bit.
    """

    accelerator: Any
    args: Any
    model: Any
    optimizer: Any
    #: the scaler's state as it began
    _scaler_begins: dict[str, Any] | None = None

    @classmethod
    def get_optimizer_cls_and_kwargs(cls, args: Any, model: Any = None) -> tuple[Any, dict[str, Any]]:
        """Return halfstep's optimizer where it has one for ``args.optim``, and what to make it with."""
        if args.optim not in _OPTIMIZERS:
            trainers: Any = super()
            return trainers.get_optimizer_cls_and_kwargs(args, model)
        kind, formats = _OPTIMIZERS[args.optim]
        takes = inspect.signature(kind).parameters
        given = {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
        given = {name: value for name, value in given.items() if name in takes}
        options = _options(args.optim_args, kind, {name: takes[name].default for name in takes})
        return kind, {"lr": args.learning_rate, **given, "seed": args.seed, **formats, **options}

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Make the optimizer, and give the accelerator a scaler first where there is float16."""
        made, scaler = self.optimizer is None, self.accelerator.scaler
        # autocast to float16 brings a scaler of torch's
        half = scaler is not None or any(param.dtype is torch.float16 for param in self.model.parameters())
        if half and not isinstance(scaler, FrameworkScaler):
            install(self.accelerator)
            # one that an earlier training prepared would step without this scaler
            self.optimizer = innermost(self.optimizer)
        if half and self._scaler_begins is None:
            self._scaler_begins = self.accelerator.scaler.state_dict()
        elif half and made:
            # another run of model_init, which is not to depend on the one before
            self.accelerator.scaler.load_state_dict(self._scaler_begins)
        trainers: Any = super()
        optimizer = trainers.create_optimizer(*args, **kwargs)
        if half and not self.accelerator.scaler._allow_fp16:
            self._refuse_float16(optimizer, made)
        return optimizer

    def _refuse_float16(self, optimizer: Any, made: bool) -> None:
        """Raise where an optimizer that is not halfstep's would step float16; some step in backward, unscaled."""
        inner = innermost(optimizer)
        if isinstance(inner, HalfOptimizer):
            return
        # those that step in backward show the Trainer none of their params
        stepped = {id(param) for param in (self.model.parameters() if made else params_of(inner))}
        for name, param in self.model.named_parameters():
            if param.requires_grad and param.dtype is torch.float16 and id(param) in stepped:
                change = (
                    "leave out the optimizer that the Trainer was given, or give it halfstep's, such as "
                    "optimizer_cls_and_kwargs=(halfstep.AdamW, {...})"
                )
                if made and getattr(self, "optimizer_cls_and_kwargs", None) is None:
                    change = f"optim={str(self.args.optim.value)!r} to one of {', '.join(_OPTIMIZERS)}"
                raise float16_error(inner, name, change)

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        trainers: Any = super()
        with _params_kept(self.model):
            trainers._load_from_checkpoint(*args, **kwargs)

    def _load_best_model(self) -> None:
        trainers: Any = super()
        with _params_kept(self.model):
            trainers._load_best_model()

    def _load_scaler(self, checkpoint: Any) -> None:
        # a float16 run's scale says nothing to a model that needs no scaler
        if self.accelerator.scaler is not None:
            trainers: Any = super()
            trainers._load_scaler(checkpoint)


class Trainer(TrainerMixin, transformers.Trainer):
    """`transformers.Trainer` for 16-bit weights: see `TrainerMixin`."""


@contextmanager
def _params_kept(model: Any) -> Iterator[None]:
    """Load into the params that there are: PEFT puts new ones, in float32, in the place of 16-bit adapters."""
    params = list(model.named_parameters(remove_duplicate=False))
    yield
    for name, param in params:
        owner, _, attribute = name.rpartition(".")
        module = model.get_submodule(owner)
        loaded = getattr(module, attribute)
        if loaded.dtype is not param.dtype:
            with torch.no_grad():
                param.copy_(loaded)
            setattr(module, attribute, param.requires_grad_(loaded.requires_grad))


def _options(text: str | None, kind: type, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Read ``optim_args``: "name=value" one after the other, between commas."""
    known = {name: type(default) for name, default in defaults.items() if name not in _FIELDS}
    known = {name: type for name, type in known.items() if type in _READ}
    options = {}
    for one in (text or "").replace(" ", "").split(","):
        name, equals, value = one.partition("=")
        if not one:
            continue
        if name in _FIELDS:
            raise ValueError(f"optim_args={text!r}: {name} is {_FIELDS[name]} in TrainingArguments: give it there")
        if not equals or name not in known:
            raise ValueError(f"optim_args={text!r}: {one} must be one of {', '.join(known)}, then = and its value")
        what, read = _READ[known[name]]
        try:
            options[name] = read(value)
        except (ValueError, KeyError):
            raise ValueError(
                f"optim_args={text!r}: {name} of halfstep.{kind.__name__} takes {what}, not {value!r}"
            ) from None
    return options
