"""The record of an engine: its facts and functions for config, `--check`, broker and workers.

A package adds an engine by an entry point (`foreign/plugins.py`):

    [project.entry-points."prefixrl.engines"]
    my_engine = "my_package.engine:ENGINE"

    ENGINE = EngineRecord(make="my_package.engine:load")

    def load(model: str, role: str, config: RunConfig) -> AdapterEngine:   # common/engines/interface/base.py
        options = config.engine_section(role).engine_options
        ...

This file imports no engine: learner and broker read the config, too.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from prefixrl.common.config.learner import LoraConfig

AUTO = "auto"
"""Value of `engine`: the first automatic engine that fits the host (`common/engines/make.py`)."""
Role = Literal["rollout", "scorer", "process reward model"]
EngineSection = Any
"""`[rollout]` or `[scorer]`: `sections.EngineConfig`, whose file imports this one."""


@dataclass(frozen=True)
class EngineMemory:
    """Memory of an engine that takes a share of its device and divides it itself."""

    default_share: float
    share: Callable[[EngineSection], float | None]
    """The share that a section names."""
    cache_bytes: Callable[[EngineSection], int | None]
    """The size of keys and values that a section names."""
    with_share: Callable[[EngineSection, float, int | None], EngineSection]
    """Returns a section with this share and size; None leaves the size as it is."""
    seats: Callable[[EngineSection, int | None], int]
    """Rows decoded at once on a device of so many bytes, None where they are not known."""
    batch_words: Callable[[EngineSection, int], str]
    """Words for `--check` about the way in which so many rows share forwards."""
    remedy: Callable[[EngineSection, str], str]
    """Remedy, in a role, where the weights leave no room for one row."""


@dataclass(frozen=True)
class EngineRecord:
    """Facts of one engine."""

    make: str
    """`module:function` that loads it: (model folder, role, config) -> engine."""
    step_model: str = ""
    """`module:function` that loads a process reward model: (folder, `[scorer.prm]`, its form) -> `StepModel` of
    `scorer/process/step_scoring.py`. "": it scores no steps."""
    roles: tuple[Role, ...] = ("rollout", "scorer")
    """A rollout's engine has weights that can be replaced (`AdapterEngine`)."""
    package: str = ""
    """Module that must be installed; "" for none."""
    check: str = ""
    """`module:function` that says for `prefixrl doctor` what of the package works here; raises UserError."""
    is_automatic: bool = False
    """`auto` may take it."""
    needs_cuda: bool = False
    """`auto` takes it on a CUDA device only."""
    holds_weights: bool = True
    """The process loads the model's weights. Else they are elsewhere, or there is no model."""
    needs_address: bool = False
    """The run file must say where it is: a worker's `--engine` cannot name it."""
    has_tokenizer: bool = True
    """The model has a tokenizer, by which prompts are counted and texts are read."""
    takes_options: bool = True
    """`engine_options` of its section are its own; else it has keys of the run file, or no options."""
    is_bitwise: bool = False
    """With `bitwise` the rows of a task are one forward, so that no text depends on the rows beside it."""
    ends_watched_rows: bool = False
    """It ends a row as soon as the row's watch says so (`Job.watches`), as `scorer.stop_when_answered` needs it."""
    shares_runs: bool = True
    """Workers may stand beside workers with another engine: all load the target from the same files."""
    most_masked_tokens: int | None = None
    """Most tokens that it can leave out of a draw; None: any number."""
    gpus: Callable[[EngineSection], int] = lambda section: 1
    """GPUs of one engine."""
    context_tokens: Callable[[EngineSection], int | None] = lambda section: None
    """Most tokens of a row that a section names."""
    lora_objection: "Callable[[LoraConfig], str]" = lambda lora: ""
    """Why it cannot take the matrices of a LoRA run, and the remedy; "" if it can."""
    memory: EngineMemory | None = None
    """None: it holds its weights, and keys and values of the rows in its seats."""
