"""Accounts of this machine."""

import getpass
import pwd
from pathlib import Path


def account() -> str:
    """A plain account of this machine: its own where that is not root."""
    me = getpass.getuser()
    plain = (each.pw_name for each in pwd.getpwall() if each.pw_uid not in (0, 65534))
    return me if me != "root" else next(plain)


def is_open_to_all(path: Path) -> bool:
    """Return True if every account may read a folder and pass all folders above it."""
    may_pass = all(folder.stat().st_mode & 0o001 for folder in path.parents)
    return may_pass and path.stat().st_mode & 0o005 == 0o005
