"""A base model as target in vLLM: what is judged ends where the turn is closed."""

from pathlib import Path

import pytest

from support.models.base_models import AS_DECLARED, base_model, check_ends, judged, run_of
from support.models.vllm_world import started
from support.paths import EXAMPLE

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # of vLLM and what it imports
]


def test_a_text_ends_at_the_closer_and_with_the_declared_stops_alone_it_would_not(
    tmp_path: Path,
) -> None:
    target = base_model(EXAMPLE / "target", tmp_path / "target")
    config = run_of(target)
    with started(target, "scorer", config) as engine:
        check_ends(judged(config, engine))
        cut = judged(run_of(target, *AS_DECLARED), engine)
    assert {verdict.finish for verdict in cut} == {"length"}
