"""Runs from Python: `import prefixrl` is this folder (docs/python.md).

The table in pyproject.toml maps the folder so. Imports are late: every daemon passes through here, and
none may pay for what it does not use.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prefixrl.deploy.commands.python_api import Run, launch

    __version__: str

__all__ = ["Run", "__version__", "launch"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("prefixrl")
    if name in ("Run", "launch"):
        from prefixrl.deploy.commands import python_api

        return getattr(python_api, name)
    raise AttributeError(
        f"module 'prefixrl' has no attribute {name!r}; it has {', '.join(__all__)}"
    )


def __dir__() -> list[str]:
    return sorted(__all__)
