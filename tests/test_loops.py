"""The compiled loops, read as machine code: a hot loop that works on one number at a time is many times slower."""

import platform
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from llvmlite import binding as llvm

from halfstep import backends
from halfstep.backends.chunks import compile_squares
from halfstep.backends.loops import compile_plan
from halfstep.contracts import Plan
from halfstep.formats import GRADS
from harness import PLANS
from test_machines import python


class Machine(NamedTuple):
    """How the assembly of a kind of CPU shows what is done to many numbers at once, and what to one alone.

    ``vectors`` are its registers, the widest first: the loops over what is left of many take narrower ones.
    """

    packed: str
    alone: str
    vectors: tuple[str, ...]


MACHINES = {
    "x86_64": Machine(
        r"\tv?(div|mul|add|sub|sqrt)p[sd]\t.*%[yz]mm", r"\tv?(div|mul|add|sub|sqrt|cvt\w+2)s[sd]\t", ("%zmm", "%ymm")
    ),
    "aarch64": Machine(
        r"\tf(div|mul|add|sub|sqrt)\t(\.(4s|2d)\t)?v",
        r"\tf(div|mul|add|sub|sqrt|cvt)\t[sd]\d+,",
        (r"\bv\d+\.\d+[bhsd]",),
    ),
}
HERE = "aarch64" if platform.machine().lower() in ("arm64", "aarch64") else "x86_64"


def loops_of(plan: Plan) -> int:
    """How many loops are over elements: the update's, that of what waits for its store, and that of blocks' codes."""
    written = plan.moments if plan.rule.observes else plan.formats
    waits = any(format.random or format.parts[0].dtype is not torch.float32 for format in written)
    return 1 + waits + plan.in_blocks


def innermost(assembly: str) -> Iterator[str]:
    """The innermost loops: from a label to a jump back to it with no other label between."""
    pieces = re.split(r"^(\.?LBB\w+):", assembly, flags=re.MULTILINE)
    for label, block in zip(pieces[1::2], pieces[2::2], strict=True):
        if back := re.search(rf"\t(j\w+|b\.?\w*|cbn?z|tbn?z)\t.*{re.escape(label)}\b", block):
            yield block[: back.end()]


def assert_vectors(assembly: str, loops: int, machine: str = HERE) -> None:
    """Raise unless each of ``loops`` over elements does to many at once what it does to one."""
    packed, alone, vectors = MACHINES[machine]
    found = list(innermost(assembly))
    hot = [loop for loop in found if re.search(packed, loop)]
    assert hot, "no loop works on many floats at once"
    for loop in hot:
        one = re.search(alone, loop)
        assert not one, f"a loop over many floats takes some one by one: {one}"
    widest = next(vector for vector in vectors if re.search(vector, assembly))
    made = sum(bool(re.search(widest, loop)) for loop in found)
    assert made >= loops, f"{made} of {loops} loops are over vectors"


@pytest.mark.parametrize("name", PLANS)
def test_the_hot_loops_are_made_of_vectors(name: str) -> None:
    kernel = backends.kernel(PLANS[name], "cpu")
    (assembly,) = kernel._run_span.inspect_asm().values()  # type: ignore[attr-defined]
    assert_vectors(assembly, loops_of(PLANS[name]))


@pytest.mark.parametrize("dtype", GRADS)
def test_the_sum_of_squares_is_made_of_vectors(dtype: torch.dtype) -> None:
    (assembly,) = compile_squares(GRADS[dtype]).inspect_asm().values()  # type: ignore[attr-defined]
    assert_vectors(assembly, 1)


def test_a_loop_less_would_be_seen() -> None:
    plan = PLANS["adam-split8-float16-float16-block8"]
    (assembly,) = backends.kernel(plan, "cpu")._run_span.inspect_asm().values()  # type: ignore[attr-defined]
    widest = next(vector for vector in MACHINES[HERE].vectors if re.search(vector, assembly))
    made = [loop for loop in innermost(assembly) if re.search(widest, loop)]
    assert len(made) >= loops_of(plan) == 3
    for loop in made:
        with pytest.raises(AssertionError, match=f"{len(made) - 1} of {len(made)} loops are over vectors"):
            assert_vectors(assembly.replace(loop, ""), len(made))


def look(names: Sequence[str], machine: str) -> None:
    """Compile plans as this process's variables have it, print what is wrong with the code for ``machine``, and how
    many plans there were."""
    for name in names:
        (assembly,) = compile_plan(PLANS[name]).inspect_asm().values()  # type: ignore[attr-defined]
        if machine != HERE:
            (text,) = compile_plan(PLANS[name]).inspect_llvm().values()  # type: ignore[attr-defined]
            assembly = elsewhere(text)
        try:
            assert_vectors(assembly, loops_of(PLANS[name]), machine)
        except AssertionError as error:
            print(f"{name}: {error}")
        if "%zmm" in assembly:
            print(f"{name} takes AVX-512's registers")
    print(len(names))


def elsewhere(text: str) -> str:
    """Make 64-bit ARM's code of what Numba wrote before any vector, without what is this machine's in it.

    That is its name, and the atomic counts of Numba's own runtime.
    """
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    machine = llvm.Target.from_triple("aarch64-unknown-linux-gnu").create_target_machine(cpu="neoverse-n1", opt=3)
    text = re.sub(r"^target .*$|^declare i8 @llvm[.]x86.*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"= (tail )?call i8 @llvm[.]x86.*", "= add i8 0, 0", text)
    text = re.sub(r'"target-(cpu|features)"="[^"]*"', "", text)
    module = llvm.parse_assembly(text)
    module.triple, module.data_layout = "aarch64-unknown-linux-gnu", str(machine.target_data)
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    builder.getModulePassManager().run(module, builder)
    return machine.emit_assembly(module)


def looked(names: Iterable[str], machine: str, **environment: str) -> list[str]:
    """The lines that `look` prints in a process with these variables."""
    script = f"import sys\nsys.path[:0] = [{str(Path(__file__).parent)!r}]\nfrom test_loops import look\n"
    return python(f"{script}look({list(names)!r}, {machine!r})", **environment).splitlines()


def test_a_loop_that_is_not_would_be_seen() -> None:
    names = ("adam-split16-bfloat16-bfloat16-float32", "adam-split8-float16-float16-block8")
    # what is not a loop takes the widest registers all the same
    found = [line for line in looked(names, HERE, NUMBA_LOOP_VECTORIZE="0") if "AVX-512" not in line]
    assert found == [*(f"{name}: no loop works on many floats at once" for name in names), "2"]


@pytest.mark.slow
@pytest.mark.skipif(HERE != "x86_64", reason="AVX2 is x86's")
def test_the_hot_loops_are_made_of_vectors_for_avx2() -> None:
    features = "+avx2,+f16c,+fma,+bmi2"
    found = looked(PLANS, HERE, NUMBA_CPU_NAME="haswell", NUMBA_CPU_FEATURES=features)
    assert found == [str(len(PLANS))]


@pytest.mark.slow
@pytest.mark.skipif(HERE != "x86_64", reason="where NEON is at hand the tests above read its code")
def test_the_hot_loops_are_made_of_vectors_for_neon() -> None:
    found = looked(PLANS, "aarch64", NUMBA_LOOP_VECTORIZE="0", NUMBA_SLP_VECTORIZE="0")
    assert found == [str(len(PLANS))]
