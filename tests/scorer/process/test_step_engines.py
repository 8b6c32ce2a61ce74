"""The engine of a process reward model: built-in ones, and one of a package."""

from pathlib import Path

import pytest

from prefixrl.common.config.workers.process_model import ProcessModelConfig
from prefixrl.common.errors import ConfigError
from prefixrl.scorer.process.step_scoring import load_scoring
from support.models.process_models import settings_of
from support.packages import installed

ENTRY_POINTS = """
[prefixrl.engines]
lengths = step_engine:LENGTHS
decoder = step_engine:DECODER
broken = step_engine:BROKEN
"""
SOURCE = """
from prefixrl.common.config.workers.engine_record import EngineRecord

class Lengths:
    most_positions = None

    def __init__(self, folder, settings, form):
        self.folder = folder

    def scores(self, rows):
        return [[1 / row.tokens.size for _ in row.tag_positions] for row in rows]

LENGTHS = EngineRecord(make="", step_model="step_engine:Lengths")
DECODER = EngineRecord(make="step_engine:load")
BROKEN = EngineRecord(make="", step_model="step_engine:Missing")
"""


def test_an_engine_of_a_package_scores_steps(step_tag_model: Path, tmp_path: Path) -> None:
    with installed(tmp_path, "step_engine", ENTRY_POINTS, SOURCE):
        settings = settings_of(step_tag_model, format="step_tag", engine="lengths")
        scoring = load_scoring(settings, str(step_tag_model))
        assert type(scoring._model).__name__ == "Lengths"
        assert settings.device_share is None


@pytest.mark.parametrize(
    ("engine", "complaint"),
    [
        pytest.param("decoder", "this engine scores no steps; use one of vllm, trans", id="other"),
        pytest.param("broken", "step_engine:Missing cannot be loaded: module", id="broken"),
    ],
)
def test_an_engine_that_cannot_score_is_refused_by_name(
    engine: str, complaint: str, step_tag_model: Path, tmp_path: Path
) -> None:
    with installed(tmp_path, "step_engine", ENTRY_POINTS, SOURCE):
        settings = settings_of(step_tag_model, format="step_tag", engine=engine)
        with pytest.raises(ConfigError, match=f'scorer.prm.engine = "{engine}": .*{complaint}'):
            load_scoring(settings, str(step_tag_model))


@pytest.mark.parametrize("engine", ["simulated", "openai", "auto", "vlm"])
def test_a_run_file_names_an_engine_that_scores_steps(engine: str) -> None:
    with pytest.raises(ValueError, match="no engine of a process reward model; allowed are vllm"):
        ProcessModelConfig(model="m", format="step_tag", engine=engine)
