"""`prefixrl serve` with vLLM: 64 clients at once, half of them streaming, get what each gets alone."""

import asyncio
import json
from pathlib import Path

import openai
import pytest

from support.paths import EXAMPLE
from support.runs.served_run import run_of, served

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(400)]

PROBLEMS = [json.loads(line)["question"] for line in (EXAMPLE / "heldout.jsonl").read_text().splitlines()[:64]]
ENGINES = ("rollout.engine=vllm", "scorer.engine=vllm")


def test_64_clients_at_once_are_answered_by_one_vllm_per_model(tmp_path: Path) -> None:
    with served(run_of("arithmetic", tmp_path / "arithmetic"), settings=ENGINES) as server:

        async def ask(client: openai.AsyncOpenAI, number: int) -> str:
            if number % 2:
                stream = await client.completions.create(model=server.name, prompt=PROBLEMS[number], stream=True)
                return "".join([event.choices[0].text async for event in stream])
            return (await client.completions.create(model=server.name, prompt=PROBLEMS[number])).choices[0].text

        async def all_at_once() -> list[str]:
            async with server.async_client() as client:
                return await asyncio.gather(*(ask(client, number) for number in range(64)))

        found = asyncio.run(all_at_once())
        with server.client() as client:
            alone = client.completions.create(model=server.name, prompt=PROBLEMS[::8])
        assert found[::8] == [each.text for each in alone.choices]
        assert all("\\boxed{" in each for each in found)
        server.wait_until_idle()
        assert server.ended() == 0, server.log.read_text()
