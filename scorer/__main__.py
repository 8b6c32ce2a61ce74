"""`prefixrl-scorer`: the frozen target in an engine, and the verifier. Stateless: start, stop and kill any number at will."""

from typing import TYPE_CHECKING

from prefixrl.common.command import worker_command

if TYPE_CHECKING:
    from prefixrl.common.worker import Joined
    from prefixrl.scorer.loop import Scorer


def _load(joined: "Joined") -> "Scorer":
    from prefixrl.scorer.start import load  # slow: only once the broker has answered

    return load(joined)


main = worker_command(
    "scorer", "Complete and judge prefixes for the run behind CONNECT until it is over.", _load
)

if __name__ == "__main__":
    main()
