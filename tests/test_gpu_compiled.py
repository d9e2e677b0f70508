"""The Triton kernels, compiled without a GPU and read: how wide they access memory, how they round, what they spill."""

import itertools
import multiprocessing
import os
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("triton", reason="Triton compiles the kernels")

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget

import harness
from halfstep.backends import gpu, jitted, tiles, trees
from halfstep.contracts import BLOCK, CHUNK, Format, Part
from halfstep.formats import GRADS
from halfstep.rules import RULES
from halfstep.rules.adam import ADAM
from harness import GROUP

if jitted.INTERPRETED:
    pytest.skip("Triton's interpreter compiles nothing", allow_module_level=True)

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
#: of what observes a weight, one that is read in each way
OBSERVING = ("average-split16-bfloat16", "average-split8-float16", "average-master32-float16")
#: every rule with every pair of formats; gradients are of the param's dtype, others are read by the same instructions
PLANS = {
    name: plan
    for name, plan in harness.PLANS.items()
    if (name in OBSERVING if plan.rule.observes else plan.grad.parts[0].dtype is plan.weight.parts[0].dtype)
}


def _chosen() -> Iterator[str]:
    """Adam with every pair of formats: it has the most scalars and moments; of other rules every weight's format,
    with one moments' format after the other."""
    for name, group in itertools.groupby(PLANS, lambda name: PLANS[name].rule.name):
        found: dict[Format, list[str]] = {}
        for plan in group:
            found.setdefault(PLANS[plan].weight, []).append(plan)
        for number, plans in enumerate(found.values()):
            yield from plans if name == ADAM.name else [plans[number % len(plans)]]


CHOSEN = tuple(_chosen())
SQUARES = {f"squares-{str(dtype).removeprefix('torch.')}": grad for dtype, grad in GRADS.items()}
#: rules differ in the number of their scalars: the fewest, and the most
_COUNTS = [len(rule.scalars(GROUP, 1)) for rule in RULES.values()]
ADVANCES = {f"advance-{count}": count for count in (min(_COUNTS), max(_COUNTS))}
#: a multiprocessor's registers; and as many as a thread of AMD's may take where four wavefronts share a SIMD unit's
REGISTERS, AMD_REGISTERS = 65536, 128


class Code(NamedTuple):
    """What a kernel was compiled to: LLVM's instructions, PTX or AMD's assembly, and what is known of the rest."""

    target: GPUTarget
    threads: int
    instructions: str
    machine: str
    fusion: bool
    uses: dict[str, int]

    @property
    def nvidia(self) -> bool:
        return self.target.backend == "cuda"

    @property
    def registers(self) -> int:
        return self.uses["REG" if self.nvidia else "vgpr_count"]


class Memory(NamedTuple):
    """What a program reads and writes of its tensors, and of how many elements: in all, and with one instruction of
    Triton's; and how many in a round of the narrow path."""

    reads: Sequence[Part]
    writes: Sequence[Part]
    tile: int
    at_once: int
    narrow: int


def memory(name: str) -> Memory:
    """What the kernel called ``name`` moves."""
    if name in PLANS:
        plan = PLANS[name]
        kept = [part for format in plan.formats for part in format.parts]
        reads, writes = [*kept, *plan.grad.parts], kept
        if plan.rule.observes:  # it takes no gradient, which compilers see
            reads, writes = kept, [part for format in plan.moments for part in format.parts]
        return Memory(reads, writes, tiles.TILE, tiles.TILE, tiles.NARROW * BLOCK)
    if name in SQUARES:
        tile = trees.CHUNKS * CHUNK
        return Memory(SQUARES[name].parts, (), tile, trees.CHUNKS * trees.LANES, tile)
    return Memory((), (), 0, 0, 0)


def source(name: str) -> tuple[Any, tuple[str, ...], int, dict[str, int]]:
    """The kernel called ``name``, the types of its arguments, its warps and its constants."""
    if name in PLANS:
        return tiles.kernel_of(PLANS[name]), tiles.TYPES, tiles.warps(PLANS[name]), {}
    if name in SQUARES:
        return trees.squares_of(SQUARES[name]), trees.TYPES, 4, {}
    if name in ADVANCES:
        return gpu.halfstep_advance, gpu.ADVANCE_TYPES, 1, gpu.advance_constants(ADVANCES[name])
    return trees.halfstep_total, trees.TOTAL_TYPES, 4, trees.TOTAL_CONSTANTS


