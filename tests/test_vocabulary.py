"""What keeps one function one function under every compiler: the words it may use, and how it is bound."""

import ast
import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
import torch
from torch import Tensor

import halfstep.formats
import halfstep.rules
from halfstep import primitives
from halfstep.backends import eager, traced
from halfstep.formats.plain import load_bf16
from halfstep.primitives import VOCABULARY, bind, bits, select, sqrt, to_i32
from halfstep.rules.adam import adam

FILES = [
    path
    for package in (halfstep.rules, halfstep.formats)
    for path in sorted(Path(package.__path__[0]).glob("*.py"))
    if path.name != "__init__.py"
]
OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.LShift, ast.RShift, ast.BitAnd, ast.BitOr, ast.BitXor)
COMPARISONS = (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE)


def arithmetic(tree: ast.Module) -> list[ast.FunctionDef]:
    """The functions of a rule's or a format's file that compilers see: those whose arguments carry no types."""
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return [f for f in functions if all(a.annotation is None for a in f.args.args)]


def faults(function: ast.FunctionDef, known: set[str]) -> list[str]:
    """What in ``function`` compilers would not all read in the same way."""
    found = []
    wrapped = {
        id(node.args[0]) for node in ast.walk(function) if isinstance(node, ast.Call) and node_name(node) == "to_i32"
    }
    body = function.body[1:] if ast.get_docstring(function) else function.body
    for node in (n for statement in body for n in ast.walk(statement)):
        at = f"line {getattr(node, 'lineno', '?')}"
        if isinstance(node, ast.BinOp) and not isinstance(node.op, OPERATORS):
            found.append(f"{at}: the operator {type(node.op).__name__}")
        elif isinstance(node, ast.Compare) and not all(isinstance(op, COMPARISONS) for op in node.ops):
            found.append(f"{at}: a comparison by {type(node.ops[0]).__name__}")
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
            pass  # a negative number
        elif isinstance(
            node, ast.UnaryOp | ast.BoolOp | ast.If | ast.IfExp | ast.For | ast.While | ast.Subscript | ast.Attribute
        ):
            found.append(f"{at}: {type(node).__name__}")
        elif isinstance(node, ast.Call) and (node_name(node) not in known or node.keywords):
            found.append(f"{at}: a call of {node_name(node)}")
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.LShift) and id(node) not in wrapped:
            found.append(f"{at}: a shift to the left outside to_i32()")
        elif isinstance(node, ast.Constant) and isinstance(node.value, int) and not -(2**31) <= node.value < 2**31:
            found.append(f"{at}: {node.value:#x} does not fit 32 bits")
    return found


def node_name(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else "?"


def known_names(tree: ast.Module) -> set[str]:
    imported = {
        a.name
        for n in tree.body
        if isinstance(n, ast.ImportFrom) and str(n.module).startswith("halfstep.")
        for a in n.names
    }
    return set(VOCABULARY) | imported | {f.name for f in arithmetic(tree)}


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_rules_and_formats_keep_to_the_vocabulary(path: Path) -> None:
    tree = ast.parse(path.read_text())
    functions = arithmetic(tree)
    assert functions, "nothing to check"
    assert {f.name: faults(f, known_names(tree)) for f in functions} == {f.name: [] for f in functions}


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("return x / 2.0", "the operator Div"),
        ("return x ** 2", "the operator Pow"),
        ("return -x", "UnaryOp"),
        ("return x if x > 0 else 0", "IfExp"),
        ("return max(x, 0)", "a call of max"),
        ("return x.abs()", "Attribute"),
        ("return x << 16", "a shift to the left outside to_i32()"),
        ("return x & 0xFFFFFFFF", "does not fit 32 bits"),
        ("return x is None", "a comparison by Is"),
    ],
)
def test_the_check_finds_what_it_forbids(line: str, fault: str) -> None:
    tree = ast.parse(f"def f(x):\n    {line}\n")
    assert any(fault in found for found in faults(arithmetic(tree)[0], known_names(tree)))


def third(x):
    return x * 0.1 + 0.3


def wrapped(x):
    return to_i32(bits(x) + 0x7FFFFFFF) >> 1


FACTOR = 0.1
TABLE = (1, 2)


def scaled(x):
    return third(x) * FACTOR


def compiled(function: Callable[..., Any], *arguments: np.ndarray) -> Tensor:
    """What ``function``, compiled, makes of arrays, element by element."""
    formula = traced.bind(function)

    @numba.njit
    def unary(x):
        return np.array([formula(x[i]) for i in range(len(x))])

    @numba.njit
    def binary(x, y):
        return np.array([formula(x[i], y[i]) for i in range(len(x))])

    each: Any = unary if len(arguments) == 1 else binary
    return torch.from_numpy(each(*arguments))


