"""Rewards of given answers from a real judge in a process of its own: as a scorer gives them, in order, with limits."""

from pathlib import Path
from typing import Any

import pytest

from prefixrl.common.config.load import load
from prefixrl.common.config.run import RunConfig
from prefixrl.common.errors import ConfigError, PeerLost
from prefixrl.common.evaluation.trials import TriedAnswer, TriedReward, try_answers
from support.completions_server import Reply, serving
from support.paths import EXAMPLE, EXAMPLES

SOURCE = """
import os, subprocess, sys, time
print("printed while it is imported")
calls = 0


def score(question, text, gold, tokens, prefix, source):
    global calls
    calls += 1
    print("printed in a call", flush=True)
    if text == "raise":
        raise ValueError("no such thing")
    if text == "die":
        os._exit(3)
    if text == "hang":
        time.sleep(600)
    if text == "sleep":
        time.sleep(0.3)
    if text == "leave a program":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    if text == "calls":
        return calls / 1000
    return {"reward": float(text == gold), "tokens": tokens, "prefix": len(prefix), "source": len(source)}
"""


def run_of(
    folder: Path, source: str = SOURCE, *settings: str, example: Path = EXAMPLE
) -> RunConfig:
    (folder / "mine.py").write_text(source)
    reward = (f"reward.function={folder}/mine.py:score", "scorer.verifier_children=1", *settings)
    return load(example / "run.toml", reward)


def answer(text: str, **fields: Any) -> TriedAnswer:
    return TriedAnswer(**{"text": text, "gold": "7", "question": "why?"} | fields)


def tried(config: RunConfig, *answers: TriedAnswer, calls: int = 1) -> list[list[TriedReward]]:
    return try_answers(config, answers, calls)


def test_answers_are_rewarded_in_order_by_call_with_what_a_function_takes(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    answers = [
        answer("7", tokens=12, prefix="so", source="sums"),
        answer("8"),
        answer("raise"),
        answer("sleep"),
    ]
    first, second = tried(run_of(tmp_path), *answers, calls=2)
    assert [each.reward for each in first] == [1.0, 0.0, 0.0, 0.0]
    assert first[0].parts == {"tokens": 12.0, "prefix": 2.0, "source": 4.0}
    assert (first[2].status, first[2].fault) == ("error", "function raised")
    assert first[2].extracted.startswith("ValueError: no such thing (mine.py, line ")
    assert [each.reward for each in second] == [each.reward for each in first]
    assert second[3].elapsed_s >= 0.3 > second[0].elapsed_s
    assert "no such thing" in capfd.readouterr().err, "a stack trace is shown"


def test_a_function_that_depends_on_its_calls_gives_two_rewards(tmp_path: Path) -> None:
    (first,), (second,) = tried(run_of(tmp_path), answer("calls"), calls=2)
    assert second.reward - first.reward == pytest.approx(0.001)


@pytest.mark.slow
def test_limits_of_time_hold_and_every_other_answer_is_rewarded(tmp_path: Path) -> None:
    config = run_of(tmp_path, SOURCE, "scorer.verify_timeout_s=2")
    (verdicts,) = tried(config, answer("hang"), answer("die"), answer("7"))
    assert [each.fault for each in verdicts] == ["function overran", "process died", ""]
    assert verdicts[2].reward == 1.0 and 2.0 <= verdicts[0].elapsed_s < 60.0


def test_a_program_that_the_function_leaves_behind_holds_nothing_up(tmp_path: Path) -> None:
    (verdicts,) = tried(run_of(tmp_path), answer("leave a program"), answer("7"))
    assert [each.reward for each in verdicts] == [0.0, 1.0]


def test_the_verifier_is_tried_where_the_run_has_no_reward_of_its_own() -> None:
    (verdicts,) = try_answers(
        load(EXAMPLE / "run.toml"), [answer(r"\boxed{7}"), answer("7"), answer(r"\boxed{8}")], 1
    )
    assert [(each.reward, each.status) for each in verdicts] == [
        (1.0, "ok"),
        (0.0, "no_answer"),
        (0.0, "ok"),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "takes_finish", "expected"),
    [
        pytest.param((), False, (0.0, "no_answer"), id="a function without finish"),
        pytest.param((), True, (0.5, "ok"), id="a function with finish"),
        pytest.param(("scorer.truncated=judge",), False, (0.5, "ok"), id="judge"),
        pytest.param(("scorer.truncated=zero",), True, (0.0, "no_answer"), id="zero"),
        pytest.param(("scorer.truncated=mask",), True, (0.0, "truncated"), id="mask"),
    ],
)
def test_a_cut_answer_is_worth_what_it_is_in_a_scorer(
    settings: tuple[str, ...], takes_finish: bool, expected: tuple[float, str], tmp_path: Path
) -> None:
    source = f"def score(question, text, gold{', finish' * takes_finish}): return 0.5"
    config = run_of(tmp_path, source, *settings, example=EXAMPLES / "arithmetic_direct")
    (verdicts,) = tried(config, answer("7", is_cut=True), answer("7"))
    assert (verdicts[0].reward, verdicts[0].status) == expected
    assert verdicts[1].reward == 0.5


@pytest.mark.parametrize(
    ("source", "settings", "message"),
    [
        pytest.param("1 / 0\ndef score(q, t, g): ...", (), "ZeroDivisionError", id="no import"),
        pytest.param(
            SOURCE, ('reward.environment=["NO_SUCH_KEY"]',), "NO_SUCH_KEY is not set", id="no key"
        ),
    ],
)
def test_what_the_judge_lacks_is_an_error_of_the_user(
    source: str, settings: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        tried(run_of(tmp_path, source, *settings), answer("7"))


def test_a_server_is_asked_as_a_scorer_asks_it() -> None:
    def script(request: Any) -> Reply:
        rewards = [float(row["text"] == row["gold"]) for row in request.body["rows"]]
        return Reply(content={"rewards": rewards})

    with serving(script) as server:
        config = load(EXAMPLE / "run.toml", (f"reward.url={server.url}/rewards",))
        (verdicts,) = tried(config, answer("7", tokens=5), answer("8"))
    assert [(each.reward, each.rule) for each in verdicts] == [(1.0, "server"), (0.0, "server")]
    assert server.asked[0].body["rows"][0]["tokens"] == 5


@pytest.mark.slow
def test_a_server_that_is_gone_is_named_after_its_patience() -> None:
    settings = ("reward.url=http://127.0.0.1:9/rewards", "reward.patience_s=2")
    with pytest.raises(PeerLost, match=r"127\.0\.0\.1:9/rewards"):
        tried(load(EXAMPLE / "run.toml", settings), answer("7"))
