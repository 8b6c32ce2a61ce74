"""One run of the SmolLM2 example: what a subject is, how a seed of it is trained, and what is kept of it.

A subject is a way to train: the example as it is, without staleness, as a plain loop, in direct mode, with a small
adapter that was warm-started. Each seed of each takes a quarter of an hour or more, so that one is run at a time.
"""

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import msgspec

from benchmarks.plain_prefixes import Choices, run
from benchmarks.results import ROOT, commit
from prefixrl.common.config.load import load
from prefixrl.common.evaluation.accuracy import EvaluatedRow
from prefixrl.common.journal import journal
from prefixrl.common.journal.records import BatchFormed, GroupScored
from prefixrl.common.run import json_lines
from prefixrl.common.run.documents import METRICS_FILE, MetricsLine
from prefixrl.common.wire.packing import token_ids

EXAMPLE = ROOT / "deploy/examples/smollm2"
ARMS = ("no_prefix", "fixed_prefix", "untrained_adapter", "trained_adapter")
DECODINGS = ("greedy", "sampled")
BEST_OF = 8
PROBLEMS = "evaluation.problems="
HARDLY_JUDGED = ("evaluation.problems=8", "evaluation.selection_problems=8")
"""Settings of a run whose other arms are not looked at."""
QUICK = ("algorithm.iterations=2", "evaluation.problems=16", "evaluation.selection_problems=8")


@dataclass(frozen=True)
class Subject:
    """One way to train."""

    words: str
    run_file: str = "run.toml"
    settings: tuple[str, ...] = ()
    is_plain: bool = False
    """True: the plain loop, with the numbers of the run file."""
    warm_start: tuple[str, ...] = ()
    """Options of `prefixrl warm-start` before the run; none: the run begins with the adapter as it is."""
    trains: bool = True
    """False: the untrained adapter of the run of `prefixes` with the same seed is judged."""
    judges_all_arms: bool = True
    """False: only the trained adapter is judged, by `prefixrl eval`; the other arms are those of `prefixes`."""


SUBJECTS: Mapping[str, Subject] = {
    "prefixes": Subject("prefixes by LoRA, the example as it is (S = 2)"),
    "synchronous": Subject(
        "the same without staleness (S = 0)",
        settings=("algorithm.max_staleness=0",),
        judges_all_arms=False,
    ),
    "best_of": Subject(
        "no training: the best of eight prefixes, of a run of prefixes", trains=False
    ),
    "plain": Subject("the plain loop", is_plain=True),
    "svamp": Subject(
        "the example on SVAMP, of which the target solves a fifteenth",
        settings=("data.train=svamp_train.jsonl", "data.eval=svamp_heldout.jsonl"),
    ),
    "direct": Subject("whole answers by LoRA: the target itself is trained", "direct.toml"),
    "small": Subject(
        "prefixes of an adapter of a third of the layers, warm-started",
        "small.toml",
        (),
        False,
        ("--lr", "6e-4"),
    ),
}


class Seed(msgspec.Struct, frozen=True, kw_only=True):
    """The figures that are kept of one run."""

    subject: str
    seed: int
    commit: str
    settings: Sequence[str]
    rewards: dict[str, str]
    """By `arm.decoding`: 1 or 0 for every held-out problem, in their order."""
    curve: Sequence[float]
    """Mean reward of each iteration."""
    target_tokens: Sequence[int]
    """Tokens of the target in each iteration; in direct mode those of the answers."""
    warm_start_tokens: int
    """Tokens of the target in the warm start; 0 without one."""
    train_s: float
    """Time until the last iteration was trained, and of all judging: with other work on the machine it is no figure."""


def trained_seed(name: str, seed: int, runs: Path, settings: tuple[str, ...]) -> Seed:
    """Train one seed of a subject, or go on with it, and return what is kept of it."""
    subject, started_s, measured = SUBJECTS[name], time.monotonic(), commit()
    directory = (runs / f"{name}-{seed}").resolve()
    settings = (*subject.settings, *settings)
    curve, tokens, spent = list[float](), list[int](), 0
    if not subject.trains:
        rewards = best_of_samples((runs / f"prefixes-{seed}").resolve(), settings)
    elif subject.is_plain:
        rewards, curve, tokens = plain_loop(EXAMPLE / subject.run_file, seed, directory, settings)
    else:
        start, spent = warm_started(subject, seed, directory, settings)
        judged = () if subject.judges_all_arms else HARDLY_JUDGED
        run_example(subject, seed, directory, (*settings, *start, *judged))
        rewards, curve, tokens = figures_of(directory, subject, settings)
    return Seed(
        subject=name,
        seed=seed,
        commit=measured,
        settings=settings,
        rewards=rewards,
        curve=curve,
        target_tokens=tokens,
        warm_start_tokens=spent,
        train_s=time.monotonic() - started_s,
    )


def flags(seed: int, directory: Path, settings: Sequence[str]) -> list[str]:
    """Return the settings of a run as arguments."""
    whole = (f"directory={directory}", f"seed={seed}", *settings)
    return [word for setting in whole for word in ("--set", setting)]


