"""Requests to a completions endpoint and the meaning of its answers, without a socket."""

import json
from datetime import UTC, datetime
from typing import Any

import pytest

from prefixrl.common.wire.messages.groups import Sampling
from prefixrl.scorer.served import protocol

NOW = datetime(2030, 1, 1, 12, 0, 0, tzinfo=UTC)


def answer(
    status: int, content: Any, **headers: str
) -> protocol.Completed | protocol.Retry | protocol.RowRefused | protocol.EndpointRefused:
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    return protocol.read(
        status, {name.replace("_", "-"): value for name, value in headers.items()}, data, NOW
    )


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (None, None),
        ("7", 7.0),
        ("0.5", 0.5),
        ("-3", 0.0),
        ("Tue, 01 Jan 2030 12:00:30 GMT", 30.0),
        ("Tue, 01 Jan 2030 14:01:00 +0200", 60.0),
        ("Tue, 01 Jan 2030 11:00:00 GMT", 0.0),
        ("soon", None),
        ("nan", None),
        ("inf", None),
    ],
)
def test_a_retry_after_is_seconds_or_a_date(value: str | None, seconds: float | None) -> None:
    assert protocol.retry_after_s(value, NOW) == seconds


@pytest.mark.parametrize("status", [408, 409, 425, 429, 500, 502, 503, 504, 529])
def test_what_may_pass_is_asked_again(status: int) -> None:
    outcome = answer(status, {"error": {"message": "busy"}})
    assert outcome == protocol.Retry(f"{status} busy", None, is_limit=status == 429, status=status)
    rests = answer(status, {"error": "busy"}, retry_after="3")
    assert rests == protocol.Retry(f"{status} busy", 3.0, is_limit=True, status=status)


@pytest.mark.parametrize("status", [400, 413, 422])
def test_what_is_wrong_with_a_row_is_said_of_the_row(status: int) -> None:
    assert answer(status, {"message": "too long"}) == protocol.RowRefused(f"{status} too long")


@pytest.mark.parametrize("status", [204, 301, 401, 402, 403, 404, 405, 410])
def test_what_no_row_can_change_is_final(status: int) -> None:
    assert answer(status, {"error": {"message": "no"}}) == protocol.EndpointRefused(
        status, f"{status} no"
    )


def test_a_place_that_the_endpoint_moved_to_is_told() -> None:
    outcome = answer(308, b"", location="https://there/v1")
    assert outcome == protocol.EndpointRefused(308, "308 (it points to https://there/v1)")


@pytest.mark.parametrize(
    ("reason", "finish"),
    [("stop", "eos"), ("length", "length"), ("eos_token", "eos"), ("stop_sequence", "eos")],
)
def test_what_ended_a_completion(reason: str, finish: str) -> None:
    outcome = answer(200, {"choices": [{"text": "", "finish_reason": reason}]})
    assert outcome == protocol.Completed("", None, finish, None, None, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("reason", ["abort", "error", None])
def test_a_completion_that_was_given_up_is_asked_for_again(reason: str | None) -> None:
    outcome = answer(200, {"choices": [{"text": "half", "finish_reason": reason}]})
    assert isinstance(outcome, protocol.Retry) and repr(reason) in outcome.reason


def test_a_completion_that_is_withheld_is_no_completion() -> None:
    outcome = answer(200, {"choices": [{"text": "", "finish_reason": "content_filter"}]})
    assert isinstance(outcome, protocol.RowRefused)


@pytest.mark.parametrize(
    "content",
    [b"", b"<html>", b"[]", {"choices": "x"}, {"choices": [{"text": 3}]}, {"choices": []}, {}],
    ids=str,
)
def test_what_is_no_completion_is_asked_for_again(content: Any) -> None:
    assert isinstance(answer(200, content), protocol.Retry)


def test_an_end_that_is_not_known_here_is_not_paid_for_again_and_its_cost_is_told() -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": 5}
    choices = [{"text": "whole", "finish_reason": "something new"}]
    outcome = answer(200, {"choices": choices, "usage": usage})
    assert isinstance(outcome, protocol.RowRefused) and "'something new'" in outcome.reason
    assert (outcome.prompt_tokens, outcome.completion_tokens) == (3, 5)


@pytest.mark.parametrize("choices", [[], [{"text": 3}], [{"text": "", "finish_reason": "abort"}]])
def test_what_an_answer_of_no_use_cost_is_told(choices: Any) -> None:
    outcome = answer(200, {"choices": choices, "usage": {"prompt_tokens": 3}})
    assert isinstance(outcome, protocol.Retry) and outcome.prompt_tokens == 3


@pytest.mark.parametrize(
    "usage",
    [
        None,
        {},
        {"prompt_tokens": -1, "completion_tokens": 5},
        {"prompt_tokens": 3, "completion_tokens": 10**15},
        {"prompt_tokens": "3"},
        {"completion_tokens": 2.5},
        [3, 5],
    ],
)
def test_a_usage_that_is_missing_or_cannot_be_is_not_believed_and_its_text_is_kept(
    usage: Any,
) -> None:
    choices = [{"text": "whole", "finish_reason": "stop"}]
    outcome = answer(200, {"choices": choices, "usage": usage})
    assert isinstance(outcome, protocol.Completed) and outcome.text == "whole"
    assert (outcome.prompt_tokens, outcome.completion_tokens) == (None, None)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (200, protocol.Retry),
        (429, protocol.Retry),
        (502, protocol.Retry),
        (403, protocol.EndpointRefused),
        (400, protocol.RowRefused),
    ],
)
def test_a_page_in_place_of_json_means_what_its_status_says(status: int, kind: type) -> None:
    outcome = answer(status, b"<!DOCTYPE html>\n<title>Attention Required!</title>")
    assert isinstance(outcome, kind)
    assert "Attention Required!" in outcome.reason and "\n" not in outcome.reason


