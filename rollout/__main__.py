"""`prefixrl-rollout`: the adapter in an engine, at one version at a time. Stateless: kill and start it at will."""

from typing import TYPE_CHECKING

from prefixrl.common.command import worker_command

if TYPE_CHECKING:
    from prefixrl.common.worker import Joined
    from prefixrl.rollout.loop import Rollout


def _load(joined: "Joined") -> "Rollout":
    from prefixrl.rollout.start import load  # slow: only once the broker has answered

    return load(joined)


main = worker_command(
    "rollout", "Sample prefixes for the run behind CONNECT until it is over.", _load
)

if __name__ == "__main__":
    main()
