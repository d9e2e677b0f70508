"""An optimizer's state as torch's own optimizers load it."""

from typing import Any

import torch

from halfstep import checkpoint
from halfstep.engine import HalfOptimizer
from halfstep.gradients import innermost
from halfstep.tensors import type_of

#: What torch's groups do not have.
_OURS = ("weights", "moments", "backend", "layout", "seed", "optimized_update", "absolute_weight_decay")


def torch_state_dict(optimizer: HalfOptimizer) -> dict[str, Any]:
    """Return the state that `torch.optim`'s optimizer of this kind goes on with, over float32 params.

    The params it goes with are `halfstep.float32_state_dict`'s. Back comes such a state by ``load_state_dict``, and the
    float32 weights by `halfstep.load_weights`.

    Args:
        optimizer: one of ours. `AdamW` and `Adam` go to `torch.optim`'s, `SGD` to its ``SGD``; of `Lion`, which torch
            lacks, the layout is the same. An `AdamFP16` puts epsilon elsewhere than torch, and decays in its own ways.

    Returns:
        A state_dict in torch's layout, of tensors of its own: moments in float32 on their params' devices, ``step`` as
        a float32 tensor.

    Raises:
        TypeError: ``optimizer`` is none of ours.
        ValueError: a state does not fit its param, or a count of steps is past 2**24, which torch's cannot hold.

    Exactness:
        The moments that the next step here would read, bit for bit.
    """
    optimizer = innermost(optimizer)
    if not isinstance(optimizer, HalfOptimizer):
        raise TypeError(
            f"optimizer is {type_of(optimizer)}: must be one of halfstep's; of torch's own call state_dict()"
        )
    packed = optimizer.state_dict()
    groups = [{name: value for name, value in group.items() if name not in _OURS} for group in packed["param_groups"]]
    numbers = [number for group in groups for number in group["params"]]
    states = {}
    for number, (_, group, name, param) in zip(numbers, optimizer._named(), strict=True):
        if optimizer.state.get(param):
            step, moments = optimizer._slots.moments(group, name, param)
            if step > 2**24:
                raise ValueError(
                    f"{name} has had {step} steps: torch counts in float32, exactly up to {2**24}. By then the count "
                    "has no effect: set optimizer.state[param]['step'] to that"
                )
            states[number] = {"step": torch.tensor(float(step), dtype=torch.float32)}
            states[number] |= {moment.name: checkpoint.decode(format, parts) for moment, format, parts in moments}
    return {"state": states, "param_groups": groups}