@pytest.mark.parametrize(
    ("status", "retry_after", "is_limit", "after_s"),
    [
        (429, None, True, None),
        (429, "12", True, 12.0),
        (429, "Tue, 01 Jan 2030 12:00:30 GMT", True, 30.0),
        (429, "soon", True, None),
        (503, None, False, None),
        (503, "12", True, 12.0),
        (529, "3", True, 3.0),
    ],
)
def test_a_limit_is_what_is_called_so_or_names_a_time(
    status: int, retry_after: str | None, is_limit: bool, after_s: float | None
) -> None:
    headers = {} if retry_after is None else {"retry_after": retry_after}
    outcome = answer(status, {"error": {"message": "Rate limit reached"}}, **headers)
    assert isinstance(outcome, protocol.Retry)
    assert (outcome.is_limit, outcome.after_s) == (is_limit, after_s)


@pytest.mark.parametrize("kind", ["type", "code"])
def test_a_limit_without_credit_is_final(kind: str) -> None:
    content = {"error": {"message": "pay", kind: "insufficient_quota"}}
    assert answer(429, content) == protocol.EndpointRefused(402, "429 pay")


def test_bytes_that_are_no_text_are_a_garbled_answer() -> None:
    good = b'{"choices": [{"text": "%s", "finish_reason": "stop"}]}'
    assert isinstance(answer(200, good % b"a"), protocol.Completed)
    assert isinstance(answer(200, good % b"\xff"), protocol.Retry)
    assert isinstance(answer(500, b'{"message": "\xff"}'), protocol.Retry)
    assert isinstance(
        protocol.read_models(200, {}, b'{"data": [{"id": "\xff"}]}', NOW), protocol.EndpointRefused
    )


def test_a_long_error_is_cut_to_one_line_and_not_in_the_middle_of_a_key() -> None:
    line = protocol.message_of(b"\n  many\n\n words " + b"x" * 5000)
    assert protocol.redacted(line, "") == ("many words " + "x" * 5000)[:300]
    told = protocol.redacted(protocol.message_of(b"y" * 295 + b"sk-secret"), "sk-secret")
    assert told == "y" * 295 + "***"


def test_models_are_read_or_told_why_not() -> None:
    content = json.dumps({"data": [{"id": "a", "max_model_len": 8}, {"id": "b", "owned_by": "x"}]})
    assert protocol.read_models(200, {}, content.encode(), NOW) == [
        protocol.ServedModel("a", 8),
        protocol.ServedModel("b"),
    ]
    assert isinstance(protocol.read_models(200, {}, b"<html>", NOW), protocol.EndpointRefused)
    assert protocol.read_models(400, {}, b"what", NOW) == protocol.EndpointRefused(400, "400 what")
    assert isinstance(protocol.read_models(502, {}, b"", NOW), protocol.Retry)


def test_a_strict_endpoint_is_sent_at_most_the_stops_that_it_takes_and_no_seed_unless_wanted() -> (
    None
):
    row = protocol.RowRequest(
        "m", [1, 2], Sampling(temperature=0.0, max_new_tokens=5), None, range(6), tuple("abcdef")
    )
    assert json.loads(protocol.body(row, protocol.RequestForm(has_extensions=False))) == {
        "model": "m",
        "prompt": [1, 2],
        "max_tokens": 5,
        "temperature": 0.0,
        "top_p": 1.0,
        "stop": ["a", "b", "c", "d"],
    }
    assert json.loads(protocol.body(row, protocol.RequestForm(has_extensions=True)))[
        "stop_token_ids"
    ] == [
        0,
        1,
        2,
        3,
        4,
        5,
    ]
    assert "seed" not in json.loads(protocol.body(row, protocol.RequestForm(has_extensions=True)))
