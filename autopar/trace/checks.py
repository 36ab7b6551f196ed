"""Checks of values that only raise, `if bad.any(): raise …` and `assert ok.all()`: left out of the trace.

A trace holds no branch on values, and a check that does not raise computes nothing. The function that holds one is
compiled again from its source with `False and …` or `True or …` before the test, while the model is traced.
"""

from __future__ import annotations

import ast
import gc
import linecache
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType, FunctionType, TracebackType
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ..errors import TraceError
from .source import is_the_models

_BUILTINS = ("abs", "all", "any", "bool", "float", "int", "isinstance", "len", "max", "min", "sum", "type")
Position = tuple[int, int, int, int]  # first line, last line, first column, last column, as code objects have them
_Edits = dict[Position, bool]  # where a test is → what it is taken to be


class Checks:
    """The checks that are left out so far: `places`, in order. `restore` gives every function its own code back."""

    def __init__(self) -> None:
        self.places: dict[str, None] = {}
        self._edits: dict[str, _Edits] = defaultdict(dict)  # by file
        self._codes: dict[FunctionType, CodeType] = {}

    def leave_out(self, error: BaseException) -> bool:
        """Whether a trace failed in the test of a check that only raises, which is left out then.

        Not where a caller would catch what the check raises.
        """
        calls = list(_model_calls((error.__cause__ or error).__traceback__))
        if any(_caught(_tree(code.co_filename), at) for code, at in calls):
            return False
        found = ((code, check) for code, at in reversed(calls) if (check := _check(_tree(code.co_filename), at)))
        code, check = next(found, (None, None))
        if code is None or check is None or check[0] in self._edits[code.co_filename]:
            return False
        test, value = check
        self._edits[code.co_filename][test] = value
        if not self._compile_again(code):
            del self._edits[code.co_filename][test]
            return False
        self.places[f"{code.co_filename}:{test[0]}"] = None
        return True

    def restore(self) -> None:
        """A model may be traced once more."""
        for function, code in self._codes.items():
            function.__code__ = code
        self._codes.clear()
        self._edits.clear()

    def _compile_again(self, code: CodeType) -> bool:
        """Whether the functions with this code could be given code without the checks."""
        functions = [f for f in gc.get_referrers(code) if isinstance(f, FunctionType) and f.__code__ is code]
        originals = {self._codes.get(function, code) for function in functions}
        plain, without = (_compiled(code, edits) for edits in ({}, self._edits[code.co_filename]))
        # The file may not be what runs: it was edited since, or an import hook has rewritten it.
        if without is None or any(plain is None or plain.co_code != o.co_code for o in originals):
            return False
        for function in functions:
            self._codes.setdefault(function, code)
            function.__code__ = without
        return bool(functions)


@contextmanager
def branches_refused() -> Iterator[None]:
    """Within: a branch on values ends a trace, an `assert` too, which torch would take for true.

    Raises TraceError at the end where code of the model has caught that and gone on, with one of the branches.
    """
    own, caught = ShapeEnv._is_python_assert, list[str]()  # no public name for what is asked before torch raises

    def refused(env: ShapeEnv) -> bool:
        caught.extend(_handlers(sys._getframe(1)))
        return False

    ShapeEnv._is_python_assert = refused  # type: ignore[method-assign, assignment]
    try:
        yield
        if caught:
            raise TraceError(f"a branch on tensor values at {caught[0]} is caught there: use torch.where")
    finally:
        ShapeEnv._is_python_assert = own  # type: ignore[method-assign]


def _handlers(frame: FrameType | None) -> Iterator[str]:
    """The lines of the model that lead to a frame, of those in whose `try` or `with` an exception may end."""
    while frame is not None:
        file = frame.f_code.co_filename
        if is_the_models(file) and _is_guarded(file, frame.f_lineno):
            yield f"{file}:{frame.f_lineno}"
        frame = frame.f_back


