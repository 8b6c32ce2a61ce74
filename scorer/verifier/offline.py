"""Questions of a learner to the verifier: `-m prefixrl.scorer.verifier.offline WORK PARENT_PID TIMEOUT_S`.

golds        [[id, gold], ...]     ──▶ the gold answers that do not verify against themselves, a JSON line each
equalities   [[answer, ...], ...]  ──▶ [[index of the first answer of its problem that is equal, ...], ...]

JSON from stdin to stdout. The first runs beside a training, at the lowest priority: an answer to
such a row is right when it is literally the gold answer, any other may end as `error` and be
excluded. The second counts votes.
"""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import closing
from itertools import combinations

import msgspec

from prefixrl.common.host.process import die_with_parent
from prefixrl.scorer.verifier.pool import VerifierPool
from prefixrl.scorer.verifier.rules.exact import is_settled_without_sympy
from prefixrl.scorer.verifier.rules.verify import Judgement

NICE = 19
WAIT_S = 1.0


class BadGold(msgspec.Struct, frozen=True):
    """A row whose gold answer does not verify, with the reason."""

    id: str
    gold: str
    reason: str


def bad_golds(rows: list[tuple[str, str]], timeout_s: int) -> list[BadGold]:
    """Return the rows whose gold answer sympy cannot parse or finds unequal to itself."""
    ids: dict[str, list[str]] = {}
    for row_id, gold in rows:
        ids.setdefault(gold, []).append(row_id)
    golds = [gold for gold in ids if not is_settled_without_sympy(gold)]
    reasons: dict[int, str] = {}
    with closing(VerifierPool(1, timeout_s)) as pool:
        for key, gold in enumerate(golds):
            pool.check_gold(key, gold)
        for key, verdict in _pending_verdicts(pool):
            if verdict.status == "error":
                reasons[key] = verdict.extracted or "error"
            elif not verdict.reward:
                reasons[key] = f"not equal to itself ({verdict.status})"
    return [
        BadGold(row_id, golds[key], reasons[key])
        for key in sorted(reasons)
        for row_id in ids[golds[key]]
    ]


def first_equals(problems: list[list[str]], timeout_s: int) -> list[list[int]]:
    """Return for every answer the index of the first answer that equals it, compared both ways."""
    pairs = [
        (problem, i, j)
        for problem, answers in enumerate(problems)
        for i, j in combinations(range(len(answers)), 2)
    ]
    verdicts: list[tuple[int, Judgement]] = []
    with closing(VerifierPool(2, timeout_s)) as pool:
        for key, (problem, i, j) in enumerate(pairs):
            earlier, later = problems[problem][i], problems[problem][j]
            pool.submit(2 * key, rf"\boxed{{{later}}}", earlier)
            pool.submit(2 * key + 1, rf"\boxed{{{earlier}}}", later)
            verdicts += pool.poll()
        verdicts += _pending_verdicts(pool)
    equal = {
        pairs[key // 2] for key, verdict in verdicts if verdict.status == "ok" and verdict.reward
    }
    return [_first_equals(len(answers), problem, equal) for problem, answers in enumerate(problems)]


def _first_equals(count: int, problem: int, equal: set[tuple[int, int, int]]) -> list[int]:
    """Map every answer to the first answer that equals it."""
    firsts: list[int] = []
    for j in range(count):
        equals = (i for i in range(j) if firsts[i] == i and (problem, i, j) in equal)
        firsts.append(next(equals, j))
    return firsts


def _pending_verdicts(pool: VerifierPool) -> Iterator[tuple[int, Judgement]]:
    """Yield the verdicts that are pending."""
    while pool.pending:
        pool.wait(WAIT_S)
        yield from pool.poll()


def main() -> None:
    """Do the work on stdin."""
    work = sys.argv[1]
    die_with_parent(int(sys.argv[2]))
    timeout_s = int(sys.argv[3])
    content = sys.stdin.buffer.read()
    if work == "equalities":
        problems = msgspec.json.decode(content, type=list[list[str]])
        sys.stdout.buffer.write(msgspec.json.encode(first_equals(problems, timeout_s)))
        return
    os.nice(NICE)
    logging.disable(logging.WARNING)  # children's warnings would name each bad gold again
    rows = msgspec.json.decode(content, type=list[tuple[str, str]])
    sys.stdout.buffer.write(msgspec.json.Encoder().encode_lines(bad_golds(rows, timeout_s)))


if __name__ == "__main__":
    main()
