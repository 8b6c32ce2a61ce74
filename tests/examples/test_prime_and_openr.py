"""The recipes of PRIME and OpenR: they fit the GPUs they state, and their small forms run on real processes."""

import json
from pathlib import Path

import pytest

from prefixrl.common.config.load import load
from prefixrl.learner.run import budget
from prefixrl.learner.run.forecast import forecast
from support.paths import EXAMPLES
from support.recipes import recipe
from support.run_helper import check_books, finish, launched

SHAPES = {"prime_eurus2": "Qwen/Qwen2.5-7B", "openr_math": "Qwen/Qwen2.5-1.5B"}
"""A model of the same shape as the recipe's, whose memory is known without its files."""
SMALL_DIFFERS = {"prime_eurus2": ("groups_per_iteration", "iterations"), "openr_math": ("iterations",)}


@pytest.mark.parametrize("name", SHAPES)
def test_the_recipe_fits_the_gpus_it_states(name: str, tmp_path: Path) -> None:
    config = recipe(name, tmp_path, f"adapter.model={SHAPES[name]}")
    told = forecast(config)
    budget.check_fit(config, told.prompt_tokens)
    assert "activations: not counted" not in told.text


@pytest.mark.parametrize(
    ("name", "said"),
    [("prime_eurus2", "256 groups x 4 rows = 1024 rows, 1 x 4"), ("openr_math", "8 groups x 4 rows = 32 rows, 1 x 4")],
)
def test_the_recipe_has_the_published_batch_arithmetic(name: str, said: str, tmp_path: Path) -> None:
    assert said in forecast(recipe(name, tmp_path)).text


@pytest.mark.parametrize("name", SHAPES)
def test_the_small_form_has_the_objective_of_the_recipe(name: str, tmp_path: Path) -> None:
    own = recipe(name, tmp_path).algorithm.model_dump(exclude=set(SMALL_DIFFERS[name]))
    small = load(EXAMPLES / name / "tiny.toml").algorithm.model_dump(exclude=set(SMALL_DIFFERS[name]))
    assert small == own


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SHAPES)
def test_the_small_form_trains_every_iteration_on_real_processes(name: str, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    with launched(directory, run_file=EXAMPLES / name / "tiny.toml") as process:
        check_books(finish(process, directory), directory)
    lines = [json.loads(line)["figures"] for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == load(EXAMPLES / name / "tiny.toml").algorithm.iterations
    assert ("reward_model_loss" in lines[-1]) == (name == "prime_eurus2")
