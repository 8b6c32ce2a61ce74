"""Accounts of this machine."""

import getpass
import pwd


def account() -> str:
    """A plain account of this machine: its own where that is not root."""
    me = getpass.getuser()
    plain = (each.pw_name for each in pwd.getpwall() if each.pw_uid not in (0, 65534))
    return me if me != "root" else next(plain)
