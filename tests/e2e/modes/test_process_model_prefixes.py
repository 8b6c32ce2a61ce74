"""Prefix mode with a process reward model.

Prefix and completion are scored together, training moves by the scores alone, and `prefixrl eval` chooses by them.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prefixrl.common.evaluation.accuracy import CHOICES
from prefixrl.scorer.process.steps import split_steps
from support.models.process_models import SEPARATOR, STEP_TAG_MODEL, loaded, marked
from support.runs.run_helper import SMALL, check_books, finish, inspect, launched

pytestmark = [pytest.mark.timeout(600), pytest.mark.nightly]

SETTINGS = (
    "algorithm.name=grpo",
    "algorithm.iterations=30",
    "algorithm.kl=0",
    "algorithm.entropy=0",
    "learner.actor_lr=1e-3",
    "scorer.keep_completions=true",
    "scorer.continuations=2",
    "checkpoint.every=30",
)
HELD_OUT = 64


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A finished run that only scores of steps rewarded."""
    directory = tmp_path_factory.mktemp("prefixes") / "run"
    keys = (
        "format=step_tag",
        f"model={STEP_TAG_MODEL}",
        f"separator='{SEPARATOR}'",
        "aggregate=min",
        "max_tokens=128",
    )
    process = tuple(f"scorer.prm.{key}" for key in (*keys, "device=cpu"))
    with launched(directory, *SMALL, *SETTINGS, *process) as running:
        check_books(finish(running, directory), directory)
    yield directory


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_continuation_has_the_scores_of_its_prefix_and_completion_together(
    run: Path,
) -> None:
    form, loaded_model = loaded(STEP_TAG_MODEL, "step_tag")
    groups = inspect(run)
    texts_compared = 0
    for group in groups[:4]:
        for row in group["rows"]:
            texts = row["continuations"]
            assert row["reward"] == pytest.approx(sum(text["reward"] for text in texts) / 2)
            for text in texts:
                actual, answer = text["process"], text["completion"]
                scores = loaded_model.scores([marked(form, group["question"], answer)])[0]
                assert actual["scores"] == pytest.approx(scores, abs=1e-5)
                assert text["reward"] == pytest.approx(min(scores, default=0.0), abs=1e-5)
                assert len(actual["ends"]) == len(split_steps(answer, SEPARATOR, 256))
                texts_compared += 1
    assert texts_compared == 4 * 8 * 2


def test_training_moves_by_the_scores_of_steps_alone(run: Path) -> None:
    actual = [line["figures"] for line in lines_of(run / "metrics.jsonl")]
    early, late = actual[:2], actual[-4:]

    def mean(of: list[dict[str, float]], name: str) -> float:
        return sum(line[name] for line in of) / len(of)

    assert mean(late, "reward") > mean(early, "reward") + 0.15
    assert mean(late, "outcome") > mean(early, "outcome") + 0.1  # which nothing rewarded


def test_an_evaluation_chooses_among_the_answers_of_a_problem_by_their_steps(run: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "prefixrl.deploy",
        "eval",
        str(run),
        "--samples",
        "4",
        "--checkpoint",
        "0",
    ]
    finished = subprocess.run(
        [*command, "--arm", "adapter"], capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr
    folder = run / "eval/step_00000000"
    rows = lines_of(folder / "evaluations/adapter.heldout.sampled4.jsonl")
    assert len(rows) == 4 * HELD_OUT and all(row["reward"] in (0.0, 1.0) for row in rows)
    assert sum(row["scores"] is not None for row in rows) > 0.9 * len(rows)
    assert {
        row.get("scores") for row in lines_of(folder / "evaluations/adapter.heldout.greedy.jsonl")
    } == {None}
    results = json.loads((folder / "results.json").read_text())["results"]
    greedy, sampled = (result["accuracy"] for result in results)
    assert greedy["chosen"] == {} and set(sampled["chosen"]) == set(CHOICES)
    # The model knows which procedure a question needs: any choice beats the mean answer.
    assert min(sampled["chosen"].values()) > sampled["accuracy"] + 0.1
    assert max(sampled["chosen"].values()) <= sampled["pass_at"]["4"]
    assert "prm_min_max" in finished.stdout and "prm_min_vote" in (folder / "table.md").read_text()
