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
UNMET: dict[str, str] = {}


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
