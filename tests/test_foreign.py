"""P21: states of optimi, bitsandbytes, torch and the teaching implementation, in our terms, and training goes on."""

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import optimi
import pytest
import torch
from bitsandbytes import functional, optim
from optimi.gradientrelease import prepare_for_gradient_release
from torch import Tensor, nn

from halfstep import foreign
from harness import assert_equal, assert_same
from training import OPTIMIZERS, make, members, params, through_file

#: the first two reach bitsandbytes' 8 bits: one with a last block cut short, one with blocks that cross rows
SHAPES = ((64, 65), (70, 128), (7,), ())
LR = 1e-3
DECAY = 0.1
#: half an ulp of float32, relative
U = 2.0**-24


def gradients(over: Sequence[Tensor], number: int) -> None:
    """Give each param a gradient with every magnitude in [0.5, 2]."""
    generator = torch.Generator().manual_seed(number)
    for param in over:
        grad = torch.rand(param.shape, generator=generator) * 1.5 + 0.5
        sign = torch.randint(0, 2, param.shape, generator=generator) * 2 - 1
        param.grad = (grad * sign).to(param.dtype)


def drive(optimizer: torch.optim.Optimizer, numbers: Iterable[int]) -> None:
    for number in numbers:
        gradients(members(optimizer), number)
        optimizer.step()
        optimizer.zero_grad()


def copies(over: Sequence[Tensor]) -> list[nn.Parameter]:
    """Params of the same values, row-major."""
    return [nn.Parameter(param.detach().clone(memory_format=torch.contiguous_format)) for param in over]


def translated(state: Mapping[str, Any], over: Sequence[Tensor]) -> list[dict[str, Any]]:
    """Every param's entry in our terms, where nothing of ``state`` may change meanwhile."""
    before, entries = copy.deepcopy(state), []
    for group in state["param_groups"]:
        for number in group["params"]:
            entries.append(foreign.entry(state["state"][number], group, over[number]))
    assert_equal(state, before)
    return entries


def unwrapped(saved: Mapping[str, Any]) -> dict[str, Any]:
    """An entry of bitsandbytes' with its tensors beside its step, as older versions of it wrote it."""
    saved = dict(saved)
    return {**saved.pop("__bnb_optimizer_quant_state__"), **saved}


def assert_follows(ours: torch.optim.Optimizer, theirs: torch.optim.Optimizer, steps: int) -> None:
    """Raise unless float32 weights, the same ``steps`` ago, differ by no more than rounding explains.

    A step rounds a weight at most four times on either side, each by U of it: the decay's factor, its product, the
    step's sum, and once in how the two write it: 8 U. The step itself is below 4 LR, since with every gradient within
    [0.5, 2] an average is at most 2 and the root at least 0.5. Ours and theirs differ in it by rounding: the first
    moment by 4 U * 2 a step, at most 80 U after 10 of them, which over a root of 0.5 is 160 U; the root by 2 U of
    itself a step, at most 20 U, which is 80 U of 4; quotient and factors by another 8 U of 4. Below 300 U * LR.
    """
    assert steps <= 10
    for param, other in zip(members(ours), members(theirs), strict=True):
        bound = steps * (8 * U * (other.detach().abs() + 0.1) + 300 * U * LR)
        off = (param.detach().double() - other.detach().double()).abs()
        assert (off <= bound).all(), f"off by {(off / bound).max():g} of the bound in {tuple(param.shape)}"


# ---------------------------------------------------------------------- optimi

OPTIMI = {
    "Adam": (optimi.Adam, "Adam"),  # L2
    "Adam decoupled": (lambda over, **options: optimi.Adam(over, decouple_wd=True, **options), "Adam"),
    "AdamW": (optimi.AdamW, "AdamW"),
}


