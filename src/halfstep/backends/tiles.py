"""A plan's step as one Triton kernel for all its tensors: the shared functions on tiles, read and written in place.

A tile is 16 blocks of 128 neighbours: 16 elements for each of 128 threads, which is what one access of 16 bytes takes
of a tensor of bytes, or where there is none 8 for each of 256. A program finds its tensor in a table. An address from
there says nothing of its alignment: where the host knows it to be a multiple of 16, and rows as well, the kernel is
told so. What is left, tails and unaligned views, takes a second, narrow path.
"""

import functools
from typing import Any

import triton.language as tl

from halfstep.backends.jitted import KINDS, WIDE, bind, from_text, read_row
from halfstep.backends.texts import filled
from halfstep.contracts import BLOCK, Plan
from halfstep.formats.counter import first_half, keyed, random_bits, second_half, stream_key

#: How many blocks a tile has, and how many elements; and the blocks of one that are worked on at a time where their
#: memory is not known to be aligned.
BLOCKS, NARROW = 16, 4
TILE = BLOCKS * BLOCK

#: What the table says of a tensor behind its addresses.
KNOWN = ("job", "size", "length", "rows", "seed", "stream", "start", "pitch", "first_tile", "wide_tiles")


def columns(plan: Plan) -> tuple[str, ...]:
    """What a row of the table has: the addresses of the plan's parts, and what is `KNOWN`."""
    return (*(f"a{k}" for k in range(len(plan.parts))), *KNOWN)


_KERNEL = """
def {name}(tensors, table, steps, scalars, skip, saturated):
    skipped = tl.load(skip)
    tensor = tl.load(tensors + tl.program_id(0)).to(tl.int64)
    if skipped == 0:
        {known}
        tile = tl.program_id(0) - first_tile.to(tl.int32)
        lane = tl.arange(0, BLOCK)[None, :]
        block = tile * BLOCKS
        {origin}
        wide = tile < wide_tiles
        {ends}
        if wide:
            k = tl.arange(0, BLOCKS)
            {bases}
            i = tl.multiple_of(base, WIDE)[:, None] + lane
            inside = lane < tl.multiple_of(width, WIDE)[:, None]
            {wide}
        else:
            for narrow in range(0, tl.minimum(total - tile * BLOCKS, BLOCKS), NARROW):
                block, k = tile * BLOCKS + narrow, tl.arange(0, NARROW)
                {origin}
                {bases}
                i, inside = base[:, None] + lane, lane < width[:, None]
                {narrow}
"""

# Where no part is shared and nothing is random, blocks are no more than the shape of a tile.
_RUN = """
total = ((size + BLOCK - 1) // BLOCK).to(tl.int32)
origin = block.to(tl.int64) * BLOCK
"""
_RUN_BASES = """
base = origin + k * BLOCK
width = tl.minimum(tl.maximum(size - base, 0), BLOCK).to(tl.int32)
"""

# Otherwise blocks begin with each row. Those from one on lie in a row, and behind its end in the next ones. They are
# counted in 32 bits.
_ROWS = """
blocks = ((length + BLOCK - 1) // BLOCK).to(tl.int32)
total = rows.to(tl.int32) * blocks
row = block // blocks
place = block - row * blocks
"""
_ROWS_BASES = """
end = tl.minimum(blocks - place, BLOCKS)
over = tl.where(k < end, 0, 1 + (k - end) // tl.minimum(blocks, BLOCKS))
places = (place + k - over * blocks).to(tl.int64)
base = (row + over).to(tl.int64) * length + places * BLOCK
width = tl.where(row + over < rows, tl.minimum(length - places * BLOCK, BLOCK), 0).to(tl.int32)
"""

# An index has a high word, a part of the key, and a wide tile has but one: from its first block to the end of its last.
_ENDS = """
first = start + row.to(tl.int64) * pitch + place.to(tl.int64) * BLOCK
behind = (place + BLOCKS - 1) // blocks
last = start + (row + behind).to(tl.int64) * pitch + (place + BLOCKS - behind * blocks).to(tl.int64) * BLOCK - 1
wide &= first >> 32 == last >> 32
"""
_STARTS = """
begun = start + (row + over).to(tl.int64) * pitch + places * BLOCK
"""


