"""16-bit weights in the Hugging Face Trainer: its optimizer and scaler are halfstep's, its arguments stay.

`from halfstep.integrations.transformers import Trainer` in place of `from transformers import Trainer` is all; other
trainers, such as TRL's, take `TrainerMixin` before them: `class Tuner(TrainerMixin, SFTTrainer): ...`.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

try:
    import transformers
except ImportError as error:
    raise ImportError(
        "halfstep.integrations.transformers needs Transformers: pip install 'halfstep[transformers]'"
    ) from error

from halfstep.engine import HalfOptimizer
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
#: what has a field of TrainingArguments to itself
_FIELDS = {"params", "lr", "betas", "eps", "weight_decay"}
_READ: Mapping[type, Callable[[str], Any]] = {
    bool: lambda text: {"true": True, "false": False}[text.lower()],
    int: int,
    float: float,
    str: str,
}


class TrainerMixin:
    """Let a `transformers.Trainer` train 16-bit weights: its optimizer is halfstep's, and float16 gets a scaler.

    ``optim`` "adamw_torch" and "adamw_torch_fused" are `halfstep.AdamW`; "adamw_torch_8bit", "adamw_8bit" and
    "adamw_bnb_8bit" that with moments "block8"; "lion_32bit" and "lion_8bit" `halfstep.Lion`; "sgd" `halfstep.SGD`.
    ``optim_args`` takes their further arguments, as "weights=split8,moments=block8". Learning rate, betas, epsilon,
    weight decay and ``seed`` are those of the arguments. An optimizer that is given explicitly stays.

    Raises:
        ValueError: ``optim_args`` names no argument of the optimizer, or a value that is none; while training, float16
            gradients of an optimizer that is not halfstep's.

    Exactness:
        As the optimizer's. ``resume_from_checkpoint`` goes on bit for bit.
    """

    accelerator: Any
    model: Any

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> tuple[Any, dict[str, Any]]:
        """Return halfstep's optimizer where it has one for ``args.optim``, and what to make it with."""
        if args.optim not in _OPTIMIZERS:
            return transformers.Trainer.get_optimizer_cls_and_kwargs(args, model)
        kind, formats = _OPTIMIZERS[args.optim]
        takes = inspect.signature(kind).parameters
        given = {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
        given = {name: value for name, value in given.items() if name in takes}
        options = _options(args.optim_args, kind, {name: takes[name].default for name in takes})
        return kind, {"lr": args.learning_rate, **given, "seed": args.seed, **formats, **options}

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Make the optimizer, and give the accelerator a scaler first where there is float16."""
        scaler = self.accelerator.scaler
        # autocast to float16 brings a scaler of torch's
        half = scaler is not None or any(param.dtype is torch.float16 for param in self.model.parameters())
        if half and not isinstance(scaler, FrameworkScaler):
            install(self.accelerator)
        create: Any = super()
        return create.create_optimizer(*args, **kwargs)


class Trainer(TrainerMixin, transformers.Trainer):
    """`transformers.Trainer` for 16-bit weights: see `TrainerMixin`."""


def _options(text: str | None, kind: type, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Read ``optim_args``: "name=value" one after the other, between commas."""
    known = {name: type(default) for name, default in defaults.items() if name not in _FIELDS}
    known = {name: type for name, type in known.items() if type in _READ}
    options = {}
    for one in (text or "").replace(" ", "").split(","):
        name, equals, value = one.partition("=")
        if not one:
            continue
        if not equals or name not in known:
            raise ValueError(f"optim_args={text!r}: {one} must be one of {', '.join(known)}, then = and its value")
        try:
            options[name] = _READ[known[name]](value)
        except (ValueError, KeyError):
            raise ValueError(
                f"optim_args={text!r}: {name} of halfstep.{kind.__name__} takes a {known[name].__name__}"
            ) from None
    return options
