"""The members that installed packages add at the seams: listed and loaded by `--check` and `prefixrl doctor`."""

from types import FunctionType

import click

from prefixrl.common.config.foreign.plugins import Seam, all_plugins, load_plugin
from prefixrl.common.config.foreign.verifier import AnswerVerifier
from prefixrl.common.config.objectives import ObjectiveRecord
from prefixrl.common.config.workers.engine_record import EngineRecord
from prefixrl.common.run.tracker import Tracker

CLASSES: dict[Seam, type[object]] = {
    "objectives": ObjectiveRecord,
    "engines": EngineRecord,
    "verifiers": AnswerVerifier,
    "rewards": FunctionType,
    "trackers": Tracker,
    "commands": click.Command,
}


def loaded_plugins() -> list[str]:
    """Load every member that a package adds; return a line for each.

    Raises:
        ConfigError: a package is broken; it is named.
    """
    for plugin in all_plugins():
        load_plugin(plugin, CLASSES[plugin.seam], f"a {CLASSES[plugin.seam].__name__}")
    return [str(plugin) for plugin in all_plugins()]
