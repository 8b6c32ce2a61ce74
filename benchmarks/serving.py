"""Throughput of 64 clients of `prefixrl serve`, beside `prefixrl generate` on the same problems.

The arithmetic example, untrained, greedy; per engine (transformers, vLLM) a server that runs through all rounds. Each
round, in turn: 64 clients ask one problem after the other until all 512 are answered; then `prefixrl generate` answers
the same ones with one rollout and one scorer. Two times of `generate`: the whole command, which loads the models, and
from its first line to its last, which leaves out the loading and the first block of 64.

    python -m benchmarks.serving [--quick] --json FILE
"""

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import openai

from benchmarks.results import ROOT, Figure, Report, commit, options

CLIENTS, ROUNDS, PROBLEMS = 64, 3, 512
QUICK_ROUNDS, QUICK_PROBLEMS = 1, 192
ENGINES = ("transformers", "vllm")
START_S, GENERATE_S = 200.0, 300.0
EXAMPLE = ROOT / "deploy/examples/arithmetic"
SPREAD = "least and largest value"


def main_command(*arguments: str, engine: str) -> list[str]:
    flags = [f"{role}.engine={engine}" for role in ("rollout", "scorer")] + [
        "launch.scorers=1",
        "launch.rollouts=1",
    ]
    return [
        sys.executable,
        "-m",
        "prefixrl.deploy",
        *arguments,
        *(part for each in flags for part in ("--set", each)),
    ]


def run_directory(directory: Path) -> Path:
    """The example as a learner leaves it before its first iteration."""
    from prefixrl.common.config.load import load
    from prefixrl.common.run.directory_format import write_format

    directory.mkdir()
    config = load(EXAMPLE / "run.toml").model_copy(update={"directory": str(directory)})
    write_format(directory)
    (directory / "config.json").write_text(config.model_dump_json())
    return directory


async def asked(url: str, problems: list[str]) -> dict[str, Any]:
    """All problems by 64 clients; seconds and texts."""
    texts = [""] * len(problems)
    left = iter(range(len(problems)))
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:

        async def work() -> None:
            for number in left:
                found = await client.completions.create(model="run", prompt=problems[number])
                texts[number] = found.choices[0].text

        started_s = time.monotonic()
        await asyncio.gather(*(work() for _ in range(CLIENTS)))
        return {"seconds": time.monotonic() - started_s, "texts": texts}


def generated(run: Path, problems: list[str], engine: str) -> dict[str, Any]:
    """All problems by `prefixrl generate`; seconds of all, and of what came behind the first block of lines."""
    command = main_command("generate", str(run), "--checkpoint", "0", engine=engine)
    started_s = time.monotonic()
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(
        "".join(json.dumps({"question": each}) + "\n" for each in problems).encode()
    )
    process.stdin.close()
    texts: list[str] = []
    times_s: list[float] = []
    for line in process.stdout:
        times_s.append(time.monotonic())
        texts.append(json.loads(line)["completion"])
    assert process.wait(GENERATE_S) == 0
    first = sum(each - times_s[0] < 0.01 for each in times_s)
    return {
        "seconds": time.monotonic() - started_s,
        "loaded_rate": (len(texts) - first) / (times_s[-1] - times_s[0])
        if first < len(texts)
        else None,
        "texts": texts,
    }


def measured(engine: str, folder: Path, problems: list[str], rounds: int) -> list[dict[str, Any]]:
    run, log = run_directory(folder / "run"), folder / "log"
    command = main_command("serve", str(run), "--checkpoint", "0", "--port", "0", engine=engine)
    found = []
    with log.open("wb") as file, subprocess.Popen(command, stderr=file) as server:
        try:
            deadline_s = time.monotonic() + START_S
            while "http://" not in (text := log.read_text()) or "/v1\n" not in text:
                assert server.poll() is None and time.monotonic() < deadline_s, text
                time.sleep(0.1)
            url = "http://" + text.split("http://")[1].split()[0]
            asyncio.run(asked(url, problems[:CLIENTS]))  # the first requests compile and allocate
            for _ in range(rounds):
                served = asyncio.run(asked(url, problems))
                other = generated(run, problems, engine)
                same = sum(
                    a == b for a, b in zip(served.pop("texts"), other.pop("texts"), strict=True)
                )
                found.append(
                    {
                        "served": served,
                        "generated": other,
                        "equal_answers": same,
                        "problems": len(problems),
                    }
                )
        finally:
            server.terminate()
            server.wait(60)
    return found


def figures(engine: str, rounds: list[dict[str, Any]]) -> list[Figure]:
    rates = [each["problems"] / each["served"]["seconds"] for each in rounds]
    whole = [each["problems"] / each["generated"]["seconds"] for each in rounds]
    loaded = [rate for each in rounds if (rate := each["generated"]["loaded_rate"])]
    found = []
    for name, base in (("with its start", whole), ("once loaded", loaded)):
        if not base:
            continue
        value, against = statistics.median(rates), statistics.median(base)
        found.append(
            Figure(
                name=f"{engine}: answers of 64 clients, beside generate {name}",
                unit="answers/s",
                value=value,
                n=len(rates),
                spread=(min(rates), max(rates)),
                baseline=against,
                baseline_name=f"prefixrl generate, {name}",
                ratio=value / against,
                statistic="median",
                spread_kind=SPREAD,
            )
        )
    return found


@click.command()
@options
def main(path: Path, quick: bool) -> None:
    started_s, measured_commit = time.monotonic(), commit()
    rounds, count = (QUICK_ROUNDS, QUICK_PROBLEMS) if quick else (ROUNDS, PROBLEMS)
    lines = (EXAMPLE / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    problems = [json.loads(line)["question"] for line in lines][:count]
    details: dict[str, Any] = {}
    found: list[Figure] = []
    for engine in ENGINES:
        with tempfile.TemporaryDirectory(prefix="serving-") as folder:
            details[engine] = measured(engine, Path(folder), problems, rounds)
        found += figures(engine, details[engine])
    settings = {"clients": CLIENTS, "rounds": rounds, "problems": len(problems)}
    Report("serving", quick, settings, found, details, measured_commit).finish(path, started_s)


if __name__ == "__main__":
    main()
