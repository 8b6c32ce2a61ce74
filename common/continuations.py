"""What the verdicts on several continuations of one prefix amount to. Pure.

The reward is the mean over those that were judged: a continuation whose verifier failed (`error`), or that is left out for
being cut (`truncated`), says nothing of the prefix. The rest of a row's verdict is that of one continuation, which says why the
row counts as it does.
"""

import statistics
from collections.abc import Sequence

from msgspec.structs import asdict, replace

from prefixrl.common.messages import TextVerdict, Verdict


def row_verdict(each: Sequence[TextVerdict]) -> Verdict:
    """A row's verdict from those of its continuations, at least one, in their order; a single one stands for itself.

    Status, fault, answer and finish are of the first continuation with status `ok`; without any, of the first that was judged;
    without any, of the first with status `error`; else of the first. Tokens are summed, the time is the longest, texts stay
    with the continuations.
    """
    if len(each) == 1:
        return Verdict(**asdict(each[0]))
    judged = [verdict for verdict in each if verdict.is_judged]
    return replace(
        Verdict(**asdict(min(each, key=_rank))),
        reward=statistics.fmean(verdict.reward for verdict in judged) if judged else 0.0,
        completion_tokens=sum(verdict.completion_tokens for verdict in each),
        elapsed_ms=max(verdict.elapsed_ms for verdict in each),
        completion="",
        was_cached=all(verdict.was_cached for verdict in each),
        continuations=tuple(each),
    )


def _rank(verdict: TextVerdict) -> int:
    if verdict.is_judged:
        return 0 if verdict.status == "ok" else 1
    return 2 if verdict.status == "error" else 3
