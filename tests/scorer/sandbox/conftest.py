"""A user who is not root, for programs that must be as harmless there."""

import contextlib
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from typing import Any

import pytest

from prefixrl.scorer.sandbox.runner import PYTHON
from support.paths import ROOT


@pytest.fixture(scope="session")
def as_ordinary_user() -> Callable[[str], str]:
    """Runs Python code as a user who is not root; its output. Root's own Python may be where nobody else can read."""
    user: dict[str, Any] = {"user": 12345, "group": 12345, "extra_groups": []} if os.geteuid() == 0 else {}
    environment = {"PYTHONPATH": os.pathsep.join([str(ROOT / ".types"), str(ROOT), sysconfig.get_path("platlib")])}

    def run_code(python: str, code: str) -> "subprocess.CompletedProcess[str]":
        command = [python, "-B", "-c", code]
        return subprocess.run(command, capture_output=True, check=False, text=True, cwd="/", env=environment, **user)

    for python in (PYTHON, f"/usr/bin/python3.{sys.version_info.minor}"):
        with contextlib.suppress(OSError):
            if run_code(python, "import prefixrl.scorer.verifier.child").returncode == 0:
                return lambda code: run_code(python, code).stdout
    pytest.skip("an ordinary user can run no Python here that has the packages")
