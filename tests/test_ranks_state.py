"""P19 and P20 where params are sharded: what some processes save others load, bit for bit; and what faults leave."""

import copy
import io
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import halfstep
from harness import assert_equal
from ranks import outcomes, together
from spreading import Net, come_to, gradients, shard, train, whole
from test_ranks import EVERY, SOME
from training import make


class Nets(nn.Module):
    """A net in each of these dtypes."""

    def __init__(self, formats: list[Any]) -> None:
        super().__init__()
        self.all = nn.ModuleList(Net(dtype) for dtype, *_ in formats)


class Run:
    """Nets in several formats, one optimizer over them, and a scaler; sharded where there is more than one process."""

    def __init__(self, formats: list[Any], count: int, seed: int = 5) -> None:
        self.model = Nets(formats)
        if dist.is_initialized():
            shard(self.model, init_device_mesh("cpu", (count,)), [Shard(0)])
        self.nets = [list(net.parameters()) for net in self.model.all]
        groups = [
            {"params": params, "weights": weights, "moments": moments}
            for params, (_, weights, moments) in zip(self.nets, formats, strict=True)
        ]
        self.optimizer = make("AdamW", groups, seed=seed, lr=1e-2, backend="eager")
        self.scaler = halfstep.GradScaler(init_scale=2.0**10, growth_interval=3)

    def train(self, steps: Any) -> None:
        train(self.optimizer, self.nets, self.scaler, steps)

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "scaler": self.scaler.state_dict()}

    def save(self, folder: Path) -> None:
        save(self.state(), checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        state = self.state()
        load(state, checkpoint_id=folder)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])


def saved(folder: Path, steps: int) -> list[dict[str, Any]]:
    run = Run(EVERY, dist.get_world_size())
    run.train(range(steps))
    run.save(folder)
    return come_to(run.optimizer)


def resumed(folder: Path, steps: range) -> tuple[Any, Any, Any]:
    run = Run(EVERY, dist.get_world_size() if dist.is_initialized() else 1, seed=6)
    run.load(folder)
    loaded = come_to(run.optimizer)
    run.train(steps)
    return loaded, come_to(run.optimizer), run.scaler.state_dict()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning")
def test_p19_saved_by_two_loaded_by_three_and_by_one(tmp_path: Path) -> None:
    undisturbed = Run(EVERY, 1)
    undisturbed.train(range(4))
    four = come_to(undisturbed.optimizer)
    undisturbed.train(range(4, 6))
    for found in together(saved, 2, tmp_path, 4):
        assert_equal(found, four)
    for loaded, went_on, scaler in [resumed(tmp_path, range(4, 6)), *together(resumed, 3, tmp_path, range(4, 6))]:
        assert_equal(loaded, four)
        assert_equal(went_on, come_to(undisturbed.optimizer))
        assert scaler == undisturbed.scaler.state_dict()


def looked() -> list[int]:
    """DCP's fake step, and then a first step without a learning rate whose gradient is 0 in one process."""
    found = []
    for real in (False, True):
        net = Net(torch.float16)
        shard(net, init_device_mesh("cpu", (2,)), [Shard(0)])
        optimizer = halfstep.AdamW(net.parameters(), lr=0.0, backend="eager")
        for param in net.parameters():
            param.grad = torch.zeros_like(param)
            if real and dist.get_rank() == 1 and isinstance(param.grad, DTensor):
                param.grad.to_local().fill_(1)
        optimizer.step()
        found += sorted({state["step"] for state in optimizer.state.values()})
    return found


def test_p15_all_processes_take_a_first_step_for_a_look_or_none() -> None:
    for found in together(looked, 2):
        assert found == [0, 1]


