"""Triton's interpreter without its largest costs, which are all in its front end.

It patches the language again for every call of a device function, around what is patched already.
Once for each launch is enough. It makes the type of a block, and the shape of a tensor, anew for
every operation. They are shared here. It looks for overflows of whole numbers by seven operations
of the language, and tells of none unless it is asked to debug.

And with FP8 rounded as devices round it: the interpreter's own loses a carry into the exponent.

Imported for its effect, where kernels are interpreted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_patch: Callable[[Any], Any] = interpreter._patch_lang


class _Once:
    """Patches what a function knows of the language, once in a launch, whose end restores."""

    def __init__(self) -> None:
        self._scopes: dict[frozenset[str], Any] = {}
        self._known: dict[Any, frozenset[str]] = {}

    def __call__(self, fn: Any) -> _Once:
        known = self._known.get(fn)
        if known is None:
            modules = [m for m in fn.__globals__.values() if m is tl or m is tl.core]
            known = self._known[fn] = frozenset(module.__name__ for module in modules)
        if known not in self._scopes:
            self._scopes[known] = _patch(fn)
        return self

    def restore(self) -> None:
        while self._scopes:
            _, scope = self._scopes.popitem()
            scope.restore()


interpreter._patch_lang = _Once()


def _patch_attr(obj: Any, name: str, member: Any, builder: object, scope: Any) -> None:
    call, semantic = getattr(member, "__wrapped__", member), interpreter.interpreter_semantic

    def patched(*args: Any, _semantic: object = None, **named: Any) -> Any:
        return call(*args, **named, _semantic=semantic)

    scope.set_attr(obj, name, patched)


interpreter._patch_attr = _patch_attr


_kind_of, _kinds = interpreter._get_np_dtype, dict[str, Any]()


def _get_np_dtype(kind: Any) -> Any:
    """Of a type of Triton's: numpy's."""
    if (known := _kinds.get(kind.name)) is None:
        known = _kinds[kind.name] = _kind_of(kind)
    return known


interpreter._get_np_dtype = _get_np_dtype


_fill, _blocks = tl.block_type.__init__, dict[Any, Any]()


def _shared_block(cls: Any, element: Any, shape: Any, *layout: Any) -> Any:
    """The same type for the same element and shape."""
    if cls is not tl.block_type:  # Gluon's, which have a layout
        return object.__new__(cls)
    sizes = shape.values if isinstance(shape, tl.tuple) else shape
    of_memory = getattr(element, "address_space", None)
    key = (element.name, of_memory, *(getattr(size, "value", size) for size in sizes))
    if (known := _blocks.get(key)) is None:
        known = object.__new__(cls)
        _fill(known, element, shape)
        _blocks[key] = known
    return known


tl.block_type.__new__ = _shared_block
tl.block_type.__init__ = lambda block, *given: (
    None if type(block) is tl.block_type else _fill(block, *given)
)
_to_ir = tl.block_type.to_ir


def _block_to_ir(block: Any, builder: Any) -> Any:
    if builder is not interpreter.interpreter_builder:
        return _to_ir(block, builder)
    if (known := block.__dict__.get("interpreted")) is None:
        known = block.interpreted = _to_ir(block, builder)
    return known


tl.block_type.to_ir = _block_to_ir
_make = tl.tensor.__init__


def _make_tensor(tensor: Any, handle: Any, kind: Any) -> None:
    """All tensors of one type share the numbers that say its shape."""
    if (known := kind.__dict__.get("of_a_tensor")) is None:
        _make(tensor, handle, kind)
        kind.of_a_tensor = (tensor.shape, tensor.numel, tensor.dtype)
        return
    tensor.handle, tensor.type = handle, kind
    tensor.shape, tensor.numel, tensor.dtype = known


tl.tensor.__init__ = _make_tensor


TritonSemantic.binary_op_sanitize_overflow_impl = lambda *given: None


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
