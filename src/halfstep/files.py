"""Files that are whole at every moment, whatever stops the program."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def write_atomically(file: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` fill a temporary file beside ``file``, then put it in ``file``'s place in one step.

    A kill at any moment leaves either the old file or the new one. The temporary file has the same suffix, and is
    removed when ``write`` fails.
    """
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.stem}-", suffix=file.suffix)
    os.close(handle)
    temporary = Path(name)
    try:
        write(temporary)
        # mkstemp makes a private file; the result should be as readable as any other.
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        _sync(temporary)
        temporary.replace(file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    # The rename itself is on disk only when its folder is; Windows has no such handle, and no need.
    if os.name == "posix":
        _sync(file.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY if os.name == "posix" else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
