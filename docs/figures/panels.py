"""Panels of shaded cells as SVG: a title, two axes, one square for each value. White ground, readable on any page."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

Cells = Sequence[Sequence[float]]
"""Rows of values between 0 (not drawn) and 1 (darkest)."""

LEFT, TOP, GAP, BOTTOM, RIGHT = 46, 44, 58, 40, 16
INK, SHADE, FRAME = "#333333", "#1f5fa8", "#888888"
FAINT = 0.005  # a cell below it is left out


@dataclass(frozen=True)
class Panel:
    title: str
    cells: Cells
    across: str
    down: str
    cell: int = 8


def draw(panels: Sequence[Panel], caption: str) -> str:
    """The SVG text: panels beside each other, the caption for readers who cannot see it."""
    widths = [panel.cell * len(panel.cells[0]) for panel in panels]
    height = TOP + BOTTOM + max(panel.cell * len(panel.cells) for panel in panels)
    width = LEFT + sum(widths) + GAP * (len(panels) - 1) + RIGHT
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f"<title>{escape(caption)}</title>",
        f'<rect width="{width}" height="{height}" rx="6" fill="#ffffff"/>',
    ]
    left = LEFT
    for panel, wide in zip(panels, widths, strict=True):
        lines += _panel(panel, left, wide)
        left += wide + GAP
    return "\n".join([*lines, "</svg>", ""])


def _panel(panel: Panel, left: int, wide: int) -> Iterator[str]:
    side, high = panel.cell, panel.cell * len(panel.cells)
    yield f'<g id="{escape(panel.title)}">'
    yield f'<text x="{left}" y="{TOP - 18}" fill="{INK}" font-size="13">{escape(panel.title)}</text>'
    for row, values in enumerate(panel.cells):
        for column, value in enumerate(values):
            if value >= FAINT:
                place = f'x="{left + side * column}" y="{TOP + side * row}" width="{side}" height="{side}"'
                yield f'<rect {place} fill="{SHADE}" fill-opacity="{value:.2f}"/>'
    yield f'<rect x="{left}" y="{TOP}" width="{wide}" height="{high}" fill="none" stroke="{FRAME}"/>'
    yield f'<text x="{left + wide / 2:g}" y="{TOP + high + 20}" fill="{INK}" text-anchor="middle">{panel.across}</text>'
    x, y = left - 14, TOP + high / 2
    turned = f'transform="rotate(-90 {x} {y:g})"'
    yield f'<text x="{x}" y="{y:g}" fill="{INK}" text-anchor="middle" {turned}>{panel.down}</text>'
    yield "</g>"
