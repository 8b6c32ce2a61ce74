"""The memory for greedy completions.

What it answers is what the target would, and it is never larger than it may be.
"""

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixrl.common.engines.interface.base import Continuation, Job, TokenIds
from prefixrl.common.wire.messages.groups import Sampling
from prefixrl.scorer.cache import ENTRY_BYTES, Completion, Completions, GreedyCache, Key

STOPS = frozenset({0})
ROWS = st.lists(st.integers(1, 3), min_size=1, max_size=3)
SAMPLING = st.builds(
    Sampling, temperature=st.sampled_from([0.0, 0.0, 0.7]), max_new_tokens=st.integers(1, 4)
)


def ids(tokens: list[int]) -> TokenIds:
    return np.asarray(tokens, dtype=np.int32)


def job(key: str, rows: list[list[int]], sampling: Sampling, first: int = 0) -> Job:
    """Give every row a draw of its own, which identifies it."""
    uniforms = np.arange(first, first + len(rows), dtype=np.float64)[:, None]
    scripts = tuple(ids([first + row]) for row in range(len(rows)))
    return Job(key, tuple(map(ids, rows)), uniforms, sampling, STOPS, scripts)


def completed(asked: Job) -> tuple[Continuation, ...]:
    """A target that is greedy: what it writes follows from the row and the settings; sampled, from the draw too."""
    return tuple(
        Continuation(
            ids(_written(row.tolist(), asked.sampling, float(draw[0]))),
            np.zeros(0, np.float32),
            "length",
            (),
        )
        for row, draw in zip(asked.rows, asked.uniforms, strict=True)
    )


def _written(row: list[int], sampling: Sampling, draw: float) -> list[int]:
    seed = sum(token * 5**place for place, token in enumerate(row))
    noise = int(draw) if sampling.temperature else 0
    return [seed + noise + step for step in range(sampling.max_new_tokens)]


@given(
    st.lists(
        st.tuples(st.lists(ROWS, min_size=1, max_size=6), SAMPLING, st.booleans(), st.booleans()),
        max_size=12,
    ),
    st.sampled_from([0, 1, ENTRY_BYTES + 10, 3 * ENTRY_BYTES, 10**6]),
    st.randoms(use_true_random=False),
)
def test_every_job_is_answered_as_the_engine_would_have_and_no_row_is_asked_for_twice(
    jobs: list[tuple[list[list[int]], Sampling, bool, bool]], limit_bytes: int, order: object
) -> None:
    """Jobs are under way together and end in any order; some are called off."""
    completions = Completions(limit_bytes)
    parts: dict[str, Job | None] = {}
    whole_jobs: dict[str, Job] = {}
    under_way: list[str] = []
    done: set[str] = set()

    def take_complete() -> None:
        for key, results in completions.complete_jobs():
            assert key not in done
            done.add(key)
            check(whole_jobs[key], parts[key], results)

    def finish_one() -> None:
        key = under_way.pop(order.randrange(len(under_way)))  # type: ignore[attr-defined]
        completions.add_written(key, completed(parts[key]))  # type: ignore[arg-type]
        take_complete()

    for number, (rows, sampling, is_awaited, is_called_off) in enumerate(jobs):
        whole = job(f"t{number}", rows, sampling, first=10 * number)
        whole_jobs[whole.key] = whole
        asked_now = {
            (row.tobytes(), each.sampling)
            for each in (parts[key] for key in under_way)
            if each is not None and each.sampling.temperature == 0 and limit_bytes
            for row in each.rows
        }
        part = parts[whole.key] = completions.missing_part(whole)
        if part is not None:
            assert not asked_now & {(row.tobytes(), part.sampling) for row in part.rows}
        take_complete()
        if part is not None and is_called_off and not completions.is_awaited(whole.key):
            completions.forget_job(whole.key)
            del whole_jobs[whole.key]
        elif part is not None:
            under_way.append(whole.key)
        if is_awaited and under_way:
            finish_one()
        assert completions._cache.size_bytes <= limit_bytes
    while under_way:
        finish_one()
    assert done == whole_jobs.keys()
    assert not completions._open_jobs and not completions._under_way


def check(whole: Job, part: Job | None, results: list[Completion]) -> None:
    expected = completed(whole)
    assert [each.tokens.tolist() for each in results] == [each.tokens.tolist() for each in expected]
    assert [each.finish for each in results] == [each.finish for each in expected]
    asked = () if part is None else part.rows
    assert len(asked) == sum(not each.was_cached for each in results)
    if part is not None and part is not whole:
        assert len({row.tobytes() for row in asked}) == len(asked)
        assert part.script is not None and len(part.script) == len(asked)
        # A part's draws and scripts are those of its rows.
        places = [int(draw[0]) - int(whole.uniforms[0, 0]) for draw in part.uniforms]
        assert all((whole.rows[at] == row).all() for at, row in zip(places, asked, strict=True))
        assert [int(each[0]) for each in part.script] == [int(draw[0]) for draw in part.uniforms]


GREEDY, SAMPLED = (
    Sampling(temperature=0.0, max_new_tokens=2),
    Sampling(temperature=0.7, max_new_tokens=2),
)


