"""The `[data]` section: which problems a run trains and is judged on, and where they are."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from prefixrl.common.errors import ConfigError
from prefixrl.common.messages import CodeMode
from prefixrl.common.problem_sets import PROBLEM_SETS, ProblemSet
from prefixrl.common.section import Positive, PositiveFloat, Section

HUB = "hf:"
"""Begins the path of a dataset on the hub."""
TRAIN_FILE, EVAL_FILE = "data/train.jsonl", "data/eval.jsonl"
"""Where a run directory keeps the problems as they are asked."""


def _as_table(given: Any) -> Any:
    """A bare text names a problem set, or else a file, a folder or a dataset on the hub."""
    if not isinstance(given, str):
        return given
    return {"name": given} if given in PROBLEM_SETS else {"path": given}


def _as_tables(given: Any) -> Any:
    tables = given if isinstance(given, (list, tuple)) else [given]
    return tuple(_as_table(each) for each in tables)


class Source(Section):
    """Problems from one place. Columns that are not named here have their names from the problem set, else from `[data]`."""

    name: str | None = None
    """A problem set of the registry; without it the columns say what is what."""
    path: str | None = None
    """A JSONL, JSON, CSV or Parquet file, a folder of them, or hf:OWNER/NAME[@REVISION]; by default where the problem set is
    published."""
    subset: str | None = None
    """Of a folder or hub dataset: only files below a folder of this name."""
    split: str | None = None
    """Of a folder or hub dataset: train, test, train+test, …; by default the problem set's. A folder of several
    splits is refused without it."""
    where: dict[str, Annotated[tuple[str | int, ...], Field(strict=False)]] = Field(default={})
    """Only rows with one of these values in these columns: where = { level = [3, 4, 5] }."""
    without: Annotated[
        tuple[Annotated["Source", BeforeValidator(_as_table)], ...], Field(strict=False)
    ] = ()
    """Sources whose questions are left out of this one."""
    weight: PositiveFloat | None = None
    """Share of the training prompts that come from here, in proportion to the others' weights. Without weights every problem
    is as frequent as every other one."""
    suffix: str | None = None
    """Appended to every question in place of the problem set's."""
    code: CodeMode | None = None
    """In place of `data.code`."""
    id_column: str | None = None
    question_column: str | None = None
    answer_column: str | None = None
    family_column: str | None = None

    @model_validator(mode="after")
    def _is_somewhere(self) -> "Source":
        if self.name is None and self.path is None:
            raise ValueError(
                "neither a name nor a path; give name = a problem set, or path = a file, a folder or hf:OWNER/NAME"
            )
        if self.name is not None and self.name not in PROBLEM_SETS:
            raise ValueError(
                f"name = {self.name!r} is no problem set; known ones: {', '.join(PROBLEM_SETS)}. A file or folder is given "
                "as path"
            )
        return self

    @property
    def problem_set(self) -> ProblemSet | None:
        """What the registry says of it."""
        return PROBLEM_SETS[self.name] if self.name else None

    @property
    def label(self) -> str:
        """What it is called in ids, figures and messages."""
        if self.name:
            return self.name
        assert self.path is not None
        return Path(self.path.removeprefix(HUB)).name.partition(".")[0]

    def runs_programs(self, default: CodeMode) -> bool:
        """Whether some of its rows are judged by running programs, as far as is known before they are read."""
        tests = self.problem_set.tests_where if self.problem_set else None
        if self.code is not None or tests is None:
            return (self.code or default) != "none"
        column, value = tests
        return value in (self.where.get(column) or (value,))


