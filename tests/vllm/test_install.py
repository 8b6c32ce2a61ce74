"""Weights in a running vLLM.

Proved by the probe after every installation, and the probe sees it where they are not there.
"""

import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from benchmarks.snapshots import snapshot_of
from prefixrl.common.engines.vllm.engine import VllmEngine
from prefixrl.common.weights.delta import write_delta
from prefixrl.common.weights.folders import prune
from prefixrl.common.weights.snapshot import describe, write_snapshot
from prefixrl.rollout.weights import Fetcher
from support.fakes import trained_further, wait_until, weight_server
from support.keys import source
from support.models import vllm_world as world
from support.models.engine_jobs import finish
from support.models.tiny_model import whole
from support.models.versioned import forward, fresh_model, perturbed
from support.models.vllm_world import EXAMPLE
from support.runs.run_helper import wait_for

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # of vLLM and what it imports
]

ADAPTER = EXAMPLE / "adapter"
PROBE = [whole(world.probe())]
UPDATES = 20


@pytest.fixture(scope="module")
def engine(vllm_is_there: None) -> Iterator[VllmEngine]:
    with world.started(ADAPTER) as engine:
        yield engine


def probe_difference(engine: VllmEngine, tensors: dict[str, torch.Tensor]) -> float:
    expected = forward(fresh_model(ADAPTER, tensors), world.probe(), 1.0)
    return float(np.abs(engine.score(PROBE) - expected).max())


def test_weights_at_the_start_are_the_folders_by_the_learners_names(engine: VllmEngine) -> None:
    initial = world.reference(ADAPTER).weights()
    assert describe(0, engine.weights()).digest == describe(0, initial).digest
    assert "lm_head.weight" not in engine.weights(), "tied weights stand there once"


@pytest.mark.proof
def test_every_one_of_twenty_updates_is_proved_by_the_probe(
    engine: VllmEngine, report: Callable[[str], None]
) -> None:
    initial = world.reference(ADAPTER).weights()
    before = engine.score(PROBE)
    actual = []
    for update in range(UPDATES):
        tensors = perturbed(initial, update)
        engine.install(snapshot_of(1, tensors))
        actual.append(probe_difference(engine, tensors))
        now = engine.score(PROBE)
        assert np.abs(now - before).max() > 0.1, "the probe must tell versions apart"
        before = now
    report(f"{UPDATES} updates: largest probe difference {max(actual):.2g}")
    assert max(actual) < world.config().probe_tolerance


@pytest.mark.proof
def test_what_is_sampled_after_an_update_is_of_the_new_weights(
    engine: VllmEngine, report: Callable[[str], None]
) -> None:
    initial = world.reference(ADAPTER).weights()
    job = world.job("a", tokens=80)  # several blocks long: the cache has them after the first time
    finish(engine, job)
    tensors = perturbed(initial, 77)
    engine.install(snapshot_of(1, tensors))
    rows = finish(engine, job)["a"].rows
    actual = world.differences(fresh_model(ADAPTER, tensors), job.rows, rows, 0.7)
    report(
        f"sampled after an update: |difference| mean {actual.mean():.2g}, max {actual.max():.2g}"
    )
    assert actual.max() < 1e-3


def test_installed_weights_are_read_back_and_are_copies(engine: VllmEngine) -> None:
    tensors = perturbed(world.reference(ADAPTER).weights(), 5)
    digest = describe(0, tensors).digest
    snapshot = snapshot_of(1, tensors)
    engine.install(snapshot)
    assert describe(0, engine.weights()).digest == digest
    for tensor in engine.weights().values():
        tensor.zero_()
    assert describe(0, engine.weights()).digest == digest
    before = engine.score(PROBE)
    for tensor in snapshot.tensors.values():
        tensor.zero_()  # as when the memory serves another version
    assert np.array_equal(engine.score(PROBE), before)


