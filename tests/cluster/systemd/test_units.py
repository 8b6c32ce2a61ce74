"""The units as systemd's own tools judge them; no service manager runs."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from cluster.systemd.accounts import account
from prefixrl.common.config.load import load
from prefixrl.deploy.systemd.install import Installation, Places
from support.paths import EXAMPLE

pytestmark = pytest.mark.systemd
EXPOSURE = 3.0


def written(
    folder: Path, is_user: bool, prefix: str = "prefixrl", run: str = "/srv/runs/a"
) -> list[Path]:
    """The units of the arithmetic example, written to a folder."""
    manager, boot = (
        ("systemctl --user", "default.target") if is_user else ("systemctl", "multi-user.target")
    )
    places = Places(folder / "units", folder / "settings", manager, boot)
    config = load(EXAMPLE / "run.toml", (f"directory={run}",))
    wanted = Installation(prefix, places, config, EXAMPLE / "run.toml", (), account())
    places.units.mkdir()
    units = {
        path: content for path, content in wanted.files().items() if path.parent == places.units
    }
    for path, content in units.items():
        path.write_text(content)
    return sorted(units)


def analyze(*arguments: str) -> "subprocess.CompletedProcess[str]":
    assert shutil.which("systemd-analyze"), (
        "systemd-analyze is not installed: `make systemd` installs it as root"
    )
    return subprocess.run(
        ["systemd-analyze", *arguments], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("is_user", [True, False], ids=["user", "system"])
@pytest.mark.parametrize("run", ["/srv/runs/a", "/srv/my runs/50 % $x"], ids=["plain", "strange"])
def test_systemd_finds_no_fault_in_a_unit(is_user: bool, run: str, tmp_path: Path) -> None:
    units = written(tmp_path, is_user, run=run)
    assert len(units) == 4
    for unit in units:
        assert not re.search(r"@[A-Z_]+@", unit.read_text())
    done = analyze("verify", "--man=no", "--recursive-errors=no", *map(str, units))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("role", ["learner.service", "rollout@.service", "scorer@.service"])
def test_a_hardened_unit_is_little_exposed(role: str, tmp_path: Path) -> None:
    (unit,) = (each for each in written(tmp_path, is_user=False) if each.name.endswith(role))
    done = analyze(
        "security", "--offline=true", "--no-pager", f"--threshold={int(EXPOSURE * 10)}", str(unit)
    )
    found = re.search(r"Overall exposure level for .*: ([\d.]+)", done.stdout)
    assert found, done.stdout + done.stderr
    assert done.returncode == 0 and float(found.group(1)) <= EXPOSURE, done.stdout
