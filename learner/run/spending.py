"""The end of a run by its cost, as the learner sees it."""

from pathlib import Path

from prefixrl.common.config.run import RunConfig
from prefixrl.common.errors import ConfigError, DataError, to_copy
from prefixrl.common.run.documents import CostEnd, summary_of
from prefixrl.common.run.status import StatusDocument

KEY = "scorer.openai.most_cost"


def cost_sentence(reason: str, iterations: int, directory: Path) -> str:
    """Return that cost ended a run, why, and how it goes on."""
    more = to_copy("prefixrl resume", directory, "--set", f"{KEY}=N")
    return f"ended in order after {iterations} iterations: {reason}; {more} goes on"


def cost_end(reason: str, iterations: int, config: RunConfig) -> CostEnd | None:
    """Return the part of the summary about an end by cost; None without one."""
    most_cost = config.scorer.openai.most_cost
    if not reason or most_cost is None:
        return None
    sentence = cost_sentence(reason, iterations, Path(config.directory))
    return CostEnd(most_cost=most_cost, reason=sentence)


def is_affordable(status: StatusDocument, answers: int, config: RunConfig) -> bool:
    """Return True unless so many more answers, at the usual cost of a request, exceed the run's ceiling."""
    most_cost, endpoint = config.scorer.openai.most_cost, status.endpoint
    if most_cost is None or endpoint is None or not endpoint.cost:
        return True
    return endpoint.cost * (1 + answers / max(1, endpoint.requests)) <= most_cost


def check_spending(config: RunConfig) -> None:
    """Raise ConfigError for a run that ended by its cost and has no higher ceiling now."""
    most_cost = config.scorer.openai.most_cost
    try:
        summary = summary_of(Path(config.directory))
    except DataError:
        return  # it is written anew
    end = summary.ended_by_cost if summary else None
    if most_cost is not None and end is not None and most_cost <= end.most_cost:
        raise ConfigError(f"{config.directory} has {end.reason} (now {KEY} = {most_cost:g})")
