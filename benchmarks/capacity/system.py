"""The description of a running system: roles, times, links and costs. Plain values."""

import math
import random
from dataclasses import dataclass, replace
from typing import Literal

from prefixrl.common.engines.interface.base import room_of

Part = Literal["rollout", "scorer", "learner", "broker", "weights"]
PARTS: tuple[Part, ...] = ("rollout", "scorer", "learner", "broker", "weights")
LEAST_GROUPS = 8
"""Least batch of a system that is made smaller: hundreds of the broker's turns."""


@dataclass(frozen=True, kw_only=True)
class RowTimes:
    """Seconds that a row has a seat: lognormal, up to a limit."""

    mean_s: float = 0.0
    """Mean of the lognormal times, those above the limit included."""
    sigma: float = 0.0
    limit_s: float = math.inf

    def draw_s(self, draws: random.Random) -> float:
        """Return the seconds of one row."""
        if not self.sigma:
            return min(self.mean_s, self.limit_s)
        normal = draws.gauss(0.0, self.sigma)
        return min(self.limit_s, self.mean_s * math.exp(normal - self.sigma**2 / 2))


@dataclass(frozen=True, kw_only=True)
class Workers:
    """The workers of a role; a task is one group, whose rows take seats one by one."""

    count: int
    seats: int
    """Rows that one engine decodes at once."""
    row: RowTimes
    look_s: float = 0.0
    """Longest time for which an engine that works hears no message: of one decoding step."""
    judging_s: float = 0.0
    """Time from the end of an answer to its verdict."""

    @property
    def room(self) -> int:
        """Rows that an engine takes: half of its seats again wait."""
        return room_of(self.seats)


@dataclass(frozen=True, kw_only=True)
class WeightsPath:
    """The way of a version from the learner to the rollouts; each host pulls it once."""

    pulled_bytes: float = 0.0
    """Bytes of a version on the wire: a snapshot, a delta, or low-rank matrices."""
    hosts: int = 1
    """Hosts with rollouts."""
    server_bytes_per_s: float = math.inf
    """Rate of the weight server, or of its link, to all hosts together."""
    host_bytes_per_s: float = math.inf
    """Rate at which one host receives, checks and rebuilds."""
    writing_s: float = 0.0
    """Time of the publishing thread, from its copy to the announcement."""
    install_s: float = 0.0
    """Time of a rollout from the grant of a swap to the proof."""

    @property
    def sending_s(self) -> float:
        """Time of a version on the server's link."""
        return self.pulled_bytes * self.hosts / self.server_bytes_per_s

    @property
    def pull_s(self) -> float:
        """Time from the announcement to the last host's having it."""
        return max(self.sending_s, self.pulled_bytes / self.host_bytes_per_s)


@dataclass(frozen=True, kw_only=True)
class BrokerCosts:
    """CPU time of the broker, one core, which handles in turns what comes together.

    Both figures follow from benchmarks/results/broker_load.json, at 3 workers, saturated and at 200 groups/s
    (`broker_costs` in benchmarks/scale_tables.py derives them).
    """

    group_s: float = 0.249e-3
    """Per group, which passes twice: as prefixes, and with its verdicts."""
    turn_s: float = 1.46e-3
    """Per turn, whatever it handles."""


@dataclass(frozen=True, kw_only=True)
class System:
    """A running system in prefix mode."""

    batch_groups: int
    rows_per_group: int
    max_staleness: int
    rollouts: Workers
    scorers: Workers
    learner_s: float
    """Time of an iteration in training."""
    publish_s: float = 0.0
    """Time of the learner's main thread for a publication."""
    weights: WeightsPath = WeightsPath()
    broker: BrokerCosts = BrokerCosts()
    is_just_in_time: bool = True
    """False with `algorithm.admission = "as_early_as_allowed"`."""
    drains: bool = True
    """False with `rollout.swap = "in_flight"`."""

    def more(self, part: Part, factor: float = 2) -> "System":
        """Return the system with times the workers of a role, or another part so much faster."""
        weights, broker = self.weights, self.broker
        match part:
            case "rollout":
                return replace(
                    self, rollouts=replace(self.rollouts, count=round(factor * self.rollouts.count))
                )
            case "scorer":
                return replace(
                    self, scorers=replace(self.scorers, count=round(factor * self.scorers.count))
                )
            case "learner":
                return replace(
                    self, learner_s=self.learner_s / factor, publish_s=self.publish_s / factor
                )
            case "broker":
                costs = BrokerCosts(group_s=broker.group_s / factor, turn_s=broker.turn_s / factor)
                return replace(self, broker=costs)
            case "weights":
                path = replace(
                    weights,
                    pulled_bytes=weights.pulled_bytes / factor,
                    writing_s=weights.writing_s / factor,
                    install_s=weights.install_s / factor,
                )
                return replace(self, weights=path)

    def coarser(self, most_rows: int) -> "System":
        """Return a like system of about so many rows per iteration, which is simulated sooner.

        Batch and seats shrink alike and a message stands for several, so all shares stay; a batch has fewer stragglers.
        """
        rows = self.batch_groups * self.rows_per_group
        least_seats = min(self.rollouts.seats, self.scorers.seats)
        factor = max(
            1,
            min(
                rows // most_rows,
                least_seats // self.rows_per_group,
                self.batch_groups // LEAST_GROUPS,
            ),
        )
        if factor == 1:
            return self
        return replace(
            self,
            batch_groups=self.batch_groups // factor,
            rollouts=replace(self.rollouts, seats=self.rollouts.seats // factor),
            scorers=replace(self.scorers, seats=self.scorers.seats // factor),
            broker=replace(self.broker, group_s=self.broker.group_s * factor),
        )


@dataclass(frozen=True, kw_only=True)
class Foreseen:
    """Figures of a simulated run, its beginning left out."""

    groups_per_s: float
    iteration_s: float
    mean_age: float
    max_age: int
    busy: dict[Part, float]
    """Share of their time that the parts work: of seats, of the learner's and the broker's time, of the link's."""
    waited: float
    """Share of the time that the learner waits for its batch."""
    trained: int
    """Groups trained in all, the beginning included."""
    begun: int
    """Groups begun in all."""
    live: int
    """Groups that are under way or scored at the end."""