def test_a_row_that_was_completed_is_not_completed_again_and_equal_rows_are_completed_once() -> (
    None
):
    completions = Completions(10**6)
    first = job("a", [[1], [2], [1]], GREEDY)
    part = completions.missing_part(first)
    assert part is not None and [row.tolist() for row in part.rows] == [[1], [2]]
    completions.add_written("a", completed(part))
    ((_, actual),) = completions.complete_jobs()
    assert [each.was_cached for each in actual] == [False, False, True]
    assert completions.missing_part(job("b", [[2], [1]], GREEDY)) is None
    ((_, cached),) = completions.complete_jobs()
    assert len(cached) == 2 and all(each.was_cached for each in cached)


def test_a_row_that_is_under_way_for_another_job_is_waited_for() -> None:
    completions = Completions(10**6)
    first, second, third = (
        job(key, rows, GREEDY)
        for key, rows in (("a", [[1], [2]]), ("b", [[2], [3]]), ("c", [[2], [3], [2]]))
    )
    assert completions.missing_part(first) is first
    part = completions.missing_part(second)
    assert part is not None and [row.tolist() for row in part.rows] == [[3]]
    assert completions.missing_part(third) is None and completions.complete_jobs() == []
    assert completions.is_awaited("a") and completions.is_awaited("b")
    assert not completions.is_awaited("c")
    completions.add_written("b", completed(part))
    assert completions.complete_jobs() == [] and completions.is_awaited("a")
    completions.add_written("a", completed(first))
    results = dict(completions.complete_jobs())
    assert {key: [each.was_cached for each in results[key]] for key in results} == {
        "a": [False, False],
        "b": [True, False],
        "c": [True, True, True],
    }
    check(third, None, results["c"])


def test_a_job_that_is_taken_back_leaves_its_rows_to_the_next_one() -> None:
    completions = Completions(10**6)
    first, second = job("a", [[1]], GREEDY), job("b", [[1]], GREEDY)
    assert completions.missing_part(first) is first and not completions.is_awaited("a")
    completions.forget_job("a")
    assert completions.missing_part(second) is second


def test_an_error_goes_to_every_job_that_waits_and_is_not_kept() -> None:
    completions = Completions(10**6)
    first, second = job("a", [[1]], GREEDY), job("b", [[1]], GREEDY)
    completions.missing_part(first)
    assert completions.missing_part(second) is None
    lost = Continuation(ids([]), np.zeros(0, np.float32), "error", (), error="no room")
    completions.add_written("a", [lost])
    assert [results[0].error for _, results in completions.complete_jobs()] == ["no room"] * 2
    third = job("c", [[1]], GREEDY)
    assert completions.missing_part(third) is third


@pytest.mark.parametrize("limit_bytes", [0, 10**6])
def test_a_job_without_anything_known_goes_to_the_engine_as_it_is(limit_bytes: int) -> None:
    greedy = job("a", [[1], [2]], GREEDY)
    assert Completions(limit_bytes).missing_part(greedy) is greedy
    repeated = job("a", [[1], [1]], GREEDY if not limit_bytes else SAMPLED)
    assert Completions(limit_bytes).missing_part(repeated) is repeated


@pytest.mark.parametrize(
    "other",
    [
        job("b", [[1]], Sampling(temperature=0.0, max_new_tokens=3)),
        job("b", [[1]], Sampling(temperature=0.0, max_new_tokens=2, min_p=0.5)),
        job("b", [[1, 1]], GREEDY),
        Job("b", (ids([1]),), np.zeros((1, 1)), GREEDY, frozenset({0, 9})),
        replace(job("b", [[1]], GREEDY), watches=(lambda: lambda _: True,)),
    ],
    ids=["limit", "settings", "row", "stops", "watch"],
)
def test_what_was_asked_otherwise_is_another_completion(other: Job) -> None:
    completions = Completions(10**6)
    known = job("a", [[1]], GREEDY)
    completions.missing_part(known)
    completions.add_written("a", completed(known))
    assert completions.missing_part(other) is other


@dataclass
class SlowLru:
    """The cache in its simplest form: a list, the newest use last."""

    limit_bytes: int
    entries: list[tuple[Key, Completion]] = field(default_factory=list)

    def get(self, key: Key) -> Completion | None:
        for entry in self.entries:
            if entry[0] == key:
                self.entries.remove(entry)
                self.entries.append(entry)
                return entry[1]
        return None

    def put(self, key: Key, completion: Completion) -> None:
        if (
            any(known == key for known, _ in self.entries)
            or size(key, completion) > self.limit_bytes
        ):
            return
        self.entries.append((key, completion))
        while sum(size(*entry) for entry in self.entries) > self.limit_bytes:
            self.entries.pop(0)


def size(key: Key, completion: Completion) -> int:
    return len(key[0]) + 4 * len(completion.tokens) + ENTRY_BYTES


@given(
    st.lists(st.tuples(st.sampled_from(["get", "put"]), st.integers(1, 6)), max_size=40),
    st.integers(0, 4 * ENTRY_BYTES + 100),
)
def test_what_was_not_asked_for_longest_goes_first(
    steps: list[tuple[str, int]], limit_bytes: int
) -> None:
    fast, slow = GreedyCache(limit_bytes), SlowLru(limit_bytes)
    for what, number in steps:
        key = (bytes(4 * number), GREEDY, STOPS, False)
        if what == "put":
            completion = Completion(ids([number] * number * 10), "eos")
            fast.put(key, completion)
            slow.put(key, completion)
        else:
            assert fast.get(key) is slow.get(key)
        assert list(fast._entries) == [known for known, _ in slow.entries]
        assert fast.size_bytes == sum(size(*entry) for entry in slow.entries) <= limit_bytes
