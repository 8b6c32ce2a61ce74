"""Curves of a run as pictures in SVG. Pure."""

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

WIDTH, HEIGHT = 440.0, 200.0
LEFT, RIGHT, TOP, BOTTOM = 46.0, 8.0, 8.0, 22.0
SMOOTHED_OVER = 8
COLOURS = 4
"""Classes `c0` .. of the page's style."""

Values = Sequence[float | None]
"""A value per iteration; None where there is none."""


@dataclass(frozen=True)
class Judged:
    """A point that is not of an iteration, with its interval."""

    at: float
    value: float
    ci95: tuple[float, float]


@dataclass(frozen=True)
class Figure:
    """One picture: a few series over the iterations."""

    title: str
    note: str
    series: Mapping[str, Values]
    """By the name of the column (docs/tracking.md)."""
    is_share: bool = False
    """True for values in [0, 1]."""
    points: Sequence[Judged] = field(default=())


def smoothed(values: Values) -> list[float | None]:
    """Return at each value the mean of the newest `SMOOTHED_OVER` ones."""
    found: list[float | None] = []
    for end in range(1, len(values) + 1):
        recent = [each for each in values[max(0, end - SMOOTHED_OVER) : end] if each is not None]
        found.append(sum(recent) / len(recent) if recent and values[end - 1] is not None else None)
    return found


def span(figure: Figure) -> tuple[float, float]:
    """Return the lowest and highest value that a picture shows."""
    if figure.is_share:
        return 0.0, 1.0
    known = [each for values in figure.series.values() for each in values if each is not None and math.isfinite(each)]
    low, high = min([0.0, *known]), max([0.0, *known])
    return low, high if high > low else low + 1.0


def picture_of(figure: Figure, iterations: Sequence[int]) -> str:
    """Return a figure as SVG; the colours are the page's."""
    low, high = span(figure)
    first, last = float(iterations[0]), float(max(iterations[-1], iterations[0] + 1))

    def place(iteration: float, value: float) -> tuple[float, float]:
        across = LEFT + (WIDTH - LEFT - RIGHT) * (iteration - first) / (last - first)
        return across, TOP + (HEIGHT - TOP - BOTTOM) * (high - min(high, max(low, value))) / (high - low)

    parts = [_axes(low, high, int(first), int(last))]
    for index, (name, values) in enumerate(figure.series.items()):
        for kind, drawn in (("raw", values), ("smooth", smoothed(values))):
            pairs = zip(iterations, drawn, strict=True)
            path = _path([None if each is None else place(at, each) for at, each in pairs])
            parts.append(f'<path class="{kind} c{index % COLOURS}" data-name="{html.escape(name)}" d="{path}"/>')
    for point in figure.points:
        across, up = place(min(last, max(first, point.at)), point.value)
        ends = [place(point.at, each)[1] for each in point.ci95]
        parts.append(f'<path class="judged" d="M{across:.1f} {ends[0]:.1f}V{ends[1]:.1f}"/>')
        parts.append(f'<circle class="judged" cx="{across:.1f}" cy="{up:.1f}" r="3.5"/>')
    label = html.escape(f"{figure.title}, by iteration")
    return f'<svg viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _axes(low: float, high: float, first: int, last: int) -> str:
    """Return three grid lines with their values, and the ends of the iterations."""
    parts = []
    for step in range(3):
        value, up = low + (high - low) * step / 2, TOP + (HEIGHT - TOP - BOTTOM) * (2 - step) / 2
        parts.append(f'<path class="grid" d="M{LEFT:g} {up:.1f}H{WIDTH - RIGHT:g}"/>')
        parts.append(f'<text x="{LEFT - 5:g}" y="{up + 4:.1f}" text-anchor="end">{short(value)}</text>')
    base = HEIGHT - 6
    parts.append(f'<text x="{LEFT:g}" y="{base:g}">{first}</text>')
    parts.append(f'<text x="{WIDTH - RIGHT:g}" y="{base:g}" text-anchor="end">iteration {last}</text>')
    return "".join(parts)


def _path(points: Sequence[tuple[float, float] | None]) -> str:
    """Return the line through points, with gaps; a lone point is a dot."""
    parts, is_open = [], False
    for index, point in enumerate(points):
        if point is None:
            is_open = False
            continue
        is_alone = not is_open and (index + 1 == len(points) or points[index + 1] is None)
        parts.append(f"{'L' if is_open else 'M'}{point[0]:.1f} {point[1]:.1f}{'h0.1' if is_alone else ''}")
        is_open = True
    return "".join(parts)


def short(value: float) -> str:
    """Return a number of three digits for an axis."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"
