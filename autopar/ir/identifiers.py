"""Names of the user's model as Python and a terminal read them: identifiers, indices, printable text."""

from __future__ import annotations

import keyword
import re
import unicodedata

COUNTS = re.compile(r"_count(_\d+)?")  # names that counts of the global batch have: `_count`, `_count_2`, …


def is_plain(name: str) -> bool:
    """Whether Python reads a name as it stands, also in a class: no keyword, nothing that it normalises or mangles."""
    return (
        name.isidentifier()
        and not keyword.iskeyword(name)
        and unicodedata.normalize("NFKC", name) == name
        and not name.startswith("__")
    )


def is_index(name: str) -> bool:
    """Whether a name is that of an item of a list: str of a whole number."""
    return re.fullmatch(r"0|[1-9][0-9]{0,8}", name) is not None


def identifier(name: str, otherwise: str) -> str:
    """A plain identifier like `name`, itself where it is one; `otherwise` is put before a digit, or in for nothing."""
    if is_plain(name):
        return name
    name = re.sub(r"^_{2,}", "_", re.sub(r"\W", "_", name, flags=re.ASCII))
    if keyword.iskeyword(name):
        return f"{name}_"
    return name if name.strip("_") and not name[0].isdigit() else f"{otherwise}{name}"


def printable(text: str) -> str:
    """Lines of text with an escape for each character that is not shown, or that changes what is."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)
