"""A small byte-level GPT whose parameters may all be 16 bit."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 256


@dataclass(frozen=True)
class Shape:
    """The model's sizes: layers, heads, the width of its stream, and the bytes that it sees at once."""

    layers: int = 4
    heads: int = 4
    width: int = 128
    context: int = 128


class Attention(nn.Module):
    """Causal self-attention, written with plain products.

    PyTorch's fused attention takes four times as long in float16 and bfloat16 on a CPU as it does in float32; written
    out, all three dtypes take about the float32 time, and every device computes the same formula.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.query_key_value = nn.Linear(shape.width, 3 * shape.width)
        self.project = nn.Linear(shape.width, shape.width)
        future = torch.full((shape.context, shape.context), float("-inf")).triu(1)
        self.register_buffer("future", future, persistent=False)

    def forward(self, stream: Tensor) -> Tensor:
        """Return what each place of ``stream``, (batch, length, width), takes from itself and those before it."""
        batch, length, width = stream.shape
        split = self.query_key_value(stream).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        # The query is scaled before the product: in float16 the unscaled scores would overflow earlier.
        scores = (query / math.sqrt(query.shape[-1])) @ key.transpose(-1, -2)
        weights = (scores + self.future[:length, :length]).softmax(-1)  # pyright: ignore[reportIndexIssue]
        return self.project((weights @ value).transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Attention and a two-layer network, each on the normalized stream and added to it."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(shape.width)
        self.attention = Attention(shape)
        self.network_norm = nn.LayerNorm(shape.width)
        self.network = nn.Sequential(
            nn.Linear(shape.width, 4 * shape.width), nn.GELU(), nn.Linear(4 * shape.width, shape.width)
        )

    def forward(self, stream: Tensor) -> Tensor:
        """Return the next stream, shaped as ``stream``, (batch, length, width)."""
        stream = stream + self.attention(self.attention_norm(stream))
        return stream + self.network(self.network_norm(stream))


class GPT(nn.Module):
    """Predict each next byte from those before it.

    Args:
        shape: the sizes.
        seed: the seed of the float32 initial weights, which no dtype and no device changes: cast afterwards.
    """

    def __init__(self, shape: Shape, seed: int) -> None:
        super().__init__()
        self.shape = shape
        self.bytes = nn.Embedding(VOCABULARY, shape.width)
        self.places = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.Sequential(*(Block(shape) for _ in range(shape.layers)))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)
        self._initialize(torch.Generator().manual_seed(seed))

    def _initialize(self, generator: torch.Generator) -> None:
        for name, param in self.named_parameters():
            if param.dim() == 2:
                # Each block adds to the stream twice; the sum should start as large as the embedding.
                into_stream = name.endswith(("project.weight", "network.2.weight"))
                std = 0.02 / math.sqrt(2 * self.shape.layers) if into_stream else 0.02
                nn.init.normal_(param, std=std, generator=generator)
            elif name.endswith("bias"):
                nn.init.zeros_(param)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return float32 logits, (batch, length, 256), for the byte after each of ``tokens``, (batch, length)."""
        stream = self.bytes(tokens) + self.places.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(stream))).float()


def loss_of(model: GPT, tokens: Tensor) -> Tensor:
    """Return the mean cross entropy, in nats a byte, of predicting ``tokens[:, 1:]`` from ``tokens[:, :-1]``."""
    logits = model(tokens[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


@torch.no_grad()
def generate(model: GPT, prompt: bytes, length: int, seed: int) -> bytes | None:
    """Continue ``prompt`` by ``length`` sampled bytes; None where the model's logits are not finite.

    The random numbers come from ``seed`` and a CPU generator, so the same weights give the same text.
    """
    generator = torch.Generator().manual_seed(seed)
    device = model.head.weight.device
    text = list(prompt)
    for _ in range(length):
        context = torch.tensor([text[-model.shape.context :]], device=device)
        logits = model(context)[0, -1].cpu()
        if not logits.isfinite().all():
            return None
        text.append(int(torch.multinomial((logits / 0.8).softmax(-1), 1, generator=generator)))
    return bytes(text)
