"""`report.html`: one page without scripts or anything from outside; all text is escaped."""

import html
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from markupsafe import Markup

from prefixrl.common.evaluation.accuracy import Point
from prefixrl.common.host.process import printable
from prefixrl.common.run.directory_format import StartLine
from prefixrl.common.run.documents import AlarmSpan, MetricsLine, columns
from prefixrl.deploy.runs.samples import Common, SampleText

WIDTH, HEIGHT = 440.0, 200.0
LEFT, RIGHT, TOP, BOTTOM = 46.0, 8.0, 8.0, 22.0
SMOOTHED_OVER = 8
COLOURS = 4

Values = Sequence[float | None]


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


def picture_of(figure: Figure, iterations: Sequence[int]) -> Markup:
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
    return Markup(f'<svg viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" aria-label="{label}">{"".join(parts)}</svg>')


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


Cells = tuple[tuple[str, ...], list[list[str]]]
LEAST_SHARE = 0.01
"""Texts that are rarer are no part of the table of the commonest ones."""


@dataclass(frozen=True)
class PageContent:
    """Everything that a page shows."""

    title: str
    state: str
    """Finished or not, in words."""
    lines: Sequence[MetricsLine]
    judged: Sequence[Point]
    """The adapter by version, greedy, on held-out problems."""
    tables: Sequence[tuple[str, str, Cells]]
    """Tables of the evaluation, with their titles and notes."""
    facts: Sequence[tuple[str, str]]
    alarms: Sequence[AlarmSpan]
    early: Sequence[SampleText]
    late: Sequence[SampleText]
    common: Sequence[Common]
    no_samples: str
    """Why there are no samples, "" where there are."""
    starts: Sequence[StartLine]
    config: str
    """The run file in JSON."""


def page(content: PageContent) -> str:
    """Return the page of a run; every text in it is printable and escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        finalize=lambda value: printable(value) if type(value) is str else value,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    drawn = figures(content.lines, content.judged)
    series = {name: list(values) for figure in drawn for name, values in figure.series.items()}
    iterations = [line.iteration for line in content.lines]
    # No text can end the block of numbers.
    numbers = json.dumps({"iteration": iterations, **series}).replace("<", "\\u003c")
    return environment.get_template("report.html.j2").render(
        content=content, figures=drawn, iterations=iterations, series=Markup(numbers),
        common=_common_rows(content.common), starts=[_software(each) for each in content.starts], span=span_of,
        picture_of=picture_of, newest_values=newest_values, sample_cells=_samples,
    )  # fmt: skip


# --- curves ----------------------------------------------------------------------------------------------------------


def figures(lines: Sequence[MetricsLine], judged: Sequence[Point]) -> list[Figure]:
    """Return the pictures of a run; those without any value are left out."""
    rows = [columns(line) for line in lines]

    def of(*names: str) -> dict[str, Values]:
        found = {name: [row.get(name) for row in rows] for name in names}
        return {name: values for name, values in found.items() if any(each is not None for each in values)}

    ages = [float(max(map(int, line.ages), default=0)) for line in lines]
    points = [Judged(each.version, each.accuracy, each.ci95) for each in judged]
    held_out = "; points: held out, greedy, with 95% interval" if points else ""
    busy = of("busy_fraction/rollout", "busy_fraction/scorer", "busy_fraction/learner")
    speed = of("tokens_per_s/rollout", "tokens_per_s/scorer", "tokens_per_s/learner")
    norms = of("figures/actor_grad_norm", "figures/critic_grad_norm")
    texts = of("figures/commonest_text_fraction", "figures/distinct_texts_fraction")
    found = [
        Figure("Reward", f"mean of an iteration{held_out}", of("figures/reward"), True, points),
        Figure("KL", "divergence from the reference model, nats per token", of("figures/reference_kl")),
        Figure("Entropy", "of the adapter, nats per token", of("figures/entropy")),
        Figure("Texts", "share of the commonest text in the rows; different texts over rows", texts, True),
        Figure("Age", "of the trained groups, in versions", {**of("mean_age"), "largest age": ages}),
        Figure("Effective sample size", "of old samples, over their number", of("figures/old_ess_fraction"), True),
        Figure("Gradient norm", "before clipping", norms),
        Figure("Busy", "share of the seats in use, and of the learner's time", busy, True),
        Figure("Throughput", "tokens per second", speed),
    ]
    return [each for each in found if each.series]


def newest_values(figure: Figure) -> list[tuple[str, str]]:
    """Return the name of each series and its newest value."""
    return [
        (
            name.rpartition("/")[2].replace("_", " "),
            short(next((each for each in reversed(values) if each is not None), math.nan)),
        )
        for name, values in figure.series.items()
    ]


# --- texts -----------------------------------------------------------------------------------------------------------


def span_of(part: Common | AlarmSpan, to: str = "-") -> str:
    """Return the iterations of a part in words."""
    return f"{part.first}{to}{part.last}" if part.last > part.first else str(part.first)


def _common_rows(common: Sequence[Common]) -> list[list[str]]:
    """Return a row per text that is common enough; each span of iterations is named once."""
    rows, before = [], ""
    for each in common:
        if each.share >= LEAST_SHARE:
            span = span_of(each)
            rows.append(
                [span if span != before else "", each.text or "(nothing)", f"{each.share:.1%}", f"{each.reward:.3f}"]
            )
            before = span
    return rows


def _samples(samples: Sequence[SampleText]) -> Cells:
    has_completions = any(each.completion for each in samples)
    names = ["reward", "adapter", *(["target"] if has_completions else []), "question", "found", "gold", "advantage"]
    rows = []
    for each in samples:
        advantage = "left out" if each.advantage is None else f"{each.advantage:+.3f}"
        texts = [each.prefix, *([each.completion] if has_completions else []), each.question]
        rows.append([f"{each.reward:.3g}", *texts, each.extracted or "nothing", each.gold, advantage])
    return tuple(names), rows


def _software(start: StartLine) -> list[str]:
    software = ", ".join(f"{name} {found}" for name, found in {"python": start.python, **start.packages}.items())
    return [start.time, str(start.iteration), start.host, start.commit or "no checkout", software]


def file_text(path: Path) -> str:
    """Return the text of a file of the run, "" without one."""
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
