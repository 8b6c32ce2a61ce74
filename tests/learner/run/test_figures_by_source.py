"""Reward, accuracy and filtered fraction of every source, against sums by hand and against the ledger's own groups."""

import math
from fractions import Fraction

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given

from prefixrl.common.wire.messages.groups import BatchGroup, StageTimes
from prefixrl.learner.broker.groups.filtering import AccuracyFilter
from prefixrl.learner.broker.groups.ledger import Ledger
from prefixrl.learner.broker.groups.states import LedgerLimits
from prefixrl.learner.broker.groups.window import Window
from prefixrl.learner.data.rows import MOST_FAMILIES, Problem, prompts
from prefixrl.learner.run.fractions import by_source
from support.broker.ledger_steps import sample, score
from support.broker.ledger_world import Places

SOURCES = ["own", "set/easy", "set/hard", "set"]
NONE = BatchGroup(
    seq=0,
    prompt_id="p",
    version=0,
    weights_digest="d",
    lengths=(),
    rewards=(),
    stages=StageTimes(0.0, 0.0, 0.0, 0.0),
    statuses={},
)

rewards = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), max_size=4)
counts = st.dictionaries(st.sampled_from(SOURCES), st.integers(0, 9))


def group(source: str, *given: float) -> BatchGroup:
    return msgspec.structs.replace(NONE, source=source, rewards=tuple(given))


def one_by_one(
    groups: list[tuple[str, list[float]]], passed: dict[str, int], filtered: dict[str, int]
) -> dict[str, Fraction]:
    """The figures as the page words them."""
    results: dict[str, Fraction] = {}
    for name in SOURCES:
        own = [
            reward
            for source, each in groups
            for reward in each
            if source == name or source.startswith(f"{name}/")
        ]
        if own:
            results[f"reward/{name}"] = sum(map(Fraction, own), Fraction()) / len(own)
            results[f"accuracy/{name}"] = Fraction(own.count(1.0), len(own))
        left_out, in_all = 0, 0
        for source in SOURCES:
            if source == name or source.startswith(f"{name}/"):
                left_out += filtered.get(source, 0)
                in_all += filtered.get(source, 0) + passed.get(source, 0)
        if in_all:
            results[f"filtered_fraction/{name}"] = Fraction(left_out, in_all)
    return results


@given(st.lists(st.tuples(st.sampled_from(SOURCES), rewards), max_size=8), counts, counts)
def test_figures_are_those_counted_one_by_one(
    groups: list[tuple[str, list[float]]], passed: dict[str, int], filtered: dict[str, int]
) -> None:
    actual = by_source([group(source, *each) for source, each in groups], passed, filtered)
    expected = one_by_one(groups, passed, filtered)
    assert actual.keys() == expected.keys()
    assert all(math.isclose(actual[name], expected[name], abs_tol=1e-12) for name in actual)


def test_a_program_that_passes_some_tests_is_rewarded_and_not_right() -> None:
    actual = by_source([group("eurus2_rl/taco", 0.4, 1.0), group("eurus2_rl/olympiads", 0.0, 1.0)])
    assert actual["reward/eurus2_rl/taco"] == pytest.approx(0.7)
    assert actual["accuracy/eurus2_rl/taco"] == 0.5
    assert actual["reward/eurus2_rl"] == pytest.approx(0.6)


def test_beside_step_rewards_accuracy_is_that_of_the_verdicts() -> None:
    mixed = msgspec.structs.replace(
        group("math500", 0.9, 0.85, 0.2, 0.8), outcomes=(1.0, 1.0, 0.0, 1.0)
    )
    actual = by_source([mixed])
    assert actual["accuracy/math500"] == 0.75 and actual["reward/math500"] == pytest.approx(0.6875)


def test_the_ledger_counts_what_a_filter_does_by_the_source_of_the_prompt_and_so_does_its_successor() -> (
    None
):
    def make() -> Ledger:
        return Ledger(
            Window(6, 0, iterations=1),
            LedgerLimits(1, 2, 3),
            Places(None),
            AccuracyFilter(0.2, 0.8, 99, 0.0),
        )

    ledger, records = make(), []
    seqs = sample(ledger)
    for seq, drawn in zip(
        seqs, ((1.0, 0.0), (1.0, 1.0), (0.0, 0.0), (0.0, 0.0), (1.0, 0.0)), strict=False
    ):
        score(ledger, seq, *drawn)
        records += ledger.records
        ledger.records.clear()
    successor = make()
    successor.replay(records, 0)
    for some_ledger in (ledger, successor):
        assert some_ledger.counts.passed_by_source == {"even": 2}
        assert some_ledger.counts.filtered_by_source == {"odd": 2, "even": 1}


def test_families_have_figures_of_their_own_where_they_are_few() -> None:
    def named(families: int, source: str) -> list[Problem]:
        return [
            Problem(f"{source}:{n}", "?", "1", family=f"f{n}", source=source)
            for n in range(families)
        ]

    few, many, none = (
        named(2, "few"),
        named(MOST_FAMILIES + 1, "many"),
        [Problem("x", "?", "1", source="none")],
    )
    actual = [each.source for each in prompts([*few, *many, *none])]
    assert actual == ["few/f0", "few/f1", *["many"] * (MOST_FAMILIES + 1), "none"]
