"""A base model as target, asked through its chat template: what is judged ends where the turn is closed."""

from pathlib import Path

import pytest

from prefixrl.common.config.run import RunConfig
from prefixrl.common.engines.interface.base import Engine
from prefixrl.common.engines.make import make_engine
from prefixrl.common.prompts.rendering import continued_prefix, renderer_of
from prefixrl.common.wire.packing import token_ids
from prefixrl.scorer.judging import Answered, up_to
from prefixrl.scorer.served.engine import OpenAIEngine
from support import messages
from support.completions_server import Reply, Request, serving, written
from support.models.base_models import (
    AS_DECLARED,
    CLOSER,
    EOS,
    base_model,
    check_ends,
    judged,
    run_of,
)
from support.paths import EXAMPLE


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base_model(EXAMPLE / "target", tmp_path_factory.mktemp("base") / "target")


def embedded(config: RunConfig, target: Path) -> Engine:
    return make_engine("transformers", str(target), "scorer", config)


def test_a_text_of_an_embedded_target_ends_at_the_closer(target: Path) -> None:
    config = run_of(target)
    check_ends(judged(config, embedded(config, target)))


def test_with_the_declared_stops_alone_it_would_go_on_to_the_limit(target: Path) -> None:
    config = run_of(target, *AS_DECLARED)
    assert renderer_of(config, "scorer").stop_tokens == {EOS}
    verdicts = judged(config, embedded(config, target))
    assert {verdict.finish for verdict in verdicts} == {"length"}
    invented = [verdict for verdict in verdicts if verdict.completion.count("boxed") > 1]
    first_boxes = [verdict.completion.partition("boxed{")[2][0] for verdict in invented]
    assert invented and [verdict.extracted for verdict in invented] != first_boxes, (
        "the box of another turn is judged"
    )


@pytest.mark.parametrize("dialect", ["vllm", "openai"])
def test_a_text_of_a_served_target_ends_at_the_closer_whatever_the_endpoint_does_with_stops(
    dialect: str, target: Path
) -> None:
    """This endpoint ends at its model's own eos and shows an invented turn, with a box, before it."""
    right, wrong = "3 so \\boxed{3}", "3 so \\boxed{9}"

    def script(request: Request) -> Reply:
        ids = [*texts.encode(right).tolist(), CLOSER, 3, *texts.encode(wrong).tolist(), EOS]
        both = f"{right}<|im_end|><|user|>sum<|assistant|>{wrong}"
        told = {"text": both, "finish_reason": "stop", "token_ids": ids}
        shown = told if dialect == "vllm" else told | {"token_ids": None, "prompt_token_ids": None}
        return Reply(content=written(request.body, **shown))

    with serving(script) as server:
        config = run_of(
            target,
            "scorer.engine=openai",
            f"scorer.openai.url={server.url}",
            f"scorer.openai.dialect={dialect}",
        )
        texts = renderer_of(config, "scorer")
        engine = OpenAIEngine(str(target), config, lambda: None)
        try:
            verdicts = judged(config, engine)
        finally:
            engine.close()
        body = server.rows[0].body
    assert {verdict.extracted for verdict in verdicts} == {"3"}
    check_ends(verdicts)
    if dialect == "vllm":
        assert body["stop_token_ids"] == [EOS, CLOSER]
    else:
        assert body["stop"] == ["<|im_end|>", "<|endoftext|>"]


def test_the_closer_is_among_the_four_stops_that_the_api_takes(target: Path) -> None:
    more = 'scorer.stop_tokens=["sum", "so", "<|user|>", "<|assistant|>"]'
    with serving(
        lambda request: Reply(content=written(request.body, token_ids=None, prompt_token_ids=None))
    ) as server:
        where = (
            "scorer.engine=openai",
            f"scorer.openai.url={server.url}",
            "scorer.openai.dialect=openai",
        )
        config = run_of(target, *where, more)
        engine = OpenAIEngine(str(target), config, lambda: None)
        engine.close()
        assert server.asked[-1].body["stop"][0] == "<|im_end|>"


def test_a_prefix_ended_by_a_stop_of_the_adapter_alone_does_not_close_the_targets_turn(
    target: Path,
) -> None:
    """The target is asked without its template: to it the closer is a token like any other."""
    config = run_of(target, "target.chat_template=false")
    renderer = renderer_of(config, "scorer")
    assert CLOSER not in renderer.stop_tokens
    ids = renderer.encode("so 3").tolist()
    row = messages.row([*ids, CLOSER], "eos", None, text="so 3")
    prefix, was_text = continued_prefix(renderer, token_ids(row.tokens), row.text)
    assert prefix.tolist() == ids and not was_text


def test_a_judged_text_ends_before_the_first_stop_text() -> None:
    answered = Answered("t", 0, "so \\boxed{1}\n\nProblem: 2\n\\boxed{3}", "length", 9)
    ended = up_to(answered, ["\nAnswer", "\n\nProblem:"])
    assert (ended.text, ended.finish) == ("so \\boxed{1}", "eos")
    assert up_to(answered, ["Question"]) is answered and up_to(answered, []) is answered


def test_stop_texts_end_what_a_target_is_judged_by(target: Path) -> None:
    config = run_of(target, *AS_DECLARED, 'scorer.stop_texts=["so"]')
    for verdict in judged(config, embedded(config, target)):
        assert (
            verdict.finish == "eos"
            and verdict.status == "no_answer"
            and "so" not in verdict.completion
        )
