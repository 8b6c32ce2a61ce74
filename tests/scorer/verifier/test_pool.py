"""The pool with real child processes: stopped, killed and orphaned, and no verdict is lost."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from prefixrl.common.errors import PeerLost
from prefixrl.common.prompts.extract import MAX_ANSWER_CHARS
from prefixrl.scorer.verifier import pool as verifier_pool
from prefixrl.scorer.verifier.pool import START_DEADLINE_S, VerifierPool
from prefixrl.scorer.verifier.rules.verify import SYMPY_RULE, Judgement
from prefixrl.scorer.verifier.verifiers import deadline_s
from support.processes import is_alive

EQUAL = (r"\boxed{1+\ln x}", r"\ln x+1")
HANGS = (r"\boxed{(x+1)^{9999}}", r"\ln y+7")
PATIENCE_S = 200


@contextmanager
def pool_of(children: int = 1, timeout_s: int = 20) -> Iterator[VerifierPool]:
    pool = VerifierPool(children, timeout_s)
    try:
        yield pool
    finally:
        pool.close()


def verdicts(pool: VerifierPool) -> dict[int, Judgement]:
    """Everything pending, judged."""
    found: dict[int, Judgement] = {}
    deadline = time.monotonic() + PATIENCE_S
    while pool.pending:
        assert time.monotonic() < deadline, f"{pool.pending} answers are still pending"
        pool.wait(1.0)
        for key, verdict in pool.poll():
            assert key not in found, f"{key} was judged twice"
            found[key] = verdict
    return found


def asked_until_in_time(pool: VerifierPool, key: int, text: str, gold: str) -> Judgement:
    """The verdict of an ordinary answer under a short limit, which other work on the machine may use up."""
    for _ in range(20):
        pool.submit(key, text, gold)
        verdict = verdicts(pool)[key]
        if verdict.status != "timeout":
            return verdict
    raise AssertionError("it was never in time")


def until(condition: Callable[[], bool], pool: VerifierPool | None = None) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        if pool is not None:
            assert pool.poll() == []
        time.sleep(0.01)


def at_full_size(pool: VerifierPool, children: int) -> tuple[int, ...]:
    """The children, all of them ready and idle."""
    until(lambda: len(pool.child_pids) == children and pool.next_deadline_s is None, pool)
    return pool.child_pids


def is_at_work(pool: VerifierPool) -> bool:
    """A child has a job: the next deadline is an answer's, not a start's."""
    remaining_s = pool.next_deadline_s
    return remaining_s is not None and remaining_s <= deadline_s(20) < START_DEADLINE_S - 30


def kill_all(pool: VerifierPool) -> set[int]:
    killed = set(pool.child_pids)
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    return killed


def environment_of(pool: VerifierPool) -> bytes:
    """Return the environment that children inherit.

    Empty until their template is started, and not for long, since its title comes to stand there.
    """
    assert pool._template is not None
    path = Path(f"/proc/{pool._template._process.pid}/environ")
    deadline = time.monotonic() + PATIENCE_S
    while not (found := path.read_bytes()):
        assert time.monotonic() < deadline, "it was never started"
    return found


def test_an_answer_that_hangs_delays_no_other() -> None:
    with pool_of(children=2, timeout_s=PATIENCE_S) as pool:
        pool.submit(0, *HANGS)
        for key in range(1, 40):
            pool.submit(key, rf"\boxed{{{key}+\ln x}}", rf"\ln x+{key}")
        judged: dict[int, Judgement] = {}
        until(lambda: bool(judged.update(pool.poll())) or len(judged) == 39)
        assert set(judged) == set(range(1, 40)), "all but the one that hangs, long before its end"
        assert {(each.reward, each.status) for each in judged.values()} == {(1.0, "ok")}


@pytest.mark.slow
def test_a_killed_child_is_replaced_without_starting_python(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pool_of(timeout_s=1) as pool:
        pool.submit(1, *EQUAL)
        verdicts(pool)
        at_full_size(pool, 1)
        monkeypatch.setattr(sys, "executable", "/bin/false")  # nothing new can be started
        pids = set()
        for key in range(2, 5):
            (pid,) = at_full_size(pool, 1)
            pids.add(pid)
            os.kill(pid, signal.SIGSTOP)
            pool.submit(key, rf"\boxed{{{key}+\ln x}}", rf"\ln x+{key}")
            assert verdicts(pool)[key].status == "timeout"
        assert len(pids | set(at_full_size(pool, 1))) == 4


def test_exact_answers_need_no_process_and_no_waiting() -> None:
    with pool_of() as pool:
        pool.submit(1, r"\boxed{7}", "7")
        pool.submit(2, r"\boxed{8}", "7")
        pool.submit(3, "seven", "7")
        pool.submit(4, r"\boxed{9^{9^9}}", "7")
        pool.submit(5, r"\boxed{7", "7")
        assert pool.pending == 5
        found = dict(pool.poll())
        assert pool.child_pids == ()
        assert pool.pending == 0
    assert [(found[key].reward, found[key].status) for key in (1, 2, 3, 4, 5)] == [
        (1.0, "ok"),
        (0.0, "ok"),
        (0.0, "no_answer"),
        (0.0, "parse_fail"),
        (0.0, "no_answer"),
    ]


@pytest.mark.slow
def test_many_answers_at_once_each_get_their_own_verdict() -> None:
    with pool_of(children=2) as pool:
        for key in range(120):
            shift = key % 2  # odd keys are wrong by one
            pool.submit(key, rf"so \boxed{{{key + shift} + \ln x}}", rf"\ln x + {key}")
        found = verdicts(pool)
        at_full_size(pool, 2)
    assert {key: verdict.reward for key, verdict in found.items()} == {
        key: 1.0 - key % 2 for key in range(120)
    }
    assert {verdict.status for verdict in found.values()} == {"ok"}


def test_an_unparsable_answer_is_a_parse_failure() -> None:
    with pool_of() as pool:
        pool.submit(1, r"\boxed{\garbage ### \{}", "7")
        assert verdicts(pool) == {
            1: Judgement(0.0, "parse_fail", r"\garbage ### \{", rule=SYMPY_RULE)
        }


def test_a_cached_verdict_needs_no_child() -> None:
    with pool_of() as pool:
        pool.submit(1, *EQUAL)
        first = verdicts(pool)[1]
        os.kill(pool.child_pids[0], signal.SIGSTOP)  # nobody could judge it now
        pool.submit(2, *EQUAL)
        assert pool.poll() == [(2, first)]


def test_equal_answers_under_way_are_judged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifier_pool, "MAX_JOBS", 1)
    with pool_of() as pool:
        pool.submit(0, *EQUAL)
        pids = pool.child_pids
        for key in range(1, 20):
            pool.submit(key, *EQUAL)
        found = verdicts(pool)
        # With one job per child a second judgement would have taken a third process.
        until(lambda: pool.child_pids != pids, pool)
    assert found == dict.fromkeys(range(20), Judgement(1.0, "ok", r"1+\ln x", rule=SYMPY_RULE))


def test_the_least_recently_used_verdict_leaves_the_cache_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(verifier_pool, "MAX_CACHED", 1)
    with pool_of() as pool:
        pool.submit(1, *EQUAL)
        verdicts(pool)
        pool.submit(2, r"\boxed{2+\ln x}", r"\ln x+2")
        verdicts(pool)
        (pid,) = pool.child_pids
        os.kill(pid, signal.SIGSTOP)  # only what the cache holds is answered now
        pool.submit(3, *EQUAL)
        assert pool.poll() == []
        os.kill(pid, signal.SIGCONT)
        assert verdicts(pool)[3].reward == 1.0


def test_a_child_killed_during_a_job_is_replaced_and_the_answer_judged_by_another() -> None:
    with pool_of() as pool:
        pool.submit(1, *EQUAL)
        verdicts(pool)
        (pid,) = pool.child_pids
        os.kill(pid, signal.SIGSTOP)  # it takes the job and does not end it
        pool.submit(2, r"\boxed{2+\ln x}", r"\ln x+2")
        os.kill(pid, signal.SIGKILL)
        assert verdicts(pool) == {2: Judgement(1.0, "ok", r"2+\ln x", rule=SYMPY_RULE)}
        assert len(pool.child_pids) == 1
        assert pool.child_pids != (pid,)


def test_an_answer_whose_children_die_twice_is_an_error_and_never_a_wrong_answer() -> None:
    with pool_of() as pool:
        pool.submit(1, *HANGS)
        until(lambda: is_at_work(pool), pool)
        killed = kill_all(pool)
        until(lambda: not killed & set(pool.child_pids) and is_at_work(pool), pool)
        kill_all(pool)
        assert verdicts(pool)[1].status == "error"


@pytest.mark.slow
def test_a_child_that_hears_no_alarm_is_killed_at_the_deadline() -> None:
    with pool_of(timeout_s=2) as pool:
        pool.submit(1, *EQUAL)
        verdicts(pool)
        (pid,) = at_full_size(pool, 1)
        os.kill(pid, signal.SIGSTOP)
        pool.submit(2, r"\boxed{2+\ln x}", r"\ln x+2")
        assert verdicts(pool) == {2: Judgement(0.0, "timeout", r"2+\ln x", rule=SYMPY_RULE)}
        until(lambda: not is_alive(pid), pool)
        verdict = asked_until_in_time(pool, 3, r"\boxed{2+\ln x}", r"\ln x+2")
        assert verdict == Judgement(1.0, "ok", r"2+\ln x", rule=SYMPY_RULE), (
            "a timeout is not remembered"
        )
        at_full_size(pool, 1)


@pytest.mark.slow
def test_an_expression_that_takes_forever_is_a_timeout() -> None:
    with pool_of(timeout_s=1) as pool:
        pool.submit(1, *HANGS)
        (verdict,) = verdicts(pool).values()
    assert (verdict.reward, verdict.status) == (0.0, "timeout")


def test_a_child_is_replaced_after_its_number_of_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifier_pool, "MAX_JOBS", 2)
    with pool_of() as pool:
        pids: set[int] = set()
        for key in range(4):
            pool.submit(key, rf"\boxed{{{key}+\ln x}}", rf"\ln x+{key}")
            assert verdicts(pool)[key].reward == 1.0
            pids.update(at_full_size(pool, 1))
        assert len(pids) == 3, "of two jobs each, and a third that waits"


def test_a_child_has_a_memory_limit_python_integers_and_sees_no_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    with pool_of() as pool:
        pool.submit(1, *EQUAL)
        environment = environment_of(pool)
        verdicts(pool)
        (pid,) = at_full_size(pool, 1)
        limits = Path(f"/proc/{pid}/limits").read_text()
    (line,) = (line for line in limits.splitlines() if line.startswith("Max address space"))
    assert line.split()[3] == str(2 * 2**30)
    assert b"PATH=" in environment
    assert b"secret" not in environment
    assert {b"SYMPY_GROUND_TYPES=python", b"MPMATH_NOGMPY=1"} <= set(environment.split(b"\0"))


def test_closing_the_pool_reaps_every_child() -> None:
    with pool_of(children=2) as pool:
        pool.submit(1, *EQUAL)
        verdicts(pool)
        pids = at_full_size(pool, 2)
    for pid in pids:
        assert not Path(f"/proc/{pid}").exists()


def test_a_gold_answer_too_long_for_a_pipe_is_an_error_at_once() -> None:
    with pool_of() as pool:
        pool.submit(1, r"\boxed{x}", "x+" * 50_000)
        ((_, verdict),) = pool.poll()
    assert verdict.status == "error"


def test_a_template_that_dies_while_it_starts_children_is_one_failed_start() -> None:
    with pool_of(children=4) as pool:
        pool.submit(1, *EQUAL)
        assert pool._template is not None
        os.kill(pool._template._process.pid, signal.SIGKILL)
        assert verdicts(pool) == {1: Judgement(1.0, "ok", r"1+\ln x", rule=SYMPY_RULE)}
        at_full_size(pool, 4)


@pytest.mark.slow
def test_a_template_that_hangs_is_one_failed_start_and_children_at_work_go_on() -> None:
    with pool_of(children=4, timeout_s=PATIENCE_S) as pool:
        pool.submit(1, *EQUAL)
        verdicts(pool)
        at_full_size(pool, 4)
        pool.submit(2, *HANGS)
        (at_work,) = (each for each in pool._children if each.job is not None)
        hung = pool._template
        assert hung is not None
        os.kill(hung._process.pid, signal.SIGSTOP)
        for pid in set(pool.child_pids) - {at_work.process.pid}:
            os.kill(pid, signal.SIGKILL)
        until(lambda: len(pool.child_pids) == 1 and len(pool._children) == 4, pool)
        for child in pool._children:
            if child is not at_work:
                child.deadline = 0.0  # START_DEADLINE_S has passed
        until(lambda: len(pool.child_pids) == 4, pool)
        assert at_work.process.pid in pool.child_pids and at_work.job is not None
        assert at_work.job.attempts == 1
        assert hung.is_alive, "its child at work would die with it"
        at_work.deadline = 0.0
        assert verdicts(pool)[2].status == "timeout"
        assert not hung.is_alive, "nothing is left of it"
        at_full_size(pool, 4)


def test_children_that_cannot_start_end_the_scorer_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pool_of() as pool:
        pool.submit(1, *EQUAL)
        with pytest.raises(PeerLost, match="import math_verify"):
            verdicts(pool)


OWNER = r"""
import time
from prefixrl.scorer.verifier.pool import VerifierPool

