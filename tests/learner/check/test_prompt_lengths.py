"""Length of a run's prompts: what the rollouts' renderer makes of the questions, or a guess that is called one."""

import json
import math
import random
import re
from pathlib import Path

import pytest

from prefixrl.common.config.load import load
from prefixrl.common.config.run import RunConfig
from prefixrl.common.prompts.asking import renderers_here
from prefixrl.common.prompts.rendering import renderer_of
from prefixrl.learner.check.prompt_lengths import RENDERED, PromptLength, prompt_length, spread
from prefixrl.learner.check.report import forecast
from prefixrl.learner.data import problems
from prefixrl.learner.data.rows import Problem
from support.models.chat_tokenizers import qwen
from support.paths import EXAMPLE, EXAMPLES

GUESS = "guessed from their characters: the adapter's tokenizer is not on this host"


def run_of(*settings: str) -> RunConfig:
    return load(EXAMPLE / "run.toml", settings)


def measured(config: RunConfig, asked: list[Problem]) -> PromptLength:
    return prompt_length(config, asked, renderers_here(config).get("adapter"))


def problem(question: str, system: str = "") -> Problem:
    return Problem(question, question, "1", system=system)


@pytest.mark.parametrize("name", ["arithmetic", "letters"])
def test_prompts_of_an_example_are_as_long_as_all_of_its_questions_rendered(name: str) -> None:
    config = load(EXAMPLES / name / "run.toml")
    renderer = renderer_of(config, "rollout")
    asked = problems.read_all(config)[0].problems
    mean_tokens = sum(renderer.prompt(each.question, each.system).size for each in asked) / len(asked)
    told = forecast(config)
    assert abs(told.prompt_tokens - mean_tokens) <= 1
    assert f"tokens (prompts of about {told.prompt_tokens} tokens): " in told.text
    assert "guessed" not in told.text


def test_a_question_is_measured_with_its_system_turn_and_the_worked_examples(tmp_path: Path) -> None:
    folder = qwen(tmp_path / "adapter")
    plain = run_of(f"adapter.model={folder}")
    shown = run_of(f"adapter.model={folder}", f"adapter.prompt_template={'What is the sum? ' * 50}{{problem}}")
    question = problem("the sum of two")
    assert measured(plain, [question]).tokens == renderer_of(plain, "rollout").prompt("the sum of two").size
    assert measured(shown, [question]).tokens >= measured(plain, [question]).tokens + 50
    with_system = problem("the sum of two", system="Think step by step. " * 30)
    assert measured(plain, [with_system]).tokens >= measured(plain, [question]).tokens + 30


def test_without_the_tokenizer_the_length_is_guessed_and_the_line_says_so() -> None:
    told = forecast(run_of("adapter.model=Qwen/Qwen2.5-1.5B"))
    assert f"(prompts of {told.prompt_tokens} tokens, {GUESS}): " in told.text
    assert "prompts of about" not in told.text


def test_a_guess_is_no_longer_than_prompts_may_be() -> None:
    config = run_of("adapter.model=Qwen/Qwen2.5-1.5B", "rollout.max_prompt_tokens=50")
    assert prompt_length(config, [problem("?" * 3000)], None).tokens == 50


def test_a_question_over_the_limit_is_left_out_of_the_mean() -> None:
    config = run_of("rollout.max_prompt_tokens=20")
    short = problem("sum 1 2 3")
    assert measured(config, [short, problem("sum" + " 1" * 300)]) == measured(config, [short])


def test_where_all_questions_are_over_the_limit_the_length_is_the_limit() -> None:
    found = measured(run_of("rollout.max_prompt_tokens=20"), [problem("sum" + " 1" * 300)])
    assert found.tokens == 20
    assert found.text == "prompts of 20 tokens: those tried are over rollout.max_prompt_tokens = 20"


def test_simulated_rollouts_have_a_token_per_byte_of_a_question() -> None:
    config = run_of("rollout.engine=simulated")
    assert measured(config, [problem("äb"), problem("abcd")]).tokens == math.ceil((3 + 4) / 2)


def test_few_questions_are_all_tried() -> None:
    asked = [problem("x" * length) for length in (5, 1, 3)]
    assert sorted(len(each.question) for each in spread(asked)) == [1, 3, 5]


def test_of_many_questions_the_same_few_are_tried_and_their_mean_length_is_that_of_all() -> None:
    drawn = random.Random(7)
    # As lengths of questions are: most are short, a few are many times as long, sorted by nothing.
    lengths = [max(1, int(drawn.lognormvariate(5, 0.8))) for _ in range(9000)]
    asked = [problem("x" * length) for length in lengths]
    found = spread(asked)
    assert len(found) == RENDERED and found == spread(asked)
    mean = sum(len(each.question) for each in found) / RENDERED
    assert mean == pytest.approx(sum(lengths) / len(lengths), rel=0.02)


def test_the_mean_does_not_depend_on_the_order_of_the_rows(tmp_path: Path) -> None:
    lines = [json.dumps({"question": "sum" + " 1" * (1 + row % 9), "answer": 1}) for row in range(400)]
    said = []
    for order in (lines, sorted(lines), lines[::-1]):
        path = tmp_path / "train.jsonl"
        path.write_text("\n".join(order))
        # No family column in these rows; the shipped file has one.
        flags = (f"data.train={path}", f"data.eval={path}", "data.family_column=question")
        said.append(re.findall(r"prompts of about \d+", forecast(run_of(*flags)).text))
    assert said[0] and said[0] == said[1] == said[2]


def test_the_mean_is_that_of_the_prompts_that_an_epoch_asks(tmp_path: Path) -> None:
    for name, rows, words in (("short", 300, 1), ("long", 100, 60)):
        lines = [json.dumps({"id": f"{name} {row}", "question": " 1" * words, "answer": 1}) for row in range(rows)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    paths = [f'path="{tmp_path / name}.jsonl"' for name in ("short", "long")]
    apart = [told(f"data.train=[{{{path}}}]", f"data.eval=[{{{paths[1]}}}]") for path in paths]
    together = told(f"data.train=[{{{paths[0]}, weight=1}}, {{{paths[1]}, weight=3}}]", f"data.eval=[{{{paths[1]}}}]")
    assert apart[0] < apart[1] and together == pytest.approx((apart[0] + 3 * apart[1]) / 4, rel=0.03)


def told(*settings: str) -> int:
    """Return the tokens of a prompt that `--check` tells."""
    return forecast(run_of(*settings, "data.family_column=question")).prompt_tokens
