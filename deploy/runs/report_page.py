"""`report.html`: one page without scripts or anything from outside; all text is escaped."""

import html
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from prefixrl.common.evaluation.accuracy import Point
from prefixrl.common.host.process import printable
from prefixrl.common.run.directory_format import StartLine
from prefixrl.common.run.documents import AlarmSpan, MetricsLine, columns
from prefixrl.deploy.runs.samples import Common, SampleText

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


Cells = tuple[tuple[str, ...], list[list[str]]]
"""Columns and rows of a table."""

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""No script runs and nothing is fetched, whatever a model has written."""
STYLE = """
:root{color-scheme:light dark;--back:#fff;--text:#1c2024;--soft:#5b6570;--line:#dde2e7;--box:#f5f7f9;
--a0:#1f6feb;--a1:#c2410c;--a2:#15803d;--a3:#7c3aed;--bad:#b42318}
@media(prefers-color-scheme:dark){:root{--back:#14171a;--text:#e6e9ec;--soft:#9aa4af;--line:#333a41;--box:#1d2125;
--a0:#6cb0ff;--a1:#ff9d5c;--a2:#5fd38a;--a3:#b79bff;--bad:#ff8a7d}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1240px;padding:1rem;background:var(--back);color:var(--text);
font:15px/1.5 system-ui,sans-serif}
h1,h2,h3,p,figcaption{overflow-wrap:anywhere}
h1{font-size:1.5rem;margin:.2rem 0}h2{font-size:1.15rem;margin:2rem 0 .5rem}
h3{font-size:.95rem;margin:1.2rem 0 .2rem}figure h3{margin:0}p{margin:.3rem 0}.soft,figcaption,th{color:var(--soft)}
.alarm{border-left:4px solid var(--bad);padding:.4rem .8rem;margin:.5rem 0;background:var(--box)}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,340px),1fr));gap:1rem}
figure{display:flex;flex-direction:column;margin:0;padding:.7rem;background:var(--box);border-radius:6px;min-width:0}
figcaption{font-size:.8rem;line-height:1.35;min-height:2.7em}svg{display:block;width:100%;height:auto;margin-top:auto}
svg text{font-size:11px;fill:var(--soft)}
path{fill:none}.grid{stroke:var(--line)}.raw{stroke-width:1;opacity:.35}.smooth{stroke-width:2}
.c0{stroke:var(--a0)}.c1{stroke:var(--a1)}.c2{stroke:var(--a2)}.c3{stroke:var(--a3)}
path.judged{stroke:var(--text);stroke-width:1.5}circle.judged{fill:var(--text)}
.key{display:inline-block;width:.8em;height:.25em;margin:0 .35em .2em 0;vertical-align:middle}
.k0{background:var(--a0)}.k1{background:var(--a1)}.k2{background:var(--a2)}.k3{background:var(--a3)}
.wide{overflow-x:auto;max-width:100%}table{border-collapse:collapse;font-size:.87rem}
td,th{padding:.3rem .8rem .3rem 0;text-align:left;vertical-align:top;border-bottom:1px solid var(--line)}
th{font-weight:600;white-space:nowrap}td{white-space:nowrap}
td.text bdi{display:block;unicode-bidi:isolate;width:max-content;max-width:min(26rem,60vw);white-space:pre-wrap;
overflow-wrap:anywhere}.facts td.text bdi{width:auto;max-width:none}.series{white-space:nowrap;margin-right:.8em}
pre{overflow-x:auto;background:var(--box);padding:.8rem;font-size:.8rem}summary{cursor:pointer;margin:1rem 0 .3rem}
"""

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
    """Return the page of a run."""
    title = escaped(content.title)
    body = [f"<h1>{title}</h1><p class=soft>{escaped(content.state)}</p>"]
    body += [_alarm(each) for each in content.alarms]
    for name, note, cells in content.tables:
        body.append(f"<h2>{escaped(name)}</h2><p class=soft>{escaped(note)}</p>{table(cells)}")
    if content.lines:
        body += ["<h2>Curves</h2>", "<p class=soft>thin: each iteration; thick: the mean of the newest 8</p>"]
        body.append(f"<div class=figures>{''.join(_figures(content))}</div>")
    body += _texts(content)
    body.append(
        f"<h2>Run</h2><div class=facts>{table((('', ''), [list(each) for each in content.facts]), (0, 1))}</div>"
    )
    body.append(_software(content.starts))
    body.append(f"<details><summary>Configuration</summary><pre>{escaped(content.config)}</pre></details>")
    head = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><style>{STYLE}</style></head>'
    )
    return f"{head}<body>{''.join(body)}{_data(content.lines)}</body></html>"


def escaped(text: str) -> str:
    """Return a text for a page: no markup, control character or change of direction in it."""
    return html.escape(printable(text))


def table(cells: Cells, texts: Collection[int] = ()) -> str:
    """Return a table that scrolls in its own box; `texts`: columns with cells that are wrapped."""
    names, rows = cells
    head = "".join(f"<th>{escaped(name)}</th>" for name in names)
    body = (
        "".join(
            f"<td class=text><bdi>{escaped(each)}</bdi></td>" if index in texts else f"<td>{escaped(each)}</td>"
            for index, each in enumerate(row)
        )
        for row in rows
    )
    lines = "".join(f"<tr>{row}</tr>" for row in body)
    return f"<div class=wide><table>{f'<tr>{head}</tr>' if any(names) else ''}{lines}</table></div>"


def _alarm(alarm: AlarmSpan) -> str:
    over = f"iterations {alarm.first} to {alarm.last}" if alarm.last > alarm.first else f"iteration {alarm.first}"
    return f'<p class=alarm data-alarm="{escaped(alarm.kind)}"><b>{over}</b>: {escaped(alarm.text)}</p>'


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


def _figures(content: PageContent) -> list[str]:
    iterations, found = [line.iteration for line in content.lines], []
    for figure in figures(content.lines, content.judged):
        keys = []
        for index, (name, values) in enumerate(figure.series.items()):
            newest = next((each for each in reversed(values) if each is not None), math.nan)
            label = escaped(name.rpartition("/")[2].replace("_", " "))
            keys.append(
                f"<span class=series><span class='key k{index % COLOURS}'></span>{label} {short(newest)}</span> "
            )
        caption = f"<figcaption>{escaped(figure.note)}<br>{''.join(keys)}</figcaption>"
        found.append(f"<figure><h3>{escaped(figure.title)}</h3>{caption}{picture_of(figure, iterations)}</figure>")
    return found


def _data(lines: Sequence[MetricsLine]) -> str:
    """Return the drawn numbers as JSON for programs; no text can end the block."""
    drawn = {name: list(values) for figure in figures(lines, ()) for name, values in figure.series.items()}
    series = {"iteration": [line.iteration for line in lines], **drawn}
    text = json.dumps(series).replace("<", "\\u003c")
    return f'<script type="application/json" id="series">{text}</script>'


# --- texts -----------------------------------------------------------------------------------------------------------


def _texts(content: PageContent) -> list[str]:
    found = ["<h2>What the adapter writes</h2>"]
    if content.no_samples:
        return [*found, f"<p class=soft>{escaped(content.no_samples)}</p>"]
    rows = [
        [_iterations(each), each.text or "(nothing)", f"{each.share:.1%}", f"{each.reward:.3f}"]
        for each in content.common
        if each.share >= LEAST_SHARE
    ]
    for row, before in zip(reversed(rows), reversed(rows[:-1]), strict=False):
        row[0] = "" if row[0] == before[0] else row[0]
    names = ("iterations", "text", "share of the rows", "mean reward")
    found.append(f"<h3>Commonest texts over time</h3>{table((names, rows), {1})}")
    for title, samples in (("Early samples", content.early), ("Late samples", content.late)):
        if samples:
            found.append(f"<h3>{title}, of iteration {samples[0].iteration}</h3>{_samples(samples)}")
    return found


def _iterations(common: Common) -> str:
    return f"{common.first}-{common.last}" if common.last > common.first else str(common.first)


def _samples(samples: Sequence[SampleText]) -> str:
    has_completions = any(each.completion for each in samples)
    names = ["reward", "adapter", *(["target"] if has_completions else []), "question", "found", "gold", "advantage"]
    rows = []
    for each in samples:
        advantage = "left out" if each.advantage is None else f"{each.advantage:+.3f}"
        texts = [each.prefix, *([each.completion] if has_completions else []), each.question]
        rows.append([f"{each.reward:.3g}", *texts, each.extracted or "nothing", each.gold, advantage])
    return table((tuple(names), rows), range(1, len(names) - 1))


def _software(starts: Sequence[StartLine]) -> str:
    """Return a table of the learner's starts."""
    rows = [
        [
            each.time, str(each.iteration), each.host, each.commit or "no checkout",
            ", ".join(f"{name} {found}" for name, found in {"python": each.python, **each.packages}.items()),
        ]
        for each in starts
    ]  # fmt: skip
    names = ("start (UTC)", "at iteration", "host", "commit", "software")
    return f"<h2>Software</h2>{table((names, rows), {3, 4})}" if rows else ""


def file_text(path: Path) -> str:
    """Return the text of a file of the run, "" without one."""
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
