"""TensorBoard: event files in the run directory."""

import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from prefixrl.common.run.documents import MetricsLine, columns
from prefixrl.common.run.tracker import SampleText, Tracker
from prefixrl.deploy.track.identity import imported_package


class EventFiles:
    """Event files in the run directory."""

    def __init__(self, directory: Path) -> None:
        """Remove what an earlier tracker wrote there; raise ConfigError without the package."""
        imported_package("tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self._folder = directory / "tensorboard"
        shutil.rmtree(self._folder, ignore_errors=True)
        self._open = partial(SummaryWriter, str(self._folder))
        self._writer = self._open(purge_step=0)
        self._next = 0

    def write(self, lines: Sequence[MetricsLine]) -> None:
        """Write scalars; lines that come again take the place of the first ones."""
        if lines[0].iteration < self._next:
            self._writer.close()
            self._writer = self._open(purge_step=lines[0].iteration)
        for line in lines:
            for name, value in columns(line).items():
                self._writer.add_scalar(name, value, line.iteration)
        self._next = lines[-1].iteration + 1
        self._writer.flush()

    def samples(self, samples: Sequence[SampleText]) -> None:
        """Write samples as text."""
        for index, sample in enumerate(samples):
            answer = f"**{sample.prefix}**{sample.completion}"
            text = f"{sample.question}\n\n{answer}\n\nreward {sample.reward:g}, gold {sample.gold}"
            self._writer.add_text(f"samples/{index}", text, sample.iteration)

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


TENSORBOARD = Tracker(open=lambda directory, _: EventFiles(directory))
