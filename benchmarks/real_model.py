"""A real language model on real problems: the SmolLM2 example over seeds, beside no prefix and the best fixed prefix.

    python deploy/examples/smollm2/build.py
    python -m benchmarks.real_model --json FILE        FILE.md beside it; runs are kept in runs/real_model and go on
    python -m benchmarks.real_model --plain 1 --json FILE        one seed also by a plain loop (`plain_prefixes.py`)

Per seed one run of `deploy/examples/smollm2/run.toml` as a user starts it. The system itself judges all arms greedily
on the same held-out problems; differences are paired by problem. The plain loop sees as many samples, and judges itself
on the same problems."""

import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import click

from benchmarks.plain_prefixes import Choices, run
from benchmarks.results import Report, commit, mean_figure, options
from prefixrl.common.config.load import load
from prefixrl.common.evaluation.accuracy import Difference, difference

RUN_FILE = Path(__file__).resolve().parent.parent / "deploy/examples/smollm2/run.toml"
BASELINES = ("no_prefix", "fixed_prefix", "untrained_adapter")
TRAINED = "trained_adapter"
QUICK = ("algorithm.iterations=4", "evaluation.problems=24", "evaluation.selection_problems=8")

Rewards = Mapping[str, Mapping[str, float]]
"""By arm, by problem."""


def train(seed: int, runs: Path, settings: tuple[str, ...]) -> Path:
    """Train one seed unless its summary is there; return its directory."""
    directory = runs / f"seed_{seed}"
    if not (directory / "summary.json").is_file():
        given = (f"directory={directory.resolve()}", f"seed={seed}", *settings)
        flags = [flag for each in given for flag in ("--set", each)]
        subprocess.run(
            [sys.executable, "-m", "prefixrl.deploy", "launch", str(RUN_FILE), *flags], check=True
        )
    return directory


def plain_loop(seed: int, runs: Path) -> Rewards:
    """Train one seed by the plain loop unless its rewards are there; return them, by arm."""
    config, out = load(RUN_FILE), runs / f"plain-{seed}.jsonl"
    algorithm, learner, lora = config.algorithm, config.learner, config.learner.lora
    assert lora is not None and algorithm.iterations is not None, "the run file says so"
    lines = out.read_text(encoding="utf-8").splitlines() if out.is_file() else []
    if len(lines) <= algorithm.iterations:
        choices = Choices(
            RUN_FILE.parent,
            seed,
            algorithm.iterations,
            algorithm.groups_per_iteration,
            algorithm.samples_per_prompt,
            config.rollout.prefix_tokens,
            config.scorer.max_new_tokens,
            config.scorer.temperature,
            learner.actor_lr,
            learner.adam_betas,
            learner.grad_clip,
            lora.rank,
            lora.alpha,
        )
        found = run(choices, out)
    else:
        found = json.loads(lines[-1])
    return {
        arm: {str(row): reward for row, reward in enumerate(rewards)}
        for arm, rewards in found.items()
    }


def rewards_of(directory: Path) -> Rewards:
    """Every arm's rewards of greedy answers; a run that was stopped may lack those of the untrained adapter."""
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for arm in (*BASELINES, TRAINED):
        path = directory / f"evaluations/{arm}.greedy.jsonl"
        for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
            row = json.loads(line)
            found[arm][row["prompt_id"]] = row["reward"]
    return found


def paired(rewards: Rewards, arm: str) -> Difference:
    """The trained adapter less another arm."""
    found = difference(rewards[TRAINED], rewards[arm])
    assert found is not None, "arms of one run have the same problems"
    return found


def markdown(found: Mapping[int, Rewards], plain: Mapping[int, Rewards], report: Report) -> str:
    """Two tables: accuracies, and paired differences; a line for each seed of the plain loop."""
    seeds = " | ".join(f"seed {seed}" for seed in found)
    rule = "|---" * (len(found) + 2) + "|"
    lines = [f"| accuracy | {seeds} | mean |", rule]
    for arm, figure in zip((*BASELINES, TRAINED), report.figures, strict=False):
        cells = [
            f"{sum(each[arm].values()) / len(each[arm]):.3f}" if arm in each else "-"
            for each in found.values()
        ]
        lines.append(f"| {arm.replace('_', ' ')} | {' | '.join(cells)} | {figure.value:.3f} |")
    lines += ["", f"| trained adapter less | {seeds} | mean |", rule]
    for arm, figure in zip(BASELINES, report.figures[len(BASELINES) + 1 :], strict=True):
        cells = [cell(paired(each, arm)) if arm in each else "-" for each in found.values()]
        low, high = figure.spread
        lines.append(
            f"| {arm.replace('_', ' ')} | {' | '.join(cells)} | {figure.value:+.3f} ({low:+.3f} to {high:+.3f}) |"
        )
    for seed, each in plain.items():
        without, trained = (
            sum(each[arm].values()) / len(each[arm]) for arm in ("no_prefix", "trained")
        )
        gap = difference(each["trained"], each["no_prefix"])
        assert gap is not None, "one list of problems"
        lines += [
            "",
            f"Plain loop, seed {seed}: no prefix {without:.3f}, trained {trained:.3f}; {cell(gap)}.",
        ]
    problems = len(next(iter(found.values()))[TRAINED])
    body = "\n".join(lines)
    return f"""# SmolLM2-135M-Instruct on SVAMP

`python -m benchmarks.real_model`: {problems} held-out problems, greedy answers, a run of the SmolLM2 example per seed.
Differences are paired by problem: mean, its 95 % interval (Agresti and Min 2005), problems better and worse; of the
mean over seeds Student's interval.

{body}
"""


def cell(found: Difference) -> str:
    """One difference as a person reads it."""
    low, high = found.ci95
    return (
        f"{found.mean:+.3f} ({low:+.3f} to {high:+.3f}; {found.better} better, {found.worse} worse)"
    )


@click.command()
@options
@click.option("--seeds", type=click.IntRange(1), default=3, show_default=True)
@click.option(
    "--runs", type=click.Path(path_type=Path), default=Path("runs/real_model"), show_default=True
)
@click.option(
    "--plain", type=click.IntRange(0), default=0, show_default=True, help="Seeds of the plain loop."
)
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Settings of all runs.")
def main(
    path: Path, quick: bool, seeds: int, runs: Path, plain: int, settings: tuple[str, ...]
) -> None:
    """Train, and write the tables."""
    measured, changes = commit(), (*settings, *(QUICK if quick else ()))
    numbers = range(1, (1 if quick else seeds) + 1)
    found = {seed: rewards_of(train(seed, runs, changes)) for seed in numbers}
    plainly = {seed: plain_loop(seed, runs) for seed in range(1, plain + 1)}
    figures = [
        mean_figure(
            f"accuracy, {arm}",
            "share of problems",
            [sum(each[arm].values()) / len(each[arm]) for each in found.values() if arm in each],
        )
        for arm in (*BASELINES, TRAINED)
    ]
    gaps = {arm: [paired(each, arm) for each in found.values() if arm in each] for arm in BASELINES}
    figures += [
        mean_figure(
            f"{TRAINED} less {arm}", "share of problems", [each.mean for each in differences]
        )
        for arm, differences in gaps.items()
    ]
    report = Report(
        "real_model", quick, {"seeds": list(numbers), "set": changes}, figures, gaps, measured
    )
    report.write(path)
    path.with_suffix(".md").write_text(markdown(found, plainly, report), encoding="utf-8")


if __name__ == "__main__":
    main()
