"""Every way of answering beside every other, on the arithmetic example.

Adapters against what needs no training, and direct RL.

    python -m benchmarks.baselines --json FILE        FILE.md beside it; runs are kept in runs/baselines and not made
    again

Per seed three runs are trained: the example as it stands, with low-rank matrices instead of whole weights, and in
direct mode. `prefixrl eval` then judges all of them greedily on the same held-out problems; that they are the same is
checked, not assumed."""

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import click
import msgspec

from benchmarks.results import Report, commit, mean_figure, options
from prefixrl.common.evaluation.plans import GREEDY, RESULTS_FILE, ArmResult, EvaluationResults

EXAMPLES = Path(__file__).resolve().parent.parent / "deploy/examples"
PREFIX = EXAMPLES / "arithmetic/run.toml"
KINDS: dict[str, tuple[Path, tuple[str, ...]]] = {
    "prefix": (PREFIX, ()),
    "lora": (PREFIX, ("learner.lora={}", "learner.actor_lr=5e-4")),
    "direct": (EXAMPLES / "arithmetic_direct/run.toml", ()),
}
"""Run file and settings. Low-rank matrices learn at twice the rate of whole weights: at ten times they collapse."""
ROWS: tuple[tuple[str, str, str, bool], ...] = (
    ("no prefix", "prefix", "no_prefix", False),
    ("prefix clustering", "prefix", "prefix_clustering", False),
    ("best fixed prefix", "prefix", "fixed_prefix", False),
    ("adapter, untrained", "prefix", "adapter", False),
    ("adapter, trained", "prefix", "adapter", True),
    ("adapter, trained with LoRA", "lora", "adapter", True),
    ("direct, untrained policy", "direct", "adapter", False),
    ("direct, trained policy", "direct", "adapter", True),
)
"""Name in the table, kind of run, arm, and whether it is of a trained adapter."""
QUICK = ("algorithm.iterations=4", "evaluation.problems=32", "evaluation.selection_problems=16")


def train(kind: str, seed: int, runs: Path, changes: Sequence[str]) -> Path:
    """Train one run, or go on with it; a finished one ends at once."""
    run_file, settings = KINDS[kind]
    directory = runs / f"{kind}-{seed}"
    if not (directory / "summary.json").exists():
        given = (f"directory={directory}", f"seed={seed}", *settings, *changes)
        flags = [flag for setting in given for flag in ("--set", setting)]
        _prefixrl("launch", str(run_file), *flags)
    return directory


def judge(kind: str, runs: Sequence[Path]) -> None:
    """Have the runs of one kind judged; results lie below each."""
    arms = sorted({arm for _, of, arm, _ in ROWS if of == kind})
    flags = [flag for arm in arms for flag in ("--arm", arm)]
    checkpoints = [
        "latest",
        *(["0"] if any(of == kind and not is_trained for _, of, _, is_trained in ROWS) else []),
    ]
    flags += [flag for each in checkpoints for flag in ("--checkpoint", each)]
    _prefixrl("eval", *map(str, runs), *flags)


def _prefixrl(*arguments: str) -> None:
    command = [sys.executable, "-m", "prefixrl.deploy", *arguments]
    print("$ prefixrl", *arguments, flush=True)
    subprocess.run(command, check=True)


def results_of(run: Path) -> list[ArmResult]:
    """Everything that was judged of a run, greedily."""
    found: list[ArmResult] = []
    for path in sorted(run.glob(f"eval/step_*/{RESULTS_FILE}")):
        found += msgspec.json.decode(path.read_bytes(), type=EvaluationResults).results
    return [each for each in found if each.decoding == GREEDY]


def pick(found: Sequence[ArmResult], arm: str, is_trained: bool) -> ArmResult:
    """The one of an arm; of adapters that of version 0, or the newest one."""
    mine = [each for each in found if each.arm == arm]
    return (max if is_trained else min)(mine, key=lambda each: each.version)


def markdown(table: dict[str, list[ArmResult]], report: Report) -> str:
    """A row per way of answering, a column per seed, and the mean over seeds."""
    seeds = len(next(iter(table.values())))
    heads = ["", *(f"seed {seed + 1}" for seed in range(seeds)), "mean over seeds"]
    lines = [heads, ["---"] * len(heads)]
    for (name, found), figure in zip(table.items(), report.figures, strict=True):
        cells = [
            "{:.3f} ({:.3f} to {:.3f})".format(each.accuracy.accuracy, *each.accuracy.ci95)
            for each in found
        ]
        low, high = figure.spread
        # Seeds that agree to the last problem say nothing of the spread over problems.
        spread = f" ({max(0.0, low):.3f} to {min(1.0, high):.3f})" if low < high else ""
        mean = f"{figure.value:.3f}{spread}"
        lines.append([name, *cells, mean])
    digests = {each.questions_digest for found in table.values() for each in found}
    problems = next(iter(table.values()))[0].accuracy.problems
    same = (
        f"All rows are of the same {problems} held-out problems."
        if len(digests) == 1
        else "**The rows are not of the same problems: they cannot be compared.**"
    )
    prefixes = "".join(
        f"- {name}, seed {seed}: `{each.prefix}`\n"
        for name, found in table.items()
        for seed, each in enumerate(found, start=1)
        if each.prefix and each.arm != "adapter"
    )
    body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"""# Baselines

`python -m benchmarks.baselines`: accuracy of greedy answers on the arithmetic example.
In brackets 95 % intervals: Wilson's of one run, over its problems; Student's of the mean, over runs that differ in
their seed, where they differ at all. {same}

{body}

Prefixes that were chosen on training problems:

{prefixes}"""


@click.command()
@options
@click.option("--seeds", type=click.IntRange(1), default=3, show_default=True)
@click.option(
    "--runs",
    type=click.Path(path_type=Path),
    default=Path("runs/baselines"),
    show_default=True,
    help="Where runs are kept.",
)
def main(path: Path, quick: bool, seeds: int, runs: Path) -> None:
    """Train, judge, and write the table."""
    measured, started_s = commit(), time.monotonic()
    numbers = range(1, (1 if quick else seeds) + 1)
    changes = QUICK if quick else ()
    trained = {kind: [train(kind, seed, runs, changes) for seed in numbers] for kind in KINDS}
    for kind, directories in trained.items():
        judge(kind, directories)
    found = {run: results_of(run) for directories in trained.values() for run in directories}
    table = {
        name: [pick(found[run], arm, is_trained) for run in trained[kind]]
        for name, kind, arm, is_trained in ROWS
    }
    figures = [
        mean_figure(
            f"accuracy, {name}", "share of problems", [each.accuracy.accuracy for each in results]
        )
        for name, results in table.items()
    ]
    settings = {kind: list(given) for kind, (_, given) in KINDS.items()} | {"seeds": list(numbers)}
    report = Report(
        "baselines", quick, settings, figures, table, measured, time.monotonic() - started_s
    )
    report.write(path)
    path.with_suffix(".md").write_text(markdown(table, report), encoding="utf-8")


if __name__ == "__main__":
    main()
