"""The time in which a broker reads its journal again, by the number of groups that the run has had.

One ledger is driven through all groups: 8 rows of 16 tokens each, 512 groups an iteration, S = 2; every record goes
through the real journal, which closes its segments at 64 MiB. Then, each in a process of its own: what a restart reads
(the newest segments), and the whole history, as `prefixrl inspect --check` reads it.

    python -m benchmarks.replay --json benchmarks/results/replay.json
"""

import multiprocessing
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import click

from benchmarks.results import Figure, Report, commit, options
from prefixrl.common.journal import journal
from prefixrl.common.journal.history import history
from prefixrl.common.journal.records import (
    AnswerKept,
    LedgerState,
    Record,
    RunHeader,
    SegmentStart,
    VersionPublished,
)
from prefixrl.common.wire.messages.groups import (
    GroupPrefixes,
    Prompt,
    Row,
    ScoredGroup,
    Verdict,
    VersionSpan,
)
from prefixrl.common.wire.packing import pack_logprobs, pack_tokens
from prefixrl.learner.broker.groups.ledger import Ledger
from prefixrl.learner.broker.groups.states import LedgerLimits
from prefixrl.learner.broker.groups.window import Window

ROWS, TOKENS, BATCH_GROUPS, STALENESS, ITEM_GROUPS = 8, 16, 512, 2, 64
HEADER = RunHeader("replay", 1, b"k" * 32)
TARGET_S = 30.0


class Problems:
    """One prompt, for ever."""

    total = None

    def prompt(self, prompt_index: int, /) -> Prompt:
        """Return the prompt of any position."""
        return Prompt(f"p{prompt_index % 1000}", "What is 17 times 23?", "391")

    def source(self, prompt_index: int, /) -> str:
        """Return the only source."""
        return "all"

    def problem(self, prompt_index: int, /) -> int:
        """Return the number of the problem of a position."""
        return prompt_index % 1000

    def is_ready(self, prompt_index: int, /) -> bool:
        """Return True."""
        return True


def new_ledger() -> Ledger:
    """Return an empty ledger."""
    return Ledger(
        Window(BATCH_GROUPS, STALENESS, iterations=1 << 40),
        LedgerLimits(ITEM_GROUPS, 3, 3),
        Problems(),
    )


def write(folder: Path, groups: int) -> int:
    """Take so many groups through a run; return the completed iterations."""
    ledger, file = new_ledger(), journal.Journal(folder)
    file.append([HEADER])
    verdict = Verdict(
        reward=1.0, status="ok", extracted="391", finish="eos", completion_tokens=80, elapsed_ms=5
    )
    while ledger.counts.issued < groups:
        version = ledger.completed
        row = Row(
            tokens=pack_tokens(list(range(TOKENS))),
            logprobs=pack_logprobs([-1.0] * TOKENS),
            finish="length",
            spans=(VersionSpan(version, "d", TOKENS),),
        )
        while item := ledger.start_sampling(version):
            prefixes = [
                GroupPrefixes(
                    seq=seq,
                    prompt=Problems().prompt(ledger.prompt_index(seq)),
                    seed=seq,
                    prompt_tokens=pack_tokens(list(range(20))),
                    rows=(row,) * ROWS,
                )
                for seq in item.seqs
            ]
            ledger.take_prefixes(prefixes, version, "d", 0.0)
        while score := ledger.start_scoring():
            verdicts = (verdict,) * ROWS
            ledger.take_scores(
                [
                    ScoredGroup(
                        prefixes=each,
                        version=version,
                        weights_digest="d",
                        verdicts=verdicts,
                        scorer="scorer-0",
                    )
                    for each in score.groups
                ]
            )
        ledger.batch(version)
        file.append(ledger.records)
        ledger.records = []
        if file.is_long:
            file.begin_segment(
                SegmentStart(file.size_bytes, HEADER, ledger.state(), {version: ("d",)}, None)
            )
        ledger.trained(version)
    file.close()
    return ledger.completed


def restart(folder: Path, completed: int) -> tuple[float, int]:
    """Rebuild a ledger as a broker does; return the seconds and the most memory in bytes."""
    began_s, ledger = time.perf_counter(), new_ledger()

    def records() -> Iterator[Record | LedgerState]:
        is_first = True
        for record in journal.recover(folder, completed):
            if isinstance(record, SegmentStart):
                if is_first:
                    yield record.ledger
            elif not isinstance(record, RunHeader | VersionPublished | AnswerKept):
                yield record
            is_first = False

    ledger.replay(records(), completed)
    ledger.check()
    assert ledger.completed == completed and isinstance(ledger.state(), LedgerState)
    return time.perf_counter() - began_s, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def whole_history(folder: Path, completed: int) -> tuple[float, int]:
    """Check the whole journal; return the seconds and the most memory in bytes."""
    began_s = time.perf_counter()
    found = history(journal.read(folder), STALENESS)
    assert not found.faults and len(found.batches) >= completed
    return time.perf_counter() - began_s, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@click.command()
@options
def main(quick: bool, path: Path) -> None:
    """Measure restarts after more and more groups."""
    started_s, measured = time.monotonic(), commit()
    context = multiprocessing.get_context("spawn")
    figures, details = [], []
    for groups in (20_000, 60_000) if quick else (100_000, 300_000, 1_000_000):
        with tempfile.TemporaryDirectory() as folder, context.Pool(1, maxtasksperchild=1) as pool:
            place = Path(folder) / "journal"
            completed = pool.apply(write, (place, groups))
            size_bytes = sum(each.stat().st_size for each in place.iterdir())
            segments = len(list(place.iterdir()))
            (restart_s, restart_bytes), (history_s, history_bytes) = (
                pool.apply(each, (place, completed)) for each in (restart, whole_history)
            )
        details.append(
            {
                "groups": groups,
                "segments": segments,
                "journal_mib": round(size_bytes / 2**20, 1),
                "restart_peak_mib": round(restart_bytes / 2**20, 1),
                "history_peak_mib": round(history_bytes / 2**20, 1),
            }
        )
        for name, value in (("restart", restart_s), ("whole history", history_s)):
            figures.append(
                Figure(
                    f"{name}, {groups:,} groups", "s", value, 1, (value, value), statistic="one run"
                )
            )
    settings = {"rows": ROWS, "tokens": TOKENS, "batch_groups": BATCH_GROUPS, "target_s": TARGET_S}
    Report("replay", quick, settings, figures, details, measured).finish(path, started_s)


if __name__ == "__main__":
    main()
