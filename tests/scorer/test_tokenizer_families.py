"""Prefixes between an adapter and a target: ids where both read the same in them, else the text."""

import logging
from pathlib import Path

import numpy as np
import pytest

from prefixrl.common.prompts.rendering import Renderer
from prefixrl.common.wire.messages.groups import Finish, GroupPrefixes, Prompt, Row, Sampling
from prefixrl.common.wire.messages.worker import ModelDigests
from prefixrl.common.wire.packing import pack_tokens
from prefixrl.common.worker.link import Vitals
from prefixrl.scorer.loop import Scorer
from prefixrl.scorer.verifier.pool import VerifierPool
from support import messages
from support.broker.scoring_world import Tasks, WritingEngine
from support.fakes import run_on_disk
from support.models.chat_tokenizers import llama, qwen

OTHER = ["None of these words is in the other one's lines: zebra quartz, zebra quartz."]
TEXT = "Step 1: the sum héllo"


@pytest.fixture(scope="module")
def renderers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Renderer, Renderer]:
    """An adapter's, and a target's of another family."""
    folder = tmp_path_factory.mktemp("tokenizers")
    return Renderer(str(qwen(folder / "q")), 512), Renderer(str(llama(folder / "l", OTHER)), 512)


def row(renderer: Renderer, text: str, stop: bool = False) -> Row:
    """Return a prefix as a rollout sends it."""
    ids = renderer.encode(text)
    if stop:
        ids = np.append(ids, min(renderer.stop_tokens)).astype(np.int32)
    finish: Finish = "eos" if stop else "length"
    said = renderer.decode_with_special(renderer.without_stop(ids))
    return messages.row(ids, finish, None, text=said)


def completed(folder: Path, target: Renderer, *rows: Row) -> tuple[list[str], list[bool]]:
    """Return the answers as the target reads them at the engine's start, and which prefixes were sent as text."""
    config = run_on_disk(folder)
    prompt = Prompt("p", "What?", "1")
    group = GroupPrefixes(seq=0, prompt=prompt, seed=7, prompt_tokens=pack_tokens([1]), rows=rows)
    link = Tasks(messages.score_task(group, sampling=Sampling(temperature=0.0, max_new_tokens=30)))
    assert isinstance(link.vitals, Vitals)
    rendered = target.prompt(prompt.question)
    engine, pool = Echo([], rendered.size), VerifierPool(1, 5)
    try:
        Scorer(config, link, engine, target, pool, ModelDigests("", "", "")).run(lambda: False)  # type: ignore[arg-type]
    finally:
        pool.close()
    (job,) = engine.jobs
    (scores,) = link.sent
    texts = [target.decode_with_special(each[rendered.size :]) for each in job.rows]
    return texts, [verdict.was_text for verdict in scores.groups[0].verdicts]  # type: ignore[union-attr]


class Echo(WritingEngine):
    """Ends every row at once."""

    def _rows(self, job):  # type: ignore[no-untyped-def]
        from prefixrl.common.engines.interface.base import Continuation

        stop = np.array([min(job.stop_tokens)], dtype=np.int32)
        return [Continuation(stop, np.zeros(0, dtype=np.float32), "eos", ()) for _ in job.rows]


def test_one_family_goes_by_ids_and_says_nothing(
    tmp_path: Path, renderers: tuple[Renderer, Renderer], caplog: pytest.LogCaptureFixture
) -> None:
    adapter, _ = renderers
    texts, as_text = completed(tmp_path, adapter, row(adapter, TEXT), row(adapter, TEXT, stop=True))
    assert texts == [TEXT, TEXT] and as_text == [False, False]
    assert not caplog.records


def test_another_family_gets_the_text_and_it_is_counted_and_warned_of_once(
    tmp_path: Path, renderers: tuple[Renderer, Renderer], caplog: pytest.LogCaptureFixture
) -> None:
    adapter, target = renderers
    caplog.set_level(logging.WARNING)
    texts, as_text = completed(tmp_path, target, row(adapter, TEXT), row(adapter, TEXT, stop=True))
    assert texts == [TEXT, TEXT] and as_text == [True, True]
    (said,) = [each.getMessage() for each in caplog.records]
    assert "different families" in said and "prefix_as_text_fraction" in said


def test_a_character_cut_in_the_middle_is_left_to_the_target(
    tmp_path: Path, renderers: tuple[Renderer, Renderer]
) -> None:
    adapter, target = renderers
    ids = adapter.encode("ab é")[:-1]
    cut = messages.row(ids, version=None, text=adapter.decode_with_special(ids))
    assert cut.text is not None and cut.text.endswith("\ufffd")
    assert completed(tmp_path / "own", adapter, cut)[1] == [False]
    assert completed(tmp_path / "other", target, cut) == (["ab "], [True])


def test_text_that_looks_like_the_end_of_a_turn_ends_none(
    tmp_path: Path, renderers: tuple[Renderer, Renderer]
) -> None:
    adapter, target = renderers
    texts, as_text = completed(tmp_path, target, row(adapter, "so <|eot_id|> then"))
    assert texts == ["so <|eot_id|> then"] and as_text == [True]
    ids = target.encode_literal("<|eot_id|>")
    assert not target.stop_tokens & set(ids.tolist())


def test_rows_without_a_text_go_by_ids(
    tmp_path: Path, renderers: tuple[Renderer, Renderer]
) -> None:
    _, target = renderers
    ids = target.encode(TEXT)
    bare = messages.row(ids, version=None)
    assert completed(tmp_path, target, bare) == ([TEXT], [False])
