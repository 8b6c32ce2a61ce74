"""No process takes the CPU in silence on a host that shows GPUs."""

from typing import Literal

import pytest
import torch

from prefixrl.common.errors import ConfigError
from prefixrl.common.host.cuda import has_cuda


@pytest.mark.parametrize(
    ("device", "build", "shown", "said"),
    [
        (
            "auto",
            "13.0",
            "0,1",
            r'rollout.device = "auto".*\(CUDA 13.0\) opens no .* shows: 0, 1; driver: none is loaded',
        ),
        ("auto", "12.9", "GPU-5f0d,MIG-1", "shows: GPU-5f0d, MIG-1; driver"),
        ("cuda", "13.0", "", "shows: none; driver"),
        ("cuda", None, "-1", "a build for the CPU.* shows: none"),
        ("auto", "13.0", "NoDevFiles", ""),
        ("auto", None, "0,1", ""),
        ("cpu", "13.0", "0,1", ""),
    ],
)
def test_gpus_that_torch_cannot_open_are_a_refusal_that_names_them(
    device: Literal["auto", "cpu", "cuda"],
    build: str | None,
    shown: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(torch.version, "cuda", build)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    if said:
        with pytest.raises(ConfigError, match=said):
            has_cuda(device, "rollout")
    else:
        assert not has_cuda(device, "rollout")
        assert ("shows the GPUs 0, 1, but torch is a build for the CPU" in caplog.text) == (build is None)
