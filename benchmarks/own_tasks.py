"""Three tasks of a new user's own by what `prefixrl init` prints, with nothing changed, and at a quarter of its rates.

    python -m benchmarks.own_tasks --json FILE

FILE.md is written beside it. Where it was interrupted, the same command goes on (`kept.py`). The tasks and their models
are in `newcomer/`, taught once, into `runs/own_tasks`. When they were made, `init` printed a quarter of its rates,
those of the examples. That it shows fewer gains is why it prints others; no third value was tried.

A run is one process, every sample exactly two versions old, on the learner's own code, with a greedy target
(`aged_run.py`). *Reached*: iterations until ten in a row had a mean reward of 0.9 in training. *Alarms*: iterations
through which they rang. *Says*: the first words of the sentence with which a run ends, and names the page with the
remedy. Accuracies are of one sampled prefix for each held-out problem, 120 of `units` and 60 of the others, with the
same draws before and after training."""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import click
import msgspec

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: two threads are slower than one

from benchmarks.aged_run import AgedRun, Target
from benchmarks.kept import TRAINING, KeptRuns
from benchmarks.letters_example import told
from benchmarks.newcomer.tasks import TASKS
from benchmarks.newcomer.teach import build
from benchmarks.results import ROOT, Figure, Report, commit, mean_figure, options
from prefixrl.common.config.load import load
from prefixrl.common.config.run import RunConfig
from prefixrl.common.evaluation.accuracy import difference
from prefixrl.common.run.documents import AlarmSpans
from prefixrl.common.seeds import derive
from prefixrl.common.wire.messages.groups import GroupTask
from prefixrl.deploy.runs.report import gain_in_words
from prefixrl.learner.data.problems import load as load_problems
from prefixrl.learner.run.alarms import Alarms

RUNS = ROOT / "runs/own_tasks"
PROGRAM = (*TRAINING, "benchmarks/newcomer/*.py")
SPAN, ENOUGH = 10, 0.9
SEEDS, QUICK = (1, 2, 3), ("algorithm.iterations=10", "algorithm.groups_per_iteration=8")
SETTINGS: dict[str, tuple[str, ...]] = {
    "as printed": (),
    "a quarter of the rates": ("learner.actor_lr=2.5e-4", "learner.critic_lr=1e-3"),
}
"""KEY=VALUE over what `init` prints, by the name in the table."""


class Outcome(msgspec.Struct, frozen=True):
    """The outcome of one run."""

    task: str
    setting: str
    seed: int
    alone: list[float]
    """Reward of each held-out problem, greedy: the target without a prefix."""
    before: list[float]
    """The same after the adapter's prefix, before training."""
    after: list[float]
    rewards: list[float]
    """Mean training reward of each iteration."""
    entropies: list[float]
    """Nats per token, of each iteration."""
    alarms: list[tuple[str, int, int]]
    """Kind, first and last iteration of each alarm that rang."""
    said: str
    """The sentence of the report about the gain."""
    wall_s: float

    @property
    def has_learned(self) -> bool:
        """True if the run says so."""
        return self.said.startswith("a gain")

    @property
    def is_named(self) -> bool:
        """True if the run that did not learn says so, with the page that has the remedy."""
        return self.said.startswith("no gain shown") and "your_own_task" in self.said

    @property
    def reached(self) -> int | None:
        """Iterations up to the first span of `SPAN` in a row with a mean reward of `ENOUGH`."""
        ends = range(SPAN, len(self.rewards) + 1)
        return next(
            (end for end in ends if statistics.fmean(self.rewards[end - SPAN : end]) >= ENOUGH),
            None,
        )


def run_file(task: str) -> Path:
    """Return the run file that `prefixrl init --size tiny` prints for a task, after its models are taught."""
    folder = RUNS / task
    if not (folder / "adapter/model.safetensors").exists():
        build(TASKS[task], folder)
    paths = {
        "adapter": "adapter",
        "target": "target",
        "data": "train.jsonl",
        "eval": "heldout.jsonl",
    }
    flags = [word for name, path in paths.items() for word in (f"--{name}", str(folder / path))]
    command = [sys.executable, "-m", "prefixrl.deploy", "init", "--size", "tiny", *flags]
    printed = subprocess.run(command, check=True, capture_output=True, text=True)
    (folder / "run.toml").write_text(printed.stdout, encoding="utf-8")
    return folder / "run.toml"


