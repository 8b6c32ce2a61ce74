"""Real daemons, three continuations per prefix and a cache.

Rewards are thirds, evaluations are not, and a scorer is killed.
"""

import json
from pathlib import Path

import pytest

from support.runs.run_helper import (
    SMALL,
    check_books,
    child,
    finish,
    inspect,
    launched,
    trained_iterations,
    wait_for,
)

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]

SETTINGS = (
    "algorithm.iterations=4",
    "scorer.continuations=3",
    "scorer.cache_bytes=4194304",
    "evaluation.every=1",
    # An adapter that hardly learns opens its answers alike at every version.
    "learner.actor_lr=1e-7",
    "launch.scorers=1",
)


@pytest.mark.chaos
def test_a_run_trains_on_means_of_three_and_completes_nothing_greedy_twice(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    with launched(directory, *SMALL, *SETTINGS) as process:
        wait_for(lambda: trained_iterations(directory) >= 1, "the first iteration")
        wait_for(lambda: child(process, "prefixrl-scorer"), "a scorer").kill()
        summary = finish(process, directory)
    check_books(summary, directory)
    assert summary["groups"]["trained"] == 4 * 16
    assert summary["losses"]["scorer: lost"] >= 1
    rows = [row for line in inspect(directory) for row in line["rows"]]
    assert {round(3 * row["reward"], 9) for row in rows} == {0, 1, 2, 3}
    for row in rows:
        each = [one["reward"] for one in row["continuations"]]
        assert len(each) == 3 and set(each) <= {0.0, 1.0}
        assert row["reward"] == pytest.approx(sum(each) / 3)
    for line in (directory / "metrics.jsonl").read_text().splitlines():
        metrics = json.loads(line)
        assert sum(metrics["statuses"].values()) == 16 * 8 * 3
        assert metrics["figures"]["cached_fraction"] == 0.0
        assert metrics["tokens_per_s"]["scorer"] > 0
    for path in (directory / "evaluations").glob("*.jsonl"):
        judged = [json.loads(line) for line in path.read_text().splitlines()]
        assert {row["reward"] for row in judged} <= {0.0, 1.0}, path.name
    assert set(summary["accuracy_interval"].values()) == {"wilson"}
    assert 0 < summary["cached_fraction"] < 1
