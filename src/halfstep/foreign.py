"""What other libraries keep, in our terms: the options of a param group, and the state of a param.

Whose a state is shows by its keys alone, and what shows nothing passes through as it is:

- the teaching implementation's has ``fp32_copy``;
- torch's SGD's has ``momentum_buffer`` and no ``step``; torch's Adam's needs nothing;
- bitsandbytes' has ``state1`` and ``state2``, lately within a dict of its own, and its groups ``t_alpha``, ``t_beta3``;
- optimi's has ``kahan_comp`` beside both moments, and its groups ``beta1``, ``kahan_sum`` and ``decouple_lr``.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from halfstep.checkpoint import count
from halfstep.shards import local, spread, taken

#: where bitsandbytes hides its tensors from FSDP
_WRAPPED = "__bnb_optimizer_quant_state__"
#: how many neighbours share a scale there, now and in its earlier versions: the number of scales tells which
_BLOCKS = (256, 2048)
#: the parts of its two moments, and norms of updates and gradients, for which there is no use here
_PARTS = ("state1", "qmap1", "absmax1", "state2", "qmap2", "absmax2", "unorm_vec", "gnorm_vec")
#: its groups' options that only AdEMAMix heeds
_ADEMAMIX = ("alpha", "t_alpha", "t_beta3")
#: optimi's options that have another name here, or no meaning
_OPTIMI = ("beta1", "beta2", "decouple_wd", "decouple_lr", "max_lr", "kahan_sum", "triton", "foreach")
_OPTIMI += ("gradient_release", "setup", "step")


def options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a saved param group in our terms.

    Args:
        group: all its keys but "params".

    Returns:
        Ours and torch's as they are. Of optimi's and bitsandbytes' what has a meaning here, ``betas`` and
        ``decoupled_weight_decay`` among it, and what is none of theirs, such as a scheduler's.

    Raises:
        ValueError: it asks for what is not offered; the text is a clause that says what, and the way out.
    """
    if {"kahan_sum", "decouple_lr"} <= group.keys():
        decay = group.get("weight_decay")
        if group["decouple_lr"] is not False and not _is_zero(decay):
            raise ValueError(
                f"decouple_lr={group['decouple_lr']!r}: a weight decays by weight_decay * lr / max_lr of itself there, "
                "and by weight_decay * lr here: in the state's group set decouple_lr=False, decouple_wd=True and "
                f"weight_decay={decay!r} / {group.get('max_lr')!r}, its quotient by max_lr"
            )
        kept = {name: value for name, value in group.items() if name not in _OPTIMI}
        if "beta1" in group and "beta2" in group:
            kept["betas"] = (group["beta1"], group["beta2"])
        if "decouple_wd" in group:
            kept["decoupled_weight_decay"] = group["decouple_wd"]
        return kept
    if group.keys() >= set(_ADEMAMIX):
        if not _is_zero(group["alpha"]):
            raise ValueError(
                f"alpha={group['alpha']!r}: it is AdEMAMix's, which keeps a further average; start in a new optimizer"
            )
        decay = {"decoupled_weight_decay": True}  # in Adam as in AdamW
        return {name: value for name, value in group.items() if name not in _ADEMAMIX} | decay
    return dict(group)


def _is_zero(number: Any) -> bool:
    return isinstance(number, int | float) and number == 0


def entry(saved: Mapping[str, Any], group: Mapping[str, Any], param: Tensor) -> dict[str, Any]:
    """Return a param's entry under "state" in our names, with the very values where they mean the same here.

    Args:
        saved: the entry; it stays as it is.
        group: the saved group that the param is in, as it was saved.
        param: the live param, into which the model's weights were loaded.

    Returns:
        ``step``; moments under torch's names, in float32 or as they are; ``master``, the float32 weight, where theirs
        keeps more of it than the param; and under its own name what none of the libraries keeps.

    Raises:
        ValueError: it does not fit the param, or its parts each other; the text is a clause that says how.

    Exactness:
        bitsandbytes' 8 bits are decoded as it does, bit for bit; optimi's moments are off by 2**-23 of each at most.
    """
    if isinstance(wrapped := saved.get(_WRAPPED), Mapping):
        saved = {name: value for name, value in saved.items() if name != _WRAPPED} | dict(wrapped)
    # with a "max1" the codes are of a time before there were blocks
    if {"state1", "state2"} <= saved.keys() and "max1" not in saved:
        return _bitsandbytes(saved, group, param)
    if {"kahan_sum", "beta1", "beta2"} <= group.keys():
        if saved.keys() == {"group"}:
            return {}  # with gradient release, before the first step
        if {"exp_avg", "exp_avg_sq", "kahan_comp"} <= saved.keys():
            return _optimi(saved, group, param)
    if "momentum_buffer" in saved and "step" not in saved:
        if saved["momentum_buffer"] is None:
            return {name: value for name, value in saved.items() if name != "momentum_buffer"}
        # a buffer says that the first step is past, and nothing more matters
        return {"step": 1, **saved}
    return {"master" if name == "fp32_copy" else name: value for name, value in saved.items()}


