"""Numbers of a worker for Prometheus."""

from collections.abc import Iterator
from pathlib import Path

from prefixrl.common.run.prometheus import Number, info, memory
from prefixrl.common.worker.link import Link


def numbers_of_worker(link: Link, role: str, directory: Path) -> Iterator[Number]:
    """Yield the figures that the work loop keeps, as they are now."""
    vitals = link.vitals
    yield info(role, directory)
    yield from memory()
    yield Number("prefixrl_worker_progress", vitals.progress, kind="counter")
    yield Number("prefixrl_worker_busy_row_seconds", vitals.busy_row_s, kind="counter")
    yield Number("prefixrl_worker_tokens", vitals.tokens, kind="counter")
    yield Number("prefixrl_worker_waiting_rows", vitals.waiting_rows)
    yield Number("prefixrl_worker_tasks", len(vitals.leases))
    yield Number("prefixrl_worker_loading", float(vitals.activity == "loading"))
