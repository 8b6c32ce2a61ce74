"""The page of all figures, made from the files that the benchmarks wrote."""

import ast
import re
from pathlib import Path

import msgspec

from benchmarks.results import ROOT, Figure, Report

RESULTS = ROOT / "benchmarks/results"
MOST_ROWS = 50
"""A benchmark with more figures has a page of its own, beside its file."""
HEAD = """# Figures

The figures of the benchmarks, each with what it is compared with. A ratio is of two values that were measured in one
run on the same machine; do not compare seconds of different runs. `make bench` measures all of them again and writes
this page, `make bench-quick` runs small forms of most. What is compared, and why that is fair, stands below each name.
The program of a commit that ends in `-dirty` had changes in tracked files when it was measured.
"""


def names() -> list[str]:
    """Return the benchmarks: the modules that are commands of the common form."""
    found = (
        each
        for each in sorted((ROOT / "benchmarks").glob("*.py"))
        if each.stem not in ("__main__", "results")
    )
    return [each.stem for each in found if "\n@options\n" in each.read_text(encoding="utf-8")]


def page(folder: Path) -> str:
    """Return the page of the figures in a folder."""
    found = sorted(path for path in folder.glob("*.json"))
    return "\n".join([HEAD, *(_section(path) for path in found)])


def gpu_parts() -> list[str]:
    """Return the parts of `make gpu`, by the names of their reports."""
    return [
        f"gpu_{path.stem.removeprefix('test_')}"
        for path in sorted((ROOT / "tests/gpu").glob("test_*.py"))
    ]


def _command(report: Report) -> str:
    part = report.benchmark.removeprefix("gpu_")
    quick = " --quick" if report.is_quick else ""
    is_gpu_part = report.benchmark in gpu_parts()
    return (
        f"make gpu-{part}"
        if is_gpu_part
        else f"python -m benchmarks.{report.benchmark}{quick} --json FILE"
    )


def _section(path: Path) -> str:
    report = msgspec.json.decode(path.read_bytes(), type=Report)
    title, story = _texts(report.benchmark)
    machine = f"{report.machine['cores']} cores of {report.machine['cpu']}"
    if report.machine.get("gpu"):
        machine += f", {report.machine['gpu']}, torch {report.machine['torch']}"
    lines = [
        f"## {title}",
        "",
        f"`{_command(report)}`; {path.name}, commit `{report.commit[:10]}"
        f"{'-dirty' * report.commit.endswith('-dirty')}`, {report.finished[:10]}, {machine}, {report.wall_s:.0f} s.",
        "",
        story,
        "",
    ]
    if len(report.figures) > MOST_ROWS:
        own = path.with_suffix(".md")
        where = f"[results/{own.name}](results/{own.name})" if own.is_file() else path.name
        return "\n".join([*lines, f"{len(report.figures)} figures: {where}.", ""])
    lines += ["| figure | ours | compared with | ratio | n | spread |", "|---|---|---|---|---|---|"]
    lines += [_row(figure) for figure in report.figures]
    return "\n".join([*lines, ""])


def _row(figure: Figure) -> str:
    against = "" if figure.baseline is None else f"{figure.baseline_name}: {figure.baseline:.4g}"
    ratio = "" if figure.ratio is None else f"{figure.ratio:.3g}"
    spread = (
        ""
        if figure.n == 1
        else f"{figure.spread[0]:.4g} to {figure.spread[1]:.4g} ({figure.spread_kind})"
    )
    ours = f"{figure.value:.4g} {figure.unit}{'' if figure.n == 1 else ', ' + figure.statistic}"
    return f"| {figure.name} | {ours} | {against} | {ratio} | {figure.n} | {spread} |".replace(
        "  ", " "
    )


def _texts(name: str) -> tuple[str, str]:
    """Return the first line of a benchmark's text, and its paragraphs without commands and pictures."""
    path = ROOT / f"benchmarks/{name}.py"
    if name in gpu_parts():
        path = ROOT / f"tests/gpu/test_{name.removeprefix('gpu_')}.py"
    if not path.is_file():
        return name, ""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or name
    title, _, story = text.partition("\n")
    parts = [
        part for part in re.split(r"\n\s*\n", story.strip("\n")) if not part.startswith("    ")
    ]
    return title.rstrip("."), "\n\n".join(part.strip() for part in parts)