def warm_started(
    subject: Subject, seed: int, directory: Path, settings: Sequence[str]
) -> tuple[tuple[str, ...], int]:
    """Make the warm start of a subject, if it has one; return the setting that begins with it, and its tokens."""
    if not subject.warm_start:
        return (), 0
    folder = directory.with_name(f"{directory.name}_warm_start")
    command = [
        sys.executable,
        "-m",
        "prefixrl.deploy",
        "warm-start",
        str(EXAMPLE / subject.run_file),
    ]
    subprocess.run([*command, *flags(seed, directory, settings), *subject.warm_start], check=True)
    record = json.loads((folder / "warm_start.json").read_text(encoding="utf-8"))
    return (f"adapter.init_from={folder}",), int(record["target_tokens"])


def run_example(subject: Subject, seed: int, directory: Path, settings: Sequence[str]) -> None:
    """Train a run unless its summary is there."""
    if not (directory / "summary.json").is_file():
        command = [
            sys.executable,
            "-m",
            "prefixrl.deploy",
            "launch",
            str(EXAMPLE / subject.run_file),
        ]
        subprocess.run([*command, *flags(seed, directory, settings)], check=True)


def figures_of(
    directory: Path, subject: Subject, settings: Sequence[str]
) -> tuple[dict[str, str], list[float], list[int]]:
    """Return rewards by arm, mean reward by iteration and the target's tokens by iteration."""
    rewards = dict[str, str]()
    if subject.judges_all_arms:
        for arm, decoding in product(ARMS, DECODINGS):
            path = directory / f"evaluations/{arm}.{decoding}.jsonl"
            if path.is_file():
                rewards[f"{arm}.{decoding}"] = marks_of(path)
    else:
        folder = judged_afterwards(directory, settings)
        for decoding in DECODINGS:
            rewards[f"{ARMS[-1]}.{decoding}"] = marks_of(adapter_rows(folder, decoding))
    lines = json_lines.read(directory / METRICS_FILE, MetricsLine)
    curve = [line.figures["reward"] for line in lines]
    return rewards, curve, tokens_by_iteration(directory, subject.run_file == "direct.toml")


def marks_of(path: Path) -> str:
    """Return 1 or 0 for every problem of a file of answers, in their order: 1 if the best answer to it is right."""
    best: dict[str, float] = {}
    for row in json_lines.read(path, EvaluatedRow):
        best[row.prompt_id] = max(best.get(row.prompt_id, 0.0), row.reward)
    return "".join(f"{best[problem]:.0f}" for problem in sorted(best))


def judged_afterwards(
    directory: Path, settings: Sequence[str], options: Sequence[str] = ("--samples", "1")
) -> Path:
    """Have `prefixrl eval` judge an adapter of a run; return the folder of the rows."""
    problems = next((s for s in reversed(settings) if s.startswith(PROBLEMS)), f"{PROBLEMS}500")
    command = [sys.executable, "-m", "prefixrl.deploy", "eval", str(directory), "--arm", "adapter"]
    subprocess.run([*command, "--set", problems, *options], check=True)
    folders = (directory / "eval").glob("step_*")
    return max(folders, key=lambda folder: folder.stat().st_mtime) / "evaluations"


def adapter_rows(folder: Path, decoding: str) -> Path:
    """Return the file in which `prefixrl eval` keeps the adapter's answers: its name has the problem set, too."""
    (path,) = folder.glob(f"adapter.*.{decoding}*.jsonl")
    return path


def best_of_samples(directory: Path, settings: Sequence[str]) -> dict[str, str]:
    """Return what a user would try first: of `BEST_OF` prefixes of the untrained adapter the best, by the verifier."""
    options = ("--checkpoint", "0", "--samples", str(BEST_OF))
    folder = judged_afterwards(directory, settings, options)
    return {f"best_of_{BEST_OF}_untrained.sampled": marks_of(adapter_rows(folder, "sampled"))}


def tokens_by_iteration(directory: Path, is_direct: bool) -> list[int]:
    """Return the target's tokens in each trained iteration, from the journal; in direct mode those of the answers."""
    tokens, batches = dict[int, int](), dict[int, int]()
    for record in journal.read(directory / journal.FOLDER):
        if isinstance(record, GroupScored):
            group = record.group
            rows = zip(group.prefixes.rows, group.verdicts, strict=True)
            tokens[group.prefixes.seq] = sum(
                token_ids(row.tokens).size if is_direct else verdict.completion_tokens
                for row, verdict in rows
            )
        elif isinstance(record, BatchFormed):
            batches[record.iteration] = sum(tokens[seq] for seq in record.seqs)
    return [batches[iteration] for iteration in sorted(batches)]


def plain_loop(
    run_file: Path, seed: int, directory: Path, settings: Sequence[str]
) -> tuple[dict[str, str], list[float], list[int]]:
    """Train one seed by the plain loop unless its last line is there."""
    config = load(run_file, (*settings, f"directory={directory}"))
    algorithm, learner, lora = config.algorithm, config.learner, config.learner.lora
    assert lora is not None and algorithm.iterations is not None, "the run file says so"
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "plain.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    if len(lines) <= algorithm.iterations:
        choices = Choices(
            run_file.parent,
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
            config.evaluation.problems,
        )
        run(choices, path)
        lines = path.read_text(encoding="utf-8").splitlines()
    *steps, last = map(json.loads, lines)
    rewards = {name: "".join(f"{reward:.0f}" for reward in values) for name, values in last.items()}
    return rewards, [step["reward"] for step in steps], [step["tokens"] for step in steps]
