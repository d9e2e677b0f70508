"""The `halfstep` command."""

import signal
import sys
from collections.abc import Sequence
from importlib.util import find_spec

LIBRARIES = ("typer", "rich", "matplotlib")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command with ``arguments``, or with those of the process, and exit with its code.

    Raises:
        SystemExit: always: 0, or 2 for arguments that cannot be met, 1 for what failed on the way, 128 plus the
            signal's number for a run that was stopped.
    """
    missing = [library for library in LIBRARIES if find_spec(library) is None]
    if missing:
        sys.exit(_complain(f'needs {", ".join(missing)}; install with: pip install "halfstep[cli]"', 2))
    try:
        # Loaded only now, so that a missing library is told as above.
        from halfstep.cli.process import execute

        sys.exit(execute(arguments))
    except KeyboardInterrupt:
        # Before there was anything to save, or for the second time.
        sys.exit(128 + signal.SIGINT)


def _complain(message: str, code: int) -> int:
    print(f"halfstep: {message}", file=sys.stderr)
    return code
