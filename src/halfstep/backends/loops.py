"""A plan's loops as machine code: the shared functions, compiled by Numba, in a loop written out for its parts."""

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types  # pyright: ignore[reportPrivateImportUsage]
from numba.extending import intrinsic

from halfstep import primitives
from halfstep.contracts import BLOCK, Plan
from halfstep.formats.counter import first_half, keyed, random_bits, second_half, stream_key

_jit = functools.partial(numba.njit, nogil=True, error_model="numpy")  # no fastmath: nothing contracts into an FMA


def _intrinsic(result: types.Type, argument: types.Type, code: Callable[[Any, Any], Any]) -> Any:
    """A function of one value, given as LLVM instructions: ``code(builder, value)``."""

    def typed(context, value):
        return result(argument), lambda _context, builder, _signature, values: code(builder, values[0])

    return intrinsic(typed)


_I16, _I32, _HALF, _FLOAT = ir.IntType(16), ir.IntType(32), ir.HalfType(), ir.FloatType()
_bits = _intrinsic(types.int32, types.float32, lambda b, x: b.bitcast(x, _I32))
_float = _intrinsic(types.float32, types.int32, lambda b, x: b.bitcast(x, _FLOAT))
_widen = _intrinsic(types.float32, types.int32, lambda b, x: b.fpext(b.bitcast(b.trunc(x, _I16), _HALF), _FLOAT))
_narrow = _intrinsic(types.int32, types.float32, lambda b, x: b.sext(b.bitcast(b.fptrunc(x, _HALF), _I16), _I32))


@intrinsic
def _select(_context: Any, condition: types.Type, a: types.Type, b: types.Type) -> Any:
    """An instruction and no branch; of integers the low 32 bits, since Numba's constants have 64, and would spread."""
    seen = types.int32 if isinstance(a, types.Integer) and isinstance(b, types.Integer) else types.float32

    def code(context, builder, signature, values):
        chosen = (context.cast(builder, v, t, seen) for v, t in zip(values[1:], signature.args[1:], strict=True))
        return builder.select(context.cast(builder, values[0], signature.args[0], types.boolean), *chosen)

    return seen(condition, a, b), code


WORDS: dict[str, Callable[..., Any]] = {
    "sqrt": _jit(lambda x: math.sqrt(x)),
    "div": _jit(lambda a, b: a / b),
    "bits": _bits,
    "from_bits": _jit(lambda b: _float(np.int32(b))),
    "to_i32": _jit(lambda b: np.int32(b)),
    "to_f32": _jit(lambda b: np.float32(b)),
    "select": _select,
    "widen_f16": _jit(lambda half: _widen(np.int32(half))),
    "narrow_f16": _narrow,
}


