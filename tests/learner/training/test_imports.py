"""Packages that a learner loads only where they are needed."""

import subprocess
import sys

import pytest


@pytest.mark.slow
def test_a_learner_without_low_rank_matrices_does_not_load_peft() -> None:
    # The first iteration would wait for it.
    code = "import prefixrl.learner.loop, prefixrl.learner.models.model, sys; print('peft' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.split()[-1] == "False"


def test_a_learner_starts_its_servers_before_it_loads_torch() -> None:
    code = "import prefixrl.learner.start, sys; print('torch' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.split()[-1] == "False"
