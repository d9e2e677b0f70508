"""Text and JSON files, whole at every moment."""

import json
import math
from pathlib import Path
from typing import Any

from halfstep.files import write_atomically


def to_json(value: Any, indent: int | None = None) -> str:
    """Return ``value`` as strict JSON: what is not finite becomes null."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def write_json(file: Path, value: Any) -> None:
    """Write ``value`` to ``file`` as strict JSON, atomically."""
    write_text(file, to_json(value, indent=2) + "\n")


def write_text(file: Path, text: str) -> None:
    """Write ``text`` to ``file`` in UTF-8, atomically."""
    write_atomically(file, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
