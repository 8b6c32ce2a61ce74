"""`prefixrl serve` of an adapter that reads drafts: the target is asked for each first."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from prefixrl.common.config.load import load
from prefixrl.common.engines.make import make_engine
from prefixrl.common.errors import ConfigError
from prefixrl.common.prompts.rendering import renderer_of
from prefixrl.common.wire.messages.groups import Prompt
from prefixrl.common.wire.messages.worker import ModelDigests
from prefixrl.deploy.serve.answering import Answering, Model
from prefixrl.deploy.serve.engine_thread import EngineThread
from prefixrl.deploy.serve.server import _servable
from prefixrl.learner.broker.groups.answers import NO_PREFIX
from prefixrl.scorer.loop import Scorer
from prefixrl.scorer.verifier.pool import VerifierPool
from support import messages
from support.broker.scoring_world import Tasks
from support.completions_server import Reply, Request, failure, serving
from support.paths import EXAMPLES
from support.runs.served_run import run_of, served

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

PROBLEMS = ["largest 9 2 4 7 0 5 6 8", "sum 3 1 4 1 5 9 2 6"]
DRAFTED = ("adapter.sees=draft", 'adapter.prompt_template="{problem} {draft}"')


def vendor(request: Request) -> Reply:
    """Drafts one problem, refuses to draft the other, and answers with any advice."""
    question = request.body["messages"][-1]["content"]
    if question.startswith("sum"):
        return Reply(400, failure("no sums without advice"))
    choice = {"message": {"content": "It is \\boxed{9}."}, "finish_reason": "stop"}
    return Reply(content={"choices": [choice]})


def test_the_target_drafts_a_problem_once_for_all_of_its_answers(tmp_path: Path) -> None:
    run = run_of("advice", tmp_path / "run", *DRAFTED)
    with serving(vendor) as endpoint:
        settings: tuple[str, ...] = (
            "scorer.engine=openai",
            "scorer.openai.api=chat",
            f'scorer.openai.url="{endpoint.url}"',
            'target.model="served-target"',
        )
        with served(run, settings=settings) as server, server.client() as client:
            started = len(endpoint.asked)
            answers = client.completions.create(
                model=server.name, prompt=PROBLEMS, n=2, temperature=1.0, seed=1
            )
            assert [each.text for each in answers.choices] == ["It is \\boxed{9}."] * 4
            bodies = [each.body for each in endpoint.asked[started:]]
    bare = [body for body in bodies if body["messages"][-1]["content"] in PROBLEMS]
    assert sorted(body["messages"][-1]["content"] for body in bare) == PROBLEMS
    assert {body["temperature"] for body in bare} == {0.0}
    advised = [body["messages"][-1]["content"] for body in bodies if body not in bare]
    assert len(advised) == 4 and all(text.startswith("advice: ") for text in advised)


def test_the_adapter_alone_is_refused() -> None:
    config = load(EXAMPLES / "advice" / "run.toml", DRAFTED)
    with pytest.raises(ConfigError, match="--prefix-only: the adapter of this run reads a draft"):
        _servable(config, prefix_only=True)
    assert _servable(config, prefix_only=False) is config


def test_a_draft_is_the_one_that_training_has() -> None:
    config = load(EXAMPLES / "advice" / "run.toml", DRAFTED)
    assert config.target is not None
    renderer = renderer_of(config, "scorer")
    engine = make_engine("transformers", config.target.model, "scorer", config)
    groups = [
        messages.group(seq, NO_PREFIX, prompt=Prompt(f"p{seq}", problem, ""))
        for seq, problem in enumerate(PROBLEMS)
    ]
    sampling = config.scorer_sampling(0.0)
    link: Any = Tasks(messages.score_task(*groups, sampling=sampling, kind="draft", version=-1))
    verifier: Any = VerifierPool(1, 5)
    try:
        digests = ModelDigests("", "", "")
        Scorer(config, link, engine, renderer, verifier, digests).run(lambda: False)
    finally:
        verifier.close()
    (scores,) = link.sent
    thread = EngineThread(make_engine("transformers", config.target.model, "scorer", config), "t")
    target = Model(thread, renderer)
    answering = Answering(config, target, target)

    async def drafts() -> list[str]:
        prompts = [renderer.prompt(problem) for problem in PROBLEMS]
        return [await answering._draft(target, prompt) for prompt in prompts]

    try:
        served_drafts = asyncio.run(drafts())
    finally:
        thread.close()
    assert served_drafts == [group.verdicts[0].completion for group in scores.groups]
    assert all("boxed" in draft for draft in served_drafts)
