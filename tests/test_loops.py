"""The compiled loops, read as machine code: a hot loop that works on one number at a time is many times slower."""

import platform
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from halfstep import backends
from halfstep.backends import chunks
from halfstep.formats import GRADS
from halfstep.rules import RULES
from harness import plans
from test_machines import python


class Machine(NamedTuple):
    """How the assembly of a kind of CPU shows what is done to many numbers at once, and what to one alone."""

    packed: str
    alone: str
    vector: str


MACHINES = {
    "x86_64": Machine(
        r"\tv?(div|mul|add|sub|sqrt)p[sd]\t.*%[yz]mm", r"\tv?(div|mul|add|sub|sqrt|cvt\w+2)s[sd]\t", r"%[yz]mm"
    ),
    "aarch64": Machine(
        r"\tf(div|mul|add|sub|sqrt)\t(\.(4s|2d)\t)?v", r"\tf(div|mul|add|sub|sqrt|cvt)\t[sd]\d+,", r"\bv\d+\.\d+[bhsd]"
    ),
}
HERE = MACHINES["aarch64" if platform.machine().lower() in ("arm64", "aarch64") else "x86_64"]
PLANS = {f"{rule}-{name}": plan for rule, made in RULES.items() for name, plan in plans(made).items()}


def innermost(assembly: str) -> Iterator[str]:
    """The innermost loops: from a label to a jump back to it with no other label between."""
    pieces = re.split(r"^(\.?LBB\w+):", assembly, flags=re.MULTILINE)
    for label, block in zip(pieces[1::2], pieces[2::2], strict=True):
        if back := re.search(rf"\t(j\w+|b\.?\w*|cbn?z|tbn?z)\t.*{re.escape(label)}\b", block):
            yield block[: back.end()]


def assert_vectors(assembly: str, in_blocks: bool, machine: Machine = HERE) -> None:
    """Raise unless what is done to each element is done to many at once."""
    found = list(innermost(assembly))
    hot = [loop for loop in found if re.search(machine.packed, loop)]
    assert hot, "no loop works on many floats at once"
    for loop in hot:
        alone = re.search(machine.alone, loop)
        assert not alone, f"a loop over many floats takes some one by one: {alone}"
    # what is measured goes through a second loop once the block's largest is known
    later = [loop for loop in found if re.search(machine.vector, loop) and loop not in hot]
    assert bool(later) >= in_blocks, "no loop stores many codes at once"


@pytest.mark.parametrize("name", PLANS)
def test_the_hot_loops_are_made_of_vectors(name: str) -> None:
    kernel = backends.kernel(PLANS[name], "cpu")
    (assembly,) = kernel._run_span.inspect_asm().values()  # type: ignore[attr-defined]
    assert_vectors(assembly, PLANS[name].in_blocks)


@pytest.mark.parametrize("dtype", GRADS)
def test_the_sum_of_squares_is_made_of_vectors(dtype: torch.dtype) -> None:
    (assembly,) = chunks.compile_squares(GRADS[dtype]).inspect_asm().values()  # type: ignore[attr-defined]
    assert_vectors(assembly, in_blocks=False)


ALONE = """
import sys
sys.path[:0] = {path!r}
from test_loops import PLANS, assert_vectors
from halfstep.backends import loops
for name in ("adam-split16-bfloat16-bfloat16-float32", "adam-split8-float16-float16-block8"):
    (assembly,) = loops.compile_plan(PLANS[name]).inspect_asm().values()
    try:
        assert_vectors(assembly, PLANS[name].in_blocks)
    except AssertionError as error:
        print(error)
"""


def test_a_loop_that_is_not_would_be_seen() -> None:
    script = ALONE.format(path=[str(Path(__file__).parent)])
    assert python(script, NUMBA_LOOP_VECTORIZE="0").count("no loop works on many floats at once") == 2


COMPILE = """
import numba, sys
sys.path[:0] = {path!r}
from test_loops import PLANS, assert_vectors
from halfstep.backends import loops
for name, plan in PLANS.items():
    (assembly,) = loops.compile_plan(plan).inspect_asm().values()
    assert "zmm" not in assembly
    try:
        assert_vectors(assembly, plan.in_blocks)
    except AssertionError as error:
        sys.exit(f"{{name}}: {{error}}")
print(len(PLANS))
"""


@pytest.mark.slow
@pytest.mark.skipif(HERE is not MACHINES["x86_64"], reason="AVX2 is x86's")
def test_the_hot_loops_are_made_of_vectors_for_avx2() -> None:
    script = COMPILE.format(path=[str(Path(__file__).parent)])
    made = python(script, NUMBA_CPU_NAME="haswell", NUMBA_CPU_FEATURES="+avx2,+f16c,+fma,+bmi2")
    assert int(made) == len(PLANS)


ELSEWHERE = """
import re, sys
sys.path[:0] = {path!r}
from llvmlite import binding as llvm
from test_loops import MACHINES, PLANS, assert_vectors
from halfstep.backends import loops

llvm.initialize_all_targets()
llvm.initialize_all_asmprinters()
machine = llvm.Target.from_triple("aarch64-unknown-linux-gnu").create_target_machine(cpu="neoverse-n1", opt=3)
for name, plan in PLANS.items():
    # what Numba wrote before any vector, without what is this machine's: its name, and the atoms of Numba's own runtime
    (text,) = loops.compile_plan(plan).inspect_llvm().values()
    text = re.sub(r"^target .*$|^declare i8 @llvm[.]x86.*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"= (tail )?call i8 @llvm[.]x86.*", "= add i8 0, 0", text)
    text = re.sub(r'"target-(cpu|features)"="[^"]*"', "", text)
    module = llvm.parse_assembly(text)
    module.triple, module.data_layout = "aarch64-unknown-linux-gnu", str(machine.target_data)
    tuning = llvm.create_pipeline_tuning_options(speed_level=3)
    builder = llvm.create_pass_builder(machine, tuning)
    builder.getModulePassManager().run(module, builder)
    try:
        assert_vectors(machine.emit_assembly(module), plan.in_blocks, MACHINES["aarch64"])
    except AssertionError as error:
        sys.exit(f"{{name}}: {{error}}")
print(len(PLANS))
"""


@pytest.mark.slow
@pytest.mark.skipif(HERE is not MACHINES["x86_64"], reason="where NEON is at hand the tests above read its code")
def test_the_hot_loops_are_made_of_vectors_for_neon() -> None:
    script = ELSEWHERE.format(path=[str(Path(__file__).parent)])
    assert int(python(script, NUMBA_LOOP_VECTORIZE="0", NUMBA_SLP_VECTORIZE="0")) == len(PLANS)
