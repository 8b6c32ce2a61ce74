"""An example, trained by this system and by TRL's GRPOTrainer, on the same cores.

    python -m benchmarks.trl_peer --python TRL_ENVIRONMENT/bin/python --json FILE            the arithmetic example
    python -m benchmarks.trl_peer --example smollm2 --json FILE    rates alone; first build.py of that example

TRL needs an environment of its own: `python -m venv trl && trl/bin/pip install trl peft`. Without `--python` one is
made in `runs/trl`. It measures the newest release; the file has its version.

Both train the same adapter on the same problems, with the same frozen target as the reward: 32 groups of 8 prefixes per
optimiser step (SmolLM2: 8 groups, LoRA, bfloat16), GRPO without KL and entropy bonus, AdamW at the same constant rate,
prefixes of 8 tokens at temperature 1, completions of 20 tokens at 0.7. TRL's reward function has the target write all
completions at once and compares the answer as text or number, which is less than our verifier does. TRL runs with one
thread and with two; the better one counts. For SmolLM2 it runs in its strongest form without CUDA, where vLLM is
installed beside this: two threads, the target in a server of vLLM (1.00 prefixes per second; with `generate` in its own
process 0.94, with one thread 0.55). Its asynchronous trainer and its vLLM server for the policy send weights by NCCL,
so they need CUDA. This system runs as it is shipped: learner, broker, weight server, a rollout, two scorers (SmolLM2:
one), one thread each.

Rates are those of steps 10 to 40 of every run (of fewer steps: of their second half), so that no start counts and
answers are as long in all arms. The time to the goal is told twice: that of training, from the first step's begin
(here: the rollout's first lease, which is before the learner is there) until the mean reward of the last five steps is
0.80, and what a user waits for, from the command on, imports and all. SmolLM2 has no goal: in 40 steps, an hour of
TRL's, the mean reward of five of its steps (320 prefixes) goes from 0.04 to 0.06 to 0.12, which one step's luck moves
as far. Arms of a seed run one after the other, and seeds are outermost, so that a change of the machine's speed meets
all arms.

What stands in the way of more is work, not waiting: the processes use nine tenths of both cores, and half of that is
the target's decoding, which TRL has to pay too. `engine_batching.json` has the CPU time of each process per iteration.
The first two steps take four times as long as two later ones, since the learner still loads while the first prefixes
are written; more work begun meanwhile only takes the cores from it. Of the time from the command on, a third is over
before the first lease: imports (`docs/decisions/025-worker-template.md`)."""

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import msgspec

from benchmarks.results import ROOT, Figure, Report, commit, options
from prefixrl.common.config.load import load
from prefixrl.common.run.status import StatusDocument
from prefixrl.deploy.view.run_state import fetch

EXAMPLES = ROOT / "deploy/examples"
OURS, TRL_1, TRL_2, TRL_SERVED = (
    "prefixrl",
    "TRL, 1 thread",
    "TRL, 2 threads",
    "TRL, 2 threads, target in vLLM",
)
SEEDS, QUICK_SEEDS, QUICK_STEPS = (1, 2, 3, 4, 5), (1,), 12
REAL_SEEDS, REAL_STEPS = (1, 2, 3), 8
RATED = 10, 40
"""Steps between which the rate is measured; the goal is reached after them."""
ASKED_AT = 42
"""Steps after which a run is asked when it began: the question costs a little time."""
NO_GOAL = 2.0
RUN_S = 7200.0
"""Longest time for one run."""
CHANGES = (
    "algorithm.name=grpo",
    "algorithm.kl=0.0",
    "algorithm.entropy=0.0",
    "learner.warmup_ratio=0.0",
    "learner.min_lr_ratio=1.0",
    "checkpoint.every=100000",
    "evaluation.problems=1",
)


