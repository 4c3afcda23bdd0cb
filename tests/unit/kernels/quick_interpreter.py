"""Triton's interpreter without its largest cost: it patches the language again for every call of a
device function, around what is patched already. Once for each launch is enough.

And with FP8 rounded as devices round it: the interpreter's own loses a carry into the exponent.

Imported for its effect, where kernels are interpreted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
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


_convert = interpreter._convert_float


def _convert_float(data: Any, before: Any, after: Any, rounding: Any) -> Any:
    """Numbers of one kind as another's bits."""
    if after == tl.float8e4nv and before in (tl.float32, tl.float16):
        kind = np.float32 if before == tl.float32 else np.float16
        rounded = torch.from_numpy(np.ascontiguousarray(data).view(kind)).to(torch.float8_e4m3fn)
        return rounded.view(torch.uint8).numpy()
    if before == tl.float8e4nv and after in (tl.float32, tl.float16):
        plain = torch.from_numpy(np.ascontiguousarray(data).view(np.uint8))
        kind = torch.float32 if after == tl.float32 else torch.float16
        return plain.view(torch.float8_e4m3fn).to(kind).numpy()
    return _convert(data, before, after, rounding)


interpreter._convert_float = _convert_float
