"""What keeps one function one function under every compiler: the words it may use, and how it is bound."""

import ast
import inspect
from pathlib import Path

import numpy as np
import pytest
import torch

import halfstep.formats
import halfstep.rules
from halfstep import primitives
from halfstep.backends import eager, loops
from halfstep.formats.plain import load_bf16
from halfstep.primitives import VOCABULARY, bind, bits, to_i32
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


def wide(x):
    return bits(x) + 0x7FFFFFFF


def wrapped(x):
    return to_i32(bits(x) + 0x7FFFFFFF) >> 1


FACTOR = 0.1
TABLE = (1, 2)


def scaled(x):
    return third(x) * FACTOR


def test_float_constants_are_float32_to_every_backend() -> None:
    x = torch.randn(10_000)
    for function in (third, scaled):
        compiled = loops.bind(function)
        got = torch.tensor([compiled(value) for value in x.numpy()])
        assert compiled(np.float32(1)).__class__ is float, "Numba hands a float32 back as a Python float"
        assert torch.equal(eager.bind(function)(x), got)
    assert torch.equal(eager.bind(third)(x), x * torch.tensor(0.1) + torch.tensor(0.3))


def test_to_i32_wraps_where_integers_are_wider() -> None:
    x = torch.randn(1_000)
    assert torch.equal(
        eager.bind(wrapped)(x), torch.tensor([loops.bind(wrapped)(v) for v in x.numpy()], dtype=torch.int32)
    )
    assert any(loops.bind(wide)(v) > 2**31 for v in x.numpy()), "without it this would not be tested"


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


def test_a_square_root_is_correctly_rounded() -> None:
    x = torch.rand(200_000) * torch.randn(200_000).exp()
    # float64's root, rounded once more, is the correctly rounded float32 root (53 >= 2 * 24 + 2 bits)
    want = torch.from_numpy(np.sqrt(x.double().numpy()).astype(np.float32))
    assert torch.equal(eager.WORDS["sqrt"](x), want)
    assert torch.equal(torch.tensor([loops.WORDS["sqrt"](v) for v in x[:20_000].numpy()]), want[:20_000])


def test_bfloat16_reads_as_torch_reads_it() -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32)
    value = every.to(torch.int16).view(torch.bfloat16)
    got = eager.bind(load_bf16)(every)
    assert torch.equal(got[~value.isnan()], value.float()[~value.isnan()])
    assert got[value.isnan()].isnan().all()
