"""`prefixrl systemd`: units for the daemons of one run on this machine.

Files per source (PREFIX is `prefixrl`, with `--name NAME` `prefixrl-NAME`):

    deploy/systemd/*       templates, @NAME@ in them filled in ──▶ units, overwritten by every install
    the run file           directory, counts, ranks            ──▶ PREFIX.env, likewise
    the machine's GPUs     dealt out as `launch` does          ──▶ PREFIX-ROLE-N.env, written once, then the user's
"""

import getpass
import importlib.resources
import os
import pwd
import re
import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from prefixrl.common.config.load import load
from prefixrl.common.config.run import RunConfig
from prefixrl.common.errors import ConfigError
from prefixrl.common.host.placement import LEARNER, gpus_here, place, processes_of, visible
from prefixrl.common.worker.allowed import flags as allowances

ROLES = ("rollout", "scorer")
SYSTEM_ONLY = {"User", "ReadWritePaths", "CapabilityBoundingSet", "AmbientCapabilities"}
SYSTEM_ONLY_BEGINNINGS = ("Protect", "Private")
"""Directives that need rights which the manager of a plain user does not have."""
HEAD = "# Written by `prefixrl systemd install`, which overwrites it. Your own settings belong into a drop-in"


@dataclass(frozen=True)
class Places:
    """The folders that one service manager reads."""

    units: Path
    settings: Path
    manager: str
    """Its command, for example `systemctl --user`."""
    boot: str
    """Target that it reaches at boot or login."""

    @property
    def is_user(self) -> bool:
        """True for the manager of one user."""
        return "--user" in self.manager


def places(is_user: bool) -> Places:
    """Return the folders of the user's own manager, or of the machine's."""
    if not is_user:
        return Places(Path("/etc/systemd/system"), Path("/etc/prefixrl"), "systemctl", "multi-user.target")
    home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return Places(home / "systemd" / "user", home / "prefixrl", "systemctl --user", "default.target")


def prefix_of(name: str | None) -> str:
    """Return the beginning of a run's unit names; raise ConfigError for an impossible one."""
    if name is None:
        return "prefixrl"
    if not re.fullmatch(r"[A-Za-z0-9_]+(-[A-Za-z0-9_]+)*", name) or name.split("-")[0] in (LEARNER, *ROLES):
        raise ConfigError(
            f"--name {name!r}: a name is made of letters, digits, _ and single -, and does not begin with learner, "
            "rollout or scorer; choose another one"
        )
    return f"prefixrl-{name}"