@dataclass(frozen=True)
class Task:
    """The choices of a run, the same for all arms."""

    example: str
    adapter: str
    target: str
    prompt_template: str | None
    stop: tuple[str, ...]
    """Tokens that end an answer besides the EOS."""
    dtype: str
    lora_rank: int
    """0 for full weights."""
    lora_alpha: int
    rows: int
    rows_at_once: int
    """Rows of one backward pass of TRL's; the step is the same. All of SmolLM2's would take 15 GiB."""
    samples: int
    prefix_tokens: int
    temperature: float
    most_tokens: int
    target_temperature: float
    actor_lr: float
    betas: tuple[float, float]
    weight_decay: float
    grad_clip: float
    steps: int
    goal: float
    span: int = 5
    target_url: str = ""
    """URL of the vLLM server that has the target; empty where TRL's process has it."""


@dataclass(frozen=True)
class Run:
    """The seconds and the reward of every step."""

    arm: str
    seed: int
    seconds: list[float]
    """From the begin of the first step to the end of each."""
    rewards: list[float]
    start_s: float
    """From the command to the begin of the first step."""

    def rate(self, rows: int) -> float:
        """Prefixes per second in the same steps of every arm; of a quick run, in its second half."""
        last = min(RATED[1], len(self.seconds)) - 1
        first = RATED[0] - 1 if last >= RATED[1] - 1 else last // 2
        return rows * (last - first) / (self.seconds[last] - self.seconds[first])

    def to_goal(self, task: Task) -> tuple[float, float, int] | None:
        """Seconds of training and from the command, and steps, until the mean of the last rewards is the goal.

        None where it never was.
        """
        for last in range(task.span, len(self.rewards) + 1):
            if statistics.fmean(self.rewards[last - task.span : last]) >= task.goal:
                return self.seconds[last - 1], self.start_s + self.seconds[last - 1], last
        return None


def changes_of(example: str) -> tuple[str, ...]:
    """The settings in which a run differs from the example's."""
    return (
        (*CHANGES, "learner.dtype=bfloat16", "evaluation.fixed_prefixes=[]")
        if example == "smollm2"
        else CHANGES
    )


def task_of(example: str, steps: int) -> Task:
    config = load(EXAMPLES / example / "run.toml", changes_of(example))
    rows = config.algorithm.groups_per_iteration * config.algorithm.samples_per_prompt
    adapter, target, lora = config.adapter, config.target, config.learner.lora
    assert adapter is not None and target is not None, "a run of prefixes has both"
    return Task(
        example=str(EXAMPLES / example),
        adapter=str(adapter.model),
        target=str(target.model),
        prompt_template=target.prompt_template,
        stop=tuple(map(str, config.scorer.stop_tokens)),
        dtype=config.learner.dtype,
        lora_rank=lora.rank if lora else 0,
        lora_alpha=lora.alpha if lora else 0,
        rows=rows,
        rows_at_once=16 if lora else rows,
        samples=config.algorithm.samples_per_prompt,
        prefix_tokens=config.rollout.prefix_tokens,
        temperature=config.rollout.temperature,
        most_tokens=config.scorer.max_new_tokens,
        target_temperature=config.scorer.temperature,
        actor_lr=config.learner.actor_lr,
        betas=config.learner.adam_betas,
        weight_decay=config.learner.weight_decay,
        grad_clip=config.learner.grad_clip,
        steps=steps,
        goal=NO_GOAL if example == "smollm2" else 0.8,
    )


def run_ours(task: Task, seed: int, folder: Path) -> Run:
    directory = folder / f"ours-{seed}"
    example = Path(task.example)
    settings = (
        *changes_of(example.name),
        f"directory={directory}",
        f"seed={seed}",
        f"algorithm.iterations={task.steps}",
    )
    flags = [part for each in settings for part in ("--set", each)]
    command = [sys.executable, "-m", "prefixrl.deploy", "launch", str(example / "run.toml"), *flags]
    metrics, from_s = directory / "metrics.jsonl", time.time()
    with (
        (folder / f"ours-{seed}.log").open("wb") as log,
        subprocess.Popen(command, stdout=log, stderr=log) as launch,
    ):
        try:
            leased_s = first_lease_s(directory, metrics, min(ASKED_AT, task.steps - 2))
            assert launch.wait(RUN_S) == 0, f"prefixrl launch ended with {launch.returncode}"
        finally:
            launch.kill()
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    # The learner's own clock begins when it does; the file's newest line was written as its iteration ended.
    learner_s = metrics.stat().st_mtime - lines[-1]["since_start_s"]
    seconds = [learner_s + line["since_start_s"] - leased_s for line in lines]
    return Run(
        OURS, seed, seconds, [line["figures"]["reward"] for line in lines], leased_s - from_s
    )


