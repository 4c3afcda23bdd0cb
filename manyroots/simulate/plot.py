"""Writes a sweep's plot: HTML by itself, PNG with matplotlib where that is installed."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from manyroots.errors import ConfigError
from manyroots.simulate.curves import Panel, panels
from manyroots.simulate.plot_html import plot_html
from manyroots.simulate.sweep import Point

COLUMNS = 3


def check_plot(path: Path) -> None:
    """Refuse before hours of simulation what could not be written after them."""
    if path.suffix not in (".html", ".png"):
        raise ConfigError(f"--plot is {str(path)!r}; the name must end in .html or .png.")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--plot is {str(path)!r}; there is no folder {path.parent}.")
    if path.suffix == ".png":
        _figure_class()


def write_plot(path: Path, title: str, note: str, points: list[Point]) -> None:
    if path.suffix == ".html":
        path.write_text(plot_html(title, note, panels(points)), encoding="utf-8")
        return
    _draw(title, panels(points)).savefig(path, dpi=120)


def _draw(title: str, shown: list[Panel]) -> Any:
    rows = -(-len(shown) // COLUMNS)
    figure = _figure_class()(figsize=(4.2 * COLUMNS, 3.2 * rows), layout="constrained")
    figure.suptitle(title)
    for panel, axes in zip(shown, figure.subplots(rows, COLUMNS, squeeze=False).flat, strict=False):
        for line in panel.lines:
            axes.plot(panel.ticks, line.values, color=line.color, marker="o", label=line.label)
        axes.set(
            title=panel.title, xlabel=panel.axis, ylim=(0, 1.02 * panel.grid[-1]), yticks=panel.grid
        )
        axes.grid(axis="y", color="#ddd")
    if len(shown[0].lines) > 1:
        figure.axes[0].legend(fontsize="small")
    return figure


def _figure_class() -> Any:
    # By name: matplotlib is optional, and ships types that would be looked for otherwise. The
    # figure alone needs no display.
    try:
        return importlib.import_module("matplotlib.figure").Figure
    except ImportError as error:
        raise ConfigError(
            "--plot to a .png needs matplotlib, which is not installed: "
            "pip install 'manyroots[plot]', or give a name that ends in .html."
        ) from error
