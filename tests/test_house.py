"""The house: imports run one way, files stay short, and nothing is imported late but compilers and extras."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import halfstep

ROOT = Path(halfstep.__file__).parent
FILES = {file.relative_to(ROOT).as_posix(): file for file in sorted(ROOT.rglob("*.py"))}

#: from the ground up; a file imports from its own storey and from those below
STOREYS = (
    ("primitives", "contracts"),
    ("rules", "formats"),
    ("backends",),
    ("options", "shards", "tensors", "conversions", "foreign", "checkpoint", "loading", "report"),
    ("schedule", "slots", "engine"),
    ("optimizers",),
    ("gradients", "norms", "scales", "floor", "scaler", "clipping", "teaching"),
    ("ema", "weights", "torch_state", "safe", "schedulers"),
    ("monitor",),
    ("integrations", "bench", "cli"),
)
HEIGHT = {name: height for height, names in enumerate(STOREYS) for name in names}
#: what the package exports may be used by the topmost storey alone
PACKAGE = len(STOREYS) - 1
#: a leaf that anyone may import, and which imports nothing of ours
LEAVES = ("products", "files")
#: what is imported late, so that it is loaded only where it is wanted
LAZY = {"numba", "llvmlite", "triton", "typer", "rich", "matplotlib", "accelerate", "transformers", "lightning"}
LAZY |= {"labml_nn", "deepspeed", "optimi", "bitsandbytes", "torchao"}


def place(module: str) -> str:
    """The storey's member that a module of ours belongs to; "" for the package itself."""
    return module.partition(".")[2].partition(".")[0]


def imports(tree: ast.AST, here: str) -> Iterator[str]:
    """Every module of ours that ``tree`` imports, also as ``from halfstep import module``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.partition(".")[0] == "halfstep")
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{here} imports relatively: write halfstep.{node.module}"
            if node.module and node.module.partition(".")[0] == "halfstep":
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}".removeprefix("halfstep.").replace(".", "/")
                    known = f"{inner}.py" in FILES or f"{inner}/__init__.py" in FILES
                    yield f"{node.module}.{alias.name}" if known else node.module


@pytest.mark.parametrize("name", FILES)
def test_imports_run_one_way(name: str) -> None:
    if name == "__init__.py":
        return
    own = name.partition("/")[0].removesuffix(".py")
    assert own in HEIGHT or own in LEAVES, f"{name}: say in STOREYS where it stands"
    for module in imports(ast.parse(FILES[name].read_text()), name):
        other = place(module)
        if own in LEAVES:
            raise AssertionError(f"{name} is a leaf and imports {module}")
        if other == own or other in LEAVES:
            continue
        height = PACKAGE if not other else HEIGHT[other]
        assert height <= HEIGHT[own], f"{name} imports {module}, which stands above it"
        assert other or HEIGHT[own] == PACKAGE


def test_imports_make_no_circle() -> None:
    def module(name: str) -> str:
        return "halfstep." + name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    known = {module(name): name for name in FILES if name != "__init__.py"}
    edges = {m: set(imports(ast.parse(FILES[n].read_text()), n)) & set(known) for m, n in known.items()}
    done: set[str] = set()
    while left := {m: targets - done for m, targets in edges.items() if m not in done}:
        free = {m for m, targets in left.items() if not targets - {m}}
        assert free, f"these import each other: {left}"
        done |= free


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_under_400_lines(name: str) -> None:
    lines = len(FILES[name].read_text().splitlines())
    assert lines <= 400, f"{name} has {lines} lines and wants splitting"


@pytest.mark.parametrize("name", FILES)
def test_nothing_is_imported_late_but_compilers_and_extras(name: str) -> None:
    tree = ast.parse(FILES[name].read_text())
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            for node in ast.walk(function):
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                for late in names:
                    own = name.startswith("cli/") and late.startswith("halfstep.cli")
                    assert own or late.partition(".")[0] in LAZY, f"{name} imports {late} inside a function"


def test_the_public_names() -> None:
    names = {
        "Adam",
        "AdamFP16",
        "EMA",
        "AdamW",
        "GradScaler",
        "GradScalerFP16",
        "Lion",
        "SGD",
        "WeightDecay",
        "clip_grad_norm_",
        "float32_state_dict",
        "load_safetensors",
        "load_weights",
        "save_safetensors",
        "torch_state_dict",
    }
    assert names <= set(halfstep.__all__)
    assert all(getattr(halfstep, name).__doc__ for name in halfstep.__all__)
