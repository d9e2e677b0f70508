"""What the tests of frameworks share: small real models made from configurations, and real text."""

import contextlib
import difflib
import functools
import io
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from halfstep.cli.text import Text, load_text

transformers: Any = pytest.importorskip("transformers", reason="halfstep[transformers] brings the models")

#: bytes a sample has, and samples a batch has
CONTEXT, BATCH = 48, 4


def llama(dtype: torch.dtype, seed: int = 0) -> Any:
    """A Llama of 2 layers over bytes."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=256, max_position_embeddings=CONTEXT, **sizes)
    return transformers.LlamaForCausalLM(config).to(dtype)


def gpt2(dtype: torch.dtype, seed: int = 0) -> Any:
    """A GPT-2 of 2 layers over bytes, without dropout."""
    torch.manual_seed(seed)
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT}
    plain = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=256, **sizes, **plain)).to(dtype)


@functools.cache
def text() -> Text:
    """The source of Python's standard library."""
    return load_text(None, CONTEXT)


def batches(count: int, size: int = BATCH) -> Iterator[dict[str, Tensor]]:
    """Batches of the text, as a model takes them; the same at every call."""
    for number in range(count):
        tokens = text().batch(0, number, size, CONTEXT)
        yield {"input_ids": tokens, "labels": tokens}


def samples(count: int) -> list[dict[str, Tensor]]:
    """The samples of `batches`, one by one, as a dataset."""
    return [{"input_ids": tokens, "labels": tokens} for batch in batches(count, 1) for tokens in batch["input_ids"]]


def example_losses(framework: str, *arguments: str) -> tuple[float, float]:
    """Run a framework's example in float32 and in float16, and return the losses that they end with.

    Raises where a script has 60 lines, or more than three differ.
    """
    scripts = [Path(__file__).parent.parent / "examples" / f"{framework}_{name}.py" for name in ("float32", "train")]
    one, other = (script.read_text().splitlines() for script in scripts)
    assert max(len(one), len(other)) < 60
    # the first of these names the file
    _, *changed = (line for line in difflib.unified_diff(one, other, n=0, lineterm="") if line.startswith("+"))
    assert 1 <= len(changed) <= 3, changed
    losses = []
    for script in scripts:
        printed = io.StringIO()
        with mock.patch.object(sys, "argv", [str(script), *arguments]), contextlib.redirect_stdout(printed):
            runpy.run_path(str(script), run_name="__main__")
        losses.append(float(re.findall(r"loss\W+(\d+\.\d+|nan|inf)", printed.getvalue())[-1]))
    return losses[0], losses[1]


def told_without(library: str, module: str) -> str:
    """What importing a module of `halfstep.integrations` ends with where ``library`` is not installed."""
    code = f"import sys; sys.modules[{library!r}] = None; import halfstep.integrations.{module}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    return done.stderr.splitlines()[-1]
