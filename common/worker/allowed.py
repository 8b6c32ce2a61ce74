"""The code and the secrets of its host that a worker lets its run use.

A config comes from another host. It must not be able to have a file executed here, or a variable of the environment
sent somewhere, because it says so.
"""

from typing import NamedTuple

from prefixrl.common.config.foreign.user_function import is_file
from prefixrl.common.config.run import RunConfig
from prefixrl.common.errors import ConfigError

FUNCTION_FLAG = "--allow-function"
SECRET_FLAG = "--secret"


class Allowed(NamedTuple):
    """The permissions of a worker's command line."""

    functions: tuple[str, ...] = ()
    """References FILE.py:NAME with absolute paths."""
    secrets: tuple[str, ...] = ()
    """Names of environment variables."""


NOTHING_ALLOWED = Allowed()


def needed(config: RunConfig) -> Allowed:
    """Return the permissions that the scorers of a run need."""
    function = config.reward.function
    # A package's function was installed here by the host's owner: a config cannot bring it.
    functions = (function,) if function and is_file(function) else ()
    return Allowed(functions, (*_sent(config), *config.reward.environment))


def _sent(config: RunConfig) -> dict[str, str | None]:
    """Return the addresses to which keys are sent, by the names of their variables."""
    servers = [config.reward, *([config.scorer.openai] if config.scorer.is_served else [])]
    return {server.key_variable: server.url for server in servers if server.key_variable}


def flags(config: RunConfig) -> list[str]:
    """Return the flags with which a user who trusts the run file starts scorers."""
    permissions = needed(config)
    functions = [part for each in permissions.functions for part in (FUNCTION_FLAG, each)]
    return functions + [part for each in permissions.secrets for part in (SECRET_FLAG, each)]


def check(config: RunConfig, allowed: Allowed) -> None:
    """Raise ConfigError where a run needs a permission that the command line did not give."""
    permissions = needed(config)
    for function in permissions.functions:
        if function not in allowed.functions:
            raise ConfigError(
                f"this run scores with {function}, which this host would execute; if you trust that file, start the "
                f"scorer with {FUNCTION_FLAG} {function}"
            )
    for secret in permissions.secrets:
        if secret not in allowed.secrets:
            is_for_function = secret in config.reward.environment
            where = (
                "hands %s to its reward function"
                if is_for_function
                else f"sends %s to {_sent(config)[secret]}"
            )
            raise ConfigError(
                f"this run {where % f'the environment variable {secret}'}; if that is right, start the scorer with "
                f"{SECRET_FLAG} {secret}"
            )
