"""The manifests of docs/kubernetes.md: their commands are ours, and a worker that is asked to leave comes again."""

import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from click import Command

from prefixrl.deploy.launch.command import launch_command
from prefixrl.learner.__main__ import main as learner
from prefixrl.rollout.__main__ import main as rollout
from prefixrl.scorer.__main__ import main as scorer
from support.fakes import wait_until
from support.paths import ROOT

JOBS, TASK = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/kubernetes.md").read_text(), re.DOTALL)
PODS: dict[str, dict[str, Any]] = {
    each["metadata"]["name"]: each["spec"]["template"]["spec"] for each in yaml.safe_load_all(JOBS)
}


def test_pods_share_run_directory_user_and_volume_and_their_commands_are_ours() -> None:
    programs: dict[str, Command] = {"prefixrl-learner": learner, "prefixrl-rollout": rollout, "prefixrl-scorer": scorer}
    assert PODS.keys() == programs.keys()
    for name, pod in PODS.items():
        (container,) = pod["containers"]
        command = container["command"] if name == "prefixrl-learner" else container["args"][0].splitlines()[1].split()
        words = [each for each in command if each not in ("&", "pid=$!")]
        assert words[0] == name and any("/shared/runs/mine" in each for each in words)
        numbered = ["3" if each == '"$JOB_COMPLETION_INDEX"' else each for each in words[1:]]
        programs[name].make_context(name, numbered)  # raises for an unknown option
        assert pod["securityContext"] == {"runAsUser": 1000, "runAsGroup": 1000} and pod["restartPolicy"] == "Never"
        assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in pod["volumes"]}
    task = yaml.safe_load(TASK)
    words = task["run"].split()[2:]
    assert task["run"].split()[1].endswith("/prefixrl") and words[0] == "launch"
    launch_command.make_context("launch", words[1:])


@pytest.mark.parametrize("name", ["prefixrl-rollout", "prefixrl-scorer"])
def test_a_worker_that_is_asked_to_leave_ends_with_143_and_else_with_its_own_code(tmp_path: Path, name: str) -> None:
    """An index whose pod ends with 0 is complete, and gets no other pod."""
    program = tmp_path / name
    program.write_text('#!/bin/sh\ntrap "echo left; exit 0" TERM\necho "$@"\n[ -e code ] && exit $(cat code)\n'
                       "while true; do sleep 0.1; done\n")  # fmt: skip
    program.chmod(0o755)
    (container,) = PODS[name]["containers"]
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "JOB_COMPLETION_INDEX": "3"}
    said = tmp_path / "said"
    with said.open("w") as output:
        pod = subprocess.Popen(
            [*container["command"], *container["args"]], cwd=tmp_path, env=environment, stdout=output
        )
        wait_until(lambda: "--number 3" in said.read_text(), "the program", 30.0)
        pod.send_signal(signal.SIGTERM)
        assert pod.wait(30) == 143 and said.read_text().endswith("left\n")
    for code in (0, 2):
        (tmp_path / "code").write_text(str(code))
        ended = subprocess.run([*container["command"], *container["args"]], cwd=tmp_path, env=environment, timeout=30)
        assert ended.returncode == code
