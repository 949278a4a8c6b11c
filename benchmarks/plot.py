"""Curves over the length as an SVG file, both axes logarithmic; two panels beside each other."""

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape

Curves = Mapping[str, Mapping[int, float]]
"""By mechanism: value by length."""

WIDTH, HEIGHT = 470, 380  # of a panel's drawing area
LEFT, TOP, GAP, LEGEND, BOTTOM = 70, 50, 90, 190, 55
COLOURS = ["#000000", "#7f7f7f", "#1f77b4", "#ff7f0e", "#c49c00", "#2ca02c", "#d62728", "#e377c2", "#9467bd", "#8c564b"]
COLOURS += ["#17becf", "#98a600", "#0a5c36", "#5b3a99"]
DASHED = "softmax"  # the baseline stands out


def draw(panels: Sequence[tuple[str, Curves]]) -> str:
    """The SVG text of panels (title, curves). Names get the same colour in every panel, and one legend."""
    names = list(dict.fromkeys(name for _, curves in panels for name in curves))
    colours = {name: COLOURS[place % len(COLOURS)] for place, name in enumerate(names)}
    width = LEFT + len(panels) * (WIDTH + GAP) + LEGEND
    height = TOP + HEIGHT + BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="13">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for place, (title, curves) in enumerate(panels):
        parts += _panel(LEFT + place * (WIDTH + GAP), title, curves, colours)
    for row, name in enumerate(names):
        x, y = width - LEGEND - GAP + 30, TOP + 12 + 22 * row
        parts.append(f'<path d="M{x} {y} h26" {_stroke(name, colours)}/>')
        parts.append(f'<text x="{x + 34}" y="{y + 4}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _panel(left: float, title: str, curves: Curves, colours: Mapping[str, str]) -> Iterator[str]:
    lengths = sorted({length for curve in curves.values() for length in curve})
    values = [value for curve in curves.values() for value in curve.values()]
    low, high = (10 ** round_to(math.log10(bound)) for round_to, bound in _bounds(values))

    def across(length: float) -> float:
        return left + WIDTH * _share(length, lengths[0], lengths[-1])

    def up(value: float) -> float:
        return TOP + HEIGHT * (1 - _share(value, low, high))

    yield f'<text x="{left}" y="{TOP - 20}" font-size="15">{escape(title)}</text>'
    yield f'<rect x="{left}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#888"/>'
    for length in lengths:
        x = across(length)
        yield f'<path d="M{x:.1f} {TOP} v{HEIGHT}" stroke="#ddd"/>'
        yield f'<text x="{x:.1f}" y="{TOP + HEIGHT + 20}" text-anchor="middle">{length:,}</text>'
    yield f'<text x="{left + WIDTH / 2}" y="{TOP + HEIGHT + 42}" text-anchor="middle">tokens</text>'
    value = low
    while value <= high * 1.001:
        y = up(value)
        yield f'<path d="M{left} {y:.1f} h{WIDTH}" stroke="#ddd"/>'
        yield f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{value:,.10g}</text>'
        value *= 10
    for name, curve in curves.items():
        points = " ".join(f"{across(length):.1f},{up(curve[length]):.1f}" for length in sorted(curve))
        yield f'<polyline points="{points}" {_stroke(name, colours)}><title>{escape(name)}</title></polyline>'


def _bounds(values: Sequence[float]) -> list[tuple]:
    return [(math.floor, min(values)), (math.ceil, max(values))]


def _share(value: float, low: float, high: float) -> float:
    """Where value lies between low and high, on a logarithmic scale."""
    return 0.5 if low == high else math.log(value / low) / math.log(high / low)


def _stroke(name: str, colours: Mapping[str, str]) -> str:
    dash = ' stroke-dasharray="6 4"' if name.startswith(DASHED) else ""
    return f'fill="none" stroke="{colours[name]}" stroke-width="2"{dash}'
