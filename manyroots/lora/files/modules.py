"""Which weights of the model a module name in an adapter file means.

Most names are targets. The experts of a layer have several spellings, told apart by the name:

    ...experts.7.gate_proj   one expert; also w1 (gate), w3 (up), w2 (down)
    ...experts.gate_proj     all experts stacked; also w1, w3, w2
    ...experts.gate_up_proj  all experts stacked, gate and up in one
    ...experts               a stacked parameter that PEFT wrapped; its shape tells which
    ...experts.base_layer    the same, when PEFT wrapped two
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator
from typing import NamedTuple

from manyroots.lora.targets import TargetKind, Targets

_EXPERTS = re.compile(r"(.+\.experts)(?:\.(\d{1,9}))?\.(\w+)")
_PROJECTION = {
    "gate_proj": "gate_proj",
    "up_proj": "up_proj",
    "down_proj": "down_proj",
    "w1": "gate_proj",
    "w3": "up_proj",
    "w2": "down_proj",
}


class Place(enum.Enum):
    """What `Home.name` is."""

    TARGET = "target"
    """A target of the model."""
    GATE_UP = "gate_up"
    """The `...experts` whose gate and up the tensors stack."""
    PARAMETER = "parameter"
    """The `...experts` with a parameter that PEFT wrapped, first or alone."""
    INNER_PARAMETER = "inner_parameter"
    """As PARAMETER, the other one."""


class Home(NamedTuple):
    """Where the two factors of a pair meet."""

    place: Place
    name: str


def place_of(module: str, targets: Targets) -> tuple[Home | None, int | None]:
    """The home of a module and, where the name has one, the expert. None: not in this model."""
    if module in targets:
        return Home(Place.TARGET, module), None
    match = _EXPERTS.fullmatch(module)
    if match is None:
        is_parameter = has_experts(module, targets)
        return (Home(Place.PARAMETER, module) if is_parameter else None), None
    experts, number, leaf = match.groups()
    expert = None if number is None else int(number)
    projection = _PROJECTION.get(leaf)
    if projection is not None:
        name = f"{experts}.{projection}"
        return (Home(Place.TARGET, name) if name in targets else None), expert
    if expert is None and has_experts(experts, targets):
        if leaf == "gate_up_proj":
            return Home(Place.GATE_UP, experts), None
        if leaf == "base_layer":
            return Home(Place.INNER_PARAMETER, experts), None
    return None, None


def has_experts(module: str, targets: Targets) -> bool:
    """Whether `module` is the `...experts` of a layer."""
    target = targets.get(f"{module}.gate_proj")
    return target is not None and target.kind is TargetKind.EXPERTS


def module_names(targets: Targets) -> Iterator[str]:
    """What a model's modules are called, in every spelling that an adapter's config may use."""
    for name, target in targets.items():
        yield name
        experts, _, leaf = name.rpartition(".")
        if has_experts(f"{experts}.experts", targets):
            yield f"{name}.weight"  # a router, which PEFT may take as a parameter
        if target.kind is TargetKind.EXPERTS:
            for expert in range(target.num_experts or 1):
                yield f"{experts}.{expert}.{leaf}"
            if leaf == "gate_proj":
                yield f"{experts}.gate_up_proj"


def with_expert(module: str, expert: int) -> str:
    """The name of the same module of another expert."""
    return re.sub(r"\.experts\.\d+\.", f".experts.{expert}.", module)
