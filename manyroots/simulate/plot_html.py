"""A sweep as one HTML file with SVG inside: opens anywhere, loads nothing from anywhere."""

from __future__ import annotations

from html import escape

from manyroots.simulate.curves import Curve, Panel

WIDTH, HEIGHT = 340, 220
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 30, 40

STYLE = """
body { font: 14px system-ui, sans-serif; margin: 24px; color: #222; background: #fff; }
h1 { font-size: 18px; margin: 0 0 4px; } p { margin: 0 0 16px; color: #555; }
.panels { display: flex; flex-wrap: wrap; gap: 20px; }
text { font: 11px system-ui, sans-serif; fill: #444; } .title { font-weight: 600; fill: #222; }
.legend span { display: inline-block; margin-right: 16px; }
.legend i { display: inline-block; width: 14px; height: 3px; margin-right: 6px; }
"""


def plot_html(title: str, note: str, panels: list[Panel]) -> str:
    drawings = "\n".join(_svg(panel) for panel in panels)
    return f"""<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style></head>
<body>
<h1>{escape(title)}</h1>
<p>{escape(note)}</p>
{_legend(panels[0].lines)}
<div class="panels">
{drawings}
</div>
</body>
</html>
"""


def _legend(lines: tuple[Curve, ...]) -> str:
    if len(lines) == 1:
        return ""
    entries = "".join(
        f'<span><i style="background:{line.color}"></i>{escape(line.label)}</span>'
        for line in lines
    )
    return f'<p class="legend">{entries}</p>'


def _svg(panel: Panel) -> str:
    parts = [
        f'<svg width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(panel.title)} by {escape(panel.axis)}">',
        f'<text class="title" x="{LEFT}" y="16">{escape(panel.title)}</text>',
        *_grid(panel),
        *(part for line in panel.lines for part in _curve(panel, line)),
        "</svg>",
    ]
    return "\n".join(parts)


def _grid(panel: Panel) -> list[str]:
    parts = []
    for value in panel.grid:
        y = _y(panel, value)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.4g}</text>')
    for i, tick in enumerate(panel.ticks):
        x, y = _x(panel, i), HEIGHT - BOTTOM + 15
        parts.append(f'<text x="{x:.1f}" y="{y}" text-anchor="middle">{escape(tick)}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(
        f'<text x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">{escape(panel.axis)}</text>'
    )
    return parts


def _curve(panel: Panel, line: Curve) -> list[str]:
    spots = [(_x(panel, i), _y(panel, value)) for i, value in enumerate(line.values)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
    parts = [f'<polyline points="{path}" fill="none" stroke="{line.color}" stroke-width="2"/>']
    for (x, y), tick, value in zip(spots, panel.ticks, line.values, strict=True):
        label = f"{line.label + ', ' if line.label else ''}{panel.axis} {tick}: {value:.5g}"
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{line.color}">'
            f"<title>{escape(label)}</title></circle>"
        )
    return parts


def _x(panel: Panel, index: int) -> float:
    room = WIDTH - LEFT - RIGHT
    return LEFT + room * (index + 0.5) / len(panel.ticks)


def _y(panel: Panel, value: float) -> float:
    room = HEIGHT - TOP - BOTTOM
    return HEIGHT - BOTTOM - room * value / panel.grid[-1]
