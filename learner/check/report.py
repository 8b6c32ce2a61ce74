"""The text of `--check`: batch arithmetic, rows under way and memory, which follow from a config alone."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from prefixrl.common.config.algorithm import BOUND_TOKENS
from prefixrl.common.config.run import RunConfig
from prefixrl.learner.check import budget
from prefixrl.learner.check.disk_room import room_lines
from prefixrl.learner.check.footprint import CONTEXT_BYTES, GIB, learner_footprint
from prefixrl.learner.check.model_shapes import parameters, unknown_size
from prefixrl.learner.check.spending import spending_lines
from prefixrl.learner.data import problems
from prefixrl.learner.data.rows import Problem, text_of

if TYPE_CHECKING:
    from prefixrl.common.prompts.rendering import Renderer

LEAST_REACH = {30_000_000: (1e-3, "tiny"), 300_000_000: (2e-4, "small")}
"""Distance that weights must be able to move in models of up to so many parameters, which move further than the 1.5
billion parameters of the published recipe; and the size of `prefixrl init` for them."""
RENDERED = 128
"""Most questions that are rendered for the mean length of a prompt."""
TOKEN_CHARS, TEMPLATE_TOKENS = 3, 48
"""Guess without a tokenizer: characters per token of a question, and tokens of the chat template around it."""


@dataclass(frozen=True)
class Forecast:
    """The text of `--check`, the length of prompts that it assumes, and the problems that it read."""

    text: str
    prompt_tokens: int
    training: Sequence[Problem] = ()
    """The training problems."""


def forecast(config: RunConfig) -> Forecast:
    """Return lines for a person; raise DataError for files, ConfigError for unfit matrices."""
    # Late: seconds of imports, only for `--check` and for learners that share a GPU.
    from prefixrl.common.prompts.asking import asking_lines, renderers_here

    train, held_out = problems.read_all(config)
    renderers = renderers_here(config)
    prompt_tokens, origin = prompt_length(
        config, problems.as_asked(config, train.problems), renderers.get("adapter")
    )
    lines = [
        *_data("train", train),
        *_data("eval", held_out),
        *(f"warning: {each}" for each in problems.shared_lines(train, held_out)),
        *asking_lines(config, renderers, train.problems[0].question),
        *_arithmetic(config, len(train.problems)),
        *_evaluations(config, len(train.problems), len(held_out.problems)),
        *spending_lines(
            config,
            prompt_tokens,
            requests_to_endpoint(config, len(train.problems), len(held_out.problems)),
        ),
        *_reach(config, len(train.problems)),
        f"prompts of about {prompt_tokens} tokens, {origin}",
        *_positions(config, renderers, prompt_tokens),
        *_memory(config, prompt_tokens),
    ]
    return Forecast("\n".join(lines), prompt_tokens, train.problems)


def _positions(
    config: RunConfig, renderers: "dict[str, Renderer]", prompt_tokens: int
) -> list[str]:
    """Return a warning per model that has not the positions for a usual prompt and the longest answer."""
    lines = []
    for section, renderer in renderers.items():
        behind = config.max_sampled_tokens
        if section == "target":
            behind += config.scorer.max_new_tokens
        if prompt_tokens + behind > (renderer.positions or math.inf):
            lines.append(
                f"warning: {section}: a prompt of about {prompt_tokens} tokens and {behind} behind it are more than "
                f"the {renderer.positions} positions of the model, where texts end as if cut"
            )
    return lines


def _arithmetic(config: RunConfig, count: int) -> list[str]:
    algorithm = config.algorithm
    samples = config.algorithm.samples_per_prompt
    rows = algorithm.groups_per_iteration * samples
    window = algorithm.groups_per_iteration * (algorithm.max_staleness + 1)
    times = config.scorer.continuations
    factor = config.filter.over_sampling
    cap = math.ceil(Fraction(str(factor)) * window)
    over_sampled = f", {factor:g} times over for what the filter takes" if factor > 1 else ""
    texts = "prefixes" if config.mode == "prefix" else "answers"
    bound = (algorithm.bound_ratio or 1.0) if algorithm.loss_function is None else 1.0
    longer = math.sqrt(config.max_sampled_tokens / BOUND_TOKENS)
    iterations = config.iterations_in_all(count)
    steps = min(algorithm.minibatches, rows)
    return [
        f"{count} training problems; {config.groups_in_all(count)} groups in {iterations} iterations",
        f"an iteration: {algorithm.groups_per_iteration} groups x {samples} rows = {rows} rows, "
        f"{algorithm.ppo_epochs} x {steps} optimiser steps; {config.steps_in_all(count)} in all",
        *[f"every prefix completed {times} times: {times * rows} completions"] * (times > 1),
        *[
            f"drafts of the target: one for each of {min(count, config.groups_in_all(count))} training problems and of "
            f"the held-out ones, up to {config.scorer.max_new_tokens} tokens"
        ]
        * config.adapter.sees_draft,
        f"under way at once: at most {cap} groups = {cap * samples} {texts} of up to {config.max_sampled_tokens} "
        f"tokens (window of {algorithm.max_staleness} versions{over_sampled})",
        f"a row of so many tokens is pushed up to {bound ** max(1.0, longer):.3g} times (bound_ratio; 1: no bound)",
    ]


def _data(kind: str, loaded: problems.Loaded) -> list[str]:
    """Return lines per source: counts of its rows, its first question, its first bad rows."""
    lines = []
    for report in loaded.sources:
        first = next(each for each in loaded.problems if each.source == report.label)
        lines.append(f"{kind}: {report}; the first: {first.question!r:.160} = {first.gold!r:.60}")
        lines += [f"  {row}" for row in report.bad[: problems.SHOWN_BAD_ROWS]]
        lines += [f"warning: {kind}: {report.label}: {each}" for each in report.warnings]
    return lines


def prompt_length(
    config: RunConfig, problems: Sequence[Problem], renderer: "Renderer | None"
) -> tuple[int, str]:
    """Return the mean length of training prompts in tokens, and its origin; `renderer` is that of the rollouts."""
    most = config.rollout.max_prompt_tokens
    texts = sorted(problems, key=lambda each: len(text_of(each)))
    count = min(len(texts), RENDERED)
    # From the middle of each of `count` equal parts, so that no end counts twice.
    spread = [texts[(2 * part + 1) * len(texts) // (2 * count)] for part in range(count)]
    if not config.rollout.has_tokenizer:
        # Its tokens are the bytes of a question (`ByteRenderer`).
        sizes: list[int] = [len(each.question.encode()) for each in spread]
    elif renderer is not None:
        lengths = (_rendered_tokens(renderer, problem) for problem in spread)
        sizes = list(filter(None, lengths)) or [most]
    else:
        around = len(config.adapter.prompt_template or "") + len(config.adapter.system or "")
        chars = around + sum(len(text_of(each)) for each in spread) / count
        guess = min(most, math.ceil(chars / TOKEN_CHARS) + TEMPLATE_TOKENS)
        return guess, "guessed from their characters: the adapter's tokenizer is not on this host"
    mean, origin = (
        math.ceil(sum(sizes) / len(sizes)),
        f"the mean of {count} questions of data.train",
    )
    if config.adapter.sees_draft:
        # A draft has the tokens of another tokenizer, but hardly more of them.
        mean = min(most, mean + config.scorer.max_new_tokens)
        origin += ", each with a draft of scorer.max_new_tokens"
    return mean, origin


def forecast_gib(config: RunConfig, training: Sequence[Problem]) -> dict[str, float]:
    """Return what a rank will reserve of its device, for `metrics.jsonl`; nothing for a model of unknown size."""
    from prefixrl.common.prompts.asking import renderers_here

    tokens, _ = prompt_length(
        config, problems.as_asked(config, training), renderers_here(config).get("adapter")
    )
    plan = budget.rank_plan(config, tokens)
    return {"forecast_gib": (learner_footprint(plan).peak - CONTEXT_BYTES) / GIB} if plan else {}


def _rendered_tokens(renderer: "Renderer", problem: Problem) -> int | None:
    """Return the length of one prompt; None for one that is too long to be asked in the run."""
    try:
        return int(renderer.prompt(problem.question, problem.system, problem.earlier).size)
    except ValueError:
        return None


def summed_rate(peak: float, steps: int, warmup_ratio: float, min_ratio: float) -> float:
    """Return the sum of the learning rate over a run: about the most that AdamW moves a weight by."""
    warmup = math.ceil(steps * warmup_ratio)
    falling = steps - warmup
    # Values of a cosine at evenly spaced steps, both ends among them, have the mean of the ends.
    mean = (1 + min_ratio) / 2 if falling > 1 else 1.0
    return peak * ((warmup + 1) / 2 * (warmup > 0) + falling * mean)


def _answers_of_choice(config: RunConfig, trained: int) -> int:
    """Return the answers by which a fixed prefix is chosen."""
    settings = config.evaluation
    candidates = 1 + len(settings.fixed_prefixes) + settings.sampled_candidates
    arms = 1 if config.mode == "direct" else 2
    return (arms - 1) * candidates * min(settings.selection_problems, trained)


def _answers_of_arms(config: RunConfig, held_out: int) -> int:
    """Return the answers of the arms before training, as many as after it: greedy and sampled ones."""
    arms = 1 if config.mode == "direct" else 2
    return arms * 2 * min(held_out, config.evaluation.problems or held_out)


def requests_to_endpoint(config: RunConfig, trained: int, held_out: int) -> dict[str, int]:
    """Return the answers that a run asks of its target: in training, for drafts, in evaluations."""
    groups = config.groups_in_all(trained)
    evaluated = min(held_out, config.evaluation.problems or held_out)
    drafts = min(trained, groups) + evaluated if config.adapter.sees_draft else 0
    return {
        "training": groups * config.algorithm.samples_per_prompt * config.scorer.continuations,
        **({"drafts": drafts} if drafts else {}),
        "evaluations": _answers_of_evaluations(config, trained, held_out),
    }


def _answers_of_evaluations(config: RunConfig, trained: int, held_out: int) -> int:
    """Return the answers of all evaluations of a run: before, in and after training."""
    every = config.evaluation.every
    # The last version may be due in training, too; then it is judged once.
    versions = (config.iterations_in_all(trained) - 1) // every if every else 0
    in_training = versions * min(held_out, config.evaluation.problems or held_out)
    return (
        _answers_of_choice(config, trained) + 2 * _answers_of_arms(config, held_out) + in_training
    )


def _evaluations(config: RunConfig, trained: int, held_out: int) -> list[str]:
    """Return the work of the evaluations before and after training."""
    rows = config.algorithm.groups_per_iteration * config.algorithm.samples_per_prompt
    choice = _answers_of_choice(config, trained)
    judged = _answers_of_arms(config, held_out)
    chosen = f" ({choice} of them to choose a fixed prefix: evaluation.selection_problems)"
    return [
        f"evaluation beside the first iterations: {judged + choice} answers{chosen if choice else ''}, as many as in "
        f"{(judged + choice) / rows:.1f} iterations; {judged} after training"
    ]


def _reach(config: RunConfig, count: int) -> list[str]:
    """Return how far the learning rate can move a weight, and a warning where that is nothing."""
    section = config.learner
    steps = config.steps_in_all(count)
    weights = parameters(config.adapter.model)
    reach = summed_rate(section.actor_lr, steps, section.warmup_ratio, section.min_lr_ratio)
    lines = [
        f"learner.actor_lr = {section.actor_lr:g} over {steps} optimiser steps: no weight moves by more than about "
        f"{reach:.1e} in the whole run"
    ]
    sizes = (each for most, each in LEAST_REACH.items() if weights and weights[0] < most)
    least, size = next(sizes, (0.0, ""))
    if weights and reach < least:
        lines.append(
            f"warning: that hardly moves a model of {weights[0] / 1e6:,.1f} M parameters; raise learner.actor_lr (to "
            f"at least {least:.0e} in all), or begin with the values of `prefixrl init --size {size}`"
        )
    return lines


def _memory(config: RunConfig, prompt_tokens: int) -> list[str]:
    limit = budget.device_bytes(config)
    plan = budget.rank_plan(config, prompt_tokens)
    models = {"adapter": config.adapter.model}
    if config.target is not None and not config.scorer.is_served:
        models["target"] = config.target.model
    learner = [*budget.learner_lines(plan, limit), *room_lines(config, plan)] if plan else []
    rollout, scorer = (
        budget.engine_lines(config, role, prompt_tokens, limit) for role in ("rollout", "scorer")
    )
    sizes = [f"{name}: {_size(model)}" for name, model in models.items()]
    return [*sizes, *learner, *rollout, *scorer, *budget.process_lines(config, limit)]


def _size(model: str) -> str:
    size = parameters(model)
    return f"{size[0] / 1e6:,.1f} M parameters ({size[1]})" if size else unknown_size(model)
