"""One verdict from those on several continuations, one score from those of steps. Pure."""

import math
import statistics
from collections.abc import Sequence
from typing import Literal

from msgspec.structs import asdict, replace

from prefixrl.common.wire.messages.groups import TextVerdict, Verdict

Aggregate = Literal["last", "min", "mean", "product"]


def aggregated(scores: Sequence[float], how: Aggregate) -> float:
    """Return one score from those of the steps, 0 without any."""
    if not scores:
        return 0.0
    match how:
        case "last":
            return scores[-1]
        case "min":
            return min(scores)
        case "mean":
            return statistics.fmean(scores)
        case "product":
            return math.prod(scores)


def row_verdict(texts: Sequence[TextVerdict]) -> Verdict:
    """Return the verdict on a row from those on its continuations (at least one, in order).

    Status, fault, answer and finish come from the first continuation with status `ok`; without any, from the first that
    was judged; without any, from the first with status `error`; else from the first. Tokens are summed, the time is the
    longest, `stopped_share` is a mean, texts stay with the continuations. A single continuation gives its verdict to
    the row.
    """
    if len(texts) == 1:
        return Verdict(**asdict(texts[0]))
    judged = [verdict for verdict in texts if verdict.is_judged]
    return replace(
        Verdict(**asdict(min(texts, key=_rank))),
        reward=statistics.fmean(verdict.reward for verdict in judged) if judged else 0.0,
        completion_tokens=sum(verdict.completion_tokens for verdict in texts),
        elapsed_ms=max(verdict.elapsed_ms for verdict in texts),
        completion="",
        process=None,
        was_cached=all(verdict.was_cached for verdict in texts),
        stopped_share=statistics.fmean(verdict.stopped_share for verdict in texts),
        continuations=tuple(texts),
    )


def _rank(verdict: TextVerdict) -> int:
    if verdict.is_judged:
        return 0 if verdict.status == "ok" else 1
    return 2 if verdict.status == "error" else 3
