"""Rows per second of the transformers engine, beside one `generate` of the same rows and beside `bitwise`.

The target of the arithmetic example and prefixes of its untrained adapter, temperature 0.7, on one thread. Each round
completes the same rows three times, in turn: by one call of transformers' `generate`, which has all of them at once; by
the engine that batches continuously, fed as a scorer feeds it, groups of 8 rows as long as it has room; and by the
engine of `bitwise`, a task of 8 groups after the other. Seconds are those of the CPU: nothing here waits.

Then the example's whole run, with and without `bitwise` in turn: prefixes per second, and CPU seconds per iteration of
256 prefixes of every process. The first iterations, in which processes start, are left out.

    python -m benchmarks.engine_batching [--quick] --json FILE
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
import psutil  # type: ignore[import-untyped]
import torch

from benchmarks.results import ROOT, Figure, Report, commit, options
from prefixrl.common.config.load import load
from prefixrl.common.config.run import RunConfig
from prefixrl.common.engines.embedded.continuous import TransformersEngine
from prefixrl.common.engines.embedded.fixed_rows import FixedRowsEngine
from prefixrl.common.engines.interface.base import Engine, Job, JobResult, TokenIds
from prefixrl.common.engines.make import make_engine
from prefixrl.common.prompts.rendering import Renderer
from prefixrl.common.seeds import row_uniforms

RUN_FILE = ROOT / "deploy/examples/arithmetic/run.toml"
ROWS = (64, 256)
ROUNDS, QUICK_ROUNDS = 15, 3
RUNS, ITERATIONS, STARTING = 2, 40, 8
SETTINGS = (
    f"algorithm.iterations={ITERATIONS}",
    "checkpoint.every=0",
    "evaluation.problems=16",
    "evaluation.fixed_prefixes=[]",
    "evaluation.selection_problems=8",
    "evaluation.sampled_candidates=1",
)
RUN_S, POLL_S = 600.0, 0.2
SPREAD = "least and largest value"
GENERATE, CONTINUOUS, BITWISE = "generate", "continuous", "bitwise"


# --- the engine alone -----------------------------------------------------------------------------------------------


def groups_of(config: RunConfig, count: int) -> tuple[list[Job], Renderer]:
    """Jobs of one group each: rendered question and sampled prefix, as a scorer makes them."""
    own = Renderer(config.adapter.model, config.rollout.max_prompt_tokens)
    target = Renderer(config.model_of("scorer"), config.scorer.max_prompt_tokens)
    lines = (RUN_FILE.parent / "train.jsonl").read_text(encoding="utf-8").splitlines()[:count]
    questions = [json.loads(line)["question"] for line in lines]
    rows, writing, judging = (
        config.algorithm.samples_per_prompt,
        config.rollout_sampling(),
        config.scorer_sampling(),
    )
    adapter = make_engine("transformers", config.adapter.model, "rollout", config)
    asked = [
        Job(
            str(number),
            (own.prompt(question),) * rows,
            row_uniforms(number, "prefix", rows, writing.max_new_tokens),
            writing,
            own.stop_tokens,
            masked_tokens=own.control_tokens,
        )
        for number, question in enumerate(questions)
    ]
    prefixes = completed(adapter, asked)
    jobs = [
        Job(
            str(number),
            tuple(
                np.concatenate([target.prompt(question), own.without_stop(row.tokens)])
                for row in prefix.rows
            ),
            row_uniforms(number, "completion", rows, judging.max_new_tokens),
            judging,
            target.stop_tokens,
        )
        for number, (question, prefix) in enumerate(zip(questions, prefixes, strict=True))
    ]
    return jobs, target


def completed(engine: Engine, jobs: Sequence[Job]) -> list[JobResult]:
    """Results of jobs that are submitted, in order, as long as the engine has room for their rows."""
    done: dict[str, JobResult] = {}
    sent = held = 0
    while len(done) < len(jobs):
        while sent < len(jobs) and (not held or held + len(jobs[sent].rows) <= engine.room):
            engine.submit(jobs[sent])
            held, sent = held + len(jobs[sent].rows), sent + 1
        for result in engine.step(0.0):
            done[result.key] = result
            held -= len(result.rows)
    return [done[job.key] for job in jobs]


def task_of(jobs: Sequence[Job]) -> Job:
    """One job of the rows of several."""
    rows = tuple(row for job in jobs for row in job.rows)
    draws = np.concatenate([job.uniforms for job in jobs])
    return Job(jobs[0].key, rows, draws, jobs[0].sampling, jobs[0].stop_tokens)


def generated(engine: FixedRowsEngine, rows: Sequence[TokenIds], job: Job) -> None:
    """All rows by one call of `generate`."""
    longest = max(row.size for row in rows)
    ids, mask = (
        torch.zeros(len(rows), longest, dtype=torch.long),
        torch.zeros(len(rows), longest, dtype=torch.long),
    )
    for place, row in enumerate(rows):
        ids[place, longest - row.size :] = torch.from_numpy(row.astype(np.int64))
        mask[place, longest - row.size :] = 1
    with torch.inference_mode():
        engine._model.generate(  # type: ignore[operator]
            ids,
            attention_mask=mask,
            do_sample=True,
            temperature=job.sampling.temperature,
            top_k=0,
            top_p=1.0,
            max_new_tokens=job.sampling.max_new_tokens,
            eos_token_id=sorted(job.stop_tokens),
            pad_token_id=0,
        )


def engine_rounds(config: RunConfig, rows: int, rounds: int) -> tuple[dict[str, list[float]], int]:
    """CPU seconds of every way in every round; rows whose texts both engines write alike."""
    jobs, _ = groups_of(config, rows // config.algorithm.samples_per_prompt)
    size = config.rollout.groups_per_task
    tasks = [task_of(jobs[first : first + size]) for first in range(0, len(jobs), size)]
    model, fixed = config.model_of("scorer"), config.rows_per_job("scorer")
    continuous = TransformersEngine(
        model, "cpu", "float32", 1, seats=config.embedded_seats("scorer")
    )
    bitwise = FixedRowsEngine(model, "cpu", "float32", 1, seats=fixed)
    texts = [row for job in jobs for row in job.rows]
    ways: dict[str, Callable[[], object]] = {
        # The model of `bitwise` attends as transformers does; that of the other engine does not.
        GENERATE: lambda: generated(bitwise, texts, jobs[0]),
        CONTINUOUS: lambda: completed(continuous, jobs),
        BITWISE: lambda: completed(bitwise, tasks),
    }
    left, right = (
        [row.tokens.tolist() for result in completed(engine, given) for row in result.rows]
        for engine, given in ((continuous, jobs), (bitwise, tasks))
    )
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            started_s = time.process_time()
            way()
            if number:  # the first round allocates
                seconds[name].append(time.process_time() - started_s)
    return seconds, sum(a == b for a, b in zip(left, right, strict=True))


def engine_figures(rows: int, seconds: dict[str, list[float]]) -> list[Figure]:
    rates = {name: [rows / each for each in found] for name, found in seconds.items()}
    return [
        compared(
            f"{rows} rows, {CONTINUOUS}, beside {base}",
            "rows per CPU second",
            rates[CONTINUOUS],
            rates[base],
            base,
        )
        for base in (GENERATE, BITWISE)
    ]


def compared(
    name: str, unit: str, values: Sequence[float], base: Sequence[float], base_name: str
) -> Figure:
    """The median of values beside that of the same rounds' base, and the median of the ratios."""
    ratios = [value / against for value, against in zip(values, base, strict=True)]
    return Figure(
        name=name,
        unit=unit,
        value=statistics.median(values),
        n=len(values),
        spread=(min(values), max(values)),
        baseline=statistics.median(base),
        baseline_name=base_name,
        ratio=statistics.median(ratios),
        statistic="median",
        spread_kind=SPREAD,
    )


