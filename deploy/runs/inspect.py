"""`prefixrl inspect`: a line per trained group of a run, losses by cause, a checked history."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import click
import msgspec

from prefixrl.common.errors import ConfigError, DataError
from prefixrl.common.host.exit_codes import printable
from prefixrl.common.journal import journal
from prefixrl.common.journal.batches import recorded_batches
from prefixrl.common.journal.history import history
from prefixrl.common.journal.records import GroupEnded, GroupScored
from prefixrl.common.run import json_lines
from prefixrl.common.run.directory_format import check_format
from prefixrl.common.run.documents import (
    ADVANTAGES_FILE,
    END_FILE,
    AdvantageLine,
    RunEnd,
    newest_metrics,
)
from prefixrl.common.run.replay import check_is_no_replay
from prefixrl.common.wire.messages.fields import common_fields
from prefixrl.common.wire.messages.groups import ScoredGroup, StepScores, TextVerdict, VersionSpan
from prefixrl.common.wire.packing import logprobs, token_ids
from prefixrl.deploy.runs.checkpoints import config_of, run_directory_argument


class TrainedRow(msgspec.Struct, frozen=True):
    """One trained prefix, in direct mode one answer."""

    prefix_ids: list[int]
    behaviour_logprobs: list[float]
    spans: list[VersionSpan]
    """Versions of the adapter that sampled its tokens, in order."""
    reward: float
    status: str
    extracted: str
    finish: str
    """`eos`, or `length` if the row reached the largest number of tokens."""
    advantage: float | None
    """Mean whitened advantage over its tokens. None for a row that was left out."""
    completion: str
    """The text of the target, if the run keeps completions."""
    continuations: list[TextVerdict]
    """Verdicts on all continuations, with `scorer.continuations` > 1. `reward` is their mean."""
    process: StepScores | None = None
    """Scores of the steps and where the steps end, with `scorer.prm` and one continuation."""
    parts: dict[str, float] = {}
    """Other numbers that a reward function gave, by name."""
    rule: str = ""
    """The rule that decided the verdict (`docs/verification.md`)."""
    stopped_share: float = 0.0
    """Share of its completions that ended with their answers, with `scorer.stop_when_answered`."""


class TrainedGroup(msgspec.Struct, frozen=True, kw_only=True):
    """One trained group."""

    seq: int
    prompt_id: str
    question: str
    gold: str
    draft: str = ""
    """The target's answer that the adapter read, with `adapter.sees = "draft"`."""
    version_sampled: int
    """Version of its oldest token."""
    version_trained: int
    weights_digest: str
    scorer: str
    rows: list[TrainedRow]


@click.command("inspect")
@run_directory_argument
@click.option("--json", "as_json", is_flag=True, help="One JSON object per trained group.")
@click.option(
    "--check", is_flag=True, help="Check instead that no group was lost, trained twice or too old."
)
def inspect_command(run_directory: Path, as_json: bool, check: bool) -> None:
    """List every trained group of the run in RUN_DIRECTORY: its prompt, rewards and versions."""
    for line in [checked(run_directory)] if check else inspect(run_directory, as_json):
        click.echo(printable(line))


def inspect(directory: Path, as_json: bool) -> Iterator[str]:
    """Yield lines for people or programs; raise ConfigError or DataError for the journal."""
    check_format(directory)
    for group in trained_groups(directory):
        if as_json:
            yield msgspec.json.encode(group).decode()
        else:
            rewards = " ".join(f"{row.reward:.3g}" for row in group.rows)
            ends = " ".join(row.finish for row in group.rows)
            yield (
                f"iteration {group.version_trained:5d}  group {group.seq:7d}  sampled at version "
                f"{_versions(group):>5}  rewards {rewards}  ended by {ends}  {group.prompt_id}"
            )
    for name, counts in () if as_json else _losses(directory).items():
        if counts:
            yield f"{name}: {', '.join(f'{count} {cause}' for cause, count in sorted(counts.items()))}"