@pytest.mark.parametrize("name", OPTIMI)
def test_p21_optimis_float32_goes_on(name: str) -> None:
    cls, ours = OPTIMI[name]
    theirs = cls(params(torch.float32, SHAPES), lr=LR, betas=(0.8, 0.99), weight_decay=DECAY, triton=False)
    drive(theirs, range(6))
    state = through_file(theirs.state_dict())
    target = make(ours, copies(members(theirs)))
    for saved, entry in zip(state["state"].values(), translated(state, members(target)), strict=True):
        assert list(entry) == ["exp_avg", "exp_avg_sq", "step"]
        assert entry["step"] == 6
        assert_same(entry["exp_avg"], saved["exp_avg"] * (1 - 0.8**6))
        assert_same(entry["exp_avg_sq"], saved["exp_avg_sq"] * (1 - 0.99**6))
    target.load_state_dict(state)
    drive(theirs, range(6, 14))
    drive(target, range(6, 14))
    assert_follows(target, theirs, 8)


def test_p21_optimis_averages_are_torchs() -> None:
    theirs = optimi.AdamW(params(torch.float32, SHAPES), lr=LR, betas=(0.9, 0.99), triton=False)
    torchs = torch.optim.AdamW(params(torch.float32, SHAPES), lr=LR, betas=(0.9, 0.99))
    for optimizer in (theirs, torchs):
        drive(optimizer, range(5))
    for entry, param in zip(translated(theirs.state_dict(), members(theirs)), members(torchs), strict=True):
        # either rounds each of 5 sums, of terms up to 2, thrice; the conversion twice
        for name, largest in (("exp_avg", 2.0), ("exp_avg_sq", 4.0)):
            off = (entry[name].double() - torchs.state[param][name].double()).abs().max()
            assert off <= (2 * 5 * 3 + 2) * U * largest


@pytest.mark.parametrize("weights", ["split16", "master32"])
def test_p21_optimis_compensation_is_part_of_the_weight(weights: str, half: torch.dtype) -> None:
    theirs = optimi.AdamW(params(half, SHAPES), lr=LR, weight_decay=DECAY, triton=False)
    drive(theirs, range(6))
    state = through_file(theirs.state_dict())
    over = copies(members(theirs))
    target = make("AdamW", over, weights=weights)
    sums = [p.detach().float() + s["kahan_comp"].float() for p, s in zip(over, state["state"].values(), strict=True)]
    for saved, entry, weight in zip(state["state"].values(), translated(state, over), sums, strict=True):
        assert_same(entry["master"], weight)
        assert_same(entry["exp_avg"], saved["exp_avg"].float() * (1 - 0.9**6))
        assert saved["exp_avg"].dtype is half
    target.load_state_dict(state)
    compensated = apart = 0
    for param, other, weight in zip(over, members(theirs), sums, strict=True):
        kept, seen = target.float32_weight(param), other.detach().float()
        # a compensation is itself rounded, and with a weight near 0 may pass half an ulp: then the param is what counts
        far = (weight.to(half) != other.detach()) & (kept == seen)
        # float16's split16 is exact from 2**-16 on, and within 2**-40 below
        small = (weight.abs() < 2.0**-16) & ((weights, half) == ("split16", torch.float16))
        assert_same(kept[~far & ~small], weight[~far & ~small])
        assert ((kept - weight)[~far].abs() <= 2.0**-40).all()
        # a weight halfway between two params may have either
        assert_same((kept - param.detach().float()).abs(), (kept - seen).abs())
        compensated += int((weight != seen).sum())
        apart += int(far.sum())
    assert compensated > 1000
    # weights of the size of a step are one in 1000 here
    assert apart <= 13
    drive(target, range(6, 8))


@pytest.mark.parametrize("none", [None, torch.zeros(1, dtype=torch.uint8)], ids=["none", "a byte"])
def test_p21_optimi_without_compensation_says_nothing_of_the_weight(none: Tensor | None) -> None:
    theirs = optimi.AdamW(params(torch.bfloat16, SHAPES), lr=LR, kahan_sum=False, triton=False)
    drive(theirs, range(2))
    state = theirs.state_dict()
    for saved in state["state"].values():
        assert saved["kahan_comp"] is None
        saved["kahan_comp"] = none
    for entry in translated(state, members(theirs)):
        assert list(entry) == ["exp_avg", "exp_avg_sq", "step"]


