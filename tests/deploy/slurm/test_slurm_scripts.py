"""The job scripts of a run: what they ask for, how they quote, what they hide from nobody."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from prefixrl.common.config.load import load
from prefixrl.common.errors import ConfigError
from prefixrl.deploy.slurm.script import (
    ROLES,
    RunOnSlurm,
    arrays,
    heterogeneous,
    job_name,
    whole_runs,
)
from prefixrl.deploy.slurm.submit import run_on_slurm
from support.paths import EXAMPLES
from support.runs.run_helper import RUN_FILE

ODD = 'it\'s a "run" #1; $(touch gone) 50%'


def run_of(directory: Path, *settings: str, run_file: Path = RUN_FILE) -> RunOnSlurm:
    """A run of the example as it would be submitted."""
    given = (f"directory={directory}", *settings)
    return RunOnSlurm(load(run_file, given), run_file, given, Path("/opt/env with space/bin"))


def directives(text: str) -> list[str]:
    """The options of sbatch, unquoted."""
    lines = [
        line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")
    ]
    return [part for line in lines for part in shlex.split(line)]


def command(text: str, role: str) -> list[str]:
    """The step of a role: options of srun, `--` and a command."""
    (line,) = re.findall(rf"^  step {role} .*$", text, re.MULTILINE)
    return shlex.split(line)[2:]


def test_every_role_has_a_job_of_its_own_and_workers_are_arrays_that_find_the_run_by_its_directory(
    tmp_path: Path,
) -> None:
    scripts = arrays(run_of(tmp_path / "run", "launch.scorers=3", "launch.learner_ranks=2"))
    assert list(scripts) == ["learner", "rollout", "scorer"]
    assert "--ntasks=2" in directives(scripts["learner"])
    assert not any(each.startswith("--array") for each in directives(scripts["learner"]))
    assert "--array=0-0" in directives(scripts["rollout"])
    assert {"--array=0-2", "--ntasks=1", "--requeue", "--open-mode=append"} <= set(
        directives(scripts["scorer"])
    )
    for role in ("rollout", "scorer"):
        assert command(scripts[role], role)[-3:] == [
            f"prefixrl-{role}",
            "--run",
            str(tmp_path / "run"),
        ]
        assert f"supervise {role}\n" in scripts[role]


def test_the_heterogeneous_job_has_a_group_per_role_and_a_step_per_worker(tmp_path: Path) -> None:
    text = heterogeneous(run_of(tmp_path / "run", "launch.scorers=3"))
    groups = "\n".join(directives(text)).split("hetjob")
    assert ["--ntasks=1" in groups[0], "--ntasks=1" in groups[1], "--ntasks=3" in groups[2]] == [
        True
    ] * 3
    assert ["--job-name" in each for each in groups] == [True, False, False]
    for group, step in enumerate(("learner", "rollout_0", "scorer_2")):
        options = command(text, step)
        assert {f"--het-group={group}", "--ntasks=1"} <= set(options)
        assert f"--output={tmp_path}/run/logs/{step.replace('_', '-')}.log" in options
    assert text.endswith("supervise learner rollout_0 scorer_0 scorer_1 scorer_2\n")


def test_a_path_with_spaces_quotes_and_dollars_reaches_every_command_as_it_is(
    tmp_path: Path,
) -> None:
    directory = tmp_path / ODD
    run = run_of(directory)
    for text in (*arrays(run).values(), heterogeneous(run)):
        (log,) = (each for each in directives(text) if each.startswith("--output="))
        assert log.startswith(f"--output={directory}/logs/".replace("%", "%%"))
        head = "\n".join(
            line for line in text.splitlines() if line.startswith(("run=", "export PATH="))
        )
        shown = subprocess.run(
            ["bash", "-c", f'{head}\nprintf "%s\\n%s" "$run" "$PATH"'],
            capture_output=True,
            text=True,
            cwd=tmp_path,
        ).stdout.splitlines()
        assert shown[0] == str(directory)
        assert shown[1].startswith("/opt/env with space/bin:")
    assert command(arrays(run)["learner"], "learner")[-1] == f"directory={directory}"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["back\\slash", "line\nbreak"])
def test_a_folder_that_slurm_cannot_write_to_is_refused(tmp_path: Path, name: str) -> None:
    run = RunOnSlurm(
        load(RUN_FILE).model_copy(update={"directory": str(tmp_path / name)}),
        RUN_FILE,
        (),
        Path("/opt/bin"),
    )
    with pytest.raises(
        ConfigError, match=r"has a backslash or a line break; choose another directory"
    ):
        arrays(run)


@pytest.mark.parametrize("layout", ["arrays", "het"])
def test_every_script_is_a_shell_script(tmp_path: Path, layout: str) -> None:
    run = run_of(
        tmp_path / ODD, 'slurm.activate=["module load cuda", "source /opt/env/bin/activate"]'
    )
    for text in arrays(run).values() if layout == "arrays" else [heterogeneous(run)]:
        done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        assert "\nmodule load cuda\nsource /opt/env/bin/activate\n" in text
        assert "/opt/env with space/bin" not in text


def test_workers_on_other_nodes_can_reach_the_broker_unless_the_run_says_where_it_listens(
    tmp_path: Path,
) -> None:
    anywhere = arrays(run_of(tmp_path / "run"))["learner"]
    assert "broker.listen=tcp://0.0.0.0:0" in command(anywhere, "learner")
    given = arrays(run_of(tmp_path / "run", "broker.listen=tcp://127.0.0.1:5555"))["learner"]
    assert "broker.listen=tcp://0.0.0.0:0" not in command(given, "learner")
    alone = "# broker.listen = tcp://127.0.0.1:5555: only workers on the learner's own machine can join."
    assert alone in given and "only workers on" not in anywhere


GPUS = {
    "a learner rank has one, a worker as many as its engine": ((), (1, 1, 1)),
    "tensor parallel engines": (("scorer.vllm.tensor_parallel_size=4",), (1, 1, 4)),
    "on the CPU": (("learner.device=cpu", "rollout.device=cpu", "scorer.device=cpu"), (0, 0, 0)),
    "a served target": (
        ("scorer.engine=openai", 'scorer.openai={url="http://node7:8000/v1"}'),
        (1, 1, 0),
    ),
    "as given": (
        ("slurm.learner.gpus=2", "slurm.rollout.gpus=0", "slurm.scorer.gpus=8"),
        (2, 0, 8),
    ),
}


@pytest.mark.parametrize(("settings", "gpus"), GPUS.values(), ids=GPUS)
def test_every_role_asks_for_the_gpus_it_uses(
    tmp_path: Path, settings: tuple[str, ...], gpus: tuple[int, int, int]
) -> None:
    run = run_of(tmp_path / "run", *settings)
    assert (run.gpus("learner"), run.gpus("rollout"), run.gpus("scorer")) == gpus
    for role, option, count in zip(arrays(run), ("node", "task", "task"), gpus, strict=True):
        expected = f"--gpus-per-{option}={count}"
        text = arrays(run)[role]
        assert (expected in directives(text), expected in command(text, role)) == (
            count > 0,
            count > 0,
        )


def test_a_scorer_of_a_run_without_a_target_asks_for_no_gpu(tmp_path: Path) -> None:
    direct = RUN_FILE.parents[1] / "arithmetic_direct/run.toml"
    assert run_of(tmp_path / "run", run_file=direct).gpus("scorer") == 0


def test_keys_of_a_role_go_before_those_of_all(tmp_path: Path) -> None:
    settings = (
        *(
            "slurm.account=lab",
            "slurm.partition=gpu",
            "slurm.time=2-00:00:00",
            'slurm.sbatch=["--qos=high"]',
        ),
        *("slurm.scorer.partition=preempt", "slurm.scorer.time=90", "slurm.scorer.gpu_type=h100"),
        *(
            "slurm.scorer.cpus=6",
            "slurm.scorer.memory_gib=100",
            'slurm.scorer.sbatch=["--comment=a b"]',
        ),
    )
    scripts = arrays(run_of(tmp_path / "run", *settings))
    assert {"--account=lab", "--partition=gpu", "--time=2-00:00:00", "--qos=high"} <= set(
        directives(scripts["learner"])
    )
    scorer = directives(scripts["scorer"])
    assert {
        "--partition=preempt",
        "--time=90",
        "--gpus-per-task=h100:1",
        "--mem-per-cpu=17067M",
    } <= set(scorer)
    assert {"--account=lab", "--qos=high", "--comment=a b"} <= set(scorer)


@pytest.mark.parametrize(
    ("settings", "needs"),
    [
        pytest.param(
            (), {"learner": [8, 34], "rollout": [4, 22], "scorer": [8, 49]}, id="the recipe"
        ),
        pytest.param(
            (
                "target.model=org/other-70B",
                'learner.deepspeed.zero_optimization.offload_optimizer={device="cpu"}',
            ),
            {"learner": [8, 80], "rollout": [4, 22], "scorer": [8, 281]},
            id="another target and an optimiser in the host's memory",
        ),
        pytest.param(
            (
                "learner.device=cpu",
                "rollout.device=cpu",
                "scorer.device=cpu",
                "rollout.engine=simulated",
                "scorer.engine=simulated",
                "scorer.verifier_children=2",
            ),
            {"learner": [8, 85], "rollout": [1, 4], "scorer": [3, 6]},
            id="on the CPU without engines",
        ),
        pytest.param(
            (
                "target.model=org/unknown",
                "slurm.scorer.memory_gib=0",
                "slurm.rollout.memory_gib=7",
                "slurm.scorer.cpus=3",
            ),
            {"learner": [8, 34], "rollout": [4, 7], "scorer": [3, 0]},
            id="as the run file says",
        ),
    ],
)
def test_a_process_asks_for_cores_and_memory_that_follow_from_the_run(
    tmp_path: Path, settings: tuple[str, ...], needs: dict[str, list[int]]
) -> None:
    run = run_on_slurm(EXAMPLES / "math_qwen2.5/run.toml", (f"directory={tmp_path}/run", *settings))
    assert {role: [run.cpus(role), run.section(role).memory_gib] for role in ROLES} == needs
    for role, text in arrays(run).items():
        cpus, gib = needs[role]
        expected = {f"--cpus-per-task={cpus}"} | (
            {f"--mem-per-cpu={-(-gib * 1024 // cpus)}M"} if gib else set()
        )
        for options in (directives(text), command(text, role)):
            assert expected == {each for each in options if each.startswith(("--cpus", "--mem"))}


def test_memory_of_a_model_of_unknown_size_is_refused_with_the_number_to_write(
    tmp_path: Path,
) -> None:
    with pytest.raises(
        ConfigError,
        match=r"slurm.scorer.memory_gib is absent, and of org/unknown, its size is not known",
    ):
        run_on_slurm(
            EXAMPLES / "math_qwen2.5/run.toml",
            (f"directory={tmp_path}/run", "target.model=org/unknown"),
        )


@pytest.mark.slow
def test_whole_runs_ask_for_what_launch_places_on_a_node_and_the_largest_decides(
    tmp_path: Path,
) -> None:
    recipe = EXAMPLES / "math_qwen2.5/run.toml"
    runs = [
        run_on_slurm(recipe, (f"directory={tmp_path}/run", f"launch.scorers={count}"))
        for count in (7, 3)
    ]
    asked = directives(whole_runs(runs[0], [each.config for each in runs], ["prefixrl", "sweep"]))
    assert {"--cpus-per-task=68", "--gpus-per-node=8", "--mem=399G"} <= set(asked)
    devices = ("launch.scorers=1", "launch.devices={learner=[0], rollout=[[4]], scorer=[[2]]}")
    assert run_on_slurm(recipe, (f"directory={tmp_path}/run", *devices)).gpus_of_all == 5


@pytest.mark.parametrize("time", ["90", "12:00:00", "1:30:00", "2-00", "2-12:00:00"])
def test_a_time_is_taken_in_every_format_of_slurm(tmp_path: Path, time: str) -> None:
    run = run_of(tmp_path / "run", f"slurm.time={time}")
    assert f"--time={time}" in directives(heterogeneous(run))
    assert load(RUN_FILE, (f"slurm.time={time}",)).model_dump_json()


def test_ranks_are_spread_evenly_over_their_nodes(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", "launch.learner_ranks=8", "slurm.learner.nodes=2")
    expected = {"--nodes=2", "--ntasks-per-node=4", "--gpus-per-node=4"}
    assert expected <= set(directives(arrays(run)["learner"]))
    assert expected <= set(command(arrays(run)["learner"], "learner"))
    with pytest.raises(ConfigError, match=r"launch.learner_ranks = 3 with slurm.learner.nodes = 2"):
        arrays(run_of(tmp_path / "run", "launch.learner_ranks=3", "slurm.learner.nodes=2"))


def test_jobs_have_names_that_can_be_read_and_that_no_other_run_has() -> None:
    names = {
        job_name(Path(each), "scorer") for each in ("/runs/a b", "/other/a b", "/runs/" + "x" * 300)
    }
    assert len(names) == 3
    for name in names:
        assert re.fullmatch(r"scorer\.[\w.-]{1,40}-[0-9a-f]{8}", name)


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        pytest.param(
            "slurm.partitions=lab",
            "slurm.partitions: unknown key; did you mean 'partition'?",
            id="a key that is close to another",
        ),
        pytest.param(
            "slurm.scorer.gpu=2",
            "slurm.scorer.gpu: unknown key; did you mean 'gpus'?",
            id="a key of a role",
        ),
        pytest.param(
            "slurm.scorer.nodes=2", "slurm.scorer.nodes: unknown key", id="nodes of workers"
        ),
        pytest.param(
            "slurm.time=tomorrow",
            'slurm.time = "tomorrow": String should match pattern',
            id="a time",
        ),
        pytest.param(
            'slurm.account="a b"',
            'slurm.account = "a b": String should match pattern',
            id="an account that would be two words",
        ),
        pytest.param(
            'slurm.sbatch=["-q high"]',
            'slurm.sbatch.0: not a long option of sbatch such as "--qos=high"',
            id="a short option",
        ),
        pytest.param(
            'slurm.scorer.sbatch=["--array=0-9"]',
            "slurm.scorer.sbatch.0: prefixrl slurm sets --array itself",
            id="an option that the product sets",
        ),
        pytest.param(
            'slurm.sbatch=["--mem=4G"]',
            "slurm.sbatch.0: prefixrl slurm sets --mem itself",
            id="memory for every step of a job",
        ),
        pytest.param(
            r'slurm.activate=["a\nb"]',
            "slurm.activate.0: it must be one line of printable characters",
            id="two lines in one",
        ),
    ],
)
def test_a_refusal_names_the_key_and_what_is_allowed(
    tmp_path: Path, setting: str, expected: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        run_of(tmp_path / "run", setting)
    assert expected in str(refused.value)
