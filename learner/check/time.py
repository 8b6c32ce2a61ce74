"""Work of an iteration, and the seconds it takes at declared speeds: pure formulas."""

import math
from dataclasses import dataclass

from prefixrl.common.config.learner import LearnerConfig
from prefixrl.common.config.run import RunConfig
from prefixrl.learner.check.budget import planned, section_of
from prefixrl.learner.check.model_shapes import parameters, shape_of
from prefixrl.learner.check.prompt_lengths import PromptLength


@dataclass(frozen=True)
class IterationWork:
    """One iteration of the learner: passes over its rows, and how long they are."""

    rows: int
    prompt_tokens: int
    """Tokens of a prompt; an estimate before the tokenizer is read."""
    sampled_tokens: int
    """Most tokens that the adapter writes per row."""
    prompts: int
    """Prompts that a forward computes: one per line of rows that share it."""
    epochs: int
    has_critic: bool
    has_reference: bool
    is_measured: bool
    """True if the proximal policy is measured by a forward pass of its own."""
    is_checkpointed: bool
    is_scored: bool = False
    """True with an implicit reward model."""
    is_scorer_trained: bool = False
    """True if that learns too."""

    @property
    def tokens(self) -> int:
        """Tokens of a forward over all rows."""
        return self.prompts * self.prompt_tokens + self.rows * self.sampled_tokens

    @property
    def forwards(self) -> int:
        """Forward-equivalents: a backward pass costs two, and one more where layers run again."""
        once = 4 if self.is_checkpointed else 3
        models = 2 if self.has_critic else 1
        measured = int(self.is_measured) + int(self.has_critic) + int(self.has_reference)
        # Its own logprobs and those of its reference; it sees each row once, whatever the epochs.
        scored = 2 * int(self.is_scored) + once * int(self.is_scorer_trained)
        return measured + models * self.epochs * once + scored


def learner_s(work: IterationWork, parameters: int, ranks: int, tflops: float) -> float:
    """Return the seconds of an iteration; 2 operations per parameter, token and forward."""
    return 2.0 * parameters * work.tokens * work.forwards / (tflops * 1e12 * ranks)


def engine_s(tokens: int, workers: int, tokens_per_s: float) -> float:
    """Return the seconds that `workers` engines take to write `tokens`."""
    return tokens / (workers * tokens_per_s)


def summed_rate(peak: float, steps: int, warmup_ratio: float, min_ratio: float) -> float:
    """Return the sum of the learning rate over a run's steps: warm-up, then the cosine.

    AdamW moves a weight by about the rate per step, so by no more than this in a whole run.
    """
    warmup = math.ceil(steps * warmup_ratio)
    falling = steps - warmup
    # Values of a cosine at evenly spaced steps, both ends among them, have the mean of the ends.
    mean = (1 + min_ratio) / 2 if falling > 1 else 1.0
    return peak * ((warmup + 1) / 2 * (warmup > 0) + falling * mean)


def time_lines(config: RunConfig, prompts: PromptLength, iterations: int) -> list[str]:
    """Return the work of an iteration, its seconds at the declared speeds, and the run's."""
    known, algorithm = parameters(config.adapter.model), config.algorithm
    if known is None:
        return []
    work, ranks, tflops = _work(config, prompts.tokens), config.launch.learner_ranks, config.learner.device_tflops
    own_s = learner_s(work, _computed(config.adapter.model, known[0]), ranks, tflops)
    engines_s = {
        role: engine_s(tokens, workers, section_of(config, role).expected_tokens_per_s)
        for role, (tokens, workers) in _written(config).items()
    }
    head = f"an iteration of the learner: {work.forwards} forward-equivalents over {work.tokens:,} tokens"
    is_set = _is_set(config.learner, "device_tflops")
    if config.learner.device == "cpu" and not is_set:
        why = 'learner.device = "cpu", and learner.device_tflops is not set: its default is about that of an H100'
        learner = f"{head} ({prompts.text}), {ranks} ranks; no seconds of it or of the run, since {why}"
        return [learner, *_engine_lines(config, engines_s)]
    speed = f"learner.device_tflops = {tflops:g}{'' if is_set else ' (not set: about that of an H100)'}"
    is_overlapped = algorithm.max_staleness > 0
    iteration_s = (max if is_overlapped else sum)([own_s, *engines_s.values()])
    how = "side by side" if is_overlapped else "one after the other (max_staleness = 0)"
    return [
        f"{head} ({prompts.text}): {_figure(own_s, 's')} at {speed}, {ranks} ranks",
        *_engine_lines(config, engines_s),
        f"an iteration, these {how}: {_figure(iteration_s, 's')}; {iterations} iterations: "
        f"{_figure(iterations * iteration_s / 3600, 'h')}, evaluations and verification apart",
    ]


def _work(config: RunConfig, prompt_tokens: int) -> IterationWork:
    algorithm, reward = config.algorithm, config.implicit_reward
    plan, _ = planned(config, prompt_tokens)
    return IterationWork(
        rows=_rows(config),
        prompt_tokens=prompt_tokens,
        sampled_tokens=config.max_sampled_tokens,
        prompts=sum(len(micro) for minibatch in plan for share in minibatch for micro in share),
        epochs=algorithm.ppo_epochs,
        has_critic=algorithm.has_critic,
        has_reference=algorithm.kl > 0,
        # Of the first minibatch it may be spared (`iteration.is_measured_late`): that is not counted.
        is_measured=algorithm.proximal == "measured",
        is_checkpointed=config.learner.gradient_checkpointing,
        is_scored=reward is not None,
        is_scorer_trained=reward is not None and reward.update != "none",
    )


def _rows(config: RunConfig) -> int:
    return config.algorithm.groups_per_iteration * config.algorithm.samples_per_prompt


def _computed(model: str, count: int) -> int:
    """Return the parameters that a token of a forward passes; all experts of a mixture count."""
    shape = shape_of(model)
    # The embedding is a look-up, the output head runs at sampled positions alone.
    return count - (shape.embedding * (1 if shape.is_tied else 2) if shape else 0)


def _written(config: RunConfig) -> dict[str, tuple[int, int]]:
    """Return the most tokens that engines write in an iteration, and their number, by role."""
    found = {"rollout": (_rows(config) * config.max_sampled_tokens, config.launch.rollouts)}
    if config.target is not None and config.scorer.engine != "openai":
        completions = _rows(config) * config.scorer.continuations
        found["scorer"] = (completions * config.scorer.max_new_tokens, config.launch.scorers)
    return found


def _engine_lines(config: RunConfig, engines_s: dict[str, float]) -> list[str]:
    return [
        f"an iteration of {workers} {role}s: at most {tokens:,} tokens, {_figure(engines_s[role], 's')} at "
        f"{role}.expected_tokens_per_s = {section_of(config, role).expected_tokens_per_s:g}; less where texts end "
        f"before their limit"
        for role, (tokens, workers) in _written(config).items()
    ]


def _is_set(section: LearnerConfig, key: str) -> bool:
    """Return True if the user set a key; a resolved config names those at a default too."""
    given, fields = section.model_fields_set, type(section).model_fields
    return key in given and not (given >= fields.keys() and getattr(section, key) == fields[key].get_default())


def _figure(time: float, unit: str) -> str:
    return f"{time:.1f} {unit}" if time >= 0.05 else f"less than 0.1 {unit}"
