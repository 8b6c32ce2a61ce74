"""The forecast of `--check` for a target behind an endpoint: requests, tokens, cost, least time.

Training, drafts and evaluations apart. The upper bound takes every completion at its limit. What this run's folder has
measured so far, in the newest lines of its metrics, gives an expectation beside it.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from prefixrl.common.config.run import RunConfig
from prefixrl.common.errors import DataError
from prefixrl.common.run.documents import newest_metrics
from prefixrl.common.run.status import UsageTotal


@dataclass(frozen=True)
class Spending:
    """Requests to an endpoint, and their tokens."""

    requests: int
    prompt_tokens: float
    completion_tokens: float

    def cost(self, config: RunConfig) -> float:
        """Return the cost at the run's prices."""
        return config.scorer.openai.cost(self.prompt_tokens, self.completion_tokens)

    def in_words(self, config: RunConfig) -> str:
        """Return tokens and cost."""
        prompts, completions = f"{self.prompt_tokens:,.0f}", f"{self.completion_tokens:,.0f}"
        cost = f", cost {self.cost(config):,.2f}" if config.scorer.openai.has_price else ""
        return f"{prompts} prompt and {completions} completion tokens{cost}"

    def least_s(self, config: RunConfig) -> float:
        """Return the least time that the run's limits allow; 0 without limits."""
        section = config.scorer.openai
        tokens = self.prompt_tokens + self.completion_tokens
        return 60 * max(
            self.requests / (section.requests_per_minute or math.inf),
            tokens / (section.tokens_per_minute or math.inf),
        )


def spending_lines(config: RunConfig, prompt_tokens: int, requests: Mapping[str, int]) -> list[str]:
    """Return lines about the endpoint; none where the target is not served.

    Args:
        prompt_tokens: usual length of a prompt.
        requests: number of answers, by their use: training, drafts, evaluations.
    """
    if not config.scorer.is_served:
        return []
    measured = _measured(config)
    lines = []
    for name, count in requests.items():
        limit = _completion_limit(config, is_evaluation=name == "evaluations")
        # An extension sends prompt and completion again.
        most_count = count * (1 + (config.scorer.truncated == "extend"))
        prompts = most_count * (prompt_tokens + config.max_sampled_tokens)
        prompts += (most_count - count) * config.scorer.max_new_tokens
        most = Spending(most_count, prompts, count * limit)
        lines.append(
            f"{name}: at most {most_count:,} requests to the endpoint, {most.in_words(config)}"
            f"{_time_words(config, most)}"
        )
        if measured is not None:
            part = count / measured.requests
            usual = Spending(
                count, part * measured.prompt_tokens, part * measured.completion_tokens
            )
            lines.append(
                f"  expected by the {measured.requests:,} requests so far: {usual.in_words(config)}"
                f"{_time_words(config, usual)}"
            )
    return [*lines, *_ceiling_lines(config, measured)]


def _completion_limit(config: RunConfig, is_evaluation: bool) -> int:
    limit = config.scorer.max_new_tokens
    if is_evaluation:
        limit = config.evaluation.max_new_tokens or limit
    return limit + config.scorer.most_extension_tokens


def _measured(config: RunConfig) -> UsageTotal | None:
    """Return what the run has used of its endpoint so far; None before its first iteration."""
    try:
        newest = next(iter(newest_metrics(Path(config.directory))), None)
    except (DataError, OSError):
        return None
    usage = newest.endpoint if newest else None
    return usage if usage and usage.requests else None


def _time_words(config: RunConfig, spending: Spending) -> str:
    if not config.scorer.openai.is_limited:
        return ""
    return f", in {spending.least_s(config) / 3600:,.1f} h or more ({config.scorer.openai.limit_words})"


def _ceiling_lines(config: RunConfig, measured: UsageTotal | None) -> Iterator[str]:
    section = config.scorer.openai
    if section.most_cost is not None:
        spent = ""
        if measured is not None:
            cost = section.cost(measured.prompt_tokens, measured.completion_tokens)
            spent = f"; {cost:,.2f} is spent"
        yield f"the run ends in order before it costs more than {section.NAME}.most_cost = {section.most_cost:g}{spent}"
