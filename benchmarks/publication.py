"""Time that a publication takes from the learner's main thread.

A real broker and a real publisher; a model of bfloat16 weights (1 GiB; --quick: 128 MiB) that is published again and
again, a value changed each time. Each repeat measures two ways, the older one first:

    before  what release 0.1 did there: a copy in fresh memory, then `torch.isfinite` of every tensor
    now     `Publisher.publish`: sums, and a copy in memory that is used again; the rest is in its thread

Both begin when the thread has nothing to do. The snapshot on the disk is compared with the weights, bit by bit.

    python -m benchmarks.publication [--quick] --json FILE
"""

import shutil
import tempfile
import time
from pathlib import Path

import click
import torch

from benchmarks.results import Report, commit, mean_figure, options
from benchmarks.simulated import PROBE_LOGPROBS, learner, simulated_run
from benchmarks.weight_transfer import MIB, model
from prefixrl.common.weights.folders import folder
from prefixrl.learner.processes.servers import Servers

FIRST = 2
"""Publications that bring the buffers' memory: they are not counted."""


def before_s(tensors: dict[str, torch.Tensor]) -> float:
    """Seconds of release 0.1 in the main thread."""
    started_s = time.monotonic()
    copied = {name: tensor.to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    assert not [name for name, tensor in copied.items() if not torch.isfinite(tensor).all()]
    return time.monotonic() - started_s


def measure(
    size_bytes: int, repeats: int, directory: Path
) -> tuple[list[float], list[float], bool]:
    """Seconds of each way, and whether the last snapshot holds the weights bit by bit."""
    tensors = model(size_bytes)
    first = next(iter(tensors.values()))
    config = simulated_run(directory, 1, 0.01, 0.01)
    servers = Servers(config, directory / "run", 0)
    old: list[float] = []
    new: list[float] = []
    try:
        with learner(servers, config) as (_, publisher):
            for version in range(1, 1 + FIRST + repeats):
                first[version] += 1.0
                old.append(before_s(tensors))
                started_s = time.monotonic()
                publisher.publish(version, tensors.items(), PROBE_LOGPROBS, dict)
                new.append(time.monotonic() - started_s)
                publisher.flush(version)
            written = (folder(directory / "run" / "weights", version) / "weights.bin").read_bytes()
    finally:
        servers.close()
    expected = b"".join(
        bytes(tensors[name].view(torch.uint8).numpy().data) for name in sorted(tensors)
    )
    return old[FIRST:], new[FIRST:], written == expected


@click.command()
@options
def main(path: Path, quick: bool) -> None:
    """Measure and write."""
    started_s, measured = time.monotonic(), commit()
    torch.set_num_threads(1)
    size_bytes, repeats = (128 * MIB, 2) if quick else (1024 * MIB, 5)
    directory = Path(tempfile.mkdtemp(prefix="publication-"))
    try:
        old, new, is_same = measure(size_bytes, repeats, directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    assert is_same, "the snapshot differs from the weights"
    figures = [
        mean_figure("main thread's time of a publication", "s", new, old, "the release before")
    ]
    settings = {"size_bytes": size_bytes, "repeats": repeats, "not_counted": FIRST}
    details = {"now_s": new, "before_s": old, "is_snapshot_identical": is_same}
    Report("publication", quick, settings, figures, details, measured).finish(path, started_s)


if __name__ == "__main__":
    main()
