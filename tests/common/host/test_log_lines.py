"""Lines that peers cause: few of each peer, few of each kind, and how many were left out is told."""

import io
import logging

import pytest

from prefixrl.common.host import log_lines
from prefixrl.common.host.log_lines import CAUSE, PER_KIND, PER_PEER, LineBudget
from support.fakes import SteppedClock


@pytest.fixture
def clock() -> SteppedClock:
    return SteppedClock()


@pytest.fixture
def log(clock: SteppedClock) -> logging.Logger:
    logger = logging.Logger("bounded")
    handler = logging.StreamHandler(io.StringIO())
    handler.addFilter(LineBudget(clock.monotonic))
    logger.addHandler(handler)
    return logger


def lines(log: logging.Logger) -> list[str]:
    (handler,) = log.handlers
    assert isinstance(handler, logging.StreamHandler)
    return str(handler.stream.getvalue()).splitlines()


def test_a_peer_that_says_much_hides_nothing_of_another_and_of_itself_a_count_is_told(
    log: logging.Logger, clock: SteppedClock
) -> None:
    CAUSE.set(b"evil")
    for number in range(50):
        log.info("%s left: %s", f"scorer-{number}", "x" * 4096)
        log.error("refused %s", number)
    assert len(lines(log)) == PER_PEER and max(map(len, lines(log))) <= log_lines.LINE_CHARS + 100
    CAUSE.set(b"honest")
    log.info("%s left: %s", "scorer-51", "done")
    assert lines(log)[-1] == "scorer-51 left: done (40 more such lines before this were left out)"
    CAUSE.set(b"evil")
    clock.sleep(1 / log_lines.PER_PEER_S)
    log.info("%s left: %s", "scorer-52", "again")
    assert lines(log)[-1] == "scorer-52 left: again"


def test_many_peers_together_fill_no_log_either(log: logging.Logger, clock: SteppedClock) -> None:
    for number in range(3 * log_lines.MOST_PEERS):
        CAUSE.set(b"%d" % number)
        log.info("%s joined", number)
    CAUSE.set(b"")
    assert len(lines(log)) == PER_KIND
    log.warning("%s", "another kind")
    assert lines(log)[-1] == "another kind"
    (budget,) = log.handlers[0].filters
    assert isinstance(budget, LineBudget) and len(budget._left) <= log_lines.MOST_PEERS
