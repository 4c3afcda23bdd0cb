"""Give functions that are already imported the code of a changed source file.

`Imported` takes note of the functions of modules as they are imported now. `swaps` compares a
module's source with a changed one, and gives the functions whose code differs, with their new code.
It raises `MustImportError` where something else differs: a constant, a default, a decorator, a base
class, or code that runs while the module is imported. Closures that exist keep their code.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Iterator, Sequence
from types import CodeType, FunctionType

Swaps = Sequence[tuple[FunctionType, CodeType]]


class MustImportError(Exception):
    """The change shows only if the module is imported anew."""


class Imported:
    """Functions by their code. Make it before `gc.freeze`, which hides them."""

    def __init__(self) -> None:
        self._functions: dict[tuple[str, CodeType], list[FunctionType]] = {}
        for each in gc.get_objects():
            if isinstance(each, FunctionType):
                code = each.__code__
                self._functions.setdefault((code.co_filename, code), []).append(each)

    def swaps(self, path: str, text: str, changed: str) -> Swaps:
        """For the module of this file: functions that the change reaches, and their new code."""
        before, after = (compile(each, path, "exec", dont_inherit=True) for each in (text, changed))
        found: list[tuple[FunctionType, CodeType]] = []
        for old, new in _changed(before, after):
            functions = self._functions.get((path, old), [])
            if not functions:
                raise MustImportError(f"no function has the code of {old.co_qualname}")
            found += [(function, new) for function in functions]
        return found


def _changed(old: CodeType, new: CodeType) -> Iterator[tuple[CodeType, CodeType]]:
    """Pairs of functions' code that differ, in code that runs once: of a module or a class."""
    if _apart_from_functions(old) != _apart_from_functions(new):
        raise MustImportError(f"{old.co_qualname} itself differs")
    for one, other in zip(_nested(old), _nested(new), strict=True):
        if not one.co_flags & inspect.CO_OPTIMIZED:  # a class
            yield from _changed(one, other)
        elif one != other:
            yield one, other


def _nested(code: CodeType) -> list[CodeType]:
    return [each for each in code.co_consts if isinstance(each, CodeType)]


def _apart_from_functions(code: CodeType) -> tuple[object, ...]:
    constants = [
        each.co_qualname if isinstance(each, CodeType) else repr(each) for each in code.co_consts
    ]
    return code.co_code, code.co_names, code.co_cellvars, code.co_exceptiontable, constants