def compiled(name: str, target: str, kernel: Any = None) -> Code:
    """The code of the kernel called ``name``, or of another in its place."""
    own, types, warps, constants = source(name)
    made = jitted.compiled(kernel or own, types, TARGETS[target], warps, constants)
    if TARGETS[target].backend == "cuda":
        machine, uses = made.asm["ptx"], r"(REG|STACK|LOCAL):(\d+)"
        # written by the compiler itself into its cache
        (cubin,) = (path for name, path in made.metadata_group.items() if name.endswith(".cubin"))
        used = subprocess.run(
            [knobs.nvidia.cuobjdump.path, "-res-usage", cubin], capture_output=True, text=True, check=True
        ).stdout
    else:
        machine, uses = made.asm["amdgcn"], r"\.(\w+_spill_count|vgpr_count|private_segment_fixed_size):\s+(\d+)"
        used = machine
    found = {key: int(value) for key, value in re.findall(uses, used)}
    threads = made.metadata.num_warps * TARGETS[target].warp_size
    # what is not set in is names of files, of attributes and the like
    instructions = "\n".join(line for line in made.asm["llir"].splitlines() if line.startswith(" "))
    return Code(TARGETS[target], threads, instructions, machine, made.metadata.enable_fp_fusion, found)


_AMD = {"byte": 8, "short": 16, "dword": 32, "dwordx2": 64, "dwordx3": 96, "dwordx4": 128}


def accesses(code: Code) -> Counter[tuple[str, int]]:
    """How many accesses to global memory load or store so many bits. AMD's scalar loads, of tables, are not counted."""
    if code.nvidia:
        found = re.findall(r"\b(ld|st)\.global\S*?(?:\.v(\d))?\.[busf](\d+)\s", code.machine)
        return Counter(({"ld": "load", "st": "store"}[way], int(many or 1) * int(bits)) for way, many, bits in found)
    found = re.findall(r"\b(?:global|buffer|flat)_(load|store)_[us]?(byte|short|dword(?:x\d)?)", code.machine)
    return Counter((way, _AMD[kind]) for way, kind in found)


def line(pattern: str, text: str) -> str | None:
    """The first line that has ``pattern`` in it."""
    found = re.search(pattern, text)
    return found and text[text.rfind("\n", 0, found.start()) + 1 : text.find("\n", found.end())]


