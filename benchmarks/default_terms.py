"""Terms and answers against collapse: chosen on four tasks, then shown on three that no default was chosen on.

    python -m benchmarks.default_terms --json FILE --stage choice     four tasks, five seeds, all arms, the rate held
    python -m benchmarks.default_terms --json FILE --stage shown      three others, ten seeds, the defaults and rivals

GRPO in the sizes and at the rate that `prefixrl init --size tiny` writes, every sample exactly two versions old
(`aged_run.py`), a greedy target. The choice holds the rate, which is where seeds collapse (`exploration.md`); the other
stage has the default schedule, too. *Ended well*: the mean held-out reward over the last quarter of the run is within
0.05 of the best seed of its task, of any arm with the same schedule. *Fell*: an evaluation was 0.2 below an earlier
one. A run that was interrupted goes on (`kept.py`); the results of both stages stand in one file."""

import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Literal

import click
import msgspec

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: two threads are slower than one

from benchmarks.aged_run import AgedRun, Target
from benchmarks.kept import TRAINING, KeptRuns
from benchmarks.newcomer.kept_back import KEPT_BACK
from benchmarks.newcomer.tasks import TASKS
from benchmarks.newcomer.teach import build
from benchmarks.results import ROOT, Figure, Report, commit, last_quarter, mean_figure, options
from prefixrl.common.config.load import load
from prefixrl.common.config.run import RunConfig
from prefixrl.learner.data.problems import load as load_problems
from prefixrl.learner.run.collapse import Collapse
from prefixrl.learner.training import checkpoint

RUNS = ROOT / "runs/default_terms"
PROGRAM = (*TRAINING, "benchmarks/newcomer/*.py", "learner/run/collapse.py")
EXAMPLES = {
    "arithmetic": ROOT / "deploy/examples/arithmetic/run.toml",
    "letters": ROOT / "benchmarks/openings/run.toml",
}
CHOICE, SHOWN = (*EXAMPLES, "legs", "shapes"), tuple(KEPT_BACK)
COMMON = (
    "algorithm.name=grpo",
    "algorithm.minibatches=1",
    "algorithm.max_staleness=2",
    "algorithm.groups_per_iteration=32",
    "algorithm.samples_per_prompt=8",
    "learner.actor_lr=1e-3",
    "learner.dtype=float32",
    "scorer.temperature=0.0",
)
SCHEDULES = {
    "held": ("learner.warmup_ratio=0.0", "learner.min_lr_ratio=1.0"),
    "default": ("learner.warmup_ratio=0.03", "learner.min_lr_ratio=0.1"),
}
ITERATIONS = {"arithmetic": 150, "letters": 200, "legs": 200, "shapes": 200}
KEPT_BACK_ITERATIONS, JUDGED, EVALUATE_EVERY, SAVE_EVERY = 200, 128, 10, 25
WITHIN, FALL = 0.05, 0.2
RUN_FILE = """directory = "run"

[adapter]
model = "adapter"

[target]
model = "target"

[data]
train = "train.jsonl"
eval = "heldout.jsonl"

[rollout]
prefix_tokens = 20

[scorer]
max_new_tokens = 24
"""
"""The run file of a task whose models are taught here."""
TARGET_ENTROPY, ENTROPY_STEP, LARGEST_BONUS = 0.15, 1.15, 0.1
"""Nats per token below which the bonus grows by a factor with each iteration, and above which it shrinks by it."""


@dataclass(frozen=True)
class Arm:
    """The coefficients of an arm, and its answer to a collapse."""

    entropy: float
    kl: float
    on_collapse: Literal["warn", "raise_entropy", "go_back"] = "warn"
    has_target_entropy: bool = False


ARMS: Mapping[str, Arm] = {
    "defaults before": Arm(1e-3, 1e-3),
    "no terms": Arm(0.0, 0.0),
    "entropy 0.01": Arm(0.01, 1e-3),
    "entropy 0.03": Arm(0.03, 1e-3),
    "KL 0.01": Arm(1e-3, 0.01),
    "entropy 0.03, KL 0.01": Arm(0.03, 0.01),
    "target entropy": Arm(1e-3, 1e-3, has_target_entropy=True),
    "raise_entropy": Arm(1e-3, 1e-3, "raise_entropy"),
    "go_back": Arm(1e-3, 1e-3, "go_back"),
}
SHOWN_ARMS = ("defaults before", "entropy 0.03, KL 0.01", "raise_entropy", "go_back")


@dataclass(frozen=True)
class Cell:
    """One run to be made."""

    task: str
    schedule: str
    arm: str
    seed: int
    iterations: int


