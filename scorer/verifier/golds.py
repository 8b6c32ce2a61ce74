"""A process that names the gold answers that do not verify against themselves.

Called as `python -m prefixrl.scorer.verifier.golds PARENT_PID TIMEOUT_S`. Reads a JSON array of `[id, gold]` from
stdin, writes a JSON line per bad row to stdout, then ends. The learner starts it beside a run, at the lowest priority.
An answer to such a row is right when it is literally the gold answer; any other may end as `error` and be excluded.
"""

import logging
import os
import sys

import msgspec

from prefixrl.common.host.process import die_with_parent
from prefixrl.scorer.verifier.pool import VerifierPool
from prefixrl.scorer.verifier.rules.verify import is_settled_without_sympy

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
    pool = VerifierPool(1, timeout_s)
    found: dict[int, str] = {}
    try:
        for key, gold in enumerate(golds):
            pool.check_gold(key, gold)
        while pool.pending:
            pool.wait(WAIT_S)
            for key, verdict in pool.poll():
                if verdict.status == "error":
                    found[key] = verdict.extracted or "error"
                elif not verdict.reward:
                    found[key] = f"not equal to itself ({verdict.status})"
    finally:
        pool.close()
    return [BadGold(row_id, golds[key], found[key]) for key in sorted(found) for row_id in ids[golds[key]]]


def main() -> None:
    """Check the rows on stdin."""
    die_with_parent(int(sys.argv[1]))
    os.nice(NICE)
    # Its children's warnings would name each bad gold again.
    logging.disable(logging.WARNING)
    rows = msgspec.json.decode(sys.stdin.buffer.read(), type=list[tuple[str, str]])
    for bad in bad_golds(rows, int(sys.argv[2])):
        sys.stdout.buffer.write(msgspec.json.encode(bad) + b"\n")


if __name__ == "__main__":
    main()
