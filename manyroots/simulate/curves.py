"""What a plot of a sweep shows, whatever draws it: one panel per measure, one line per combination
of the axes after the first. Values of the first axis stand side by side, evenly spaced."""

from __future__ import annotations

import math
from dataclasses import dataclass

from manyroots.simulate.measures import PLOTTED
from manyroots.simulate.sweep import Point

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#5a5a5a")
"""Told apart by colour-blind readers too; reused from the start where there are more lines."""


@dataclass(frozen=True, slots=True)
class Curve:
    label: str
    color: str
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    axis: str
    ticks: tuple[str, ...]
    lines: tuple[Curve, ...]

    @property
    def grid(self) -> list[float]:
        """Round values from 0 to the first that is not below any of the lines."""
        largest = max(value for line in self.lines for value in line.values)
        if largest <= 0:
            return [0.0, 1.0]
        unit = 10 ** math.floor(math.log10(largest / 4))
        step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor * 5 >= largest)
        return [step * i for i in range(math.ceil(largest / step) + 1)]


def panels(points: list[Point]) -> list[Panel]:
    axis = next(iter(points[0].values))
    ticks = tuple(dict.fromkeys(f"{point.values[axis]:g}" for point in points))
    groups: dict[str, list[Point]] = {}
    for point in points:
        groups.setdefault(_label(point, axis), []).append(point)
    return [
        Panel(
            title=measure.title,
            axis=axis,
            ticks=ticks,
            lines=tuple(
                Curve(
                    label,
                    COLORS[number % len(COLORS)],
                    tuple(measure.value(point.summary) for point in group),
                )
                for number, (label, group) in enumerate(groups.items())
            ),
        )
        for measure in PLOTTED
    ]


def _label(point: Point, axis: str) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in point.values.items() if name != axis)
