"""docs/images/*.svg: charts of figures that stand in tables of docs/performance.md.

Takes the table after a heading; gives an SVG with a bar for each figure. No number is written here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "performance.md"
STYLE = """\
text { font: 13px system-ui, sans-serif; fill: #24292f }
.title { font-weight: 600 }
.manyroots { fill: #0f766e } .vllm { fill: #a3a3a3 }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .manyroots { fill: #2dd4bf } }"""
LETTER, BAR_WIDTH, VALUE_WIDTH, BAR, GAP = 7, 170, 62, 14, 12


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    rows: list[tuple[str, str, str]]
    """Label, our figure, vLLM's, as the table has them."""


def rows_after(heading: str) -> list[list[str]]:
    """The cells of the first table after a heading of docs/performance.md, without its head."""
    text = PAGE.read_text().split(f"\n### {heading}\n", 1)[1]
    lines = re.search(r"(?:^\|.*\n)+", text, re.M)
    assert lines is not None
    return [[cell.strip() for cell in line.strip("|").split("|")]
            for line in lines[0].splitlines()[2:]]  # fmt: skip


def figure(cell: str) -> float:
    return float(cell.replace(",", ""))


def panels(heading: str, titles: Sequence[str]) -> list[Panel]:
    """One panel for each pair of columns: ours and vLLM's."""
    table = rows_after(heading)
    return [
        Panel(title, [(row[0], row[1 + 2 * i], row[2 + 2 * i]) for row in table])
        for i, title in enumerate(titles)
    ]


def _panel(panel: Panel, start: int, top: int, *, with_labels: bool) -> list[str]:
    most = max(figure(cell) for _, *cells in panel.rows for cell in cells)
    parts = [f'<text class="title" x="{start}" y="{top}">{panel.title}</text>']
    for number, (label, *cells) in enumerate(panel.rows):
        y = top + 14 + number * (2 * BAR + GAP)
        if with_labels:
            parts.append(
                f'<text x="{start - 8}" y="{y + BAR + 4}" text-anchor="end">{label}</text>'
            )
        for place, (name, shown) in enumerate(zip(("manyroots", "vllm"), cells, strict=True)):
            width = round(BAR_WIDTH * figure(shown) / most, 1)
            at = y + place * BAR
            parts.append(
                f'<rect class="{name}" x="{start}" y="{at}" width="{width}" height="{BAR - 2}"/>'
            )
            parts.append(f'<text x="{start + width + 5}" y="{at + BAR - 3}">{shown}</text>')
    return parts


def chart(name: str, drawn: list[Panel]) -> str:
    """Panels side by side, with one set of labels."""
    one = BAR_WIDTH + VALUE_WIDTH
    labels = LETTER * max(len(label) for label, _, _ in drawn[0].rows) + 16
    width = labels + len(drawn) * one
    height = 58 + len(drawn[0].rows) * (2 * BAR + GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" aria-label="{name}">',
        f"<style>{STYLE}</style>",
        f'<rect class="manyroots" x="{labels}" y="4" width="12" height="12"/>',
        f'<text x="{labels + 17}" y="15">manyroots</text>',
        f'<rect class="vllm" x="{labels + 100}" y="4" width="12" height="12"/>',
        f'<text x="{labels + 117}" y="15">vLLM 0.25.1</text>',
    ]
    for i, panel in enumerate(drawn):
        parts += _panel(panel, labels + i * one, 40, with_labels=i == 0)
    return "\n".join([*parts, "</svg>"]) + "\n"


def decode() -> str:
    titles = ("batch 8, tokens/s", "batch 64, tokens/s")
    return chart("Decode beside vLLM", panels("Decode at a glance", titles))


def traffic() -> str:
    titles = ("seconds, lower is better",)
    return chart("Whole requests beside vLLM", panels("Whole requests at a glance", titles))
