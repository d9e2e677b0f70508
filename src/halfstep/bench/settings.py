"""What one `halfstep bench` measures, checked once, where it enters."""

from dataclasses import dataclass, field

from halfstep.bench.peers import PEERS
from halfstep.bench.shapes import GPT2_SMALL, Shape, gpt2, many, one
from halfstep.bench.shapes import Sizes as TensorSizes
from halfstep.bench.subjects import DTYPES
from halfstep.cli.errors import InputError
from halfstep.formats import MOMENTS, WEIGHTS

SHAPES = ("one", "gpt2", "many")
#: what may be named, to time nothing else beside the memory and torch's fused AdamW
NAMES = (
    *WEIGHTS,
    *(name for name in MOMENTS if name not in WEIGHTS),
    "torch",
    *dict.fromkeys(p.package for p in PEERS),
)
#: from here on blocks are for the tensor too
LEAST_PARAMS = 4096


@dataclass(frozen=True)
class Sizes:
    """What a person does not choose: fixed by the command, smaller in its tests.

    Args:
        gpt2: the tensors of GPT-2 small.
        many: how many small tensors, and the elements of each.
    """

    gpt2: TensorSizes = GPT2_SMALL
    many: tuple[int, int] = (20_000, 100)


@dataclass(frozen=True)
class Settings:
    """One run's arguments, as `halfstep bench` names them.

    Raises:
        InputError: an argument is out of its range.
    """

    params: int = 2**23
    shape: tuple[str, ...] = ("one",)
    rounds: int = 11
    dtype: tuple[str, ...] = tuple(DTYPES)
    only: tuple[str, ...] = ()
    sizes: Sizes = field(default_factory=Sizes)

    def __post_init__(self) -> None:
        if self.params < LEAST_PARAMS:
            raise InputError(f"--params {self.params}: must be {LEAST_PARAMS} or more; give more elements")
        if self.rounds < 1:
            raise InputError(f"--rounds {self.rounds}: must be 1 or more; 11 and more give a steady median")
        for option, values, known in (
            ("shape", self.shape, SHAPES),
            ("dtype", self.dtype, DTYPES),
            ("only", self.only, NAMES),
        ):
            for value in values:
                if value not in known:
                    raise InputError(f"--{option} {value}: is not one of {', '.join(known)}; choose among them")

    def shapes(self) -> list[Shape]:
        """Return the sets of tensors that were asked for."""
        known = {"one": one(self.params), "gpt2": gpt2(self.sizes.gpt2), "many": many(*self.sizes.many)}
        return [known[name] for name in dict.fromkeys(self.shape)]

    def wants(self, *names: str) -> bool:
        """Tell whether one of ``names`` is to be timed."""
        return not self.only or bool(set(names) & set(self.only))
