"""The `[launch]` section: how many processes run on one machine, and where."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from prefixrl.common.config.section import NonNegative, Positive, PositiveFloat, Section


def _one_each(given: Any) -> Any:
    """Read `[0, 1]` as `[[0], [1]]`: a process with one GPU."""
    return [[each] if isinstance(each, int) else each for each in given] if isinstance(given, list) else given


Gpus = Annotated[tuple[NonNegative, ...], Field(strict=False)]
PerProcess = Annotated[tuple[Gpus, ...], BeforeValidator(_one_each), Field(strict=False)]


class DevicesConfig(Section):
    """GPUs of the processes on this machine, as numbers from 0; what is absent is dealt out."""

    learner: Gpus = ()
    """One per rank."""
    rollout: PerProcess = ()
    """Per rollout its GPUs: `[0, 1]` is one each, `[[0, 1]]` two for one."""
    scorer: PerProcess = ()
    """For each scorer the numbers of its GPUs."""


class LaunchConfig(Section):
    """Processes that `prefixrl launch` starts on this machine."""

    learner_ranks: Positive = 1
    """Ranks of the learner."""
    rollouts: Positive = 1
    """Rollouts that `prefixrl launch` starts."""
    scorers: Positive = 1
    """Scorers that `prefixrl launch` starts."""
    stop_s: PositiveFloat | None = None
    """Seconds for the learner to save after Ctrl-C. Absent: 60, and more for large checkpoints."""
    stall_s: PositiveFloat = 600.0
    """Time without any result, trained iteration or published version after which the console names who holds the run
    up. Longer than one iteration trains."""
    on_stall: Literal["warn", "end"] = "warn"
    """Effect of such a stall: only words, or the end of the launch with exit code 5."""
    devices: DevicesConfig = DevicesConfig()
