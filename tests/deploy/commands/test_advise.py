"""`prefixrl advise`: the bottleneck and the counts that balance it, against counting up by hand."""

import itertools
import math
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from prefixrl.common.errors import ConfigError
from prefixrl.deploy.__main__ import main
from prefixrl.deploy.capacity.system import BrokerCosts
from prefixrl.deploy.commands.advise import (
    FULL,
    LATE,
    Rates,
    RunShape,
    advise,
    most_workers,
    rates_of,
    sentences,
    simulated_s,
    workers_for,
)
from support.fakes import document, worker_status
from support.models.tiny_model import run_config, save_model
from support.runs.metrics_lines import metrics_line
from support.runs.runs_on_disk import finish, made


def rates(
    iteration_s: float,
    learner_s: float,
    rollout: float,
    scorer: float,
    counts: tuple[int, int, int],
    sync: bool = False,
) -> Rates:
    return Rates(
        iteration_s=iteration_s,
        learner_s=learner_s,
        busy={"rollout": rollout, "scorer": scorer},
        counts=dict(zip(("learner", "rollout", "scorer"), counts, strict=True)),
        waited={"scorers": 0.4},
        shape=RunShape(
            batch_groups=64, rows_per_group=4, max_staleness=0 if sync else 2, seats={"rollout": 16, "scorer": 16}
        ),
    )


@pytest.mark.parametrize(
    ("given", "bottleneck", "wanted"),
    [
        (rates(10.0, 2.0, 0.10, 0.99, (1, 1, 2)), "scorer", {"learner": 1, "rollout": 1, "scorer": 11}),
        (rates(10.0, 2.0, 0.95, 0.40, (1, 1, 4)), "rollout", {"learner": 1, "rollout": 6, "scorer": 9}),
        (rates(10.0, 9.8, 0.10, 0.20, (1, 1, 8)), "learner", {"learner": 5, "rollout": 1, "scorer": 2}),
        (rates(10.0, 5.0, 0.30, 0.50, (1, 1, 2)), "", {"learner": 1, "rollout": 1, "scorer": 3}),
        (rates(10.0, 4.0, 0.20, 0.40, (1, 1, 1), sync=True), "learner", {"learner": 1, "rollout": 1, "scorer": 2}),
    ],
)
def test_the_busiest_is_the_bottleneck_and_enough_workers_keep_the_learner_busy(
    given: Rates, bottleneck: str, wanted: dict[str, int]
) -> None:
    found = advise(given)
    assert (found.bottleneck, found.wanted) == (bottleneck, wanted)


