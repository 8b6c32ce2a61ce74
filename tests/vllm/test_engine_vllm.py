"""The vLLM engine on the shipped models: its tokens, its logprobs, what ends a row, jobs side by side."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from prefixrl.common.engines.embedded.drawing import truncated
from prefixrl.common.engines.interface.base import Job, TokenIds, Watch
from prefixrl.common.engines.vllm.engine import VllmEngine
from prefixrl.common.errors import UserError
from prefixrl.common.wire.messages.groups import Sampling
from support.models import vllm_world as world
from support.models.engine_jobs import finish
from support.models.versioned import forward, fresh_model
from support.models.vllm_world import EXAMPLE

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # of vLLM and what it imports
]


def with_stops(job: Job, stops: frozenset[int]) -> Job:
    """The same job, ended by these tokens."""
    return replace(job, key=f"{job.key} {sorted(stops)}", stop_tokens=stops)


@pytest.fixture(scope="module", params=["adapter", "target"])
def folder(request: pytest.FixtureRequest) -> Path:
    path: Path = EXAMPLE / request.param
    return path


@pytest.fixture(scope="module")
def engine(vllm_is_there: None, folder: Path) -> Iterator[VllmEngine]:
    with world.started(folder) as engine:
        yield engine


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
def test_logprobs_of_sampled_tokens_are_those_of_a_fresh_forward_at_the_same_temperature(
    engine: VllmEngine, folder: Path, temperature: float, report: Callable[[str], None]
) -> None:
    job = world.job("a", temperature=temperature)
    rows = finish(engine, job)["a"].rows
    actual = world.differences(fresh_model(folder), job.rows, rows, temperature)
    assert actual.size == 64 * 16
    report(
        f"{folder.name}, temperature {temperature}: |difference| of {actual.size} sampled logprobs "
        f"mean {actual.mean():.2g}, max {actual.max():.2g}"
    )
    assert actual.max() < 1e-3


def next_logprobs(engine: VllmEngine, tokens: TokenIds, temperature: float) -> NDArray[np.float32]:
    """The logprob of every token but the first, each asked for as the next one, at a temperature."""
    return engine._call(_next_logprobs(engine, tokens, temperature), 600.0, "score tokens")


async def _next_logprobs(
    engine: VllmEngine, tokens: TokenIds, temperature: float
) -> NDArray[np.float32]:
    from vllm import SamplingParams
    from vllm.inputs.engine import tokens_input

    outputs = []
    for position in range(1, len(tokens)):
        ids = [int(tokens[position])]
        sampling = SamplingParams(
            temperature=temperature,
            max_tokens=1,
            logprob_token_ids=ids,
            ignore_eos=True,
            detokenize=False,
        )
        prompt = tokens_input(prompt_token_ids=tokens[:position].tolist())
        outputs.append(await engine._request_score(prompt, sampling))
    if engine._is_paused:
        await engine._resume()
    results = [(await output.get()).outputs[0].logprobs[0] for output in outputs]
    return np.asarray(
        [entry[int(token)].logprob for entry, token in zip(results, tokens[1:], strict=True)],
        np.float32,
    )


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
def test_scored_logprobs_are_those_of_a_fresh_forward_at_that_temperature(
    engine: VllmEngine, folder: Path, temperature: float, report: Callable[[str], None]
) -> None:
    scored = next_logprobs(engine, world.probe(), temperature)
    expected = forward(fresh_model(folder), world.probe(), temperature)
    assert scored.shape == (63,) and scored.dtype == np.float32
    actual = np.abs(scored - expected)
    report(
        f"{folder.name}, temperature {temperature}: |difference| of the probe mean {actual.mean():.2g}, max "
        f"{actual.max():.2g}"
    )
    assert actual.max() < 1e-3


def test_the_same_seeds_give_the_same_text(engine: VllmEngine) -> None:
    first = finish(engine, world.job("a", temperature=1.6))["a"]
    again = finish(engine, world.job("b", temperature=1.6))["b"]
    assert world.texts(first) == world.texts(again)


def test_rows_with_one_prompt_and_other_draws_differ(engine: VllmEngine) -> None:
    job = world.job("a", temperature=1.6)
    job = replace(job, rows=(job.rows[0],) * 64)
    drawn = world.texts(finish(engine, job)["a"])
    assert len({tuple(text) for text in drawn}) > 8


def test_greedy_is_the_argmax(engine: VllmEngine, folder: Path) -> None:
    job = world.job("a", rows=8, temperature=0.0)
    embedded = world.reference(folder)
    embedded.submit(job)
    expected = []
    while not expected:
        expected = embedded.step(0.0)
    rows = finish(engine, job)["a"].rows
    for ours, theirs in zip(rows, expected[0].rows, strict=True):
        assert ours.tokens.tolist() == theirs.tokens.tolist()
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)


@pytest.mark.parametrize("cut", [{"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.2}], ids=str)
def test_truncated_sampling_draws_from_what_transformers_would_and_says_so(
    engine: VllmEngine, folder: Path, cut: dict[str, float]
) -> None:
    job = world.job("a", temperature=2.0)
    sampling = Sampling(temperature=2.0, max_new_tokens=16, **cut)  # type: ignore[arg-type]
    rows = finish(engine, replace(job, sampling=sampling))["a"].rows
    model = fresh_model(folder)
    for start, row in zip(job.rows[:16], rows[:16], strict=True):
        whole = np.concatenate([start, row.tokens])
        with torch.no_grad():
            logits = model(torch.from_numpy(whole.astype(np.int64))[None]).logits[0]
        table = (truncated(logits[len(start) - 1 : -1], sampling) / 2.0).log_softmax(-1)
        expected = table.gather(1, torch.from_numpy(row.tokens.astype(np.int64))[:, None])[:, 0]
        assert row.logprobs == pytest.approx(expected.numpy(), abs=1e-3)


def test_a_stop_token_ends_its_row_and_stands_there_with_its_logprob(engine: VllmEngine) -> None:
    free = finish(engine, world.job("a"))["a"].rows
    stops = frozenset({int(free[0].tokens[4]), int(free[1].tokens[2])})
    stopped = finish(engine, with_stops(world.job("a"), stops))
    (result,) = stopped.values()
    for before, after in zip(free, result.rows, strict=True):
        ids = before.tokens.tolist()
        ends = [place for place, token in enumerate(ids) if token in stops]
        expected = ids[: ends[0] + 1] if ends else ids
        assert after.tokens.tolist() == expected
        assert after.finish == ("eos" if ends else "length")
        assert after.logprobs == pytest.approx(before.logprobs[: len(expected)], abs=1e-4)
    assert {row.finish for row in result.rows} >= {"eos"}


def test_the_models_own_end_token_ends_nothing_unless_the_job_says_so(engine: VllmEngine) -> None:
    free = finish(engine, world.job("a"))["a"].rows
    assert all(row.tokens.size == 16 and row.finish == "length" for row in free)
    assert any(world.END in row.tokens[:-1] for row in free)
    ended = finish(engine, with_stops(world.job("a"), frozenset({world.END})))
    (result,) = ended.values()
    assert all(
        row.finish == "eos" and world.END not in row.tokens[:-1] and row.tokens[-1] == world.END
        for row in result.rows
        if row.tokens.size < 16
    )
    assert any(row.tokens.size < 16 for row in result.rows)


def test_only_a_job_that_waits_for_seats_can_be_cancelled(engine: VllmEngine) -> None:
    assert (engine.seats, engine.room) == (256, 384)
    keys = [f"job {index}" for index in range(engine.seats // 64 + 2)]
    for key in keys:
        engine.submit(world.job(key, new=60))
    assert engine.cancel(keys[-1])
    assert not engine.cancel(keys[-1]) and not engine.cancel("unknown")
    assert not engine.cancel(keys[0])
    done = finish(engine, already=keys[:-1])
    assert set(done) == set(keys[:-1])
    assert engine.step(0.0) == []


def test_more_prompt_tokens_than_one_step_takes_change_nothing(
    engine: VllmEngine, folder: Path
) -> None:
    job = world.job("a", rows=256, tokens=100)
    rows = finish(engine, job)["a"].rows
    actual = world.differences(fresh_model(folder), job.rows[:32], rows[:32], 0.7)
    assert actual.max() < 1e-3


def test_progress_and_busy_time_grow_with_the_work(engine: VllmEngine) -> None:
    finish(engine, world.job("first"))  # a first job waits for what vLLM does once
    progress, busy_s = engine.progress, engine.busy_row_s
    # Long enough that the time before the first count is a small part.
    result = finish(engine, world.job("a", new=90))["a"]
    assert engine.progress - progress == sum(row.tokens.size for row in result.rows)
    assert 0.5 < (engine.busy_row_s - busy_s) / (64 * result.elapsed_s) <= 1.0
    idle_s = engine.busy_row_s
    assert engine.step(0.0) == [] and engine.busy_row_s == idle_s


def test_the_busy_time_of_one_long_row_is_that_of_one_seat(engine: VllmEngine) -> None:
    short, long = world.job("short", rows=31, new=2), world.job("long", rows=1, new=100)
    busy_s = engine.busy_row_s
    elapsed_s = finish(engine, short, long)["long"].elapsed_s
    rows = (engine.busy_row_s - busy_s) / elapsed_s
    assert 0.8 < rows < 4.0, "31 rows of 2 tokens beside one of 100"
    assert engine.waiting_rows == 0 and engine.rows_left("long") == 0


def test_a_watch_ends_its_row_alone_and_vllm_goes_on_with_no_token_of_it(
    engine: VllmEngine,
) -> None:
    job = world.job("plain", rows=4, new=60, temperature=0.0)
    plain = finish(engine, job)["plain"].rows
    taken: dict[int, list[int]] = {0: [], 2: []}

    def maker(index: int) -> Callable[[], Watch]:
        def watch(token: int) -> bool:
            taken[index].append(token)
            return len(taken[index]) == 21

        return lambda: watch

    watches = (maker(0), None, maker(2), None)
    tokens = engine.tokens
    watched = replace(job, key="watched", watches=watches)
    rows = finish(engine, watched, world.job("beside", rows=8, new=20))["watched"].rows
    assert [row.tokens.size for row in rows] == [21, 60, 21, 60]
    assert [row.finish for row in rows] == ["eos", "length", "eos", "length"]
    assert [row.was_stopped for row in rows] == [True, False, True, False]
    for row, whole in zip(rows, plain, strict=True):
        assert (row.tokens == whole.tokens[: row.tokens.size]).all()
    assert taken[0] == rows[0].tokens.tolist()
    # vLLM hands on 16 tokens at a time, and nothing is handed on once a row is closed.
    assert engine.tokens - tokens <= 2 * 60 + 8 * 20 + 2 * (21 + 2 * 16)
    again = finish(engine, replace(job, key="again"))["again"].rows
    assert all((row.tokens == whole.tokens).all() for row, whole in zip(again, plain, strict=True))


def test_what_vllm_chose_is_told_in_one_line(engine: VllmEngine) -> None:
    assert re.fullmatch(
        r"model runner V[12], attention \w+, max_num_seqs 256, max_num_batched_tokens \d+, room for keys and values of "
        r"\d+ tokens, cudagraph NONE",
        engine.about,
    ), engine.about


def test_a_row_without_room_for_an_answer_is_refused_by_name(engine: VllmEngine) -> None:
    with pytest.raises(UserError, match=r"of 130 tokens .* context of 128: .*max_model_len"):
        engine.submit(
            Job(
                "long",
                (np.full(130, 5, dtype=np.int32),),
                np.zeros((1, 4)),
                Sampling(temperature=1.0, max_new_tokens=4),
                frozenset(),
            )
        )