@functools.cache
def bind(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` over scalars, as machine code."""
    return primitives.bind(function, WORDS, _jit, constant=lambda number: number)


# Plans differ in the number of their parts, so a plan's loop is written out from this text: an element's parts are
# read, passed through load, update and store, and written back.
_LOOP = """
def loop(size, {arguments}):
    wide()
    {start}
    for i in range(size):
        {body}
    return {results}
"""

# Work is counted in elements where no part is shared, and a run ends where the high word of the index changes, which is
# a part of the key.
_RUNS = """
def kernel(addresses, offsets, numbers, scalars, tensor, begin, end, saturated):
    wide()
    while begin < end:
        {keys}
        stop = min(end, offsets[tensor + 1])
        while begin < stop:
            first = begin - offsets[tensor]
            index = numbers[tensor, 3] + first
            size = min(stop - begin, 2**30, 2**32 - (index & 0xFFFFFFFF))
            {folds}
            saturated[tensor] += loop(size, {passed})
            begin += size
        tensor += 1
"""

# Where a part is shared work is counted in blocks. A block's values go into buffers as they are measured, and from
# there through store once the largest is known.
_BLOCKS = """
def keep(size, {kept}):
    wide()
    {unset}
    for i in range(size):
        {stores}
    return {entries},


def kernel(addresses, offsets, numbers, scalars, tensor, begin, end, saturated):
    wide()
    buffers = empty((MEASURED, BLOCK), int32)
    buffer = buffers.ctypes.data
    while begin < end:
        {keys}
        stop = min(end, offsets[tensor + 1])
        length = numbers[tensor, 4]
        blocks = (length + BLOCK - 1) // BLOCK
        row = (begin - offsets[tensor]) // blocks
        place = (begin - offsets[tensor] - row * blocks) * BLOCK
        for block in range(begin - offsets[tensor], stop - offsets[tensor]):
            start, whole, done = row * length + place, min(BLOCK, length - place), 0
            {unknown}
            while done < whole:
                first = start + done
                index = numbers[tensor, 3] + first
                size = min(whole - done, 2**32 - (index & 0xFFFFFFFF))
                {folds}
                counted, {found} = loop(size, {passed})
                saturated[tensor] += counted
                {grown}
                done += size
            {entries}, = keep(whole, {handed})
            {written}
            place += BLOCK
            if place >= length:
                row, place = row + 1, 0
        begin = stop
        tensor += 1
    # Numba frees what is not used any more, and does not know that its address is
    return buffers[0, 0]
"""


def _wide(context: Any) -> Any:
    """Ask LLVM for vectors as wide as the CPU has, in the function that calls this; by itself it stays at 256 bits."""

    def code(_context, builder, _signature, _values):
        # llvmlite's own add() knows no attribute with a value
        set.add(builder.function.attributes, '"prefer-vector-width"="512"')
        return _context.get_dummy_value()

    return types.void(), code


def _accesses(number: type[np.number], scope: int, scopes: int) -> tuple[Any, Any]:
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


def _number(dtype: torch.dtype) -> type[np.number]:
    """The numpy type through which a part's memory is seen: a float's bits, but for float32."""
    if dtype.is_floating_point and dtype is not torch.float32:
        return _BITS[dtype.itemsize]
    return getattr(np, str(dtype).removeprefix("torch."))


def _lines(lines: Iterable[str], depth: int) -> str:
    return f"\n{' ' * depth}".join(lines) or "pass"


class _Source:
    """The text of a plan's loops, and the names it uses.

    ``pK`` is a part's address, ``eK`` the entry of a shared part for the block, ``vJ`` a format's value, ``mJ`` where
    what is measured of it is kept, ``lJ`` the largest in the block, ``cN`` a scalar, ``keyN`` and ``foldN`` the key of
    a pair of uses.
    """

    def __init__(self, plan: Plan) -> None:
        self.parts = [part for format in (*plan.formats, plan.grad) for part in format.parts]
        self.types = [_number(part.dtype) for part in self.parts]
        self.shared = [k for k, part in enumerate(self.parts) if part.shared]
        self.own = [k for k, part in enumerate(self.parts) if not part.shared]
        self.measured = [j for j, format in enumerate(plan.formats) if format.measure]
        self.pairs = range((max((use for use in plan.uses if use is not None), default=-1) + 2) // 2)
        # the rule's scalars are the arguments of its update that are nothing else; the gradient's factor comes first
        self.scalars = range(plan.rule.update.__code__.co_argcount - 1 - len(plan.moments))
        self.names: dict[str, Any] = {"empty": np.empty, "BLOCK": BLOCK, "int32": np.int32, "float32": np.float32}
        self.names |= {"MEASURED": len(self.measured), "wide": intrinsic(_wide)}
        scopes = len(self.parts) + len(self.measured)
        for k, number in enumerate(self.types):
            self.names[f"read{k}"], self.names[f"write{k}"] = _accesses(number, k, scopes)
        for k, j in enumerate(self.measured, start=len(self.parts)):
            self.names[f"recall{j}"], self.names[f"note{j}"] = _accesses(np.int32, k, scopes)
        self.names |= {"load_grad": bind(plan.grad.load), "update": bind(plan.rule.update)}
        self.names |= {f.__name__: bind(f) for f in (stream_key, keyed, random_bits, first_half, second_half)}
        #: parts that are written only once a block's largest is known
        self.later: list[int] = []
        self.body, self.stores = self._element(plan)

    def _element(self, plan: Plan) -> tuple[list[str], list[str]]:
        """What is done to an element, and after that to one that was measured."""
        loads, kept, later, first = [], [], [], 0
        random = [f"h{n} = random_bits(int32(at + i), key{n}, fold{n})" for n in self.pairs]
        for j, (format, use) in enumerate(zip(plan.formats, plan.uses, strict=True)):
            parts = range(first, first + len(format.parts))
            first = parts.stop
            self.names |= {f"load{j}": bind(format.load), f"store{j}": bind(format.store)}
            loads.append(f"v{j} = load{j}({', '.join(map(self._read, parts))})")
            value = f"v{j}"
            if use is not None:
                random.append(f"r{j} = {'second' if use % 2 else 'first'}_half(h{use // 2})")
                value += f", r{j}"
            if format.measure:
                self.names[f"measure{j}"] = bind(format.measure)
                kept += [f"q{j} = int32(measure{j}({value}))", f"note{j}(m{j}, i, q{j})", f"l{j} = max(l{j}, q{j})"]
                value = f"recall{j}(m{j}, i), l{j}"
            own = [k for k in parts if not self.parts[k].shared]
            results = [f"s{k}" if k in own else f"e{k}" for k in parts]
            stored = [f"{', '.join(results)}, = store{j}({value})"]
            stored += [f"write{k}(p{k}, i, {self._cast(k)}(s{k}))" for k in own]
            if format.measure:
                self.later += own
            (later if format.measure else kept).extend(stored)
        if plan.weight.saturates:
            self.names["saturates"] = bind(plan.weight.saturates)
            kept.append("saturated = int32(saturated + int32(saturates(v0)))")
        values = [f"v{j}" for j in range(len(plan.formats))]
        arguments = [values[0], "grad", *values[1:], *(f"c{k}" for k in self.scalars[1:])]
        step = [
            f"grad = load_grad({self._read(first)}) * c0",
            f"{', '.join(values)}, = update({', '.join(arguments)})",
        ]
        return [*loads, *step, *random, *kept], later

    def _cast(self, part: int) -> str:
        return "float32" if self.types[part] is np.float32 else "int32"

    def _read(self, part: int) -> str:
        return f"e{part}" if self.parts[part].shared else f"read{part}(p{part}, i)"

    def _address(self, part: int, start: str) -> str:
        """Where a run of a part begins."""
        return f"addresses[tensor, {part}] + {start} * {np.dtype(self.types[part]).itemsize}"

    def text(self) -> str:
        """The source of ``kernel`` and of what it calls."""
        largest = [f"l{j}" for j in self.measured]
        buffer = {j: f"buffer + {4 * BLOCK * k}" for k, j in enumerate(self.measured)}
        arguments = {f"p{k}": self._address(k, "first") for k in self.own}
        arguments |= {f"e{k}": f"read{k}(addresses[tensor, {k}], block)" for k in self.shared}
        arguments |= {f"m{j}": f"{buffer[j]} + 4 * done" for j in self.measured}
        arguments |= {f"c{k}": f"scalars[tensor, {k}]" for k in self.scalars}
        arguments |= {"at": "int32(index)"} | {name: name for n in self.pairs for name in (f"key{n}", f"fold{n}")}
        words = ", ".join(f"int32(numbers[tensor, {word})" for word in ("0]", "0] >> 32", "1]", "2]"))
        loop = _LOOP.format(
            arguments=", ".join(arguments),
            start=_lines(["saturated = int32(0)", *(f"{name} = int32(0)" for name in largest)], 4),
            body=_lines(self.body, 8),
            results=", ".join(["saturated", *largest]),
        )
        walk = {
            "keys": _lines((f"base{n}, bare{n} = stream_key({words}, {n})" for n in self.pairs), 8),
            "passed": ", ".join(arguments.values()),
        }
        high = "int32(index >> 32)"
        folds = [f"key{n}, fold{n} = int32(keyed(base{n}, {high})), int32(keyed(bare{n}, {high}))" for n in self.pairs]
        if not self.shared:
            return loop + _RUNS.format(folds=_lines(folds, 12), **walk)
        handed = {f"p{k}": self._address(k, "start") for k in self.later}
        handed |= {f"m{j}": buffer[j] for j in self.measured} | {name: name for name in largest}
        entries = self.shared
        return loop + _BLOCKS.format(
            kept=", ".join(handed),
            unset=_lines((f"e{k} = int32(0)" for k in entries), 4),
            stores=_lines(self.stores, 8),
            entries=", ".join(f"e{k}" for k in entries),
            unknown=_lines((f"{name} = int32(0)" for name in largest), 12),
            folds=_lines(folds, 16),
            found=", ".join(f"q{j}" for j in self.measured),
            grown=_lines((f"l{j} = max(l{j}, q{j})" for j in self.measured), 16),
            handed=", ".join(handed.values()),
            written=_lines((f"write{k}(addresses[tensor, {k}], block, {self._cast(k)}(e{k}))" for k in entries), 12),
            **walk,
        )


def compile_plan(plan: Plan) -> Callable[..., None]:
    """Return the kernel of ``plan`` over tables with a row for each tensor.

    It takes the addresses of the param, of its state's parts and of the gradient; where each tensor's work begins in
    the sum of all; seed, stream, step, index of the first element and length of a row; the scalars; then the first
    tensor, the work to do from there on, and where to add what saturated.
    """
    source = _Source(plan)
    names = source.names
    exec(source.text(), names)
    for name in ("loop", "keep"):
        if name in names:
            names[name] = _jit(names[name])
    table, row = numba.int64[:, ::1], numba.int64[::1]
    arguments = (table, row, table, numba.float32[:, ::1], numba.int64, numba.int64, numba.int64, row)
    return _jit((numba.int32 if source.shared else numba.void)(*arguments))(names["kernel"])
