"""The advice example over seeds, and its adapters on a second target that they never met.

    python -m benchmarks.advice --json FILE

Every seed is a whole run of `deploy/examples/advice/run.toml`; its trained adapter is paired with no advice and with
the best fixed advice on the same 512 held-out problems, greedy. The second target has another tokenizer (byte pairs in
place of words) and other weights: its body begins with that of the example's target, its embedding anew.
`prefixrl eval --target` judges every adapter on it.
"""

import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
import msgspec
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from benchmarks.results import Figure, Report, commit, mean_figure, options
from prefixrl.common.evaluation.accuracy import EvaluatedRow, difference, means_by_problem
from prefixrl.deploy.examples.advice.build import ADVICE, questions_of_target
from prefixrl.deploy.examples.arithmetic.build import (
    ASSISTANT,
    EOS,
    PAD,
    UNKNOWN,
    USER,
    batches,
    train,
    wrapped,
)
from prefixrl.deploy.examples.arithmetic.problems import stream
from prefixrl.deploy.examples.builder import save

EXAMPLE = Path("deploy/examples/advice")
SEEDS = (1, 2, 3)
STEPS = 600
PIECES = 160
"""Size of the second tokenizer."""
UNIT = "share right"
ARMS = ("no_prefix", "fixed_prefix", "untrained_adapter", "trained_adapter")
TARGET = """
[target]
model = "model"
[scorer]
max_new_tokens = 64
"""


def second_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of byte pairs, digits alone, spaces as marks before words."""
    rng = random.Random(0)
    lessons = questions_of_target(stream(random.Random("texts"), set()), rng)
    texts = [text for _ in range(2000) for text in next(lessons)]
    tokenizer = Tokenizer(models.BPE(unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d|[{}\\:]"), behavior="isolated"),
            pre_tokenizers.Metaspace(prepend_scheme="never"),
        ]
    )
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")
    special = [PAD, EOS, UNKNOWN, USER, ASSISTANT]
    trainer = trainers.BpeTrainer(vocab_size=PIECES, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator([*texts, *ADVICE], trainer)
    return wrapped(tokenizer, 256)


def make_second_target(folder: Path) -> None:
    """Write the second target, which obeys the same advice; nothing to do if it is there."""
    (folder / "second.toml").parent.mkdir(parents=True, exist_ok=True)
    (folder / "second.toml").write_text(TARGET)
    if (folder / "model").is_dir():
        return
    torch.manual_seed(5)
    tokenizer = second_tokenizer()
    model = AutoModelForCausalLM.from_pretrained(EXAMPLE / "target")
    model.config.max_position_embeddings = tokenizer.model_max_length
    model.resize_token_embeddings(len(tokenizer))
    for embedding in model.get_input_embeddings().parameters():
        torch.nn.init.normal_(embedding, std=0.02)
    for config in (model.config, model.generation_config):
        config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    problems = stream(random.Random("second target"), set())
    lessons = questions_of_target(problems, random.Random("second lessons"))
    train(model, batches(tokenizer, lessons), STEPS)
    save(model, tokenizer, folder / "model")


def prefixrl(*arguments: str) -> None:
    """Run a command of the software; its output is this process's."""
    subprocess.run([sys.executable, "-m", "prefixrl.deploy", *arguments], check=True)


def train_example(directory: Path, seed: int, quick: bool) -> None:
    """Train the example with a seed; a finished run is kept."""
    if (directory / "summary.json").exists():
        return
    settings = [f"directory={directory}", f"seed={seed}"]
    if quick:
        settings += ["algorithm.iterations=4", "evaluation.problems=64"]
    flags = [flag for setting in settings for flag in ("--set", setting)]
    prefixrl("launch", str(EXAMPLE / "run.toml"), *flags)


def greedy_means(directory: Path, arm: str) -> dict[str, float]:
    """Return the mean reward of each held-out problem under an arm's greedy answers."""
    path = directory / "evaluations" / f"{arm}.greedy.jsonl"
    rows = [msgspec.json.decode(line, type=EvaluatedRow) for line in path.read_bytes().splitlines()]
    return means_by_problem(rows)


def transferred(run: Path) -> dict[str, float]:
    """Return the accuracy of each arm on the second target, greedy."""
    (path,) = (run / "eval").glob("*/results.json")
    results = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])["results"]
    return {result["arm"]: result["accuracy"]["accuracy"] for result in results}


@click.command()
@options
@click.option("--runs", type=click.Path(path_type=Path), default=Path("runs/benchmarks/advice"))
def main(path: Path, quick: bool, runs: Path) -> None:
    """Train every seed, judge the adapters on the second target, write figures."""
    at, started_s = commit(), time.monotonic()
    seeds = SEEDS[:1] if quick else SEEDS
    trained = [runs / f"seed_{seed}" for seed in seeds]
    make_second_target(runs / "second")
    for seed, run in zip(seeds, trained, strict=True):
        train_example(run, seed, quick)
    second = f"another_tokenizer={runs / 'second/second.toml'}"
    prefixrl("eval", *map(str, trained), "--target", second)
    figures = [
        mean_figure(f"own target, {arm}", UNIT, [_mean(greedy_means(run, arm)) for run in trained])
        for arm in ARMS
    ]
    for seed, run in zip(seeds, trained, strict=True):
        adapter = greedy_means(run, "trained_adapter")
        for arm in ("no_prefix", "fixed_prefix"):
            gain = difference(adapter, greedy_means(run, arm))
            assert gain is not None
            name = f"seed {seed}: trained adapter less {arm}"
            kind = "95 % interval of the paired difference"
            figures.append(
                Figure(name, UNIT, gain.mean, gain.problems, gain.ci95, spread_kind=kind)
            )
    on_second = [transferred(run) for run in trained]
    figures += [
        mean_figure(f"second target, {arm}", UNIT, [result[arm] for result in on_second])
        for arm in on_second[0]
    ]
    Report("advice", quick, {"seeds": seeds}, figures, None, at).finish(path, started_s)


def _mean(means: dict[str, float]) -> float:
    return sum(means.values()) / len(means)


if __name__ == "__main__":
    main()
