"""The engine with `bitwise`: a job's rows are one forward, so its texts are its own bit by bit."""

from pathlib import Path

import numpy as np
import pytest

from prefixrl.common.engines.embedded.fixed_rows import FixedRowsEngine
from support.models.engine_jobs import finish, job, same, settings
from support.models.tiny_model import save_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), is_tied=True)


@pytest.fixture
def engine(folder: Path) -> FixedRowsEngine:
    return FixedRowsEngine(str(folder), "cpu", "float32", 1)


def test_a_text_does_not_depend_on_other_jobs_nor_on_their_order(
    engine: FixedRowsEngine, folder: Path
) -> None:
    alone = finish(engine, job("a"))["a"]
    other = job("b", ([1, 2], [30, 31, 32]), settings(1.3))
    assert same(alone, finish(engine, other, job("a"))["a"])
    assert same(alone, finish(engine, job("a"), other)["a"])
    fresh = FixedRowsEngine(str(folder), "cpu", "float32", 1)
    fresh.submit(other)
    assert fresh.step(0.0) == []
    late = finish(fresh, job("a"), already=["b"])  # arrives while the other one runs
    assert list(late) == ["b", "a"] and same(alone, late["a"])


def test_only_a_job_that_has_not_started_can_be_cancelled(engine: FixedRowsEngine) -> None:
    engine.submit(job("a"))
    engine.submit(job("b"))
    engine.step(0.0)
    assert engine.cancel("b")
    assert not engine.cancel("b") and not engine.cancel("a") and not engine.cancel("unknown")
    assert list(finish(engine, already=["a"])) == ["a"]


def test_a_stop_changes_nothing_of_what_stands_before_it(engine: FixedRowsEngine) -> None:
    free = finish(engine, job("a"))["a"].rows
    stopped = finish(engine, job("a", stops={int(free[0].tokens[4]), int(free[2].tokens[1])}))[
        "a"
    ].rows
    for before, after in zip(free, stopped, strict=True):
        assert np.array_equal(after.tokens, before.tokens[: after.tokens.size])
        assert np.array_equal(after.logprobs, before.logprobs[: after.tokens.size])
