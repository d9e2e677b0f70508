"""What is stepped: one large tensor, GPT-2 small, and very many small tensors."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

Sizes = tuple[tuple[int, ...], ...]

#: a row of the large tensor, which has two dimensions because blocks are for such
ROW = 1024

_LAYER: Sizes = (
    *((768,), (768,), (2304, 768), (2304,), (768, 768), (768,)),
    *((768,), (768,), (3072, 768), (3072,), (768, 3072), (768,)),
)
#: vocabulary, positions, 12 layers of 12 tensors, the last norm: 148 tensors
GPT2_SMALL: Sizes = ((50257, 768), (1024, 768), *_LAYER * 12, (768,), (768,))


@dataclass(frozen=True)
class Shape:
    """A set of tensors that are stepped together.

    Args:
        name: as a person asks for it.
        title: as a table is headed.
        sizes: of its tensors.
        every_format: whether each pair of formats is timed, and the whole scaled and clipped step; elsewhere two pairs.
    """

    name: str
    title: str
    sizes: Sizes
    every_format: bool = False

    @property
    def params(self) -> int:
        """The elements of all tensors."""
        return sum(torch.Size(size).numel() for size in self.sizes)


def one(params: int) -> Shape:
    """Return one tensor of ``params`` elements, rounded up to whole rows."""
    rows = -(-params // ROW)
    return Shape("one", f"one tensor of {rows * ROW:,}", ((rows, ROW),), every_format=True)


def gpt2(sizes: Sizes = GPT2_SMALL) -> Shape:
    """Return GPT-2 small's tensors."""
    shape = Shape("gpt2", "", sizes)
    return Shape("gpt2", f"GPT-2 small: {len(sizes):,} tensors, {shape.params:,} params", sizes)


def many(count: int, elements: int) -> Shape:
    """Return ``count`` tensors of ``elements`` each."""
    return Shape("many", f"{count:,} tensors of {elements:,}", ((elements,),) * count)


class Tensors:
    """Params and gradients of given sizes. All params of one dtype share their gradients."""

    def __init__(self, sizes: Sizes) -> None:
        self._sizes = sizes
        self._grads: dict[torch.dtype, list[Tensor]] = {}

    def grads(self, dtype: torch.dtype) -> Sequence[Tensor]:
        """Return the gradients of ``dtype``: normal numbers, the same in each, rounded."""
        if torch.float32 not in self._grads:
            generator = torch.Generator().manual_seed(0)
            self._grads[torch.float32] = [torch.randn(size, generator=generator) for size in self._sizes]
        if dtype not in self._grads:
            self._grads[dtype] = [grad.to(dtype) for grad in self._grads[torch.float32]]
        return self._grads[dtype]

    def params(self, dtype: torch.dtype, own_grads: bool = False) -> list[Parameter]:
        """Return new params of ``dtype`` with their gradients, the shared ones or copies."""
        params = []
        for grad in self.grads(dtype):
            param = Parameter(grad.clone())
            param.grad = grad.clone() if own_grads else grad
            params.append(param)
        return params

    def norm(self) -> float:
        """Return the norm of all gradients together."""
        return float(torch.stack([grad.norm() for grad in self.grads(torch.float32)]).norm())
