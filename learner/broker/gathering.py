"""The messages of one turn of the broker: what comes close together is handled together."""

import time
from collections.abc import Callable, Iterator

from prefixrl.common.wire.messages import ToBroker
from prefixrl.common.wire.transport import Received

MESSAGES = 64
"""Most of a turn, so that results wait for their acknowledgement no longer than that."""
GATHER_S = 0.005
"""Time from the first message of a turn until work is given and results are acknowledged: one look at the ledger, and
one sync to disk, for all of them. Heartbeats and questions are answered before."""
NAP_S = 0.002
"""Rest while nothing is there: to be woken for every message costs more than to handle most of them."""


def gathered(receive: Callable[[float], Received[ToBroker] | None], wait_s: float) -> Iterator[Received[ToBroker]]:
    """Yield the messages of a turn; the first may take `wait_s`."""
    end_s = None
    for _ in range(MESSAGES):
        received = receive(wait_s if end_s is None else 0.0)
        now_s = time.monotonic()
        if end_s is None and received is None:
            return
        end_s = now_s + GATHER_S if end_s is None else end_s
        if received is not None:
            yield received
        elif now_s >= end_s:
            return
        else:
            time.sleep(min(NAP_S, end_s - now_s))
