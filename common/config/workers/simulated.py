"""The engine without a model, for load tests and sizing: its record and `[simulated]`."""

from typing import ClassVar

from prefixrl.common.config import section as bounds
from prefixrl.common.config.section import NonNegativeFloat, Positive, PositiveFloat, Section
from prefixrl.common.config.workers.engine_record import EngineRecord

SIMULATED = EngineRecord(
    make="prefixrl.common.engines.simulated:load_simulated",
    takes_options=False,
    holds_weights=False,
    has_tokenizer=False,
    is_bitwise=True,
    shares_runs=False,
)


class SimulatedConfig(Section):
    """Declared latencies of the `simulated` engine, for load tests and sizing only."""

    ONLY_IN_MODE: ClassVar[bounds.OnlyWith] = dict.fromkeys(
        ("completion_s", "completion_sigma", "completion_limit_s", "accuracy"),
        (("prefix",), "its scorers run no engine"),
    )

    prefix_s: NonNegativeFloat = 0.05
    """Time of a job of prefixes."""
    completion_s: NonNegativeFloat = 0.2
    """Time of a job of completions."""
    completion_sigma: NonNegativeFloat = 0.0
    """Spread of the lognormal completion time of a row; 0 is constant."""
    completion_limit_s: PositiveFloat | None = None
    """Longest completion, as a length limit makes it. Absent: none."""
    accuracy: bounds.Fraction = 0.5
    """Share of completions with reward 1."""
    seats: Positive | None = None
    """Rows that an engine works on at once. Absent: those of four tasks."""
