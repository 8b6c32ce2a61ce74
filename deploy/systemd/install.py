"""`prefixrl systemd`: units for the daemons of one run on this machine.

Files per source (PREFIX is `prefixrl`, with `--name NAME` `prefixrl-NAME`):

    deploy/systemd/templates ──▶ units, and PREFIX.env with what they need: overwritten by every install
    the machine's GPUs       ──▶ PREFIX-ROLE-N.env, dealt out as `launch` does: written once, then the user's
"""

import getpass
import os
import pwd
import re
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import click

from prefixrl.common.config.load import load
from prefixrl.common.config.run import RunConfig
from prefixrl.common.errors import ConfigError
from prefixrl.common.host.placement import LEARNER, gpus_here, place, processes_of, visible
from prefixrl.common.host.template import rendered
from prefixrl.common.worker.allowed import flags as allowances
from prefixrl.common.worker.command import set_flags, settings_option

PACKAGE = "prefixrl.deploy.systemd"
ROLES = ("rollout", "scorer")


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
        """True for the manager of one user, which lacks the rights for most of the hardening."""
        return "--user" in self.manager


def places(is_user: bool) -> Places:
    """Return the folders of the user's own manager, or of the machine's."""
    if not is_user:
        return Places(
            Path("/etc/systemd/system"), Path("/etc/prefixrl"), "systemctl", "multi-user.target"
        )
    home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return Places(
        home / "systemd" / "user", home / "prefixrl", "systemctl --user", "default.target"
    )


def prefix_of(name: str | None) -> str:
    """Return the beginning of a run's unit names; raise ConfigError for an impossible one."""
    if name is None:
        return "prefixrl"
    if not re.fullmatch(r"[A-Za-z0-9_]+(-[A-Za-z0-9_]+)*", name) or name.split("-")[0] in (
        LEARNER,
        *ROLES,
    ):
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
        values, prefix = self._values(), self.prefix
        templates = {f"{prefix}.target": ("run.target.j2", "")}
        templates |= {f"{prefix}-{LEARNER}.service": ("learner.service.j2", LEARNER)}
        templates |= {f"{prefix}-{role}@.service": ("worker.service.j2", role) for role in ROLES}
        units = {
            self.places.units / unit: rendered(
                PACKAGE, f"templates/{template}", **values, role=role
            )
            for unit, (template, role) in templates.items()
        }
        environment = rendered(
            PACKAGE, "templates/run.env.j2", prefix=prefix, variables=self._variables()
        )
        return units | {self.places.settings / f"{prefix}.env": environment}

    def gpu_files(self) -> dict[Path, str]:
        """Return the files of single processes, which name their GPUs; none where there is no GPU."""
        gpus, processes = gpus_here(), processes_of(self.config)
        placed, found = place(processes, len(gpus)), {}
        for process in processes:
            role, _, index = process.name.rpartition("-")
            # Units are counted from 1.
            name = f"{role}-{int(index) + 1}" if role else process.name
            if variables := visible(placed, gpus, process.name):
                text = "".join(f"{key}={value}\n" for key, value in variables.items())
                found[self.places.settings / f"{self.prefix}-{name}.env"] = text
        return found

    def _values(self) -> dict[str, object]:
        wanted = [f"{self.prefix}-{LEARNER}.service"]
        launch = self.config.launch
        for role, count in (("rollout", launch.rollouts), ("scorer", launch.scorers)):
            wanted += [f"{self.prefix}-{role}@{number}.service" for number in range(1, count + 1)]
        home = "" if self.places.is_user else pwd.getpwnam(self.user).pw_dir
        needed = (self.directory, self.run_file, Path(sys.prefix))
        is_under_tmp = any(
            each.is_relative_to(folder) for each in needed for folder in ("/tmp", "/var/tmp")
        )
        # Caches of compiled kernels and of the hub; and /tmp, where it is not private.
        writable = [
            str(self.directory),
            f"-{home}/.cache",
            f"-{home}/.triton",
            *["/tmp", "/var/tmp"] * is_under_tmp,
        ]
        return {
            "prefix": self.prefix,
            "manager": self.places.manager,
            "is_user": self.places.is_user,
            "python": quoted(sys.executable),
            "settings": escaped(str(self.places.settings)),
            "directory": escaped(str(self.directory)),
            "user": self.user,
            "wants": wanted,
            "boot": self.places.boot,
            "writable": " ".join(map(quoted, writable)),
            "is_under_tmp": is_under_tmp,
        }

    def _variables(self) -> dict[str, str]:
        values = {
            "PREFIXRL_RUN_FILE": str(self.run_file),
            "PREFIXRL_RUN": str(self.directory),
            "PREFIXRL_LEARNER_RANKS": str(self.config.launch.learner_ranks),
            "PREFIXRL_LEARNER_FLAGS": " ".join(map(_flag, set_flags(self.settings))),
            "PREFIXRL_ROLLOUT_FLAGS": "",
            "PREFIXRL_SCORER_FLAGS": " ".join(map(_flag, allowances(self.config))),
        }
        return {name: in_double_quotes(value) for name, value in values.items()}

    def install(self) -> list[Path]:
        """Write all files; return those that were written. Raise ConfigError for another run's name."""
        known = self.places.settings / f"{self.prefix}.env"
        line = f"PREFIXRL_RUN={in_double_quotes(str(self.directory))}"
        if known.exists() and line not in known.read_text(encoding="utf-8").splitlines():
            raise ConfigError(
                f"{known} is of another run than {self.directory}; install this one under a name of its own "
                f"(--name NAME), or remove the other first (prefixrl systemd uninstall)"
            )
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not self.places.is_user:
            shutil.chown(self.directory, self.user)
        self.places.units.mkdir(parents=True, exist_ok=True)
        self.places.settings.mkdir(parents=True, exist_ok=True, mode=0o700)
        contents = self.files() | {
            path: text for path, text in self.gpu_files().items() if not path.exists()
        }
        for path, content in contents.items():
            path.write_text(content, encoding="utf-8")
            # Settings may come to hold a token; units hold none.
            path.chmod(0o600 if path.parent == self.places.settings else 0o644)
        return list(contents)

    def next_commands(self) -> str:
        """Return the commands that the user gives next."""
        journal = "journalctl --user" if self.places.is_user else "journalctl"
        return rendered(PACKAGE, "templates/next.txt.j2", journal=journal, **self._values())


