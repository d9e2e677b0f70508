"""Safetensors files: what goes in comes out, tensors tied or not, and a file that is none is refused by name."""

import math
import weakref
from pathlib import Path

import pytest
import safetensors.torch
import torch
from safetensors import safe_open
from torch import Tensor, nn

import halfstep
from harness import assert_equal, assert_same
from test_state import PAIRS, Run
from training import assert_alike


@pytest.mark.parametrize(("weights", "moments"), PAIRS)
def test_p19_six_and_six_steps_through_a_file_are_twelve(
    weights: str, moments: str, half: torch.dtype, tmp_path: Path
) -> None:
    options = {"weights": weights, "moments": moments, "seed": 7, "backend": "eager"}
    whole, first = Run(0, half, "AdamW", **options), Run(0, half, "AdamW", **options)
    whole.train(range(12))
    first.train(range(6))
    halfstep.save_safetensors(first.state(), tmp_path / "run.safetensors")
    second = Run(1, half, "AdamW", **{**options, "seed": 8})
    second.load(halfstep.load_safetensors(tmp_path / "run.safetensors"))
    second.train(range(6, 12))
    assert_alike(second.optimizer, whole.optimizer)
    assert second.scaler.state_dict() == whole.scaler.state_dict()


def test_all_that_a_state_may_hold_comes_back(tmp_path: Path) -> None:
    floats = torch.float16, torch.bfloat16, torch.float32, torch.float64
    integers = torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool
    tensors = [torch.arange(6).to(dtype).view(2, 3) for dtype in (*floats, *integers)]
    state = {
        "a": {"b.c": tensors[0], "b": {"c": tensors[1]}, 0: tensors[2], "0": tensors[3]},
        "rest": [*tensors[4:], torch.tensor(7.5), torch.zeros(0, 3), torch.tensor(math.nan)],
        "numbers": (0.1, -0.0, math.inf, math.nan, 2**80, -3, True, None, "x\n", 5e-324),
        ("tuple", 1): {},
        "empty": [(), [], {}, ""],
        "dtype": torch.bfloat16,
        "strided": tensors[2].t(),
        None: [[[]]],
    }
    halfstep.save_safetensors(state, tmp_path / "all.safetensors")
    found = halfstep.load_safetensors(tmp_path / "all.safetensors")
    assert_equal(found, {**state, "strided": state["strided"].contiguous()})
    assert str(found["numbers"][1]) == "-0.0"
    halfstep.save_safetensors({}, tmp_path / "none.safetensors")
    assert halfstep.load_safetensors(tmp_path / "none.safetensors") == {}


def test_names_and_tensors_make_a_plain_file(tmp_path: Path) -> None:
    file, tensor = tmp_path / "plain.safetensors", torch.randn(4, 6)
    flat = {"a.weight": tensor, "tied": tensor, "part": tensor[:2], "turned": tensor.t(), "n": torch.tensor(3)}
    halfstep.save_safetensors(flat, file)
    theirs = safetensors.torch.load_file(file)
    assert set(theirs) == {"a.weight", "part", "turned", "n"}
    for name, value in theirs.items():
        assert_same(value, flat[name].contiguous())
    ours = halfstep.load_safetensors(file)
    assert set(ours) == set(flat)
    assert_same(ours["tied"], tensor)
    # and another's file is read
    safetensors.torch.save_file({"w": tensor}, tmp_path / "theirs.safetensors")
    assert_same(halfstep.load_safetensors(tmp_path / "theirs.safetensors")["w"], tensor)


def test_a_tied_model_goes_through_the_librarys_own_functions(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
            self.second.weight = self.first.weight

    model, other = Tied(), Tied()
    halfstep.save_safetensors(model.state_dict(), tmp_path / "tied.safetensors")
    assert safetensors.torch.load_model(other, tmp_path / "tied.safetensors") == (set(), [])
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert_same(one.detach(), two.detach())
    safetensors.torch.save_model(model, str(tmp_path / "theirs.safetensors"))
    other.load_state_dict(halfstep.load_safetensors(tmp_path / "theirs.safetensors"))


def test_what_cannot_be_kept_is_named_and_leaves_the_file(tmp_path: Path) -> None:
    file = tmp_path / "state.safetensors"
    halfstep.save_safetensors({"w": torch.ones(2)}, file)
    before = file.read_bytes()
    for state, text in (
        ({"a": [1, {"b": object()}]}, r"the state's a\.1\.b is a object, which a safetensors file cannot keep: it has"),
        ({"a": {3: torch.ones(2).to_sparse()}}, r"the state's a\.3 is a tensor of layout torch.sparse_coo on cpu"),
        ({1, 2}, r"the state's top is a set, which a safetensors file cannot keep"),
        ({"w": torch.ones(2, device="meta")}, r"the state's w is a tensor of layout torch.strided on meta"),
    ):
        with pytest.raises(ValueError, match=text):
            halfstep.save_safetensors(state, file)
        assert file.read_bytes() == before
        assert list(tmp_path.iterdir()) == [file]


def test_a_file_that_is_none_or_cut_short_is_named(tmp_path: Path) -> None:
    file = tmp_path / "state.safetensors"
    halfstep.save_safetensors({"w": torch.ones(200), "n": {"x": 1}}, file)
    whole = file.read_bytes()
    for content in (b"", b"hello", whole[:4], whole[:60], whole[:-1], b"\xff" * 80, whole.replace(b"dict", b"list")):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"state\.safetensors is no safetensors file that can be read, or is cut"):
            halfstep.load_safetensors(file)
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        halfstep.load_safetensors(tmp_path / "absent.safetensors")


