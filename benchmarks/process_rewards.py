"""Process rewards beside outcomes alone, on whole answers of more than 30 tokens with one reward each.

    python -m benchmarks.process_rewards --json FILE

FILE.md and FILE.png are written beside it. Where it was interrupted, the same command goes on (`kept.py`).

The task is the direct arithmetic example with 24 digits in place of 8: an answer of 31 to 35 tokens, right on a quarter
of the problems at first. Both arms are `rloo` with whitening, synchronous, on the same prompts with the same draws;
`prime` adds the implicit reward model at its defaults, but for its rate: twice the adapter's, as published."""

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import click
import msgspec

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: two threads are slower than one

import matplotlib
import torch

matplotlib.use("Agg")
from matplotlib import pyplot

from benchmarks.kept import KeptRuns
from benchmarks.results import ROOT, Figure, Report, commit, mean_figure, options, t_interval
from prefixrl.deploy.examples.arithmetic import problems
from prefixrl.deploy.examples.arithmetic.build import (
    batches,
    make_model,
    make_tokenizer,
    train,
    worked_lessons,
)
from prefixrl.deploy.examples.arithmetic_direct.build import POLICY, whole_answer

DIGITS = 24
BAR = 0.8
SMOOTHED = 5
"""Iterations over which the reward of samples is averaged before it is held against the bar."""
ACTOR_LR = 2.5e-4
COMMON = (
    "algorithm.whiten=true",
    "algorithm.kl=0",
    "algorithm.entropy=0",
    "algorithm.max_staleness=0",
    "algorithm.groups_per_iteration=32",
    "algorithm.minibatches=2",
    f"learner.actor_lr={ACTOR_LR}",
    "rollout.answer_tokens=48",
    "evaluation.problems=256",
    "checkpoint.every=0",
)
ARMS = {
    "outcome": ("algorithm.name=rloo",),
    "prime": ("algorithm.name=prime", f"implicit_reward.lr={2 * ACTOR_LR}"),
}
PROGRAM = (
    "learner/training/*.py",
    "benchmarks/process_rewards.py",
    "deploy/examples/arithmetic*/*.py",
)


@dataclass(frozen=True)
class Size:
    """Seeds, and what each of them runs."""

    seeds: tuple[int, ...]
    iterations: int
    lessons: int
    """Steps in which the policy is taught to work problems out."""


FULL = Size((1, 2, 3, 4, 5), 100, 1500)
QUICK = Size((1,), 4, 60)


class Outcome(msgspec.Struct, frozen=True):
    """One run."""

    arm: str
    seed: int
    rewards: list[float]
    """Mean reward of the trained samples, by iteration."""
    rankings: list[float]
    """Pairwise accuracy of the reward model, by iteration with groups of right and wrong; empty without a model."""
    final: float
    """Accuracy of the trained policy on held-out problems, greedy."""
    wall_s: float
    mixed: list[float] = []
    """Share of groups with right and wrong answers, by iteration."""

    @property
    def steps_to_bar(self) -> int | None:
        """First iteration from which the smoothed reward has reached the bar; None where it never does."""
        for end in range(SMOOTHED, len(self.rewards) + 1):
            if sum(self.rewards[end - SMOOTHED : end]) / SMOOTHED >= BAR:
                return end
        return None


