"""One thread per process, no hub, property tests that say the same thing twice, and `benchmarks` for who tests it."""

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

# Set before anything imports torch: on few cores two threads per process are slower than one.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
from hypothesis import HealthCheck, settings

# No deadline: a busy machine is not a failure. Derandomised: a change is red or green, never both.
settings.register_profile(
    "prefixrl",
    max_examples=int(os.environ.get("PREFIXRL_EXAMPLES", "30")),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("prefixrl")

# It lies beside the packages and is not installed: found by its path, so that the root stays off sys.path.
_FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"
_SPEC = importlib.util.spec_from_file_location(
    "benchmarks", _FOLDER / "__init__.py", submodule_search_locations=[str(_FOLDER)]
)
assert _SPEC is not None and _SPEC.loader is not None
sys.modules["benchmarks"] = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(sys.modules["benchmarks"])


@pytest.fixture(autouse=True)
def own_host(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test shares no staged weights with the one before."""
    monkeypatch.setattr("prefixrl.rollout.host.SHARED_MEMORY", tmp_path_factory.mktemp("host"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take minutes first.

    One of them begun last would keep one process busy while the other has nothing to do.
    """
    items.sort(key=lambda item: not {"e2e", "vllm"} & set(item.path.parts))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if os.environ.get("PREFIXRL_NO_VLLM") == "1":
        terminalreporter.write_line(
            "PREFIXRL_NO_VLLM=1: the tests of the vLLM engine were turned off"
        )
    figures = [
        text
        for done in terminalreporter.stats.get("passed", [])
        for name, text in done.user_properties
        if name == "figure" and done.when == "call"
    ]
    if figures:
        terminalreporter.section("figures")
        for line in figures:
            terminalreporter.write_line(line)