def test_float_constants_are_float32_to_every_backend() -> None:
    x = torch.randn(10_000)
    for function in (third, scaled):
        got = compiled(function, x.numpy())
        assert got.dtype is torch.float32
        assert torch.equal(eager.bind(function)(x), got)
    assert torch.equal(eager.bind(third)(x), x * torch.tensor(0.1) + torch.tensor(0.3))


def test_integers_wrap_at_32_bits() -> None:
    x = torch.randn(1_000)
    got = compiled(wrapped, x.numpy())
    assert got.dtype is torch.int32
    assert torch.equal(eager.bind(wrapped)(x), got)
    assert ((x.view(torch.int32).long() + 0x7FFFFFFF) >= 2**31).any(), "without it this would not be tested"


@pytest.mark.parametrize("symbol", ["<", "<=", ">", ">=", "==", "!="])
def test_comparisons_with_nan_are_those_of_torch(symbol: str) -> None:
    function = comparing(symbol)
    x, y = torch.tensor([[a, b] for a in (math.nan, 1.0, -1.0, math.inf) for b in (math.nan, 1.0)]).t().contiguous()
    assert torch.equal(compiled(function, x.numpy(), y.numpy()), eager.bind(function)(x, y))


def comparing(symbol: str) -> Callable[..., Any]:
    """A function of two floats that is 1 where they compare so, and else 0."""
    scope: dict[str, Any] = {"select": select, "__name__": __name__}
    exec(f"def compare(x, y):\n    return select(x {symbol} y, 1, bits(x) & 0)", {"bits": bits, **scope}, scope)
    return scope["compare"]


def from_the_left(x):
    return (1 - x) * 3.0 + (0.5 + x)


def from_the_left_of_bits(x):
    b = bits(x) & 7
    return to_i32(to_i32(1 << b) + (5 - b) + (6 ^ b) + (3 | b) + (2 * b)) + (-9 >> b)


def test_numbers_may_stand_on_the_left() -> None:
    x = torch.randn(1_000)
    for function in (from_the_left, from_the_left_of_bits):
        assert torch.equal(compiled(function, x.numpy()), eager.bind(function)(x))


def halved(x):
    return bits(x) * 0.5


def mixed(x):
    return bits(x) + x


def xored(x):
    return x ^ x


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (halved, r"0.5 meets an integer: use to_f32"),
        (mixed, r"no add of i32 and float: use from_bits, to_f32, bits"),
        (xored, r"no xor of float and float"),
    ],
)
def test_the_two_kinds_of_value_do_not_mix(function: Callable[..., Any], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        compiled(function, np.ones(1, np.float32))


def test_bind_leaves_the_function_itself_alone() -> None:
    eager.bind(adam)
    assert adam.__globals__["sqrt"] is primitives.sqrt


def table(x):
    return x * TABLE[0]


def absent(x):
    return undefined(x)  # noqa: F821 # pyright: ignore[reportUndefinedVariable]


def test_bind_refuses_what_does_not_compile() -> None:
    with pytest.raises(
        TypeError, match=r"test_vocabulary\.table uses 'TABLE', a tuple: only words, functions and numbers"
    ):
        bind(table, eager.WORDS)
    with pytest.raises(TypeError, match=r"test_vocabulary\.absent uses 'undefined', which its module does not define"):
        bind(absent, eager.WORDS)
    factor = 2.0
    with pytest.raises(TypeError, match="must be a plain function without a closure"):
        bind(lambda x: x * factor, eager.WORDS)
    with pytest.raises(TypeError, match="must be a plain function"):
        bind(torch.add, eager.WORDS)


def test_every_word_is_documented_and_typed() -> None:
    for name, word in VOCABULARY.items():
        assert word.__doc__, name
        assert "return" in inspect.get_annotations(word), name


def rooted(x):
    return sqrt(x)


def test_a_square_root_is_correctly_rounded() -> None:
    x = torch.rand(200_000) * torch.randn(200_000).exp()
    # float64's root, rounded once more, is the correctly rounded float32 root (53 >= 2 * 24 + 2 bits)
    want = torch.from_numpy(np.sqrt(x.double().numpy()).astype(np.float32))
    assert torch.equal(eager.WORDS["sqrt"](x), want)
    assert torch.equal(compiled(rooted, x.numpy()), want)


def test_bfloat16_reads_as_torch_reads_it() -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32)
    value = every.to(torch.int16).view(torch.bfloat16)
    got = eager.bind(load_bf16)(every)
    assert torch.equal(got[~value.isnan()], value.float()[~value.isnan()])
    assert got[value.isnan()].isnan().all()
