"""Rewards from a server of the user's, over real sockets: every answer is a verdict, every silence has a name."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from prefixrl.common.config.run import RewardConfig
from prefixrl.common.errors import PeerLost, UserError
from prefixrl.scorer.served.rewards import RewardServer
from prefixrl.scorer.verifier.exchange import AnswerFacts
from prefixrl.scorer.verifier.rules.verify import Judgement
from support.completions_server import CompletionsServer, Reply, Request, serving
from support.fakes import wait_until

Given = Callable[[list[dict[str, str]]], list[Any]]
Asked = Callable[..., RewardServer]


@pytest.fixture
def asked() -> Iterator[Asked]:
    made = []

    def make(server: CompletionsServer, **keys: Any) -> RewardServer:
        given = {"url": f"{server.url}/rewards", "patience_s": 30.0, "requests": 2}
        made.append(RewardServer(RewardConfig.model_validate(given | keys)))
        return made[-1]

    yield make
    for judge in made:
        judge.close()


def verdicts(judge: RewardServer, texts: list[str]) -> dict[str, Judgement]:
    for key, text in enumerate(texts):
        judge.submit(key, text, "7", "what?")
    found: dict[str, Judgement] = {}

    def are_all_there() -> bool:
        found.update({texts[key]: verdict for key, verdict in judge.poll()})
        return len(found) == len(texts)

    wait_until(are_all_there, 60.0)
    return found


def giving(given: Given) -> Callable[[Request], Reply]:
    return lambda request: Reply(content={"rewards": given(request.body["rows"])})


def test_rows_go_in_batches_and_a_reward_may_have_weighted_parts(asked: Asked) -> None:
    def parts(rows: list[dict[str, str]]) -> list[Any]:
        return [{"right": float(row["gold"] in row["text"]), "form": 0.5} for row in rows]

    with serving(giving(parts)) as server:
        found = verdicts(
            asked(server, rows=3, weights={"right": 0.9, "form": 0.1}),
            ["7", "8", "\ud800", "70", "9"],
        )
    assert found["7"] == Judgement(0.95, "ok", "", parts={"right": 1.0, "form": 0.5}, rule="server")
    assert [found[text].reward for text in ("8", "\ud800", "70", "9")] == [0.05, 0.05, 0.95, 0.05]
    assert len(server.asked) < 5 and all(len(each.body["rows"]) <= 3 for each in server.asked)
    facts = {"tokens": 0, "finish": "stop", "prefix": "", "source": ""}
    assert {"question": "what?", "text": "8", "gold": "7"} | facts in [
        row for each in server.asked for row in each.body["rows"]
    ]


def test_a_row_has_what_its_text_does_not_tell(asked: Asked) -> None:
    facts = AnswerFacts(tokens=12, finish="length", prefix="Let us", source="gsm8k")
    with serving(giving(lambda rows: [1.0 for _ in rows])) as server:
        judge = asked(server)
        judge.submit(0, "Let us see", "7", "what?", facts=facts)
        wait_until(lambda: bool(judge.poll()), 60.0)
    assert server.asked[-1].body["rows"] == [
        {
            "question": "what?",
            "text": "Let us see",
            "gold": "7",
            "tokens": 12,
            "finish": "length",
            "prefix": "Let us",
            "source": "gsm8k",
        }
    ]


def test_what_is_no_reward_is_an_error_of_its_row_alone(asked: Asked) -> None:
    gives = {
        "none": None,
        "much": 1.5,
        "word": "good",
        "parts": {"form": 1},
        "fine": {"reward": 1, "form": 0.25},
    }
    with serving(giving(lambda rows: [gives[row["text"]] for row in rows])) as server:
        found = verdicts(asked(server), list(gives))
    assert found.pop("fine") == Judgement(1.0, "ok", "", parts={"form": 0.25}, rule="server")
    assert {each.fault for each in found.values()} == {"function returned no reward"}
    assert f"{server.url}/rewards: it gave 1.5; a reward is a finite number" in str(
        found["much"].extracted
    )


def test_a_list_of_another_length_is_an_error_of_every_row(asked: Asked) -> None:
    with serving(giving(lambda rows: [1.0])) as server:
        found = verdicts(asked(server), ["a", "b"])
    assert {each.status for each in found.values()} <= {"error", "ok"}
    assert any("1 rewards for 2 rows" in str(each.extracted) for each in found.values())


@pytest.mark.parametrize(
    "bad",
    [Reply(500), Reply(content=b"<html>"), Reply(drops=True), Reply(503, {}, {"retry-after": "0"})],
)
def test_a_batch_is_sent_again_until_it_is_answered(asked: Asked, bad: Reply) -> None:
    replies = [bad, bad]
    good = giving(lambda rows: [1.0 for _ in rows])
    with serving(lambda request: replies.pop() if replies else good(request)) as server:
        assert verdicts(asked(server), ["a"])["a"].reward == 1.0


def test_a_row_that_the_server_refuses_costs_no_other_its_reward(asked: Asked) -> None:
    def script(request: Request) -> Reply:
        if any(row["text"] == "poison" for row in request.body["rows"]):
            return Reply(422, {"error": "too long"})
        return giving(lambda rows: [1.0 for _ in rows])(request)

    with serving(script) as server:
        found = verdicts(asked(server), ["a", "poison", "b"])
    assert (found["a"].reward, found["b"].reward) == (1.0, 1.0)
    assert (found["poison"].status, found["poison"].fault) == ("error", "server refused")
    assert "422 too long" in str(found["poison"].extracted)


def test_a_batch_that_is_never_answered_in_time_is_refused_while_others_are_answered(
    asked: Asked,
) -> None:
    def script(request: Request) -> Reply:
        is_slow = any(row["text"] == "slow" for row in request.body["rows"])
        return Reply(
            content={"rewards": [1.0 for _ in request.body["rows"]]},
            after_s=5.0 if is_slow else 0.0,
        )

    with serving(script) as server:
        judge = asked(server, request_s=0.5, rows=1)
        assert verdicts(judge, ["quick"])["quick"].reward == 1.0
        slow = verdicts(judge, ["slow"])["slow"]
    assert slow.fault == "server refused" and "no answer within reward.request_s = 0.5" in str(
        slow.extracted
    )


@pytest.mark.slow
def test_a_server_that_is_killed_is_waited_for_by_name_and_ends_the_scorer_after_the_patience(
    asked: Asked,
) -> None:
    with serving(giving(lambda rows: [1.0 for _ in rows])) as server:
        judge = asked(server, patience_s=3.0)
        assert verdicts(judge, ["a"])["a"].reward == 1.0
        server.close()
        judge.submit(1, "b", "7")
        wait_until(lambda: judge.is_patient, 30.0)
        assert judge.trouble.startswith("waiting for reward.url for ")
        with pytest.raises(
            PeerLost, match=r"rewards has answered nothing for .* \(reward.patience_s = 3\)"
        ):
            wait_until(lambda: bool(judge.poll()), 60.0)


def test_a_key_that_is_refused_is_named(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(lambda request: Reply(401, {"error": "no"})) as server:
        with pytest.raises(UserError, match=r"reward.key_variable = 'JUDGE_KEY': .* is not set"):
            asked(server, key_variable="JUDGE_KEY")
        monkeypatch.setenv("JUDGE_KEY", "abc")
        judge = asked(server, key_variable="JUDGE_KEY")
        judge.submit(0, "a", "7")
        with pytest.raises(UserError, match=r"the key is wrong or missing .*JUDGE_KEY"):
            wait_until(lambda: bool(judge.poll()), 60.0)
    assert server.asked[0].headers["authorization"] == "Bearer abc"
