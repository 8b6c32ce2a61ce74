"""Verdicts per second of this verifier beside those of an earlier commit.

python -m benchmarks.verifier_versions [--quick] [--before COMMIT] --json benchmarks/results/verifier_versions.json

The earlier commit is checked out into a folder of its own. A process per commit has a pool with two children; chunk by
chunk both judge the same texts, in turn, so that both meet the same load. Answers are those of `benchmarks.verifier`:
`model`, `short` and `hard`. Rates and ratios are medians over the chunks; a ratio is that of two turns, which meet the
same load, so it is not the ratio of the two medians. Verdicts may differ: the rules do.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, cast

import click

from benchmarks.model_answers import like_models
from benchmarks.results import ROOT, Figure, LeftOut, Report, commit, options
from benchmarks.verifier import CHILDREN, TIMEOUT_S, Case, cases, slow_cases, texts_of

BEFORE = "958f2d3"
"""The last commit before the rules about values."""
CHUNKS = 20
ANSWERS, QUICK_ANSWERS = (
    {"model": 8_000, "short": 8_000, "hard": 2_000},
    {"model": 800, "short": 800, "hard": 200},
)
JUDGE = f"""
import json, sys, time
from prefixrl.scorer.verifier.pool import VerifierPool
pool = VerifierPool({CHILDREN}, {TIMEOUT_S})
for line in sys.stdin:
    asked, found, began_s = json.loads(line), {{}}, time.perf_counter()
    for key, (gold, text) in enumerate(asked):
        pool.submit(key, text, gold)
    while pool.pending:
        pool.wait(0.01)
        found.update((key, verdict.reward) for key, verdict in pool.poll())
    rate = len(asked) / (time.perf_counter() - began_s)
    print(json.dumps([rate, [found[key] for key in range(len(asked))]]), flush=True)
"""


class Judge:
    """A process that judges with the program of one checkout."""

    def __init__(self, checkout: Path) -> None:
        given = os.environ | {"PYTHONPATH": str(checkout / ".types")}
        command = [sys.executable, "-P", "-c", JUDGE]
        self._process = subprocess.Popen(
            command, env=given, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.judged(
            [(rf"\ln x+{n}", rf"\boxed{{{n}+\ln x}}") for n in range(8)]
        )  # all children have started

    def judged(self, asked: list[Case]) -> tuple[float, list[float]]:
        """Texts per second, and rewards."""
        inbox, outbox = cast(IO[str], self._process.stdin), cast(IO[str], self._process.stdout)
        inbox.write(json.dumps(asked) + "\n")
        inbox.flush()
        rate, rewards = json.loads(outbox.readline())
        return float(rate), rewards

    def close(self) -> None:
        """End it."""
        cast(IO[str], self._process.stdin).close()
        self._process.wait()


def in_turns(
    judges: tuple[Judge, Judge], asked: list[Case]
) -> tuple[list[tuple[float, float]], int]:
    """The rates of both by chunk, and the count of verdicts that differ."""
    rates, differ, size = [], 0, len(asked) // CHUNKS
    for chunk, start in enumerate(range(0, size * CHUNKS, size)):
        texts = texts_of(asked[start : start + size])
        order = judges if chunk % 2 == 0 else judges[::-1]
        found = {judge: judge.judged(texts) for judge in order}
        rates.append((found[judges[0]][0], found[judges[1]][0]))
        differ += sum(a != b for a, b in zip(found[judges[0]][1], found[judges[1]][1], strict=True))
    return rates, differ


def figures_of(name: str, rates: list[tuple[float, float]], before: str) -> list[Figure]:
    """Medians with the ends of their middle halves."""
    kind = "ends of the middle half"
    older, newer = zip(*rates, strict=True)
    ratios = [new / old for old, new in rates]
    quarters = [statistics.quantiles(each, n=4) for each in (newer, ratios)]
    was = statistics.median(older)
    spreads = [(each[0], each[2]) for each in quarters]
    middle = statistics.median(newer)
    return [
        Figure(
            f"{name}_rate",
            "answers/s",
            middle,
            CHUNKS,
            spreads[0],
            was,
            before,
            statistic="median",
            spread_kind=kind,
        ),
        Figure(
            f"{name}_ratio",
            "ratio",
            quarters[1][1],
            CHUNKS,
            spreads[1],
            statistic="median",
            spread_kind=kind,
        ),
    ]


@click.command()
@options
@click.option("--before", default=BEFORE, show_default=True, help="The earlier commit.")
def main(path: Path, quick: bool, before: str) -> None:
    """Verdicts per second of this tree and of an earlier commit, in turn."""
    started_s, measured = time.monotonic(), commit()
    counts = QUICK_ANSWERS if quick else ANSWERS
    makers = {"model": like_models, "short": cases, "hard": slow_cases}
    figures, differ = [], {}
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(
            ["git", "-C", str(ROOT), "archive", before], capture_output=True, check=False
        )
        if archive.returncode != 0:
            raise LeftOut(
                f"this repository lacks the commit {before}; fetch its history, or name another by --before"
            )
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        judges = Judge(Path(folder)), Judge(ROOT)
        for name, make in makers.items():
            rates, differ[name] = in_turns(judges, make(counts[name]))
            figures += figures_of(name, rates, f"commit {before}")
        for judge in judges:
            judge.close()
    settings = {"before": before, "answers": counts, "chunks": CHUNKS, "children": CHILDREN}
    report = Report(
        "verifier_versions", quick, settings, figures, {"different_verdicts": differ}, measured
    )
    report.finish(path, started_s)


if __name__ == "__main__":
    main()
