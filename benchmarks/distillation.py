"""Distillation from the target: does the target's own opinion of a prefix, beside its verdict, teach sooner?

    python -m benchmarks.distillation --json FILE        FILE.md beside it; where it was interrupted, it goes on

The term is the reverse KL from the adapter to the target's next-token probabilities on the adapter's prefix, after the
same prompt. It is `algorithm.kl` (k1 in the reward) with the target in the place of the reference, so nothing of the
product is changed but the model that the learner asks. It needs one tokenizer for both models, which of the shipped
tasks only arithmetic has. Letters' adapter and target have vocabularies of 330 and 35 tokens. In the SmolLM2 example
both are one model, so that the term is the KL to the start, which `algorithm.kl` is anyway.

GRPO in one process, every sample exactly two versions old (`aged_run.py`), a greedy target, rates constant: those that
`prefixrl init --size tiny` writes, and four times them. *To 0.8*: iterations until the held-out reward has reached 0.8
twice in a row; a run that never does counts as its whole length."""

import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import click
import msgspec

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: two threads are slower than one

from benchmarks.aged_run import AgedRun, Target
from benchmarks.exploration import AGE, COMMON, RATES
from benchmarks.kept import TRAINING, KeptRuns
from benchmarks.results import ROOT, Figure, Report, commit, last_quarter, mean_figure, options
from prefixrl.common.config.load import load
from prefixrl.common.config.run import RunConfig
from prefixrl.common.models.loading import load_model
from prefixrl.learner.data.problems import load as load_problems
from prefixrl.learner.models.model import Actor

RUN_FILE = ROOT / "deploy/examples/arithmetic/run.toml"
ARMS = {
    "no KL": (False, 0.0),
    "KL to the start, 0.01 (the example's)": (False, 0.01),
    "KL to the target, 0.01": (True, 0.01),
    "KL to the target, 0.05": (True, 0.05),
    "KL to the target, 0.2": (True, 0.2),
}
"""True where the target is the reference; the coefficient of the KL."""
PLAIN = "KL to the start, 0.01 (the example's)"
SEEDS, ITERATIONS, QUICK_ITERATIONS, HELDOUT, EVALUATE_EVERY, GOAL = (1, 2, 3), 150, 10, 128, 5, 0.8


class Run(msgspec.Struct, frozen=True):
    """The outcome of one run."""

    heldout: list[tuple[int, float]]
    """(version, mean reward on held-out problems, one sampled prefix each)."""
    wall_s: float

    @property
    def final(self) -> float:
        """Mean held-out reward over the last quarter of the versions."""
        return last_quarter(self.heldout)

    @property
    def to_goal(self) -> int:
        """Iterations until two evaluations in a row reached the goal; else the length of the run."""
        pairs = zip(self.heldout, self.heldout[1:], strict=False)
        return next(
            (version for (version, a), (_, b) in pairs if min(a, b) >= GOAL), self.heldout[-1][0]
        )


def train(config: RunConfig, target: Target, is_taught: bool) -> Run:
    """Train once; taught: the reference of the KL is the target."""
    started_s = time.monotonic()
    run = AgedRun(config, target)
    if is_taught:
        model = load_model(config.model_of("scorer"), "target.model", "float32", is_trained=True)
        run.models.reference = Actor(model).eval().requires_grad_(False)
    problems = [each.prompt() for each in load_problems(config.data.eval, config.data)][:HELDOUT]
    heldout = []
    iterations = config.algorithm.iterations or 0
    for version in range(iterations):
        if version % EVALUATE_EVERY == 0:
            heldout.append((version, run.mean_reward(problems)))
        run.fill()
        run.train()
    heldout.append((iterations, run.mean_reward(problems)))
    return Run(heldout, round(time.monotonic() - started_s, 1))


