"""The same trace under several settings: every combination of the values given.

An axis is a setting of the engine, a cost, or `speedup` (how many times as fast requests arrive).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from manyroots.errors import ConfigError
from manyroots.simulate.costs import CostModel, with_costs
from manyroots.simulate.faults import Faults
from manyroots.simulate.settings import SimulationSettings
from manyroots.simulate.simulation import simulate
from manyroots.simulate.summary import Summary, summarize
from manyroots.simulate.trace import Trace, sped_up

SPEEDUP = "speedup"
NOT_NUMBERS = (
    "eviction", "write_back", "prefetch", "scheduling_policy", "families", "windows",
)  # fmt: skip
SETTINGS = tuple(
    spec.name for spec in dataclasses.fields(SimulationSettings) if spec.name not in NOT_NUMBERS
)
COSTS = tuple(spec.name for spec in dataclasses.fields(CostModel))


@dataclass(frozen=True, slots=True)
class Axis:
    """One setting and the values to try."""

    name: str
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Point:
    """One combination, and what came of it."""

    values: dict[str, float]
    summary: Summary


def parse_axis(text: str) -> Axis:
    """`num_pages=1000,2000` or `--num-pages`-like spelling of the name."""
    name, _, listed = text.partition("=")
    name = name.strip().removeprefix("--").replace("-", "_")
    if name not in (*SETTINGS, *COSTS, SPEEDUP):
        raise ConfigError(
            f"--sweep {text!r}: nothing is called {name!r}; choose one of "
            f"{', '.join((*SETTINGS, SPEEDUP))}, or a cost ({', '.join(COSTS)})."
        )
    values = tuple(_number(name, value, text) for value in listed.split(",") if value.strip())
    if not values:
        raise ConfigError(f"--sweep {text!r} gives no values; write {name}=1,2,3.")
    if len(set(values)) < len(values):
        raise ConfigError(f"--sweep {text!r} gives a value twice; remove one.")
    return Axis(name, values)


def points(
    axes: list[Axis],
    trace: Trace,
    settings: SimulationSettings,
    costs: CostModel,
    *,
    seed: int,
    faults: Faults,
    audit: bool,
) -> Iterator[Point]:
    """Simulate every combination, the last axis varying fastest."""
    names = [axis.name for axis in axes]
    if len(set(names)) < len(names):
        raise ConfigError(f"--sweep is given twice for one name in {', '.join(names)}.")
    for combination in itertools.product(*(axis.values for axis in axes)):
        values = dict(zip(names, combination, strict=True))
        run = simulate(
            sped_up(trace, values.get(SPEEDUP, 1.0)),
            _with_settings(settings, {n: v for n, v in values.items() if n in SETTINGS}),
            with_costs(costs, {n: v for n, v in values.items() if n in COSTS}),
            seed=seed,
            faults=faults,
            audit=audit,
        )
        yield Point(values, summarize(run))


def _with_settings(settings: SimulationSettings, changes: dict[str, Any]) -> SimulationSettings:
    return dataclasses.replace(settings, **changes)


def _number(name: str, value: str, text: str) -> float:
    try:
        number = float(value) if name in (*COSTS, SPEEDUP, "acceptance") else int(value)
    except ValueError:
        raise ConfigError(f"--sweep {text!r}: {value!r} is not a number.") from None
    if name == SPEEDUP and not 0 < number < float("inf"):
        raise ConfigError(f"--sweep {text!r}: a speedup must be a number above 0.")
    return number
