"""Lines of a method with their comments, no wider than a page."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH = 92  # of a line of a method without its indentation


@dataclass(frozen=True)
class Line:
    """One line: what it says, the name it gives a value, its comment; `ends` a paragraph.

    A `minor` comment repeats what the class's table says: it is left out where there is no room.
    """

    text: str
    name: str = ""
    comment: str = ""
    minor: bool = False
    ends: bool = False

    def __post_init__(self) -> None:
        assert self.comment.isprintable(), "a comment is one line"


def rendered(lines: Sequence[Line]) -> list[str]:
    """Lines with their comments: behind them, or before where that is too long, once for several of the same."""
    texts: list[str] = []
    place = 0
    while place < len(lines):
        same = _same_comment(lines[place:])
        comment = lines[place].comment
        behind = [f"{line.text}  # {comment}" if comment else line.text for line in same]
        if not comment or max(map(len, behind)) <= WIDTH:
            texts += [part for text in behind for part in wrapped(text)]
        else:
            names = f"{', '.join(line.name for line in same)}: " if len(same) > 1 else ""
            texts += [] if lines[place].minor and not names else [f"# {names}{comment}"]
            texts += [part for line in same for part in wrapped(line.text)]
        place += len(same)
        if lines[place - 1].ends and place < len(lines):
            texts.append("")
    return texts


def _same_comment(lines: Sequence[Line]) -> list[Line]:
    """The first line, and those after it that have its comment."""
    same = [lines[0]]
    for before, line in zip(lines, lines[1:], strict=False):
        if not line.comment or line.comment != before.comment or before.ends:
            break
        same.append(line)
    return same


def wrapped(text: str) -> list[str]:
    """A line, or where it is too long and a call, the call with its arguments on a line of their own."""
    opening = text.find("(")
    if len(text) <= WIDTH or opening < 0 or "  # " in text or not text.endswith(")"):
        return [text]
    if not re.match(r"\w", text[opening - 1]):  # no call
        return [text]
    if re.search(r'"[^"]*[()\[\]{},#][^"]*"', text):  # not to cut a string
        return [text]
    depth = 0
    commas = []
    for place, character in enumerate(text[opening:], opening):
        depth += (character in "([{") - (character in ")]}")
        commas += [place] if depth == 1 and text[place : place + 2] == ", " else []
        if depth == 0 and place < len(text) - 1:
            return [text]
    inner = text[opening + 1 : -1]
    if len(inner) + 4 <= WIDTH:
        return [text[: opening + 1], f"    {inner}", ")"]
    cuts = [opening - 1, *commas, len(text) - 1]
    given = [text[start + 2 : stop] for start, stop in zip(cuts, cuts[1:], strict=False)]
    return [text[: opening + 1], *(f"    {argument}," for argument in given), ")"]
