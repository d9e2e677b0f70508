"""A plan's loops as machine code: the shared functions, compiled by Numba, in a loop written out for its parts."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types  # pyright: ignore[reportPrivateImportUsage]
from numba.extending import intrinsic

from halfstep.backends.texts import filled
from halfstep.backends.traced import bind
from halfstep.contracts import BLOCK, Plan
from halfstep.formats.counter import first_half, keyed, random_bits, second_half, stream_key
from halfstep.primitives import select, to_i32

#: No fastmath: nothing contracts into an FMA.
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}
jit = functools.partial(numba.njit, **_OPTIONS)

#: How many elements ahead of a block memory is asked for, and how much of it at once. A CPU does so by itself, but only
#: to the end of a page, and pages of bytes end often.
AHEAD, LINE = 1024, 64
#: How many elements wait for their stores at a time: their buffers stay in the innermost cache.
PIECE = 512

_I32, _FLOAT = ir.IntType(32), ir.FloatType()


def beyond(at, i):
    """The index ``i`` elements on, in 32 bits from the start: cut later, it would be counted in lanes of 64."""
    return to_i32(at + i)


def tally(count, one_more):
    """A count of what is so, in 32 bits."""
    return select(one_more, count + 1, count)


# Plans differ in the number of their parts, so a plan's loops are written out from these texts. An element's parts are
# read, passed through load and update, and in a loop of its own through store: what waits for the rule's root and
# quotient would keep a CPU from looking further ahead.
_TENSORS = """
def kernel(addresses, offsets, numbers, scalars, tensor, begin, end, saturated):
    wide()
    {buffers}
    while begin < end:
        {known}
        origin, length, pitch, high = numbers[tensor, 3], numbers[tensor, 4], numbers[tensor, 5], int64(-1)
        left, right = begin - offsets[tensor], min(end, offsets[tensor + 1]) - offsets[tensor]
        {walk}
        begin = offsets[tensor] + right
        tensor += 1
"""

# Work is counted in elements where no part is shared. A run ends with its row: behind it indices go on elsewhere.
_RUNS = """
first, done = left, 0
while first < right:
    row = first // length
    place = first - row * length
    index, size = origin + row * pitch + place, min(right - first, length - place, PIECE)
    {elements}
    first += size
"""

# Where a part is shared work is counted in blocks. What is measured of a block's values goes into buffers, and from
# there through store once the largest is known.
_BLOCKS = """
blocks = (length + BLOCK - 1) // BLOCK
row = left // blocks
place = (left - row * blocks) * BLOCK
for block in range(left, right):
    begun, head, whole = row * length + place, origin + row * pitch + place, min(BLOCK, length - place)
    {unknown}
    {fetches}
    done = 0
    while done < whole:
        first = begun + done
        index, size = head + done, whole - done
        {elements}
        done += size
    for i in range(whole):
        {codes}
    {written}
    place += BLOCK
    if place >= length:
        row, place = row + 1, 0
"""

# The high word of an index is a part of the key, and a run ends where it changes.
_ELEMENTS = """
if index >> 32 != high:
    high = index >> 32
    {folds}
at, size = int32(index), min(size, 2**32 - (index & 0xFFFFFFFF))
counted = int32(0)
for i in range(size):
    {updates}
for i in range(size):
    {stores}
saturated[tensor] += counted
"""


@intrinsic
def wide(_typing: Any) -> Any:
    """Ask LLVM for vectors as wide as the CPU has, in the function that calls this; by itself it stays at 256 bits."""

    def code(context, builder, _signature, _values):
        # llvmlite's own add() knows no attribute with a value
        set.add(builder.function.attributes, '"prefer-vector-width"="512"')
        return context.get_dummy_value()

    return types.void(), code


@functools.cache
def room(size: int) -> Any:
    """A function that returns the address of so many bytes, which are its caller's while that runs."""

    def typed(_context):
        def code(_context, builder, _signature, _values):
            with builder.goto_entry_block():
                found = builder.alloca(ir.ArrayType(ir.IntType(8), size))
            found.align = LINE
            return builder.ptrtoint(found, ir.IntType(64))

        return types.int64(), code

    return intrinsic(typed)


@intrinsic
def fetch(_typing: Any, address: types.Type) -> Any:
    """Ask for the memory behind an address, which may lie behind a tensor's end: nothing is read."""

    def code(context, builder, _signature, values):
        byte = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [byte, _I32, _I32, _I32])
        name = "llvm.prefetch.p0i8"
        function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
        builder.call(function, [builder.inttoptr(values[0], byte), _I32(1), _I32(3), _I32(1)])
        return context.get_dummy_value()

    return types.void(types.int64), code