def first_lease_s(directory: Path, metrics: Path, step: int) -> float:
    """The clock at the rollout's first lease; asked after a step."""
    until_s = time.monotonic() + RUN_S
    while not metrics.is_file() or metrics.read_bytes().count(b"\n") < step:
        assert time.monotonic() < until_s, f"no {step} iterations within {RUN_S} s"
        time.sleep(0.1)
    document = msgspec.json.decode(fetch(directory), type=StatusDocument)
    (rollout,) = (worker for worker in document.workers if worker.role == "rollout")
    return time.time() - rollout.since_first_lease_s


@contextmanager
def served(task: Task, log: Path) -> Iterator[Task]:
    """A server of vLLM with the target, on two threads, while this lasts."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    own = [
        "--dtype",
        task.dtype,
        "--generation-config",
        "vllm",
        "--max-model-len",
        "1024",
        "--port",
        str(port),
    ]
    server_module = "vllm.entrypoints.openai.api_server"
    command = [
        sys.executable,
        "-m",
        server_module,
        "--model",
        task.target,
        "--host",
        "127.0.0.1",
        *own,
    ]
    threads = {"OMP_NUM_THREADS": "2", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    environment = os.environ | threads | {"VLLM_CPU_KVCACHE_SPACE": "2"}
    with (
        log.open("wb") as file,
        subprocess.Popen(command, stdout=file, stderr=file, env=environment) as server,
    ):
        try:
            until_s = time.monotonic() + 600
            while True:
                assert server.poll() is None and time.monotonic() < until_s, log.read_text(
                    errors="replace"
                )[-2000:]
                with (
                    suppress(OSError),
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5),
                ):
                    break
                time.sleep(1)
            yield replace(task, target_url=f"http://127.0.0.1:{port}/v1/completions")
        finally:
            server.terminate()


def run_trl(task: Task, seed: int, threads: int, folder: Path, python: Path) -> Run:
    out = folder / f"trl-{threads}-{seed}{'-served' * bool(task.target_url)}.jsonl"
    command = [
        str(python),
        str(ROOT / "benchmarks/trl_arm.py"),
        "--settings",
        json.dumps(asdict(task)),
    ]
    command += ["--seed", str(seed), "--threads", str(threads), "--out", str(out)]
    environment = os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    from_s = time.time()
    with out.with_suffix(".log").open("wb") as log:
        subprocess.run(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=RUN_S,
            check=True,
            env=environment,
        )
    lines = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    arm = TRL_SERVED if task.target_url else TRL_1 if threads == 1 else TRL_2
    start_s = lines[0]["clock_s"] - lines[0]["seconds"] - from_s
    return Run(
        arm, seed, [line["seconds"] for line in lines], [line["reward"] for line in lines], start_s
    )


def runs_of(task: Task, seed: int, folder: Path, python: Path) -> Iterator[Run]:
    """The runs of all arms with one seed, one after the other."""
    if task.lora_rank and find_spec("vllm"):
        with served(task, folder / "vllm.log") as asked:
            yield run_trl(asked, seed, 2, folder, python)
    else:
        for threads in (1, 2):
            yield run_trl(task, seed, threads, folder, python)
    yield run_ours(task, seed, folder)


def figures_of(runs: Sequence[Run], task: Task) -> list[Figure]:
    """Rates and times to the goal, ours beside the better of TRL's."""

    def of(arm: str) -> list[Run]:
        return [run for run in runs if run.arm == arm]

    arms = [arm for arm in (TRL_1, TRL_2, TRL_SERVED) if of(arm)]
    rates = {arm: [run.rate(task.rows) for run in of(arm)] for arm in (OURS, *arms)}
    best = max(arms, key=lambda arm: statistics.median(rates[arm]))
    found = [
        _figure(
            "prefixes written, completed and trained", "prefixes/s", rates[OURS], rates[best], best
        )
    ]
    if task.goal == NO_GOAL:
        return found
    reached = {arm: [run.to_goal(task) for run in of(arm)] for arm in (OURS, *arms)}
    for arm, each in reached.items():
        share = [float(one is not None) for one in each]
        found.append(_figure(f"runs that reach the goal, {arm}", "share of runs", share, None, ""))
    goals = (("training time", "s"), ("time from the command", "s"), ("steps", "steps"))
    for at, (what, unit) in enumerate(goals):
        name = f"{what} to a reward of 0.80"
        values = {
            arm: [float(one[at]) for one in each if one is not None]
            for arm, each in reached.items()
        }
        peers = [arm for arm in arms if values[arm]]
        if not values[OURS]:
            continue
        least = min(peers, key=lambda arm: statistics.median(values[arm])) if peers else ""
        found.append(_figure(name, unit, values[OURS], values[least] if least else None, least))
    return found


