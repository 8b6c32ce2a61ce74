"""The table of `prefixrl eval`: lines per set, arm and decoding, and over several runs."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations, compress
from operator import itemgetter

from prefixrl.common.evaluation.accuracy import CHOICES, difference, over_runs
from prefixrl.common.evaluation.grouping import grouped
from prefixrl.common.evaluation.plans import ArmResult
from prefixrl.deploy.runs.tables import cell, console, figure, interval, table_of

SAMPLED_NOTE = (
    "several answers to a problem: their mean; maj: the answer given most often; pass: one of so many right; the "
    "interval is a bootstrap over problems"
)
SEARCH_NOTE = (
    "prm_..._max: the answer that the process reward model scores highest, by its last step, its lowest step or their "
    "product; prm_..._vote: equal answers add up their scores; one answer to each problem"
)
PAIRS_NOTE = (
    "differences are over the problems that both arms answered: how many it does better and worse, and how likely so "
    "unequal numbers are by chance (exact sign test; McNemar's where each answer is right or wrong)"
)
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
PAIR_COLUMNS = (
    "set",
    "decoding",
    "arm",
    "less",
    "difference",
    "95% interval",
    "better",
    "worse",
    "of",
    "by chance",
)
SEARCH_COLUMNS = ("set", "run", "arm", "decoding", "accuracy", "maj", *CHOICES)
_Rows = list[tuple[str, ...]]
_Lines = tuple[Sequence[str], Sequence[Sequence[str]]]


def print_results(results: list[ArmResult], incomplete: list[str]) -> None:
    """Print the table and its notes."""
    for columns, lines in _tables(results):
        console().print(table_of(columns, lines))
    for note in _notes(results, incomplete):
        console().print(cell(note))


def markdown(results: list[ArmResult], incomplete: list[str]) -> str:
    """Return table and notes in Markdown."""
    tables = ([columns, ["---" for _ in columns], *rows] for columns, rows in _tables(results))
    cells = ([[each.replace("|", "&#124;") for each in line] for line in table] for table in tables)
    texts = ["\n".join(f"| {' | '.join(line)} |" for line in table) for table in cells]
    return "\n\n".join([*texts, *_notes(results, incomplete)]) + "\n"


def _searched(results: list[ArmResult]) -> _Rows:
    """Return a line for every arm among whose answers a process reward model chose."""
    lines = []
    for result in results:
        judged = result.accuracy
        if judged.chosen:
            choices = (judged.chosen[name] for name in CHOICES)
            figures = map(figure, (judged.accuracy, judged.majority, *choices))
            lines.append((*_names(result), *figures))
    return lines


def _pairs(results: list[ArmResult]) -> _Rows:
    """Return a line for every two arms that answered the same problems in the same way."""
    together = grouped(
        ((result.set, result.decoding, result.questions_digest), result) for result in results
    )
    lines = []
    for (name, decoding, _), group in together.items():
        has_runs = len({result.run for result in group}) > 1
        for baseline, other in combinations(group, 2):
            if figures := pair_figures(other.means, baseline.means):
                arms = (
                    f"{result.run}: {_arm(result)}" if has_runs else _arm(result)
                    for result in (other, baseline)
                )
                lines.append((name, decoding, *arms, *figures))
    return lines


def pair_figures(means: Mapping[str, float], baseline: Mapping[str, float]) -> tuple[str, ...]:
    """Return the cells of two arms from `difference` on, () where they share no problem."""
    if (gain := difference(means, baseline)) is None:
        return ()
    low, high = gain.ci95
    counts = map(str, (gain.better, gain.worse, gain.problems))
    return (f"{gain.mean:+.3f}", f"{low:+.3f} to {high:+.3f}", *counts, f"{gain.chance:.3g}")


def _arm(result: ArmResult) -> str:
    return f"{result.arm}@{result.version}" if result.version >= 0 else result.arm


def _names(result: ArmResult) -> tuple[str, ...]:
    return (result.set, result.run, _arm(result), result.decoding)


def _tables(results: list[ArmResult]) -> list[_Lines]:
    """Return columns and lines of every table that has lines."""
    tables = [
        _trimmed(COLUMNS, _lines(results)),
        _trimmed(SEARCH_COLUMNS, _searched(results)),
        (PAIR_COLUMNS, _pairs(results)),
    ]
    return [table for table in tables if table[1]]


def _trimmed(columns: tuple[str, ...], lines: _Rows) -> _Lines:
    """Return columns and lines; leave out empty columns, and `set` and `run` if all are alike."""
    is_shown = []
    for name, *cells in zip(columns, *lines, strict=True):
        is_shown.append(len(set(cells)) > 1 if name in ("set", "run") else any(cells))
    return list(compress(columns, is_shown)), [list(compress(line, is_shown)) for line in lines]


def _lines(results: list[ArmResult]) -> _Rows:
    lines = [_line(result) for result in results]
    for group in _over_runs(results):
        if _is_of_one_kind(group):
            mean, ends = over_runs([result.accuracy.accuracy for result in group])
            fewest = min(result.accuracy.problems for result in group)
            first = group[0]
            names = (first.set, f"{len(group)} runs", first.arm, first.decoding)
            lines.append((*names, figure(mean), interval(ends), "", "", str(fewest), ""))
    return sorted(lines, key=itemgetter(0))


def _over_runs(results: list[ArmResult]) -> list[list[ArmResult]]:
    """Return the results of one arm on one set over several runs."""
    together = grouped(((result.set, result.arm, result.decoding), result) for result in results)
    return [each for each in together.values() if 1 < len({one.run for one in each}) == len(each)]


def _is_of_one_kind(results: list[ArmResult]) -> bool:
    return len({each.kind for each in results}) == 1


def _line(result: ArmResult) -> tuple[str, ...]:
    judged = result.accuracy
    most = max(judged.pass_at, key=int, default="")
    return (
        *_names(result),
        figure(judged.accuracy),
        interval(judged.ci95),
        figure(judged.majority),
        f"{judged.pass_at[most]:.3f} of {most}" if len(judged.pass_at) > 1 else "",
        str(judged.problems),
        f"{judged.truncated_fraction:.1%}",
    )


def _notes(results: list[ArmResult], incomplete: list[str]) -> list[str]:
    prefixes = {(each.run, each.arm): each.prefix for each in results if each.prefix}
    errors = sum(each.errors for each in results)
    several = _over_runs(results)
    mixed = sorted({each[0].arm for each in several if not _is_of_one_kind(each)})
    # A set with two digests was not the same set for all runs.
    problem_sets = Counter(
        name for name, _ in {(each.set, each.questions_digest) for each in results}
    )
    unequal = sorted(name for name, digests in problem_sets.items() if digests > 1)
    notes = [SAMPLED_NOTE] if any(each.accuracy.samples > 1 for each in results) else []
    if any(map(_is_of_one_kind, several)):
        notes.append("a line of several runs: their mean, with Student's interval over runs")
    notes += [
        f"{arm}: runs of different kinds (mode, low-rank or whole weights, models) have no mean"
        for arm in mixed
    ]
    notes += [
        f"{name}: not all runs were judged on the same problems, their lines are no comparison"
        for name in unequal
    ]
    notes += [SEARCH_NOTE] if _searched(results) else []
    notes += [PAIRS_NOTE] if _pairs(results) else []
    notes += [f"{run}, {arm}: {prefix!r}" for (run, arm), prefix in prefixes.items()]
    empty = {each.run for each in results if each.arm == "fixed_prefix" and not each.prefix}
    notes += [
        f"{run}, fixed_prefix: no prefix did better than none on training problems"
        for run in sorted(empty)
    ]
    trained_on = sorted(
        {(each.run, each.set, each.trained_on) for each in results if each.trained_on}
    )
    notes += [
        f"{run}, {name}: {count} of its questions are in the training data"
        for run, name, count in trained_on
    ]
    notes += [f"answers whose verifier failed, in no figure: {errors}"] if errors else []
    notes += [f"incomplete: {', '.join(incomplete)}"] if incomplete else []
    return notes
