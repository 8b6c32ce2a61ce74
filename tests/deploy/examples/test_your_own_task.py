"""The page about a user's own task: its commands run in the order in which they stand."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from prefixrl.common.config.load import load
from support.paths import EXAMPLES, ROOT

PAGE = (ROOT / "docs/your_own_task.md").read_text(encoding="utf-8")
SHORTER = (
    ("python mine/build.py\n", "python mine/build.py --steps 20\n"),
    (
        "\nprefixrl launch mine/own.toml\n",
        "\nprefixrl launch mine/own.toml --set algorithm.iterations=4\n",
    ),
    ("algorithm.iterations=600", "algorithm.iterations=6"),
)
"""The same commands with a little teaching and few iterations."""


def script() -> str:
    """Every command of the page."""
    text = "".join(re.findall(r"^```sh\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE))
    for long, short in SHORTER:
        assert text.count(long) == 1, long
        text = text.replace(long, short)
    return text


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_the_commands_of_the_page_end_well_and_make_the_run_file_of_the_example(
    tmp_path: Path,
) -> None:
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }
    command = ["bash", "-e", "-u", "-c", script()]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=560
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "prefix, 5 tokens: 'Turn each pair round:'" in done.stdout
    assert "prefix, 26 tokens: 'Turn each pair round: gcda'" in done.stdout
    assert (
        "0.5\n" in done.stdout
        and "the best of these for each problem (128 problems)" in done.stdout
    )
    written, shipped = (
        load(path).model_dump()
        for path in (tmp_path / "mine/own.toml", EXAMPLES / "letters/run.toml")
    )
    for rate in ("actor_lr", "critic_lr"):
        assert written["learner"].pop(rate) == 4 * shipped["learner"].pop(rate)
    for section in ("rollout", "scorer", "algorithm", "learner"):
        assert written[section] == shipped[section]
    assert written["evaluation"] == shipped["evaluation"]