@pytest.mark.proof
def test_weights_that_do_not_fit_are_refused_and_change_nothing(engine: VllmEngine) -> None:
    before = engine.score(PROBE)
    tensors = perturbed(world.reference(ADAPTER).weights(), 6)
    name = "model.norm.weight"
    missing = {key: tensor for key, tensor in tensors.items() if key != name}
    for wrong, message in (
        (missing, "differ in names.*model.norm.weight"),
        (tensors | {"model.extra": torch.zeros(1)}, "differ in names.*model.extra"),
        (tensors | {name: torch.zeros(3)}, r"model.norm.weight has shape \(3,\).* is \(64,\)"),
        (tensors | {name: tensors[name].bfloat16()}, r"model.norm.weight has dtype torch.bfloat16"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.install(snapshot_of(1, wrong))
    assert np.array_equal(engine.score(PROBE), before)


def test_after_fifty_updates_by_delta_the_engine_holds_the_published_bits(
    engine: VllmEngine, tmp_path: Path, report: Callable[[str], None]
) -> None:
    """vLLM's own parameters are fused and packed: the digest is of what they were loaded from, the probe is theirs."""
    published = world.reference(ADAPTER).weights()
    actual = []
    with weight_server(tmp_path) as (endpoint, _):
        fetcher = Fetcher(source(endpoint))
        for version in range(1, 52):
            published = trained_further(published, version)
            manifest = describe(version, published)
            write_snapshot(tmp_path, manifest, published)
            if version > 1:
                assert write_delta(tmp_path, version - 1, version)
            prune(tmp_path, {version - 1, version})
            fetcher.want_version(version, "")
            staged = wait_until(fetcher.take_snapshot, f"version {version}")
            engine.install(staged)
            assert describe(0, engine.weights()).digest == manifest.digest == staged.manifest.digest
            if version % 10 == 1:
                actual.append(probe_difference(engine, published))
    assert (fetcher.counts.full, fetcher.counts.delta) == (1, 50)
    report(f"50 updates by delta: probe difference at most {max(actual):.2g}")
    assert max(actual) < 1e-3


FAULTS = {
    "nothing is copied": world.NOTHING_IS_COPIED,
    "the tied head is not packed again": "plugin.pack_again = lambda model: None",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_engine_that_does_not_hold_the_weights_fails_the_probe(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, report: Callable[[str], None]
) -> None:
    """The broker refuses it: it admits a worker only with a difference within rollout.probe_tolerance."""
    world.plant(tmp_path, FAULTS[fault])
    monkeypatch.syspath_prepend(tmp_path)  # a spawned process begins with its parent's path
    tensors = perturbed(world.reference(ADAPTER).weights(), 9)
    with world.started(ADAPTER) as broken:
        initial = world.reference(ADAPTER).weights()
        assert probe_difference(broken, initial) < 1e-3
        broken.install(snapshot_of(1, tensors))
        difference = probe_difference(broken, tensors)
    report(f"when {fault}: probe difference {difference:.2g}")
    assert difference > 100 * world.config().probe_tolerance


@pytest.mark.proof
def test_nothing_of_vllm_outlives_a_killed_worker() -> None:
    """SIGKILL gives nobody a chance to tell vLLM's processes, which hold the device's memory."""
    script = f"""
        import sys, time
        sys.path.insert(0, {str(Path(__file__).resolve().parents[1])!r})
        from support.models import vllm_world as world
        if __name__ == "__main__":
            with world.started(world.EXAMPLE / "adapter"):
                print("up", flush=True)
                time.sleep(600)
    """
    worker = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert worker.stdout is not None
        assert "up\n" in iter(worker.stdout.readline, "")
        family = psutil.Process(worker.pid).children(recursive=True)
        assert any("EngineCore" in " ".join(each.cmdline()) for each in family)
    finally:
        worker.send_signal(signal.SIGKILL)
        worker.wait()
        worker.stdout.close()
    wait_for(lambda: not [each for each in family if each.is_running()], "the end of all children")
