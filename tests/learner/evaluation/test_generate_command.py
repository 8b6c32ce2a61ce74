"""Given problems become lines in their order, whatever comes back when.

What cannot be asked or answered is a line too.
"""

import io
import json
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from prefixrl.common.config.run import RunConfig
from prefixrl.common.errors import DataError, PeerLost
from prefixrl.common.evaluation.plans import GREEDY, PLAN_FILE, SAMPLED, AnswerLine, OfflinePlan
from prefixrl.common.prompts.rendering import ByteRenderer
from prefixrl.common.wire.messages.groups import GroupPrefixes, Prompt, Row, ScoredGroup
from prefixrl.common.wire.messages.learner import Evaluate, EvaluationProgress
from prefixrl.common.wire.packing import pack_logprobs, pack_tokens
from prefixrl.learner.broker.client import BrokerClient
from prefixrl.learner.commands.generate_command import AnswerGeneration, given_rows
from prefixrl.learner.commands.plan_runner import read_plan
from prefixrl.learner.run.stop import StopSignal
from support.fakes import run_on_disk
from support.messages import verdict

LOST = "lost with its worker 3 times"


class AnsweringClient:
    """Answers blocks, the youngest first; problems that ask for it fail. Forgets what it is told to."""

    def __init__(self, samples: int = 1, is_broken: bool = False) -> None:
        self.asked: dict[str, Evaluate] = {}
        self.most_held = 0
        self._samples = samples
        self._is_broken = is_broken

    def evaluate(self, request: Evaluate) -> None:
        self.asked[request.name] = request
        self.most_held = max(self.most_held, len(self.asked))

    def evaluation(self, name: str) -> tuple[EvaluationProgress, list[ScoredGroup]]:
        prompts = self.asked[name].prompts
        if self._is_broken or name != list(self.asked)[-1]:
            return EvaluationProgress(name=name, total=len(prompts), judged=0, failed=0), []
        groups = [self._scored(each) for each in prompts if "fail" not in each.question]
        causes = tuple((at, LOST) for at, each in enumerate(prompts) if "fail" in each.question)
        return EvaluationProgress(
            name=name,
            total=len(prompts),
            judged=len(groups),
            failed=len(causes),
            unsampled=0,
            causes=causes,
        ), groups

    def _scored(self, prompt: Prompt) -> ScoredGroup:
        prefix = ByteRenderer().encode("so ")
        row = Row(
            tokens=pack_tokens(prefix),
            logprobs=pack_logprobs([0.0] * len(prefix)),
            finish="length",
            spans=(),
        )
        judged = verdict(
            float(bool(prompt.gold)),
            status="ok" if prompt.gold else "no_gold",
            extracted=prompt.gold or "?",
            completion_tokens=5,
            completion=f"so {prompt.question}",
        )
        prefixes = GroupPrefixes(
            seq=0, prompt=prompt, seed=0, prompt_tokens=b"", rows=(row,) * self._samples
        )
        return ScoredGroup(
            prefixes=prefixes,
            version=0,
            weights_digest="digest",
            verdicts=(judged,) * self._samples,
            scorer="s",
        )

    def forget(self, name: str) -> None:
        del self.asked[name]


