"""Texts of functions, filled in: plans differ in the number of their parts, and compilers want each written out."""

import re
from collections.abc import Iterable
from textwrap import indent


def filled(text: str, **lines: Iterable[str]) -> str:
    """Put lines where a line of ``text`` is their name in braces, as deep as it stands."""
    for name, found in lines.items():
        inside = "\n".join(found) or "pass"
        text = re.sub(rf"^( *){{{name}}}$", lambda at, inside=inside: indent(inside, at[1]), text, flags=re.MULTILINE)
    return text