class Outcome(msgspec.Struct, frozen=True):
    """The outcome of one run."""

    task: str
    schedule: str
    arm: str
    seed: int
    heldout: list[tuple[int, float]]
    """(version, mean reward on held-out problems, one sampled prefix for each)."""
    entropies: list[float]
    """Nats per token, mean of ten iterations."""
    one_text: list[float]
    """Share of rows with the commonest text, mean of ten iterations."""
    answers: list[int]
    """Iterations after which a collapse was answered."""
    wall_s: float

    @property
    def final(self) -> float:
        """Mean held-out reward over the last quarter of the versions."""
        return last_quarter(self.heldout)

    @property
    def has_fallen(self) -> bool:
        """True if an evaluation was `FALL` below an earlier one."""
        rewards = [reward for _, reward in self.heldout]
        return any(max(rewards[: place + 1]) - now >= FALL for place, now in enumerate(rewards))


def run_file(task: str) -> Path:
    """Return the run file of a task, after its models are taught."""
    if task in EXAMPLES:
        return EXAMPLES[task]
    folder = RUNS / task
    if not (folder / "run.toml").exists():
        build({**TASKS, **KEPT_BACK}[task], folder)
        (folder / "run.toml").write_text(RUN_FILE, encoding="utf-8")
    return folder / "run.toml"


def config_of(cell: Cell) -> RunConfig:
    """Return the settings of a run."""
    arm = ARMS[cell.arm]
    return load(
        run_file(cell.task),
        (
            *COMMON,
            *SCHEDULES[cell.schedule],
            f"seed={cell.seed}",
            f"algorithm.iterations={cell.iterations}",
            f"algorithm.entropy={arm.entropy!r}",
            f"algorithm.kl={arm.kl!r}",
            "rollout.groups_per_task=32",
        ),
    )


@cache
def target_of(task: str) -> Target:
    """Return the target of a task, with what it has answered in this process."""
    return Target(config_of(Cell(task, "held", "no terms", 1, 1)))


def trained(cell: Cell) -> Outcome:
    """Train once; judge held-out problems on the way."""
    started_s, config = time.monotonic(), config_of(cell)
    heldout = [problem.prompt() for problem in load_problems(config.data.eval, config.data)]
    run, arm, answers = AgedRun(config, target_of(cell.task)), ARMS[cell.arm], list[int]()
    collapse = Collapse(arm.on_collapse, arm.entropy)
    rewards, entropies, shares = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        for version in range(cell.iterations):
            if version % EVALUATE_EVERY == 0:
                rewards.append((version, run.mean_reward(heldout[:JUDGED])))
            if arm.on_collapse == "go_back" and version % SAVE_EVERY == 0:
                state = checkpoint.TrainerState(version, version, 1)
                checkpoint.save(Path(folder), run.models, state)
            run.fill()
            done = run.train()
            # The figures that alarms look at.
            figures = done.metrics.means | {"commonest_text_fraction": done.commonest_text_fraction}
            entropies.append(figures["entropy"])
            shares.append(figures["commonest_text_fraction"])
            if collapse.add_iteration(version, figures):
                answers.append(version)
                if arm.on_collapse == "go_back":
                    checkpoint.go_back(Path(folder), run.models, collapse.good_iteration)
                    run.install()
            run.models.actor.rate_scale = collapse.rate_scale
            bonus = collapse.entropy
            if arm.has_target_entropy:
                bonus = bonus_towards_target(run.config.algorithm.entropy, figures["entropy"])
            set_entropy(run, bonus)
    rewards.append((cell.iterations, run.mean_reward(heldout[:JUDGED])))
    return Outcome(
        cell.task,
        cell.schedule,
        cell.arm,
        cell.seed,
        rewards,
        means_of_ten(entropies),
        means_of_ten(shares),
        answers,
        round(time.monotonic() - started_s, 1),
    )


def bonus_towards_target(bonus: float, entropy: float) -> float:
    """Return the next coefficient: larger below the target entropy, smaller above it, within bounds."""
    factor = ENTROPY_STEP if entropy < TARGET_ENTROPY else 1 / ENTROPY_STEP
    return min(max(bonus * factor, 1e-4), LARGEST_BONUS)


def set_entropy(run: AgedRun, bonus: float) -> None:
    """Let the next iteration have an entropy bonus."""
    algorithm = run.config.algorithm.model_copy(update={"entropy": bonus})
    run.config = run.config.model_copy(update={"algorithm": algorithm})


def means_of_ten(values: Sequence[float]) -> list[float]:
    """Return the mean of every ten values."""
    return [
        round(statistics.fmean(values[first : first + 10]), 4)
        for first in range(0, len(values), 10)
    ]


def cells_of(stage: str, is_quick: bool) -> Iterator[Cell]:
    """Yield the runs of a stage, seeds outermost."""
    is_choice = stage == "choice"
    tasks, arms = (CHOICE, tuple(ARMS)) if is_choice else (SHOWN, SHOWN_ARMS)
    schedules = ["held"] if is_choice else list(SCHEDULES)
    seeds = range(1, 6 if is_choice else 11)
    if is_quick:
        tasks, arms, seeds = tasks[:1], arms[:1], range(1, 2)
    for seed in seeds:
        for task in tasks:
            for schedule in schedules:
                for arm in arms:
                    iterations = ITERATIONS.get(task, KEPT_BACK_ITERATIONS)
                    yield Cell(task, schedule, arm, seed, 10 if is_quick else iterations)


