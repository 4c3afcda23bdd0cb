"""Every set of kernels has every operation, with the signature that the type checker sees."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any, get_type_hints

import pytest

import tests.unit.kernels.triton_cases  # noqa: F401

from manyroots.kernels.choice import Kernels, kernel_set_of  # isort: skip

SETS = ("reference", "torch_ops", "triton")
OPERATIONS = get_type_hints(Kernels)


def signature(function: Any) -> list[tuple[str, Any, Any]]:
    """Names, kinds and defaults; `self` is a Protocol's alone."""
    parameters = inspect.signature(function).parameters.values()
    return [(p.name, p.kind, p.default) for p in parameters if p.name != "self"]


def operations(protocol: type) -> dict[str, Any]:
    found = {n: f for n, f in vars(protocol).items() if inspect.isfunction(f)}
    return {name: f for name, f in found.items() if not name.startswith("_")}


@pytest.mark.parametrize("name", [field.name for field in fields(Kernels)])
@pytest.mark.parametrize("kind", SETS)
def test_every_set_has_the_protocols_signatures(kind: str, name: str) -> None:
    """A set may have further arguments that are named and have defaults."""
    module = getattr(kernel_set_of(kind), name)
    wanted = operations(OPERATIONS[name])
    assert wanted
    for operation, function in wanted.items():
        own = signature(getattr(module, operation))
        theirs = signature(function)
        further = [p for p in own if p not in theirs]
        assert [p for p in own if p in theirs] == theirs, (name, operation)
        for _, sort, default in further:
            assert sort is inspect.Parameter.KEYWORD_ONLY, (name, operation)
            assert default is not inspect.Parameter.empty, (name, operation)
    for attribute in set(vars(OPERATIONS[name]).get("__annotations__", ())) - {"__name__"}:
        assert hasattr(module, attribute), (name, attribute)
