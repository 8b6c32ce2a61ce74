"""`prefixrl serve` with vLLM: 64 clients at once, half of them streaming, get what each gets alone."""

import json
from pathlib import Path

import pytest

from support.paths import EXAMPLE
from support.runs.served_run import run_of, served

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(400)]

PROBLEMS = [
    json.loads(line)["question"]
    for line in (EXAMPLE / "heldout.jsonl").read_text().splitlines()[:64]
]
ENGINES = ("rollout.engine=vllm", "scorer.engine=vllm")


def test_64_clients_at_once_are_answered_by_one_vllm_per_model(tmp_path: Path) -> None:
    with served(run_of("arithmetic", tmp_path / "arithmetic"), settings=ENGINES) as server:
        actual = server.answers_at_once(PROBLEMS)
        with server.client() as client:
            alone = client.completions.create(model=server.name, prompt=PROBLEMS[::8])
        assert actual[::8] == [choice.text for choice in alone.choices]
        assert all("\\boxed{" in text for text in actual)
        server.wait_until_idle()
        server.process.terminate()
        assert server.process.wait(60) == 0, server.log.read_text()
