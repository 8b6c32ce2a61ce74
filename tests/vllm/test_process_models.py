"""A process reward model in vLLM has the scores that it has in transformers."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.models.process_models import STEP_TAG, STEP_TAG_MODEL, TWO_CLASS, trained_two_class

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

SCORES = """
import json, sys
from pathlib import Path
from prefixrl.scorer.process.step_scoring import load_scoring
from support.models.process_models import lessons, loaded, marked, settings_of

if __name__ == "__main__":
    folder, keys = Path(sys.argv[1]), json.loads(sys.argv[2])
    settings = settings_of(folder, **keys, engine="vllm")
    settings = settings.model_copy(update={"max_tokens": settings.max_tokens - 1})
    form, reference = loaded(folder, keys["format"])
    rows = [marked(form, question, text) for question, *pair, _ in lessons("held out", 50) for text in pair]
    rows.insert(1, form.marked_text("sum 3 1", []))
    served = load_scoring(settings, str(folder))._model.scores(rows)
    print("SCORES", json.dumps([served, reference.scores(rows)]))
"""
"""In a process of its own, which ends with vLLM's."""


@pytest.mark.parametrize("keys", [STEP_TAG, TWO_CLASS], ids=["step_tag", "two_class"])
def test_both_engines_give_every_step_the_same_score(keys: dict[str, Any], tmp_path: Path) -> None:
    folder = STEP_TAG_MODEL if keys is STEP_TAG else trained_two_class(tmp_path / "model")
    (tmp_path / "run.py").write_text(SCORES)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "run.py"), str(folder), json.dumps(keys)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("SCORES")]
    served, reference = json.loads(line.removeprefix("SCORES"))
    assert served[1] == reference[1] == []
    for in_vllm, other in zip(served, reference, strict=True):
        assert in_vllm == pytest.approx(other, abs=1e-4)
    good, corrupted = (
        [scores for scores in served if scores][::2],
        [scores for scores in served if scores][1::2],
    )
    assert sum(
        min(right) > min(wrong) for right, wrong in zip(good, corrupted, strict=True)
    ) >= 0.9 * len(good)
