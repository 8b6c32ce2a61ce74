"""The units as systemd's own tools judge them; no service manager runs."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from cluster.systemd.accounts import account
from cluster.systemd.units import copied_units, harden_units
from support.paths import EXAMPLE

pytestmark = pytest.mark.systemd
EXPOSURE = 3.0


def written(folder: Path, is_hardened: bool) -> list[Path]:
    """Return the units of the arithmetic example, with the drop-in of the machine's manager or without."""
    values = {"PREFIXRL_RUN_FILE": str(EXAMPLE / "run.toml"), "PREFIXRL_RUN": "/srv/runs/a"}
    units = copied_units(folder, "demo", values)
    if is_hardened:
        harden_units(units, "demo", account(), Path("/srv/runs/a"))
    return sorted(path for path in units.iterdir() if path.is_file())


def analyze(*arguments: str) -> "subprocess.CompletedProcess[str]":
    assert shutil.which("systemd-analyze"), (
        "systemd-analyze is not installed: `make systemd` installs it as root"
    )
    return subprocess.run(
        ["systemd-analyze", *arguments], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("is_hardened", [False, True], ids=["user", "system"])
def test_systemd_finds_no_fault_in_a_unit(is_hardened: bool, tmp_path: Path) -> None:
    units = written(tmp_path, is_hardened)
    assert len(units) == 4
    done = analyze("verify", "--man=no", "--recursive-errors=no", *map(str, units))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("role", ["learner", "rollout", "scorer"])
def test_a_hardened_unit_is_little_exposed(role: str, tmp_path: Path) -> None:
    (unit,) = (path for path in written(tmp_path, is_hardened=True) if role in path.name)
    # Offline, systemd-analyze reads one file: the unit and its drop-in together.
    drop_in = unit.parent / f"{unit.name}.d" / "hardening.conf"
    whole = tmp_path / unit.name
    whole.write_text(unit.read_text() + drop_in.read_text())
    done = analyze(
        "security", "--offline=true", "--no-pager", f"--threshold={int(EXPOSURE * 10)}", str(whole)
    )
    level = re.search(r"Overall exposure level for .*: ([\d.]+)", done.stdout)
    assert level, done.stdout + done.stderr
    assert done.returncode == 0 and float(level.group(1)) <= EXPOSURE, done.stdout
