"""The forecast of requests, tokens, cost and time of a target behind an endpoint."""

from pathlib import Path

import msgspec
import pytest

from prefixrl.common.config.load import load
from prefixrl.common.config.run import RunConfig
from prefixrl.common.run.status import UsageTotal
from prefixrl.learner.check.report import forecast, requests_to_endpoint
from prefixrl.learner.check.spending import Spending, spending_lines
from support.paths import EXAMPLE
from support.runs.metrics_lines import metrics_line, write_metrics

TEXTS = 3 * 16 * 8
"""Completions of the training of these runs."""
REQUESTS = {"training": TEXTS, "evaluations": 70}


def run_of(directory: Path, *settings: str) -> RunConfig:
    return load(
        EXAMPLE / "run.toml",
        (
            f"directory={directory}",
            "algorithm.iterations=3",
            "algorithm.groups_per_iteration=16",
            "scorer.engine=openai",
            "scorer.openai.url=http://127.0.0.1:9/v1",
            *settings,
        ),
    )


def test_training_and_evaluations_have_upper_bounds_of_their_own(tmp_path: Path) -> None:
    config = run_of(
        tmp_path,
        "scorer.openai.prompt_price=2",
        "scorer.openai.completion_price=10",
        "scorer.openai.most_cost=7",
        "evaluation.max_new_tokens=50",
    )
    training, evaluations, ceiling = spending_lines(config, 20, REQUESTS)
    prompts = TEXTS * (20 + config.rollout.prefix_tokens)
    completions = TEXTS * config.scorer.max_new_tokens
    assert training.startswith(f"training: at most {TEXTS:,} requests to the endpoint")
    assert f"{prompts:,} prompt and {completions:,} completion tokens" in training
    assert f"cost {(2 * prompts + 10 * completions) / 1e6:,.2f}" in training
    assert "at most 70 requests" in evaluations and "and 3,500 completion tokens" in evaluations
    assert "most_cost = 7" in ceiling and " h or more" not in training


@pytest.mark.parametrize(
    ("limits", "least_s"),
    [
        ({"requests_per_minute": 60}, 1000.0),
        ({"tokens_per_minute": 30_000}, 2000.0),
        ({"requests_per_minute": 60, "tokens_per_minute": 60_000}, 1000.0),
        ({}, 0.0),
    ],
)
def test_the_least_time_is_that_of_the_tighter_limit(
    tmp_path: Path, limits: dict[str, int], least_s: float
) -> None:
    settings = [f"scorer.openai.{key}={value}" for key, value in limits.items()]
    config = run_of(tmp_path, *settings)
    assert Spending(1000, 600_000, 400_000).least_s(config) == pytest.approx(least_s)


def test_what_the_run_has_measured_is_expected_beside_the_bound(tmp_path: Path) -> None:
    config = run_of(tmp_path, "scorer.openai.completion_price=10")
    usage = UsageTotal(
        requests=100,
        prompt_tokens=3000,
        completion_tokens=500,
        retries=0,
        limited_s=0.0,
        cost=0.005,
    )
    write_metrics(tmp_path, [msgspec.structs.replace(metrics_line(0), endpoint=usage)])
    said = spending_lines(config, 20, REQUESTS)
    assert said[1].startswith("  expected by the 100 requests so far:")
    assert f"{30 * TEXTS:,} prompt and {5 * TEXTS:,} completion tokens" in said[1]


def test_a_target_in_process_costs_nothing_and_the_report_has_the_lines_of_a_served_one(
    tmp_path: Path,
) -> None:
    assert spending_lines(load(EXAMPLE / "run.toml"), 20, REQUESTS) == []
    assert "requests to the endpoint" in forecast(run_of(tmp_path)).text


def test_evaluations_in_training_are_counted_once_and_the_last_version_not_twice(
    tmp_path: Path,
) -> None:
    before = requests_to_endpoint(run_of(tmp_path), 100, 10)
    assert before["training"] == TEXTS and "drafts" not in before
    after = requests_to_endpoint(run_of(tmp_path, "evaluation.every=1"), 100, 10)
    assert after["evaluations"] == before["evaluations"] + 2 * 10
