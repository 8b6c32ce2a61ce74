"""Fractions of a batch, from its `BatchGroup` records. Imports no torch."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from prefixrl.common.wire.messages.groups import BatchGroup


def batch_fractions(groups: Sequence[BatchGroup]) -> dict[str, float]:
    """Return the figures that `docs/data.md` describes, by name."""
    judged = sum(group.judged for group in groups)
    masked = sum(group.statuses.get("truncated", 0) for group in groups)
    rows = max(1, sum(len(group.rewards) for group in groups))
    texts = Counter(text for group in groups for text in group.texts)
    row_sums = defaultdict[str, float](float)
    parts = defaultdict[str, list[float]](list)
    for group in groups:
        for figure, total in group.figure_sums.items():
            row_sums[figure] += total
        for name, values in group.parts.items():
            parts[name] += values
    return {
        # Judged texts that a length limit cut: answers in direct mode, else completions of the target.
        "truncated_fraction": sum(group.truncated for group in groups) / max(1, judged),
        # Texts that are left out because a length limit cut them.
        "truncated_masked_fraction": masked / max(1, masked + judged),
        # Rows with the commonest text of the adapter, and different texts over rows.
        "commonest_text_fraction": max(texts.values(), default=0) / rows,
        "distinct_texts_fraction": len(texts) / rows,
        # Judged texts that a scorer's cache held.
        "cached_fraction": sum(group.cached for group in groups) / max(1, judged),
        # Fields of rows and verdicts that are marked `RowFigure`.
        **{figure: total / rows for figure, total in row_sums.items()},
        **process_figures(groups),
        **{f"reward_part/{name}": sum(each) / len(each) for name, each in parts.items()},
    }


def process_figures(groups: Sequence[BatchGroup]) -> dict[str, float]:
    """Return the figures of a run with `scorer.prm`, empty for any other."""
    # In a mixed batch a group without any scored text has its rewards as outcomes.
    outcomes = [group.outcomes or group.rewards for group in groups if group.rewards]
    if not any(group.outcomes for group in groups):
        return {}
    rows = [outcome for group in outcomes for outcome in group]
    steps = sum(group.steps for group in groups)
    return {
        "outcome": sum(rows) / len(rows),
        "step_score": sum(group.step_score_sum for group in groups) / max(1, steps),
        "steps": steps / len(rows),
        "all_right_groups_fraction": sum(min(each) >= 1.0 for each in outcomes) / len(outcomes),
        "all_wrong_groups_fraction": sum(max(each) <= 0.0 for each in outcomes) / len(outcomes),
    }


def by_source(
    groups: Sequence[BatchGroup],
    passed: Mapping[str, int] | None = None,
    filtered: Mapping[str, int] | None = None,
) -> dict[str, float]:
    """Return reward, accuracy and filtered fraction of every source; one with families has them in all, too."""
    rewards = defaultdict[str, list[float]](list)
    outcomes = defaultdict[str, list[float]](list)
    for group in groups:
        for name in _names(group.source):
            rewards[name] += group.rewards
            # With step rewards an answer's reward is no verdict.
            outcomes[name] += map(is_right, group.outcomes or group.rewards)
    figures = {
        f"{figure}/{name}": sum(values) / len(values)
        for figure, values_by_name in (("reward", rewards), ("accuracy", outcomes))
        for name, values in values_by_name.items()
        if values
    }
    filtered_groups = Counter[str]()
    judged_groups = Counter[str]()
    for source, count in (filtered or {}).items():
        filtered_groups.update(dict.fromkeys(_names(source), count))
    for counts in (passed or {}, filtered or {}):
        for source, count in counts.items():
            judged_groups.update(dict.fromkeys(_names(source), count))
    return figures | {
        f"filtered_fraction/{name}": filtered_groups[name] / count
        for name, count in judged_groups.items()
        if count
    }


def is_right(reward: float) -> bool:
    """Return True for a full reward: of a program one that passed every test."""
    return reward >= 1.0


def _names(source: str) -> list[str]:
    return sorted({source.partition("/")[0], source} - {""})


def statuses(groups: Sequence[BatchGroup]) -> dict[str, int]:
    """Return the texts of a batch's groups by verdict."""
    counts = Counter[str]()
    for group in groups:
        counts.update(group.statuses)
    return dict(counts)
