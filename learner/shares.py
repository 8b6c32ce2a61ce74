"""What the books of a batch's groups say of its rows and texts. Pure, and without torch: the broker tells some of it."""

from collections import Counter
from collections.abc import Sequence

from prefixrl.common.messages import BatchGroup


def truncated_fraction(groups: Sequence[BatchGroup]) -> float:
    """Share of a batch's judged texts that a length limit cut: answers in direct mode, else completions of the target."""
    judged = sum(group.judged for group in groups)
    return sum(group.truncated for group in groups) / max(1, judged)


def cached_fraction(groups: Sequence[BatchGroup]) -> float:
    """Share of a batch's judged texts that were in a scorer's cache."""
    judged = sum(group.judged for group in groups)
    return sum(group.cached for group in groups) / max(1, judged)


def statuses(groups: Sequence[BatchGroup]) -> dict[str, int]:
    """Texts of a batch's groups by their verdict."""
    counts: Counter[str] = Counter()
    for group in groups:
        counts.update(group.statuses)
    return dict(counts)


def as_text_fraction(groups: Sequence[BatchGroup]) -> float:
    """Share of a batch's rows whose prefix reached the target as text, encoded by a tokenizer of another family."""
    rows = sum(len(group.rewards) for group in groups)
    return sum(group.as_text for group in groups) / max(1, rows)


def masked_fraction(groups: Sequence[BatchGroup]) -> float:
    """Share of the texts of a batch's groups that are left out of it because a length limit cut them."""
    masked = sum(group.statuses.get("truncated", 0) for group in groups)
    return masked / max(1, masked + sum(group.judged for group in groups))
