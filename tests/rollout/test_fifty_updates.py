"""Fifty versions pulled as deltas from a real weight server leave the published parameters in the engine."""

from pathlib import Path

import pytest
import torch

from prefixrl.common.engines.embedded.continuous import TransformersEngine
from prefixrl.common.weights.delta import write_delta
from prefixrl.common.weights.folders import prune
from prefixrl.common.weights.snapshot import describe, write_snapshot
from prefixrl.rollout.weights import Fetcher
from support.fakes import trained_further, wait_until, weight_server
from support.keys import source
from support.paths import EXAMPLE

ADAPTER = EXAMPLE / "adapter"
UPDATES = 50


@pytest.mark.slow
def test_after_fifty_deltas_the_engine_holds_the_published_bits(tmp_path: Path) -> None:
    for dtype in ("bfloat16", "float32"):
        engine = TransformersEngine(str(ADAPTER), "cpu", dtype, 1)
        published = {name: tensor.clone() for name, tensor in engine.weights().items()}
        folder = tmp_path / dtype
        with weight_server(folder) as (endpoint, _):
            fetcher = Fetcher(source(endpoint))
            for version in range(1, UPDATES + 2):
                published = trained_further(published, version)
                manifest = describe(version, published)
                write_snapshot(folder, manifest, published)
                if version > 1:
                    assert write_delta(folder, version - 1, version)
                prune(folder, {version - 1, version})
                fetcher.want_version(version, "")
                staged = wait_until(fetcher.take_snapshot, f"version {version}")
                engine.install(staged)
                assert engine.digest() == manifest.digest == staged.manifest.digest
        assert (fetcher.counts.full, fetcher.counts.delta) == (1, UPDATES)
        for name, tensor in engine.weights().items():
            assert tensor.dtype == published[name].dtype and torch.equal(tensor, published[name])