def test_p21_optimis_group_counts_for_a_param_that_came_late() -> None:
    theirs = optimi.AdamW(params(torch.float32, [(5, 3), (4,)]), lr=LR, triton=False)
    early, late = members(theirs)
    for number in range(6):
        gradients([early, late], number)
        if number < 3 or number == 4:  # none at first, and none once on the way
            late.grad = None
        theirs.step()
        theirs.zero_grad()
    target = make("AdamW", copies([early, late]))
    target.load_state_dict(through_file(theirs.state_dict()))
    assert [target.state[param]["step"] for param in members(target)] == [6, 6]
    drive(theirs, range(6, 10))
    drive(target, range(6, 10))
    assert_follows(target, theirs, 4)


def test_p21_optimis_gradient_release_counts_by_param() -> None:
    model = nn.Linear(5, 3).to(torch.bfloat16)
    theirs = optimi.AdamW(model.parameters(), lr=LR, gradient_release=True, triton=False)
    prepare_for_gradient_release(model, theirs)
    over = list(model.parameters())
    assert translated(through_file(theirs.state_dict()), over) == [{}, {}]
    for number in range(3):
        model(torch.full((2, 5), number + 0.5, dtype=torch.bfloat16)).sum().backward()
    state = through_file(theirs.state_dict())
    assert "step" not in state["param_groups"][0]
    for entry in translated(state, over):
        assert list(entry) == ["exp_avg", "exp_avg_sq", "step", "master"]
        assert entry["step"] == 3
    target = make("AdamW", copies(over))
    target.load_state_dict(state)
    drive(target, range(2))


# ---------------------------------------------------------------------- bitsandbytes


def bnb(name: str, over: Sequence[Tensor], **options: Any) -> Any:
    return getattr(optim, name)(over, lr=LR, **options)


@pytest.mark.parametrize("name", ["Adam", "AdamW", "AdamW32bit", "LAMB"])
def test_p21_bitsandbytes_32_bits_go_on(name: str) -> None:
    theirs = bnb(name, params(torch.float32, SHAPES), betas=(0.8, 0.99), weight_decay=DECAY)
    drive(theirs, range(6))
    state = through_file(theirs.state_dict())
    target = make("AdamW" if "W" in name else "Adam", copies(members(theirs)))
    for saved, entry in zip(state["state"].values(), translated(state, members(target)), strict=True):
        assert list(entry) == ["step", "exp_avg", "exp_avg_sq"]
        assert entry["step"] == 6
        assert entry["exp_avg"] is unwrapped(saved)["state1"]
        assert entry["exp_avg_sq"] is unwrapped(saved)["state2"]
    target.load_state_dict(state)
    if name != "LAMB":  # which steps by the norm of the weight
        drive(theirs, range(6, 14))
        drive(target, range(6, 14))
        assert_follows(target, theirs, 8)