def _optimi(saved: Mapping[str, Any], group: Mapping[str, Any], param: Tensor) -> dict[str, Any]:
    r"""Return an entry of optimi's Adam.

    It keeps averages corrected for their start from 0, $\hat m_t = m_t / (1-\beta_1^t)$ and $\hat v_t$ likewise, and in
    ``kahan_comp`` what a param lost when it was last rounded. The group counts the steps, or with gradient release each
    param.
    """
    step = count(saved.get("step", group.get("step")))
    kept = {name: value for name, value in saved.items() if name not in ("group", "kahan_comp")} | {"step": step}
    for name, beta in (("exp_avg", group["beta1"]), ("exp_avg_sq", group["beta2"])):
        #: $m_t = \hat m_t\,(1-\beta^t)$
        kept[name] = _shaped(saved, name, param).float() * (1 - beta**step)
    # where nothing is compensated its Triton kernels are given a byte
    if saved["kahan_comp"] is not None and getattr(saved["kahan_comp"], "dtype", None) is not torch.uint8:
        here, lost = local(param).detach(), taken(_shaped(saved, "kahan_comp", param), param)
        kept["master"] = spread(here.float() + lost.to(here.device).float(), param.shape, param)
    return kept


def _bitsandbytes(saved: Mapping[str, Any], group: Mapping[str, Any], param: Tensor) -> dict[str, Any]:
    r"""Return an entry of bitsandbytes' Adam, in 32 bits or in 8.

    Where codes round $v_t$ to 0 and $m_t$ lives on, a step would move the weight by $m_t / \epsilon$. No gradients
    leave such averages: by Cauchy and Schwarz $|m_t| \le U_t\sqrt{v_t}$, where
    $U_t^2 = \frac{(1-\beta_1)^2}{1-\beta_2}\sum_{k<t}(\beta_1^2/\beta_2)^k$. There, and only there, $v_t$ becomes what
    a steady gradient leaves, $v_t = (1-\beta_2^t)\,g^2$ beside $m_t = (1-\beta_1^t)\,g$, at which Adam's step is the
    learning rate. Since gradients do leave these averages, they keep the bound, whatever the betas, and so do all that
    follow. With the least $v_t$ that the bound allows the step would be about $U_t$ learning rates.
    """
    kept = {name: value for name, value in saved.items() if name not in _PARTS}
    kept["exp_avg"], kept["exp_avg_sq"] = average, square = _moment(saved, 1, param), _moment(saved, 2, param)
    step, betas = count(saved.get("step")), group.get("betas")
    if saved["state2"].dtype is torch.uint8 and step:
        if not isinstance(betas, list | tuple) or len(betas) != 2:
            raise ValueError(f"its group has betas={betas!r}: codes of 8 bits are read by two, as in (0.9, 0.999)")
        correction1, correction2 = (1 - beta**step for beta in betas)
        # what is too small for float32 is no 0 either
        steady = (average * (math.sqrt(correction2) / correction1)).square().clamp(min=2.0**-149)
        kept["exp_avg_sq"] = torch.where((square == 0) & (average != 0), steady, square)
    return kept


def _moment(saved: Mapping[str, Any], number: int, param: Tensor) -> Tensor:
    """Return one of bitsandbytes' moments: in 32 bits as it is, and from 8 bits ``qmap[code] * absmax[block]``."""
    codes = _shaped(saved, name := f"state{number}", param)
    if not codes.is_contiguous():
        raise ValueError(
            f"its {name!r} has strides {codes.stride()}, and whether a GPU stepped it, in the order of memory, or a "
            f"CPU, by index, does not show: replace it by {name}.as_strided({name}.shape, "
            f"{torch.empty(param.shape, device='meta').stride()}) if a GPU did, by {name}.contiguous() if a CPU"
        )
    if codes.is_floating_point():
        return saved[name]
    if codes.dtype is not torch.uint8:
        raise ValueError(f"its {name!r} is {codes.dtype}, neither torch.float32 nor codes in torch.uint8")
    values, scales = (_table(saved, f"{part}{number}", codes.device) for part in ("qmap", "absmax"))
    if values.numel() != 256:
        raise ValueError(f"its 'qmap{number}' has {values.numel()} entries, not a value for each of 256 codes")
    n = codes.numel()
    block = next((block for block in _BLOCKS if scales.numel() == -(n // -block)), None)
    if block is None:
        raise ValueError(
            f"its 'absmax{number}' has {scales.numel()} entries, not the {-(n // -256)} that {n} elements have in "
            "blocks of 256"
        )
    decoded, whole = values[codes.flatten().int()], n // block
    decoded[: whole * block].view(whole, block).mul_(scales[:whole, None])
    decoded[whole * block :].mul_(scales[whole:])
    return decoded.view(param.shape)


def _table(saved: Mapping[str, Any], name: str, device: torch.device) -> Tensor:
    """Return what codes are decoded by."""
    table = saved.get(name)
    if not isinstance(table, Tensor) or table.dtype is not torch.float32 or table.dim() != 1:
        found = f"{table.dtype} of shape {tuple(table.shape)}" if isinstance(table, Tensor) else repr(table)
        raise ValueError(f"its {name!r} is {found}, not a row of torch.float32, by which its codes are read")
    return table.detach().to(device)


def _shaped(saved: Mapping[str, Any], name: str, param: Tensor) -> Tensor:
    """Return a tensor that has an element for each of the param's."""
    tensor = saved[name]
    if not isinstance(tensor, Tensor):
        raise ValueError(f"its {name!r} is a {type(tensor).__name__}, not a tensor")
    if tensor.shape != param.shape:
        raise ValueError(f"its {name!r} has shape {tuple(tensor.shape)}, the param {tuple(param.shape)}")
    return tensor.detach()