def run_all(cells: Sequence[Cell], kept: KeptRuns[Outcome], processes: int) -> list[Outcome]:
    """Return the outcomes of all runs; those that are not kept are made, in several processes."""
    for task in {cell.task for cell in cells}:
        run_file(task)
    outcomes = {cell: run for cell in cells if (run := kept.get(cell)) is not None}
    missing = [cell for cell in cells if cell not in outcomes]
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        runs = {pool.submit(trained, cell): cell for cell in missing}
        for number, future in enumerate(as_completed(runs), 1):
            run = outcomes[runs[future]] = future.result()
            kept.add(runs[future], run)
            words = f"{run.task}, {run.schedule}, {run.arm}, seed {run.seed}: {run.final:.3f}"
            print(f"{number} of {len(runs)}: {words}; {run.wall_s:.0f} s", flush=True)
    return [outcomes[cell] for cell in cells]


Groups = Mapping[tuple[str, str, str], Sequence[Outcome]]
"""Runs by task, schedule and arm."""


def grouped(outcomes: Sequence[Outcome]) -> Groups:
    """Return runs by task, schedule and arm."""
    groups: dict[tuple[str, str, str], list[Outcome]] = {}
    for run in outcomes:
        groups.setdefault((run.task, run.schedule, run.arm), []).append(run)
    return groups


def ended_well(groups: Groups, task: str, schedule: str, arm: str) -> list[float]:
    """Return 1 for every seed within `WITHIN` of the best seed of any arm on this task and schedule, else 0."""
    best = max(
        run.final for key, runs in groups.items() if key[:2] == (task, schedule) for run in runs
    )
    return [float(run.final >= best - WITHIN) for run in groups[task, schedule, arm]]


def markdown(outcomes: Sequence[Outcome], report: Report) -> str:
    """Return the page."""
    groups = grouped(outcomes)
    lines = [
        "| task | rate | arm | ended well | mean | worst seeds | fell | seeds with an answer |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (task, schedule, arm), runs in groups.items():
        finals = sorted(run.final for run in runs)
        cells = (
            f"{sum(ended_well(groups, task, schedule, arm)):.0f} of {len(runs)}",
            f"{statistics.fmean(finals):.3f}",
            ", ".join(f"{final:.2f}" for final in finals[:3]),
            str(sum(run.has_fallen for run in runs)),
            str(sum(bool(run.answers) for run in runs)),
        )
        lines.append(f"| {task} | {schedule} | {arm} | {' | '.join(cells)} |")
    table = "\n".join(lines)
    text = (__doc__ or "").split("\n\n")[2]
    return f"""# Default terms against collapse

`python -m benchmarks.default_terms`. {text}

Chosen on: {", ".join(CHOICE)}. Shown on: {", ".join(SHOWN)}.

Commit `{report.commit}`, {report.wall_s:.0f} s of one core.

{table}
"""


def figures(outcomes: Sequence[Outcome]) -> list[Figure]:
    """Return final rewards and shares of seeds that ended well."""
    groups, rows = grouped(outcomes), list[Figure]()
    for (task, schedule, arm), runs in groups.items():
        name = f"{task}, {schedule} rate, {arm}"
        well = ended_well(groups, task, schedule, arm)
        rows.append(mean_figure(f"final reward, {name}", "share", [run.final for run in runs]))
        rows.append(mean_figure(f"ended well, {name}", "share of seeds", well))
    return rows


@click.command()
@options
@click.option("--stage", type=click.Choice(["choice", "shown"]), default="choice")
@click.option("--processes", type=click.IntRange(min=1), default=2, show_default=True)
def main(path: Path, quick: bool, stage: str, processes: int) -> None:
    """Train what is missing of a stage, and write figures and page of both."""
    measured, kept = commit(), KeptRuns(path, Outcome, PROGRAM)
    earlier = msgspec.json.decode(path.read_bytes(), type=Report).details if path.is_file() else []
    cells = list(cells_of(stage, quick))
    outcomes = {
        (run.task, run.schedule, run.arm, run.seed): run
        for run in (*msgspec.convert(earlier, list[Outcome]), *run_all(cells, kept, processes))
    }
    runs = list(outcomes.values())
    settings = {"common": COMMON, "schedules": SCHEDULES, "arms": ARMS}
    report = Report("default_terms", quick, settings, figures(runs), runs, measured)
    report.wall_s = round(sum(run.wall_s for run in runs))
    report.write(path)
    kept.remove()
    path.with_suffix(".md").write_text(markdown(runs, report), encoding="utf-8")


if __name__ == "__main__":
    main()