def installation(
    run_file: Path, settings: tuple[str, ...], is_user: bool, name: str | None, account: str | None
) -> Installation:
    """Read a run file for `systemd install`; raise ConfigError for an invalid run file or flag."""
    config = load(run_file, settings)
    user = account or os.environ.get("SUDO_USER") or getpass.getuser()
    if is_user and account:
        raise ConfigError(
            "--as-user is for the machine's service manager; leave it out with --user"
        )
    try:
        pwd.getpwnam(user)
    except KeyError:
        raise ConfigError(f"--as-user {user!r}: there is no such account on this machine") from None
    kept = tuple(each for each in settings if each.partition("=")[0].strip() != "directory")
    return Installation(prefix_of(name), places(is_user), config, run_file.resolve(), kept, user)


def uninstall(where: Places, prefix: str) -> list[Path]:
    """Remove a run's units and settings and return them; its directory and drop-ins stay."""
    names = [
        f"{prefix}.target",
        f"{prefix}-{LEARNER}.service",
        *(f"{prefix}-{role}@.service" for role in ROLES),
    ]
    processes = re.compile(rf"{re.escape(prefix)}(-{LEARNER}|-({'|'.join(ROLES)})-\d+)?\.env")
    found = [where.units / name for name in names if (where.units / name).exists()]
    if where.settings.is_dir():
        found += [
            path for path in sorted(where.settings.iterdir()) if processes.fullmatch(path.name)
        ]
    for path in found:
        path.unlink()
    return found


def escaped(text: str) -> str:
    """Write a text in a unit where no quotes are read: `%` begins a specifier."""
    return text.replace("%", "%%")


def quoted(text: str) -> str:
    """Write a text in a unit as one word."""
    return text if re.fullmatch(r"[A-Za-z0-9_./@:+,=-]+", text) else in_double_quotes(escaped(text))


def _flag(text: str) -> str:
    """Write an argument for systemd, which reads a backslash in single quotes unlike a shell."""
    return shlex.quote(text.replace("\\", "\\\\"))


def in_double_quotes(text: str) -> str:
    """Write a text in double quotes, as systemd reads them in units and environment files."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


@click.group()
def systemd() -> None:
    """Run a run's daemons as services of systemd on this machine."""


user_option = click.option(
    "--user", "is_user", is_flag=True, help="Your own service manager, not the machine's."
)
name_option = click.option(
    "--name", help="Name of this run in unit names, where several runs share a machine."
)


@systemd.command("install")
@click.argument("run_file", type=click.Path(path_type=Path))
@settings_option
@user_option
@name_option
@click.option(
    "--as-user", "account", help="Without --user: the account of the services.  [default: you]"
)
@click.option("--print", "shows", is_flag=True, help="Print the files and write nothing.")
def install_command(
    run_file: Path,
    settings: tuple[str, ...],
    is_user: bool,
    name: str | None,
    account: str | None,
    shows: bool,
) -> None:
    """Write units for the run of RUN_FILE and print the next commands."""
    wanted = installation(run_file, settings, is_user, name, account)
    if shows:
        for path, content in (wanted.files() | wanted.gpu_files()).items():
            click.echo(f"# {path}\n{content}")
        return
    for path in wanted.install():
        click.echo(f"wrote {path}")
    click.echo(f"\nNext:\n{wanted.next_commands()}")


@systemd.command("uninstall")
@user_option
@name_option
def uninstall_command(is_user: bool, name: str | None) -> None:
    """Remove the units of a run; its directory stays. Stop them first."""
    where = places(is_user)
    removed = uninstall(where, prefix_of(name))
    for path in removed:
        click.echo(f"removed {path}")
    click.echo(
        f"next: {where.manager} daemon-reload"
        if removed
        else f"nothing of that name in {where.units}"
    )