def checked(directory: Path) -> str:
    """Return the counts of all groups; raise DataError for faults, else as `inspect`."""
    check_format(directory)
    config = config_of(directory, ())
    path = _journal_of(directory)
    past = history(journal.read(path), config.algorithm.max_staleness)
    counts = ", ".join(f"{count} {state}" for state, count in sorted(past.counts.items()))
    summary = (
        f"{len(past.state)} groups: {counts}; {len(past.batches)} iterations, {past.rows} rows trained, the oldest "
        f"sample {max(past.ages, default=0)} versions old (window {past.most_staleness})"
    )
    end = json_lines.document(directory / END_FILE, RunEnd)
    # Only a run that is finished has nothing under way.
    faults = past.finished_faults() if end and end.exit_code == 0 else past.faults
    if faults:
        raise DataError("\n".join([f"the history in {path} has faults; {summary}", *faults]))
    return f"{summary}; no fault"


def _journal_of(directory: Path) -> Path:
    path = directory / journal.FOLDER
    check_is_no_replay(directory)
    if not journal.exists(path):
        raise ConfigError(f"{directory} holds no run (no journal in {path})")
    return path


def _versions(group: TrainedGroup) -> str:
    """Return the version that wrote a group, or the oldest and the newest."""
    oldest = group.version_sampled
    newest = max((row.spans[-1].version for row in group.rows), default=oldest)
    return str(oldest) if newest == oldest else f"{oldest}-{newest}"


def _losses(directory: Path) -> dict[str, Counter[str]]:
    """Count groups that ended untrained and texts without a verdict, by cause."""
    ended = Counter[str]()
    errors = Counter[str]()
    for record in journal.read(directory / journal.FOLDER):
        if isinstance(record, GroupScored):
            errors.update(record.group.faults)
        elif isinstance(record, GroupEnded):
            ended[f"{record.state}: {record.cause}"] += 1
            errors.update(record.faults)
    return {"ended untrained": ended, "texts without a verdict": errors}


def trained_groups(directory: Path, since: int | None = None) -> Iterator[TrainedGroup]:
    """Yield the groups that were batched for training, in order, `since` an iteration."""
    path = _journal_of(directory)
    lines = json_lines.each(directory / ADVANTAGES_FILE, AdvantageLine)
    advantages = {
        line.seq: line.advantages for line in lines if since is None or line.iteration >= since
    }
    for iteration, groups in recorded_batches(journal.read(path, since)):
        if since is None or iteration >= since:
            for group in groups:
                yield _trained(group, iteration, advantages.get(group.prefixes.seq, []))


def newest_groups(directory: Path) -> list[TrainedGroup]:
    """Return the groups of the newest iteration from the end of the journal, if any."""
    since = max((line.iteration for line in newest_metrics(directory)), default=0)
    groups: list[TrainedGroup] = []
    for group in trained_groups(directory, since):
        if groups and group.version_trained != groups[-1].version_trained:
            groups.clear()
        groups.append(group)
    return groups


def _trained(group: ScoredGroup, iteration: int, advantages: list[float]) -> TrainedGroup:
    worth = iter(advantages)
    rows = []
    for row, verdict in group.judged_rows:
        tokens = token_ids(row.tokens)
        values = {
            "prefix_ids": tokens.tolist(),
            "behaviour_logprobs": logprobs(row.logprobs, tokens.size).tolist(),
            "spans": list(row.spans),
            "advantage": next(worth, None) if verdict.is_judged else None,
            "continuations": list(verdict.continuations),
        }
        rows.append(TrainedRow(**common_fields(TrainedRow, verdict, row) | values))
    fields = common_fields(TrainedGroup, group, group.prefixes, group.prefixes.prompt)
    values = {"version_sampled": group.version, "version_trained": iteration, "rows": rows}
    return TrainedGroup(**fields | values)
