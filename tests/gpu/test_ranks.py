"""Learner ranks over several GPUs: at every ZeRO stage they train what one trains and publish the same."""

import time
from pathlib import Path

import pytest
import torch

from gpu.on_device import figure, of_ranks, write_report
from support.models.tiny_model import DEEPSPEED_WARNINGS, save_model

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(580), *DEEPSPEED_WARNINGS]


def test_ranks_train_what_one_rank_trains_at_every_stage(tmp_path: Path) -> None:
    devices = torch.cuda.device_count()
    if devices < 2:
        pytest.skip(f"{devices} GPU here, ranks need 2; with 8 it tries 8 too")
    started_s = time.monotonic()
    save_model(tmp_path / "adapter")
    alone, figures = of_ranks("cuda", tmp_path, 1), []
    for ranks in (each for each in (2, 8) if each <= devices):
        for stage, actual in of_ranks("cuda", tmp_path, ranks).items():
            assert actual["digest"] == alone[stage]["digest"]
            worst = max(
                abs(one - other)
                for one, other in zip(actual["losses"], alone[stage]["losses"], strict=True)
            )
            figures.append(
                figure(
                    f"{ranks} ranks, stage {stage}: largest difference from one rank", "loss", worst
                )
            )
    write_report("ranks", figures, started_s)
    assert all(each.value < 1e-3 for each in figures), figures
