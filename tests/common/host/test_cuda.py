"""No process takes the CPU in silence on a host that shows GPUs."""

import re
import sys
from typing import Literal

import pytest
import torch

from prefixrl.common.errors import ConfigError
from prefixrl.common.host import cuda
from prefixrl.common.host.cuda import has_cuda
from prefixrl.common.host.start_line import start_line


@pytest.mark.parametrize(
    ("device", "build", "shown", "said"),
    [
        pytest.param(
            "auto",
            "13.0",
            "0,1",
            (
                r'rollout.device = "auto".*\(CUDA 13.0\) opens no .* '
                "shows: 0, 1; driver: none is loaded"
            ),
            id="two GPUs and no driver",
        ),
        pytest.param(
            "auto", "12.9", "GPU-5f0d,MIG-1", "shows: GPU-5f0d, MIG-1; driver", id="names of GPUs"
        ),
        pytest.param("cuda", "13.0", "", "shows: none; driver", id="hidden by an empty list"),
        pytest.param(
            "cuda", "", "-1", "a build for the CPU.* shows: none", id="a build for the CPU"
        ),
        pytest.param("auto", "13.0", "NoDevFiles", "", id="hidden by a word"),
        pytest.param("auto", "", "0,1", "", id="auto with a build for the CPU"),
        pytest.param("cpu", "13.0", "0,1", "", id="asked for the CPU"),
    ],
)
def test_gpus_that_torch_cannot_open_are_a_refusal_that_names_them(
    device: Literal["auto", "cpu", "cuda"],
    build: str,
    shown: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(torch.version, "cuda", build or None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    if said:
        with pytest.raises(ConfigError, match=said):
            has_cuda(device, "rollout")
    else:
        assert not has_cuda(device, "rollout")
        assert ("shows the GPUs 0, 1, but torch is a build for the CPU" in caplog.text) == (
            not build
        )


def test_one_line_tells_what_a_process_computes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    build = f"torch {torch.__version__}"
    on_cpu = start_line("cpu" if torch.cuda.is_available() else "auto", "vllm engine", "")
    line = rf"cpu \(\w+\), {torch.get_num_threads()} threads; {re.escape(build)}; vllm engine; \d+\.\d\d GiB resident"
    assert re.fullmatch(line, on_cpu), on_cpu
    given = {
        "is_available": True,
        "memory_allocated": 3 << 30,
        "memory_reserved": 7 << 29,
        "get_device_name": "H100",
    }
    for name, value in given.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(cuda, "driver", lambda: "580.65")
    said = f"cuda:1, H100; driver: 580.65; {build}, CUDA 13.0; rank 1 of 2; 3.00 GiB allocated, 3.50 reserved on it; "
    assert start_line("cuda:1", "rank 1 of 2").startswith(said)
    assert start_line("auto").startswith("cuda:0, H100")
    assert start_line("cpu").startswith("cpu (")
    monkeypatch.delitem(sys.modules, "torch")
    assert start_line("auto", "verifier engine").startswith(
        "no device: torch is not loaded; verifier engine; "
    )
