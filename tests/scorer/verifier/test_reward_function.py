"""A reward function of the user's own, in real verifier children: what it returns, raises or does to its process."""

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from prefixrl.common.config.foreign import user_function
from prefixrl.common.errors import ConfigError, PeerLost
from prefixrl.common.run.digests import function_digest
from prefixrl.scorer.verifier.child_process import FUNCTION_PIPE_BYTES
from prefixrl.scorer.verifier.exchange import ChildQuestion
from prefixrl.scorer.verifier.pool import RewardFunction, VerifierPool
from prefixrl.scorer.verifier.rules.verify import Judgement
from prefixrl.scorer.verifier.scoring import Scoring, loaded
from support.fakes import wait_until
from support.processes import is_alive

log = logging.getLogger(__name__)

PATIENCE_S = 200
BUSY_S = 10.0
"""Additional time on a machine that does other work."""

SOURCE = """
import math
import os
import sys
import time

import numpy as np

RETURNED = {"1.5": 1.5, "-0.1": -0.1, "nan": math.nan, "inf": math.inf, "None": None, "'1'": "1", "0": 0, "0.25": 0.25}
RETURNED |= {"True": True, "1.0": 1.0, "np.True_": np.bool_(True), "np.float32": np.float32(0.25), "10**400": 10**400}
RETURNED |= {"parts": {"reward": 0.5, "form": np.float32(0.25), "right": True}, "no reward": {"form": 1.0}}
RETURNED |= {"text": {"reward": 0.5, "form": "good"}, "many": {"reward": 0.5} | {str(each): 1 for each in range(17)}}


def score(question, answer, gold):
    if answer == "hang":
        time.sleep(600)
    if answer == "loop":
        while True:
            pass
    if answer == "die":
        os._exit(7)
    if answer == "raise":
        raise ValueError("no such thing")
    if answer == "print":
        print("this must not reach the pipe of the verdicts", sys.stdin.read())
    if answer.startswith("variable "):
        return {"reward": 1.0, "found": answer.removeprefix("variable ") in os.environ}
    if answer.startswith("return "):
        return RETURNED[answer.removeprefix("return ")]
    return (len(question) + len(gold)) / max(1, len(answer))
"""
STARTS = """
import os
import subprocess
import sys
import time
from pathlib import Path


def score(question, text, gold):
    waiting = "import sys, time; open(sys.argv[1], 'a').write('begun'); time.sleep(600)"
    program = subprocess.Popen([sys.executable, "-c", waiting, question])
    while not os.path.exists(question):
        time.sleep(0.01)
    Path(gold).write_text(f"{os.getpid()} {program.pid}")
    if text == "die":
        os._exit(7)
    if text == "terminate":
        program.terminate()
        return float(program.wait() == -15)
    time.sleep(600 if text == "hang" else 0)
    return 0.5
"""
OWNER = """
import os, sys, time
from prefixrl.common.run.digests import function_digest
from prefixrl.scorer.verifier.pool import RewardFunction, VerifierPool

pool = VerifierPool(1, 600, RewardFunction(sys.argv[1], function_digest(sys.argv[1])))
pool.submit(0, *sys.argv[2:])
pool.wait(1.0)
if os.fork() == 0:  # as a library may do; it holds the pipes open
    time.sleep(60)
    os._exit(0)
while True:
    pool.wait(1.0)
    pool.poll()
"""
AS_FIRST_PROCESS = """
import ctypes, sys
import psutil
from prefixrl.common.run.digests import function_digest
from prefixrl.scorer.verifier.pool import RewardFunction, VerifierPool

PR_SET_CHILD_SUBREAPER = 36
ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
pool = VerifierPool(1, 1, RewardFunction(sys.argv[1], function_digest(sys.argv[1])))
for number in range(2):
    pool.submit(number, "hang", f"{sys.argv[2]}{number}", f"{sys.argv[3]}{number}")
while pool.pending:
    pool.wait(1.0)
    pool.poll()
pool.close()
names = [each.name() for each in psutil.Process().children(recursive=True)]
print([each for each in names if each.startswith("prefixrl")])
"""
FORKS = """
import os
import sys


def score(question, text, gold):
    if (copy := os.fork()) == 0:
        if text == "0.25":
            return 1.0
        if text == "0.5":
            raise ValueError("of a copy")
        sys.exit(3)
    code = os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1])
    assert code == {"0.25": 0, "0.5": 1}.get(text, 3), code
    return float(text)
"""
RAISING_LINE = 1 + SOURCE.splitlines().index('        raise ValueError("no such thing")')


