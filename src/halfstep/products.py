"""float16 products on CPUs whose instructions cannot compute them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten

# What reaches the dispatcher, forward and backward, when a model is built from linear layers, matmul, einsum,
# convolutions, attention, recurrent and transformer layers: autograd has taken everything else apart before.
_PRODUCTS = frozenset(
    {
        *(aten.mm, aten.bmm, aten.mv, aten.dot, aten.vdot),
        *(aten.addmm, aten.addmm_, aten._addmm_activation, aten.addmv, aten.addmv_, aten.addr, aten.addr_),
        *(aten.baddbmm, aten.baddbmm_, aten.addbmm, aten.addbmm_),
        *(aten.convolution, aten._convolution, aten.convolution_backward, aten.conv_tbc),
        *(aten._native_multi_head_attention, aten._transformer_encoder_layer_fwd),
    }
)
_ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu
_ATTENTION_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward


@contextmanager
def float32_products() -> Iterator[None]:
    r"""Compute float16 products on the CPU in float32, rounding each result to float16.

    For a product $C = A B$ of float16 tensors, $C = \mathrm{float16}(\mathrm{float32}(A)\,\mathrm{float32}(B))$. It
    covers matrix products, convolutions and attention, both in the forward pass and in autograd's backward: enter it
    around both. In-place and ``out=`` forms, ``no_grad`` and ``inference_mode`` are covered too. Other dtypes, other
    devices and all other operations are left as they are; so are the errors for mixed dtypes.

    Where `native_float16_products` is False, a small GPT's training step becomes an order of magnitude faster with it;
    where it is True, there is nothing to gain.

    Returns:
        A context manager, which also serves as a decorator. It may be nested.

    Exactness:
        Sums run in float32, as float16 hardware does; the result is rounded once, to nearest, ties to even. The order
        of the sum is the float32 kernel's, so results differ from native ones by at most a float16 rounding or two.
    """
    with _Float32Products():
        yield


def native_float16_products() -> bool:
    """Tell whether this CPU computes float16 products at a useful speed itself.

    Returns:
        What oneDNN says of this processor, which is what PyTorch asks before it takes the fast way: True with
        AVX512-FP16, AMX-FP16 or AVX-NE-CONVERT. False wherever PyTorch would fall back to its own slow loops: on
        older x86, on other architectures (where PyTorch never takes oneDNN's float16 kernels), without oneDNN, and
        while ``torch.backends.mkldnn`` is disabled.
    """
    answer = getattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", None)
    return answer is not None and torch.backends.mkldnn.is_available() and torch._C._get_mkldnn_enabled() and answer()


class _Float32Products(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if _is_half_product(func, args, kwargs):
            return _in_float32(func, args, kwargs)
        # Under inference_mode composite operations (linear, matmul, conv2d) arrive whole, since autograd, which takes
        # them apart otherwise, is passed by.
        if torch.is_inference_mode_enabled():
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return func(*args, **kwargs)


def _is_half_product(func: Any, args: tuple, kwargs: dict) -> bool:
    operation = func.overloadpacket
    if operation in (_ATTENTION, _ATTENTION_BACKWARD):
        # Its statistics are float32 beside float16 arguments; the first argument speaks for the others.
        return _is_cpu_half(args[0])
    # An overload with a dtype of its own for the result asks for something else.
    if operation not in _PRODUCTS or func._overloadname not in ("default", "out"):
        return False
    floats = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    # Mixed dtypes are the caller's mistake, and PyTorch's own error is the right answer to it.
    return bool(floats) and all(map(_is_cpu_half, floats))


def _is_cpu_half(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dtype == torch.float16 and leaf.device.type == "cpu"


def _in_float32(func: Any, args: tuple, kwargs: dict) -> Any:
    wide_args, wide_kwargs = tree_map(lambda leaf: leaf.float() if _is_cpu_half(leaf) else leaf, (args, kwargs))
    result = func(*wide_args, **wide_kwargs)
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            # In-place and out= forms have one written argument, and return it.
            positional = index < len(args)
            written = args[index] if positional else kwargs[argument.name]
            wide = wide_args[index] if positional else wide_kwargs[argument.name]
            return written.resize_(wide.shape).copy_(wide)
    if func.overloadpacket is _ATTENTION:
        output, statistics = result
        return output.half(), statistics
    return tree_map(
        lambda leaf: leaf.half() if isinstance(leaf, Tensor) and leaf.dtype == torch.float32 else leaf, result
    )
