"""Numbers of a process in Prometheus's text format, and the endpoint that serves them."""

import contextlib
import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from prefixrl.common.config.learner import LogConfig
from prefixrl.common.errors import ConfigError
from prefixrl.common.evaluation.grouping import grouped
from prefixrl.common.host.memory_use import memory_now
from prefixrl.common.run.documents import columns, newest_metrics

log = logging.getLogger(__name__)

CLIENT_S = 5.0
POLL_S = 0.2
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FIRST_ROLLOUT = 1
FIRST_SCORER = 101
Kind = Literal["gauge", "counter"]
ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})


class Number(NamedTuple):
    """One number with its labels."""

    name: str
    value: float
    labels: Mapping[str, str] = {}
    kind: Kind = "gauge"


def text_of(numbers: Iterable[Number]) -> str:
    """Return numbers in the text format; those of one name stand together."""
    lines = []
    for name, same_name in grouped((number.name, number) for number in numbers).items():
        lines.append(f"# TYPE {name} {same_name[0].kind}")
        for number in same_name:
            labels = ",".join(
                f'{label}="{text.translate(ESCAPES)}"' for label, text in number.labels.items()
            )
            lines.append(f"{name}{f'{{{labels}}}' if labels else ''} {_value(number.value)}")
    return "\n".join([*lines, ""])


def _value(value: float) -> str:
    if math.isfinite(value):
        return repr(float(value))
    if math.isnan(value):
        return "NaN"
    return "+Inf" if value > 0 else "-Inf"


def numbers_of_run(directory: Path) -> Iterator[Number]:
    """Yield the numbers of a run's newest iteration: `figures/reward` is prefixrl_figures with the label `of`."""
    yield info("learner", directory)
    yield from memory()
    for newest in newest_metrics(directory):
        for column, value in columns(newest).items():
            name, _, label = column.partition("/")
            yield Number(f"prefixrl_{name}", value, {"of": label} if label else {})
        for kind in newest.alarms:
            yield Number("prefixrl_alarm", 1.0, {"of": kind})


def info(role: str, directory: Path) -> Number:
    """Return the number that names a process and its run."""
    return Number("prefixrl_info", 1.0, {"role": role, "run": directory.resolve().name})


def memory() -> Iterator[Number]:
    """Yield the memory of this process: resident, its own alone, and its share of it all."""
    if use := memory_now():
        for name, size_bytes in msgspec.structs.asdict(use).items():
            label = name.removesuffix("_bytes")
            yield Number("prefixrl_memory_bytes", float(size_bytes), {"of": label})


def port_of(base: int, name: str) -> int:
    """Return the port of a process by its name: learner, rollout-0, scorer-12."""
    role, _, number = name.partition("-")
    first = {"rollout": FIRST_ROLLOUT, "scorer": FIRST_SCORER}
    return base + first.get(role, 0) + int(number or 0)


@contextlib.contextmanager
def exposed(config: LogConfig, name: str, read: Callable[[], Iterable[Number]]) -> Iterator[int]:
    """Serve the numbers of this process meanwhile, if wanted; yields the port, 0 where not; raises ConfigError."""
    if not config.prometheus_port:
        yield 0
        return
    with _listening(config, name, read) as server:
        thread = threading.Thread(
            target=server.serve_forever, args=(POLL_S,), name="prometheus", daemon=True
        )
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()


def _listening(
    config: LogConfig, name: str, read: Callable[[], Iterable[Number]]
) -> ThreadingHTTPServer:
    """Return a server that answers with the numbers that `read` returns; ConfigError for a port that is taken."""

    class Handler(BaseHTTPRequestHandler):
        timeout = CLIENT_S

        def do_GET(self) -> None:
            if self.path.partition("?")[0] not in ("/", "/metrics"):
                self.send_error(404, "the numbers are at /metrics")
                return
            body = text_of(read()).encode()
            self.send_response(200)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            log.debug(format, *args)

    port = port_of(config.prometheus_port, name)
    try:
        server = ThreadingHTTPServer((config.prometheus_host, port), Handler)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"log.prometheus_port = {config.prometheus_port}: {name} cannot listen at {config.prometheus_host}:{port}: "
            f"{reason}; choose another port, of which the {FIRST_SCORER} and more after it are free, or 0 for none"
        ) from None
    # A client that keeps its connection open must not keep the process from ending.
    server.daemon_threads = True
    return server