@contextmanager
def pool_with(
    folder: Path, source: str = SOURCE, timeout_s: int = 60, digest: str | None = None, **keys: Any
) -> Iterator[VerifierPool]:
    path = folder / "mine.py"
    path.write_text(source)
    place = f"{path}:score"
    pool = VerifierPool(
        1, timeout_s, RewardFunction(place, digest or function_digest(place), **keys)
    )
    try:
        yield pool
    finally:
        pool.close()


def verdicts(pool: VerifierPool, count: int) -> list[Judgement]:
    """The verdicts on the first answers submitted, by key."""
    results: dict[int, Judgement] = {}
    deadline_s = time.monotonic() + PATIENCE_S
    while pool.pending:
        assert time.monotonic() < deadline_s, f"{pool.pending} answers are still pending"
        pool.wait(1.0)
        results |= dict(pool.poll())
    return [results[key] for key in range(count)]


def judged(pool: VerifierPool, *answers: str) -> list[Judgement]:
    for key, answer in enumerate(answers):
        pool.submit(key, answer, "gold", "why?")
    return verdicts(pool, len(answers))


def test_it_gets_question_text_and_gold_and_may_give_fractions(tmp_path: Path) -> None:
    with pool_with(tmp_path) as pool:
        whole = r"so \boxed{3}" + "." * 20
        actual = judged(pool, whole, "return 0", "return True", "return 0.25", "print" + "." * 27)
    assert [each.status for each in actual] == ["ok"] * 5
    assert [each.reward for each in actual] == [8 / len(whole), 0.0, 1.0, 0.25, 0.25]
    assert actual[0].extracted == "3" and actual[1].extracted == ""


@pytest.mark.parametrize("value", ["1.5", "-0.1", "nan", "inf", "None", "'1'"])
def test_what_is_no_reward_is_an_error_with_its_reason(tmp_path: Path, value: str) -> None:
    with pool_with(tmp_path) as pool:
        wrong, right = judged(pool, f"return {value}", "return 1.0")
    assert wrong.status == "error"
    assert wrong.extracted is not None
    assert f"score returned {value}; a reward is a finite number" in wrong.extracted
    assert (right.reward, right.status) == (1.0, "ok")


def test_numpys_scalars_are_rewards_and_an_integer_past_all_floats_is_an_error(
    tmp_path: Path,
) -> None:
    with pool_with(tmp_path) as pool:
        *actual, wrong = judged(pool, "return np.True_", "return np.float32", "return 10**400")
    assert [(each.reward, each.status) for each in actual] == [(1.0, "ok"), (0.25, "ok")]
    assert (wrong.status, wrong.fault) == ("error", "function returned no reward")
    assert wrong.extracted is not None and "a reward is a finite number" in wrong.extracted


def test_weighted_parts_make_the_reward_and_a_missing_part_none(tmp_path: Path) -> None:
    source = "def score(question, text, gold):\n    return {'right': 1, 'form': 1, 'tone': 1, 'reward': 0, text: 1}"
    with pool_with(tmp_path, source, weights={"right": 0.7, "form": 0.2, "tone": 0.1}) as pool:
        assert judged(pool, "more")[0].reward == 1.0
    with pool_with(tmp_path, source, weights={"right": 0.5, "rare": 0.5}) as pool:
        rare, none = judged(pool, "rare", "more")
    assert (rare.reward, none.fault) == (1.0, "function returned no reward")
    assert "with reward.weights a dict of right, rare, whose weighted sum is from 0 to 1" in str(
        none.extracted
    )


def test_a_dict_has_the_reward_and_its_parts(tmp_path: Path) -> None:
    with pool_with(tmp_path) as pool:
        right, *wrong = judged(
            pool, "return parts", "return no reward", "return text", "return many"
        )
    assert (right.reward, right.parts) == (0.5, {"form": 0.25, "right": 1.0})
    assert {(each.status, each.fault) for each in wrong} == {
        ("error", "function returned no reward")
    }


def test_it_finds_the_variables_that_are_named_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "k")
    monkeypatch.setenv("OTHER_KEY", "k")
    with pool_with(tmp_path, environment=("JUDGE_KEY",)) as pool:
        actual = judged(pool, "variable JUDGE_KEY", "variable OTHER_KEY", "variable PATH")
    assert [each.parts["found"] for each in actual] == [1.0, 0.0, 1.0]


