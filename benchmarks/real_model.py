"""A real language model on real problems: the SmolLM2 example over seeds, beside what a user would try first.

    python deploy/examples/smollm2/build.py
    python deploy/examples/smollm2/build.py --layers 10 --out deploy/examples/smollm2/model_10_layers
    python -m benchmarks.real_model --json FILE --run prefixes:1      one run of a quarter of an hour; kept in FILE
    python -m benchmarks.real_model --json FILE                       the tables again, FILE.md

Adapter and target are SmolLM2-135M-Instruct. Every run judges all arms on the same held-out problems, greedily and at
the temperatures at which it samples; differences are paired by problem, and their mean over seeds has Student's
interval. The plain loop (`plain_prefixes.py`) sees as many samples of the same problems in an order of its own."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import click
import msgspec

from benchmarks.real_model_runs import DECODINGS, QUICK, SUBJECTS, Seed, trained_seed
from benchmarks.results import Figure, Report, mean_figure, options, t_interval
from prefixrl.common.evaluation.accuracy import Difference, difference

BASELINES = ("no_prefix", "untrained_adapter")
EARLY = 16
"""Iterations whose mean reward says how early a run learns."""
Seeds = Mapping[str, Sequence[Seed]]
"""Runs by subject, in the order of their seeds."""


def kept_seeds(path: Path) -> list[Seed]:
    """Return the runs that a report holds."""
    if not path.is_file():
        return []
    report = msgspec.json.decode(path.read_bytes(), type=Report)
    return msgspec.convert(report.details, list[Seed])


def by_subject(seeds: Sequence[Seed]) -> dict[str, list[Seed]]:
    """Return the runs of every subject, in the order of `SUBJECTS`."""
    return {
        name: runs
        for name in SUBJECTS
        if (runs := sorted((s for s in seeds if s.subject == name), key=lambda s: s.seed))
    }


def accuracies(seeds: Sequence[Seed], arm: str) -> list[float]:
    """Return the mean reward of an arm in every run that has it."""
    return [_share(seed.rewards[arm]) for seed in seeds if arm in seed.rewards]


def _share(marks: str) -> float:
    return marks.count("1") / len(marks)


def baseline(run: Seed, decoding: str, others: Sequence[Seed]) -> str:
    """Return the rewards by problem without training: without a prefix, or in direct mode of the untrained model.

    Those of a run that judged neither are those of another run with its seed.
    """
    for judged in (run, *(other for other in others if other.seed == run.seed)):
        for arm in BASELINES:
            if marks := judged.rewards.get(f"{arm}.{decoding}"):
                return marks
    return ""


def gap(run: Seed, arm: str, decoding: str, others: Sequence[Seed]) -> Difference | None:
    """Return the difference of an arm to the baseline, paired by problem; `others`: runs that may hold the baseline."""
    return difference(
        _by_problem(run.rewards.get(f"{arm}.{decoding}", "")),
        _by_problem(baseline(run, decoding, others)),
    )


def _by_problem(marks: str) -> dict[str, float]:
    return {str(problem): float(mark) for problem, mark in enumerate(marks)}


def early_reward(seed: Seed) -> float:
    """Return the mean reward of the first iterations: the area under the curve."""
    return sum(seed.curve[:EARLY]) / len(seed.curve[:EARLY])


def figures_of(seeds: Seeds) -> Iterator[Figure]:
    """Yield accuracies, differences and early rewards of every subject."""
    others = seeds.get("prefixes", ())
    for name, runs in seeds.items():
        for decoding in DECODINGS:
            judged = [run for run in runs if f"trained_adapter.{decoding}" in run.rewards]
            if judged:
                yield mean_figure(
                    f"{name}: accuracy, {decoding}",
                    "share of problems",
                    accuracies(judged, f"trained_adapter.{decoding}"),
                    [_share(marks) for run in judged if (marks := baseline(run, decoding, others))],
                    "without training",
                )
        if curves := [early_reward(run) for run in runs if run.curve]:
            yield mean_figure(
                f"{name}: mean reward of the first {EARLY} iterations", "reward", curves
            )


def arm_table(seeds: Seeds) -> Iterator[str]:
    """Yield a table: accuracy of every arm, mean over seeds, and the paired difference to no training."""
    yield "| subject | seeds | arm | greedy | less the baseline | sampled | less the baseline |"
    yield "|---|---|---|---|---|---|---|"
    others = seeds.get("prefixes", ())
    for name, runs in seeds.items():
        arms = list(dict.fromkeys(arm.partition(".")[0] for run in runs for arm in run.rewards))
        for arm in arms:
            cells = [cell for decoding in DECODINGS for cell in _cells(runs, arm, decoding, others)]
            yield f"| {name} | {len(runs)} | {arm.replace('_', ' ')} | {' | '.join(cells)} |"


def _cells(
    runs: Sequence[Seed], arm: str, decoding: str, others: Sequence[Seed]
) -> tuple[str, str]:
    """Return the mean accuracy of an arm, and its paired difference to the baseline."""
    values = accuracies(runs, f"{arm}.{decoding}")
    if not values:
        return "", ""
    accuracy = f"{sum(values) / len(values):.3f}"
    gaps = [paired for run in runs if (paired := gap(run, arm, decoding, others))]
    if not gaps or all(
        baseline(run, decoding, ()) == run.rewards[f"{arm}.{decoding}"] for run in runs
    ):
        return accuracy, ""
    mean, (low, high) = t_interval([paired.mean for paired in gaps])
    return accuracy, f"{mean:+.3f} ({low:+.3f} to {high:+.3f})"


def curve_table(seeds: Seeds) -> Iterator[str]:
    """Yield a table: mean reward by quarter of the run, and the target's tokens that it took."""
    yield f"| subject | first {EARLY} iterations | by quarters of the run | tokens of the target | of a warm start |"
    yield "|---|---|---|---|---|"
    for name, all_runs in seeds.items():
        runs = [run for run in all_runs if run.curve]
        if not runs:
            continue
        early = [early_reward(run) for run in runs]
        quarters = [
            sum(sum(_quarter(run.curve, number)) / len(_quarter(run.curve, number)) for run in runs)
            / len(runs)
            for number in range(4)
        ]
        tokens = sum(sum(run.target_tokens) for run in runs) / len(runs)
        warm = sum(run.warm_start_tokens for run in runs) / len(runs)
        words = ", ".join(f"{value:.3f}" for value in quarters)
        yield f"| {name} | {sum(early) / len(early):.3f} | {words} | {tokens:,.0f} | {warm:,.0f} |"