def accesses(number: type[np.number], scope: int, scopes: int) -> tuple[Any, Any]:
    """Functions that read and write element ``i`` behind an address: float32 as it is, integers as int32.

    To LLVM the memory of one scope is never that of another, so that it need not look where two overlap.
    """
    seen = types.float32 if number is np.float32 else types.int32
    kept = _FLOAT if number is np.float32 else ir.IntType(8 * np.dtype(number).itemsize)
    widen = "zext" if np.issubdtype(number, np.unsignedinteger) else "sext"

    def place(builder, address, i):
        return builder.gep(builder.inttoptr(address, kept.as_pointer()), [i])

    def alone(builder, instruction):
        module = builder.module
        domain = module.add_metadata([ir.MetaDataString(module, "halfstep")])
        all_ = [module.add_metadata([ir.MetaDataString(module, f"halfstep.{k}"), domain]) for k in range(scopes)]
        instruction.set_metadata("alias.scope", module.add_metadata([all_[scope]]))
        instruction.set_metadata("noalias", module.add_metadata([*all_[:scope], *all_[scope + 1 :]]))
        return instruction

    def reading(_context, _address, _i):
        def code(_context, builder, _signature, values):
            value = alone(builder, builder.load(place(builder, *values)))
            return value if kept in (_FLOAT, _I32) else getattr(builder, widen)(value, _I32)

        return seen(types.int64, types.int64), code

    def writing(_context, _address, _i, _value):
        def code(_context, builder, _signature, values):
            address, i, value = values
            value = value if kept in (_FLOAT, _I32) else builder.trunc(value, kept)
            alone(builder, builder.store(value, place(builder, address, i)))
            return _context.get_dummy_value()

        return types.void(types.int64, types.int64, seen), code

    return intrinsic(reading), intrinsic(writing)


_BITS = {1: np.int8, 2: np.int16}


def number_of(dtype: torch.dtype) -> type[np.number]:
    """The numpy type through which a part's memory is seen: a float's bits, but for float32."""
    if dtype.is_floating_point and dtype is not torch.float32:
        return _BITS[dtype.itemsize]
    return getattr(np, str(dtype).removeprefix("torch."))