def trained(task: str, setting: str, seed: int, changes: Sequence[str], target: Target) -> Outcome:
    """Train in one process, every sample exactly `algorithm.max_staleness` versions old, with alarms as a run has."""
    started_s = time.monotonic()
    config = config_of(task, seed, changes)
    heldout = [each.prompt() for each in load_problems(config.data.eval, config.data)]
    run, alarms, spans, lines = AgedRun(config, target), Alarms(), AlarmSpans(), []

    def rewards() -> dict[str, float]:
        """Judge one sampled prefix for each held-out problem, by the same draws at any version."""
        tasks = [
            GroupTask(place, each, derive(0, "evaluation", place))
            for place, each in enumerate(heldout)
        ]
        verdicts = target.judge(run._write(tasks, 1))
        return {
            each.prompt_id: given.reward for each, (given,) in zip(heldout, verdicts, strict=True)
        }

    before = rewards()
    for _ in range(config.algorithm.iterations or 0):
        run.fill()
        done = run.train()
        top = done.commonest_text_fraction
        lines.append(figures := done.metrics.means | {"commonest_text_fraction": top})
        alarms.new_sentences(run.version - 1, figures)
        spans.add(run.version - 1, alarms.ringing)
    after = rewards()
    found = difference(after, before)
    assert found, "both were judged on the same problems"
    return Outcome(
        task=task,
        setting=setting,
        seed=seed,
        alone=[given.reward for given in target.verdicts([(each, b"") for each in heldout])],
        before=list(before.values()),
        after=list(after.values()),
        rewards=[round(each["reward"], 4) for each in lines],
        entropies=[round(each["entropy"], 4) for each in lines],
        alarms=[(span.kind, span.first, span.last) for span in spans.found],
        said=gain_in_words(found, run.version),
        wall_s=round(time.monotonic() - started_s, 1),
    )


def config_of(task: str, seed: int, changes: Sequence[str]) -> RunConfig:
    """Return the settings of a task: a greedy target, so that a prefix has one reward, and rows held together."""
    size = load(run_file(task)).algorithm.groups_per_iteration
    fixed = (f"seed={seed}", "scorer.temperature=0.0", f"rollout.groups_per_task={size}")
    return load(RUNS / task / "run.toml", (*fixed, *changes))


def run_all(seeds: Sequence[int], changes: Sequence[str], kept: KeptRuns[Outcome]) -> list[Outcome]:
    """Every setting of every task with every seed, seeds outermost."""
    outcomes: list[Outcome] = []
    targets: dict[str, Target] = {}
    for seed in seeds:
        for setting, own in SETTINGS.items():
            for task in TASKS:
                given = (*own, *changes)
                key = (task, setting, seed, given)
                run = kept.get(key)
                if run is None:
                    if task not in targets:
                        targets[task] = Target(config_of(task, seed, ()))
                    run = trained(task, setting, seed, given, targets[task])
                    kept.add(key, run)
                outcomes.append(run)
                print(
                    f"{task}, {setting}, seed {seed}: {told(run.before)} -> {told(run.after)}; {run.said}",
                    flush=True,
                )
    return outcomes


def figures_of(outcomes: Sequence[Outcome]) -> list[Figure]:
    """Accuracies over seeds beside those before training."""
    found = []
    for task in TASKS:
        for setting in SETTINGS:
            runs = [each for each in outcomes if (each.task, each.setting) == (task, setting)]
            if not runs:
                continue
            after, before = (
                [statistics.fmean(getattr(run, name)) for run in runs]
                for name in ("after", "before")
            )
            found.append(
                mean_figure(f"{task}, {setting}", "accuracy", after, before, "before training")
            )
    return found


def markdown(outcomes: Sequence[Outcome], report: Report) -> str:
    """The page beside the figures."""
    heads = (
        "task",
        "values",
        "seed",
        "target alone",
        "adapter before",
        "adapter after",
        "reached",
        "alarms",
        "says",
    )
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for run in sorted(
        outcomes, key=lambda each: (list(TASKS).index(each.task), each.setting, each.seed)
    ):
        rang = ", ".join(f"{kind} {first} to {last}" for kind, first, last in run.alarms)
        cells = [
            run.task,
            run.setting,
            str(run.seed),
            *map(told, (run.alone, run.before, run.after)),
        ]
        cells += [
            "never" if run.reached is None else str(run.reached),
            rang,
            run.said.partition(":")[0],
        ]
        lines.append(f"| {' | '.join(cells)} |")
    learned = {
        name: [run.has_learned for run in outcomes if run.setting == name] for name in SETTINGS
    }
    counts = "; ".join(
        f"{name}: {sum(each)} of {len(each)} runs show a gain" for name, each in learned.items()
    )
    silent = sum(not run.has_learned and not run.is_named for run in outcomes)
    text = (__doc__ or "").split("\n\n")[3]
    return f"""# Tasks of one's own

`python -m benchmarks.own_tasks`. {text}

Commit `{report.commit}`, {report.machine["cores"]} cores of {report.machine["cpu"]}, {report.wall_s:.0f} s.

{counts}; without a gain and without a word of it: {silent}.

{chr(10).join(lines)}
"""


@click.command()
@options
def main(path: Path, quick: bool) -> None:
    """Run every task as a new user does, and at a quarter of the rates."""
    path.parent.mkdir(parents=True, exist_ok=True)
    measured, kept = commit(), KeptRuns(path, Outcome, PROGRAM)
    outcomes = run_all(SEEDS[:1] if quick else SEEDS, QUICK if quick else (), kept)
    report = Report(
        "own_tasks",
        quick,
        {"settings": SETTINGS, "seeds": SEEDS},
        figures_of(outcomes),
        outcomes,
        measured,
    )
    report.wall_s = round(sum(run.wall_s for run in outcomes), 1)
    report.write(path)
    kept.remove()
    text = markdown(outcomes, report)
    path.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