@pytest.mark.parametrize("name", ["Adam8bit", "AdamW8bit", "PagedAdamW8bit"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_p21_bitsandbytes_8_bits_decode_as_it_does(name: str, dtype: torch.dtype) -> None:
    theirs = bnb(name, params(dtype, SHAPES), weight_decay=DECAY)
    if name.startswith("Paged"):
        with pytest.warns(UserWarning, match="Paged optimizers are not supported on CPU"):
            drive(theirs, range(1))
    drive(theirs, range(1, 7))
    state = through_file(theirs.state_dict())
    target = make("AdamW" if "W" in name else "Adam", copies(members(theirs)))
    coded = 0
    for saved, entry in zip(map(unwrapped, state["state"].values()), translated(state, members(target)), strict=True):
        for number, moment in ((1, "exp_avg"), (2, "exp_avg_sq")):
            if "absmax1" not in saved:
                assert entry[moment] is saved[f"state{number}"]
                continue
            decoded = functional.dequantize_blockwise(
                saved[f"state{number}"], absmax=saved[f"absmax{number}"], code=saved[f"qmap{number}"], blocksize=256
            )
            assert_same(entry[moment], decoded)
            coded += 1
    assert coded == 4
    target.load_state_dict(state)
    for param, other in zip(members(target), members(theirs), strict=True):
        assert_same(target.float32_weight(param), other.detach().float())
    # from here on they round the averages to 8 bits again: one step is what can be compared
    if dtype is torch.float32:
        drive(theirs, [7])
        drive(target, [7])
        assert_follows(target, theirs, 1)


def test_p21_bitsandbytes_of_any_age_is_read() -> None:
    theirs = bnb("AdamW8bit", params(torch.float32, SHAPES))
    drive(theirs, range(3))
    state = theirs.state_dict()
    expected = translated(state, members(theirs))
    flat = {number: unwrapped(saved) for number, saved in state["state"].items()}
    assert_equal(translated({**state, "state": flat}, members(theirs)), expected)
    # before 0.44 a block had 2048 elements
    for number in (0, 1):
        for name, moment in (("1", "exp_avg"), ("2", "exp_avg_sq")):
            codes, scales = functional.quantize_blockwise(
                expected[number][moment], code=flat[number][f"qmap{name}"], blocksize=2048
            )
            decoded = functional.dequantize_blockwise(codes, scales)
            flat[number] |= {f"state{name}": codes, f"absmax{name}": scales.absmax}
            expected[number][moment] = decoded
    assert flat[0]["absmax1"].shape == (3,)
    assert_equal(translated({**state, "state": flat}, members(theirs)), expected)


def nearest(saved: dict[str, Any]) -> dict[str, Any]:
    """An entry as bitsandbytes' GPU kernels round it: to the nearest code (its CPU quantiser never writes the last)."""
    for name in ("1", "2"):
        values = saved[f"true{name}"]
        blocks = nn.functional.pad(values.flatten(), (0, -values.numel() % 256)).view(-1, 256)
        scales, code = blocks.abs().amax(1), saved[f"qmap{name}"]
        codes = torch.bucketize(blocks / scales[:, None], (code[1:] + code[:-1]) / 2)
        saved[f"absmax{name}"] = scales
        saved[f"state{name}"] = codes.flatten()[: values.numel()].view(values.shape).to(torch.uint8)
    return {key: value for key, value in saved.items() if not key.startswith("true")}


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.95, 0.9)])  # the second has beta1**2 > beta2
@pytest.mark.parametrize("steps", [1, 40])
@pytest.mark.parametrize("after", [0.0, 1.0])
def test_p06_a_square_that_8_bits_lost_moves_no_weight_far(
    betas: tuple[float, float], steps: int, after: float
) -> None:
    theirs = bnb("AdamW8bit", params(torch.float32, [(64, 65)]), betas=betas, weight_decay=0.0)
    torchs = torch.optim.AdamW(params(torch.float32, [(64, 65)]), lr=LR, betas=betas)
    (param,) = members(theirs)
    # neighbours six orders apart, and some that never have a gradient
    sizes = 10.0 ** -(torch.arange(64 * 65) % 7).view(64, 65).float() * (torch.arange(64 * 65) % 5 > 0).view(64, 65)
    noise = torch.Generator().manual_seed(1)
    for _ in range(steps):
        grad = sizes * torch.randn(64, 65, generator=noise)
        for optimizer in (theirs, torchs):
            members(optimizer)[0].grad = grad.clone()
            optimizer.step()
    state = through_file(theirs.state_dict())
    (true,) = torchs.state.values()
    saved = unwrapped(state["state"][0]) | {"true1": true["exp_avg"], "true2": true["exp_avg_sq"]}
    state["state"][0] = saved = nearest(saved)
    (entry,) = translated(state, [param])
    lost = (saved["state2"] == 0) & (entry["exp_avg"] != 0)
    assert lost.sum() > 300
    assert (entry["exp_avg"] == 0).sum() > 800
    # there and only there: what a steady gradient of m / (1 - beta1**t) leaves, within four roundings of float32
    dequantized = functional.dequantize_blockwise(
        saved["state2"], absmax=saved["absmax2"], code=saved["qmap2"], blocksize=256
    )
    assert_same(entry["exp_avg_sq"][~lost], dequantized[~lost])
    steady = (entry["exp_avg"].double() / (1 - betas[0] ** steps)) ** 2 * (1 - betas[1] ** steps)
    torch.testing.assert_close(entry["exp_avg_sq"][lost].double(), steady[lost], rtol=8 * U, atol=0.0)

    target = make("AdamW", copies([param]), lr=LR, weight_decay=0.0, eps=0.0 if after else 1e-12)
    state["param_groups"][0]["eps"] = target.param_groups[0]["eps"]
    target.load_state_dict(state)
    (ours,) = members(target)
    for number in range(1, 6):
        before = ours.detach().double()
        ours.grad = after * sizes * torch.randn(64, 65, generator=noise)
        if after:  # without eps a weight that has no gradient at all has no step either
            ours.grad += 1e-12
        target.step()
        # Cauchy and Schwarz after t steps, and Adam's two corrections; in the root, the averages and the step fewer
        # than 64 roundings, and one of the weight
        t, ratio = steps + number, betas[0] ** 2 / betas[1]
        bound = (1 - betas[0]) / math.sqrt(1 - betas[1]) * math.sqrt(sum(ratio**k for k in range(t)))
        bound *= math.sqrt(1 - betas[1] ** t) / (1 - betas[0] ** t)
        moved = (ours.detach().double() - before).abs()[lost]
        assert (moved <= LR * bound * (1 + 64 * U) + U * before.abs()[lost]).all(), (moved.max() / LR, bound)


