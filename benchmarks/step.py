"""Time a step beside the memory, torch and other libraries: python benchmarks/step.py, the whole of `halfstep bench`.

One run times one tensor of 33.6 million params, GPT-2 small's tensors and 20,000 tensors of 100, and then what a step
costs beside its time. It wants a machine of 24 GB and half an hour, most of that for the slowest other libraries
(`pip install 'halfstep[cli,peers]'`; where they are missing, the tables say so). ``--docs`` writes docs/performance.md,
its picture and its JSON; otherwise they go to --out.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace

from command import parsed, parser
from halfstep.bench import costs
from halfstep.bench.parity import Red
from halfstep.bench.run import run
from halfstep.bench.settings import SHAPES, Settings, Sizes
from step_report import write_report

#: why a target is not met, by its key in step_report.TARGETS; the page prints it where that is so
UNMET: dict[str, str] = {
    "compact bandwidth": (
        "what limits it is arithmetic. For 16 elements the compiled AVX-512 loops have 52, 97 and 32 instructions "
        "(bfloat16; float16 60, 116 and 33), the innermost loops of Numba's `inspect_asm()`. LLVM 16's `llvm-mca` "
        "takes 81 (94) cycles for them on Icelake: on two cores at 2.45 GHz 35 (40) ms."
    ),
    "exact fused": (
        "torch's step on float32 already runs at the memory's own speed (÷ in place at 1 and above) and moves 28 bytes "
        "to our 26, so at the same speed this would be 1.08 ×. Streams of two bytes reach 0.93 of it in bfloat16; in "
        "float16 the conversions are the limit, with 47 cycles for 16 elements (bfloat16: 35) by the same count."
    ),
    "compact fused": "as for its bandwidth: arithmetic, 35 (40) ms of it on two cores.",
    "teaching": (
        "as for float16's step: 7 × would be 18.5 ms here, less than the 20 ms that its 47 cycles are on two cores."
    ),
    "exact whole": (
        "28 bytes are moved here, 26 in the step and 2 in the check, and 48 there, so that at the same speed this "
        "would be 1.71 ×; float16's step is limited by its arithmetic, as above."
    ),
    "compact whole": "as for its bandwidth: arithmetic.",
}


def main(arguments: Sequence[str] | None = None, sizes: Sizes | None = None) -> None:
    """Measure everything, print the tables and write the page; ``sizes`` are smaller in the tests."""
    asked = parser(__doc__, "step", rounds=21)
    asked.add_argument("--params", type=int, default=2**25, help="elements of the one tensor (default 2**25)")
    options, out, command = parsed(asked, arguments)
    settings = Settings(params=options.params, shape=SHAPES, rounds=options.rounds, sizes=sizes or Sizes())

    def tell(text: str) -> None:
        print(text, flush=True)

    try:
        results = run(settings, tell)
    except Red as red:
        sys.exit(str(red))
    tell("import, first steps and temporary memory, in processes of their own")
    results = replace(results, costs=costs.measure(options.params))
    print(results.plain())
    write_report(out, results, UNMET, command)
    print(f"In {out}: performance.md, performance.json, performance.png")


if __name__ == "__main__":
    main()