class DataConfig(Section):
    train: Annotated[
        tuple[Source, ...], BeforeValidator(_as_tables), Field(strict=False, min_length=1)
    ]
    """The training problems: a problem set by name, a file, a folder, hf:OWNER/NAME, a table with more to say, or a list."""
    eval: Annotated[tuple[Source, ...], BeforeValidator(_as_tables), Field(strict=False)] = ()
    """Held-out problems, given in the same way."""
    paths: dict[str, str] = Field(default={})
    """Where a problem set lies on this host, by its name; without it and without a path of its own it comes from the hub."""
    epochs: Positive | None = None
    """Passes over the training problems; the last iteration may be small. With a filter every problem is tried, and the run is
    as much shorter as groups are filtered. Exclusive with `algorithm.iterations`."""
    on_bad_row: Literal["skip", "stop"] = "skip"
    """skip: a row that cannot be used is left out, named in `bad_rows.jsonl` and counted. stop: it ends the start."""
    id_column: str | None = None
    """By default `id` where a row has one, else the row's place is its id."""
    question_column: str = "question"
    answer_column: str = "answer"
    code: CodeMode = "none"
    """Programs in answers that scorers run, in a sandbox. none: nothing is run. answers: the value of an `<llm-code>` block, or
    of a function that the answer defines, is the answer. tests: the gold answer is JSON with inputs, outputs and perhaps
    fn_name, and the reward is the share of the first ten tests that the answer's program passes."""
    family_column: str | None = None
    """Column by which evaluation results are also broken down."""

    @field_validator("paths")
    @classmethod
    def _are_known(cls, paths: dict[str, str]) -> dict[str, str]:
        unknown = [name for name in paths if name not in PROBLEM_SETS]
        if unknown:
            raise ValueError(
                f"{', '.join(unknown)}: no such problem set; known ones: {', '.join(PROBLEM_SETS)}"
            )
        return paths

    @model_validator(mode="after")
    def _all_weights_or_none(self) -> "DataConfig":
        given = [source.weight for source in self.train]
        if None in given and any(given):
            raise ValueError(
                f"train has weights {given}: give every source one, or none (every problem is then as frequent as every other)"
            )
        return self

    @property
    def runs_programs(self) -> bool:
        """Whether answers to some problems are judged by running programs."""
        return any(source.runs_programs(self.code) for source in (*self.train, *self.eval))

    @property
    def weights(self) -> tuple[float, ...] | None:
        """Of the training sources in their order; None where every problem is as frequent as every other one."""
        given = tuple(source.weight for source in self.train if source.weight is not None)
        return given or None


def resolve(data: DataConfig, base: Path) -> DataConfig:
    """The section with a path in every source and absolute paths; `without` of a problem set is filled in.

    Raises:
        ConfigError: a file is not there, or a problem set is on no hub and has no path.
    """
    local = {name: _local(f"data.paths.{name}", path, base) for name, path in data.paths.items()}

    def place(source: Source, key: str) -> Source:
        known, path = source.problem_set, source.path
        if path is not None:
            path = path if path.startswith(HUB) else _local(key, path, base)
        elif known is not None:
            path = local.get(source.name or "") or local.get(known.same_files_as)
            path = path or (HUB + known.hub if known.hub else None)
        if path is None:
            raise ConfigError(
                f'{key} = {source.name!r}: no copy on the hub is known; give its path ([data.paths] {source.name} = "…")'
            )
        without = source.without
        if known is not None and not without:
            without = tuple(Source(name=name) for name in known.without)
        resolved = tuple(place(each, f"{key}.without") for each in without)
        return source.model_copy(update={"path": path, "without": resolved})

    def places(sources: Iterable[Source], key: str) -> tuple[Source, ...]:
        found = tuple(sources)
        single = len(found) == 1
        return tuple(
            place(each, key if single else f"{key}[{index}]") for index, each in enumerate(found)
        )

    return data.model_copy(
        update={
            "train": places(data.train, "data.train"),
            "eval": places(data.eval, "data.eval"),
            "paths": local,
        }
    )


def _local(key: str, name: str, base: Path) -> str:
    path = (base / os.path.expanduser(name)).resolve()
    if not path.exists():
        raise ConfigError(
            f"{key} = {name!r}: there is no such file (looked at {path}), and no problem set of that name. Known by name: "
            f"{', '.join(PROBLEM_SETS)}; a dataset on the hub is {HUB}OWNER/NAME"
        )
    return str(path)