def _figure(
    name: str, unit: str, ours: list[float], peer: list[float] | None, peer_name: str
) -> Figure:
    value, against = statistics.median(ours), statistics.median(peer) if peer else None
    return Figure(
        name=name,
        unit=unit,
        value=value,
        n=len(ours),
        spread=(min(ours), max(ours)),
        baseline=against,
        baseline_name=peer_name,
        ratio=value / against if against else None,
        statistic="median",
        spread_kind="least and largest value",
    )


def made_environment() -> Path:
    """The Python of an environment with TRL, made where it is missing."""
    folder = ROOT / "runs/trl"
    if not (folder / "bin/python").is_file():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([str(folder / "bin/pip"), "install", "--quiet", "trl", "peft"], check=True)
    return folder / "bin/python"


def versions(python: Path) -> dict[str, str]:
    """The releases in an environment."""
    names = ("trl", "torch", "transformers")
    code = f"import json, importlib.metadata as m; print(json.dumps({{n: m.version(n) for n in {names}}}))"
    return dict(
        json.loads(
            subprocess.run([str(python), "-c", code], capture_output=True, check=True).stdout
        )
    )


@click.command()
@options
@click.option(
    "--python", type=click.Path(exists=True, path_type=Path), help="Of an environment with TRL."
)
@click.option(
    "--example",
    type=click.Choice(["arithmetic", "smollm2"]),
    default="arithmetic",
    show_default=True,
)
@click.option(
    "--seeds", "most_seeds", type=click.IntRange(1), help="Most seeds.  [default: 5; smollm2: 3]"
)
@click.option(
    "--steps",
    type=int,
    help=f"Most optimiser steps of a run.  [default: 110; smollm2: {REAL_STEPS}]",
)
def main(
    path: Path,
    quick: bool,
    python: Path | None,
    example: str,
    steps: int | None,
    most_seeds: int | None,
) -> None:
    """Train with both and write the figures."""
    started_s, measured = time.monotonic(), commit()
    python = python or made_environment()
    is_real = example == "smollm2"
    task = task_of(example, QUICK_STEPS if quick else steps or (REAL_STEPS if is_real else 110))
    seeds = QUICK_SEEDS if quick else (REAL_SEEDS if is_real else SEEDS)[:most_seeds]
    runs = []
    with tempfile.TemporaryDirectory(prefix="trl-peer-") as name:
        for seed in seeds:
            for run in runs_of(task, seed, Path(name), python):
                print(
                    run.arm,
                    seed,
                    f"{run.rate(task.rows):.2f} prefixes/s",
                    run.to_goal(task),
                    flush=True,
                )
                runs.append(run)
    models = {
        name: Path(getattr(task, name)).name for name in ("adapter", "target")
    }  # not where this machine has them
    settings: dict[str, Any] = {
        "task": asdict(task) | models | {"example": example},
        "seeds": seeds,
        "peer": versions(python),
    }
    Report("trl_peer", quick, settings, figures_of(runs, task), runs, measured).finish(
        path, started_s
    )


if __name__ == "__main__":
    main()
