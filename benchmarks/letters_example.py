"""The letters example by its run file, beside what needs no training and beside a plain loop.

    python -m benchmarks.letters_example --json FILE

FILE.md is written beside it. Where it was interrupted, the same command goes on (`kept.py`).

The system's runs are `prefixrl launch deploy/examples/letters/run.toml`, four daemons as a user starts them; S is
`algorithm.max_staleness`. The plain loop (`plain_grpo.py`) has the same sizes, data, target and number of samples, and
the run file's rate without a schedule; with delay d every sample is d versions old. It has it easier in one thing: its
target is greedy in training too, so that a prefix has one reward, and each is made once (`aged_run.py`). Accuracies
are mean rewards of greedy answers on the held-out problems. The *best opening per question* is what a perfect choice
among the openings that the adapter was taught would earn. *Reached* is the number of iterations until ten in a row had
a mean reward of 0.9 in training."""

import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import click
import msgspec
import numpy as np

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: two threads are slower than one

from transformers import AutoTokenizer

from benchmarks.aged_run import Target
from benchmarks.kept import TRAINING, KeptRuns
from benchmarks.openings.arms import plain_loop
from benchmarks.results import ROOT, Figure, Report, commit, mean_figure, options, t_interval
from prefixrl.common.config.load import load
from prefixrl.common.config.run import RunConfig
from prefixrl.common.evaluation.accuracy import bootstrap
from prefixrl.common.wire.messages.groups import Prompt
from prefixrl.common.wire.packing import pack_tokens
from prefixrl.deploy.examples.letters.problems import OPERATIONS
from prefixrl.learner.data.problems import load as load_problems

RUN_FILE = ROOT / "deploy/examples/letters/run.toml"
RUNS = ROOT / "runs/letters_example"
PROGRAM = (*TRAINING, "deploy/examples/letters/*.py", "benchmarks/plain_grpo.py")
SPAN, ENOUGH = 10, 0.9
SYSTEM, PLAIN = "system", "plain loop"
SETTINGS: dict[str, tuple[str, tuple[str, ...]]] = {
    "system, S = 2": (SYSTEM, ()),
    "system, S = 0": (SYSTEM, ("algorithm.max_staleness=0",)),
    "system, S = 2, 100 iterations": (SYSTEM, ("algorithm.iterations=100",)),
    "system, S = 2, 100 iterations, lr 1e-3": (
        SYSTEM,
        ("algorithm.iterations=100", "learner.actor_lr=1e-3"),
    ),
    "plain loop, no delay": (PLAIN, ("algorithm.max_staleness=0",)),
    "plain loop, delay 2": (PLAIN, ()),
}
"""The trainer, and KEY=VALUE over the example's run file, by the name in the table."""
PAIRS = {"system, S = 2": "plain loop, delay 2", "system, S = 0": "plain loop, no delay"}
"""The plain loop that a setting is compared with, at the same age and number of samples."""
SEEDS, QUICK = (1, 2, 3), ("algorithm.iterations=10", "algorithm.groups_per_iteration=8")


class Outcome(msgspec.Struct, frozen=True):
    """The outcome of one run."""

    setting: str
    seed: int
    before: list[float]
    """Reward of each held-out problem, greedy, before training."""
    after: list[float]
    rewards: list[float]
    """Mean training reward of each iteration."""
    entropies: list[float]
    """Nats per token, of each iteration."""
    samples: int
    """Prefixes that were trained."""
    wall_s: float

    @property
    def reached(self) -> int | None:
        """Iterations up to the first span of `SPAN` in a row with a mean reward of `ENOUGH`."""
        ends = range(SPAN, len(self.rewards) + 1)
        return next(
            (end for end in ends if statistics.fmean(self.rewards[end - SPAN : end]) >= ENOUGH),
            None,
        )


