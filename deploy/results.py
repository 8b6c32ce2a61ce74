"""The table of `prefixrl eval`, on screen and in Markdown: a line per set, arm and decoding, and per arm over several runs."""

import sys
from collections import defaultdict

from rich import box
from rich.console import Console
from rich.table import Table

from prefixrl.common.accuracy import Accuracy, over_runs
from prefixrl.common.offline import Result

COLUMNS = (
    "set",
    "run",
    "arm",
    "decoding",
    "accuracy",
    "95% interval",
    "maj",
    "pass",
    "problems",
    "cut",
)
FILE_WIDTH = 160
SAMPLED_NOTE = (
    "several answers to a problem: their mean; maj: the answer given most often; pass: one of so many right; "
    "the interval is a bootstrap over problems"
)


def print_results(results: list[Result], incomplete: list[str]) -> None:
    """Print the table and what it leaves out."""
    # What is not a terminal has no width, and a file is read by something that has.
    console = Console(width=None if sys.stdout.isatty() else FILE_WIDTH)
    columns, lines = _table(results)
    table = Table(*columns, box=box.SIMPLE_HEAD)
    for line in lines:
        table.add_row(*line)
    console.print(table)
    for note in _notes(results, incomplete):
        console.print(note, markup=False, highlight=False)


def markdown(results: list[Result], incomplete: list[str]) -> str:
    """The same in Markdown."""
    columns, rows = _table(results)
    lines = [columns, ["---" for _ in columns], *rows]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return "\n\n".join([text, *_notes(results, incomplete)]) + "\n"


def _table(results: list[Result]) -> tuple[list[str], list[list[str]]]:
    """Columns and lines; a column that says the same everywhere, or nothing, is left out."""
    lines = _lines(results)
    said = [{line[index] for line in lines} for index in range(len(COLUMNS))]
    kept = [
        index
        for index, name in enumerate(COLUMNS)
        if (len(said[index]) > 1 if name in ("set", "run") else said[index] != {""})
    ]
    return [COLUMNS[index] for index in kept], [[line[index] for index in kept] for line in lines]


def _lines(results: list[Result]) -> list[tuple[str, ...]]:
    lines = [_line(result) for result in results]
    for each in _over_runs(results):
        if _is_of_one_kind(each):
            mean, (low, high) = over_runs([result.accuracy.accuracy for result in each])
            rest = ("", "", str(min(result.accuracy.problems for result in each)), "")
            runs, interval = f"{len(each)} runs", f"{low:.3f} to {high:.3f}"
            first = each[0]
            lines.append(
                (first.set, runs, first.arm, first.decoding, f"{mean:.3f}", interval, *rest)
            )
    return sorted(lines, key=lambda line: line[0])


def _over_runs(results: list[Result]) -> list[list[Result]]:
    """Results of one arm on one set that differ in their run alone, where there are several."""
    together: dict[tuple[str, str, str], list[Result]] = defaultdict(list)
    for result in results:
        together[result.set, result.arm, result.decoding].append(result)
    return [each for each in together.values() if 1 < len({one.run for one in each}) == len(each)]


def _is_of_one_kind(results: list[Result]) -> bool:
    return len({each.kind for each in results}) == 1


def _line(result: Result) -> tuple[str, ...]:
    found = result.accuracy
    arm = f"{result.arm}@{result.version}" if result.version >= 0 else result.arm
    low, high = found.ci95
    return (
        result.set, result.run, arm, result.decoding, f"{found.accuracy:.3f}",
        f"{low:.3f} to {high:.3f}",
        "" if found.majority is None else f"{found.majority:.3f}",
        _pass_at(found), str(found.problems), f"{found.truncated_fraction:.1%}",
    )  # fmt: skip


def _pass_at(found: Accuracy) -> str:
    if len(found.pass_at) < 2:
        return ""
    most = max(found.pass_at, key=int)
    return f"{found.pass_at[most]:.3f} of {most}"


def _notes(results: list[Result], incomplete: list[str]) -> list[str]:
    prefixes = {(each.run, each.arm): each.prefix for each in results if each.prefix}
    errors = sum(each.errors for each in results)
    several = _over_runs(results)
    mixed = {each[0].arm for each in several if not _is_of_one_kind(each)}
    asked = {
        name: {each.asked for each in results if each.set == name}
        for name in sorted({each.set for each in results})
    }
    return [
        *([SAMPLED_NOTE] if any(each.accuracy.samples > 1 for each in results) else []),
        *(
            ["a line of several runs: their mean, with Student's interval over runs"]
            if any(map(_is_of_one_kind, several))
            else []
        ),
        *(
            f"{arm}: runs of different kinds (mode, low-rank or whole weights, models) have no mean"
            for arm in sorted(mixed)
        ),
        *(
            f"{name}: not all runs were judged on the same problems, their lines are no comparison"
            for name, digests in asked.items()
            if len(digests) > 1
        ),
        *(f"{run}, {arm}: {prefix!r}" for (run, arm), prefix in prefixes.items()),
        *([f"answers whose verifier failed, in no figure: {errors}"] if errors else []),
        *([f"incomplete: {', '.join(incomplete)}"] if incomplete else []),
    ]
