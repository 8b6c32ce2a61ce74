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

JOBS, TASK = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/kubernetes.md").read_text(), re.DOTALL)
IMAGE = ("--image", "registry.example/prefixrl:0.2.0")
FIELDS = yaml.safe_load(Path(__file__).with_name("fields.yaml").read_text())
PROGRAMS: dict[str, Command] = {"learner": learner, "rollout": rollout, "scorer": scorer}


def printed(example: str, *flags: str) -> str:
    result = CliRunner().invoke(main, ["kubernetes", str(EXAMPLES / example / "run.toml"), *flags])
    assert result.exit_code == 0, result.output
    return result.output


def pods(text: str) -> dict[str, dict[str, Any]]:
    """The specs of the Jobs by role, their fields checked."""
    documents = list(yaml.safe_load_all(text))
    for document in documents:
        check(document, FIELDS["Job"], "Job")
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9]{,55}[a-z0-9])?", document["metadata"]["name"])
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


@pytest.mark.parametrize(
    ("example", "settings", "expected"),
    [
        pytest.param(
            "math_qwen2.5",
            (),
            {
                "learner": ["8", "1"],
                "rollout": [1, "4", "1"],
                "scorer": [7, "8", "1"],
                "sky": "H100:8",
                "secrets": [],
            },
            id="as in the example",
        ),
        pytest.param(
            "math_qwen2.5",
            ("launch.learner_ranks=2", "scorer.vllm.tensor_parallel_size=2", "launch.scorers=3"),
            {
                "learner_flags": ["--nproc-per-node=2"],
                "learner": ["16", "2"],
                "rollout": [1, "4", "1"],
                "scorer": [3, "8", "2"],
                "sky": "H100:8",
                "secrets": [],
            },
            id="two ranks and larger engines",
        ),
        pytest.param(
            "letters",
            (
                "learner.device=cpu",
                "rollout.device=cpu",
                "scorer.device=cpu",
                "slurm.scorer.memory_gib=0",
                'reward.environment=["JUDGE_KEY"]',
            ),
            {
                "learner": ["8"],
                "rollout": [1, "4"],
                "scorer": [2, "6"],
                "secrets": ["JUDGE_KEY"],
                "scorer_flags": [
                    "--allow-function",
                    "/vol/reward.py:letters_right",
                    "--secret",
                    "JUDGE_KEY",
                ],
            },
            id="CPU, no memory limit, a secret",
        ),
    ],
)
def test_fields_commands_and_sizes_are_right(
    example: str, settings: tuple[str, ...], expected: dict[str, Any]
) -> None:
    flags = ["--set=directory=/vol/it's my_Run.1", *(f"--set={each}" for each in settings)]
    actual = pods(printed(example, *IMAGE, "--mount=/vol", *flags))
    assert actual.keys() == PROGRAMS.keys()
    for role, spec in actual.items():
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


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        pytest.param((), "give --image IMAGE", id="no image"),
        pytest.param(("--image=a", "--sky=H100"), "give --image IMAGE", id="no image for SkyPilot"),
        pytest.param(("--image=a", "--mount=shared"), "an absolute --mount", id="a relative mount"),
        pytest.param(
            ("--image=a", "--set=directory=/elsewhere/run"),
            "directory = '/elsewhere/run': pods have ",
            id="a directory outside the mount",
        ),
        pytest.param(
            ("--image=a", "--set=broker.listen=tcp://127.0.0.1:5555"),
            "workers in other pods cannot join",
            id="a broker on loopback",
        ),
        pytest.param(
            ("--image=a", "--set=launch.scorer=2"), "did you mean 'scorers'?", id="a misspelt key"
        ),
    ],
)
def test_a_mistake_is_a_sentence_and_exit_code_2(flags: tuple[str, ...], expected: str) -> None:
    result = CliRunner().invoke(main, ["kubernetes", str(EXAMPLES / "arithmetic/run.toml"), *flags])
    assert result.exit_code == 2 and expected in result.output


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
