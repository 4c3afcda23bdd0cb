"""Syntax trees of source files, parsed and walked once for all tests that read sources."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def nodes(tree: ast.Module) -> tuple[ast.AST, ...]:
    """All nodes of a tree. `ast.walk` takes far longer than what a check does with a node."""
    return tuple(ast.walk(tree))
