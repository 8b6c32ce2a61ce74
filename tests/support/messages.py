"""Messages and records with usual fields; a test names those that matter to it."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TypeVar, get_args

from msgspec import Struct, ValidationError, convert, structs

from prefixrl.common.evaluation.accuracy import EvaluatedRow
from prefixrl.common.wire.messages.groups import (
    Finish,
    GroupPrefixes,
    Prompt,
    Row,
    Sampling,
    ScoredGroup,
    Verdict,
    VersionSpan,
)
from prefixrl.common.wire.messages.learner import Evaluate
from prefixrl.common.wire.messages.worker import Heartbeat, ScoreTask, Usage
from prefixrl.common.wire.packing import pack_logprobs, pack_tokens

GREEDY = Sampling(temperature=0.0, max_new_tokens=4)
HELD_OUT = Prompt("h", "?", "1")
USAGE = Usage(requests=3, prompt_tokens=30, completion_tokens=8)
HEARTBEAT_WITH_USAGE = Heartbeat(
    progress=1, busy_row_s=0.0, leases=(), state="scoring", usage=USAGE
)


Record = TypeVar("Record", bound=Struct)


def empty(kind: type[Record], **fields: Any) -> Record:
    """A record of a type; a field that needs a value and is not given is zero, or empty."""
    needed = [each for each in structs.fields(kind) if each.required and each.name not in fields]
    return kind(**{each.name: _zero(each.type) for each in needed}, **fields)


def _zero(kind: Any) -> Any:
    if isinstance(kind, type) and issubclass(kind, Struct):
        return empty(kind)
    for zero in (None, False, 0, 1, "", [], {}):
        with suppress(ValidationError):
            return convert(zero, kind)
    return convert(get_args(kind)[0], kind)  # of a Literal


def evaluate(
    name: str, version: int = 0, prompts: Sequence[Prompt] = (HELD_OUT,), **fields: Any
) -> Evaluate:
    usual = {"prefix_tokens": b"", "prefix_sampling": GREEDY, "completion_sampling": GREEDY}
    return Evaluate(name=name, version=version, prompts=tuple(prompts), **usual | fields)


def score_task(*groups: GroupPrefixes, **fields: Any) -> ScoreTask:
    usual = {
        "task": "t",
        "kind": "train",
        "version": 0,
        "weights_digest": "d",
        "sampling": GREEDY,
        "sampled_s": 0.1,
    }
    return ScoreTask(groups=groups, **usual | fields)


def verdict(reward: float = 1.0, **fields: Any) -> Verdict:
    usual = {
        "status": "ok",
        "extracted": "",
        "finish": "eos",
        "completion_tokens": 1,
        "elapsed_ms": 0,
    }
    return Verdict(reward=reward, **usual | fields)


def evaluated(prompt_id: str, reward: float, extracted: str = "", **fields: Any) -> EvaluatedRow:
    usual = {"family": "", "version": 0, "prefix": "", "completion": "", "status": "ok"}
    return EvaluatedRow(prompt_id=prompt_id, reward=reward, extracted=extracted, **usual | fields)


def row(
    ids: Sequence[int], finish: Finish = "length", version: int | None = 0, **fields: Any
) -> Row:
    """A row of tokens of logprob -1, all written by one version, or by nobody says which (None)."""
    spans = () if version is None else (VersionSpan(version, f"d{version}", len(ids)),)
    usual = {"logprobs": pack_logprobs([-1.0] * len(ids)), "spans": spans}
    return Row(tokens=pack_tokens(ids), finish=finish, **usual | fields)


def group(seq: int, *rows: Row, **fields: Any) -> GroupPrefixes:
    usual = {
        "prompt": Prompt(f"p{seq}", "1 + 1 =", "2"),
        "seed": 9,
        "prompt_tokens": pack_tokens([1]),
    }
    return GroupPrefixes(seq=seq, rows=rows, **usual | fields)


def scored_group(prefixes: GroupPrefixes, *verdicts: Verdict, **fields: Any) -> ScoredGroup:
    usual = {"version": 0, "weights_digest": "d0", "scorer": "scorer-0"}
    return ScoredGroup(prefixes=prefixes, verdicts=verdicts, **usual | fields)
