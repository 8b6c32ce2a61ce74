"""The target served by a real vLLM server.

The same tokens as in process, and a run whose server is killed loses nothing.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from prefixrl.common.config.load import load
from prefixrl.common.config.run import RunConfig
from prefixrl.common.engines.interface.base import Engine, Job, JobResult
from prefixrl.common.prompts.rendering import Renderer
from prefixrl.common.seeds import row_uniforms
from prefixrl.common.wire.messages.groups import Sampling
from prefixrl.scorer.served.engine import OpenAIEngine
from support.models import vllm_world as world
from support.models.process_models import SEPARATOR, loaded, marked
from support.models.vllm_world import END, EXAMPLE
from support.paths import EXAMPLES
from support.runs import run_helper
from support.runs.run_helper import losses

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),  # of vLLM and what it imports
]

TARGET = EXAMPLE / "target"
START_S = 240.0
ITERATIONS = 4
TOLERANCE = 1e-5
"""Largest difference of a loss that rounding makes in so few steps."""
NEW = 20


class Served:
    """`vllm serve` of the example's target on a port that it keeps."""

    def __init__(self, log: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/v1"
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [
            sys.executable,
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--model",
            str(TARGET),
            "--served-model-name",
            "target",
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
            "--enforce-eager",
            # vLLM's kernels in bfloat16 need instructions that not every CPU has.
            "--dtype",
            "float32",
            "--kv-cache-memory-bytes",
            str(128 * 2**20),
            "--block-size",
            str(world.BLOCK_TOKENS),
            # A seeded row whose prompt is computed in pieces ends vLLM's core on a CPU.
            "--no-enable-chunked-prefill",
            "--max-num-seqs",
            "128",
            "--disable-uvicorn-access-log",
        ]
        environment = {
            **os.environ,
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment, start_new_session=True
            )

    def wait(self) -> None:
        run_helper.wait_for(
            self._is_up, f"a start of the server, whose log is {self._log}", START_S
        )

    def _is_up(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self._log.read_text()[-3000:]
        try:
            with urllib.request.urlopen(f"{self.url}/models", timeout=5) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False

    def kill(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


@pytest.fixture(scope="module")
def served(vllm_is_there: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    server = Served(tmp_path_factory.mktemp("served") / "server.log")
    server.start()
    try:
        server.wait()
        yield server
    finally:
        server.kill()


def config(served: Served, *settings: str) -> RunConfig:
    address = ("scorer.engine=openai", f"scorer.openai.url={served.url}")
    return load(run_helper.RUN_FILE, (*address, *settings))


def continued(engine: Engine, job: Job) -> JobResult:
    engine.submit(job)
    deadline_s = time.monotonic() + 120
    while time.monotonic() < deadline_s:
        for result in engine.step(0.05):
            return result
    raise AssertionError("the job did not finish within 120 s")


def openings(renderer: Renderer, temperature: float) -> Job:
    """Questions of the example as the target sees them, each with an opening to go on with."""
    lines = (EXAMPLE / "heldout.jsonl").read_text(encoding="utf-8").splitlines()[:8]
    questions = [json.loads(line)["question"] for line in lines]
    prefixes = (EXAMPLE / "openings.txt").read_text(encoding="utf-8").splitlines()
    rows = tuple(
        np.concatenate([renderer.prompt(question), renderer.encode(prefix)])
        for question in questions
        for prefix in ("", *prefixes)
    )
    draws = row_uniforms(7, "completion", len(rows), NEW)
    return Job(
        "a",
        rows,
        draws,
        Sampling(temperature=temperature, max_new_tokens=NEW),
        renderer.stop_tokens,
    )


@pytest.mark.parametrize("prompt", ["tokens", "text"])
def test_greedy_completions_go_on_with_the_prefix_and_are_those_of_the_target_in_process(
    served: Served, prompt: str
) -> None:
    renderer = Renderer(str(TARGET), 64)
    each = openings(renderer, 0.0)
    expected = continued(world.reference(TARGET), each).rows
    settings = config(served, f"scorer.openai.prompt={prompt}")
    engine = OpenAIEngine(str(TARGET), settings, lambda: None)
    try:
        given = continued(engine, each).rows
        usage = engine.usage
    finally:
        engine.close()
    assert [row.tokens.tolist() for row in given] == [row.tokens.tolist() for row in expected]
    assert [row.finish for row in given] == [row.finish for row in expected]
    assert {row.finish for row in given} >= {"eos"}
    assert any(row.tokens[-1] == END for row in given)
    trial = 1
    assert usage.requests == len(each.rows) + trial and usage.retries == 0
    assert usage.completion_tokens == sum(row.tokens.size for row in given) + trial
    assert usage.prompt_tokens == sum(row.size for row in each.rows) + trial


def test_seeds_repeat_a_row_and_tell_rows_apart(served: Served) -> None:
    renderer = Renderer(str(TARGET), 64)
    each = openings(renderer, 1.5)
    each = Job("a", (each.rows[0],) * 16, each.uniforms[:16], each.sampling, frozenset())
    engine = OpenAIEngine(str(TARGET), config(served), lambda: None)
    try:
        first, again = (
            [row.tokens.tolist() for row in continued(engine, each).rows] for _ in range(2)
        )
    finally:
        engine.close()
    assert first == again
    assert len({tuple(row) for row in first}) > 4


def test_scorers_that_hold_the_process_reward_model_alone_judge_what_the_served_target_writes(
    served: Served, tmp_path: Path
) -> None:
    """Target and process reward model are processes of their own, each as many as one likes."""
    folder = EXAMPLES / "openr_math/prm"
    keys = (
        f"model={folder}",
        "format=step_tag",
        f"separator='{SEPARATOR}'",
        "aggregate=min",
        "max_tokens=128",
    )
    settings = (
        *run_helper.SMALL,
        "algorithm.iterations=3",
        "scorer.keep_completions=true",
        "launch.scorers=2",
    )
    settings += ("scorer.engine=openai", f"scorer.openai.url={served.url}", "scorer.prm.device=cpu")
    with run_helper.launched(tmp_path, *settings, *(f"scorer.prm.{key}" for key in keys)) as run:
        summary = run_helper.finish(run, tmp_path, timeout_s=400)
    run_helper.check_books(summary, tmp_path)
    assert summary["engine"]["scorer"] == "openai" and summary["endpoint"]["requests"] > 0
    form, model = loaded(folder, "step_tag")
    rows = [
        (line["question"], row) for line in run_helper.inspect(tmp_path) for row in line["rows"]
    ]
    assert {each["scorer"] for each in run_helper.inspect(tmp_path)} <= {"scorer-0", "scorer-1"}
    for question, row in rows[:64]:
        scores = model.scores([marked(form, question, row["completion"])])[0]
        assert row["process"]["scores"] == pytest.approx(scores, abs=1e-5)
        assert row["reward"] == pytest.approx(min(scores), abs=1e-5)


def test_a_run_whose_server_is_killed_ends_as_one_with_the_target_in_process(
    served: Served, tmp_path: Path
) -> None:
    """Synchronous and greedy, so that both runs are one: every prefix, reward and accuracy, and every step's losses.

    Their weights differ by rounding: which rows a forward of the rollout has depends on when they came.
    """
    same = (
        *run_helper.SMALL,
        f"algorithm.iterations={ITERATIONS}",
        "algorithm.max_staleness=0",
        "scorer.temperature=0",
        "evaluation.problems=32",
        "launch.scorers=1",
        "broker.silence_s=30",
    )
    address = ("scorer.engine=openai", f"scorer.openai.url={served.url}")
    prices = ("scorer.openai.prompt_price=1", "scorer.openai.completion_price=2")
    alone, apart = tmp_path / "alone", tmp_path / "apart"
    with (
        run_helper.launched(alone, *same, "scorer.engine=transformers") as in_process,
        run_helper.launched(apart, *same, *address, *prices) as run,
    ):
        run_helper.wait_for(lambda: run_helper.trained_iterations(apart) >= 1, "an iteration", 240)
        served.kill()
        run_helper.wait_for(
            lambda: "waiting for http" in _scorer_state(apart), "a scorer that waits", 120
        )
        served.start()
        summary = run_helper.finish(run, apart, timeout_s=400)
        expected = run_helper.finish(in_process, alone, timeout_s=240)
    run_helper.check_books(summary, apart)
    assert summary["groups"]["trained"] == summary["groups"]["issued"] == ITERATIONS * 16
    assert not summary["losses"] and not summary["row_errors"]
    assert summary["engine"]["scorer"] == "openai"
    assert summary["accuracy"] == expected["accuracy"]
    assert judged(apart) == judged(alone)
    assert trained(apart) == trained(alone)
    steps = zip(losses(apart), losses(alone), strict=True)
    assert (
        max(abs(theirs[name] - mine[name]) for theirs, mine in steps for name in mine) <= TOLERANCE
    )
    assert summary["accuracy_truncated"] == expected["accuracy_truncated"]
    spent = summary["endpoint"]
    assert spent["retries"] > 0 and spent["requests"] > ITERATIONS * 16 * 8
    cost = (spent["prompt_tokens"] + 2 * spent["completion_tokens"]) / 1e6
    assert spent["cost"] == pytest.approx(cost) and cost > 0
    assert expected["endpoint"] is None


def judged(directory: Path) -> dict[str, list[tuple[str, str, float]]]:
    """Every evaluated text with its reward, by evaluation."""
    results = {}
    for path in sorted((directory / "evaluations").glob("*.jsonl")):
        rows = sorted(map(json.loads, path.read_text().splitlines()), key=lambda r: r["prompt_id"])
        results[path.name] = [(row["prefix"], row["completion"], row["reward"]) for row in rows]
    assert len(results) > 8 and all(results.values())
    return results


def trained(directory: Path) -> list[tuple[int, str, list[list[int]], list[float]]]:
    """Every trained group with its prefixes and rewards."""
    return sorted(
        (
            line["seq"],
            line["prompt_id"],
            [row["prefix_ids"] for row in line["rows"]],
            [r["reward"] for r in line["rows"]],
        )
        for line in run_helper.inspect(directory)
    )


def _scorer_state(directory: Path) -> str:
    return " ".join(each["state"] for each in run_helper.status(directory)["workers"])