def test_p21_bitsandbytes_order_of_memory_is_asked_for_where_it_matters() -> None:
    (plain,) = params(torch.float32, [(70, 128)])
    across = nn.Parameter(plain.detach().t())
    theirs = bnb("AdamW8bit", [across, nn.Parameter(plain.detach().t().contiguous())])
    # as a model has it that is made and loaded again
    over = [nn.Parameter(plain.detach().t()), copies([across])[0]]
    for number in range(3):
        generator = torch.Generator().manual_seed(number)
        grad = torch.randn(128, 70, generator=generator)
        for param in members(theirs):
            param.grad = grad.clone()
        theirs.step()
    state = through_file(theirs.state_dict())
    text = (
        r"its 'state1' has strides \(1, 128\), and whether a GPU stepped it, in the order of memory, or a CPU, by "
        r"index, does not show: replace it by state1.as_strided\(state1.shape, \(70, 1\)\) if a GPU did, by "
        r"state1.contiguous\(\) if a CPU"
    )
    with pytest.raises(ValueError, match=text):
        foreign.entry(state["state"][0], state["param_groups"][0], over[0])
    nested = state["state"][0]["__bnb_optimizer_quant_state__"]
    # on a CPU it is by index
    codes = {name: nested[name] for name in ("state1", "state2")}
    nested |= {name: tensor.contiguous() for name, tensor in codes.items()}
    a, b = translated(state, over)
    assert_equal(a, b)
    # the other way out is the order in memory
    nested |= {name: tensor.as_strided(tensor.shape, (70, 1)) for name, tensor in codes.items()}
    a, _ = translated(state, over)
    values = nested["qmap1"][codes["state1"].t().flatten().long()] * nested["absmax1"].repeat_interleave(256)
    assert_same(a["exp_avg"].flatten(), values)


