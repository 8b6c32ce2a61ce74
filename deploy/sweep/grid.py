"""The sweep file: shared settings and blocks of values; a block is all their combinations.

    run = "run.toml"             the run file; both are relative to the sweep file,
    directory = "runs/sweep"     the folder of the runs: an index is the same folder wherever it is started
    [set]                        settings of every run
    [[block]]                    a list is tried value by value, anything else is one value

Runs are numbered from 0 through the blocks; in a block the last key changes fastest.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from prefixrl.common.config.foreign.files import read_toml
from prefixrl.common.config.load import load
from prefixrl.common.config.run import RunConfig
from prefixrl.common.config.section import toml
from prefixrl.common.errors import ConfigError
from prefixrl.deploy.runs.checkpoints import flat

FORM = (
    "known are the paths run and directory, shared settings as [set], and each block as [[block]]"
)
MOST_RUNS = 10_000
Values = dict[str, Any]
"""Values by the keys of a run file."""


class _SweepFile(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    run: str
    directory: str
    set: Values = {}
    block: Annotated[list[Values], Field(min_length=1)] = [{}]


@dataclass(frozen=True)
class SweptRun:
    """One run of a sweep."""

    index: int
    directory: Path
    values: Values
    """Settings of its block that differ from the settings of other runs."""
    settings: tuple[str, ...]
    """All settings in the form of `--set`, with `directory`."""


@dataclass(frozen=True)
class Sweep:
    """All runs of a sweep file."""

    file: Path
    run_file: Path
    directory: Path
    runs: tuple[SweptRun, ...]

    def at(self, index: int) -> SweptRun:
        """Return a run; raise ConfigError beyond the grid."""
        if not 0 <= index < len(self.runs):
            raise ConfigError(
                f"--index {index}: the sweep {self.file} has {len(self.runs)} runs, 0 to {len(self.runs) - 1}"
            )
        return self.runs[index]

    def config(self, run: SweptRun) -> RunConfig:
        """Return the resolved config of a run; a ConfigError names its index."""
        try:
            return load(self.run_file, run.settings)
        except ConfigError as error:
            raise ConfigError(
                f"run {run.index} of {self.file}, {_in_words(run.values)}: {error}"
            ) from None


def read(file: Path) -> Sweep:
    """Read a sweep file; raise ConfigError for a malformed file, or for two equal runs."""
    try:
        content = _SweepFile.model_validate(read_toml(file, "the sweep file"))
    except ValidationError as errors:
        first = errors.errors(include_url=False)[0]
        raise ConfigError(
            f"{file}: {'.'.join(map(str, first['loc']))}: {first['msg']}; {FORM}"
        ) from None
    if any("directory" in each for each in (content.set, *content.block)):
        raise ConfigError(
            f"{file}: directory in [set] or a block; each run has a folder of its own in {file.name}'s"
        )
    base = file.resolve().parent
    directory = (base / Path(content.directory).expanduser()).resolve()
    common = dict(flat(content.set))
    blocks = (dict(flat(block)) for block in content.block)
    combined: list[Values] = []
    for values in itertools.chain.from_iterable(map(combinations, blocks)):
        if values in combined:
            raise ConfigError(
                f"{file}: the runs {combined.index(values)} and {len(combined)} are the same, {_in_words(values)}"
            )
        if len(combined) == MOST_RUNS:
            raise ConfigError(f"{file}: more than {MOST_RUNS} runs; give fewer values")
        combined.append(values)
    runs = []
    for index, values in enumerate(combined):
        place = directory / f"{index:03d}"
        tree = {**common, **values, "directory": str(place)}
        settings = tuple(f"{key}={toml(value)}" for key, value in tree.items())
        runs.append(SweptRun(index, place, values, settings))
    return Sweep(file.resolve(), base / content.run, directory, tuple(runs))


def combinations(block: Values) -> Iterator[Values]:
    """Yield every combination of a block's values; the last key changes fastest."""
    axes = []
    for key, value in block.items():
        if value == []:
            raise ConfigError(
                f"{key} = []: no value to try; leave it out, or give [[]] for an empty list"
            )
        axes.append(value if isinstance(value, list) else [value])
    for values in itertools.product(*axes):
        yield dict(zip(block, values, strict=True))


def _in_words(values: Values) -> str:
    return (
        ", ".join(f"{key} = {toml(value)}" for key, value in values.items())
        or "without settings of its own"
    )
