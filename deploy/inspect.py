"""What a run was trained on, read from its journal: one line per group that was handed out for training.

People also get last lines that say what became of the other groups, and how many texts have no verdict, by cause.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec

from prefixrl.common import journal
from prefixrl.common.errors import ConfigError
from prefixrl.common.messages import ScoredGroup, TextVerdict, VersionSpan
from prefixrl.common.packing import logprobs, token_ids
from prefixrl.common.records import Batched, Ended, GroupScored


class TrainedRow(msgspec.Struct, frozen=True):
    """One trained prefix, in direct mode one answer."""

    prefix_ids: list[int]
    behaviour_logprobs: list[float]
    spans: list[VersionSpan]
    """Which version of the adapter sampled which tokens, in order."""
    reward: float
    status: str
    extracted: str
    finish: str
    """What ended it: `eos`, or `length` where it reached the most tokens it may have."""
    advantage: float | None
    """Mean whitened advantage over its tokens; None for a row that was left out."""
    continuations: list[TextVerdict]
    """With `scorer.continuations` > 1 the verdict on each, of which `reward` is the mean."""


class TrainedGroup(msgspec.Struct, frozen=True):
    """One trained group."""

    seq: int
    prompt_id: str
    version_sampled: int
    """That of its oldest token."""
    version_trained: int
    weights_digest: str
    scorer: str
    rows: list[TrainedRow]


class _AdvantageLine(msgspec.Struct):
    seq: int
    advantages: list[float]


def inspect(directory: Path, as_json: bool) -> Iterator[str]:
    """Lines for people or for programs; raises ConfigError where there is no journal, DataError where it is damaged."""
    for group in trained_groups(directory):
        if as_json:
            yield msgspec.json.encode(group).decode()
        else:
            rewards = " ".join(f"{row.reward:.3g}" for row in group.rows)
            ends = " ".join(row.finish for row in group.rows)
            yield (
                f"iteration {group.version_trained:5d}  group {group.seq:7d}  sampled at version {_versions(group):>5}  "
                f"rewards {rewards}  ended by {ends}  {group.prompt_id}"
            )
    if not as_json and (ended := ended_groups(directory)):
        causes = ", ".join(f"{count} {cause}" for cause, count in sorted(ended.items()))
        yield f"ended untrained: {causes}"
    if not as_json and (errors := row_errors(directory)):
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(errors.items()))
        yield f"texts without a verdict: {kinds}"


def _versions(group: TrainedGroup) -> str:
    """The version that wrote a group, or the oldest and the newest."""
    newest = max((row.spans[-1].version for row in group.rows), default=group.version_sampled)
    oldest = group.version_sampled
    return str(oldest) if newest == oldest else f"{oldest}-{newest}"


def ended_groups(directory: Path) -> Counter[str]:
    """Groups that ended untrained, by state and cause."""
    return Counter(
        f"{record.state}: {record.cause}"
        for record in journal.read(directory / "journal.msgpack")
        if isinstance(record, Ended)
    )


def row_errors(directory: Path) -> Counter[str]:
    """Texts that the verifier could not judge, by the kind of failure."""
    found: Counter[str] = Counter()
    for record in journal.read(directory / "journal.msgpack"):
        if isinstance(record, GroupScored):
            found.update(record.group.faults)
        elif isinstance(record, Ended):
            found.update(record.faults)
    return found


def trained_groups(directory: Path) -> Iterator[TrainedGroup]:
    """Every group that was batched for training, in training order."""
    path = directory / "journal.msgpack"
    if not path.exists():
        raise ConfigError(f"{directory} holds no run (no file {path})")
    advantages = _advantages(directory / "advantages.jsonl")
    waiting: dict[int, ScoredGroup] = {}
    for record in journal.read(path):
        if isinstance(record, GroupScored):
            waiting[record.group.prefixes.seq] = record.group
        elif isinstance(record, Batched):
            for seq in record.seqs:
                yield _trained(waiting.pop(seq), record.iteration, advantages.get(seq, []))


def _advantages(path: Path) -> dict[int, list[float]]:
    if not path.exists():
        return {}
    lines = [
        msgspec.json.decode(line, type=_AdvantageLine) for line in path.read_bytes().splitlines()
    ]
    return {line.seq: line.advantages for line in lines}


def _trained(group: ScoredGroup, iteration: int, advantages: list[float]) -> TrainedGroup:
    worth, rows = iter(advantages), []
    for row, verdict in zip(group.prefixes.rows, group.verdicts, strict=True):
        tokens = token_ids(row.tokens)
        rows.append(
            TrainedRow(
                prefix_ids=tokens.tolist(),
                behaviour_logprobs=logprobs(row.logprobs, tokens.size).tolist(),
                spans=list(row.spans),
                reward=verdict.reward,
                status=verdict.status,
                extracted=verdict.extracted,
                finish=row.finish,
                advantage=next(worth, None) if verdict.is_judged else None,
                continuations=list(verdict.continuations),
            )
        )
    prefixes = group.prefixes
    return TrainedGroup(
        prefixes.seq,
        prefixes.prompt.prompt_id,
        group.version,
        iteration,
        group.weights_digest,
        group.scorer,
        rows,
    )