@pytest.mark.parametrize("name", ["Lion8bit", "Lion", "SGD8bit", "RMSprop8bit", "Adagrad8bit"])
def test_p21_bitsandbytes_lone_state_is_ambiguous(name: str) -> None:
    theirs = bnb(name, params(torch.float32, SHAPES), **({"momentum": 0.9} if "SGD" in name else {}))
    drive(theirs, range(2))
    state = through_file(theirs.state_dict())
    for saved, entry in zip(map(unwrapped, state["state"].values()), translated(state, members(theirs)), strict=True):
        assert entry.keys() == saved.keys()
        assert all(entry[key] is value for key, value in saved.items())
    for ours in ("AdamW", "Lion", "SGD"):
        target = make(ours, copies(members(theirs)), **({"momentum": 0.9} if ours == "SGD" else {}))
        with pytest.raises(ValueError, match=r"the state for param 0 of group 0 does not fit: .*'state1'"):
            target.load_state_dict(state)


def test_p21_bitsandbytes_before_blocks_is_not_guessed_at() -> None:
    saved = {"step": 3, "state1": torch.zeros(4, dtype=torch.uint8), "state2": torch.zeros(4, dtype=torch.uint8)}
    saved |= {"max1": torch.ones(1), "new_max1": torch.ones(1), "max2": torch.ones(1), "new_max2": torch.ones(1)}
    assert_equal(foreign.entry(saved, {"betas": (0.9, 0.999)}, torch.zeros(4)), saved)


# ---------------------------------------------------------------------- torch, the teaching implementation, ours


@pytest.mark.parametrize(
    "optimizer",
    [
        torch.optim.AdamW(params(torch.float32)),
        torch.optim.Adam(params(torch.bfloat16), amsgrad=True),
        *(make(name, params(torch.bfloat16)) for name in OPTIMIZERS if name != "SGD"),
        make("SGD", params(torch.bfloat16), momentum=0.9),
        make("AdamW", params(torch.bfloat16, [(64, 65)]), moments="block8", weights="split8"),
    ],
    ids=lambda optimizer: f"{type(optimizer).__module__.partition('.')[0]} {type(optimizer).__name__}",
)
def test_p21_ours_and_torchs_adam_pass_through(optimizer: torch.optim.Optimizer) -> None:
    drive(optimizer, range(2))
    state = optimizer.state_dict()
    for saved, entry in zip(state["state"].values(), translated(state, members(optimizer)), strict=True):
        assert entry is not saved
        assert list(entry) == list(saved)
        assert all(entry[key] is value for key, value in saved.items())
    (group,) = state["param_groups"]
    kept = foreign.options({name: value for name, value in group.items() if name != "params"})
    assert kept == {name: value for name, value in group.items() if name != "params"}
    assert kept["lr"] is group["lr"]


@pytest.mark.parametrize("nesterov", [False, True])
def test_p21_torchs_sgd_with_momentum_goes_on(nesterov: bool) -> None:
    options: dict[str, Any] = {"lr": LR, "momentum": 0.9, "weight_decay": DECAY, "dampening": 0.0 if nesterov else 0.5}
    theirs = torch.optim.SGD(params(torch.float32, SHAPES), nesterov=nesterov, **options)
    drive(theirs, range(3))
    state = through_file(theirs.state_dict())
    for saved, entry in zip(state["state"].values(), translated(state, members(theirs)), strict=True):
        assert entry == {"step": 1, "momentum_buffer": saved["momentum_buffer"]}
        assert entry["momentum_buffer"] is saved["momentum_buffer"]
    target = make("SGD", copies(members(theirs)), momentum=0.9)
    target.load_state_dict(state)
    drive(theirs, range(3, 9))
    drive(target, range(3, 9))
    # After 9 gradients of at most 2, and 0.5 of decay, a buffer is below 2.5 * 6.2 < 16. Three roundings a step put it
    # off by 48 U more each time, 21 * 48 U in the sum of 6 steps; Nesterov's two put each step off by 32 U. That is
    # below 1200 U of LR, and 6 * 300 U are allowed.
    assert_follows(target, theirs, 6)