def run_all(
    seeds: Sequence[int], iterations: int, kept: KeptRuns[Run]
) -> dict[tuple[float, str], list[Run]]:
    """Every cell's seeds, seeds outermost; one target for all."""
    found: dict[tuple[float, str], list[Run]] = {}
    target: Target | None = None
    for seed in seeds:
        for rate in RATES:
            for name, (is_taught, kl) in ARMS.items():
                key = (seed, rate, is_taught, kl, iterations)
                run = kept.get(key)
                if run is None:
                    own = (
                        f"seed={seed}",
                        f"algorithm.max_staleness={AGE}",
                        f"algorithm.iterations={iterations}",
                        f"learner.actor_lr={rate!r}",
                        f"algorithm.kl={kl!r}",
                        "rollout.groups_per_task=32",
                    )
                    config = load(RUN_FILE, (*COMMON, *own))
                    target = target or Target(config)
                    run = train(config, target, is_taught)
                    kept.add(key, run)
                    print(
                        f"{rate:g}, {name}, seed {seed}: {run.to_goal}, {run.final:.3f}; {run.wall_s:.0f} s",
                        flush=True,
                    )
                found.setdefault((rate, name), []).append(run)
    return found


def markdown(found: dict[tuple[float, str], list[Run]], report: Report) -> str:
    """The table."""
    lines = [
        "| rate | arm | iterations to 0.8, mean | each seed | less the example's, paired | final reward |",
        "|---|---|---|---|---|---|",
    ]
    for (rate, name), runs in sorted(found.items()):
        steps = [run.to_goal for run in runs]
        gaps = [
            mine.to_goal - theirs.to_goal
            for mine, theirs in zip(runs, found[rate, PLAIN], strict=True)
        ]
        gap = mean_figure("", "", gaps)
        paired = (
            "-"
            if name == PLAIN
            else f"{gap.value:+.0f} [{gap.spread[0]:+.0f}, {gap.spread[1]:+.0f}]"
        )
        final = statistics.fmean(run.final for run in runs)
        each = ", ".join(map(str, steps))
        lines.append(
            f"| {rate:g} | {name} | {statistics.fmean(steps):.0f} | {each} | {paired} | {final:.3f} |"
        )
    body = "\n".join(lines)
    return f"""# Distillation from the target

`python -m benchmarks.distillation`: the arithmetic example by GRPO, {ITERATIONS} iterations of 32 groups, every sample
{AGE} versions old, {len(SEEDS)} seeds, {HELDOUT} held-out problems. A run that never reaches {GOAL} counts
{ITERATIONS}. In brackets 95 % intervals (Student's t) of the differences, paired by seed; *final* is the mean over the
last quarter of a run.

Commit `{report.commit}`, {report.wall_s:.0f} s.

{body}
"""


@click.command()
@options
def main(path: Path, quick: bool) -> None:
    """Train what is missing, and write figures and page."""
    measured = commit()
    seeds, iterations = (SEEDS[:1], QUICK_ITERATIONS) if quick else (SEEDS, ITERATIONS)
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = KeptRuns(
        path, Run, (*TRAINING, "benchmarks/distillation.py", "benchmarks/exploration.py")
    )
    found = run_all(seeds, iterations, kept)
    figures: list[Figure] = []
    for (rate, name), runs in sorted(found.items()):
        plain, where = found[rate, PLAIN], f"rate {rate:g}, {name}"
        steps, theirs = [float(run.to_goal) for run in runs], [float(run.to_goal) for run in plain]
        figures.append(mean_figure(f"iterations to {GOAL}, {where}", "", steps, theirs, PLAIN))
        figures.append(mean_figure(f"final reward, {where}", "share", [run.final for run in runs]))
    settings = {"arms": ARMS, "rates": RATES, "seeds": list(seeds), "common": COMMON, "age": AGE}
    cells = {f"{rate:g}, {name}": runs for (rate, name), runs in found.items()}
    report = Report("distillation", quick, settings, figures, cells, measured)
    report.wall_s = round(sum(run.wall_s for runs in found.values() for run in runs))
    report.write(path)
    kept.remove()
    path.with_suffix(".md").write_text(markdown(found, report), encoding="utf-8")


if __name__ == "__main__":
    main()
