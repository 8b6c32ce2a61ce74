"""The two image definitions, and the steps that they share."""

import re
import subprocess
from pathlib import Path

from support.paths import ROOT

FOLDER = ROOT / "deploy/container"
DOCKERFILE = (FOLDER / "Dockerfile").read_text()
DEFINITION = (FOLDER / "prefixrl.def").read_text()


def copied() -> set[str]:
    lines = [line.split()[1:-1] for line in DOCKERFILE.splitlines() if line.startswith("COPY ")]
    return {path for line in lines for path in line}


def test_both_images_have_the_same_base_extras_and_files() -> None:
    arguments = dict(re.findall(r"^ARG (\w+)=(\S+)$", DOCKERFILE, re.MULTILINE))
    assert arguments == dict(re.findall(r"^    ([A-Z]+)=(\S+)$", DEFINITION, re.MULTILINE))
    files = set(re.findall(r"^    (\S+) /src/\S+$", DEFINITION, re.MULTILINE))
    assert copied() - {"deploy/container/install.sh"} == files
    assert all((ROOT / path).exists() for path in copied())


def test_the_context_lets_through_what_is_copied() -> None:
    allowed = re.findall(
        r"^!(\S+)$", (FOLDER / "Dockerfile.dockerignore").read_text(), re.MULTILINE
    )
    assert {path.partition("/")[0] for path in copied()} == set(allowed)


def test_an_unknown_step_is_refused() -> None:
    done = subprocess.run(
        ["sh", FOLDER / "install.sh", "all", ROOT], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "install.sh: step 'all' is unknown; allowed are packages and prefixrl\n"


def test_a_link_to_the_script_runs_its_name_in_the_image(tmp_path: Path) -> None:
    (tmp_path / "prefixrl-scorer").symlink_to(FOLDER / "in_container.sh")
    (tmp_path / "apptainer").write_text('#!/bin/sh\nprintf "%s|" "$@"\n')
    (tmp_path / "apptainer").chmod(0o755)
    command = [tmp_path / "prefixrl-scorer", "--run", "a run"]
    path = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    image = {"PREFIXRL_IMAGE": "/images/p.sif", "PREFIXRL_BIND": "/shared"}
    given = subprocess.run(command, env=path | image, capture_output=True, text=True).stdout
    assert given == "exec|--nv|--bind|/shared|/images/p.sif|prefixrl-scorer|--run|a run|"
    refused = subprocess.run(command, env=path, capture_output=True, text=True)
    assert refused.returncode != 0 and "PREFIXRL_IMAGE" in refused.stderr
