"""Hub names without a network: a cache as the hub's client lays it out, and the message where there is none."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from prefixrl.common.config.load import load
from prefixrl.common.config.prompting import AdapterConfig, TargetConfig
from prefixrl.common.host.hub import TOKENIZER_FILES, cached_file, model_folder
from prefixrl.common.prompts.rendering import Renderer, texts_of
from prefixrl.common.run.digests import tokenizer_digests
from prefixrl.deploy.runs.show import prompt_lines
from support.models.vllm_world import EXAMPLE

ASK = """
import sys
from prefixrl.common.run.digests import model_digests
from prefixrl.common.errors import DataError
from prefixrl.common.host.hub import model_folder
from prefixrl.common.prompts.rendering import Renderer
try:
    folder = model_folder(sys.argv[1])
    print(model_digests(folder) == model_digests(sys.argv[2]), sorted(Renderer(folder, 100).stop_tokens))
except DataError as error:
    print("error:", error)
"""
REVISION = "0123456789abcdef0123456789abcdef01234567"


def ask(cache: Path, model: str) -> str:
    """In a process of its own: the client reads its environment once."""
    environment = os.environ | {"HF_HOME": str(cache), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", ASK, model, str(EXAMPLE / "adapter")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """The example's adapter as the hub's `someone/adapter`."""
    repository = tmp_path / "hub" / "models--someone--adapter"
    shutil.copytree(EXAMPLE / "adapter", repository / "snapshots" / REVISION)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(REVISION)
    return tmp_path


@pytest.mark.slow
def test_a_cached_hub_name_is_its_snapshot_with_the_same_digests_and_stop_tokens(
    cache: Path,
) -> None:
    told = ask(cache, "someone/adapter")
    assert told == ask(cache, str(EXAMPLE / "adapter"))
    assert told.startswith("True [")


@pytest.mark.slow
def test_a_name_that_nobody_has_is_one_message_with_the_remedy(cache: Path) -> None:
    told = ask(cache, "someone/else")
    assert told.startswith("error: model 'someone/else' is no folder here (")
    assert "HF_TOKEN" in told


def test_where_weights_are_elsewhere_a_snapshot_without_them_is_enough(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def snapshot(model: str, allow_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        return str(cache)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert model_folder("someone/adapter", needs_weights=False) == str(cache)
    assert model_folder("someone/adapter") == str(cache)
    without, whole = asked
    assert set(whole) - set(without) == {"*.safetensors"}
    (weights,) = cache.rglob("model.safetensors")
    weights.unlink()
    assert Renderer(str(weights.parent), 100).stop_tokens
    assert tokenizer_digests(weights.parent) == tokenizer_digests(EXAMPLE / "adapter")


def test_what_shows_prompts_or_cuts_openings_fetches_no_weights(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, tuple[str, ...]]] = []
    (folder,) = (cache / "hub/models--someone--adapter/snapshots").iterdir()

    def snapshot(model: str, allow_patterns: list[str]) -> str:
        asked.append((model, tuple(allow_patterns)))
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    models = {"adapter": AdapterConfig(model="a/adapter"), "target": TargetConfig(model="a/target")}
    config = load(EXAMPLE / "run.toml").model_copy(update=models)
    assert list(prompt_lines(config, "sum 3 1 4", ""))
    assert texts_of(config, "scorer").stop_tokens
    assert asked == [(f"a/{name}", TOKENIZER_FILES) for name in ("adapter", "target", "target")]


def test_of_a_folder_of_another_host_no_file_is_here(tmp_path: Path) -> None:
    assert cached_file(str(tmp_path / "elsewhere" / "adapter"), "config.json") is None
    assert (
        cached_file(str(EXAMPLE / "adapter"), "config.json") == EXAMPLE / "adapter" / "config.json"
    )
