"""Packages that a stranger installs: a module and its metadata in a folder on the import path."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prefixrl.common.config import objectives
from prefixrl.common.config.foreign import plugins, verifier


def write_package(site: Path, name: str, entry_points: str, source: str) -> None:
    """Write version 1.0 of a package of one module, `name`, with the text of its entry points."""
    (site / f"{name}.py").write_text(source, encoding="utf-8")
    metadata = site / f"{name}-1.0.dist-info"
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(entry_points, encoding="utf-8")


@contextmanager
def installed(site: Path, name: str, entry_points: str, source: str) -> Iterator[None]:
    """Have a package installed for this process, as pip leaves it."""
    write_package(site, name, entry_points, source)
    sys.path.insert(0, str(site))
    _forget(name)
    try:
        yield
    finally:
        sys.path.remove(str(site))
        _forget(name)


def _forget(name: str) -> None:
    sys.modules.pop(name, None)
    plugins._is_any_installed.cache_clear()
    plugins.plugins.cache_clear()
    objectives._plugged_in.cache_clear()
    verifier.load_verifier.cache_clear()
