"""What an optimizer tells of its tensors: the table of explain(), and the bytes of memory()."""

import pytest
import torch
from torch.nn import Parameter

from halfstep import backends
from halfstep.bench.shapes import GPT2_SMALL
from halfstep.formats import MOMENTS, WEIGHTS
from halfstep.rules.adam import ADAM
from harness import plans
from training import OPTIMIZERS, drive, gradients, make, members, params


def test_p30_explain_is_a_table_with_a_reason_for_each_exception(half: torch.dtype, backend: str) -> None:
    groups = [
        {"params": [*params(half, [(64, 100), (7,), (9, 40), (200, 30)]), *params(torch.float32, [(2, 2)])]},
        {"params": params(half, [(5,)]), "weights": "rounded", "moments": "float32"},
        {"params": params(half, [(64, 64)]), "weights": "split8"},
    ]
    optimizer = make("AdamW", groups, weights="split16", moments="block8", backend=backend)
    kind = str(half).removeprefix("torch.")
    runs = backends.load(backend).describe(plans(ADAM)["float32-float32-float32"])  # type: ignore[union-attr]
    # 2 for the param, 2 for the gradient, the remainder's 2 or 1; 2 codes, and 2 exponents for each row's block
    lines = [
        "AdamW",
        "group  params    rule  weights  moments  backend  tensors  elements  MiB  bytes each",
        f"0      {kind:8}  adam  split16  block8   {backend:7}        1     6,400  0.0        8.02",
        f"0      {kind:8}  adam  split16  float32  {backend:7}        3     6,367  0.1       14.00",
        f"0      float32   adam  float32  float32  {backend:7}        1         4  0.0       16.00",
        f"1      {kind:8}  adam  rounded  float32  {backend:7}        1         5  0.0       12.00",
        f"2      {kind:8}  adam  split8   block8   {backend:7}        1     4,096  0.0        7.03",
        "all                                                7    16,872  0.2       10.04",
        f"backend {backend}: {runs}",
        "group 0: moments float32 (moments='block8' is not for tensors with fewer than 2 dimensions): 1 tensor",
        "group 0: moments float32 (moments='block8' is not for tensors with under 4,096 elements): 2 tensors",
        "group 0: moments float32 (moments='block8' is not for tensors with rows under 64 elements): 1 tensor",
        "group 0: weights float32 (weights='split16' is for 16-bit params): 1 tensor",
    ]
    text = optimizer.explain()
    found, wanted = ([line.split() for line in each] for each in (text.splitlines(), lines))
    assert found[:9] == wanted[:9]
    assert sorted(found) == sorted(wanted)
    assert len({len(line) for line in text.splitlines()[1:8]}) == 1, "the columns are not aligned"
    drive(optimizer, range(1))
    assert optimizer.explain() == text


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_memory_is_what_the_tensors_take(name: str, weights: str, moments: str, half: torch.dtype) -> None:
    shapes = [(64, 100), (70, 3, 33), (5000,), (), (0, 4), (3, 9)]
    tied = params(half, shapes)
    optimizer = make(name, [*tied, *params(torch.float32, [(64, 64)])], weights=weights, moments=moments)
    foretold = optimizer.memory()
    gradients(optimizer, 0)
    optimizer.step()
    held = optimizer.memory()
    states = [state for state in optimizer.state.values() if state]
    tensors = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
    assert held["param"] == sum(param.nbytes for param in members(optimizer))
    assert held["grad"] == sum(param.grad.nbytes for param in members(optimizer) if param.grad is not None)
    assert held["weight"] + held["moments"] == sum(tensor.nbytes for tensor in tensors)
    kept = [part.name for part in WEIGHTS[weights][half].parts[1:]]
    assert held["weight"] == sum(state[key].nbytes for state in states for key in kept if key in state)
    assert held["total"] == sum(value for key, value in held.items() if key != "total")
    assert foretold == held
    for param in members(optimizer):  # as the scaler's unscale leaves them
        param.grad_dtype = None
        param.grad = torch.zeros(param.shape)
    assert optimizer.memory()["grad"] == 4 * sum(param.numel() for param in members(optimizer))


@pytest.mark.parametrize(("weights", "most"), [("split16", 8.1), ("split8", 7.1)])
def test_gpt2_small_takes_8_1_and_7_1_bytes_a_parameter(weights: str, most: float) -> None:
    over = [Parameter(torch.zeros(shape, dtype=torch.bfloat16)) for shape in GPT2_SMALL]
    optimizer = make("AdamW", over, weights=weights, moments="block8")
    for param in over:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    state = [value for kept in optimizer.state.values() for value in kept.values() if isinstance(value, torch.Tensor)]
    total = sum(tensor.nbytes for tensor in [*over, *(p.grad for p in over if p.grad is not None), *state])
    count = sum(param.numel() for param in over)
    assert (len(over), count) == (148, 124_439_808)
    assert optimizer.memory()["total"] == total
    assert total / count <= most
    assert f"{total / count:.2f}" in next(line for line in optimizer.explain().splitlines() if line.startswith("  all"))
