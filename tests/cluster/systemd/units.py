"""The units of a run, copied by the shell lines of docs/systemd.md."""

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from support.paths import ROOT

PAGE = ROOT / "docs" / "systemd.md"


def copied_units(home: Path, name: str, variables: Mapping[str, str]) -> Path:
    """Copy the units of a run called `name` into a home directory, as the page says; return their folder.

    `variables` are the values that the user writes into the environment file; the Python is this one.
    """
    match = re.search(r"```bash\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert match, "the page has the commands"
    work = home / f"copy-{name}"
    work.mkdir(parents=True)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    subprocess.run(
        ["bash", "-euc", match.group(1).replace("math", name)],
        cwd=work,
        env={**os.environ, "HOME": str(home), "PATH": path},
        check=True,
    )
    file = home / ".config" / "prefixrl" / f"{name}.env"
    lines = dict(line.split("=", 1) for line in file.read_text().splitlines() if line[0] != "#")
    chosen = {"PREFIXRL_PYTHON": sys.executable, **variables}
    assert chosen.keys() <= lines.keys(), "the file names every variable"
    file.write_text("".join(f'{key}="{value}"\n' for key, value in {**lines, **chosen}.items()))
    return home / ".config" / "systemd" / "user"


def harden_units(units: Path, name: str, account: str, directory: Path) -> None:
    """Add the drop-in for services of the machine's manager to every service of a run."""
    text = (ROOT / "deploy/examples/systemd/hardening.conf").read_text()
    text = text.replace("/CHANGE/ME/runs/mine", str(directory)).replace("CHANGE-ME", account)
    for unit in units.glob(f"prefixrl-*-{name}*.service"):
        folder = units / f"{unit.name}.d"
        folder.mkdir(exist_ok=True)
        (folder / "hardening.conf").write_text(text)
