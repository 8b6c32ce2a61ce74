"""A process that tells which answers to a problem are equal, as the verifier sees it.

Called as `python -m prefixrl.scorer.verifier.equalities PARENT_PID TIMEOUT_S`. Reads a JSON array from stdin: for every
problem its distinct answers in the order in which they were given. Writes one to stdout: for every answer the index of
the first answer equal to it. `prefixrl eval` starts it to count votes.
"""

import sys
from itertools import combinations

import msgspec

from prefixrl.common.host.process import die_with_parent
from prefixrl.scorer.verifier.pool import VerifierPool

WAIT_S = 1.0
CHILDREN = 2


def first_equals(problems: list[list[str]], timeout_s: int) -> list[list[int]]:
    """Return for every answer the index of the first that either way is equal to it."""
    pairs = [(at, i, j) for at, answers in enumerate(problems) for i, j in combinations(range(len(answers)), 2)]
    equal: set[tuple[int, int, int]] = set()
    pool = VerifierPool(CHILDREN, timeout_s)
    try:
        for key, (at, i, j) in enumerate(pairs):
            one, other = problems[at][i], problems[at][j]
            pool.submit(2 * key, rf"\boxed{{{other}}}", one)
            pool.submit(2 * key + 1, rf"\boxed{{{one}}}", other)
            # As they come: all at once would hold every question of a large evaluation.
            equal |= _taken(pool, pairs)
        while pool.pending:
            pool.wait(WAIT_S)
            equal |= _taken(pool, pairs)
    finally:
        pool.close()
    return [_firsts(len(answers), at, equal) for at, answers in enumerate(problems)]


def _taken(pool: VerifierPool, pairs: list[tuple[int, int, int]]) -> set[tuple[int, int, int]]:
    return {pairs[key // 2] for key, verdict in pool.poll() if verdict.status == "ok" and verdict.reward}


def _firsts(count: int, at: int, equal: set[tuple[int, int, int]]) -> list[int]:
    """Map every answer to the first answer that equals it."""
    found: list[int] = []
    for j in range(count):
        found.append(next((i for i in range(j) if found[i] == i and (at, i, j) in equal), j))
    return found


def main() -> None:
    """Compare the answers on stdin."""
    die_with_parent(int(sys.argv[1]))
    problems = msgspec.json.decode(sys.stdin.buffer.read(), type=list[list[str]])
    sys.stdout.buffer.write(msgspec.json.encode(first_equals(problems, int(sys.argv[2]))))


if __name__ == "__main__":
    main()
