"""The process behind `prefixrl warm-start` that trains, after the answers are there.

warm_start_plan.json, evaluations/*.jsonl ──▶ examples ──▶ epochs ──▶ checkpoints/step_N, warm_start.json
"""

import logging
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
import msgspec

from prefixrl.common.config.algorithm import AlgorithmConfig
from prefixrl.common.config.foreign.files import read_json
from prefixrl.common.config.load import from_json
from prefixrl.common.config.run import RunConfig
from prefixrl.common.errors import DataError
from prefixrl.common.evaluation.accuracy import EvaluatedRow
from prefixrl.common.evaluation.plans import GREEDY, SAMPLED
from prefixrl.common.host.exit_codes import exit_codes
from prefixrl.common.host.hub import model_folder
from prefixrl.common.host.process import own, start_logging, without_gc, write_atomically
from prefixrl.common.prompts.rendering import Renderer, renderer_of, texts_of
from prefixrl.common.run import json_lines
from prefixrl.common.run.status import USAGE_FILE
from prefixrl.common.run.warm_start import (
    PLAN_FILE,
    RECORD_FILE,
    EpochLine,
    WarmStartPlan,
    WarmStartRecord,
    shared_settings,
)
from prefixrl.common.seeds import derive
from prefixrl.common.wire.messages.worker import Usage
from prefixrl.common.wire.packing import TokenIds
from prefixrl.learner.data import problems
from prefixrl.learner.training.warm_start.examples import (
    Example,
    PrefixForm,
    examples_of,
    split_examples,
)

log = logging.getLogger(__name__)

LEAST_EXAMPLES = 2
WARMUP_RATIO = 0.1


def train(directory: Path) -> None:
    """Train the adapter of the plan in a directory, and write the record; raise DataError without examples."""
    begun_s = time.monotonic()
    plan = read_json(directory / PLAN_FILE, WarmStartPlan)
    config = from_json(plan.config, f"the plan in {directory}")
    rows = list(_answers(directory, plan))
    good = [row for row in rows if _is_good(row, plan.min_reward)]
    adapter = renderer_of(config, "rollout", model_folder(config.adapter.start))
    # The prefix of a teacher is what its own rollout wrote.
    texts = [(row.prompt_id, row.prefix if plan.teacher else row.completion) for row in good]
    examples = examples_of(
        _prompts(config, adapter), texts, adapter.encode, form_of(config, adapter)
    )
    if len({example.problem for example in examples}) < LEAST_EXAMPLES:
        raise DataError(
            f"{len(good)} of {len(rows)} answers are right, and {len(examples)} begin with a prefix that the adapter "
            f"could write: too few to train on. Ask for more answers (--samples), or take all of them (--all)"
        )
    seed = derive(config.seed, "warm start")
    training, held_out = split_examples(examples, plan.held_out_fraction, seed)
    log.info(
        "%d examples to train on and %d held out, of %d answers",
        len(training),
        len(held_out),
        len(rows),
    )
    lines, best = _fit(plan, config, directory, training, held_out, seed)
    record = WarmStartRecord(
        adapter=config.adapter.start,
        teacher=plan.teacher,
        settings=shared_settings(config),
        answers=len(rows),
        right=len(good),
        examples=len(training),
        held_out_examples=len(held_out),
        target_tokens=_target_tokens(config, directory, rows),
        trained_tokens=lines[-1].epoch * sum(example.prefix.size for example in training),
        epochs=lines,
        best_epoch=best,
        seconds=time.monotonic() - begun_s,
    )
    write_atomically(directory / RECORD_FILE, msgspec.json.format(msgspec.json.encode(record)))


def _fit(
    plan: WarmStartPlan,
    config: RunConfig,
    directory: Path,
    training: list[Example],
    held_out: list[Example],
    seed: int,
) -> tuple[list[EpochLine], int]:
    # Late: torch is imported once there is something to train on.
    with without_gc():
        from prefixrl.learner.models import distributed
        from prefixrl.learner.models.model import Models
        from prefixrl.learner.training.warm_start.fitting import Fit, Fitting, best_epoch

    models = Models.load(trainable(config, plan.lr), 0, 1, model_folder(config.adapter.start))
    fit = Fit(plan.epochs, plan.batch_rows, plan.patience, config.learner.micro_batch_tokens, seed)
    try:
        lines = Fitting(models, directory, training, held_out, fit).run()
    finally:
        distributed.stop()
    return lines, best_epoch(lines)


def trainable(config: RunConfig, lr: float) -> RunConfig:
    """Return a config whose learner holds the adapter alone, with the rate of the warm start."""
    learner = {"actor_lr": lr, "warmup_ratio": WARMUP_RATIO, "min_lr_ratio": 0.0, "ema_decay": None}
    changes = {
        "algorithm": AlgorithmConfig(name="grpo", kl=0.0, iterations=1),
        "implicit_reward": None,
        "learner": config.learner.model_copy(update=learner),
    }
    return config.model_copy(update=changes)


def form_of(config: RunConfig, adapter: Renderer) -> PrefixForm:
    """Return the form of everything that the rollout of a run writes."""
    ends = adapter.stop_tokens
    # A whole answer ends as the model ends a turn, or as the target was stopped.
    turn_ends = [token for token in (adapter.closer, *sorted(adapter.eos_tokens)) if token in ends]
    stops = [stop for stop in config.rollout.stop_tokens if stop in config.scorer.stop_tokens]
    stop_ends = [_token_of(adapter, stop) for stop in (*stops, *config.rollout.stop_tokens)]
    end = next(iter((*turn_ends, *stop_ends)))
    assert end is not None
    never = adapter.never_drawn(config.rollout.control_tokens) - ends
    return PrefixForm(config.max_sampled_tokens, ends, end, never)


def _target_tokens(config: RunConfig, directory: Path, rows: Sequence[EvaluatedRow]) -> int:
    """Return the tokens of all answers: as the endpoint counts them, or by the target's tokenizer."""
    if config.scorer.is_served:
        usage = read_json(directory / USAGE_FILE, dict[str, Usage])
        return sum(counts.completion_tokens for counts in usage.values())
    target = texts_of(config, "scorer")
    return sum(int(target.encode(row.completion).size) for row in rows)


def _is_good(row: EvaluatedRow, min_reward: float | None) -> bool:
    if min_reward is None:
        return bool(row.completion)
    return row.status != "error" and row.reward >= min_reward


def _token_of(adapter: Renderer, stop: int | str) -> int:
    return stop if isinstance(stop, int) else int(adapter.encode(stop)[0])


def _answers(directory: Path, plan: WarmStartPlan) -> Iterator[EvaluatedRow]:
    for decoding in (GREEDY, f"{SAMPLED}{plan.samples}"):
        for path in sorted((directory / "evaluations").glob(f"{plan.arm}.*.{decoding}.jsonl")):
            yield from json_lines.each(path, EvaluatedRow)


def _prompts(config: RunConfig, adapter: Renderer) -> dict[str, TokenIds]:
    """Return the adapter's prompt of every problem that it can be asked."""
    prompts = {}
    for problem in problems.held_out(config):
        try:
            prompts[problem.prompt_id] = adapter.prompt(
                problem.question, problem.system, problem.earlier
            )
        except ValueError as error:
            log.warning("problem %s is left out: %s", problem.prompt_id, error)
    return prompts


@click.command()
@click.argument("directory", type=click.Path(path_type=Path))
def main(directory: Path) -> None:
    """Train the warm start planned in DIRECTORY."""
    start_logging("prefixrl-learner")
    with exit_codes(), own(directory):
        train(directory)


if __name__ == "__main__":
    main()
