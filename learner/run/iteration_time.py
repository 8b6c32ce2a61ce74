"""Work of an iteration and its seconds at the speeds that a config declares: lines."""

from prefixrl.common.config.learner import LearnerConfig
from prefixrl.common.config.run import RunConfig
from prefixrl.learner.check.budget import planned, section_of
from prefixrl.learner.check.model_shapes import parameters, shape_of
from prefixrl.learner.check.prompt_lengths import PromptLength
from prefixrl.learner.check.time import IterationWork, engine_s, learner_s


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
