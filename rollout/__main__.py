"""`prefixrl-rollout`: an adapter engine at one version. Stateless: kill and start it freely."""

from typing import TYPE_CHECKING

from prefixrl.common.host.process import without_gc
from prefixrl.common.worker.command import worker_command

if TYPE_CHECKING:
    from prefixrl.common.worker.join import WorkerSession
    from prefixrl.rollout.loop import Rollout


def _load(session: "WorkerSession") -> "Rollout":
    with without_gc():
        from prefixrl.rollout.start import load  # slow: only once the broker has answered

    return load(session)


main = worker_command("rollout", "Sample prefixes for the run behind CONNECT until it is over.", _load)

if __name__ == "__main__":
    main()