class _Source:
    """The text of a plan's kernel, and the names it uses.

    ``aK`` is a part's address, ``xK`` what was read of it and ``sK`` what will be written, ``vJ`` a format's value,
    ``qJ`` what is measured of it and ``lJ`` the largest in the block, ``cN`` a scalar, ``hN`` the random bits of a
    pair of uses.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.parts = plan.parts
        self.kinds = [KINDS[part.dtype] for part in self.parts]
        self.pairs, self.scalars = range(plan.pairs), range(plan.scalars)
        self.names: dict[str, Any] = {f"kind{k}": kind for k, kind in enumerate(self.kinds)}
        numbers = {"BLOCK": BLOCK, "BLOCKS": BLOCKS, "NARROW": NARROW, "TILE": TILE, "WIDE": WIDE}
        self.names |= {name: tl.constexpr(number) for name, number in numbers.items()}
        self.names |= {"load_grad": bind(plan.grad.load), "update": bind(plan.rule.update)}
        self.names |= {f.__name__: bind(f) for f in (stream_key, keyed, random_bits, first_half, second_half)}

    def text(self) -> str:
        """The source of the kernel."""
        known = read_row(columns(self.plan))
        known += [f"c{n} = tl.load(scalars + job * {len(self.scalars)} + {n})" for n in self.scalars]
        if self.pairs:
            words = "seed.to(tl.int32), (seed >> 32).to(tl.int32), stream.to(tl.int32), step"
            known.append("step = tl.load(steps + job).to(tl.int32)")
            known += [f"base{n}, bare{n} = stream_key({words}, {n})" for n in self.pairs]
        origin, bases = (_ROWS, _ROWS_BASES) if self.plan.in_blocks or self.pairs else (_RUN, _RUN_BASES)
        ends, starts = (_ENDS, _STARTS) if self.pairs else ("", "")
        text = filled(
            _KERNEL,
            known=known,
            origin=origin.strip().splitlines(),
            ends=ends.strip().splitlines(),
            bases=(bases + starts).strip().splitlines(),
            wide=self._body(wide=True),
            narrow=self._body(wide=False),
        )
        return text.replace("{name}", self.name)

    def _body(self, wide: bool) -> list[str]:
        """What is done to the blocks of a tile."""
        plan, loads, stores, first = self.plan, [], [], 0
        for j, (format, use) in enumerate(zip(plan.formats, plan.uses, strict=True)):
            own = range(first, first + len(format.parts))
            first = own.stop
            self.names |= {f"load{j}": bind(format.load), f"store{j}": bind(format.store)}
            loads += [self._read(k, wide) for k in own]
            loads.append(f"v{j} = load{j}({', '.join(f'x{k}' for k in own)})")
            if plan.rule.observes and j == 0:
                continue
            value = f"v{j}"
            if use is not None:
                value += f", {'second' if use % 2 else 'first'}_half(h{use // 2})"
                if not use % 2:
                    stores += self._random(use // 2, wide)
            if format.measure:
                self.names[f"measure{j}"] = bind(format.measure)
                stores.append(f"q{j} = tl.where(inside, measure{j}({value}), 0)")
                value = f"q{j}, tl.max(q{j}, 1, keep_dims=True)"
            stores.append(f"{', '.join(f's{k}' for k in own)}, = store{j}({value})")
            stores += [self._write(k, wide) for k in own]
        values = [f"v{j}" for j in range(len(plan.formats))]
        arguments = [values[0], "grad", *values[1:], *(f"c{n}" for n in self.scalars[1:])]
        results = ", ".join(values[plan.rule.observes :])
        update = [f"grad = load_grad(x{first}) * c0", f"{results}, = update({', '.join(arguments)})"]
        counted = []
        if plan.weight.saturates and not plan.rule.observes:
            self.names["saturates"] = bind(plan.weight.saturates)
            counted += ["count = tl.sum((saturates(v0) & inside).to(tl.int32))", "if count > 0:"]
            counted += ["    tl.atomic_add(saturated + job, count.to(tl.int64), sem='relaxed')"]
        return [*loads, self._read(first, wide), *update, *stores, *counted]

    @property
    def name(self) -> str:
        """The kernel's, as profilers show it."""
        formats = (format.name for format in (*self.plan.formats, self.plan.grad))
        return "_".join(("halfstep", self.plan.rule.name, *dict.fromkeys(formats)))

    def _random(self, pair: int, wide: bool) -> list[str]:
        """The random bits of a pair of uses."""
        high = f"({'first' if wide else 'index'} >> 32).to(tl.int32)"
        return [
            "index = begun[:, None] + lane",
            f"key, fold = keyed(base{pair}, {high}), keyed(bare{pair}, {high})",
            f"h{pair} = random_bits(index.to(tl.int32), key, fold)",
        ]

    def _access(self, part: int, wide: bool) -> tuple[str, str]:
        """The pointers to a part's elements or blocks, and which there are."""
        address = f"a{part}.to(tl.pointer_type(kind{part}))"
        if self.parts[part].shared:
            return f"{address} + (block + k)[:, None]", "(width > 0)[:, None]"
        return f"{f'tl.multiple_of({address}, WIDE)' if wide else address} + i", "inside"

    def _read(self, part: int, wide: bool) -> str:
        pointers, there = self._access(part, wide)
        widened = "" if self.kinds[part] is tl.float32 else ".to(tl.int32)"
        return f"x{part} = tl.load({pointers}, mask={there}, other=0){widened}"

    def _write(self, part: int, wide: bool) -> str:
        pointers, there = self._access(part, wide)
        narrowed = "" if self.kinds[part] is tl.float32 else f".to(kind{part})"
        return f"tl.store({pointers}, s{part}{narrowed}, mask={there})"


#: The types of a kernel's arguments.
TYPES = ("*i32", "*i64", "*i64", "*fp32", "*fp32", "*i64")


@functools.cache
def kernel_of(plan: Plan) -> Any:
    """Return the kernel of ``plan``.

    It takes the tensor of each tile; a row for each tensor with the addresses of its parts and gradient and what
    `KNOWN` names; the steps and the scalars of each job; a number that is not 0 where nothing is to be done; and where
    to count what saturated.
    """
    source = _Source(plan)
    return from_text(source.text(), source.name, source.names)


def warps(plan: Plan) -> int:
    """How many warps run a tile: 16 elements for each thread where a part is kept in bytes, else 8."""
    return 4 if any(part.dtype.itemsize == 1 for format in plan.formats for part in format.parts) else 8
