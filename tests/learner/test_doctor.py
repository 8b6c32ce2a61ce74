"""`prefixrl doctor`: every fault that is planted on this host is named, with its remedy, and is the exit code."""

import errno
import socket
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from click.testing import CliRunner

from prefixrl.learner.commands import doctor
from support.paths import EXAMPLE
from support.runs.small_disk import small_disk

LINES = [
    "CUDA",
    "engines",
    "plug-ins",
    "sandbox",
    "file locks",
    "/dev/shm",
    "broker",
    "disk",
    "open files",
]


def said(*flags: str) -> tuple[int, dict[str, str]]:
    """Exit code, and the line of every check by its name."""
    done = CliRunner().invoke(doctor.main, flags)
    lines = [line.partition(": ") for line in done.stdout.splitlines()]
    return done.exit_code, {head[5:]: f"{head[:5].strip()}: {rest}" for head, _, rest in lines}


@pytest.mark.parametrize("run_file", [(), (str(EXAMPLE / "run.toml"),)])
def test_a_healthy_host_has_a_good_line_for_each(run_file: tuple[str, ...], tmp_path: Path) -> None:
    directory = tmp_path / "new/run"
    code, lines = said(
        *run_file, "--set", f"directory={directory}", "--set", "broker.listen=tcp://0.0.0.0:0"
    )
    assert list(lines) == LINES
    assert (code, {each[:4] for each in lines.values()}) == (0, {"ok: "}), lines
    assert f"must reach tcp://{socket.gethostname()}:0" in lines["broker"]
    assert not directory.exists() and not list(tmp_path.iterdir())


FAULTS = {
    "/dev/shm": "not: 1.0 MiB are free and 32.0 MiB needed; a container gets more by --shm-size=8g",
    "file locks": "its file system has no file locks",
    "CUDA": "opens no CUDA device. GPUs that this host shows: 0; driver: ",
    "broker": "cannot be bound: Address already in use; choose another port",
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="this host's GPUs can be opened")
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_the_only_one_that_is_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        small_disk(tmp_path / "shm", 2**20) as disk,
        socket.create_server(("127.0.0.1", 0)) as server,
    ):
        if name == "/dev/shm":
            monkeypatch.setattr(doctor, "SHARED", disk.path)
        elif name == "file locks":
            monkeypatch.setattr(
                "fcntl.flock", mock.Mock(side_effect=OSError(errno.ENOSYS, "not supported"))
            )
        elif name == "CUDA":
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
            monkeypatch.setattr(doctor, "SHARED_BYTES_OF_GPUS", 0)
        port = server.getsockname()[1] if name == "broker" else 0
        code, lines = said(
            "--set", f"broker.listen=tcp://127.0.0.1:{port}", "--set", f"directory={tmp_path}"
        )
    assert code == 2 and FAULTS[name] in lines[name], lines
    assert [each for each, line in lines.items() if line.startswith("not")] == [name]


@pytest.mark.slow
@pytest.mark.parametrize(("setting", "code"), [("data.code=answers", 2), ("data.code=none", 0)])
def test_a_host_without_user_namespaces_is_unfit_for_programs_alone(
    setting: str, code: int, tmp_path: Path
) -> None:
    shell = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"'
    command = [
        "unshare",
        "--user",
        "--map-root-user",
        "sh",
        "-c",
        shell,
        "sh",
        sys.executable,
        "-m",
    ]
    flags = ["--set", setting, "--set", f"directory={tmp_path}"]
    done = subprocess.run(
        [*command, "prefixrl.deploy", "doctor", *flags], capture_output=True, text=True
    )
    assert done.returncode == code, done.stdout + done.stderr
    expected = "ok   sandbox: not used, and not possible: " if code == 0 else "not  sandbox: "
    assert f"{expected}this host cannot isolate programs: [Errno 28] unshare" in done.stdout
