"""`prefixrl serve` as its users have it: a process, and the run of an example, untrained, behind it."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import openai

from prefixrl.common.config.load import load
from prefixrl.common.run.directory_format import write_format
from support.fakes import end, wait_until
from support.paths import EXAMPLES

START_S = 240.0


@dataclass
class ServedRun:
    """A server that answers."""

    process: "subprocess.Popen[bytes]"
    log: Path
    url: str
    name: str

    @property
    def port(self) -> int:
        return int(self.url.split(":")[2].partition("/")[0])

    def client(self, key: str = "none", **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url, api_key=key, **{"max_retries": 0, **options})

    def answers_at_once(self, problems: list[str]) -> list[str]:
        """The answers to clients that ask at the same time, every second of which streams."""

        def answer(place: int, problem: str) -> str:
            with self.client() as client:
                if place % 2 == 0:
                    completion = client.completions.create(model=self.name, prompt=problem)
                    return completion.choices[0].text
                stream = client.completions.create(model=self.name, prompt=problem, stream=True)
                return "".join(event.choices[0].text for event in stream)

        with ThreadPoolExecutor(len(problems)) as threads:
            return list(threads.map(answer, *zip(*enumerate(problems), strict=True)))

    @property
    def health(self) -> Any:
        return httpx2.get(self.url.replace("/v1", "/health")).json()

    def is_idle(self) -> bool:
        health = self.health
        return health["open_answers"] == 0 and not any(health["engine_rows"].values())

    def wait_until_idle(self) -> None:
        wait_until(self.is_idle, "an empty queue", 20.0)


def run_of(example: str, directory: Path, *settings: str) -> Path:
    """A run directory as a learner leaves it before its first iteration."""
    directory.mkdir(parents=True)
    config = load(EXAMPLES / example / "run.toml", (f"directory={directory}", *settings))
    write_format(directory)
    (directory / "config.json").write_text(config.model_dump_json())
    return directory


def serve_command(run: Path, *options: str, settings: tuple[str, ...] = ()) -> list[str]:
    """The command that serves the untrained adapter of a run on a free port."""
    flags = [flag for setting in settings for flag in ("--set", setting)]
    serve = ("serve", str(run), "--checkpoint", "0", "--port", "0")
    return [sys.executable, "-m", "prefixrl.deploy", *serve, *options, *flags]


@contextmanager
def served(
    run: Path,
    *options: str,
    settings: tuple[str, ...] = (),
    environment: dict[str, str] | None = None,
) -> Iterator[ServedRun]:
    """A server under way; it is gone afterwards."""
    log = run.parent / f"{run.name}-{time.monotonic_ns()}.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            serve_command(run, *options, settings=settings),
            stderr=file,
            env=os.environ | (environment or {}),
        )
    try:

        def url() -> str | None:
            assert process.poll() is None, log.read_text()
            match = re.search(r"iterations: (http://\S+/v1)", log.read_text())
            return match and match.group(1)

        yield ServedRun(process, log, wait_until(url, "a server that listens", START_S), run.name)
    finally:
        end(process)
