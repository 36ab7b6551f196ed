"""The names in an emitted model.py that nothing in it declares."""

from __future__ import annotations

import ast
import symtable
from collections.abc import Iterator

_OF_PYTHON = {"__file__", "dict", "float", "max", "min", "range", "staticmethod", "str", "super"}


def undeclared(source: str) -> set[str]:
    """What the source reads, calls or imports and neither declares nor may have of Python, torch and its runtime."""
    top = symtable.symtable(source, "model.py", "exec")
    declared = {s.get_name() for s in top.get_symbols() if s.is_assigned() or s.is_imported() or s.is_namespace()}
    read = {
        symbol.get_name()
        for table in _tables(top)
        for symbol in table.get_symbols()
        if symbol.is_referenced() and (symbol.is_global() or table is top)
    }
    imported = {
        name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    }
    foreign = {name for name in imported if name.partition(".")[0] not in ("torch", "runtime")}
    return (read - declared - _OF_PYTHON) | foreign


def _tables(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    yield table
    for child in table.get_children():
        yield from _tables(child)