def config_of(folder: Path, rows: list[Any], **sections: dict[str, Any]) -> RunConfig:
    """A run whose held-out problems are these lines, bytes as they are."""
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    (folder / "given.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))
    data = {"eval": str(folder / "given.jsonl")}
    simulated = {"engine": "simulated"}
    # Nothing here takes any time: what hangs is named soon.
    usual: dict[str, Any] = {
        "data": data,
        "rollout": simulated,
        "scorer": simulated,
        "evaluation": {"timeout_s": 20.0},
    }
    return run_on_disk(folder, **usual | sections)


def answered(
    config: RunConfig, client: AnsweringClient, decoding: str = GREEDY, samples: int = 1
) -> list[AnswerLine]:
    out = io.BytesIO()
    plan = OfflinePlan(
        config="", version=7, published=("digest",), decoding=decoding, samples=samples
    )
    AnswerGeneration(plan, config, given_rows(config), out).run(
        cast(BrokerClient, client), StopSignal()
    )
    return [msgspec.json.decode(line, type=AnswerLine) for line in out.getvalue().splitlines()]


@pytest.mark.slow
def test_lines_are_in_the_order_of_the_rows_although_later_ones_are_answered_first(
    tmp_path: Path,
) -> None:
    rows = [{"question": f"q{index}", "answer": index} for index in range(1000)]
    client = AnsweringClient()
    actual = answered(config_of(tmp_path, rows), client)
    assert [line.question for line in actual] == [row["question"] for row in rows]
    assert [line.row for line in actual] == list(range(1, 1001))
    assert {(line.version, line.weights_digest, line.reward) for line in actual} == {
        (7, "digest", 1.0)
    }
    assert not client.asked, "all were forgotten"
    assert client.most_held < 1000 / 64, "not everything is under way at once"


def test_bad_rows_failed_ones_and_rows_without_gold_have_lines_of_their_own(tmp_path: Path) -> None:
    rows = [
        {"id": "a", "question": "one", "answer": 0, "mine": {"deep": [1]}},
        b"{not json",
        {"answer": "2"},
        {"id": "a", "question": "two"},
        {"question": "please fail", "answer": "3"},
        {"question": "three", "answer": " "},
        {"question": "four", "answer": ["no", "text"]},
    ]
    first, malformed, without, again, failed, blank, strange = answered(
        config_of(tmp_path, rows), AnsweringClient()
    )
    assert (first.status, first.gold, first.columns) == ("ok", "0", {"mine": {"deep": [1]}})
    assert (first.prefix, first.completion, first.prefix_tokens) == ("so ", "so one", 3)
    assert (malformed.status, malformed.row) == ("bad_row", 2) and "malformed" in malformed.reason
    assert without.status == "bad_row" and "no column 'question'" in without.reason
    assert without.columns == {"answer": "2"}
    assert (again.id, again.status, again.reward, again.extracted) == ("a", "no_gold", None, "?")
    assert (failed.status, failed.reason, failed.version) == ("failed", LOST, -1)
    assert (blank.status, blank.gold, blank.id) == ("no_gold", None, "6")
    assert strange.status == "bad_row" and "expected text or a number" in strange.reason


def test_all_that_a_row_needs_is_a_question(tmp_path: Path) -> None:
    data = {"eval": str(tmp_path / "given.jsonl"), "family_column": "kind", "id_column": "name"}
    rows = [{"question": "a"}, {"question": "b", "kind": "k", "name": "n"}]
    actual = answered(config_of(tmp_path, rows, data=data), AnsweringClient())
    assert [(line.status, line.id, line.family) for line in actual] == [
        ("no_gold", "1", ""),
        ("no_gold", "n", "k"),
    ]


def test_several_answers_to_a_problem_are_numbered(tmp_path: Path) -> None:
    config = config_of(tmp_path, [{"question": each} for each in ("a", "b")])
    actual = answered(config, AnsweringClient(samples=2), SAMPLED, samples=2)
    assert [(line.question, line.sample) for line in actual] == [
        ("a", 0),
        ("a", 1),
        ("b", 0),
        ("b", 1),
    ]


def test_other_weights_than_were_published_are_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path, [{"question": "a"}])
    generation = AnswerGeneration(
        OfflinePlan(config="", version=7, published=("other",), decoding=GREEDY, samples=1),
        config,
        given_rows(config),
        io.BytesIO(),
    )
    with pytest.raises(DataError, match="the checkpoint of version 7 holds weights with digest"):
        generation.run(cast(BrokerClient, AnsweringClient()), StopSignal())


def test_what_is_not_answered_in_time_is_named(tmp_path: Path) -> None:
    rows = [{"question": "a"}, {"question": "b"}]
    config = config_of(tmp_path, rows, evaluation={"timeout_s": 0.1})
    with pytest.raises(PeerLost, match=r"within 0\.1 s .*given\.jsonl row 1 to given\.jsonl row 2"):
        answered(config, AnsweringClient(is_broken=True))


def test_what_answers_for_a_run_serves_no_numbers_at_the_ports_of_the_run(tmp_path: Path) -> None:
    config = run_on_disk(tmp_path, log={"prometheus_port": 9400, "tensorboard": True})
    plan = OfflinePlan(config=config.model_dump_json(), version=0, published=(), samples=0)
    (tmp_path / PLAN_FILE).write_bytes(msgspec.json.encode(plan))
    read, mine = read_plan(tmp_path)
    assert read == plan and mine.log.prometheus_port == 0 and not mine.log.tensorboard
