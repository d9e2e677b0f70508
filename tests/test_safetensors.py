"""Safetensors files where names, dtypes or memory are odd: what is kept is right, and all else is refused by name."""

import weakref
from pathlib import Path

import pytest
import safetensors.torch
import torch
from safetensors import safe_open
from torch import Tensor, nn

import halfstep
from harness import assert_same


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