pool = VerifierPool(2, 20)
pool.submit(1, r"\boxed{1+\ln x}", r"\ln x+1")
while not pool.poll():
    pool.wait(1.0)
print(*pool.child_pids, flush=True)
time.sleep(600)
"""


def test_children_die_with_their_parent(tmp_path: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True, cwd=tmp_path
    )
    assert owner.stdout is not None
    with owner, owner.stdout:
        pids = [int(pid) for pid in owner.stdout.readline().split()]
        assert len(pids) == 2
        assert all(is_alive(pid) for pid in pids)
        owner.kill()
    until(lambda: not any(is_alive(pid) for pid in pids))


def test_a_long_value_of_a_program_is_cut_and_judged() -> None:
    with pool_of() as pool:
        pool.submit(0, "<llm-code>\nprint('7' * 70_000)\n</llm-code>", "8", code="answers")
        found = verdicts(pool)[0]
    assert found == Judgement(0.0, "parse_fail", "7" * MAX_ANSWER_CHARS, rule="code: long text")


def test_a_program_that_returns_brackets_without_end_is_wrong_and_its_child_lives() -> None:
    endless = "import json\njson.dumps = lambda value: '[' * 200_000\ndef f(x):\n    return x\n"
    tests = '{"inputs": [[1]], "outputs": [1], "fn_name": "f"}'
    with pool_of() as pool:
        pool.submit(0, f"```python\n{endless}```", tests, code="tests")
        found = verdicts(pool)[0]
        before = pool.child_pids
        pool.submit(1, *EQUAL)
        assert verdicts(pool)[1].reward == 1.0
        assert pool.child_pids == before
    assert (found.status, found.reward, found.fault) == ("ok", 0.0, "")


def test_a_lone_surrogate_is_judged_like_any_character() -> None:
    with pool_of() as pool:
        pool.submit(0, "\ud800 " + EQUAL[0], EQUAL[1])
        pool.submit(1, r"\boxed{1+\ln x\udfff}", EQUAL[1])
        found = verdicts(pool)
    assert found[0].reward == 1.0 and found[1].reward == 0.0
