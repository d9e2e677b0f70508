"""What the scripts that publish a page have in common: where it goes, and how they were called."""

import shlex
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path

from halfstep.cli.settings import claim

DOCS = Path(__file__).parent.parent / "docs"


def parser(doc: str | None, name: str, rounds: int) -> ArgumentParser:
    """Return a parser of --rounds, --out and --docs for ``benchmarks/NAME.py``."""
    made = ArgumentParser(prog=f"{name}.py", description=doc, formatter_class=RawDescriptionHelpFormatter)
    made.add_argument("--rounds", type=int, default=rounds, help=f"how often each is timed (default {rounds})")
    made.add_argument("--out", type=Path, default=Path("runs") / name)
    made.add_argument("--docs", action="store_true", help="write to docs/ rather than to --out")
    return made


def parsed(asked: ArgumentParser, arguments: Sequence[str] | None) -> tuple[Namespace, Path, str]:
    """Return the options, the folder that the page goes to, which is writable, and the command in words."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    options = asked.parse_args(given)
    out = DOCS if options.docs else options.out
    claim(out)
    return options, out, shlex.join(["python", f"benchmarks/{asked.prog}", *given])