def test_p21_torchs_sgd_without_momentum_keeps_nothing() -> None:
    theirs = torch.optim.SGD(params(torch.float32, SHAPES), lr=LR)
    drive(theirs, range(2))
    state = through_file(theirs.state_dict())
    # as older versions of torch wrote it, and as this one does
    for entries in ({number: {"momentum_buffer": None} for number in range(len(SHAPES))}, state["state"]):
        state["state"] = entries
        target = make("SGD", copies(members(theirs)))
        target.load_state_dict(state)
        drive(target, range(2))
    assert foreign.entry({"momentum_buffer": None}, {"momentum": 0}, torch.zeros(3)) == {}


def test_p21_the_teaching_implementations_copy_is_the_master() -> None:
    saved = {"step": 3, "exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2), "fp32_copy": torch.ones(2)}
    entry = foreign.entry(saved, {"lr": LR}, torch.ones(2, dtype=torch.float16))
    assert list(entry) == ["step", "exp_avg", "exp_avg_sq", "master"]
    assert entry["master"] is saved["fp32_copy"]


# ---------------------------------------------------------------------- groups


def test_p21_groups_of_optimi_in_our_terms() -> None:
    theirs = optimi.Adam(params(torch.bfloat16), lr=LR, betas=(0.8, 0.95), weight_decay=DECAY, triton=False)
    torch.optim.lr_scheduler.StepLR(theirs, 1)
    drive(theirs, range(1))
    (group,) = theirs.state_dict()["param_groups"]
    group.pop("params")
    ours = {"lr": LR, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": DECAY, "decoupled_weight_decay": False}
    assert foreign.options(group) == {**ours, "initial_lr": LR}
    (group,) = optimi.AdamW(params(torch.bfloat16), lr=LR).state_dict()["param_groups"]
    assert foreign.options(group)["decoupled_weight_decay"] is True
    # decoupled from nothing
    (group,) = optimi.AdamW(params(torch.bfloat16), lr=LR, weight_decay=0, decouple_lr=True).state_dict()[
        "param_groups"
    ]
    assert foreign.options(group)["weight_decay"] == 0


def test_p21_optimis_decay_apart_from_lr_names_the_way_out() -> None:
    theirs = optimi.AdamW(params(torch.float32), lr=LR, weight_decay=1e-4, max_lr=0.01, decouple_lr=True, triton=False)
    drive(theirs, range(2))
    state = through_file(theirs.state_dict())
    target = make("AdamW", copies(members(theirs)))
    text = (
        r"decouple_lr=True: a weight decays by weight_decay \* lr / max_lr of itself there, and by weight_decay \* lr "
        r"here: in the state's group set decouple_lr=False, decouple_wd=True and weight_decay=0.0001 / 0.01, its "
        r"quotient by max_lr"
    )
    with pytest.raises(ValueError, match=r"group 0 of the loaded state does not fit: " + text):
        target.load_state_dict(state)
    state["param_groups"][0] |= {"decouple_lr": False, "decouple_wd": True, "weight_decay": 0.0001 / 0.01}
    target.load_state_dict(state)
    drive(theirs, range(2, 6))
    drive(target, range(2, 6))
    assert_follows(target, theirs, 4)


def test_p21_groups_of_bitsandbytes_in_our_terms() -> None:
    theirs = bnb("Adam8bit", params(torch.float32), betas=(0.8, 0.95), weight_decay=DECAY)
    (group,) = theirs.state_dict()["param_groups"]
    group.pop("params")
    assert {"alpha", "t_alpha", "t_beta3"} <= group.keys()
    ours = {"lr": LR, "betas": (0.8, 0.95), "eps": 1e-8, "weight_decay": DECAY, "decoupled_weight_decay": True}
    assert foreign.options(group) == ours
    (group,) = bnb("AdEMAMix", params(torch.float32)).state_dict()["param_groups"]
    with pytest.raises(ValueError, match=r"alpha=5.0: it is AdEMAMix's, which keeps a further average; start in a new"):
        foreign.options(group)
    # an RMSprop of torch's has an alpha, too
    (group,) = torch.optim.RMSprop(params(torch.float32)).state_dict()["param_groups"]
    assert foreign.options(group)["alpha"] == 0.99


# ---------------------------------------------------------------------- what does not fit

CODES = torch.zeros(68, 64, dtype=torch.uint8)
FITS = {"step": 3, "state1": CODES, "qmap1": torch.ones(256), "absmax1": torch.ones(17)}
FITS |= {"state2": CODES, "qmap2": torch.ones(256), "absmax2": torch.ones(17)}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a shape": ({"state1": CODES[1:]}, r"its 'state1' has shape \(67, 64\), the param \(68, 64\)$"),
    "a dtype": (
        {"state2": CODES.int()},
        r"its 'state2' is torch.int32, neither torch.float32 nor codes in torch.uint8",
    ),
    "no tensor": ({"state2": [1]}, r"its 'state2' is a list, not a tensor"),
    "no values": ({"qmap2": None}, r"its 'qmap2' is None, not a row of torch.float32, by which its codes are read"),
    "values": ({"qmap1": torch.ones(16)}, r"its 'qmap1' has 16 entries, not a value for each of 256 codes"),
    "values' dtype": (
        {"qmap1": torch.ones(256).half()},
        r"its 'qmap1' is torch.float16 of shape \(256,\), not a row of",
    ),
    "scales": (
        {"absmax1": torch.ones(4)},
        r"its 'absmax1' has 4 entries, not the 17 that 4352 elements have in blocks of 256",
    ),
    "scales' shape": (
        {"absmax2": torch.ones(17, 1)},
        r"its 'absmax2' is torch.float32 of shape \(17, 1\), not a row of",
    ),
    "steps": ({"step": -1}, r"its step is -1, not a count of steps"),
    "no steps": ({"step": None}, r"its step is None, not a count of steps"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_p20_what_of_bitsandbytes_does_not_fit_is_named(case: str) -> None:
    group, param = {"betas": [0.9, 0.999]}, torch.zeros(68, 64)
    assert foreign.entry(FITS, group, param)["exp_avg"].shape == param.shape
    changed, text = REFUSED[case]
    with pytest.raises(ValueError, match=text):
        foreign.entry({**FITS, **changed}, group, param)


def test_p06_a_square_that_8_bits_lost_is_not_0_where_float32_would_lose_it_too() -> None:
    saved = {**FITS, "absmax1": torch.full((17,), 1e-25), "qmap2": torch.zeros(256)}
    entry = foreign.entry(saved, {"betas": (0.9, 0.999)}, torch.zeros(68, 64))
    assert_same(entry["exp_avg"], torch.full((68, 64), 1e-25))
    assert_same(entry["exp_avg_sq"], torch.full((68, 64), 2.0**-149))


def test_p20_bitsandbytes_8_bits_need_betas() -> None:
    with pytest.raises(ValueError, match=r"its group has betas=None: codes of 8 bits are read by two, as in \(0.9, "):
        foreign.entry(FITS, {}, torch.zeros(68, 64))


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"kahan_comp": torch.zeros(3)}, r"its 'kahan_comp' has shape \(3,\), the param \(2,\)"),
        ({"exp_avg": torch.zeros(3)}, r"its 'exp_avg' has shape \(3,\), the param \(2,\)"),
        ({"exp_avg_sq": None}, r"its 'exp_avg_sq' is a NoneType, not a tensor"),
        ({"kahan_comp": 1.0}, r"its 'kahan_comp' is a float, not a tensor"),
        ({"step": 1.5}, r"its step is 1.5, not a count of steps"),
    ],
)
def test_p20_what_of_optimi_does_not_fit_is_named(changed: dict[str, Any], text: str) -> None:
    group = {"kahan_sum": True, "beta1": 0.9, "beta2": 0.99, "step": torch.tensor(2, dtype=torch.int32)}
    fits = {name: torch.ones(2, dtype=torch.bfloat16) for name in ("exp_avg", "exp_avg_sq", "kahan_comp")}
    param = torch.ones(2, dtype=torch.bfloat16)
    assert foreign.entry(fits, group, param)["step"] == 2
    with pytest.raises(ValueError, match=text):
        foreign.entry({**fits, **changed}, group, param)