# ---------------------------------------------------------------------- odd names, dtypes and memory


def through(state: object, folder: Path) -> object:
    halfstep.save_safetensors(state, folder / "state.safetensors")
    return halfstep.load_safetensors(folder / "state.safetensors")


def assert_named(found: object, state: dict[str, Tensor]) -> None:
    """Raise unless these are the very names and tensors; a plain file keeps no order."""
    assert isinstance(found, dict)
    assert sorted(found) == sorted(state)
    for name, value in state.items():
        assert_same(found[name], value.contiguous())


def test_the_heads_own_entry_is_no_tied_name(half: torch.dtype, tmp_path: Path) -> None:
    # the head says {"format": "pt"}, which is not that "format" is tied to "pt"
    tensor = torch.randn(3)
    for names in (["pt"], ["pt", "format"], ["format", "pt"], ["a", "format"], ["format", "a", "pt"]):
        state = dict.fromkeys(names, tensor)
        assert_named(through(state, tmp_path), state)
        with safe_open(tmp_path / "state.safetensors", framework="pt") as opened:
            assert opened.metadata()["format"] == "pt"  # readers ask for that

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pt = nn.Parameter(torch.randn(4))

    model, twin = Named().to(half), Named()
    optimizer = halfstep.AdamW(model.parameters(), weights="master32")
    halfstep.save_safetensors(twin.state_dict(), tmp_path / "weights.safetensors")
    halfstep.load_weights(model, optimizer, tmp_path / "weights.safetensors")
    assert_same(optimizer.float32_weight(model.pt), twin.pt.detach())


def test_a_tensor_may_be_called_as_the_files_head_is(tmp_path: Path) -> None:
    one, other = torch.ones(2), torch.zeros(3)
    for state in ({"__metadata__": one}, {"__metadata__": one, "__metadata__#2": other}):
        assert_named(through(state, tmp_path), state)
    found = through({"__metadata__": one, "x": 1}, tmp_path)
    assert isinstance(found, dict)
    assert_same(found["__metadata__"], one)
    assert found["x"] == 1


def test_a_dtype_without_a_name_there_is_refused_by_path(tmp_path: Path) -> None:
    file = tmp_path / "state.safetensors"
    text = r"^the state's a\.1 is a tensor of torch\.complex128, which a safetensors file has no name for: cast it"
    with pytest.raises(ValueError, match=text):
        halfstep.save_safetensors({"a": [1, torch.empty(2, dtype=torch.complex128)]}, file)
    assert not list(tmp_path.iterdir())
    wide = torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64, torch.complex64
    for dtype in wide:
        tensor = torch.arange(4).to(dtype)
        found = through({"w": tensor}, tmp_path)
        assert isinstance(found, dict)
        assert found["w"].dtype is dtype
        assert torch.equal(found["w"].view(torch.uint8), tensor.view(torch.uint8))


def test_lazily_conjugated_and_negated_tensors_keep_their_values(tmp_path: Path) -> None:
    tensor = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    state = {"z": tensor, "conjugate": tensor.conj(), "minus": tensor.conj().imag}
    halfstep.save_safetensors(state, tmp_path / "z.safetensors")
    theirs = safetensors.torch.load_file(tmp_path / "z.safetensors")
    assert sorted(theirs) == sorted(state)
    for name, value in state.items():
        assert torch.equal(theirs[name], value.clone().resolve_conj().resolve_neg()), name


def test_tensors_made_on_the_way_are_not_taken_for_each_other(tmp_path: Path) -> None:
    memory = torch.zeros(2, 3, 4)

    class Made(dict[str, int]):
        """Gives other tensors at each look, each in the memory that the one before the last has left, if it has."""

        def items(self):  # type: ignore[no-untyped-def]
            living: list[weakref.ref[Tensor]] = []
            for name, number in super().items():
                free = number < 2 or living[number - 2]() is None
                tensor = (memory[number % 2] if free else torch.empty(3, 4)).fill_(number).t()
                living.append(weakref.ref(tensor))
                yield name, tensor
                del tensor

    found = through(Made({f"w{number}": number for number in range(8)}), tmp_path)
    assert isinstance(found, dict)
    assert {name: value.unique().tolist() for name, value in found.items()} == {f"w{n}": [n] for n in range(8)}


@pytest.mark.parametrize("head", ['["dtype", "load"]', '["dtype", "nn"]', '{"a": 1}', '["list", {}]'])
def test_a_head_that_is_none_of_ours_gives_nothing(head: str, tmp_path: Path) -> None:
    file = tmp_path / "foreign.safetensors"
    safetensors.torch.save_file({"w": torch.ones(1)}, file, {"halfstep": head})
    with pytest.raises(ValueError, match=r"foreign\.safetensors is no safetensors file that can be read"):
        halfstep.load_safetensors(file)