def assert_wide(name: str, code: Code) -> None:
    """Raise unless the wide path takes 16 bytes at a time; on AMD a thread may have no more than 8."""
    moved, found, expected = memory(name), accesses(code), Counter()
    if not moved.tile:
        return
    for way, parts in (("load", moved.reads), ("store", moved.writes)):
        for bits in (part.dtype.itemsize * 8 for part in parts if not part.shared):
            width = 128 if code.nvidia else min(128, moved.at_once // code.threads * bits)
            assert width >= 64, f"{width} bits are all that a thread has to {way}"
            expected[way, width] += moved.tile // code.threads * bits // width
    # 64 bits may be a table's word or a sum too
    widths = (128,) if code.nvidia else (64, 96, 128)
    for way, width in ((way, width) for way in ("load", "store") for width in widths):
        number, least = found[way, width], expected[way, width]
        assert number == least or (width == 64 and number > least), f"{number} accesses {way} {width} bits, not {least}"


def assert_narrow(name: str, code: Code) -> None:
    """Raise unless the narrow path takes element by element, and either path a block's shared byte once a block."""
    moved, found = memory(name), accesses(code)
    if not moved.tile:
        return
    each = moved.narrow // code.threads
    # a loop, or what LLVM made of it: some of its rounds, or all, one after the other
    unrolled, wrong = [rounds for rounds in (1, 2, 4) if rounds * moved.narrow <= moved.tile], []
    for rounds in unrolled:
        wrong.clear()
        for way, parts in (("load", moved.reads), ("store", moved.writes)):
            for bits in (8, 16, 32):
                own = [part.shared for part in parts if part.dtype.itemsize * 8 == bits]
                least = own.count(False) * each * rounds + own.count(True) * (1 + rounds)
                # a round has no more blocks than elements for a thread
                most = least + own.count(True) * (each - 1) * rounds
                # words of tables are loaded too
                most = 10**6 if bits == 32 and way == "load" else most
                if not least <= found[way, bits] <= most:
                    wrong.append(f"{found[way, bits]} accesses {way} {bits} bits, not {least} to {most}")
        if not wrong:
            return
    raise AssertionError("; ".join(wrong))


def assert_unfused(name: str, code: Code) -> None:
    """Raise where a product is fused with a sum, or LLVM may do so or take other liberties with floats."""
    if code.nvidia:
        fused = re.findall(r"\b(?:fma|mad)\.r[nzmp]\S*", code.machine)
        assert not fused, f"{len(fused)} {fused[0]}"
    else:
        # where a float16 is widened on its way into a sum or a product, one is with 1 or -0 and rounds nothing
        text = re.sub(r"\bv_fma_mix_f32 .*, (1\.0,|neg\(0\)).*", "", code.machine)
        fused = len(re.findall(r"\bv_(?:pk_)?(?:fma|mac|mad|fmac)\w*_(?:legacy_)?f\d+", text))
        # correctly rounded division and roots are made of them, five and two for each
        inside = 5 * text.count("v_div_fmas_f32") + 2 * text.count("v_sqrt_f32")
        assert fused <= inside, f"{fused} fused products and sums, of which division and roots have {inside}"
    liberties = line(r"\b(?:llvm\.fma|fmuladd|contract|fast|reassoc|arcp|afn)\b", code.instructions)
    assert not liberties, liberties
    assert not code.fusion, "compiled with fusion allowed"


def assert_subnormal(name: str, code: Code) -> None:
    """Raise where subnormal numbers are flushed to zero."""
    if code.nvidia:
        flushed = line(r"\.ftz\b", code.machine)
        assert not flushed, flushed
    else:
        modes = re.findall(r"\.amdhsa_float_denorm_mode_(\S+) (\d)", code.machine)
        assert modes == [("32", "3"), ("16_64", "3")], modes


def assert_unspilled(name: str, code: Code) -> None:
    """Raise where registers are kept in memory."""
    kept = ("STACK", "LOCAL") if code.nvidia else ("vgpr_spill_count", "private_segment_fixed_size")
    assert [code.uses[kind] for kind in kept] == [0, 0], code.uses
    # AMD's scalar registers are kept in the lanes of a vector register, of which one is enough
    assert code.uses.get("sgpr_spill_count", 0) <= 64, code.uses


def assert_few_registers(name: str, code: Code) -> None:
    """Raise where a multiprocessor has no room for two programs, or a SIMD unit of AMD's none for four wavefronts."""
    most = REGISTERS // (2 * code.threads) if code.nvidia else AMD_REGISTERS
    assert code.registers <= most, f"{code.registers} registers, not at most {most}"


def assert_bits(name: str, code: Code) -> None:
    """Raise where bfloat16 is more to the machine than 16 bits."""
    cast = line(r"\bbfloat\b", code.instructions) or line(r"[._]bf16", code.machine)
    assert not cast, cast


def assert_rounded(name: str, code: Code) -> None:
    """Raise where a quotient or a root is not the nearest number."""
    if code.nvidia:
        rough = line(r"\b(?:div\.(?:full|approx)|sqrt\.approx|rsqrt|rcp\.approx)", code.machine)
        exact = {"div": "div.rn.f32", "sqrt": "sqrt.rn.f32"}
    else:
        rough = line(r"!fpmath|llvm\.amdgcn\.(?:rcp|rsq|sqrt|fdiv)", code.instructions)
        exact = {"div": "v_div_fixup_f32", "sqrt": "v_sqrt_f32"}
    assert not rough, rough
    words = PLANS[name].rule.update.__code__.co_names if name in PLANS else ()
    for word in exact.keys() & set(words):
        assert exact[word] in code.machine, f"no {exact[word]}"


def assert_summed(name: str, code: Code) -> None:
    """Raise unless sums of squares are of float64."""
    words = {*(("mul",) if name in SQUARES else ()), *(("add",) if name in SQUARES or name == "total" else ())}
    for word in words:
        exact = f"{word}.rn.f64" if code.nvidia else f"v_{word}_f64"
        assert exact in code.machine, f"no {exact}"


CHECKS: dict[str, Callable[[str, Code], None]] = {
    check.__name__.removeprefix("assert_"): check
    for check in (
        *(assert_wide, assert_narrow, assert_unfused, assert_subnormal),
        *(assert_unspilled, assert_few_registers, assert_bits, assert_rounded, assert_summed),
    )
}


class Seen(NamedTuple):
    """What is to be said of a kernel for a target: its threads and their registers, and of each check what is wrong."""

    name: str
    target: str
    threads: int
    registers: int
    wrong: dict[str, str]


def look(name: str) -> list[Seen]:
    """Compile a kernel for every target and make every check."""
    seen = []
    for target in TARGETS:
        code, wrong = compiled(name, target), {}
        for kind, check in CHECKS.items():
            try:
                check(name, code)
            except AssertionError as error:
                wrong[kind] = str(error)
        seen.append(Seen(name, target, code.threads, code.registers, wrong))
    return seen


def _into(cache: Path) -> None:
    os.environ["TRITON_CACHE_DIR"] = str(cache)


@pytest.fixture(
    scope="module", params=[CHOSEN, pytest.param(tuple(PLANS), marks=pytest.mark.slow)], ids=["chosen", "all"]
)
def matrix(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Seen]:
    """What there is to see of these plans and of all other kernels, compiled anew by a process for each CPU."""
    # those that take longest first
    names = sorted(request.param, key=lambda name: not PLANS[name].in_blocks)
    names += [*SQUARES, *ADVANCES, "total"]
    spawn = multiprocessing.get_context("spawn")
    cache = tmp_path_factory.mktemp("triton")
    with ProcessPoolExecutor(os.cpu_count(), spawn, initializer=_into, initargs=(cache,)) as pool:
        seen = [seen for found in pool.map(look, names) for seen in found]
    assert {one.name for one in seen} == set(names)
    return seen


def largest(matrix: Sequence[Seen]) -> str:
    """The largest numbers of registers, by target and threads."""
    most: dict[tuple[str, int], Seen] = {}
    for seen in sorted(matrix, key=lambda seen: seen.registers):
        most[seen.target, seen.threads] = seen
    return ", ".join(
        f"{seen.registers} of {threads} threads on {target} ({seen.name})" for (target, threads), seen in most.items()
    )


@pytest.mark.timeout(900)
@pytest.mark.parametrize("check", CHECKS)
def test_every_kernel_is_as_it_should_be(check: str, matrix: list[Seen]) -> None:
    assert {seen.target for seen in matrix} == set(TARGETS)
    wrong = [f"{seen.name} on {seen.target}: {seen.wrong[check]}" for seen in matrix if check in seen.wrong]
    assert not wrong, "\n".join((f"{len(wrong)} of {len(matrix)}:", *wrong, f"most registers: {largest(matrix)}"))


def test_p29_a_function_without_a_source_is_named() -> None:
    names: dict[str, Any] = {"__name__": "typed_in"}
    exec("def double(value):\n    return value + value", names)
    with pytest.raises(TypeError, match=r"typed_in.double has no source: Triton compiles it from there, so def"):
        jitted.bind(names["double"])


PLAN = "adam-split8-float16-float16-block8"


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """Options of Triton's compiler that take the place of ours, in a fresh cache."""
    changed, compile = {}, triton.compile
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(
        triton, "compile", lambda source, target, options: compile(source, target=target, options=options | changed)
    )
    return changed


def changed(pattern: str, by: str) -> Any:
    """The kernel of `PLAN` with another text."""
    made = tiles._Source(PLANS[PLAN])
    text, count = re.subn(pattern, by, made.text())
    assert count, f"no {pattern} in\n{text}"
    return jitted.from_text(text, made.name, made.names)


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_narrow_accesses_would_be_seen(target: str, options: dict[str, Any]) -> None:
    kernel = changed(r"tl\.multiple_of\((.+?), WIDE\)", r"(\1)")
    with pytest.raises(AssertionError, match=r"^0 accesses load (64|128) bits, not \d"):
        assert_wide(PLAN, compiled(PLAN, target, kernel))


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_a_byte_an_element_would_be_seen(target: str, options: dict[str, Any]) -> None:
    kernel = changed(r"(tl\.load\(.*\+ \(block \+ k\)\[:, None\])", r"\1 + lane * 0")
    with pytest.raises(AssertionError, match=r"accesses load 8 bits, not \d"):
        assert_narrow(PLAN, compiled(PLAN, target, kernel))


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_fusion_would_be_seen(target: str, options: dict[str, Any]) -> None:
    options["enable_fp_fusion"] = True
    with pytest.raises(AssertionError, match=r"^\d+ (fma\.rn|fused)"):
        assert_unfused(PLAN, compiled(PLAN, target))


def test_spills_would_be_seen(options: dict[str, Any]) -> None:
    options["maxnreg"] = 64
    with pytest.raises(AssertionError, match=r"'STACK': [1-9]"):
        assert_unspilled(PLAN, compiled(PLAN, "sm_90"))


def test_other_instructions_would_be_seen(options: dict[str, Any]) -> None:
    code = compiled(PLAN, "sm_90")
    for check, good, bad in (
        (assert_subnormal, "add.rn.f32", "add.rn.ftz.f32"),
        (assert_rounded, "div.rn.f32", "div.full.f32"),
        (assert_rounded, "sqrt.rn.f32", "sqrt.approx.f32"),
        (assert_bits, "cvt.f32.f16", "cvt.f32.bf16"),
    ):
        check(PLAN, code)
        with pytest.raises(AssertionError, match=re.escape(bad)):
            check(PLAN, code._replace(machine=code.machine.replace(good, bad)))
    with pytest.raises(AssertionError, match="210 registers, not at most 128"):
        assert_few_registers(PLAN, code._replace(uses={"REG": 210}, threads=256))
