"""Real daemons, a target that costs: a run ends in order before its ceiling, and goes on with a higher one."""

from pathlib import Path

import pytest

from e2e.modes.advice.test_advice import RUN_FILE, SHORT, obedient
from support.completions_server import CompletionsServer, serving
from support.runs.run_helper import check_books, finish, launched

pytestmark = [pytest.mark.timeout(500), pytest.mark.slow]

MOST_COST = 8.0
REQUEST_COST = 19 * 1000 / 1e6
BATCH_COST = 16 * 8 * REQUEST_COST


def served(endpoint: CompletionsServer, most_cost: float) -> tuple[str, ...]:
    return (
        *SHORT,
        "scorer.engine=openai",
        f'scorer.openai.url="{endpoint.url}"',
        "scorer.openai.api=chat",
        "scorer.openai.completion_price=1000",
        f"scorer.openai.most_cost={most_cost}",
        'target.model="served-target"',
    )


def answers_of(endpoint: CompletionsServer) -> int:
    return len([each for each in endpoint.asked if each.body])


def test_a_run_ends_in_order_before_its_ceiling_and_goes_on_with_a_higher_one(
    tmp_path: Path,
) -> None:
    directory = tmp_path / "run"
    with serving(obedient) as endpoint:
        with launched(directory, *served(endpoint, MOST_COST), run_file=RUN_FILE) as process:
            summary = finish(process, directory)
        check_books(summary, directory)
        # The trial of the launch is no scorer's.
        cost = REQUEST_COST * (answers_of(endpoint) - 1)
        assert MOST_COST - BATCH_COST < cost <= MOST_COST + BATCH_COST
        assert summary["endpoint"]["cost"] == pytest.approx(cost)
        end = summary["ended_by_cost"]
        assert end["most_cost"] == MOST_COST and "most_cost = 8 is reached" in end["reason"]
        assert 0 < summary["groups"]["trained"] < 3 * 16
        assert (directory / "checkpoints").is_dir()
        # The evaluation at the end would not fit.
        assert "untrained_adapter" in summary["accuracy"]
        assert "trained_adapter" not in summary["accuracy"]

        with launched(directory, *served(endpoint, MOST_COST), run_file=RUN_FILE) as process:
            output, _ = process.communicate(timeout=120)
        assert process.returncode == 2 and "--set scorer.openai.most_cost=N" in output
        assert answers_of(endpoint) <= round(cost / REQUEST_COST) + 2  # trials of two launches

        with launched(directory, *served(endpoint, 100.0), run_file=RUN_FILE) as process:
            summary = finish(process, directory)
    assert summary["ended_by_cost"] is None and "trained_adapter" in summary["accuracy"]
    assert summary["versions"] == 3
