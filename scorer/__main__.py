"""`prefixrl-scorer`: the frozen target in an engine (none in direct mode), and the verifier."""

from typing import TYPE_CHECKING

from prefixrl.common.host.process import without_gc
from prefixrl.common.worker.command import worker_command

if TYPE_CHECKING:
    from prefixrl.common.worker.join import WorkerSession
    from prefixrl.scorer.direct import DirectScorer
    from prefixrl.scorer.loop import Scorer


def _load(session: "WorkerSession") -> "Scorer | DirectScorer":
    with without_gc():
        from prefixrl.scorer.start import load

    return load(session)


main = worker_command("scorer", "Complete and judge prefixes for the run behind CONNECT until it is over.", _load)

if __name__ == "__main__":
    main()
