"""`prefixrl advise`: the bottleneck and the counts that balance it, against counting up by hand."""

import itertools
from pathlib import Path

import pytest
from click.testing import CliRunner

from prefixrl.common.errors import ConfigError
from prefixrl.deploy.__main__ import main
from prefixrl.deploy.commands.advise import FULL, Rates, advise, rates_of, sentences
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
        most={"rollout": 48, "scorer": 48},
        waited={"scorers": 0.4},
        is_synchronous=sync,
    )


FEW_SCORERS = rates(10.0, 2.0, 0.10, 0.99, (1, 1, 2))
MANY_SCORERS = rates(10.0, 9.8, 0.10, 0.20, (1, 1, 8))
IDLE = rates(10.0, 5.0, 0.30, 0.50, (1, 1, 2))
SYNCHRONOUS = rates(10.0, 4.0, 0.20, 0.40, (1, 1, 1), sync=True)


@pytest.mark.parametrize(
    ("given", "bottleneck", "wanted", "balanced_s"),
    [
        (FEW_SCORERS, "scorer", {"learner": 1, "rollout": 1, "scorer": 11}, 2.0),
        (
            rates(10.0, 2.0, 0.95, 0.40, (1, 1, 4)),
            "rollout",
            {"learner": 1, "rollout": 6, "scorer": 9},
            2.0,
        ),
        (
            rates(10.0, 0.1, 0.01, 1.0, (1, 1, 4)),
            "scorer",
            {"learner": 1, "rollout": 2, "scorer": 48},
            40 / 48,
        ),
        (MANY_SCORERS, "learner", {"learner": 5, "rollout": 1, "scorer": 2}, 9.8),
        (IDLE, "", {"learner": 1, "rollout": 1, "scorer": 3}, 5.0),
        (SYNCHRONOUS, "learner", {"learner": 1, "rollout": 1, "scorer": 2}, 4.0),
    ],
)
def test_the_busiest_is_the_bottleneck_and_enough_workers_keep_the_learner_busy(
    given: Rates, bottleneck: str, wanted: dict[str, int], balanced_s: float
) -> None:
    found = advise(given)
    assert (found.bottleneck, found.wanted) == (bottleneck, wanted)
    assert found.balanced_s == pytest.approx(balanced_s)


@pytest.mark.parametrize("learner_s", [0.3, 2.0, 9.9])
@pytest.mark.parametrize("rollout", [0.01, 0.5, 1.0])
@pytest.mark.parametrize("scorer", [0.05, 0.77, 1.0])
@pytest.mark.parametrize("counts", [(1, 1, 1), (4, 2, 7)])
def test_counts_that_keep_the_learner_busy_are_the_least_that_are_enough(
    learner_s: float, rollout: float, scorer: float, counts: tuple[int, int, int]
) -> None:
    given = rates(10.0, learner_s, rollout, scorer, counts)
    found = advise(given).wanted
    for role, share in (("rollout", rollout), ("scorer", scorer)):
        seconds = sum(share * 10.0 for _ in range(given.counts[role]))
        enough = next(n for n in itertools.count(1) if seconds / n <= FULL * learner_s + 1e-9)
        assert found[role] == min(enough, 48)
    slowest_s = max(rollout, scorer) * 10.0
    assert found["learner"] == next(
        n for n in itertools.count(1) if learner_s * counts[0] / n <= slowest_s + 1e-9
    )


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            FEW_SCORERS,
            "scorers are the bottleneck (busy for 99% of the time): with 11 scorers instead of 2 an",
        ),
        (FEW_SCORERS, "an iteration would take about 2.00 s (launch.scorers)"),
        (FEW_SCORERS, "the learner waits 40% for scorers"),
        (
            rates(10.0, 0.1, 0.01, 1.0, (1, 1, 4)),
            "48 scorers instead of 4 and 2 rollouts instead of 1",
        ),
        (
            rates(10.0, 0.1, 0.01, 1.0, (1, 1, 4)),
            "more of them would find no rows: the window is full (algorithm.max",
        ),
        (MANY_SCORERS, "the learner is the bottleneck (busy for 98% of the time)"),
        (MANY_SCORERS, "2 of 8 scorers would do"),
        (MANY_SCORERS, "5 ranks instead of 1 would keep pace"),
        (MANY_SCORERS, "at work at a time, and this host has 2 cores"),
        (IDLE, "no part is busy for most of the time (the busiest: learner, 50%)"),
        (
            SYNCHRONOUS,
            "With max_staleness = 1 the parts overlap, and an iteration takes 4.00 s at best",
        ),
    ],
)
def test_the_words_name_the_role_the_counts_and_the_key(given: Rates, words: str) -> None:
    assert words in "\n".join(sentences(given, advise(given), 2))


def test_rates_are_measured_from_metrics_and_the_workers_connected_now(tmp_path: Path) -> None:
    config = run_config(save_model(tmp_path / "adapter"), launch={"scorers": 3})
    lines = [metrics_line(each) for each in range(6)]
    found = rates_of(lines, config, None)
    assert found.iteration_s == pytest.approx(2.0) and found.learner_s == pytest.approx(1.5)
    assert found.counts == {"learner": 1, "rollout": 1, "scorer": 3} and found.busy == {
        "rollout": 0.5,
        "scorer": 0.9,
    }
    assert found.waited == {"rollouts": pytest.approx(0.75)}
    now = document(
        *(worker_status("scorer", "vllm") for _ in range(5)), busy_fraction={"scorer": 0.7}
    )
    assert rates_of(lines, config, now).counts["scorer"] == 5
    assert rates_of(lines, config, now).busy == {"rollout": 0.5, "scorer": 0.7}
    with pytest.raises(ConfigError, match="has trained 4 iterations; rates are measured from 5 on"):
        rates_of(lines[:4], config, None)


@pytest.mark.parametrize(("rows", "seats", "most"), [(4, 16, 48), (4, 6, 192), (512, 16, 192)])
def test_no_more_workers_count_than_give_every_group_of_the_window_its_seats(
    tmp_path: Path, rows: int, seats: int, most: int
) -> None:
    algorithm = {"groups_per_iteration": 64, "samples_per_prompt": rows, "max_staleness": 2}
    config = run_config(save_model(tmp_path / "adapter"), algorithm=algorithm)
    now = document(worker_status("scorer", "vllm", seats=seats))
    assert rates_of([metrics_line(each) for each in range(6)], config, now).most["scorer"] == most


def test_a_finished_run_is_advised_from_its_files(tmp_path: Path) -> None:
    run = made(tmp_path / "run", save_model(tmp_path / "adapter"), 8)
    finish(run, 0.5)
    found = CliRunner().invoke(main, ["advise", str(run)], catch_exceptions=False)
    assert found.exit_code == 0 and "scorers are the bottleneck" in found.output
    assert "(8 iterations; numbers of workers as in [launch])" in found.output
