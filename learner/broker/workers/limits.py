"""Most that a group may hold in a run, by its config and the adapter's model."""

from dataclasses import replace

from prefixrl.common.config.run import RunConfig
from prefixrl.common.models.config_file import embedding_rows
from prefixrl.common.wire.messages.groups import TaskKind
from prefixrl.common.wire.packing import MOST_CHARS_PER_TOKEN, GroupLimits

UNKNOWN_VOCABULARY = 2**20
"""Bound where no config.json of the adapter names a vocabulary: more tokens than any model has."""


class RunLimits:
    """The limits of a run's groups."""

    def __init__(self, config: RunConfig) -> None:
        self._scorer = config.scorer
        if config.rollout.engine == "simulated":
            # Its tokens are bytes and versions, its prompts have no limit, and no model reads them.
            self._training = GroupLimits(row_tokens=config.max_sampled_tokens)
        else:
            self._training = GroupLimits(
                prompt_tokens=config.rollout.max_prompt_tokens, row_tokens=config.max_sampled_tokens,
                vocabulary=embedding_rows(config.adapter.model) or UNKNOWN_VOCABULARY,
            )  # fmt: skip

    def prefixes(self, row_tokens: int | None) -> GroupLimits:
        """Return the limits of sampled groups; `row_tokens`: of an evaluation, None in training."""
        return self._training if row_tokens is None else replace(self._training, row_tokens=row_tokens)

    def completion_chars(self, kind: TaskKind, row_tokens: int, new_tokens: int) -> int:
        """Return the longest text that a verdict may carry; 0 where texts are not kept."""
        if kind == "train" and not self._scorer.keep_completions:
            return 0
        return MOST_CHARS_PER_TOKEN * (row_tokens + new_tokens + self._scorer.most_extension_tokens)