# --- the whole run --------------------------------------------------------------------------------------------------


def whole_run(directory: Path, is_bitwise: bool) -> dict[str, Any]:
    """One run of the example: prefixes per second, mean age, CPU seconds per iteration by process."""
    settings = (*SETTINGS, f"directory={directory}", f"bitwise={str(is_bitwise).lower()}")
    flags = [part for each in settings for part in ("--set", each)]
    command = [sys.executable, "-m", "prefixrl.deploy", "launch", str(RUN_FILE), *flags]
    with (directory.parent / f"{directory.name}.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    seen: list[tuple[int, dict[str, float]]] = []
    deadline_s = time.monotonic() + RUN_S
    while process.poll() is None:
        assert time.monotonic() < deadline_s, f"no end within {RUN_S:g} s"
        trained = len(lines_of(directory))
        if trained > STARTING and (not seen or seen[-1][0] != trained):
            seen.append((trained, cpu_s(process.pid)))
        time.sleep(POLL_S)
    assert process.returncode == 0, (directory.parent / f"{directory.name}.log").read_text()
    lines = lines_of(directory)[STARTING:]
    prefixes = sum(line["figures"]["rows"] for line in lines[1:])
    (first, before), (last, after) = seen[0], seen[-2]
    return {
        "prefixes_per_s": prefixes / (lines[-1]["since_start_s"] - lines[0]["since_start_s"]),
        "mean_age": statistics.fmean(line["mean_age"] for line in lines),
        "cpu_s_per_iteration": {
            name: (after[name] - before[name]) / (last - first) for name in before if name in after
        },
    }


def lines_of(directory: Path) -> list[dict[str, Any]]:
    """The iterations trained so far."""
    file = directory / "metrics.jsonl"
    return (
        [
            json.loads(line)
            for line in file.read_bytes().splitlines(keepends=True)
            if line.endswith(b"\n")
        ]
        if (file.exists())
        else []
    )


def cpu_s(launcher: int) -> dict[str, float]:
    """CPU seconds of the run's processes so far, by name."""
    found: dict[str, float] = {}
    for child in psutil.Process(launcher).children(recursive=True):
        try:
            name, times = child.cmdline()[0].split()[0].rpartition("/")[2], child.cpu_times()
        except (psutil.NoSuchProcess, IndexError):
            continue
        found[name] = found.get(name, 0.0) + times.user + times.system
    return found


def run_figures(found: dict[str, list[dict[str, Any]]]) -> list[Figure]:
    names = {CONTINUOUS: "whole run, continuous", BITWISE: "whole run, bitwise"}
    rates = {name: [each["prefixes_per_s"] for each in runs] for name, runs in found.items()}
    cpu = {
        name: [sum(each["cpu_s_per_iteration"].values()) for each in runs]
        for name, runs in found.items()
    }
    scorers = {
        name: [each["cpu_s_per_iteration"]["prefixrl-scorer"] for each in runs]
        for name, runs in found.items()
    }
    return [
        compared(
            f"{names[CONTINUOUS]}: {what}",
            unit,
            values[CONTINUOUS],
            values[BITWISE],
            names[BITWISE],
        )
        for what, unit, values in (
            ("prefixes trained", "prefixes/s", rates),
            ("CPU of all processes", "s per iteration", cpu),
            ("CPU of both scorers", "s per iteration", scorers),
        )
    ]


@click.command()
@options
def main(path: Path, quick: bool) -> None:
    started_s, measured = time.monotonic(), commit()
    torch.set_num_threads(1)
    config = load(RUN_FILE)
    figures: list[Figure] = []
    details: dict[str, Any] = {}
    for rows in ROWS:
        seconds, alike = engine_rounds(config, rows, QUICK_ROUNDS if quick else ROUNDS)
        figures += engine_figures(rows, seconds)
        details[f"{rows} rows"] = {"cpu_s": seconds, "texts_alike": alike}
    if not quick:
        runs: dict[str, list[dict[str, Any]]] = {CONTINUOUS: [], BITWISE: []}
        with tempfile.TemporaryDirectory(prefix="engine-batching-") as folder:
            for number in range(RUNS):
                for name, found in runs.items():
                    found.append(whole_run(Path(folder) / f"{name}-{number}", name == BITWISE))
        figures += run_figures(runs)
        details["runs"] = runs
    settings = {"rows": ROWS, "seats": config.embedded_seats("scorer"), "run": SETTINGS}
    Report("engine_batching", quick, settings, figures, details, measured).finish(path, started_s)


if __name__ == "__main__":
    main()