def _quarter(curve: Sequence[float], number: int) -> Sequence[float]:
    size = max(1, len(curve) // 4)
    return curve[number * size : (number + 1) * size] or curve[-1:]


def markdown(seeds: Seeds) -> str:
    """Return the page."""
    words = "\n".join(f"- {name}: {SUBJECTS[name].words}" for name in seeds)
    arms, curves = "\n".join(arm_table(seeds)), "\n".join(curve_table(seeds))
    return f"""# SmolLM2-135M-Instruct on word problems

`python -m benchmarks.real_model`; every run with the settings of the example, which were chosen on `choice.jsonl`.

{words}

The baseline is the target without a prefix; in direct mode it is the model before training. Differences are paired by
problem; the interval is Student's over seeds, and of one seed there is none.

{arms}

Mean reward while training, and what it cost:

{curves}
"""


@click.command()
@options
@click.option(
    "--run", "wanted", multiple=True, metavar="SUBJECT:SEED", help=f"One of {', '.join(SUBJECTS)}."
)
@click.option(
    "--runs", type=click.Path(path_type=Path), default=Path("runs/real_model"), show_default=True
)
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Settings of all runs.")
def main(
    path: Path, quick: bool, wanted: tuple[str, ...], runs: Path, settings: tuple[str, ...]
) -> None:
    """Train what is asked for, and write the tables of all that is kept."""
    changes = (*settings, *(QUICK if quick else ()))
    kept = {(seed.subject, seed.seed): seed for seed in kept_seeds(path)}
    for each in wanted or (("prefixes:1",) if quick else ()):
        name, _, number = each.partition(":")
        kept[name, int(number)] = trained_seed(name, int(number), runs, changes)
        write_report(path, quick, list(kept.values()))
    if not kept:
        raise click.UsageError(f"{path} holds no run: give --run, for example --run prefixes:1")
    write_report(path, quick, list(kept.values()))


def write_report(path: Path, is_quick: bool, kept: list[Seed]) -> None:
    """Write figures and tables."""
    seeds = by_subject(kept)
    counts = defaultdict[str, list[int]](list)
    for seed in kept:
        counts[seed.subject].append(seed.seed)
    report = Report(
        "real_model", is_quick, {"seeds": counts}, list(figures_of(seeds)), kept, kept[-1].commit
    )
    report.wall_s = sum(seed.train_s for seed in kept)
    report.write(path)
    path.with_suffix(".md").write_text(markdown(seeds), encoding="utf-8")


if __name__ == "__main__":
    main()
