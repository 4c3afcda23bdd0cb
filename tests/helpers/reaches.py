"""Finds what a test reaches, read from the sources: every definition that its code, its fixtures
and their helpers name.

Names are resolved as Python and pytest resolve them: definitions and imports of a file, attributes
of imported modules, fixtures of the file and of each `conftest.py` above it. Code in strings and
modules that are named in strings count too, since tests hand them to other processes. A class that
is named counts with all of its methods. Annotations don't count: they run nothing.
"""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.helpers.syntax import nodes, tree_of

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = tuple[str, str]
"""A module of the tests, and a name at its top level."""


@dataclass
class Source:
    """One file: what it defines, imports and offers as fixtures."""

    module: str
    tree: ast.Module
    defined: dict[str, list[ast.stmt]] = field(default_factory=dict)
    imported: dict[str, str] = field(default_factory=dict)
    """Local name -> dotted name."""
    fixtures: dict[str, str] = field(default_factory=dict)
    """A fixture's name -> its function's."""
    for_all: list[str] = field(default_factory=list)
    """Functions of fixtures that every test of the file gets."""

    def __post_init__(self) -> None:
        for statement in self.tree.body:
            for name in _defined(statement):
                self.defined.setdefault(name, []).append(statement)
            if isinstance(statement, Function):
                self._read_fixture(statement)
        self.imported = dict(_imports(self.tree))

    def _read_fixture(self, function: Function) -> None:
        for decorator in function.decorator_list:
            call = decorator if isinstance(decorator, ast.Call) else None
            if ast.unparse(call.func if call else decorator) != "pytest.fixture":
                continue
            given = {word.arg: word.value for word in call.keywords} if call else {}
            name = given.get("name")
            known_as = name.value if isinstance(name, ast.Constant) else function.name
            self.fixtures[str(known_as)] = function.name
            if "autouse" in given:
                self.for_all.append(function.name)


def _defined(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, Function | ast.ClassDef):
        yield statement.name
    elif isinstance(statement, ast.Assign | ast.AnnAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        for target in targets:
            yield from (node.id for node in ast.walk(target) if isinstance(node, ast.Name))


def _imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Local and dotted names, of imports at any depth."""
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.split(".")[0]
                yield (alias.asname, alias.name) if alias.asname else (first, first)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


class Sources:
    """All files below a folder of tests."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.sources: dict[str, Source] = {}
        """By file, as seen from the folder."""
        self._by_module: dict[str, Source] = {}
        for path in sorted(root.rglob("*.py")):
            file = path.relative_to(root).as_posix()
            source = Source(self._module(file), tree_of(path))
            self.sources[file] = self._by_module[source.module] = source
        self._next: dict[Definition, set[Definition | str]] = {}

    def _module(self, file: str) -> str:
        parts = file.removesuffix(".py").removesuffix("/__init__").split("/")
        return ".".join([self._root.name, *parts])

    def reached(self, file: str, test: str) -> set[str]:
        """Dotted names of all that a test reaches, in the tests and outside of them."""
        module = self._module(file)
        left: list[Definition | str] = [(module, test)]
        for home in self._homes(module):
            left += [(home.module, name) for name in home.for_all]
        seen: set[Definition | str] = set()
        while left:
            now = left.pop()
            if now not in seen:
                seen.add(now)
                left += () if isinstance(now, str) else self._from(now)
        return {name if isinstance(name, str) else ".".join(name) for name in seen}

    def _homes(self, module: str) -> Iterator[Source]:
        """Files that are searched for a file's fixtures: itself, then each conftest above it."""
        yield self._by_module[module]
        parts = module.split(".")
        for length in range(len(parts) - 1, 0, -1):
            conftest = ".".join([*parts[:length], "conftest"])
            if conftest in self._by_module and conftest != module:
                yield self._by_module[conftest]

    def _from(self, at: Definition) -> set[Definition | str]:
        """What one definition names."""
        if at not in self._next:
            module, name = at
            source = self._by_module[module]
            found: set[Definition | str] = set()
            for statement in source.defined.get(name, []):
                found |= self._named(source, statement)
                is_run_by_pytest = name.startswith("test") or name in source.fixtures.values()
                if isinstance(statement, Function) and is_run_by_pytest:
                    found |= self._fixtures(source, statement)
            self._next[at] = found - {at}
        return self._next[at]

    def _fixtures(self, source: Source, function: Function) -> set[Definition | str]:
        wanted = {each.arg for each in (*function.args.args, *function.args.kwonlyargs)}
        wanted |= set(_strings(function))  # `usefixtures`, `getfixturevalue`
        found: set[Definition | str] = set()
        for name in wanted:
            for home in self._homes(source.module):
                if name in home.fixtures and (home is not source or name != function.name):
                    found.add((home.module, home.fixtures[name]))
                    break
        return found

    def _named(self, source: Source, node: ast.AST) -> set[Definition | str]:
        found: set[Definition | str] = set()
        for chain in _chains(node):
            first, *rest = chain.split(".")
            if first in source.defined:
                found.add((source.module, first))
            elif first in source.imported:
                found |= self._resolved(".".join([source.imported[first], *rest]))
        for text in _strings(node):
            if text in self._by_module:
                found |= {(text, name) for name in self._by_module[text].defined}
            elif "import" in text:
                with contextlib.suppress(SyntaxError):
                    for _, dotted in _imports(ast.parse(text)):
                        found |= self._resolved(dotted)
        return found

    def _resolved(self, dotted: str) -> set[Definition | str]:
        """A definition of the tests, or a name outside of them as it is written."""
        parts = dotted.split(".")
        if parts[0] != self._root.name:
            return {dotted}
        for length in range(len(parts) - 1, 0, -1):
            source = self._by_module.get(".".join(parts[:length]))
            if source is not None:
                name = parts[length]
                if name in source.defined:
                    return {(source.module, name)}
                if name in source.imported:
                    return self._resolved(".".join([source.imported[name], *parts[length + 1 :]]))
                return set()
        return set()


def _strings(node: ast.AST) -> Iterator[str]:
    for each in ast.walk(node):
        if isinstance(each, ast.Constant) and isinstance(each.value, str):
            yield each.value


def _chains(node: ast.AST) -> Iterator[str]:
    """Names and dotted names in code, without those of annotations."""
    if isinstance(node, ast.Name):
        yield node.id
        return
    if isinstance(node, ast.Attribute):
        text = ast.unparse(node)
        if text.replace(".", "").isidentifier():
            yield text
            return
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _chains(child)