def build(folder: Path, lessons: int) -> None:
    """Write problems and policy; a policy that mostly follows one habit, carried out without a fault."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    problems.DIGITS = DIGITS
    taken: set[tuple[int, ...]] = set()
    for name, count in (("heldout", 256), ("train", 4096)):
        rows = islice(problems.stream(random.Random(name), taken), count)
        problems.write_jsonl(folder / f"{name}.jsonl", name, rows)
    tokenizer = make_tokenizer()
    policy = make_model(POLICY, tokenizer)
    answers = worked_lessons(
        problems.stream(random.Random("policy"), taken), whole_answer, random.Random("answers")
    )
    train(policy, batches(tokenizer, answers), lessons)
    policy.save_pretrained(folder / "policy")
    tokenizer.save_pretrained(folder / "policy")


def run(arm: str, seed: int, size: Size, task: Path) -> Outcome:
    """Launch one run to its end and read what it left."""
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        given = (
            f"directory={folder}/run",
            f"seed={seed}",
            f"adapter.model={task}/policy",
            f"data.train={task}/train.jsonl",
            f"data.eval={task}/heldout.jsonl",
            f"algorithm.iterations={size.iterations}",
            *COMMON,
            *ARMS[arm],
        )
        flags = [part for each in given for part in ("--set", each)]
        run_file = str(ROOT / "deploy/examples/arithmetic_direct/run.toml")
        command = [sys.executable, "-m", "prefixrl.deploy", "launch", run_file, *flags]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{arm}, seed {seed}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
        lines = [
            json.loads(line) for line in Path(folder, "run/metrics.jsonl").read_text().splitlines()
        ]
        summary = json.loads(Path(folder, "run/summary.json").read_text())
    figures = [line["figures"] for line in lines]
    rankings = [
        each["reward_model_accuracy"] for each in figures if "reward_model_accuracy" in each
    ]
    final = summary["accuracy"]["trained_adapter"]
    rewards = [each["reward"] for each in figures]
    mixed = [1.0 - each["uniform_groups_fraction"] for each in figures]
    return Outcome(
        arm, seed, rewards, rankings, final, round(time.monotonic() - started_s, 1), mixed
    )


def of(outcomes: Sequence[Outcome], arm: str) -> list[Outcome]:
    """The runs of an arm, by seed."""
    return sorted((each for each in outcomes if each.arm == arm), key=lambda each: each.seed)


def figures_of(outcomes: Sequence[Outcome], iterations: int) -> list[Figure]:
    """Per arm: iterations to the bar (all of them where it is not reached), final accuracy, best ranking."""
    found = []
    for arm in dict.fromkeys(each.arm for each in outcomes):
        cell = of(outcomes, arm)
        steps = [float(each.steps_to_bar or iterations) for each in cell]
        found.append(mean_figure(f"iterations to a reward of {BAR}, {arm}", "iterations", steps))
        found.append(mean_figure(f"final accuracy, {arm}", "share", [each.final for each in cell]))
        if ranked := [each for each in cell if each.rankings]:
            best = [max(_smoothed(each.rankings)) for each in ranked]
            found.append(mean_figure(f"best pairwise accuracy, {arm}", "share", best))
            steps = [float(_first_above(each.rankings) or iterations) for each in ranked]
            found.append(
                mean_figure(
                    f"iterations to a pairwise accuracy of {BAR}, {arm}", "iterations", steps
                )
            )
    return found


def _first_above(values: Sequence[float]) -> int | None:
    """First iteration at which the smoothed values are above the bar; None where they never are."""
    smoothed = _smoothed(values)
    return next(
        (len(values) - len(smoothed) + at for at, each in enumerate(smoothed, 1) if each > BAR),
        None,
    )


def _smoothed(values: Sequence[float]) -> list[float]:
    width = min(SMOOTHED, len(values))
    return [sum(values[end - width : end]) / width for end in range(width, len(values) + 1)]


def markdown(outcomes: Sequence[Outcome], size: Size, report: Report) -> str:
    """The page beside the figures."""
    lines = [
        f"| arm | iterations to {BAR}, by seed | final accuracy | mean reward of samples | pairwise accuracy |",
        "|---|---|---|---|---|",
    ]
    for arm in dict.fromkeys(each.arm for each in outcomes):
        cell = of(outcomes, arm)
        steps = ", ".join(str(each.steps_to_bar or "never") for each in cell)
        reward = _interval([sum(each.rewards) / len(each.rewards) for each in cell])
        best = _rankings([each for each in cell if each.rankings])
        lines.append(
            f"| {arm} | {steps} | {_interval([each.final for each in cell])} | {reward} | {best} |"
        )
    table = "\n".join(lines)
    return f"""# Process rewards beside outcomes alone

