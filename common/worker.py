"""How every worker starts: say hello, learn the run's config, load the model, say what was loaded, work, leave."""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from prefixrl.common.config import RunConfig, from_json
from prefixrl.common.errors import ConfigError, DataError
from prefixrl.common.hub import model_folder
from prefixrl.common.link import Link
from prefixrl.common.messages import Done, Welcome

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Overrides:
    """What may differ per host."""

    model: str | None = None
    engine: str | None = None
    device: str | None = None


@dataclass(frozen=True)
class Joined:
    """A worker known to the broker, its model not loaded yet."""

    link: Link
    welcome: Welcome
    config: RunConfig
    model: str
    """Folder on this host, unless the engine is simulated."""
    stopping: Callable[[], bool] = lambda: False
    """Whether the process is asked to stop."""

    def watch(self) -> None:
        """Called in a long wait before the work; raises Ended when there is nothing to wait for any more, Refusal, PeerLost."""
        if self.stopping():
            raise Ended("asked to stop")
        while (message := self.link.receive(0.0)) is not None:
            if isinstance(message, Done):
                raise Ended(message.reason)


class Ended(Exception):
    """A worker is over before it has begun to work; says why."""


def join(
    endpoint: str,
    role: Literal["rollout", "scorer"],
    overrides: Overrides,
    stopping: Callable[[], bool],
) -> Joined:
    """Connect and learn the run; raises PeerLost, Refusal, RunIsOver, ConfigError, DataError."""
    link = Link(endpoint, role)
    welcome = link.welcome()
    link.name = welcome.worker
    config = from_json(welcome.config_json)
    link.use_heartbeat(config.broker.heartbeat_s)
    section = config.rollout if role == "rollout" else config.scorer
    changed = {
        key: value
        for key, value in (("engine", overrides.engine), ("device", overrides.device))
        if value
    }
    config = config.model_copy(update={role: section.model_copy(update=changed)})
    if role == "scorer" and config.mode == "direct" and changed:
        raise ConfigError(
            f"--{' and --'.join(changed)}: this run is in direct mode, whose scorers run no engine; leave it out"
        )
    model = overrides.model or config.model_of(role)
    if os.path.isabs(model) and not os.path.isdir(model):
        raise DataError(
            f"{welcome.worker}: there is no model folder {model} on this host; give its place here with --model"
        )
    log.info("joined run %s as %s; loading %s", welcome.run_id, welcome.worker, model)
    engine = changed.get("engine", section.engine)
    if engine != "simulated":
        model = model_folder(model, needs_weights=engine != "openai")
    return Joined(link, welcome, config, model, stopping)


def work(link: Link, run: Callable[[], str]) -> None:
    """Run a worker's loop and leave in order, whatever ends it."""
    reason = "failed"
    try:
        reason = run()
        log.info("leaving: %s", reason)
    except Ended as ended:
        reason = str(ended)
        log.info("leaving: %s", reason)
    finally:
        link.close(reason)
