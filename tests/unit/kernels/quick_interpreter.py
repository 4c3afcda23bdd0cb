"""Triton's interpreter without its largest cost: it patches the language again for every call of a
device function, around what is patched already. Once for each launch is enough.

Imported for its effect, where kernels are interpreted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

_patch: Callable[[Any], Any] = interpreter._patch_lang


class _Once:
    """Patches what a function knows of the language, once in a launch, whose end restores."""

    def __init__(self) -> None:
        self._scopes: dict[frozenset[str], Any] = {}

    def __call__(self, fn: Any) -> _Once:
        known = frozenset(m.__name__ for m in fn.__globals__.values() if m is tl or m is tl.core)
        if known not in self._scopes:
            self._scopes[known] = _patch(fn)
        return self

    def restore(self) -> None:
        while self._scopes:
            _, scope = self._scopes.popitem()
            scope.restore()


interpreter._patch_lang = _Once()
