"""One member for each seam of prefixrl, as a stranger writes them."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import click

from prefixrl.common.config.foreign.verifier import AnswerVerifier
from prefixrl.common.config.objectives import ObjectiveRecord
from prefixrl.common.config.run import RunConfig
from prefixrl.common.config.workers.engine_record import EngineRecord
from prefixrl.common.run.tracker import Tracker


def advantages(rewards: list[float], groups: list[int]) -> list[float]:
    """Return (reward - mean) / mean of each row; the mean is that of the row's group."""
    by_group: dict[int, list[float]] = defaultdict(list)
    for reward, group in zip(rewards, groups, strict=True):
        by_group[group].append(reward)
    means = {group: sum(members) / len(members) for group, members in by_group.items()}
    return [
        (reward - means[group]) / means[group] if means[group] else 0.0
        for reward, group in zip(rewards, groups, strict=True)
    ]


MAXRL = ObjectiveRecord(advantage="(r_i - mean r) / mean r", function=advantages)


def load(model: str, role: str, config: RunConfig) -> Any:
    """Load the embedded engine under another name."""
    from prefixrl.common.engines.embedded.load import load_embedded

    engine = load_embedded(model, role, config)
    engine.name = "counted"
    engine.about = f"limit {config.engine_section(role).engine_options['limit']}"
    return engine


COUNTED = EngineRecord(make="prefixrl_extras:load")


def has_same_end(question: str, text: str, gold: str) -> float:
    """Return 1 for an answer that ends with the gold answer in a box."""
    return float(text.rstrip().endswith(f"\\boxed{{{gold}}}"))


SAME_END = AnswerVerifier("same_end", has_same_end)


def brevity(question: str, text: str, gold: str) -> float:
    """Return more for a shorter answer."""
    return 1.0 / (1 + len(text))


class Lines:
    """A file with a line for each iteration."""

    def __init__(self, directory: Path, options: dict[str, str]) -> None:
        self._path = directory / options["file"]

    def write(self, lines: Any) -> None:
        """Add iterations and rewards."""
        with self._path.open("a") as file:
            for line in lines:
                file.write(f"{line.iteration} {line.figures['reward']}\n")

    def samples(self, samples: Any) -> None:
        """Add the number of samples."""
        with self._path.open("a") as file:
            file.write(f"samples {len(samples)}\n")

    def close(self) -> None:
        """Add the end."""
        with self._path.open("a") as file:
            file.write("end\n")


LINES = Tracker(open=Lines)


@click.command()
def hello() -> None:
    """Greet."""
    click.echo("hello from a package")