def test_an_exception_is_an_error_with_file_and_line(tmp_path: Path) -> None:
    with pool_with(tmp_path) as pool:
        (wrong,) = judged(pool, "raise")
    assert wrong == Judgement(
        0.0, "error", f"ValueError: no such thing (mine.py, line {RAISING_LINE})", "function raised"
    )


def test_a_process_that_ends_is_an_error_and_the_next_answer_has_a_new_one(tmp_path: Path) -> None:
    with pool_with(tmp_path) as pool:
        dead, alive = judged(pool, "die", "return 1.0")
    assert (dead.status, dead.fault) == ("error", "process died")
    assert dead.extracted is not None and "its process ended 2 times" in dead.extracted
    assert (alive.reward, alive.status) == (1.0, "ok")


@pytest.mark.slow
@pytest.mark.parametrize("answer", ["hang", "loop"])
def test_a_hang_is_an_error_and_never_a_wrong_answer(tmp_path: Path, answer: str) -> None:
    with pool_with(tmp_path, timeout_s=2) as pool:
        hung, alive = judged(pool, answer, "return 1.0")
    assert (hung.status, hung.fault) == ("error", "function overran")
    assert hung.extracted is not None and "no reward within 2 s" in hung.extracted
    assert (alive.reward, alive.status) == (1.0, "ok")


def test_a_text_longer_than_a_pipe_usually_holds_is_judged_and_one_too_long_named(
    tmp_path: Path,
) -> None:
    with pool_with(tmp_path) as pool:
        long, too_long = judged(pool, "." * 500_000, "." * FUNCTION_PIPE_BYTES)
    assert (long.reward, long.status) == (8 / 500_000, "ok")
    assert too_long.status == "error"
    assert (
        too_long.extracted
        == f"more than {FUNCTION_PIPE_BYTES} bytes of question, answer and gold answer"
    )


def test_a_child_never_runs_another_file_than_the_scorer_named(tmp_path: Path) -> None:
    with (
        pool_with(tmp_path, digest="another") as pool,
        pytest.raises(PeerLost, match=r"verifier children ended or hung.*Try: .*mine\.py"),
    ):
        judged(pool, "return 1.0")


def test_one_stack_trace_is_logged_per_kind_of_failure_and_the_others_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "fails.py"
    path.write_text("def score(question, answer, gold):\n    raise ValueError(answer)\n")
    function = Scoring(f"{path}:score")
    for number in range(100):
        assert function.score(ChildQuestion("4", f"row {number}", 5)).status == "error"
    first, *others = caplog.records
    assert first.exc_info is not None and "row 0" in str(first.exc_info[1])
    assert [each.exc_info for each in others] == [None, None]
    assert [each.getMessage().split(" times")[0] for each in others] == ["10", "100"]


