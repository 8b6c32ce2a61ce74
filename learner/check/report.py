"""Figures that follow from a config alone: batch arithmetic, rows in flight, memory."""

import math
from dataclasses import dataclass
from fractions import Fraction

from prefixrl.common.config.run import RunConfig
from prefixrl.learner.check import budget
from prefixrl.learner.check.disk_room import room_lines
from prefixrl.learner.check.model_shapes import parameters, unknown_size
from prefixrl.learner.check.process_model import process_lines
from prefixrl.learner.check.prompt_lengths import PromptLength, prompt_length
from prefixrl.learner.check.time import summed_rate, time_lines
from prefixrl.learner.data import problems

SMALL_PARAMETERS, SMALL_REACH, EXAMPLE_REACH = 250_000_000, 1e-3, 1.4e-2
"""Models whose weights must move further than the published recipe moves those of 1.5 billion parameters, and how far.
The last one is the sum of the arithmetic example, which trains."""


@dataclass(frozen=True)
class Forecast:
    """The text of `--check`, and the length of prompts that it assumes."""

    text: str
    prompt_tokens: int


def forecast(config: RunConfig) -> Forecast:
    """Return lines for a person; raise DataError for files, ConfigError for unfit matrices."""
    train, held_out = problems.read_all(config)
    count, algorithm = len(train.problems), config.algorithm
    rows = algorithm.groups_per_iteration * algorithm.samples_per_prompt
    iterations = config.iterations_in_all(count)
    window = algorithm.groups_per_iteration * (algorithm.max_staleness + 1)
    cap = math.ceil(Fraction(str(config.filter.over_sampling)) * window)
    times, factor = config.scorer.continuations, config.filter.over_sampling
    over_sampled = f", {factor:g} times over for what the filter takes" if factor > 1 else ""
    lines = [
        f"{count} training problems; {config.groups_in_all(count)} groups in {iterations} iterations",
        f"an iteration: {algorithm.groups_per_iteration} groups x {algorithm.samples_per_prompt} rows = {rows} rows, "
        f"{algorithm.ppo_epochs} x {min(algorithm.minibatches, rows)} optimiser steps; {config.steps_in_all(count)} "
        f"in all",
        *([f"every prefix completed {times} times: {times * rows} completions"] if times > 1 else []),
        f"under way at once: at most {cap} groups = {cap * algorithm.samples_per_prompt} "
        f"{'prefixes' if config.mode == 'prefix' else 'answers'} of up to {config.max_sampled_tokens} tokens "
        f"(window of {algorithm.max_staleness} versions{over_sampled})",
    ]
    data = [*_data("train", train), *_data("eval", held_out), *_shared(train, held_out)]
    asking, prompts = _asking(config, train)
    work = [*_memory(config, prompts.tokens), *time_lines(config, prompts, iterations)]
    return Forecast("\n".join([*data, *asking, *lines, *_reach(config, count), *work]), prompts.tokens)


def _reach(config: RunConfig, problems_count: int) -> list[str]:
    """Return how far the learning rate can move a weight, and a warning where that is nothing."""
    section, steps, known = config.learner, config.steps_in_all(problems_count), parameters(config.adapter.model)
    reach = summed_rate(section.actor_lr, steps, section.warmup_ratio, section.min_lr_ratio)
    lines = [
        f"learner.actor_lr = {section.actor_lr:g} over {steps} optimiser steps: no weight moves by more than about "
        f"{reach:.1e} in the whole run"
    ]
    if known and known[0] < SMALL_PARAMETERS and reach < SMALL_REACH:
        lines.append(
            f"warning: that hardly moves a model of {known[0] / 1e6:,.1f} M parameters (the arithmetic example's: "
            f"{EXAMPLE_REACH:.1e}); raise learner.actor_lr, or begin with the values of `prefixrl init --size tiny`"
        )
    return lines


def _shared(train: problems.Loaded, held_out: problems.Loaded) -> list[str]:
    """Return a warning where held-out questions, spacing aside, are trained too."""
    both = problems.shared(train.problems, held_out.problems)
    if not both:
        return []
    return [
        f"warning: {both} of {len(held_out.problems)} questions of data.eval are in data.train too, so that its "
        f"accuracy is partly that of training; take another split, or leave them out with `without`"
    ]


def _asking(config: RunConfig, train: problems.Loaded) -> tuple[list[str], PromptLength]:
    """Return how models are asked, what looks wrong about it, and the length of a prompt."""
    # Late: seconds of imports, only for `--check` and for learners that share a GPU.
    from prefixrl.common.prompts.asking import asking_lines, renderers_here

    here = renderers_here(config)
    lines = asking_lines(config, here, train.problems[0].question)
    return lines, prompt_length(config, problems.as_asked(config, train.problems), here.get("adapter"))


def _memory(config: RunConfig, prompt_tokens: int) -> list[str]:
    limit, plan = budget.device_bytes(config), budget.rank_plan(config, prompt_tokens)
    models = {"adapter": config.adapter.model}
    if config.target is not None and config.scorer.engine != "openai":
        models["target"] = config.target.model
    sizes = [f"{name}: {_size(model)}" for name, model in models.items()]
    learner = [*budget.learner_lines(plan, limit), *room_lines(config, plan)] if plan else []
    engines = [
        line for role in ("rollout", "scorer") for line in budget.engine_lines(config, role, prompt_tokens, limit)
    ]
    return [*sizes, *learner, *engines, *process_lines(config, limit)]


def _size(model: str) -> str:
    known = parameters(model)
    return f"{known[0] / 1e6:,.1f} M parameters ({known[1]})" if known else unknown_size(model)


def _data(kind: str, loaded: problems.Loaded) -> list[str]:
    """Return lines per source: counts of its rows, its first question, its first bad rows."""
    lines = []
    for report in loaded.sources:
        first = next(each for each in loaded.problems if each.source == report.label)
        lines.append(f"{kind}: {report}; the first: {first.question!r:.160} = {first.gold!r:.60}")
        lines += [f"  {row}" for row in report.bad[: problems.SHOWN_BAD_ROWS]]
    return lines
