"""Length of a run's prompts: what the rollouts' renderer makes of the questions, or a guess that is called one."""

import json
import math
import random
from pathlib import Path

import pytest

from prefixrl.common.config.load import load
from prefixrl.common.config.run import RunConfig
from prefixrl.common.prompts.asking import renderers_here
from prefixrl.common.prompts.rendering import renderer_of
from prefixrl.learner.check.report import RENDERED, forecast, prompt_length
from prefixrl.learner.data import problems
from prefixrl.learner.data.rows import Problem
from support.models.chat_tokenizers import qwen
from support.paths import EXAMPLE, EXAMPLES

GUESS = "guessed from their characters: the adapter's tokenizer is not on this host"


def run_of(*settings: str) -> RunConfig:
    return load(EXAMPLE / "run.toml", settings)


def measured(config: RunConfig, asked: list[Problem]) -> int:
    return prompt_length(config, asked, renderers_here(config).get("adapter"))[0]


def problem(question: str, system: str = "") -> Problem:
    return Problem(question, question, "1", system=system)


@pytest.mark.parametrize("name", ["arithmetic", "letters"])
def test_prompts_of_an_example_are_as_long_as_all_of_its_questions_rendered(name: str) -> None:
    config = load(EXAMPLES / name / "run.toml")
    renderer = renderer_of(config, "rollout")
    asked = problems.read_all(config)[0].problems
    mean_tokens = sum(renderer.prompt(each.question, each.system).size for each in asked) / len(
        asked
    )
    told = forecast(config)
    assert abs(told.prompt_tokens - mean_tokens) <= 1
    assert f"prompts of about {told.prompt_tokens} tokens, the mean of " in told.text


def test_a_question_is_measured_with_its_system_turn_and_the_worked_examples(
    tmp_path: Path,
) -> None:
    folder = qwen(tmp_path / "adapter")
    plain = run_of(f"adapter.model={folder}")
    shown = run_of(
        f"adapter.model={folder}", f"adapter.prompt_template={'What is the sum? ' * 50}{{problem}}"
    )
    question = problem("the sum of two")
    assert (
        measured(plain, [question]) == renderer_of(plain, "rollout").prompt("the sum of two").size
    )
    assert measured(shown, [question]) >= measured(plain, [question]) + 50
    with_system = problem("the sum of two", system="Think step by step. " * 30)
    assert measured(plain, [with_system]) >= measured(plain, [question]) + 30


def test_without_the_tokenizer_the_length_is_guessed_and_the_line_says_so() -> None:
    told = forecast(run_of("adapter.model=Qwen/Qwen2.5-1.5B"))
    assert f"prompts of about {told.prompt_tokens} tokens, {GUESS}" in told.text


def test_a_prompt_is_no_longer_than_prompts_may_be() -> None:
    short, long = problem("sum 1 2 3"), problem("sum" + " 1" * 300)
    guessed = run_of("adapter.model=Qwen/Qwen2.5-1.5B", "rollout.max_prompt_tokens=50")
    assert prompt_length(guessed, [problem("?" * 3000)], None)[0] == 50
    limited = run_of("rollout.max_prompt_tokens=20")
    # A question over the limit is not asked: it is left out of the mean, unless there is no other.
    assert measured(limited, [short, long]) == measured(limited, [short])
    assert measured(limited, [long]) == 20


def test_simulated_rollouts_have_a_token_per_byte_of_a_question() -> None:
    config = run_of("rollout.engine=simulated")
    assert measured(config, [problem("äb"), problem("abcd")]) == math.ceil((3 + 4) / 2)


def test_of_many_questions_a_few_are_tried_and_their_mean_is_that_of_all_in_any_order() -> None:
    drawn, config = random.Random(7), run_of("rollout.engine=simulated")
    # As lengths of questions are: most are short, a few are many times as long, sorted by nothing.
    lengths = [max(1, int(drawn.lognormvariate(5, 0.8))) for _ in range(9000)]
    asked = [problem("x" * length) for length in lengths]
    actual, origin = prompt_length(config, asked, None)
    assert origin == f"the mean of {RENDERED} questions of data.train"
    assert actual == pytest.approx(sum(lengths) / len(lengths), rel=0.02)
    assert (
        measured(config, asked[::-1])
        == measured(config, sorted(asked, key=lambda each: each.question))
        == actual
    )


def test_the_mean_is_that_of_the_prompts_that_an_epoch_asks(tmp_path: Path) -> None:
    for name, rows, words in (("short", 300, 1), ("long", 100, 60)):
        lines = [
            json.dumps({"id": f"{name} {row}", "question": " 1" * words, "answer": 1})
            for row in range(rows)
        ]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    paths = [f'path="{tmp_path / name}.jsonl"' for name in ("short", "long")]
    apart = [told(f"data.train=[{{{path}}}]", f"data.eval=[{{{paths[1]}}}]") for path in paths]
    together = told(
        f"data.train=[{{{paths[0]}, weight=1}}, {{{paths[1]}, weight=3}}]",
        f"data.eval=[{{{paths[1]}}}]",
    )
    assert apart[0] < apart[1] and together == pytest.approx(
        (apart[0] + 3 * apart[1]) / 4, rel=0.03
    )


def told(*settings: str) -> int:
    """Return the tokens of a prompt that `--check` tells."""
    return forecast(run_of(*settings, "data.family_column=question")).prompt_tokens
