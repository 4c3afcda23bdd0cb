"""Which layers launch the same kernels.

Takes layers; gives the form of each: all that their kernels are compiled for, which is the type,
shape, strides and alignment of every tensor, and every number. Layers of one form differ only in
their values.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from itertools import pairwise
from types import FunctionType, MappingProxyType, MethodType, ModuleType

from torch import Tensor

ALIGNMENT_BYTES = 16
_PACKAGE = __name__.split(".")[0]
"""Its objects, like dataclasses, have the form of their attributes. What other libraries keep in
theirs, as Triton does in a kernel, is not ours to compare."""


def form_of(thing: object) -> Hashable:
    """All of it except the values in tensors. An object that refers to itself is named once."""
    return _form(thing, {})


def _form(thing: object, seen: dict[int, int]) -> Hashable:
    if isinstance(thing, Tensor):
        alignment = thing.data_ptr() % ALIGNMENT_BYTES
        return thing.dtype, thing.device, tuple(thing.shape), thing.stride(), alignment
    if thing is None or isinstance(thing, (str, bytes, int, float, bool, Enum)):
        return type(thing), thing
    if isinstance(thing, (ModuleType, FunctionType, MethodType, type)):
        return getattr(thing, "__qualname__", thing.__name__)
    if id(thing) in seen:
        return "again", seen[id(thing)]
    seen[id(thing)] = len(seen)
    if isinstance(thing, (dict, MappingProxyType)):
        return type(thing), _forms((part for item in thing.items() for part in item), seen)
    if isinstance(thing, (frozenset, set)):
        return type(thing), frozenset(_form(part, dict(seen)) for part in thing)
    if isinstance(thing, (list, tuple)):
        return type(thing), _forms(thing, seen)
    if is_dataclass(thing) or type(thing).__module__.split(".")[0] == _PACKAGE:
        return type(thing), _forms(_attributes(thing), seen)
    return _of_a_library(thing)


def _of_a_library(thing: object) -> Hashable:
    """A kernel, a device, a dtype: equal as the library says, or one and the same object."""
    try:
        hash(thing)
    except TypeError:
        return type(thing), id(thing)
    return type(thing), thing


def _forms(parts: Iterable[object], seen: dict[int, int]) -> tuple[Hashable, ...]:
    return tuple(_form(part, seen) for part in parts)


def _attributes(thing: object) -> list[object]:
    own = dict(getattr(thing, "__dict__", {}))
    if is_dataclass(thing):
        own |= {field.name: getattr(thing, field.name, None) for field in fields(thing)}
    return [part for item in sorted(own.items()) for part in item]


def shortest_prefix(forms: Sequence[Hashable]) -> int:
    """How many of the first have every form, each form after every one that it comes after, and at
    their end the form of the last. A kernel may depend on the layer before."""
    missing = {*forms, *pairwise(forms)}
    before: Hashable = None
    for count, form in enumerate(forms, 1):
        missing -= {form, (before, form)}
        if not missing and form == forms[-1]:
            return count
        before = form
    return len(forms)
