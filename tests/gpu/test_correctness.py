"""On CUDA the learner takes the steps that it takes on the CPU, at every ZeRO stage and with every option."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpu.on_device import OWN, figure, losses, resumed_and_poisoned, write_report
from support.models.tiny_model import DEEPSPEED_WARNINGS, save_model
from support.paths import ROOT

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(580), *DEEPSPEED_WARNINGS]


def test_cuda_takes_the_steps_of_the_cpu(tmp_path: Path) -> None:
    started_s = time.monotonic()
    save_model(tmp_path / "adapter")
    # One process has one kind of device: its process group is gloo's or NCCL's.
    paths = os.pathsep.join([str(ROOT / "tests"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    hidden = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": paths}
    subprocess.run(
        [sys.executable, "-m", "gpu.on_device", "cpu", str(tmp_path)],
        env=os.environ | hidden,
        check=True,
    )
    expected, actual = (
        json.loads((tmp_path / "losses.json").read_text()),
        losses("cuda", tmp_path / "adapter"),
    )
    for name, values in actual.items():
        rel, least = (0.1, 5e-3) if "bfloat16" in name else (1e-3, 1e-4)  # some losses are near 0
        assert values == pytest.approx(expected[name], rel=rel, abs=least), name
        if name not in OWN:
            assert values == pytest.approx(actual["stage 0"], rel=1e-3, abs=1e-4), name
    difference, is_dropped = resumed_and_poisoned("cuda", tmp_path / "adapter", tmp_path / "saved")
    assert difference < 1e-5 and is_dropped
    worst = {
        name: max(abs(one - other) for one, other in zip(values, expected[name], strict=True))
        for name, values in actual.items()
    }
    figures = [
        figure(f"largest difference from the CPU: {name}", "loss", value)
        for name, value in worst.items()
    ]
    write_report("correctness", figures, started_s)
