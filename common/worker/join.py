"""Enrolment of a worker: Hello, the run's config, the model's folder; and its orderly end."""

import logging
import math
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

from prefixrl.common.config.load import from_json
from prefixrl.common.config.run import RunConfig
from prefixrl.common.config.workers.engines import checked_engine, engine_record
from prefixrl.common.errors import ConfigError, DataError, PeerLost, RunIsOver
from prefixrl.common.host.hub import model_folder
from prefixrl.common.host.process import AskedToStop
from prefixrl.common.run.directory_format import check_format
from prefixrl.common.run.documents import END_FILE
from prefixrl.common.wire.address import ENDPOINT_FILE, Find, address_in, fixed_address, mark_of
from prefixrl.common.wire.messages.worker import Done, Welcome
from prefixrl.common.wire.requester import WaitLog
from prefixrl.common.worker.allowed import NOTHING_ALLOWED, Allowed, check
from prefixrl.common.worker.link import FIRST_CONTACT_S, ORPHAN_S, Link

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.2


class Overrides(NamedTuple):
    """Settings that may differ per host."""

    model: str | None = None
    engine: str | None = None
    device: str | None = None
    allowed: Allowed = NOTHING_ALLOWED
    number: int | None = None


class WorkerSession(NamedTuple):
    """A worker that is enrolled and has not loaded its model."""

    link: Link
    welcome: Welcome
    config: RunConfig
    model: str
    """Folder on this host; with a simulated engine the run's name of the model."""
    stopping: Callable[[], bool] = lambda: False
    """Returns True once the process is asked to stop."""

    def raise_if_hopeless(self) -> None:
        """Raise EndedEarly, Refusal or PeerLost if it is useless to wait on before the work."""
        if self.stopping():
            raise EndedEarly("asked to stop")
        while (message := self.link.receive(0.0)) is not None:
            if isinstance(message, Done):
                raise EndedEarly(message.reason)


class EndedEarly(Exception):
    """A worker ends before its work has started; holds the reason."""


def find_broker(
    directory: Path | None,
    endpoint: str | None,
    key_file: Path | None,
    stopping: Callable[[], bool],
    old: str | None,
) -> Find:
    """Return the finder of a given endpoint, or of the broker that a run directory names.

    `old`: the mark of an earlier broker's endpoint file, from a launch that watches the learner itself.
    """
    if directory is None:
        return fixed_address(endpoint or "", key_file or Path())
    _wait_for_endpoint(directory, stopping, old)
    if (directory / END_FILE).exists():
        log.warning(
            "the run in %s has ended (`prefixrl list` tells how): waiting for a learner to go on with it",
            directory,
        )
    return partial(address_in, directory, "worker")


def _wait_for_endpoint(directory: Path, stopping: Callable[[], bool], old: str | None) -> None:
    """Wait until a broker has started; PeerLost in the end where no launch watches the learner, RunIsOver on a stop."""
    check_format(directory)
    patience_s = ORPHAN_S if old is None else math.inf
    from_s = time.monotonic()
    wait = WaitLog(f"a learner to start its broker in {directory}")
    if not directory.exists():
        log.warning(
            "there is no run directory %s (yet): waiting %g s for a learner to make it; is the path right?",
            directory.absolute(),
            patience_s,
        )
    while mark_of(directory / ENDPOINT_FILE) in ("", old):
        if stopping():
            raise RunIsOver("asked to stop before a run had begun")
        waited_s = time.monotonic() - from_s
        if waited_s > patience_s:
            raise PeerLost(f"no learner started its broker in {directory} within {patience_s:g} s")
        wait.log_progress(waited_s)
        time.sleep(LOOK_EVERY_S)


def join(
    find: Find,
    role: Literal["rollout", "scorer"],
    overrides: Overrides,
    stopping: Callable[[], bool],
    patience_s: float = FIRST_CONTACT_S,
) -> WorkerSession:
    """Connect and enrol within `patience_s`; raises a PrefixRLError that tells why it cannot."""
    link = Link(find, role, number=overrides.number)
    welcome = link.welcome(patience_s, stopping)
    link.name = welcome.worker
    config = from_json(welcome.config_json)
    link.heartbeat_s = config.broker.heartbeat_s
    config = _with_overrides(config, role, overrides)
    if role == "scorer":
        # Before anything of the run is executed or sent.
        check(config, overrides.allowed)
    model = overrides.model or config.model_of(role)
    if os.path.isabs(model) and not os.path.isdir(model):
        raise DataError(
            f"{welcome.worker}: no model folder {model} on this host; give its folder here with --model"
        )
    log.info("joined run %s as %s; loading %s", welcome.run_id, welcome.worker, model)
    section = config.engine_section(role)
    if section.has_tokenizer:
        model = model_folder(model, needs_weights=section.record.holds_weights)
    return WorkerSession(link, welcome, config, model, stopping)


def _with_overrides(
    config: RunConfig, role: Literal["rollout", "scorer"], overrides: Overrides
) -> RunConfig:
    """Return the config with this host's engine and device; raises ConfigError."""
    if overrides.engine:
        try:
            checked_engine(overrides.engine, role)
        except ValueError as error:
            raise ConfigError(f"--engine: {error}") from None
        if engine_record(overrides.engine).needs_address:
            raise ConfigError(
                f"--engine {overrides.engine}: the run file alone can name it, with its address; leave it out"
            )
        if role == "scorer":
            try:
                config.scorer.check_stopping(overrides.engine)
            except ValueError as error:
                raise ConfigError(f"--engine {overrides.engine}: {error}") from None
    changes = {
        key: value
        for key, value in (("engine", overrides.engine), ("device", overrides.device))
        if value
    }
    if role == "scorer" and config.mode == "direct" and changes:
        raise ConfigError(
            f"--{' and --'.join(changes)}: this run is in direct mode, whose scorers run no engine; leave it out"
        )
    section = config.engine_section(role).model_copy(update=changes)
    return config.model_copy(update={role: section})


def work(link: Link, run: Callable[[], str]) -> None:
    """Run a worker's loop; send Goodbye however it ends."""
    reason = "failed"
    try:
        reason = run()
        log.info("leaving: %s", reason)
    except (EndedEarly, AskedToStop) as ended:
        reason = str(ended) or "asked to stop"
        log.info("leaving: %s", reason)
    finally:
        link.close(reason)