def test_a_file_that_changed_during_a_run_is_named_with_what_helps(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def score(question, answer, gold):\n    return 1.0\n")
    with (
        pytest.raises(ConfigError, match="restore the file, or start a run in anoth"),
        loaded(f"{path}:score", "the digest of what it was", 5),
    ):
        raise AssertionError("it was loaded")


PAIRED = """
def score(question, text, gold, verdict):
    known = {"ok": verdict.reward, "no_answer": 0.125, "parse_fail": 0.25, "timeout": 0.375, "error": 0.625}
    return known[verdict.status]
"""
ASKING = """
def score(question, text, gold, verify):
    last = text.splitlines()[-1]
    return 0.5 * verify(text, gold).reward + 0.5 * verify(rf"\\boxed{{{last}}}", gold).reward
"""


def judged_with(
    folder: Path, source: str, asked: list[tuple[str, str]], timeout_s: int = 60
) -> list[Judgement]:
    with pool_with(folder, source, timeout_s) as pool:
        for key, (text, gold) in enumerate(asked):
            pool.submit(key, text, gold, "why?")
        return verdicts(pool, len(asked))


@pytest.mark.slow
def test_it_may_take_the_verifiers_verdict_whatever_that_is(tmp_path: Path) -> None:
    asked = [
        (r"\boxed{\frac12}", "0.5"),
        (r"\boxed{1+\ln x}", r"\ln x+1"),
        (r"\boxed{2+\ln x}", r"\ln x+1"),
        ("nothing in a box", "1"),
        (r"\boxed{9^{9^9}}", "1"),
        (r"\boxed{1+\ln x}", r"\ln x+" * 2000 + "1"),
        (r"\boxed{(x+1)^{9999}}", r"\ln y+7"),
    ]
    # The limit is short for the last one, which would use up any.
    actual = judged_with(tmp_path, PAIRED, asked, timeout_s=4)
    assert [each.status for each in actual] == ["ok"] * len(asked)
    assert [each.reward for each in actual[:6]] == [1.0, 1.0, 0.0, 0.125, 0.25, 0.625]
    assert actual[6].reward == 0.375, "a formula that hangs costs the function no call"
    assert actual[1].extracted == r"1+\ln x"


def test_it_may_ask_the_verifier_about_any_text(tmp_path: Path) -> None:
    asked = [
        ("\\boxed{2}\n2.0", "2"),
        ("\\boxed{1+\\ln x}\n3", r"\ln x+1"),
        ("none\n1+\\ln x", r"\ln x+1"),
        ("none\n", "7"),
    ]
    actual = judged_with(tmp_path, ASKING, asked)
    assert [(each.reward, each.status) for each in actual] == [
        (1.0, "ok"),
        (0.5, "ok"),
        (0.5, "ok"),
        (0.0, "ok"),
    ]


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        pytest.param(
            "def score(question, text): ...",
            "too many positional arguments",
            id="too few arguments",
        ),
        pytest.param(
            "def score(question, text, gold, other): ...",
            "missing a required argument: 'other'",
            id="too many arguments",
        ),
        pytest.param(
            "def score(question, text, gold, *, temperature): ...",
            "missing a required",
            id="an unknown keyword",
        ),
        pytest.param("async def score(question, text, gold): ...", "is async", id="async"),
    ],
)
def test_a_function_that_cannot_be_called_so_is_refused_where_the_run_file_is_read(
    tmp_path: Path, source: str, reason: str
) -> None:
    (tmp_path / "mine.py").write_text(source)
    with pytest.raises(ConfigError, match=reason) as refused:
        user_function.resolve("reward.function", "mine.py:score", tmp_path)
    assert "reward.function = 'mine.py:score'" in str(refused.value)
    # The same where the source does not tell: by a decorator.
    decorated = f"import functools\n@functools.wraps(print)\ndef kept(): ...\ndef same(f): return f\n@same\n{source}\n"
    (tmp_path / "mine.py").write_text(decorated)
    place = user_function.resolve("reward.function", "mine.py:score", tmp_path)
    with pytest.raises(ConfigError, match=reason):
        user_function.check_call("reward.function", place)


@pytest.mark.parametrize(
    "source",
    [
        pytest.param("def score(question, text, gold): ...", id="three arguments"),
        pytest.param("def score(q, t, g, verdict): ...", id="a verdict"),
        pytest.param("def score(q, t, g, /, *, verify, verdict): ...", id="keywords only"),
        pytest.param("def score(q, t, g, scale=2.0): ...", id="a default"),
        pytest.param("def score(*given): ...", id="a list of arguments"),
        pytest.param("def score(*given, verdict, **rest): ...", id="any keyword"),
        pytest.param("score = max", id="a builtin"),
        pytest.param("class score:\n    def __init__(self, q, t, g): ...", id="a class"),
        pytest.param("def score(): ...\ndef score(q, t, g): ...", id="the last of two"),
    ],
)
def test_every_signature_that_can_be_called_is_taken(tmp_path: Path, source: str) -> None:
    (tmp_path / "mine.py").write_text(source)
    user_function.check_call(
        "reward.function", user_function.resolve("reward.function", "mine.py:score", tmp_path)
    )


