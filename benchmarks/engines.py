"""Tokens per CPU second of the engines on real shapes: `generate`, the transformers engine, vLLM's CPU build.

The shapes are those of a model given (SmolLM2-135M) and of a random one of 185 M with Qwen2's architecture, 24 layers
and its vocabulary of 151,936.

Groups of 8 rows, which share a prompt of 200 random tokens, each row to write 64 more at temperature 1, as a rollout is
asked. Every arm is a process of its own with one thread; seconds are those of the CPU, of all processes of the arm, so
other work on the machine counts little; loading and one group as a warm-up do not count. `generate` is what TRL's
trainers call unless they are given a vLLM server: it is TRL's own generation. vLLM is measured where it is installed.

    python -m benchmarks.engines --model FOLDER [--quick | --rows 64] --json FILE

FOLDER holds the first shape: deploy/examples/smollm2/build.py makes it. Where it was interrupted, the same command goes
on (`kept.py`).
"""

import itertools
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import numpy as np
import psutil  # type: ignore[import-untyped]
import torch

from benchmarks.engine_batching import completed, generated
from benchmarks.kept import KeptRuns
from benchmarks.learner_step import QWEN2, made
from benchmarks.results import ROOT, Figure, Report, commit, options
from prefixrl.common.config.run import RunConfig
from prefixrl.common.engines.embedded.fixed_rows import FixedRowsEngine
from prefixrl.common.engines.interface.base import Job
from prefixrl.common.engines.make import make_engine
from prefixrl.common.wire.messages.groups import Sampling

ARMS = ("generate", "transformers", "vllm")
GROUP, PROMPT_TOKENS, NEW_TOKENS = 8, 200, 64
ROWS, QUICK_ROWS = (64, 256), (16,)
ROUNDS = 2
QWEN2_SHAPE = "185 M of Qwen2's shape"
SHAPES = "SmolLM2-135M", QWEN2_SHAPE
PROGRAM = ("benchmarks/engines.py", "benchmarks/engine_batching.py", "common/engines/*/*.py")
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def random_qwen2(folder: Path, like: Path) -> None:
    """Save a random model of `learner_step.py`'s Qwen2 shape, with the tokenizer of another model."""
    made(folder, QWEN2)
    for name in TOKENIZER:
        shutil.copy(like / name, folder)


def run_config(folder: Path, model: str, dtype: str) -> RunConfig:
    return RunConfig.model_validate(
        {
            "directory": str(folder / "run"),
            "adapter": {"model": model},
            "target": {"model": model},
            "data": {"train": "unused.jsonl"},
            "algorithm": {"iterations": 1, "samples_per_prompt": GROUP},
            "rollout": {
                "prefix_tokens": NEW_TOKENS,
                "vllm": {"max_num_seqs": 256, "kv_cache_memory_bytes": 2**31},
            },
            "learner": {"dtype": dtype},
        }
    )


def groups(rows: int, vocabulary: int, seed: int) -> list[Job]:
    """Jobs of one group each."""
    random = np.random.Generator(np.random.PCG64(seed))
    sampling = Sampling(temperature=1.0, max_new_tokens=NEW_TOKENS)
    return [
        Job(
            f"{seed}.{number}",
            (random.integers(5, vocabulary, PROMPT_TOKENS).astype(np.int32),) * GROUP,
            random.random((GROUP, NEW_TOKENS)),
            sampling,
            frozenset(),
        )
        for number in range(rows // GROUP)
    ]


def arm(name: str, model: str, dtype: str, rows: int, rounds: int) -> None:
    """Print the CPU seconds of each round, as JSON."""
    torch.set_num_threads(1)
    vocabulary = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    with TemporaryDirectory(prefix="engines-") as folder:
        config = run_config(Path(folder), model, dtype)
        engine: Any
        work: Callable[[list[Job]], object]
        if name == "generate":
            engine = FixedRowsEngine(model, "cpu", dtype, 1, seats=rows)  # type: ignore[arg-type]

            def work(jobs: list[Job]) -> object:
                generated(engine, [row for job in jobs for row in job.rows], jobs[0])
                return None
        else:
            engine = make_engine(name, model, "rollout", config)

            def work(jobs: list[Job]) -> object:
                return completed(engine, jobs)

        work(groups(GROUP, vocabulary, 0))
        found = []
        for number in range(rounds):
            jobs, before_s = groups(rows, vocabulary, 1 + number), cpu_s()
            work(jobs)
            found.append(cpu_s() - before_s)
        print("\n" + json.dumps(found), flush=True)
        for child in psutil.Process().children(recursive=True):
            child.kill()


def cpu_s() -> float:
    """CPU seconds of this process and of those that it started."""
    own = psutil.Process()
    times = [each.cpu_times() for each in (own, *own.children(recursive=True))]
    return float(sum(each.user + each.system for each in times))


@click.command()
@click.option(
    "--model",
    required=True,
    type=click.Path(exists=True, file_okay=False),
    help="Folder of the model.",
)
@click.option(
    "--rows", "sizes", multiple=True, type=int, default=ROWS, help="Rows at once; may be repeated."
)
@options
def main(path: Path, quick: bool, model: str, sizes: tuple[int, ...]) -> None:
    """Measure every arm, beside `generate`."""
    at, started_s = commit(), time.monotonic()
    kept = KeptRuns(path, dict[str, list[float]], PROGRAM)
    figures, details = [], {}
    with TemporaryDirectory(prefix="engines-qwen2-") as folder:
        random_qwen2(Path(folder), Path(model))
        cells = itertools.product(QUICK_ROWS if quick else sizes, SHAPES, ("bfloat16", "float32"))
        for rows, name, dtype in cells:
            taken = kept.get((name, dtype, rows))
            if taken is None:
                taken = measured(folder if name == QWEN2_SHAPE else model, dtype, rows)
                kept.add((name, dtype, rows), taken)
                print(name, dtype, rows, taken, flush=True)
            figures += figures_of(f"{name}, {dtype}, {rows} rows", rows, taken)
            details[f"{name}, {dtype}, {rows}"] = taken
    settings = {"prompt_tokens": PROMPT_TOKENS, "new_tokens": NEW_TOKENS, "threads": 1}
    Report("engines", quick, settings, figures, details, at).finish(path, started_s)
    kept.remove()


def measured(model: str, dtype: str, rows: int) -> dict[str, list[float]]:
    """Return the CPU seconds of each round of every arm, a process each; a large batch is minutes a round."""
    taken: dict[str, list[float]] = {}
    rounds = ROUNDS if rows < 256 else 1
    for name in (each for each in ARMS if each != "vllm" or find_spec("vllm")):
        code = f"from benchmarks.engines import arm; arm({name!r}, {model!r}, {dtype!r}, {rows}, {rounds})"
        ended = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, check=True
        )
        taken[name] = json.loads(ended.stdout.splitlines()[-1])
    return taken


def figures_of(where: str, rows: int, taken: dict[str, list[float]]) -> list[Figure]:
    """Tokens per CPU second of every arm, beside `generate`."""
    base_s = statistics.median(taken["generate"])
    found = []
    for name, seconds in taken.items():
        speeds = [rows * NEW_TOKENS / each for each in seconds]
        found.append(
            Figure(
                f"{where}, {name}",
                "tokens per CPU second",
                statistics.median(speeds),
                len(speeds),
                (min(speeds), max(speeds)),
                rows * NEW_TOKENS / base_s,
                "generate",
                base_s / statistics.median(seconds),
                "median",
                "smallest and largest",
            )
        )
    return found


if __name__ == "__main__":
    main()
