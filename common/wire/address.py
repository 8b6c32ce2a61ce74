"""The place where a run's broker listens: as the run directory names it, or as it was given."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from prefixrl.common.wire.transport import check_endpoint

ENDPOINT_FILE = "endpoint"
"""File in the run directory that a broker writes at each start; it may name another endpoint each time."""


@dataclass(frozen=True)
class Address:
    """A broker's endpoint."""

    endpoint: str


Find = Callable[[], Address]
"""Returns the address as it is now; called again while the broker is silent."""


def given(endpoint: str) -> Find:
    """Return the finder of an endpoint that stays; raises ConfigError where it is malformed."""
    address = Address(check_endpoint(endpoint))
    return lambda: address


def of_run(directory: Path) -> Find:
    """Return the finder of a run directory's broker; the file must be there."""
    return lambda: Address(check_endpoint((directory / ENDPOINT_FILE).read_text(encoding="utf-8").strip()))