NAMED_S = 5.0
FILLS = """
    if answer == "fill":
        held = []
        while True:
            held.append(np.empty(64 * 2**20, np.uint8))  # untouched: fast on a busy machine
    if answer == "leave":
        sys.exit("no service")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "named"),
    [
        pytest.param("hang", "no answer for ", id="hangs"),
        pytest.param("die", "its process ended with an answer unjudged", id="dies"),
        pytest.param("leave", "function raised", id="exits"),
        pytest.param("raise", "function raised", id="raises"),
        pytest.param("return nan", "function returned no reward", id="returns nan"),
        pytest.param("fill", "function raised", id="fills its memory"),
    ],
)
def test_a_function_that_fails_is_named_within_seconds_and_the_other_rows_are_judged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, answer: str, named: str
) -> None:
    source = SOURCE.replace('    if answer == "hang":', f'{FILLS}    if answer == "hang":')
    with pool_with(tmp_path, source, timeout_s=4) as pool:
        judged(pool, "return 1.0")  # all imports are done
        began_s, named_s = time.monotonic(), None
        pool.submit(0, answer, "gold", "why?")
        others = 30
        for key in range(1, 1 + others):
            pool.submit(key, "return 0.25" if key == 1 else "x" * key, "gold", "why?")
        actual: dict[int, Judgement] = {}
        while pool.pending:
            assert time.monotonic() < began_s + PATIENCE_S
            pool.wait(0.05)
            actual |= dict(pool.poll())
            told = f"{pool.trouble} {caplog.text}"
            if named_s is None and named in told:
                named_s = time.monotonic() - began_s
                assert "mine.py:score" in told
    assert named_s is not None and named_s <= NAMED_S + BUSY_S
    assert actual[0].status == "error"
    assert actual[1].reward == 0.25
    assert [actual[key].reward for key in range(8, 1 + others)] == [
        8 / key for key in range(8, 1 + others)
    ]
    log.info("%s: named after %.2f s", answer, named_s)


def started(pids_file: Path) -> list[int]:
    """The child and the program that the function started in it."""
    return wait_until(
        lambda: list(map(int, pids_file.read_text().split())) if pids_file.exists() else None,
        "a start",
    )


def are_gone(pids: list[int]) -> bool:
    return not any(is_alive(pid) for pid in pids)


@pytest.mark.slow
@pytest.mark.parametrize("text", ["hang", "die", "return"])
def test_programs_that_it_started_end_with_its_child(tmp_path: Path, text: str) -> None:
    with pool_with(tmp_path, STARTS, timeout_s=5) as pool:
        pool.submit(0, text, str(tmp_path / "pids"), str(tmp_path / "begun"))
        (verdict,) = verdicts(pool, 1)
        assert (
            verdict.fault == {"hang": "function overran", "die": "process died", "return": ""}[text]
        )
        pids = started(tmp_path / "pids")
        if text == "return":
            assert not are_gone(pids), "a function may keep a program from one call to the next"
            pool.close()
        wait_until(lambda: are_gone(pids), "their end")


def test_programs_that_it_started_end_when_the_scorer_is_killed(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(STARTS)
    given = [f"{tmp_path}/mine.py:score", "hang", str(tmp_path / "pids"), str(tmp_path / "begun")]
    with subprocess.Popen([sys.executable, "-c", OWNER, *given]) as owner:
        pids = started(tmp_path / "pids")
        owner.kill()
    wait_until(lambda: are_gone(pids), "their end")


@pytest.mark.slow
def test_no_child_stays_a_zombie_where_the_first_process_reaps_nothing(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(STARTS)
    given = [f"{tmp_path}/mine.py:score", str(tmp_path / "pids"), str(tmp_path / "begun")]
    done = subprocess.run(
        [sys.executable, "-c", AS_FIRST_PROCESS, *given], capture_output=True, text=True, timeout=90
    )
    assert done.stdout == "[]\n", done.stderr


def test_stop_signals_end_programs_that_it_started_but_not_its_child(tmp_path: Path) -> None:
    with pool_with(tmp_path, STARTS) as pool:
        pool.submit(0, "terminate", str(tmp_path / "pids"), str(tmp_path / "begun"))
        assert verdicts(pool, 1)[0].reward == 1.0
        child, _ = started(tmp_path / "pids")
        for number in (signal.SIGTERM, signal.SIGINT):
            os.killpg(os.getpgid(child), number)
        pool.submit(0, "return", str(tmp_path / "pids"), str(tmp_path / "begun"))
        assert verdicts(pool, 1)[0].reward == 0.5
        assert started(tmp_path / "pids")[0] == child


def test_a_copy_that_it_forks_answers_for_no_text(tmp_path: Path) -> None:
    texts = ["0.25", "0.5", "0.75", "0.125", "0.375"]
    with pool_with(tmp_path, FORKS) as pool:
        actual = judged(pool, *texts)
    assert [(each.reward, each.status) for each in actual] == [
        (float(text), "ok") for text in texts
    ]
