"""The table of `prefixrl eval`, on screen and in Markdown: a line per set, arm and decoding, and per arm over several runs."""

from collections import defaultdict

from rich import box
from rich.console import Console
from rich.table import Column, Table

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
    "pass@k",
    "problems",
    "cut",
)


def print_results(results: list[Result], incomplete: list[str]) -> None:
    """Print the table and what it leaves out."""
    console = Console()
    table = Table(*(Column(name, no_wrap=True) for name in COLUMNS), box=box.SIMPLE_HEAD)
    for line in _lines(results):
        table.add_row(*line)
    console.print(table)
    for note in _notes(results, incomplete):
        console.print(note, markup=False, highlight=False)


def markdown(results: list[Result], incomplete: list[str]) -> str:
    """The same in Markdown."""
    lines = [COLUMNS, tuple("---" for _ in COLUMNS), *_lines(results)]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return "\n\n".join([text, *_notes(results, incomplete)]) + "\n"


def _lines(results: list[Result]) -> list[tuple[str, ...]]:
    lines = [_line(result) for result in results]
    together: dict[tuple[str, str, str], list[Result]] = defaultdict(list)
    for result in results:
        together[result.set, result.arm, result.decoding].append(result)
    for (name, arm, decoding), each in together.items():
        runs = {result.run for result in each}
        if len(runs) > 1 and len(runs) == len(each):
            mean, (low, high) = over_runs([result.accuracy.accuracy for result in each])
            rest = ("", "", str(min(result.accuracy.problems for result in each)), "")
            interval = f"{low:.3f} to {high:.3f} (Student)"
            lines.append((name, f"{len(runs)} runs", arm, decoding, f"{mean:.3f}", interval, *rest))
    return sorted(lines, key=lambda line: line[0])


def _line(result: Result) -> tuple[str, ...]:
    found = result.accuracy
    arm = f"{result.arm}@{result.version}" if result.version >= 0 else result.arm
    low, high = found.ci95
    interval = f"{low:.3f} to {high:.3f}"
    return (
        result.set, result.run, arm, result.decoding, f"{found.accuracy:.3f}",
        interval if found.interval == "wilson" else f"{interval} (bootstrap)",
        "" if found.majority is None else f"{found.majority:.3f}",
        _pass_at(found), str(found.problems), f"{found.truncated_fraction:.1%}",
    )  # fmt: skip


def _pass_at(found: Accuracy) -> str:
    return ", ".join(f"{k}: {share:.3f}" for k, share in found.pass_at.items() if k != "1")


def _notes(results: list[Result], incomplete: list[str]) -> list[str]:
    prefixes = {(each.run, each.arm): each.prefix for each in results if each.prefix}
    errors = sum(each.errors for each in results)
    return [
        *(f"{run}, {arm}: {prefix!r}" for (run, arm), prefix in prefixes.items()),
        *([f"answers whose verifier failed, in no figure: {errors}"] if errors else []),
        *([f"incomplete: {', '.join(incomplete)}"] if incomplete else []),
    ]
