"""Python code as a user who is not root runs it, with the packages of this Python."""

import contextlib
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from prefixrl.scorer.sandbox.runner import PYTHON

ROOT = Path(__file__).resolve().parent.parent
USER = 12345


def run_as_ordinary_user(code: str) -> str | None:
    """Return what the code prints; None if no Python here that has the packages is readable to that user.

    Root's own Python may be where nobody else can read. Whoever is not root runs the code as itself.
    """
    user: dict[str, Any] = (
        {"user": USER, "group": USER, "extra_groups": []} if os.geteuid() == 0 else {}
    )
    environment = {
        "PYTHONPATH": os.pathsep.join(
            [str(ROOT / ".types"), str(ROOT), sysconfig.get_path("platlib")]
        )
    }

    def ran(python: str, code: str) -> "subprocess.CompletedProcess[str]":
        command = [python, "-B", "-c", code]
        return subprocess.run(
            command, capture_output=True, check=False, text=True, cwd="/", env=environment, **user
        )

    for python in (PYTHON, f"/usr/bin/python3.{sys.version_info.minor}"):
        with contextlib.suppress(OSError):
            if ran(python, "import prefixrl.scorer.verifier.child").returncode == 0:
                return ran(python, code).stdout
    return None
