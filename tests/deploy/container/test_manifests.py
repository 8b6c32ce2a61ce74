"""Jobs of Kubernetes and SkyPilot's task: the page shows the command's output, whose fields and commands exist."""

import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from click import Command
from click.testing import CliRunner

from prefixrl.deploy.__main__ import main
from prefixrl.deploy.launch.command import launch_command
from prefixrl.learner.__main__ import main as learner
from prefixrl.rollout.__main__ import main as rollout
from prefixrl.scorer.__main__ import main as scorer
from support.fakes import wait_until
from support.paths import EXAMPLES, ROOT
from support.tables import table

JOBS, TASK = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/kubernetes.md").read_text(), re.DOTALL)
IMAGE = ("--image", "registry.example/prefixrl:0.2.0")
FIELDS = yaml.safe_load(Path(__file__).with_name("fields.yaml").read_text())
PROGRAMS: dict[str, Command] = {"learner": learner, "rollout": rollout, "scorer": scorer}


def printed(example: str, *flags: str) -> str:
    found = CliRunner().invoke(main, ["kubernetes", str(EXAMPLES / example / "run.toml"), *flags])
    assert found.exit_code == 0, found.output
    return found.output


def pods(text: str) -> dict[str, dict[str, Any]]:
    """The specs of the Jobs by role, their fields checked."""
    documents = list(yaml.safe_load_all(text))
    for each in documents:
        check(each, FIELDS["Job"], "Job")
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9]{,55}[a-z0-9])?", each["metadata"]["name"])
    return {each["metadata"]["name"].partition("-")[0]: each["spec"] for each in documents}


def check(value: Any, form: Any, where: str) -> None:
    """Compare a manifest with the fields of its kind and their types; `key~` may be absent, `*` is any key."""
    if isinstance(form, str):
        assert type(value).__name__ in form.split("|"), (where, value)
    elif isinstance(form, list):
        for each in value:
            check(each, form[0], f"{where}[]")
    else:
        known = {key.removesuffix("~"): inner for key, inner in form.items()}
        assert {key for key in form if key[-1] not in "~*"} <= value.keys(), where
        for key, inner in value.items():
            assert key in known or "*" in known, (where, key)
            check(inner, known.get(key, known.get("*")), f"{where}.{key}")


def test_the_page_shows_what_the_command_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES / "math_qwen2.5")
    assert printed("math_qwen2.5", *IMAGE) == JOBS
    assert printed("math_qwen2.5", "--sky", "H100") == TASK


@table(__file__)
def test_fields_commands_and_sizes_are_right(
    example: str, settings: tuple[str, ...], expected: dict[str, Any]
) -> None:
    flags = ["--set=directory=/vol/it's my_Run.1", *(f"--set={each}" for each in settings)]
    found = pods(printed(example, *IMAGE, "--mount=/vol", *flags))
    assert found.keys() == PROGRAMS.keys()
    for role, spec in found.items():
        pod = spec["template"]["spec"]
        (container,) = pod["containers"]
        command = container.get("args", container["command"])
        assert command[0] == f"prefixrl-{role}" and any(
            "/vol/it's my_Run.1" in each for each in command
        )
        last = expected.get(f"{role}_flags", command[-1:])
        assert command[-len(last) :] == last
        PROGRAMS[role].make_context(
            role, [*command[1:], *(["--number", "3"] * (role != "learner"))]
        )
        assert {each["name"] for each in container["volumeMounts"]} == {
            each["name"] for each in pod["volumes"]
        }
        sizes = {**container["resources"]["requests"], **container["resources"]["limits"]}
        counts = (spec.get("parallelism"), sizes["cpu"], sizes.get("nvidia.com/gpu"))
        assert [each for each in counts if each is not None] == expected[role]
    task = yaml.safe_load(printed(example, "--sky=H100", *flags))
    check(task, FIELDS["Task"], "Task")
    assert task["resources"].get("accelerators") == expected.get("sky")
    assert [*task.get("secrets", {})] == expected["secrets"]
    assert [each["name"] for each in container["env"] if "valueFrom" in each] == expected["secrets"]
    said = task["run"].replace("exec ~/prefixrl/bin/prefixrl launch", 'printf "%s\\n"')
    words = subprocess.run(
        ["sh", "-c", said], capture_output=True, text=True, env={"HOME": "/h"}
    ).stdout.splitlines()
    assert words[-1] == "directory=/h/run"
    launch_command.make_context("launch", words)


@table(__file__)
def test_a_mistake_is_a_sentence_and_exit_code_2(flags: tuple[str, ...], expected: str) -> None:
    found = CliRunner().invoke(main, ["kubernetes", str(EXAMPLES / "arithmetic/run.toml"), *flags])
    assert found.exit_code == 2 and expected in found.output


@pytest.mark.parametrize("role", ["rollout", "scorer"])
def test_a_worker_that_is_asked_to_leave_ends_with_143_and_else_with_its_own_code(
    tmp_path: Path, role: str
) -> None:
    """An index whose pod ends with 0 is complete, and gets no other pod."""
    program = tmp_path / f"prefixrl-{role}"
    program.write_text(
        '#!/bin/sh\ntrap "echo left; exit 0" TERM\necho "$@"\n[ -e code ] && exit $(cat code)\n'
        "while true; do sleep 0.1; done\n"
    )
    program.chmod(0o755)
    (container,) = pods(JOBS)[role]["template"]["spec"]["containers"]
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "JOB_COMPLETION_INDEX": "3"}
    said = tmp_path / "said"
    with said.open("w") as output:
        pod = subprocess.Popen(
            [*container["command"], *container["args"]],
            cwd=tmp_path,
            env=environment,
            stdout=output,
        )
        wait_until(lambda: "--number 3" in said.read_text(), "the program", 30.0)
        pod.send_signal(signal.SIGTERM)
        assert pod.wait(30) == 143 and said.read_text().endswith("left\n")
    for code in (0, 2):
        (tmp_path / "code").write_text(str(code))
        ended = subprocess.run(
            [*container["command"], *container["args"]], cwd=tmp_path, env=environment, timeout=30
        )
        assert ended.returncode == code
