"""The directory of a run that has trained random groups, of which a replay needs its journal and its config."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from prefixrl.common.config.run import RunConfig
from prefixrl.common.journal import journal
from prefixrl.common.journal.journal import Journal
from prefixrl.common.journal.records import (
    BatchFormed,
    GroupEnded,
    GroupIssued,
    GroupScored,
    JournalRecord,
    RunHeader,
)
from prefixrl.common.run.directory_format import write_format
from prefixrl.common.wire.messages.groups import ScoredGroup
from prefixrl.common.wire.packing import pack_logprobs, pack_tokens
from support.messages import group, row, scored_group, verdict
from support.models.tiny_model import random_iteration
from support.runs.metrics_lines import metrics_line, write_metrics
from support.runs.runs_on_disk import write_end


def groups_of(iteration: int) -> list[ScoredGroup]:
    """Groups of an iteration, the newest first: batches need not be in the order of their numbers."""
    data = random_iteration(iteration)
    groups = []
    for index in reversed(range(max(data.groups) + 1)):
        samples = [each for each in data.samples.values() if each.group == index]
        rows = [
            row(each.tokens.tolist(), version=iteration, logprobs=pack_logprobs(each.logprobs))
            for each in samples
        ]
        seq = 100 * iteration + index
        prompt = pack_tokens(np.asarray(samples[0].prompt_tokens))
        prefixes = group(seq, *rows, prompt_tokens=prompt)
        verdicts = [verdict(each.reward) for each in samples]
        groups.append(scored_group(prefixes, *verdicts, version=iteration))
    return groups


def records_of(iterations: int) -> list[JournalRecord]:
    """The records of a journal of so many iterations; each has a group that was filtered."""
    records: list[JournalRecord] = [RunHeader("id of the run", 1, b"secret")]
    for iteration in range(iterations):
        groups = groups_of(iteration)
        filtered = 100 * iteration + 99
        records += [GroupIssued(each.prefixes.seq, each.prefixes.seq, 0) for each in groups]
        # Scores come in another order than they are trained in.
        records += [
            GroupScored(each) for each in sorted(groups, key=lambda each: each.prefixes.seq)
        ]
        records += [
            GroupIssued(filtered, filtered, 0),
            GroupEnded(seq=filtered, state="filtered", cause="accuracy 1"),
        ]
        records.append(BatchFormed(iteration, tuple(each.prefixes.seq for each in groups)))
    return records


def record(config: RunConfig, iterations: int) -> Path:
    """Write the directory of a finished run of the config."""
    directory = Path(config.directory)
    directory.mkdir(parents=True)
    write_format(directory)
    (directory / "config.json").write_text(config.model_dump_json())
    write_journal(directory, records_of(iterations))
    write_metrics(directory, [metrics_line(iteration) for iteration in range(iterations)])
    write_end(directory, 0, "finished")
    return directory


def write_journal(directory: Path, records: Sequence[JournalRecord]) -> None:
    """Replace the journal of a run."""
    for path in (directory / journal.FOLDER).glob("*"):
        path.unlink()
    written = Journal(directory / journal.FOLDER)
    written.append(records)
    written.close()
