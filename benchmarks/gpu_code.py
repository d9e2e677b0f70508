"""What Triton makes of a step for GPUs, read without one: python benchmarks/gpu_code.py [--docs].

For each kind of GPU the kernels of the main pairs of formats are compiled, and their registers, spills, accesses and
instructions counted. ``--docs`` puts the table into docs/gpu.md; otherwise it is printed alone.
"""

import argparse
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from halfstep.backends import tiles
from halfstep.backends.jitted import compiled, from_text
from halfstep.bench.results import markdown
from halfstep.cli.files import write_text
from halfstep.contracts import Plan
from halfstep.formats import GRADS, MOMENTS, WEIGHTS
from halfstep.rules.adam import ADAM

PAGE = Path(__file__).parent.parent / "docs" / "gpu.md"
BEGIN, END = "<!-- table -->\n", "<!-- end -->\n"
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
PAIRS = [("split16", "float32"), ("split16", "block8"), ("split8", "block8")]
NVIDIA = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def plan(weights: str, moments: str, half: torch.dtype) -> Plan:
    kinds = tuple(MOMENTS[moments].of(moment) for moment in ADAM.moments)
    return Plan(ADAM, WEIGHTS[weights][half], kinds, GRADS[half], torch.device("cpu"))


def cuobjdump(option: str, cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run(
            [NVIDIA / "cuobjdump", option, file.name], capture_output=True, text=True, check=True
        ).stdout


def compile_for(plan: Plan, target: GPUTarget, wide_alone: bool = False) -> Any:
    """The kernel of a plan; ``wide_alone`` without the narrow path, so that what is counted runs for each tile."""
    kernel = tiles.kernel_of(plan)
    if wide_alone:
        source = tiles._Source(plan)
        kernel = from_text(source.text().partition("        else:\n")[0], source.name, source.names)
    return compiled(kernel, tiles.TYPES, target, tiles.warps(plan), {})


def instructions(plan: Plan, target: GPUTarget) -> float:
    """Instructions of a warp's lane for an element: all up to the last exit, rare branches among them."""
    code = cuobjdump("-sass", compile_for(plan, target, wide_alone=True).asm["cubin"])
    found = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z]\w*)", code, flags=re.MULTILINE)
    last = len(found) - found[::-1].index("EXIT")
    return last / (tiles.TILE / (32 * tiles.warps(plan)))


def row(weights: str, moments: str, half: torch.dtype, name: str) -> list[str]:
    """What one kernel is made of."""
    made, target = plan(weights, moments, half), TARGETS[name]
    asm = compile_for(made, target).asm
    if target.backend == "cuda":
        usage = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", cuobjdump("-res-usage", asm["cubin"])))
        registers, spilled = usage["REG"], int(usage["STACK"]) + int(usage["LOCAL"])
        wide = len(re.findall(r"(?:ld|st)\.global\S*\.v4\.b32", asm["ptx"]))
        count = f"{instructions(made, target):.0f}"
    else:
        text = asm["amdgcn"]
        registers = re.findall(r"\.vgpr_count: +(\d+)", text)[0]
        spilled = int(re.findall(r"\.vgpr_spill_count: +(\d+)", text)[0])
        wide, count = len(re.findall(r"global_(?:load|store)_dwordx4", text)), "-"
    dtype = str(half).removeprefix("torch.")
    return [f"{weights} + {moments}", dtype, name, registers, str(spilled), str(wide), count]


def main(arguments: Sequence[str] | None = None) -> None:
    """Compile, count and tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", action="store_true", help="put the table into docs/gpu.md")
    docs = parser.parse_args(arguments).docs
    head = ["pair", "params", "GPU", "registers", "spills", "accesses of 16 bytes", "instructions an element"]
    rows = [row(*pair, half, name) for pair in PAIRS for half in (torch.bfloat16, torch.float16) for name in TARGETS]
    table = markdown(head, rows)
    print(table)
    if docs:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        write_text(PAGE, f"{before}{BEGIN}\n{table}\n\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
