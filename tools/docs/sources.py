"""Classes as their source has them: fields with their text, type and default, and methods.

Python keeps no docstring of a field, and importing `LLM` imports torch; so this reads the source.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Field:
    name: str
    type: str
    default: str
    """Empty if it is required."""
    text: str


@dataclass(frozen=True, slots=True)
class Method:
    name: str
    signature: str
    text: str


@dataclass(frozen=True, slots=True)
class Class:
    name: str
    bases: tuple[str, ...]
    text: str
    fields: tuple[Field, ...]
    methods: tuple[Method, ...]


@cache
def module(name: str) -> ast.Module:
    found = importlib.util.find_spec(name)
    assert found is not None, name
    assert found.origin is not None, name
    return ast.parse(Path(found.origin).read_text())


@cache
def class_of(module_name: str, name: str) -> Class:
    [node] = [
        item
        for item in module(module_name).body
        if isinstance(item, ast.ClassDef) and item.name == name
    ]
    bases = tuple(ast.unparse(base) for base in node.bases)
    text = ast.get_docstring(node) or ""
    return Class(name, bases, text, tuple(_fields(node)), tuple(_methods(node)))


def _fields(node: ast.ClassDef) -> Iterator[Field]:
    for item, after in zip(node.body, [*node.body[1:], None], strict=True):
        if not isinstance(item, ast.AnnAssign) or not isinstance(item.target, ast.Name):
            continue
        name = item.target.id
        if name.startswith("_"):
            continue
        default = "" if item.value is None else ast.unparse(item.value)
        if (inner := ast.parse(default or "0", mode="eval").body) and isinstance(inner, ast.Call):
            default = _call_default(inner) or default
        yield Field(name, ast.unparse(item.annotation), default, _string(after))


def _call_default(node: ast.Call) -> str:
    """The default within `field(default=...)` or `field(default_factory=...)`."""
    for keyword in node.keywords:
        if keyword.arg == "default":
            return ast.unparse(keyword.value)
        if keyword.arg == "default_factory":
            return f"{ast.unparse(keyword.value)}()"
    return ""


def _string(node: ast.stmt | None) -> str:
    """The text of a statement that is nothing but a string."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return node.value.value if isinstance(node.value.value, str) else ""
    return ""


def _methods(node: ast.ClassDef) -> Iterator[Method]:
    for item in node.body:
        if not isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        is_public = not item.name.startswith("_") or item.name == "__init__"
        if not is_public:
            continue
        decorators = {ast.unparse(decorator) for decorator in item.decorator_list}
        text = ast.get_docstring(item) or ""
        if "property" in decorators:
            assert item.returns is not None
            yield Method(item.name, f"{item.name}: {ast.unparse(item.returns)}", text)
            continue
        returns = f" -> {ast.unparse(item.returns)}" if item.returns is not None else ""
        name = node.name if item.name == "__init__" else item.name
        ending = "" if item.name == "__init__" else returns
        yield Method(item.name, _wrapped(name, _arguments(item.args), ending), text)


def _arguments(node: ast.arguments) -> list[str]:
    """Each argument but the object itself, as it is written."""
    found: list[str] = []
    positional = [*node.posonlyargs, *node.args]
    without = len(positional) - len(node.defaults)
    for i, argument in enumerate(positional):
        if i == 0 and argument.arg in ("self", "cls"):
            continue
        default = "" if i < without else f" = {ast.unparse(node.defaults[i - without])}"
        found.append(ast.unparse(argument) + default)
    if node.vararg is not None or node.kwonlyargs:
        found.append("*" if node.vararg is None else f"*{ast.unparse(node.vararg)}")
    for argument, given in zip(node.kwonlyargs, node.kw_defaults, strict=True):
        found.append(ast.unparse(argument) + ("" if given is None else f" = {ast.unparse(given)}"))
    if node.kwarg is not None:
        found.append(f"**{ast.unparse(node.kwarg)}")
    return found


def _wrapped(name: str, arguments: list[str], ending: str) -> str:
    line = f"{name}({', '.join(arguments)}){ending}"
    if len(line) <= 88:
        return line
    return f"{name}(\n" + "".join(f"    {item},\n" for item in arguments) + f"){ending}"
