"""Choose and load the engine of a worker, by its record in `common/config/workers/`."""

import importlib.util
import pkgutil
from collections.abc import Callable
from typing import Any

from prefixrl.common.config.foreign.plugins import PACKAGE
from prefixrl.common.config.run import RunConfig
from prefixrl.common.config.workers.engine_record import AUTO, EngineRecord
from prefixrl.common.config.workers.engines import ENGINES, engine_record
from prefixrl.common.engines.interface.base import AdapterEngine
from prefixrl.common.errors import ConfigError
from prefixrl.common.host.process import without_gc


def make_engine(name: str, model: str, role: str, config: RunConfig) -> AdapterEngine:
    """Load `model` for a worker of `role`; raises UserError, DataError."""
    record = _automatic_record(role, config) if name == AUTO else engine_record(name)
    load = loading_function(record.make, f'{role}.engine = "{name}"')
    engine: AdapterEngine = load(model, role, config)
    return engine


def loading_function(target: str, setting: str) -> Callable[..., Any]:
    """Import the function `module:function` of an engine's record.

    Args:
        setting: the run file's key and value that asks for it, for the error.

    Raises:
        ConfigError: the package of an engine has no such function.
    """
    try:
        with without_gc():  # engines stand on large packages
            function: Callable[..., Any] = pkgutil.resolve_name(target)
    except (ImportError, AttributeError) as error:
        if target.startswith(f"{PACKAGE}."):
            raise
        raise ConfigError(f"{setting}: {target} cannot be loaded: {error}") from error
    return function


def _automatic_record(role: str, config: RunConfig) -> EngineRecord:
    """Return the record of the first automatic engine that fits this host and the config."""
    with without_gc():  # torch, which an engine without a model does not need
        from prefixrl.common.host.cuda import has_cuda

    is_cuda = has_cuda(config.engine_section(role).device, role)
    return next(
        record
        for record in ENGINES.values()
        if record.is_automatic
        and (is_cuda or not record.needs_cuda)
        and (record.is_bitwise or not config.bitwise)
        and is_installed(record)
    )


def is_installed(record: EngineRecord) -> bool:
    """Return True if the package of an engine can be imported; a mere folder of that name cannot."""
    spec = importlib.util.find_spec(record.package) if record.package else None
    return not record.package or (spec is not None and spec.origin is not None)
