"""A whole run of base models, whose template closes turns by a token that is no eos, asked through that template."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.models.base_models import AS_DECLARED, base_model, endless_target
from support.paths import EXAMPLE
from support.runs.run_helper import RUN_FILE, SMALL, check_books, finish, inspect, launched

pytestmark = [pytest.mark.timeout(400), pytest.mark.nightly]


HOT = ("rollout.temperature=4.0",)
"""At 1 the adapter hardly ever draws a control token."""
CONTROL = {2, 3, 4}


@pytest.mark.nightly
def test_allowed_control_tokens_are_drawn_and_counted_and_ratios_stay_exact(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    with launched(
        directory, *SMALL, *HOT, "rollout.control_tokens=allow", "algorithm.iterations=1"
    ) as process:
        finish(process, directory)
    figures = json.loads((directory / "metrics.jsonl").read_text())["figures"]
    rows = [row for line in inspect(directory) for row in line["rows"]]
    having = [row for row in rows if {0, *CONTROL} & set(row["prefix_ids"])]
    assert having and figures["control_tokens_fraction"] == pytest.approx(len(having) / len(rows))
    assert figures["engine_mismatch_gap"] < 1e-4


def test_completions_of_a_target_that_goes_on_end_with_their_answers(tmp_path: Path) -> None:
    target = endless_target(tmp_path / "target")
    settings = (f"target.model={target}", "scorer.keep_completions=true", *AS_DECLARED)
    stop = "scorer.stop_when_answered=true"
    figures = {}
    for name, more in (("whole", ()), ("stopped", (stop,))):
        directory = tmp_path / name
        with launched(directory, *SMALL, *settings, *more, "algorithm.iterations=2") as process:
            check_books(finish(process, directory), directory)
        figures[name] = json.loads((directory / "metrics.jsonl").read_text().splitlines()[0])
    whole, stopped = figures["whole"]["figures"], figures["stopped"]["figures"]
    assert whole["stopped_when_answered_fraction"] == 0.0 and whole["truncated_fraction"] > 0.5
    assert stopped["stopped_when_answered_fraction"] > 0.5
    assert stopped["truncated_fraction"] < whole["truncated_fraction"]
    rows = [row for line in inspect(tmp_path / "stopped") for row in line["rows"]]
    ended = [row["completion"] for row in rows if row["stopped_share"]]
    assert ended and all(text.rstrip(" ").endswith("\n\n") for text in ended)
    assert all(text.count("boxed") == 1 for text in ended)


def test_it_trains_on_texts_that_end_at_the_closer_and_the_check_warns(tmp_path: Path) -> None:
    models = [base_model(EXAMPLE / name, tmp_path / name) for name in ("adapter", "target")]
    given = (
        f"adapter.model={models[0]}",
        f"target.model={models[1]}",
        f"directory={tmp_path / 'run'}",
    )
    flags = [flag for setting in given for flag in ("--set", setting)]
    checked = subprocess.run(
        [sys.executable, "-m", "prefixrl.deploy", "launch", str(RUN_FILE), "--check", *flags],
        capture_output=True,
        text=True,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "target: a text ends at 0 '<|endoftext|>', 1 '<|im_end|>'" in checked.stdout
    for name in ("adapter", "target"):
        assert (
            f"warning: {name}: 1 '<|im_end|>' closes a turn of its chat template and is no eos"
            in checked.stdout
        )
    directory = tmp_path / "run"
    with launched(directory, *SMALL, *given[:2], *HOT, "algorithm.iterations=4") as process:
        summary = finish(process, directory)
    check_books(summary, directory)
    for name in ("rollout-0", "scorer-0"):
        assert (
            "closes a turn of its chat template and is no eos"
            in (directory / f"logs/{name}.log").read_text()
        )
    assert summary["groups"]["trained"] == 4 * 16
    assert summary["accuracy"]["no_prefix"] > 0.1
    assert summary["truncated_fraction"] < 0.5
    sampled = {
        token for line in inspect(directory) for row in line["rows"] for token in row["prefix_ids"]
    }
    assert sampled.isdisjoint(CONTROL)
    ends = {
        row["prefix_ids"][-1]
        for line in inspect(directory)
        for row in line["rows"]
        if row["finish"] == "eos"
    }
    assert 1 in ends and ends <= {0, 1}
    for line in (directory / "metrics.jsonl").read_text().splitlines():
        figures = json.loads(line)["figures"]
        assert figures["control_tokens_fraction"] == 0.0
        assert figures.get("engine_mismatch_gap", 0.0) < 1e-4  # absent without samples of age 0
    judged = [
        json.loads(line)
        for path in (directory / "evaluations").glob("*greedy.jsonl")
        for line in path.read_text().splitlines()
    ]
    assert judged and all(row["completion"].count("boxed") <= 1 for row in judged)