class _Source:
    """The text of a plan's loops, and the names it uses.

    ``aK`` is a part's address, ``eK`` the entry of a shared part for the block, ``vJ`` a format's value, ``bJ`` where
    it waits for its store, ``mJ`` where what is measured of it does, ``lJ`` the largest in the block, ``cN`` a scalar,
    ``keyN`` and ``foldN`` the key of a pair of uses, which come from ``baseN`` and ``bareN`` for one high word of the
    index.
    """

    def __init__(self, plan: Plan) -> None:
        self.parts = plan.parts
        self.types = [number_of(part.dtype) for part in self.parts]
        self.shared = [k for k, part in enumerate(self.parts) if part.shared]
        self.own = [k for k, part in enumerate(self.parts) if not part.shared]
        self.measured = [j for j, format in enumerate(plan.formats) if format.measure]
        self.pairs, self.scalars = range(plan.pairs), range(plan.scalars)
        self.names: dict[str, Any] = {"BLOCK": BLOCK, "PIECE": PIECE, "AHEAD": AHEAD}
        self.names |= {"wide": wide, "fetch": fetch, "int32": np.int32, "int64": np.int64}
        # what is kept as float32, as it is, need not wait
        simple = [format.parts[0].dtype is torch.float32 and not format.random for format in plan.formats]
        # nor does what is not written
        simple[0] |= plan.rule.observes
        self.waiting = [j for j in range(len(simple)) if not simple[j]]
        buffers = [*((f"{j}", np.float32) for j in self.waiting), *((f"_measured{j}", np.int32) for j in self.measured)]
        scopes = len(self.parts) + len(buffers)
        for k, number in enumerate(self.types):
            self.names[f"read{k}"], self.names[f"write{k}"] = accesses(number, k, scopes)
        for k, (j, number) in enumerate(buffers, start=len(self.parts)):
            self.names[f"recall{j}"], self.names[f"note{j}"] = accesses(number, k, scopes)
        self.names |= {"load_grad": bind(plan.grad.load), "update": bind(plan.rule.update)}
        shared = (stream_key, keyed, random_bits, first_half, second_half, beyond, tally)
        self.names |= {f.__name__: bind(f) for f in shared}
        self.updates, self.stores, self.codes = self._element(plan)

    def _element(self, plan: Plan) -> tuple[list[str], list[str], list[str]]:
        """What is done to an element, after that to what waits of it, and at last to what was measured."""
        loads, kept, stores, codes, first = [], [], [], [], 0
        random = [f"h{n} = random_bits(beyond(at, i), key{n}, fold{n})" for n in self.pairs]
        for j, (format, use) in enumerate(zip(plan.formats, plan.uses, strict=True)):
            parts = range(first, first + len(format.parts))
            first = parts.stop
            self.names |= {f"load{j}": bind(format.load), f"store{j}": bind(format.store)}
            loads.append(f"v{j} = load{j}({', '.join(map(self._read, parts))})")
            if plan.rule.observes and j == 0:
                continue
            value = f"v{j}"
            if j in self.waiting:
                kept.append(f"note{j}(b{j}, i, v{j})")
                stores.append(f"v{j} = recall{j}(b{j}, i)")
            if use is not None:
                random.append(f"r{j} = {'second' if use % 2 else 'first'}_half(h{use // 2})")
                value += f", r{j}"
            then, place = (stores if j in self.waiting else kept), "first"
            if format.measure:
                self.names[f"measure{j}"] = bind(format.measure)
                then += [f"q{j} = measure{j}({value})", f"l{j} = max(l{j}, q{j})"]
                then.append(f"note_measured{j}(m{j}, done + i, q{j})")
                then, place, value = codes, "begun", f"recall_measured{j}(m{j}, i), l{j}"
            own = [k for k in parts if not self.parts[k].shared]
            results = [f"s{k}" if k in own else f"e{k}" for k in parts]
            then.append(f"{', '.join(results)}, = store{j}({value})")
            then += [f"write{k}(a{k}, {place} + i, s{k})" for k in own]
        if plan.weight.saturates and not plan.rule.observes:
            self.names["saturates"] = bind(plan.weight.saturates)
            (stores if 0 in self.waiting else kept).append("counted = tally(counted, saturates(v0))")
        values = [f"v{j}" for j in range(len(plan.formats))]
        arguments = [values[0], "grad", *values[1:], *(f"c{k}" for k in self.scalars[1:])]
        step = [
            f"grad = load_grad({self._read(first)}) * c0",
            f"{', '.join(values[plan.rule.observes :])}, = update({', '.join(arguments)})",
        ]
        return [*loads, *step, *kept], [*random, *stores] if stores else [], codes

    def _read(self, part: int) -> str:
        return f"e{part}" if self.parts[part].shared else f"read{part}(a{part}, first + i)"

    def _lines(self) -> Iterator[tuple[int, int, int]]:
        """The lines of memory that a block takes of each part: the part, its element's size, the line's first byte."""
        for k in self.own:
            size = np.dtype(self.types[k]).itemsize
            yield from ((k, size, line) for line in range(0, BLOCK * size, LINE))

    def text(self) -> str:
        """The source of ``kernel``."""
        words = ", ".join(f"numbers[tensor, {word}" for word in ("0]", "0] >> 32", "1]", "2]"))
        known = [f"a{k} = addresses[tensor, {k}]" for k in range(len(self.parts))]
        known += [f"c{k} = scalars[tensor, {k}]" for k in self.scalars]
        known += [f"base{n}, bare{n} = stream_key({words}, {n})" for n in self.pairs]
        known += [f"key{n} = fold{n} = int32(0)" for n in self.pairs]
        of_high = [
            f"{key}{n} = keyed({base}{n}, high)"
            for n in self.pairs
            for key, base in (("key", "base"), ("fold", "bare"))
        ]
        elements = filled(_ELEMENTS, folds=of_high, updates=self.updates, stores=self.stores)
        length = BLOCK if self.shared else PIECE
        buffers = {f"b{j}" for j in self.waiting} | {f"m{j}" for j in self.measured}
        self.names["room"] = room(4 * length)
        if self.shared:
            unknown = [f"l{j} = int32(0)" for j in self.measured]
            unknown += [f"e{k} = read{k}(a{k}, block)" for k in self.shared]
            walk = filled(
                _BLOCKS,
                unknown=unknown,
                fetches=[f"fetch(a{k} + (begun + AHEAD) * {size} + {line})" for k, size, line in self._lines()],
                elements=elements.splitlines(),
                codes=self.codes,
                written=[f"write{k}(a{k}, block, e{k})" for k in self.shared],
            )
        else:
            walk = filled(_RUNS, elements=elements.splitlines())
        return filled(
            _TENSORS, buffers=[f"{name} = room()" for name in sorted(buffers)], known=known, walk=walk.splitlines()
        )


def compile_plan(plan: Plan) -> Callable[..., None]:
    """Return the kernel of ``plan`` over tables with a row for each tensor.

    It takes the addresses of the param, of its state's parts and of the gradient; where each tensor's work begins in
    the sum of all; seed, stream, step, index of the first element, length of a row and how far rows begin from each
    other in index; the scalars; then the first tensor, the work to do from there on, and where to add what saturated.
    """
    source = _Source(plan)
    names = source.names
    exec(source.text(), names)
    table, row = numba.int64[:, ::1], numba.int64[::1]
    arguments = (table, row, table, numba.float32[:, ::1], numba.int64, numba.int64, numba.int64, row)
    return jit(numba.void(*arguments))(names["kernel"])