def _model_calls(traceback: TracebackType | None) -> Iterator[tuple[CodeType, Position]]:
    """The model's own functions on the way to an error, and where each was."""
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if is_the_models(code.co_filename):
            first, last, start, end = list(code.co_positions())[traceback.tb_lasti // 2]
            yield code, (first or 0, last or 0, start or 0, end or 0)
        traceback = traceback.tb_next


def _tree(file: str) -> ast.Module:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ast.Module([], [])


def _check(tree: ast.Module, at: Position) -> tuple[Position, bool] | None:
    """Where the test is that `at` is in, and what it is where nothing is raised; None where there is no such check."""
    for node in ast.walk(tree):
        # The jump after a test has the position of the whole statement.
        if isinstance(node, ast.If | ast.Assert) and (_holds(node.test, at) or _position(node) == at):
            if not _only_computes(node.test, tree):
                return None  # without the test, what it names or sets would be missing
            if isinstance(node, ast.Assert):
                return _position(node.test), True
            if _only_raises(node.body):
                return _position(node.test), False
            if _only_raises(node.orelse):
                return _position(node.test), True
    return None


def _only_computes(node: ast.AST, tree: ast.Module, inside: tuple[str, ...] = ()) -> bool:
    """Whether a test, or a function that it calls, leaves nothing behind. inside: the functions that call it."""
    for part in ast.walk(node):
        if isinstance(part, ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom | ast.Global | ast.Nonlocal):
            return False
        if isinstance(part, ast.Attribute | ast.Subscript) and not isinstance(part.ctx, ast.Load):
            return False
        if isinstance(part, ast.Call) and not _call_computes(part, tree, inside):
            return False
    return True


def _call_computes(call: ast.Call, tree: ast.Module, inside: tuple[str, ...]) -> bool:
    """Of builtins, torch, math and tensors' methods, but for those in place, or a function of the same file."""
    owner, _, name = ast.unparse(call.func).rpartition(".")
    if owner in ("", "self"):
        functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == name]
        known = not owner and name in _BUILTINS
        computes = all(_only_computes(function, tree, (*inside, name)) for function in functions)
        return known or bool(functions) and name not in inside and computes
    if name.endswith("_"):
        return False
    return owner.partition(".")[0] in ("torch", "math", "F") or hasattr(torch.Tensor, name)


def _only_raises(body: list[ast.stmt]) -> bool:
    return bool(body) and isinstance(body[-1], ast.Raise) and all(_is_plain(statement) for statement in body[:-1])


def _is_plain(statement: ast.stmt) -> bool:
    """Whether a statement leaves nothing behind once the next one has raised."""
    names = isinstance(statement, ast.Assign) and all(isinstance(t, ast.Name) for t in statement.targets)
    return names or isinstance(statement, ast.Expr)


def may_be_caught(stack_trace: str | None) -> bool:
    """Whether what is raised where an op was recorded might be caught on a line of the model that led there."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', stack_trace or "")
    return any(is_the_models(file) and _is_guarded(file, int(line)) for file, line in frames)


def _is_guarded(file: str, line: int) -> bool:
    return any(s.lineno <= line <= (s.end_lineno or line) for s in _guarded(_tree(file)))


def _caught(tree: ast.Module, at: Position) -> bool:
    return any(_holds(statement, at) for statement in _guarded(tree))


def _guarded(tree: ast.Module) -> Iterator[ast.stmt]:
    """The statements in a `try` that may go on after an exception, or in a `with` that might."""
    for node in ast.walk(tree):
        is_try = isinstance(node, ast.Try | ast.TryStar) and _goes_on(node)
        if is_try or isinstance(node, ast.With) and not _lets_through(node):
            yield from node.body  # type: ignore[attr-defined]


def _goes_on(node: ast.Try | ast.TryStar) -> bool:
    leaves = (part for statement in node.finalbody for part in ast.walk(statement))
    return bool(node.handlers) or any(isinstance(part, ast.Return | ast.Break | ast.Continue) for part in leaves)


def _lets_through(node: ast.With) -> bool:
    """Whether all contexts are torch's own: no_grad, autocast, a device."""
    return all(ast.unparse(item.context_expr).startswith("torch.") for item in node.items)


def _position(node: ast.expr | ast.stmt) -> Position:
    return node.lineno, node.end_lineno or node.lineno, node.col_offset, node.end_col_offset or 0


def _holds(node: ast.expr | ast.stmt, at: Position) -> bool:
    first, last, start, end = _position(node)
    return (first, start) <= (at[0], at[2]) and (at[1], at[3]) <= (last, end)


class _Decide(ast.NodeTransformer):
    """Tests become `False and (test)` or `True or (test)`: the names that a function reads stay the same."""

    def __init__(self, edits: _Edits) -> None:
        self._edits = edits

    def visit(self, node: ast.AST) -> Any:
        self.generic_visit(node)
        if isinstance(node, ast.If | ast.Assert) and (value := self._edits.get(_position(node.test))) is not None:
            constant = ast.copy_location(ast.Constant(value), node.test)
            operation = ast.Or() if value else ast.And()
            node.test = ast.copy_location(ast.BoolOp(operation, [constant, node.test]), node.test)
        return node


def _compiled(code: CodeType, edits: _Edits) -> CodeType | None:
    """A function's code, compiled from its file with some tests decided."""
    tree: ast.Module = _Decide(edits).visit(_tree(code.co_filename))
    whole = compile(ast.fix_missing_locations(tree), code.co_filename, "exec", dont_inherit=True)
    found = (c for c in _codes(whole) if (c.co_qualname, c.co_firstlineno) == (code.co_qualname, code.co_firstlineno))
    return next(found, None)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
