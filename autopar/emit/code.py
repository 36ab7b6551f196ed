"""The emitter's own form of Python, statements and suites of them, and the one place that renders it to text."""

from __future__ import annotations

import ast
import symtable
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

_WIDTH = 92  # columns of a statement, its indentation not counted
_INDENT = "    "


@dataclass(frozen=True)
class Statement:
    """`targets` = `value`; or `return value`; or the value alone, where it has no targets.

    A `minor` comment repeats what the docstring of the class says: it is left out where there is no room for it.
    ends: whether a paragraph ends here, after which comes a blank line.
    """

    value: str
    targets: tuple[str, ...] = ()
    returned: bool = False
    comment: str = ""
    minor: bool = False
    ends: bool = False

    def __post_init__(self) -> None:
        assert self.comment.isprintable(), "a comment is one line"

    @property
    def before(self) -> str:
        """The source in front of the value: "q, k = ", "return " or nothing."""
        return "return " if self.returned else f"{', '.join(self.targets)} = " if self.targets else ""

    @property
    def text(self) -> str:
        return self.before + self.value

    @property
    def fits(self) -> bool:
        return len(self.text) <= _WIDTH


@dataclass(frozen=True)
class Suite:
    """A line that opens something ("if self._first:", "LAYERS = ("), what is indented below it, and what closes it."""

    head: str
    body: Sequence[Code]
    end: str = ""


Code = Statement | Suite | str  # a str is a line as it is


def returning(statements: Sequence[Statement], names: Sequence[str], at_once: bool = True) -> list[Statement]:
    """The statements with a return of `names`; at_once: where the last one makes just these, it is the return."""
    *before, last = [*statements] or [Statement("")]
    if at_once and last.targets == tuple(names):
        return [*before, replace(last, targets=(), returned=True)]
    return [*statements, Statement(", ".join(names), returned=True)]


def function(
    name: str, parameters: Sequence[str], body: Sequence[Code], doc: Sequence[str] = (), comment: str = ""
) -> Suite:
    """A function or method. `doc`: the lines of its docstring; `comment` is about its parameters."""
    return Suite(f"def {name}({', '.join(parameters)}):{f'  # {comment}' if comment else ''}", [*doc, *body])


def class_of_module(name: str, doc: Sequence[str], methods: Sequence[Suite]) -> Suite:
    """A class of nn.Module with its methods, a blank line before each."""
    return Suite(f"class {name}(nn.Module):", [*doc, *(line for method in methods for line in ("", *_lines(method)))])


def table(head: str, rows: Sequence[str], end: str = ")") -> Suite:
    """A literal with a line, or lines, for each row."""
    return Suite(head, [line for row in rows for line in f"{row},".split("\n")], end)


# --------------------------------------------------------------------------------
# Text


def text_of(code: Sequence[Code]) -> str:
    """The source of some code, from the left margin on."""
    return "\n".join(line for item in code for line in _lines(item))


def length(statements: Sequence[Statement]) -> int:
    """The number of lines that the statements take, blank ones not counted."""
    return len([line for line in _rendered(statements) if line])


def globals_read(source: str) -> set[str]:
    """The names that the source reads and neither makes nor has as arguments: those of Python, and what is imported."""
    top = symtable.symtable(source, "model.py", "exec")
    assigned = {symbol.get_name() for symbol in top.get_symbols() if symbol.is_assigned() or symbol.is_namespace()}
    symbols = [symbol for scope in _scopes(top) for symbol in scope.get_symbols() if symbol.is_referenced()]
    return {symbol.get_name() for symbol in symbols if symbol.is_global()} - assigned


def _scopes(scope: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    yield scope
    for inner in scope.get_children():
        yield from _scopes(inner)


def _lines(code: Code) -> list[str]:
    if isinstance(code, Suite):
        body = [f"{_INDENT}{line}".rstrip() for line in _rendered(code.body)]
        return [*code.head.split("\n"), *body, *filter(None, [code.end])]
    return [code] if isinstance(code, str) else _rendered([code])


def _rendered(body: Sequence[Code]) -> list[str]:
    """The lines of a body: neighbours of one paragraph share a comment, and between paragraphs is a blank line."""
    lines: list[str] = []
    waiting: list[Statement] = []  # with one comment
    for item in body:
        if waiting and not (isinstance(item, Statement) and _shares(waiting[-1], item)):
            lines += _commented(waiting)
            lines += [""] if waiting[-1].ends else []
            waiting = []
        if isinstance(item, Statement):
            waiting.append(item)
        else:
            lines += _lines(item)
    return lines + (_commented(waiting) if waiting else [])


def _shares(before: Statement, after: Statement) -> bool:
    return after.comment != "" and after.comment == before.comment and not before.ends


def _commented(statements: Sequence[Statement]) -> list[str]:
    """Statements with their one comment: behind each, or before all of them where that is too long."""
    comment, minor = statements[0].comment, statements[0].minor
    behind = [f"{statement.text}  # {comment}" for statement in statements]
    if comment and max(map(len, behind)) <= _WIDTH:
        return behind
    lines = [line for statement in statements for line in _wrapped(statement)]
    if not comment or minor and len(statements) == 1:
        return lines
    names = ", ".join(name for statement in statements for name in statement.targets)
    return [f"# {names}: {comment}" if len(statements) > 1 else f"# {comment}", *lines]


def _wrapped(statement: Statement) -> list[str]:
    """A statement, or where it is too long and ends with a call, the call with its arguments on lines of their own."""
    if statement.fits:
        return [statement.text]
    value = statement.value
    call = ast.parse(value, mode="eval").body
    while isinstance(call, ast.BinOp):
        call = call.right
    called = value.encode()[: call.func.end_col_offset].decode() if isinstance(call, ast.Call) else "("
    if not isinstance(call, ast.Call) or "(" in called:
        return [statement.text]
    opening, inner = f"{statement.before}{called}(", value[len(called) + 1 : -1]
    if len(inner) + len(_INDENT) <= _WIDTH:
        return [opening, f"{_INDENT}{inner}", ")"]
    arguments = [ast.get_source_segment(value, argument) for argument in (*call.args, *call.keywords)]
    return [opening, *(f"{_INDENT}{argument}," for argument in arguments), ")"]
