"""All engines by name, which is the value of `rollout.engine` and `scorer.engine`."""

import difflib
from collections.abc import Mapping
from functools import partial
from typing import Annotated

from pydantic import AfterValidator, WithJsonSchema

from prefixrl.common.config.foreign.plugins import check_names, load_plugin, names, plugins
from prefixrl.common.config.workers.engine_record import AUTO, EngineRecord, Role
from prefixrl.common.config.workers.served import OPENAI
from prefixrl.common.config.workers.simulated import SIMULATED
from prefixrl.common.config.workers.vllm import VLLM
from prefixrl.common.errors import ConfigError

TRANSFORMERS = EngineRecord(
    make="prefixrl.common.engines.embedded.load:load_embedded",
    step_model="prefixrl.scorer.process.torch_model:TorchStepModel",
    is_automatic=True,
    takes_options=False,
    is_bitwise=True,
    ends_watched_rows=True,
)

ENGINES: Mapping[str, EngineRecord] = {
    "vllm": VLLM,
    "transformers": TRANSFORMERS,
    "openai": OPENAI,
    "simulated": SIMULATED,
}
"""In the order in which `auto` looks for one that fits."""


def built_in_names(role: Role) -> list[str]:
    """Return the names of the built-in engines that a role may have."""
    if role == "process reward model":
        return [name for name in ENGINES if ENGINES[name].step_model]
    return [AUTO, *(name for name in ENGINES if role in ENGINES[name].roles)]


def engine_record(name: str) -> EngineRecord:
    """Return the record of an engine; of `auto` that of the first automatic one, which a GPU host takes.

    Raises:
        ConfigError: a package adds a built-in name, or its record cannot be used.
    """
    check_names("engines", ENGINES)
    if name == AUTO:
        return next(record for record in ENGINES.values() if record.is_automatic)
    if name in ENGINES:
        return ENGINES[name]
    return load_plugin(plugins("engines")[name], EngineRecord, "an EngineRecord")


def checked_engine(name: str, role: Role) -> str:
    """Return the name of an engine of a role; ValueError for any other name."""
    allowed = names("engines", built_in_names(role))
    if name not in allowed:
        nearest = difflib.get_close_matches(name, allowed, 1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        raise ValueError(
            f"{name!r} is no engine of a {role}; allowed are {', '.join(allowed)}{hint}"
        )
    return name


def _schema(role: Role) -> WithJsonSchema:
    """Return the values of the key, as the pages of keys list them."""
    return WithJsonSchema({"anyOf": [{"enum": built_in_names(role)}, {"type": "string"}]})


EngineOfRollouts = Annotated[
    str, AfterValidator(partial(checked_engine, role="rollout")), _schema("rollout")
]
EngineOfScorers = Annotated[
    str, AfterValidator(partial(checked_engine, role="scorer")), _schema("scorer")
]
EngineOfStepModels = Annotated[
    str,
    AfterValidator(partial(checked_engine, role="process reward model")),
    _schema("process reward model"),
]


def may_share_run(*names: str) -> bool:
    """Return True if workers with these engines may stand in one run; engines unknown here may.

    Raises:
        ValueError: the package of an engine is broken on this host.
    """
    local_names = [name for name in names if name in ENGINES or name in plugins("engines")]
    try:
        return all(engine_record(name).shares_runs for name in local_names)
    except ConfigError as error:
        raise ValueError(str(error)) from error