@dataclass(frozen=True)
class Installation:
    """The files that systemd needs for one run."""

    prefix: str
    places: Places
    config: RunConfig
    run_file: Path
    settings: tuple[str, ...]
    """`--set` of the learner."""
    user: str
    """Account of a system's services."""

    @property
    def directory(self) -> Path:
        """The run's directory."""
        return Path(self.config.directory).resolve()

    def files(self) -> dict[Path, str]:
        """Return the content of every file that an install overwrites."""
        folder = importlib.resources.files("prefixrl.deploy") / "systemd"
        found = {each.name: each.read_text(encoding="utf-8") for each in folder.iterdir() if each.is_file()}
        units = {
            self.places.units / name.replace("prefixrl", self.prefix, 1): self._filled(text)
            for name, text in sorted(found.items())
        }
        return units | {self.places.settings / f"{self.prefix}.env": self._environment()}

    def gpu_files(self) -> dict[Path, str]:
        """Return the files of single processes, which name their GPUs; none where there is no GPU."""
        gpus, processes = gpus_here(), processes_of(self.config)
        placed = place(processes, len(gpus))
        dealt = {_instance(each.name): visible(placed, gpus, each.name) for each in processes}
        return {
            self.places.settings / f"{self.prefix}-{process}.env": "".join(
                f"{name}={value}\n" for name, value in variables.items()
            )
            for process, variables in dealt.items()
            if variables
        }

    def _filled(self, text: str) -> str:
        """Fill a template in; the manager of a user gets what it can do."""
        lines = [line for line in text.splitlines() if not self._is_left_out(line)]
        for name, value in self._values().items():
            lines = [line.replace(f"@{name}@", value) for line in lines]
        return f"{HEAD}\n# (`{self.places.manager} edit UNIT`).\n" + "\n".join(lines) + "\n"

    def _is_left_out(self, line: str) -> bool:
        key = line.partition("=")[0]
        return self.places.is_user and (key in SYSTEM_ONLY or key.startswith(SYSTEM_ONLY_BEGINNINGS))

    def _values(self) -> Mapping[str, str]:
        wanted = [f"{self.prefix}-{LEARNER}.service"]
        launch = self.config.launch
        for role, count in (("rollout", launch.rollouts), ("scorer", launch.scorers)):
            wanted += [f"{self.prefix}-{role}@{number}.service" for number in range(1, count + 1)]
        home = "" if self.places.is_user else pwd.getpwnam(self.user).pw_dir
        needed = (self.directory, self.run_file, Path(sys.prefix))
        under_tmp = any(each.is_relative_to(folder) for each in needed for folder in ("/tmp", "/var/tmp"))
        # Caches of compiled kernels and of the hub; and /tmp, where it is not private.
        writable = [
            str(self.directory),
            f"-{home}/.cache",
            f"-{home}/.triton",
            *(["/tmp", "/var/tmp"] if under_tmp else []),
        ]
        return {
            "NAME": self.prefix,
            "PYTHON": quoted(sys.executable),
            "SETTINGS": escaped(str(self.places.settings)),
            "DIRECTORY": escaped(str(self.directory)),
            "USER": self.user,
            "WANTS": " ".join(wanted),
            "BOOT": self.places.boot,
            "WRITABLE": " ".join(quoted(each) for each in writable),
            "PRIVATE_TMP": "no" if under_tmp else "yes",
        }

    def _environment(self) -> str:
        flags = " ".join(_flag(flag) for setting in self.settings for flag in ("--set", setting))
        values = {
            "PREFIXRL_RUN_FILE": str(self.run_file),
            "PREFIXRL_RUN": str(self.directory),
            "PREFIXRL_LEARNER_RANKS": str(self.config.launch.learner_ranks),
            "PREFIXRL_LEARNER_FLAGS": flags,
            "PREFIXRL_ROLLOUT_FLAGS": "",
            "PREFIXRL_SCORER_FLAGS": " ".join(map(_flag, allowances(self.config))),
        }
        lines = [f"{name}={in_double_quotes(value)}\n" for name, value in values.items()]
        return f"{HEAD},\n# or into {self.prefix}-scorer-1.env and its like.\n" + "".join(lines)

    def install(self) -> list[Path]:
        """Write all files; return those that were written. Raise ConfigError for another run's name."""
        self._check_owner()
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not self.places.is_user:
            shutil.chown(self.directory, self.user)
        self.places.units.mkdir(parents=True, exist_ok=True)
        self.places.settings.mkdir(parents=True, exist_ok=True, mode=0o700)
        written = []
        for path, content in (self.files() | {p: c for p, c in self.gpu_files().items() if not p.exists()}).items():
            path.write_text(content, encoding="utf-8")
            # Settings may come to hold a token; units hold none.
            path.chmod(0o600 if path.parent == self.places.settings else 0o644)
            written.append(path)
        return written

    def _check_owner(self) -> None:
        known = self.places.settings / f"{self.prefix}.env"
        line = f"PREFIXRL_RUN={in_double_quotes(str(self.directory))}"
        if known.exists() and line not in known.read_text(encoding="utf-8").splitlines():
            raise ConfigError(
                f"{known} is of another run than {self.directory}; install this one under a name of its own "
                f"(--name NAME), or remove the other first (prefixrl systemd uninstall)"
            )

    def next_commands(self) -> str:
        """Return what to do now, as text."""
        manager, target = self.places.manager, f"{self.prefix}.target"
        journal = "journalctl --user" if self.places.is_user else "journalctl"
        steps = [
            (f"{manager} daemon-reload", ""),
            (f"{manager} start --no-block {target}", "begin, or resume"),
            (f"{manager} status '{self.prefix}*'", "what each process does"),
            (f"{journal} -f -u '{self.prefix}*'", "their logs"),
            (f"{manager} stop {target} '{self.prefix}-*'", "save, hand back open work, and end"),
            (f"{manager} enable {target}", "start at every boot"),
        ]
        if self.places.is_user:
            steps.append(("loginctl enable-linger", "go on after you log out"))
        width = max(len(command) for command, _ in steps)
        return "\n".join(
            f"  {command:<{width}}  {f'# {remark}' if remark else ''}".rstrip() for command, remark in steps
        )


def installation(
    run_file: Path, settings: tuple[str, ...], is_user: bool, name: str | None, account: str | None
) -> Installation:
    """Read a run file for `systemd install`; raise ConfigError for whatever the user got wrong."""
    config = load(run_file, settings)
    user = account or os.environ.get("SUDO_USER") or getpass.getuser()
    if is_user and account:
        raise ConfigError("--as-user is for the machine's service manager; leave it out with --user")
    try:
        pwd.getpwnam(user)
    except KeyError:
        raise ConfigError(f"--as-user {user!r}: there is no such account on this machine") from None
    kept = tuple(each for each in settings if each.partition("=")[0].strip() != "directory")
    return Installation(prefix_of(name), places(is_user), config, run_file.resolve(), kept, user)


def uninstall(where: Places, prefix: str) -> list[Path]:
    """Remove a run's units and settings and return them; its directory and drop-ins stay."""
    names = [f"{prefix}.target", f"{prefix}-{LEARNER}.service", *(f"{prefix}-{role}@.service" for role in ROLES)]
    processes = re.compile(rf"{re.escape(prefix)}(-{LEARNER}|-({'|'.join(ROLES)})-\d+)?\.env")
    found = [where.units / name for name in names if (where.units / name).exists()]
    if where.settings.is_dir():
        found += [path for path in sorted(where.settings.iterdir()) if processes.fullmatch(path.name)]
    for path in found:
        path.unlink()
    return found


def _instance(name: str) -> str:
    """Return the unit's name of a process: units are counted from 1."""
    role, _, index = name.rpartition("-")
    return f"{role}-{int(index) + 1}" if role else name


def escaped(text: str) -> str:
    """Write a text in a unit where no quotes are read: `%` begins a specifier."""
    return text.replace("%", "%%")


def quoted(text: str) -> str:
    """Write a text in a unit as one word."""
    if re.fullmatch(r"[A-Za-z0-9_./@:+,=-]+", text):
        return text
    return in_double_quotes(escaped(text))


def _flag(text: str) -> str:
    """Write an argument in a variable that systemd splits.

    Unlike in a shell, a backslash escapes within single quotes there.
    """
    return shlex.quote(text.replace("\\", "\\\\"))


def in_double_quotes(text: str) -> str:
    """Write a text in double quotes, as systemd reads them in units and environment files."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