def by_system(name: str, config: RunConfig, changes: Sequence[str]) -> Outcome:
    """Launch a run and read what it left."""
    started_s, directory = time.monotonic(), RUNS / f"{name.replace(' ', '')}-{config.seed}"
    given = (f"directory={directory}", f"seed={config.seed}", *changes)
    flags = [flag for each in given for flag in ("--set", each)]
    subprocess.run(
        [sys.executable, "-m", "prefixrl.deploy", "launch", str(RUN_FILE), "--fresh", *flags],
        check=True,
    )
    lines = [
        json.loads(line)
        for line in (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    figures = [line["figures"] for line in lines]
    return Outcome(
        setting=name,
        seed=config.seed,
        before=judged(directory, "untrained_adapter"),
        after=judged(directory, "trained_adapter"),
        rewards=[each["reward"] for each in figures],
        entropies=[each["entropy"] for each in figures],
        samples=round(sum(each["rows"] for each in figures)),
        wall_s=round(time.monotonic() - started_s, 1),
    )


def judged(directory: Path, arm: str) -> list[float]:
    """The reward of each held-out problem of an arm, greedy, by problem."""
    path = directory / f"evaluations/{arm}.greedy.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [row["reward"] for row in sorted(rows, key=lambda row: str(row["prompt_id"]))]


def by_plain_loop(name: str, config: RunConfig, heldout: Sequence[Prompt]) -> Outcome:
    """Train by the plain loop with a greedy target."""
    started_s, judge = time.monotonic(), Target(greedy(config))
    loop, feed = plain_loop(config, heldout, judge)

    def rewards() -> list[float]:
        written = loop.sample(loop.model, [each.question for each in heldout], None).prefixes()
        return rewards_of(judge, heldout, written)

    before = rewards()
    iterations = [loop.iterate(feed()) for _ in range(config.algorithm.iterations or 0)]
    return Outcome(
        setting=name,
        seed=config.seed,
        before=before,
        after=rewards(),
        rewards=[each["reward"] for each in iterations],
        entropies=[each["entropy"] for each in iterations],
        samples=len(iterations)
        * config.algorithm.groups_per_iteration
        * config.algorithm.samples_per_prompt,
        wall_s=round(time.monotonic() - started_s, 1),
    )


def greedy(config: RunConfig) -> RunConfig:
    """The same with a greedy target."""
    return config.model_copy(
        update={"scorer": config.scorer.model_copy(update={"temperature": 0.0})}
    )


def rewards_of(
    judge: Target, problems: Sequence[Prompt], prefixes: Sequence[Sequence[int]]
) -> list[float]:
    """The reward of each problem after its prefix, in the adapter's tokens."""
    packed = [pack_tokens(np.asarray(each, dtype=np.int32)) for each in prefixes]
    return [given.reward for given in judge.verdicts(list(zip(problems, packed, strict=True)))]


def untrained(config: RunConfig, heldout: Sequence[Prompt]) -> dict[str, list[float]]:
    """Rewards of what needs no training: the target alone, each opening, the best opening of each question."""
    judge, tokenizer = Target(greedy(config)), AutoTokenizer.from_pretrained(config.adapter.model)
    openings = {
        each.opening: tokenizer.encode(each.opening, add_special_tokens=False)
        for each in OPERATIONS
    }
    found = {"target alone": rewards_of(judge, heldout, [[]] * len(heldout))}
    of_opening = {
        name: rewards_of(judge, heldout, [ids] * len(heldout)) for name, ids in openings.items()
    }
    best = max(of_opening, key=lambda name: statistics.fmean(of_opening[name]))
    found[f"best fixed prefix ({best})"] = of_opening[best]
    found["best opening per question"] = [
        max(each) for each in zip(*of_opening.values(), strict=True)
    ]
    return found


def run_all(seeds: Sequence[int], changes: Sequence[str], kept: KeptRuns[Outcome]) -> list[Outcome]:
    """Every setting of every seed, seeds outermost."""
    outcomes = []
    for seed in seeds:
        for name, (who, own) in SETTINGS.items():
            given = (*own, *changes)
            config = load(RUN_FILE, (f"seed={seed}", *given))
            key = (name, seed, given)
            run = kept.get(key)
            if run is None:
                heldout = heldout_of(config)
                run = (
                    by_system(name, config, given)
                    if who == SYSTEM
                    else by_plain_loop(name, config, heldout)
                )
                kept.add(key, run)
            outcomes.append(run)
            print(
                f"{name}, seed {seed}: {told(run.before)} -> {told(run.after)}, reached {run.reached}",
                flush=True,
            )
    return outcomes


def heldout_of(config: RunConfig) -> list[Prompt]:
    """The held-out problems, in the order of their ids."""
    problems = [each.prompt() for each in load_problems(config.data.eval, config.data)]
    return sorted(problems, key=lambda each: each.prompt_id)


def told(rewards: Sequence[float]) -> str:
    """Mean and interval over problems."""
    return "{:.3f} ({:.3f} to {:.3f})".format(statistics.fmean(rewards), *bootstrap(rewards))


def of(outcomes: Sequence[Outcome], setting: str) -> list[Outcome]:
    """The seeds of a setting."""
    return [each for each in outcomes if each.setting == setting]


def figures_of(outcomes: Sequence[Outcome], without: dict[str, list[float]]) -> list[Figure]:
    """Accuracies: of one way of answering over problems, of a setting over seeds."""
    kind = "95 % bootstrap interval over problems"
    found = [
        Figure(
            name, "accuracy", statistics.fmean(each), len(each), bootstrap(each), spread_kind=kind
        )
        for name, each in without.items()
    ]
    for setting in SETTINGS:
        against = PAIRS.get(setting, "")
        after, its = (
            [statistics.fmean(run.after) for run in of(outcomes, name)]
            for name in (setting, against)
        )
        found.append(
            mean_figure(f"adapter after training, {setting}", "accuracy", after, its, against)
        )
    return found


def markdown(outcomes: Sequence[Outcome], without: dict[str, list[float]], report: Report) -> str:
    """The page beside the figures."""
    lines = ["| without training | accuracy |", "|---|---|"]
    lines += [f"| {name} | {told(rewards)} |" for name, rewards in without.items()]
    lines += [f"| adapter before training | {told(outcomes[0].before)} |", ""]
    seeds = sorted({run.seed for run in outcomes})
    heads = [
        "trained by",
        *(f"seed {seed}" for seed in seeds),
        "mean over seeds",
        "reward, last 10",
        "reached",
        "samples",
    ]
    lines += [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for setting in SETTINGS:
        runs = of(outcomes, setting)
        mean, (low, high) = t_interval([statistics.fmean(run.after) for run in runs])
        over = f"{mean:.3f}" + (
            f" ({max(0.0, low):.3f} to {min(1.0, high):.3f})" if low < high else ""
        )
        last = statistics.fmean(statistics.fmean(run.rewards[-SPAN:]) for run in runs)
        reached = ", ".join("never" if run.reached is None else str(run.reached) for run in runs)
        cells = [
            setting,
            *(told(run.after) for run in runs),
            over,
            f"{last:.3f}",
            reached,
            f"{runs[0].samples:,}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    body = "\n".join(lines)
    return f"""# The letters example

`python -m benchmarks.letters_example`: the letters example (`deploy/examples/letters`) by its run file. Mean rewards of
greedy answers on {len(outcomes[0].after)} held-out problems. In brackets 95 % intervals:
of one run by bootstrap over problems (Wilson's where all have one reward), of the mean Student's over seeds, where they
differ. *Reward, last 10*: mean training reward of the last ten iterations, with sampled prefixes and, but for the plain
loop, sampled completions. *Reached*: iterations until that was 0.9, by seed. *Samples*: trained prefixes of a run.

Commit `{report.commit}`, {report.machine["cores"]} cores of {report.machine["cpu"]}, {report.wall_s:.0f} s.

{body}
"""


@click.command()
@options
def main(path: Path, quick: bool) -> None:
    """Train by the rule and by the plain loop, and compare them with what needs no training."""
    warnings.filterwarnings("ignore")
    path.parent.mkdir(parents=True, exist_ok=True)
    measured, kept = commit(), KeptRuns(path, Outcome, PROGRAM)
    seeds, changes = ((1,), QUICK) if quick else (SEEDS, ())
    outcomes = run_all(seeds, changes, kept)
    config = load(RUN_FILE)
    without = untrained(config, heldout_of(config))
    settings = {"settings": SETTINGS, "seeds": seeds, "changes": changes}
    report = Report(
        "letters_example", quick, settings, figures_of(outcomes, without), outcomes, measured
    )
    report.wall_s = round(sum(run.wall_s for run in outcomes), 1)
    report.write(path)
    kept.remove()
    text = markdown(outcomes, without, report)
    path.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
