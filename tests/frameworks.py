"""What the tests of frameworks share: small real models made from configurations, and real text."""

import functools
from collections.abc import Iterator
from typing import Any

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
