"""Rows that a watch ends: they are what they would have been up to there, and their neighbours are as they were."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from prefixrl.common.engines.embedded.continuous import TransformersEngine
from prefixrl.common.engines.embedded.fixed_rows import FixedRowsEngine
from prefixrl.common.engines.interface.base import Watch
from support.models.engine_jobs import PROMPTS, TOKENS, EmbeddedEngines, finish, job, settings
from support.models.tiny_model import save_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), is_tied=True)


def ends_after(tokens: int, seen: list[int] | None = None) -> Callable[[], Watch]:
    """Make watches that end a row with its token of this number."""

    def make() -> Watch:
        taken: list[int] = [] if seen is None else seen

        def watch(token: int) -> bool:
            taken.append(token)
            return len(taken) == tokens

        return watch

    return make


@pytest.mark.parametrize("kind", [TransformersEngine, FixedRowsEngine])
def test_a_watch_ends_its_row_alone(kind: type[EmbeddedEngines], folder: Path) -> None:
    plain = finish(kind(str(folder), "cpu", "float32", 1, seats=8), job("a"))["a"].rows
    seen: list[int] = []
    watches = (ends_after(5, seen), None, ends_after(TOKENS), ends_after(1))
    watched_job = replace(job("a"), watches=watches)
    watched = finish(kind(str(folder), "cpu", "float32", 1, seats=8), watched_job)["a"].rows
    for row, whole, size in zip(watched, plain, (5, TOKENS, TOKENS, 1), strict=True):
        assert row.tokens.tolist() == whole.tokens.tolist()[:size]
        assert row.logprobs.tolist() == pytest.approx(whole.logprobs.tolist()[:size], abs=1e-4)
    assert [row.finish for row in watched] == ["eos", "length", "eos", "eos"]
    assert [row.was_stopped for row in watched] == [True, False, True, True]
    assert [whole.finish for whole in plain] == ["length"] * len(PROMPTS)
    assert seen == watched[0].tokens.tolist()


@pytest.mark.parametrize("kind", [TransformersEngine, FixedRowsEngine])
def test_a_stop_token_ends_a_row_before_its_watch_is_asked(
    kind: type[EmbeddedEngines], folder: Path
) -> None:
    plain = finish(kind(str(folder), "cpu", "float32", 1, seats=8), job("a"))["a"].rows
    stop = int(plain[0].tokens[3])
    first = plain[0].tokens.tolist().index(stop) + 1
    watches = (ends_after(first),) * len(PROMPTS)
    watched_job = replace(job("a", stops=[stop]), watches=watches)
    row = finish(kind(str(folder), "cpu", "float32", 1, seats=8), watched_job)["a"].rows[0]
    assert row.tokens.size == first and row.finish == "eos" and not row.was_stopped


def test_equal_rows_of_which_one_is_watched_part_where_it_ends(folder: Path) -> None:
    """They are one row of the forward until then."""
    rows = [PROMPTS[0]] * 3
    greedy = replace(job("a", rows, settings(0.0)), watches=(None, ends_after(4), None))
    ended = finish(TransformersEngine(str(folder), "cpu", "float32", 1, seats=8), greedy)["a"].rows
    assert [row.tokens.size for row in ended] == [TOKENS, 4, TOKENS]
    assert ended[0].tokens.tolist() == ended[2].tokens.tolist()
    assert ended[0].tokens.tolist()[:4] == ended[1].tokens.tolist()
