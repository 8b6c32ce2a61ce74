"""Greedy answers are kept by their whole request: what is part of it, what is kept, what is not."""

from typing import Any

import msgspec
import pytest

from prefixrl.common.wire.messages.groups import Prompt, Sampling, TargetText
from prefixrl.learner.broker.groups.answers import NO_PREFIX, KeptAnswers, record_of
from support import messages

GREEDY = Sampling(temperature=0.0, max_new_tokens=8)
PROMPT = Prompt("p", "1 + 1 =", "2")


def kept(target: str = "t", has_advice: bool = True, keeps_evaluations: bool = True) -> KeptAnswers:
    return KeptAnswers(target, has_advice, keeps_evaluations)


@pytest.mark.parametrize(
    "fields",
    [
        {"question": "1 + 2 ="},
        {"system": "Be brief."},
        {"earlier": (("user", "Hello"),)},
    ],
)
def test_what_the_target_reads_is_part_of_the_key(fields: dict[str, Any]) -> None:
    answers = kept()
    other = msgspec.structs.replace(PROMPT, **fields)
    assert answers.key(PROMPT, GREEDY) != answers.key(other, GREEDY)


def test_target_decoding_and_advice_are_part_of_the_key() -> None:
    answers, row = kept(), messages.row([1], text="add")
    longer = msgspec.structs.replace(GREEDY, max_new_tokens=9)
    keys = {
        answers.key(PROMPT, GREEDY),
        kept("other").key(PROMPT, GREEDY),
        answers.key(PROMPT, longer),
        answers.key(PROMPT, GREEDY, row),
        answers.key(PROMPT, GREEDY, messages.row([1], text="count")),
    }
    assert len(keys) == 5


@pytest.mark.parametrize(
    "fields", [{"prompt_id": "q"}, {"gold": "3"}, {"draft": "two"}, {"source": "s"}]
)
def test_what_the_target_never_reads_is_no_part_of_the_key(fields: dict[str, Any]) -> None:
    other = msgspec.structs.replace(PROMPT, **fields)
    assert kept().key(PROMPT, GREEDY) == kept().key(other, GREEDY)


def test_advice_counts_by_its_text_and_a_prefix_by_its_tokens_too() -> None:
    one, two = messages.row([1, 2], text="add"), messages.row([3], text="add")
    assert kept().key(PROMPT, GREEDY, one) == kept().key(PROMPT, GREEDY, two)
    continued = kept(has_advice=False)
    assert continued.key(PROMPT, GREEDY, one) != continued.key(PROMPT, GREEDY, two)


def evaluated(text: str, **fields: Any) -> Any:
    prefixes = messages.group(0, messages.row([1], text="add"), prompt=PROMPT)
    return messages.scored_group(prefixes, messages.verdict(completion=text, **fields))


def test_an_answer_of_an_evaluation_answers_the_same_request_later() -> None:
    answers = kept()
    group = evaluated("so 2")
    assert answers.texts_of([group.prefixes], GREEDY) == ()
    answers.keep_evaluated([group], GREEDY)
    answers.keep_evaluated([group], GREEDY)
    assert len(answers.records) == 1
    other = messages.group(1, messages.row([1], text="count"), prompt=PROMPT)
    assert answers.texts_of([other, group.prefixes], GREEDY) == (None, TargetText("so 2", "eos"))


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"status": "error", "finish": "error"}, id="the target failed"),
        pytest.param({"completion_tokens": 0, "rule": "leak"}, id="it was not asked"),
    ],
)
def test_what_is_no_answer_is_not_kept(fields: dict[str, Any]) -> None:
    answers = kept()
    answers.keep_evaluated([evaluated("", **fields)], GREEDY)
    assert answers.records == []


def test_an_empty_answer_that_was_paid_for_is_kept() -> None:
    answers = kept()
    group = evaluated("", finish="length", completion_tokens=9)
    answers.keep_evaluated([group], GREEDY)
    assert answers.texts_of([group.prefixes], GREEDY) == (TargetText("", "length"),)


def test_sampled_answers_and_those_of_a_bitwise_run_are_asked_for_each_time() -> None:
    sampled = Sampling(temperature=0.7, max_new_tokens=8)
    for answers, sampling in ((kept(), sampled), (kept(keeps_evaluations=False), GREEDY)):
        answers.keep_evaluated([evaluated("so 2")], sampling)
        assert answers.records == []


def test_a_draft_that_failed_is_no_answer_to_an_evaluation() -> None:
    answers = kept()
    key = answers.key(PROMPT, GREEDY)
    lost = messages.verdict(0.0, status="error", finish="error", completion_tokens=0)
    answers.keep_answer(record_of(key, lost, is_draft=True))
    bare = messages.group(0, NO_PREFIX, prompt=PROMPT)
    assert answers.answer(key) is not None
    assert answers.texts_of([bare], GREEDY) == ()


def test_the_totals_of_drafts_are_those_of_the_records() -> None:
    answers, other = kept(), kept()
    for index, (text, finish) in enumerate((("so 2", "eos"), (" ", "length"), ("", "error"))):
        verdict = messages.verdict(completion=text, finish=finish, completion_tokens=index)
        answers.keep_answer(record_of(bytes([index]), verdict, True, prompt_tokens=10))
    answers.keep_evaluated([evaluated("so 2")], GREEDY)
    other.restore(answers.records)
    for each in (answers, other):
        total = each.draft_total
        assert (total.requests, total.failed, total.empty) == (3, 1, 1)
        assert (total.prompt_tokens, total.completion_tokens) == (30, 3)
