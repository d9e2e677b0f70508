"""Time a step beside the memory, torch and other libraries: python benchmarks/step.py, the whole of `halfstep bench`.

One run times one tensor of 33.6 million params, GPT-2 small's tensors and 20,000 tensors of 100, and then what a step
costs beside its time. It takes about 20 GB of memory and half an hour, most of it the slowest of the other libraries
(`pip install 'halfstep[cli,peers]'`; where they are missing, the tables say so). ``--docs`` writes docs/performance.md,
its picture and its JSON; otherwise they go to --out.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from halfstep.bench import costs
from halfstep.bench.parity import Red
from halfstep.bench.run import run
from halfstep.bench.settings import SHAPES, Settings, Sizes
from halfstep.cli.settings import claim
from step_report import write_report

DOCS = Path(__file__).parent.parent / "docs"

#: why a target is not met, by its key in step_report.TARGETS; the page prints it where that is so
UNMET: dict[str, str] = {
    "compact bandwidth": (
        "what limits it is arithmetic. For 16 elements the compiled AVX-512 loops have 52, 97 and 32 instructions "
        "(bfloat16; float16 60, 116 and 33), which LLVM 16's `llvm-mca` takes 81 (94) cycles for on Icelake; 82 were "
        "measured where a tensor stays in the cache. On two cores at 2.45 GHz that alone is 35 (40) ms. The random "
        "bits' two hashes take about 20 of the cycles: without them bfloat16 took 87 where it took 107."
    ),
    "exact fused": (
        "torch's step on float32 already runs at the memory's own speed (÷ in place at 1 and above) and moves 28 bytes "
        "to our 26, so at the same speed this would be 1.08 ×. Streams of two bytes reach 0.93 of it in bfloat16; in "
        "float16 the conversions are the limit, with 47 cycles for 16 elements (bfloat16: 35) by the same count."
    ),
    "compact fused": "as for its bandwidth: arithmetic, 35 (40) ms of it on two cores.",
    "teaching": (
        "as for float16's step: 7 × would be 18.5 ms here, less than its conversions and its root and quotient take."
    ),
    "exact whole": (
        "28 bytes are moved here, 26 in the step and 2 in the check, and 48 there, so that at the same speed this "
        "would be 1.71 ×; float16's step is limited by its arithmetic, as above."
    ),
    "compact whole": "as for its bandwidth: arithmetic.",
}


def main(arguments: Sequence[str] | None = None, sizes: Sizes | None = None) -> None:
    """Measure everything, print the tables and write the page; ``sizes`` are smaller in the tests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=int, default=2**25, help="elements of the one tensor (default 2**25)")
    parser.add_argument("--rounds", type=int, default=21, help="how often each is timed (default 21)")
    parser.add_argument("--out", type=Path, default=Path("runs/step"))
    parser.add_argument("--docs", action="store_true", help="write to docs/ rather than to --out")
    given = sys.argv[1:] if arguments is None else list(arguments)
    options = parser.parse_args(given)
    out = DOCS if options.docs else options.out
    claim(out)
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
    write_report(out, results, UNMET, shlex.join(["python", "benchmarks/step.py", *given]))
    print(f"In {out}: performance.md, performance.json, performance.png")


if __name__ == "__main__":
    main()
