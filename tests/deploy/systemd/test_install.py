"""`prefixrl systemd`: what it writes, keeps, refuses and removes; no service manager runs."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from prefixrl.common.config.load import load
from prefixrl.common.config.run import RunConfig
from prefixrl.common.errors import ConfigError
from prefixrl.deploy.systemd.install import Installation, Places, places, prefix_of, uninstall
from prefixrl.deploy.systemd.install import installation as installation_of
from support.paths import EXAMPLE


@pytest.fixture
def config_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config"


def installation(directory: Path, *settings: str, name: str | None = None) -> Installation:
    config: RunConfig = load(EXAMPLE / "run.toml", (f"directory={directory}", *settings))
    return Installation(
        prefix_of(name), places(True), config, EXAMPLE / "run.toml", settings, "root"
    )


def content(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_installing_twice_writes_the_same_files(config_home: Path, tmp_path: Path) -> None:
    installation(tmp_path / "run", "seed=3").install()
    first = content(config_home)
    installation(tmp_path / "run", "seed=3").install()
    assert content(config_home) == first
    assert set(first) == {
        *(
            "prefixrl.target",
            "prefixrl-learner.service",
            "prefixrl-rollout@.service",
            "prefixrl-scorer@.service",
        ),
        "prefixrl.env",
    }
    assert f"ExecStart={sys.executable} -m prefixrl.scorer" in first["prefixrl-scorer@.service"]
    wants = "prefixrl-learner.service prefixrl-rollout@1.service prefixrl-scorer@1.service prefixrl-scorer@2.service"
    assert f"Wants={wants}\n" in first["prefixrl.target"]
    assert f'PREFIXRL_RUN="{tmp_path / "run"}"\n' in first["prefixrl.env"]
    assert 'PREFIXRL_LEARNER_FLAGS="--set seed=3"\n' in first["prefixrl.env"]


def test_settings_and_the_run_directory_are_for_their_owner_alone(
    config_home: Path, tmp_path: Path
) -> None:
    installation(tmp_path / "run").install()
    private = (tmp_path / "run", config_home / "prefixrl", config_home / "prefixrl/prefixrl.env")
    assert [stat.S_IMODE(path.stat().st_mode) & 0o077 for path in private] == [0, 0, 0]


def test_a_path_with_a_dollar_sign_stands_in_a_machines_unit_as_it_is(tmp_path: Path) -> None:
    config = load(EXAMPLE / "run.toml", (f"directory={tmp_path / 'a $x 50%'}",))
    where = Places(tmp_path / "units", tmp_path / "settings", "systemctl", "multi-user.target")
    files = Installation("prefixrl", where, config, EXAMPLE / "run.toml", (), "root").files()
    unit = files[tmp_path / "units" / "prefixrl-learner.service"]
    assert f'ReadWritePaths="{tmp_path}/a $x 50%%"' in unit and "$$" not in unit


def test_the_directory_of_a_setting_is_the_runs_alone(tmp_path: Path) -> None:
    settings = (f"directory = {tmp_path / 'mine'}", "seed=3")
    found = installation_of(EXAMPLE / "run.toml", settings, True, None, None)
    assert found.directory == tmp_path / "mine" and found.settings == ("seed=3",)


def test_gpus_are_dealt_out_once_and_then_belong_to_the_user(
    config_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    installation(tmp_path / "run").install()
    settings = config_home / "prefixrl"
    dealt = {path.name: path.read_text() for path in settings.glob("prefixrl-*.env")}
    assert dealt == {
        "prefixrl-learner.env": "CUDA_VISIBLE_DEVICES=4\n"
        "PREFIXRL_PLACEMENT=learner=0;rollout-0=1;scorer-0=2;scorer-1=3\n",
        "prefixrl-rollout-1.env": "CUDA_VISIBLE_DEVICES=5\n",
        "prefixrl-scorer-1.env": "CUDA_VISIBLE_DEVICES=6\n",
        "prefixrl-scorer-2.env": "CUDA_VISIBLE_DEVICES=7\n",
    }
    (settings / "prefixrl-scorer-2.env").write_text("CUDA_VISIBLE_DEVICES=0\n")
    installation(tmp_path / "run").install()
    assert (settings / "prefixrl-scorer-2.env").read_text() == "CUDA_VISIBLE_DEVICES=0\n"


def test_a_second_run_needs_a_name_of_its_own(config_home: Path, tmp_path: Path) -> None:
    installation(tmp_path / "one").install()
    with pytest.raises(
        ConfigError, match=r"is of another run than .*two; install this one under a name"
    ):
        installation(tmp_path / "two").install()
    installation(tmp_path / "two", name="two").install()
    both = content(config_home)
    assert "PartOf=prefixrl-two.target\n" in both["prefixrl-two-scorer@.service"]
    assert "/prefixrl-two-scorer-%i.env\n" in both["prefixrl-two-scorer@.service"]


def test_uninstalling_removes_what_was_written_and_nothing_else(
    config_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    installation(tmp_path / "two", name="two").install()
    kept = content(config_home)
    installation(tmp_path / "one").install()
    drop_in = config_home / "systemd/user/prefixrl-scorer@.service.d/mine.conf"
    drop_in.parent.mkdir()
    drop_in.write_text("[Service]\n")
    assert len(uninstall(places(True), "prefixrl")) == 9
    assert content(config_home) == kept | {"mine.conf": "[Service]\n"}
    assert (tmp_path / "one").is_dir()
    assert uninstall(places(True), "prefixrl") == []


@pytest.mark.parametrize("name", ["learner", "scorer-2", "a b", "", "a/b", "-a"])
def test_a_name_that_units_cannot_have_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="--name"):
        prefix_of(name)


def test_print_shows_every_file_and_writes_none(config_home: Path, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "prefixrl.deploy",
        "systemd",
        "install",
        str(EXAMPLE / "run.toml"),
        "--print",
    ]
    done = subprocess.run(
        [*command, "--user", "--set", f"directory={tmp_path / 'run'}"],
        capture_output=True,
        text=True,
        env=dict(os.environ),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for name in (
        "prefixrl.target",
        "prefixrl-learner.service",
        "prefixrl-scorer@.service",
        "prefixrl.env",
    ):
        assert f"/{name}\n" in done.stdout
    assert not config_home.exists() and not (tmp_path / "run").exists()


def test_a_mistake_in_the_run_file_is_found_before_anything_is_written(
    config_home: Path, tmp_path: Path
) -> None:
    command = [
        sys.executable,
        "-m",
        "prefixrl.deploy",
        "systemd",
        "install",
        str(EXAMPLE / "run.toml"),
        "--user",
    ]
    done = subprocess.run(
        [*command, "--set", "seeed=1"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, config_home.exists()) == (2, False)
    assert "did you mean 'seed'" in done.stderr