def in_and_out(whole_state: dict[str, Any], weights: list[Tensor], averages: list[Tensor]) -> list[Any]:
    run = Run(SOME, dist.get_world_size())
    # a whole state, as one process saved it
    run.optimizer.load_state_dict(whole_state["optimizer"])
    halfstep.load_weights(run.model, run.optimizer, whole_state["weights"])
    found = [come_to(run.optimizer)]
    # its own parts, through a file of each process
    file = io.BytesIO()
    torch.save(run.optimizer.state_dict(), file)
    file.seek(0)
    twin = Run(SOME, dist.get_world_size(), seed=6)
    twin.model.load_state_dict(run.model.state_dict())
    twin.optimizer.load_state_dict(torch.load(file, weights_only=False))
    found.append(come_to(twin.optimizer))
    state = halfstep.float32_state_dict(run.model, run.optimizer)
    for one, two in zip(whole(list(state.values())), weights, strict=True):
        assert torch.equal(one, two)
    for param, weight in zip(run.model.parameters(), weights, strict=True):
        assert torch.equal(whole([run.optimizer.float32_weight(param)])[0], weight)
    # averages
    ema = halfstep.EMA(twin.optimizer, 0.9)
    twin.train(range(3))
    ema.update()
    kept = [ema.float32_weight(param) for param in twin.model.parameters()]
    for one, two in zip(whole(kept), averages, strict=True):
        assert torch.equal(one, two)
    other = halfstep.EMA(twin.optimizer, 0.5)
    other.load_state_dict(copy.deepcopy(ema.state_dict()))
    for param, average in zip(twin.model.parameters(), averages, strict=True):
        assert torch.equal(whole([other.float32_weight(param)])[0], average)
    before = whole([param.detach() for param in twin.model.parameters()])
    with ema.swap():
        for param, average in zip(twin.model.parameters(), averages, strict=True):
            assert torch.equal(whole([param])[0], average.to(param.dtype))
    for one, two in zip(whole(list(twin.model.parameters())), before, strict=True):
        assert torch.equal(one, two)
    memory = twin.optimizer.memory()
    tensors = [v for state in twin.optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
    assert memory["weight"] + memory["moments"] == sum(
        t.to_local().nbytes if isinstance(t, DTensor) else t.nbytes for t in tensors
    )
    with pytest.raises(ValueError, match=r"is a DTensor, of which each process has a part: let every process"):
        halfstep.save_safetensors(run.optimizer.state_dict(), "never")
    return found


def test_p20_p23_whole_states_and_weights_go_in_and_out() -> None:
    run = Run(SOME, 1)
    run.train(range(5))
    weights = halfstep.float32_state_dict(run.model, run.optimizer)
    state = {"optimizer": copy.deepcopy(run.optimizer.state_dict()), "weights": weights}
    five = come_to(run.optimizer)
    ema = halfstep.EMA(run.optimizer, 0.9)
    run.train(range(3))
    ema.update()
    averages = [ema.float32_weight(param) for param in run.model.parameters()]
    for found in together(in_and_out, 2, state, list(weights.values()), averages):
        for each in found:
            assert_equal(each, five)


def converted(state: dict[str, Any], weights: dict[str, Tensor], count: int) -> list[list[dict[str, Any]]]:
    """What a whole state in exact formats becomes in compact ones, and then what float32 weights leave beside it."""
    run, found = Run([(torch.float16, "split8", "block8"), (torch.bfloat16, "stochastic", "bfloat16")], count), []
    run.optimizer.load_state_dict(state)
    found.append(come_to(run.optimizer))
    halfstep.load_weights(run.model, run.optimizer, weights)
    return [*found, come_to(run.optimizer)]


def test_p20_p23_what_is_rounded_by_chance_on_the_way_in_is_rounded_as_in_one_process() -> None:
    run = Run([(torch.float16, "split16", "float32"), (torch.bfloat16, "split16", "float32")], 1)
    run.train(range(3))
    state = copy.deepcopy(run.optimizer.state_dict())
    # no format here holds these
    weights = {name: value.detach().float() / 3 for name, value in run.model.state_dict().items()}
    alone = converted(state, weights, 1)
    for found in together(converted, 2, state, weights, 2):
        assert_equal(found, alone)


def refusals() -> list[str]:
    sharded, plain, texts = Run(SOME[:1], 2), Net(torch.float16), []
    sharded.train(range(1))
    optimizer = halfstep.AdamW(plain.parameters(), weights="split8", moments="block8")
    parts = {**sharded.optimizer.state_dict(), "param_groups": optimizer.state_dict()["param_groups"]}
    with pytest.raises(ValueError, match="does not fit") as caught:
        optimizer.load_state_dict(parts)
    texts.append(str(caught.value))
    other = Net(torch.float16)
    shard(other, init_device_mesh("cpu", (2,), mesh_dim_names=("other",)), [Shard(0)])
    optimizer = halfstep.AdamW(other.parameters(), weights="split8", moments="block8")
    with pytest.raises(ValueError, match="does not fit") as caught:
        optimizer.load_state_dict({**parts, "param_groups": optimizer.state_dict()["param_groups"]})
    texts.append(str(caught.value))
    param = sharded.nets[0][1]
    param.grad = torch.zeros_like(param)
    optimizer = sharded.optimizer
    optimizer.state[param]["remainder"] = optimizer.state[param]["remainder"].full_tensor()
    with pytest.raises(ValueError, match="cannot be stepped") as caught:
        optimizer.step()
    texts.append(str(caught.value))
    return texts


def cut_twice() -> str:
    whole_one = torch.ones(2, 6, 4, dtype=torch.float16)
    placements = [Shard(1), Shard(2)]
    spread = distribute_tensor(whole_one, init_device_mesh("cpu", (2, 2)), placements, src_data_rank=None)
    param = nn.Parameter(spread)
    param.grad = torch.ones_like(param)
    halfstep.AdamW([param], backend="eager").step()
    other = halfstep.AdamW([param], weights="split8")
    with pytest.raises(ValueError, match="cut along") as caught:
        other.step()
    return str(caught.value)


def test_p29_what_has_no_place_in_the_whole_is_refused_where_chance_needs_it() -> None:
    for text in together(cut_twice, 4):
        assert text == (
            "param 0 of group 0 is cut along dims 1 and 2, and its formats take random bits, which follow each "
            "element's place in the whole: shard it along the first and one further dim at most, or choose "
            "weights='split16', moments='float32'"
        )


def test_p20_parts_that_belong_elsewhere_are_refused_by_name() -> None:
    for plain, other, whole_one in together(refusals, 2):
        assert plain.startswith(
            "the state for param 1 of group 0 does not fit: its 'remainder' is spread as Shard(dim=0) over processes "
            "[0, 1], the param whole: torch.distributed.checkpoint moves it, or pass what full_tensor() returns"
        )
        assert "its 'remainder' is spread as" in other
        assert whole_one.startswith(
            "param 1 of group 0 cannot be stepped: 'remainder' in its state is whole, the param spread as Shard(dim=0)"
        )


# ------------------------------------------------------------------ ZeRO


def stepped(zero: bool, half: torch.dtype, weights: str, how: str) -> tuple[list[Tensor], dict[str, Any], list[bool]]:
    """Train two nets by one optimizer, or by one in each process; in a step a gradient overflows."""
    # all of one dtype, as ZeRO wants it
    nets, options = Nets([(half,)] * 2), {"lr": 1e-2, "backend": "eager", "weights": weights}
    if zero:
        # torch warns while this is imported
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer: Any = ZeroRedundancyOptimizer(nets.parameters(), optimizer_class=halfstep.AdamW, **options)
    else:
        optimizer = halfstep.AdamW(nets.parameters(), **options)
    scaler, skipped = halfstep.GradScaler(init_scale=2.0**10), []
    params = [list(net.parameters()) for net in nets.all]
    for step in range(5):
        scale = scaler.scale(torch.ones(())).item()
        for net, grads in zip(params, gradients(params, step, scale), strict=True):
            for param, grad in zip(net, grads, strict=True):
                param.grad = grad.to(half).fill_(torch.inf) if step == 2 else grad.to(half)
        # around ZeRO every step is unscaled on the way, and so is this one that is clipped
        if how == "stock" or (how == "fused" and not zero):
            scaler.unscale_(optimizer)
        if how == "stock":
            torch.nn.utils.clip_grad_norm_(nets.parameters(), 1.0)
        elif how == "fused":
            halfstep.clip_grad_norm_(optimizer, 1.0, scaler)
        scaler.step(optimizer)
        scaler.update()
        skipped.append(scaler.skipped(optimizer))
        optimizer.zero_grad()
    if zero:
        optimizer.consolidate_state_dict(to=0)
    # only where it was put together there is one
    state = optimizer.state_dict() if not zero or dist.get_rank() == 0 else {}
    return [param.detach() for param in nets.parameters()], state, skipped


@pytest.mark.parametrize("how", ["straight", "stock", "fused"])
@pytest.mark.parametrize("weights", ["split16", "master32"])
def test_zero_gives_the_bits_of_one_process(weights: str, how: str, half: torch.dtype) -> None:
    alone, state, skipped = stepped(False, half, weights, how)
    found = together(stepped, 2, True, half, weights, how)
    for params, _, others in found:
        assert others == skipped == [False, False, True, False, False]
        for one, two in zip(alone, params, strict=True):
            assert torch.equal(one, two)
    # and the whole state, put together, is that of one optimizer
    params = [nn.Parameter(param) for param in alone]
    one, two = (halfstep.AdamW(params, lr=1e-2, backend="eager", weights=weights) for _ in range(2))
    one.load_state_dict(state)
    two.load_state_dict(found[0][1])
    assert_equal(come_to(one), come_to(two))


# ------------------------------------------------------------------ faults


def dies(step: int) -> None:
    run = Run(SOME[:1], 2)
    for number in range(10):
        if number == step and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        run.train(range(number, number + 1))


def test_a_killed_process_ends_the_others_with_an_error() -> None:
    begun = time.monotonic()
    first, second = outcomes(dies, 2, 3)
    assert second.status == -signal.SIGKILL
    assert first.status == 1
    assert "gloo" in first.error
    assert time.monotonic() - begun < 60


def dies_while_saving(folder: Path) -> None:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    run = Run(SOME[:1], 2)
    run.train(range(2))
    run.save(folder / "good")
    run.train(range(2, 4))

    class Dying(FileSystemWriter):
        def write_data(self, plan: Any, planner: Any) -> Any:
            if dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().write_data(plan, planner)

    save(run.state(), storage_writer=Dying(folder / "bad"))


def loads(folder: Path) -> list[dict[str, Any]]:
    run = Run(SOME[:1], dist.get_world_size(), seed=6)
    run.load(folder / "good")
    assert not (folder / "bad" / ".metadata").exists()
    run.train(range(2, 5))
    return come_to(run.optimizer)


def test_a_process_killed_while_saving_leaves_the_last_good_checkpoint(tmp_path: Path) -> None:
    first, second = outcomes(dies_while_saving, 2, tmp_path)
    assert second.status == -signal.SIGKILL
    assert first.status == 1
    undisturbed = Run(SOME[:1], 1)
    undisturbed.train(range(5))
    for found in together(loads, 2, tmp_path):
        assert_equal(found, come_to(undisturbed.optimizer))