@pytest.mark.parametrize("learner_s", [0.3, 2.0, 9.9])
@pytest.mark.parametrize("rollout", [0.01, 0.5, 1.0])
@pytest.mark.parametrize("scorer", [0.05, 0.77, 1.0])
@pytest.mark.parametrize("counts", [(1, 1, 1), (4, 2, 7)])
def test_counts_that_keep_the_learner_busy_are_the_least_that_are_enough(
    learner_s: float, rollout: float, scorer: float, counts: tuple[int, int, int]
) -> None:
    given = rates(10.0, learner_s, rollout, scorer, counts)
    found = workers_for(given, learner_s)
    for role, share in (("rollout", rollout), ("scorer", scorer)):
        seconds = sum(share * 10.0 for _ in range(given.counts[role]))
        enough = next(n for n in itertools.count(1) if seconds / n <= FULL * learner_s + 1e-9)
        assert found[role] == min(enough, 3 * 64 * 4 // 16)
    slowest_s = max(rollout, scorer) * 10.0
    assert advise(given).wanted["learner"] == next(
        n for n in itertools.count(1) if learner_s * counts[0] / n <= slowest_s + 1e-9
    )


@pytest.mark.parametrize("given", [rates(10.0, 2.0, 0.10, 0.99, (1, 1, 2)), rates(10.0, 2.0, 0.95, 0.40, (1, 1, 4))])
def test_with_the_wanted_workers_the_learner_sets_the_pace(given: Rates) -> None:
    assert simulated_s(given) == pytest.approx(10.0, rel=0.05)
    assert advise(given).balanced_s == pytest.approx(2.0, rel=0.1)


def test_more_scorers_than_a_batch_can_fill_do_not_help() -> None:
    # A row takes 2.5 s. The window has at most three batches of 256 rows under way, so no more than 48 scorers' seats.
    given = rates(10.0, 0.1, 0.01, 1.0, (1, 1, 4))
    assert simulated_s(given) == pytest.approx(10.0, rel=0.05)
    assert simulated_s(given, {"scorer": 8}) == pytest.approx(5.0, rel=0.05)
    assert simulated_s(given, {"scorer": 400}) == pytest.approx(simulated_s(given, {"scorer": 100}), rel=0.05)
    assert simulated_s(given, {"scorer": 400}) > 2.5 / 3


# 64 seats instead of 16, so a row takes four times as long: the window holds the run up before the scorers do.
LONG_ROWS = replace(
    rates(10.0, 0.5, 0.10, 0.99, (1, 1, 2)),
    shape=RunShape(batch_groups=64, rows_per_group=4, max_staleness=2, seats={"rollout": 64, "scorer": 64}),
)


def test_where_no_number_keeps_the_learner_busy_the_advice_is_the_one_beyond_which_more_do_not_help() -> None:
    found = advise(LONG_ROWS)
    assert found.is_bounded and found.balanced_s > LATE * LONG_ROWS.learner_s
    assert LONG_ROWS.counts["scorer"] < found.wanted["scorer"] < 44  # which their work alone would want
    more = {role: 4 * found.wanted[role] for role in ("rollout", "scorer")}
    assert simulated_s(LONG_ROWS, more) == pytest.approx(found.balanced_s, rel=0.1)
    assert not advise(rates(10.0, 2.0, 0.10, 0.99, (1, 1, 2))).is_bounded
    words = "\n".join(sentences(LONG_ROWS, found))
    assert f"with {found.wanted['scorer']} instead of 2" in words
    assert f"an iteration would take about {found.balanced_s:.2f} s" in words
    assert "More do not help, though the learner needs only 0.5 s" in words and "algorithm.max_staleness" in words
    there = replace(LONG_ROWS, counts={"learner": 1, "rollout": 1, "scorer": 300})
    assert "the time): more of them do not help" in "\n".join(sentences(there, found))


@pytest.mark.parametrize(("rows", "seats", "most"), [(4, 16, 48), (4, 6, 192), (512, 16, 192)])
def test_no_more_workers_count_than_give_every_group_of_the_window_its_seats(rows: int, seats: int, most: int) -> None:
    shape = RunShape(batch_groups=64, rows_per_group=rows, max_staleness=2, seats={"scorer": seats})
    assert most_workers(shape, "scorer", 2) == most


def test_a_number_of_workers_without_bound_is_simulated_as_the_most_that_count() -> None:
    given = rates(10.0, 0.0001, 0.10, 1.0, (1, 1, 1))  # by the work alone, 111,112 scorers
    assert advise(given).wanted["scorer"] == 48
    assert simulated_s(given, {"scorer": 10**9}) == simulated_s(given, {"scorer": 48})


def test_where_the_broker_is_the_end_the_words_name_it() -> None:
    shape = RunShape(batch_groups=512, rows_per_group=1, max_staleness=4, seats={"rollout": 16, "scorer": 16})
    given = replace(rates(1.0, 0.001, 0.5, 1.0, (1, 1, 1)), shape=shape)
    found = advise(given)
    assert shape.broker_s == pytest.approx(512 * BrokerCosts().group_s) and found.balanced_s >= shape.broker_s
    assert found.wanted["scorer"] <= math.ceil(1.25 / shape.broker_s), (
        "one does the work of 1 s; counts are tried in steps"
    )
    assert f"though the learner needs only 0.001 s: the broker, one process, needs {shape.broker_s:.2f} s" in "\n".join(
        sentences(given, found)
    )


def test_a_synchronous_run_that_overlaps_takes_as_long_as_its_slowest_part() -> None:
    given = rates(10.0, 4.0, 0.20, 0.40, (1, 1, 1), sync=True)
    # The parts take 2, 4 and 4 s; rows go on to a scorer one by one, so the first part of a batch overlaps.
    assert simulated_s(given) == pytest.approx(8.0, rel=0.05)
    assert simulated_s(given, max_staleness=1) == pytest.approx(4.0, rel=0.05)


def test_the_words_name_the_role_the_counts_and_the_key() -> None:
    def said(given: Rates) -> str:
        return "\n".join(sentences(given, advise(given)))

    few = said(rates(10.0, 2.0, 0.10, 0.99, (1, 1, 2)))
    assert "scorers are the bottleneck (busy for 99% of the time): 11 instead of 2" in few and "launch.scorers" in few
    assert "the learner waits 40% for scorers" in few
    many = said(rates(10.0, 9.8, 0.10, 0.20, (1, 1, 8)))
    assert "the learner is the bottleneck (busy for 98% of the time)" in many and "2 of 8 scorers would do" in many
    idle = said(rates(10.0, 5.0, 0.30, 0.50, (1, 1, 2)))
    assert "nobody is busy for most of the time" in idle
    assert "a wider window (algorithm.max_staleness = 3) gains nothing in the simulation" in idle
    apart = said(rates(10.0, 4.0, 0.20, 0.40, (1, 1, 1), sync=True))
    assert "With max_staleness = 1 an iteration could take about 5.00 s" in apart
    assert "which gives 8.15 s for the run as it is" in apart


def test_rates_are_measured_from_metrics_and_the_workers_connected_now(tmp_path: Path) -> None:
    config = run_config(save_model(tmp_path / "adapter"), launch={"scorers": 3})
    lines = [metrics_line(each) for each in range(6)]
    found = rates_of(lines, config, None)
    assert found.iteration_s == pytest.approx(2.0) and found.learner_s == pytest.approx(1.5)
    assert found.counts == {"learner": 1, "rollout": 1, "scorer": 3} and found.busy == {"rollout": 0.5, "scorer": 0.9}
    assert found.waited == {"rollouts": pytest.approx(0.75)}
    now = document(*(worker_status("scorer", "vllm") for _ in range(5)), busy_fraction={"scorer": 0.7})
    assert rates_of(lines, config, now).counts["scorer"] == 5
    assert rates_of(lines, config, now).busy == {"rollout": 0.5, "scorer": 0.7}
    with pytest.raises(ConfigError, match="has trained 4 iterations; rates are measured from 5 on"):
        rates_of(lines[:4], config, None)


def test_a_finished_run_is_advised_from_its_files(tmp_path: Path) -> None:
    run = made(tmp_path / "run", save_model(tmp_path / "adapter"), 8)
    finish(run, 0.5)
    found = CliRunner().invoke(main, ["advise", str(run)], catch_exceptions=False)
    assert found.exit_code == 0 and "scorers are the bottleneck" in found.output
    assert "(8 iterations; numbers of workers as in [launch])" in found.output
