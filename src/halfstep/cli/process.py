"""The command as a process: its streams, its warnings, its errors in one line and its exit code."""

import os
import sys
import warnings
from collections.abc import Sequence
from io import TextIOWrapper

from halfstep.cli.app import app
from halfstep.cli.errors import InputError


def execute(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code; what a person did wrong is told in one line on stderr."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            # A sample may hold characters that the terminal's encoding lacks.
            stream.reconfigure(errors="replace")
    warnings.showwarning = _show_warning
    try:
        return (
            app(args=None if arguments is None else list(arguments), prog_name="halfstep", standalone_mode=False) or 0
        )
    except InputError as error:
        return _complain(str(error), 2)
    except BrokenPipeError:
        # Whoever read the output has gone; what Python still holds of it must not raise again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        return _complain(f"{error.filename or 'a file'}: {error.strerror or error}", 1)
    except Exception as error:
        # typer's own errors, of a class that it does not export.
        if not hasattr(error, "format_message"):
            raise
        return _complain(error.format_message(), error.exit_code)  # pyright: ignore[reportAttributeAccessIssue]


def _complain(message: str, code: int) -> int:
    print("halfstep:", " ".join(message.split()), file=sys.stderr)
    return code


def _show_warning(message: Warning | str, *_: object) -> None:
    _complain(f"warning: {message}", 0)
