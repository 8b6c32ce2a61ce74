"""The promise of the window, proved from the tokens of what was trained.

Never older than S, nothing discarded for its age.

Runs of 2,000 groups through a real broker, real sockets and the real worker loops, scoring times heavy-tailed
(lognormal). The ages are computed from what the engines wrote into the tokens, never from the ledger's books. Nothing
asserted depends on time."""

import sys
from pathlib import Path

import pytest

from e2e.simulated_run import Trained, config_of, run, until_full
from prefixrl.common.wire.messages.learner import CannotGoOn, RunOver
from prefixrl.learner.broker.groups import ledger as ledgers
from prefixrl.learner.broker.groups.window import Choice, NotYetChosen, Window
from prefixrl.learner.broker.server import Broker

ITERATIONS = 100
GROUPS = 20 * ITERATIONS


def every_second_time(broker: Broker, iteration: int) -> None:
    """Hold every second iteration up until the window is full, whatever the machine is busy with."""
    if iteration % 2 == 0:
        until_full(broker, iteration)


def by_age(trained: Trained) -> str:
    return f"trained groups by age {dict(sorted(trained.ages.items()))}"


pytestmark = [pytest.mark.timeout(240), pytest.mark.slow]


@pytest.mark.parametrize(
    "staleness", [0, 1, 4, *(pytest.param(each, marks=pytest.mark.nightly) for each in (2, 8))]
)
def test_no_sample_is_older_than_the_window_and_none_expires(
    staleness: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = run(config_of(tmp_path, staleness, ITERATIONS), every_second_time)
    with capsys.disabled():
        sys.stdout.write(f"\nS = {staleness}: {by_age(trained)}\n")
    assert isinstance(trained.end, RunOver)
    assert len(trained.groups) == len(set(trained.groups)) == GROUPS
    assert max(trained.ages) <= staleness and min(trained.ages) >= 0
    groups = trained.status["groups"]
    assert (groups["issued"], groups["trained"]) == (GROUPS, GROUPS)
    assert not any(groups[state] for state in ("expired", "failed", "filtered", "outstanding"))
    if staleness == 0:
        assert trained.versions == [{iteration} for iteration in range(ITERATIONS)]
    else:
        # Every second iteration began with a full window, of which it left B x S groups to later ones.
        aged = sum(count for age, count in trained.ages.items() if age >= 1)
        assert aged >= GROUPS / 4, "the pipe is not asynchronous"


@pytest.mark.parametrize("staleness", [pytest.param(1, marks=pytest.mark.nightly), 4])
def test_just_in_time_samples_are_younger_than_the_window_and_none_expires(
    staleness: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(
        tmp_path, staleness, ITERATIONS // 2, algorithm={"admission": "just_in_time"}
    )
    trained = run(config, trains_s=0.2)
    mean = sum(age * count for age, count in trained.ages.items()) / trained.ages.total()
    with capsys.disabled():
        sys.stdout.write(
            f"\nS = {staleness}, just in time: {by_age(trained)}; {trained.status['admission']}\n"
        )
    assert isinstance(trained.end, RunOver)
    assert len(trained.groups) == len(set(trained.groups)) == GROUPS // 2
    assert max(trained.ages) <= staleness
    assert trained.status["mean_age"] == pytest.approx(mean)
    assert mean <= min(staleness, 2.5)
    groups = trained.status["groups"]
    assert not any(groups[state] for state in ("expired", "failed", "filtered", "outstanding"))


def test_a_run_whose_old_samples_are_worth_nothing_becomes_synchronous(tmp_path: Path) -> None:
    config = config_of(tmp_path, 4, ITERATIONS // 2, algorithm={"admission": "just_in_time"})
    trained = run(config, old_ess=0.0, trains_s=0.05)
    assert isinstance(trained.end, RunOver)
    assert trained.versions[-8:] == [
        {iteration} for iteration in range(ITERATIONS // 2 - 8, ITERATIONS // 2)
    ]
    assert trained.status["admission"]["cap_groups"] == 0.0
    assert not any(
        trained.status["groups"][state] for state in ("expired", "failed", "outstanding")
    )


@pytest.mark.nightly
def test_without_a_window_both_rules_train_the_same_groups_on_the_same_versions(
    tmp_path: Path,
) -> None:
    actual = []
    for admission in ("just_in_time", "as_early_as_allowed"):
        folder = tmp_path / admission
        folder.mkdir()
        actual.append(run(config_of(folder, 0, 20, algorithm={"admission": admission})))
    assert actual[0].groups == actual[1].groups and actual[0].rewards == actual[1].rewards
    assert actual[0].versions == actual[1].versions == [{iteration} for iteration in range(20)]


@pytest.mark.parametrize("staleness", [1, 4, pytest.param(0, marks=pytest.mark.nightly)])
def test_no_token_is_older_than_the_window_where_answers_cross_updates(
    staleness: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sampling takes as long as several iterations: a group holds its place in the window from its first token on."""
    config = config_of(
        *(tmp_path, staleness, ITERATIONS // 2),
        rollout={"swap": "in_flight", "prefix_tokens": 16, "groups_per_task": 8},
        simulated={"prefix_s": 0.15},
    )
    trained = run(config)
    with capsys.disabled():
        sys.stdout.write(
            f"\nS = {staleness}: {by_age(trained)}, {trained.crossed} of them crossed an update\n"
        )
    assert isinstance(trained.end, RunOver)
    assert len(trained.groups) == len(set(trained.groups)) == GROUPS // 2
    assert max(trained.ages) <= staleness and min(trained.ages) >= 0
    groups = trained.status["groups"]
    assert not any(groups[state] for state in ("expired", "failed", "filtered", "outstanding"))
    tokens = {int(age): count for age, count in trained.status["token_age_histogram"].items()}
    assert min(tokens) >= 0 and max(tokens) <= staleness
    assert sum(tokens.values()) == 2 * 16 * GROUPS // 2
    # With a window of 1 a version that comes early finds few tasks open, or none.
    assert trained.crossed == 0 or staleness > 0
    assert trained.crossed > 0 or staleness <= 1
    assert (trained.status["crossed_fraction"] > 0) == (trained.crossed > 0)


@pytest.mark.parametrize("staleness", [0, 2])
def test_the_bound_holds_when_a_filter_takes_most_and_over_sampling_makes_it_good(
    staleness: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Of two samples, one right and one wrong: 2 x 0.1838 x 0.8162 = 0.30 of the groups.
    config = config_of(
        *(tmp_path, staleness, ITERATIONS // 2),
        filter={"accuracy": [0.01, 0.99], "over_sampling": 2.0},
        simulated={"accuracy": 0.1838},
    )
    trained = run(config, every_second_time)
    groups, causes = trained.status["groups"], trained.status["causes"]
    passing = groups["trained"] / (groups["trained"] + groups["filtered"])
    with capsys.disabled():
        sys.stdout.write(
            f"\nS = {staleness}, f = 2: {by_age(trained)}; {passing:.0%} passed; {causes}\n"
        )
    assert isinstance(trained.end, RunOver)
    assert len(trained.groups) == len(set(trained.groups)) == GROUPS // 2
    assert max(trained.ages) <= staleness
    assert all(sorted(rewards) == [0.0, 1.0] for rewards in trained.rewards)
    if staleness == 0:
        assert trained.versions == [{iteration} for iteration in range(ITERATIONS // 2)]
    assert groups["issued"] == sum(
        groups[state] for state in ("trained", "filtered", "failed", "expired", "outstanding")
    )
    assert groups["outstanding"] == groups["failed"] == 0
    assert groups["expired"] == causes["expired: surplus"] > 0
    assert groups["filtered"] == sum(
        count for cause, count in causes.items() if cause.startswith("filtered: ")
    )


def test_a_filter_that_nothing_passes_ends_the_run_with_the_figures(tmp_path: Path) -> None:
    config = config_of(
        *(tmp_path, 1, 5),
        filter={"accuracy": [0.01, 0.99], "limit_batches": 3},
        simulated={"accuracy": 0.0},
    )
    trained = run(config)
    assert isinstance(trained.end, CannotGoOn)
    assert "iteration 0 gets no batch: 0 of the last 60 judged groups passed" in trained.end.reason
    assert "filter.accuracy = [0.01, 0.99]" in trained.end.reason
    assert "filter.min_pass_rate = 0.01" in trained.end.reason
    assert trained.status["groups"]["filtered"] >= 60


def test_the_proof_sees_a_choice_that_takes_the_newest_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def newest_first(
        _window: Window,
        _iteration: int,
        size: int,
        scored: list[tuple[int, int]],
        _unscored: list[tuple[int, int]],
    ) -> Choice | NotYetChosen:
        newest = sorted(scored, reverse=True)[:size]
        return Choice(tuple(seq for _, seq in newest)) if len(newest) == size else NotYetChosen(())

    def trained(ledger: ledgers.Ledger, iteration: int) -> bool:
        for seq in ledger.batches.pop(iteration):
            ledger._live.pop(seq)
        ledger.completed += 1
        return True

    monkeypatch.setattr(ledgers, "choose", newest_first)
    monkeypatch.setattr(ledgers.Ledger, "trained", trained)
    assert max(run(config_of(tmp_path, 2, 40), every_second_time).ages) > 2
