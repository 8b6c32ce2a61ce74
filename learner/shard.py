"""From a batch as it came over the wire to what the training core takes: pure."""

from prefixrl.common.config import RunConfig
from prefixrl.common.messages import Batch, ScoredGroup
from prefixrl.common.packing import logprobs, token_ids, token_versions
from prefixrl.learner.batch import IterationData, Sample


def iteration_data(batch: Batch, shard: list[ScoredGroup]) -> IterationData:
    """This rank's view of an iteration; rows are the trainable rows of the groups in batch order.

    Raises:
        ValueError: a payload is not the group the batch names, or its packed arrays are malformed.
    """
    lengths = tuple(length for group in batch.groups for length in group.lengths)
    rewards = tuple(reward for group in batch.groups for reward in group.rewards)
    groups = tuple(index for index, group in enumerate(batch.groups) for _ in group.lengths)
    first_row = [0]
    for group in batch.groups:
        first_row.append(first_row[-1] + len(group.lengths))
    samples: dict[int, Sample] = {}
    for index, scored in zip(batch.payload_groups, shard, strict=True):
        if scored.prefixes.seq != batch.groups[index].seq:
            raise ValueError(
                f"payload holds group {scored.prefixes.seq}, the batch names {batch.groups[index].seq}"
            )
        for offset, sample in enumerate(_samples(scored, index)):
            samples[first_row[index] + offset] = sample
    return IterationData(batch.iteration, batch.seed, lengths, rewards, groups, samples)


def _samples(scored: ScoredGroup, group: int) -> list[Sample]:
    prompt = token_ids(scored.prefixes.prompt_tokens)
    samples = []
    for row, verdict in zip(scored.prefixes.rows, scored.verdicts, strict=True):
        if not verdict.is_judged:
            continue
        tokens = token_ids(row.tokens)
        behaviour = logprobs(row.logprobs, tokens.size)
        versions = token_versions(row)
        samples.append(Sample(prompt, tokens, behaviour, verdict.reward, group, versions))
    return samples


def steps_in_all(config: RunConfig, problems: int) -> int:
    """Optimiser steps of the whole run, for the learning rate; the last iteration may have too few rows for all."""
    algorithm = config.algorithm
    groups, per_iteration = config.groups_in_all(problems), algorithm.groups_per_iteration
    last_groups = groups - (config.iterations_in_all(problems) - 1) * per_iteration
    last = min(algorithm.minibatches, last_groups * algorithm.samples_per_prompt)
    return algorithm.ppo_epochs * (
        (config.iterations_in_all(problems) - 1) * algorithm.minibatches + last
    )