`python -m benchmarks.process_rewards`: answers of 31 to 35 tokens, one reward each, {size.iterations} iterations of 32
groups of 8, {len(size.seeds)} seeds, synchronous. Rewards are means over {SMOOTHED} iterations; accuracy is greedy, on
256 held-out problems; in brackets 95 % intervals of the mean over seeds. Pairwise accuracy is that of the reward model,
over the groups with right and wrong answers: the best mean of {SMOOTHED} iterations, and the first one above {BAR}.

Commit `{report.commit}`, {report.machine["cores"]} cores of {report.machine["cpu"]}, {report.wall_s:.0f} s.

{table}
"""


def _rankings(ranked: Sequence[Outcome]) -> str:
    """Best and last pairwise accuracies by seed, and the share of groups that they are over."""
    if not ranked:
        return "-"
    cells = []
    for each in ranked:
        smoothed, mixed = _smoothed(each.rankings), _smoothed(each.mixed)
        cells.append(
            f"seed {each.seed}: best {max(smoothed):.3f}, above {BAR} from {_first_above(each.rankings) or 'never'}, "
            f"at the end {smoothed[-1]:.3f} (over {mixed[0]:.0%} of the groups at first, {mixed[-1]:.0%} at the end)"
        )
    return "; ".join(cells)


def _interval(values: Sequence[float]) -> str:
    mean, (low, high) = t_interval(values)
    return f"{mean:.3f} [{low:.3f}, {high:.3f}]"


def draw(outcomes: Sequence[Outcome], path: Path) -> None:
    """Smoothed reward by iteration, a line per seed; beside it the reward model's accuracy."""
    figure, (rewards, rankings) = pyplot.subplots(1, 2, figsize=(9, 3.4), sharey=True)
    for color, arm in zip(("C0", "C1"), ARMS, strict=True):
        for index, each in enumerate(of(outcomes, arm)):
            rewards.plot(
                _smoothed(each.rewards), color=color, linewidth=1, label=None if index else arm
            )
            if each.rankings:
                rankings.plot(_smoothed(each.rankings), color=color, linewidth=1)
    rewards.set_title("reward", fontsize=9)
    rewards.legend(fontsize=7)
    rankings.set_title("pairwise accuracy of the reward model", fontsize=9)
    for axis in (rewards, rankings):
        axis.set_xlabel("iteration")
        axis.set_ylim(0, 1.05)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


@click.command()
@options
@click.option("--only", multiple=True, metavar="ARM", help="Only this arm; may be repeated.")
@click.option("--seeds", type=click.IntRange(1), help="Only so many seeds.")
def main(path: Path, quick: bool, only: tuple[str, ...], seeds: int | None) -> None:
    """Compare outcomes alone with process rewards beside them."""
    size = QUICK if quick else FULL
    size = replace(size, seeds=size.seeds[:seeds])
    path.parent.mkdir(parents=True, exist_ok=True)
    measured, kept = commit(), KeptRuns(path, Outcome, PROGRAM)
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as folder:
        build(Path(folder), size.lessons)
        for seed in size.seeds:
            for arm in only or ARMS:
                key = (arm, seed, size, COMMON, ARMS[arm])
                found = kept.get(key) or run(arm, seed, size, Path(folder))
                if kept.get(key) is None:
                    kept.add(key, found)
                print(
                    f"{arm}, seed {seed}: {found.steps_to_bar}, final {found.final:.3f}, {found.wall_s:.0f} s",
                    flush=True,
                )
                outcomes.append(found)
    figures = figures_of(outcomes, size.iterations)
    report = Report(
        "process_rewards",
        quick,
        {"size": size, "common": COMMON, "arms": ARMS},
        figures,
        outcomes,
        measured,
    )
    report.wall_s = round(sum(each.wall_s for each in outcomes), 1)
    report.write(path)
    kept.remove()
    draw(outcomes, path.with_suffix(".png"))
    text = markdown(outcomes, size, report)
    path.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
