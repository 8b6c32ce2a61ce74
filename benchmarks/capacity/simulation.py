"""A run of a system, event by event, in simulated time. Pure: the same seed, the same run.

    learner ── done, ask ──▶ broker's turn: rules ── tasks ──▶ rollouts, scorers ── results ──▶ broker's turn
       └─ version ─▶ link ─▶ rollouts: offer, drain, install

The broker handles messages in turns, as `learner/broker/server.py` has it: what comes within `GATHER_S` of the first
is handled together, and then work is given. A worker whose engine decodes hears messages between two steps, or when a
row ends.
"""

import heapq
import math
import random
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from itertools import count

from benchmarks.capacity.rules import Counts, GroupRules
from benchmarks.capacity.seating import Meter, Ranking, Station, Task
from benchmarks.capacity.system import Foreseen, Part, System
from prefixrl.learner.broker.server import GATHER_S, MESSAGES

SKIPPED = 3
"""Part of the iterations that are not counted, one in so many: lead and ages settle."""

Event = Callable[[], None]


class Simulation:
    """One run."""

    def __init__(self, system: System, seed: int = 0) -> None:
        self._system, self._draws = system, random.Random(seed)
        self._now_s = 0.0
        self._events: list[tuple[float, int, Event]] = []
        self._numbers = count()
        self._inbox: list[tuple[Event, float]] = []
        """Messages that the broker has not handled, with their CPU time."""
        self._in_turn = False
        self._rules = GroupRules(system.batch_groups, system.max_staleness, system.is_just_in_time)
        self._counts = Counts(Counter(), Counter(), Counter())
        self._sampled: list[tuple[int, int]] = []
        """A heap of groups that wait for a scorer: version, then arrival."""
        self._rollouts = [Station(True, system.rollouts) for _ in range(system.rollouts.count)]
        self._places = {True: Ranking(), False: Ranking()}
        for worker in self._rollouts:
            self._places[True].put(worker)
        for _ in range(system.scorers.count):
            self._places[False].put(Station(False, system.scorers))
        self._slots = system.scorers.count * system.scorers.room / system.rows_per_group
        self._completed = self._newest = 0
        self._asks = False
        self._asked_s = self._looked_s = self._short_s = 0.0
        self._is_short = self._is_pulling = False
        self._done_s: float | None = None
        self._written_s = [0.0, 0.0]
        """Times at which the newest two versions were announced."""
        self._seated = {True: Meter(), False: Meter()}
        self._spent_s: dict[Part, float] = {"learner": 0.0, "broker": 0.0, "weights": 0.0}
        self._waited_s = 0.0
        self._ages: list[Counter[int]] = []
        self._begun = 0

    def run(self, iterations: int) -> Foreseen:
        """Run so many iterations and return what the later ones show."""
        skipped, system, counts = max(1, iterations // SKIPPED), self._system, self._counts
        self._post(self._asked)
        self._advance(skipped)
        began_s, waited_s, before = self._now_s, self._waited_s, self._worked_s()
        self._advance(iterations)
        span_s, after = self._now_s - began_s, self._worked_s()
        ages = sum(self._ages[skipped:iterations], Counter[int]())
        return Foreseen(
            groups_per_s=system.batch_groups * (iterations - skipped) / span_s,
            iteration_s=span_s / (iterations - skipped),
            mean_age=sum(age * groups for age, groups in ages.items()) / ages.total(),
            max_age=max(ages),
            busy={part: min(1.0, (after[part] - before[part]) / span_s) for part in after},
            waited=(self._waited_s - waited_s) / span_s,
            trained=iterations * system.batch_groups,
            begun=self._begun,
            live=counts.accepted + counts.under_way + counts.queued,
        )

    def _worked_s(self) -> dict[Part, float]:
        """Return the time that each part has worked; of workers, the mean over all seats."""
        system = self._system
        rollout_s, scorer_s = (self._seated[each].read_s(self._now_s) for each in (True, False))
        seats = (
            system.rollouts.count * system.rollouts.seats,
            system.scorers.count * system.scorers.seats,
        )
        return {"rollout": rollout_s / seats[0], "scorer": scorer_s / seats[1], **self._spent_s}

    def _advance(self, completed: int) -> None:
        while self._completed < completed:
            assert self._events, f"standstill after {self._completed} iterations"
            self._now_s, _, event = heapq.heappop(self._events)
            event()

    def _at(self, time_s: float, event: Event) -> None:
        heapq.heappush(self._events, (max(time_s, self._now_s), next(self._numbers), event))

    # --- the broker --------------------------------------------------------------------------------------------------

    def _post(self, message: Event, cpu_s: float = 0.0) -> None:
        """Send the broker a message."""
        self._inbox.append((message, cpu_s))
        if not self._in_turn:
            self._begin_turn()

    def _begin_turn(self) -> None:
        self._in_turn = True
        wait_s = 0.0 if len(self._inbox) >= MESSAGES else GATHER_S
        self._at(self._now_s + wait_s, lambda: self._gathered(wait_s))

    def _gathered(self, waited_s: float) -> None:
        """Take the messages of a turn; they were handled as they came, as far as there was time."""
        messages, self._inbox = self._inbox[:MESSAGES], self._inbox[MESSAGES:]
        cpu_s = self._system.broker.turn_s + sum(cost_s for _, cost_s in messages)
        self._spent_s["broker"] += cpu_s
        self._at(self._now_s + max(0.0, cpu_s - waited_s), lambda: self._end_turn(messages))

    def _end_turn(self, messages: list[tuple[Event, float]]) -> None:
        for message, _ in messages:
            message()
        self._answer_learner()
        self._give_sampling()
        self._give_scoring()
        self._in_turn = False
        if self._inbox:
            self._begin_turn()

    def _give_sampling(self) -> None:
        refused, passed = set[int](), list[Station]()
        while (worker := self._places[True].take()) is not None:
            version = worker.version
            if version not in refused and self._may_sample(version):
                self._counts.ahead[version] += 1
                self._give(worker, version)
            else:
                refused.add(version)
                passed.append(worker)
        for worker in passed:
            self._places[True].put(worker)

    def _may_sample(self, version: int) -> bool:
        """Take a group that is to be sampled again, or a new one; False where none may be begun."""
        rules, counts = self._rules, self._counts
        if counts.queued:
            if not rules.may_sample_again(version, self._completed, counts):
                return False
            counts.queued -= 1
            return True
        is_new = rules.may_begin(version, self._completed, counts, self._slots, len(self._rollouts))
        self._begun += is_new
        return is_new

    def _give_scoring(self) -> None:
        while self._sampled and (worker := self._places[False].take()) is not None:
            version, _ = heapq.heappop(self._sampled)
            self._counts.ahead[version] -= 1
            self._counts.scoring[version] += 1
            self._give(worker, version)

    def _give(self, worker: Station, version: int) -> None:
        rows = self._system.rows_per_group
        worker.left += rows
        worker.tasks += 1
        worker.mail.append(Task(version, rows, self._now_s))
        self._places[worker.is_rollout].put(worker)
        self._look_from(worker, self._now_s)

    # --- workers -----------------------------------------------------------------------------------------------------

    def _look_from(self, worker: Station, from_s: float) -> None:
        """Have a worker look at mail and verdicts from a time on, when its engine lets it."""
        at_s = worker.next_look_s(from_s)
        if at_s < worker.looks_s:
            worker.looks_s = at_s
            self._at(at_s, lambda: self._look(worker, at_s))

    def _look(self, worker: Station, due_s: float = math.nan) -> None:
        """Take new tasks into the engine, and deliver those whose verdicts are there."""
        if due_s == worker.looks_s:
            worker.looks_s = math.inf
        worker.looked_s = self._now_s
        mail, worker.mail = worker.mail, []
        for task in mail:
            worker.queue.extend([task] * task.left)
            while worker.queue and worker.seated < worker.of.seats:
                self._seat(worker)
        for task in [each for each in worker.judging if each.judged_s <= self._now_s]:
            worker.judging.remove(task)
            self._deliver(worker, task)
        if worker.phase == "ready" and worker.offered > worker.version:
            worker.phase = "offering"
            self._hand_back(worker)
            self._post(lambda: self._drain(worker))

    def _seat(self, worker: Station) -> None:
        task = worker.queue.popleft()
        task.seated_s = self._now_s if task.seated_s is None else task.seated_s
        worker.seated += 1
        self._seated[worker.is_rollout].move(1, self._now_s)
        self._at(
            self._now_s + worker.of.row.draw_s(self._draws), lambda: self._end_row(worker, task)
        )

    def _end_row(self, worker: Station, task: Task) -> None:
        worker.seated -= 1
        worker.left -= 1
        task.left -= 1
        self._seated[worker.is_rollout].move(-1, self._now_s)
        if worker.queue:
            self._seat(worker)
        if worker.left == worker.of.room - 1:
            self._post(lambda: self._places[worker.is_rollout].put(worker))
        self._look(worker)
        if task.left:
            return
        if worker.is_rollout:
            self._deliver(worker, task)
        else:
            task.judged_s = self._now_s + worker.of.judging_s
            worker.judging.append(task)
            self._look_from(worker, task.judged_s)

    def _deliver(self, worker: Station, task: Task) -> None:
        started_s = (
            task.seated_s if worker.is_rollout and task.seated_s is not None else task.since_s
        )
        took_s = self._now_s - started_s
        self._post(
            lambda: self._take(worker, task.version, took_s), self._system.broker.group_s / 2
        )

    def _take(self, worker: Station, version: int, took_s: float) -> None:
        """Have the broker take a result."""
        worker.tasks -= 1
        worker.done += 1
        if worker.is_rollout:
            self._rules.admission.times.note_item("sampling_s", took_s)
            heapq.heappush(self._sampled, (version, next(self._numbers)))
            self._grant(worker)
        else:
            self._rules.admission.times.note_item("scoring_s", took_s)
            self._counts.scoring[version] -= 1
            self._counts.scored[version] += 1
        self._places[worker.is_rollout].put(worker)

    # --- versions ----------------------------------------------------------------------------------------------------

    def _announce(self, version: int) -> None:
        self._newest = version
        if not self._is_pulling:
            self._pull(version)

    def _pull(self, version: int) -> None:
        """Have all hosts pull a version at once: they heard of it at once."""
        self._is_pulling, path = True, self._system.weights
        self._at(self._now_s + path.pull_s, lambda: self._pulled(version))

    def _pulled(self, version: int) -> None:
        self._spent_s["weights"] += self._system.weights.sending_s
        self._is_pulling = False
        for worker in self._rollouts:
            worker.offered = version
            self._look_from(worker, self._now_s)
        if self._newest > version:
            self._pull(self._newest)

    def _hand_back(self, worker: Station) -> None:
        """Return the tasks that wait for a seat: the installation would wait for them, too."""
        if not self._system.drains:
            return
        for task in dict.fromkeys(each for each in worker.queue if each.seated_s is None):
            worker.left -= task.left
            self._post(partial(self._take_back, worker, task.version))
        worker.queue = deque(each for each in worker.queue if each.seated_s is not None)

    def _take_back(self, worker: Station, version: int) -> None:
        worker.tasks -= 1
        self._counts.ahead[version] -= 1
        self._counts.queued += 1
        self._grant(worker)

    def _drain(self, worker: Station) -> None:
        worker.phase = "draining"
        self._places[True].put(worker)
        self._grant(worker)

    def _grant(self, worker: Station) -> None:
        """Let a draining rollout install once nothing is open."""
        if worker.phase == "draining" and not (worker.tasks and self._system.drains):
            worker.phase = "swapping"
            offered = worker.offered
            installed_s = worker.next_look_s(self._now_s) + self._system.weights.install_s
            self._at(installed_s, lambda: self._post(lambda: self._install(worker, offered)))

    def _install(self, worker: Station, version: int) -> None:
        worker.phase, worker.version = "ready", version
        self._places[True].put(worker)
        if worker.offered > version:
            self._look_from(worker, self._now_s)

    # --- the learner -------------------------------------------------------------------------------------------------

    def _asked(self) -> None:
        self._asks, self._asked_s = True, self._now_s

    def _answer_learner(self) -> None:
        """Form a batch if the learner asks and the rules allow one."""
        self._short_s += (self._now_s - self._looked_s) * self._is_short
        self._looked_s, self._is_short = self._now_s, False
        if not self._asks:
            return
        counts, system = self._counts, self._system
        taken = self._rules.choice(self._completed, counts)
        if taken is None:
            self._is_short = counts.scored.total() < system.batch_groups
            return
        self._waited_s += self._now_s - self._asked_s
        self._asks, counts.scored, counts.batched = (
            False,
            counts.scored - taken,
            system.batch_groups,
        )
        self._ages.append(
            Counter({self._completed - version: groups for version, groups in taken.items()})
        )
        self._at(self._now_s + system.learner_s, self._trained)

    def _trained(self) -> None:
        """Tell the broker, publish, and ask for the next batch once a copy can be kept."""
        system = self._system
        self._post(self._finished)
        published_s = self._now_s + system.publish_s
        written_s = max(published_s, self._written_s[1]) + system.weights.writing_s
        self._spent_s["learner"] += system.learner_s + system.publish_s
        version = self._completed + 1
        self._at(written_s, lambda: self._post(lambda: self._announce(version)))
        self._at(max(published_s, self._written_s[1]), lambda: self._post(self._asked))
        self._written_s = [self._written_s[1], written_s]

    def _finished(self) -> None:
        self._completed += 1
        self._counts.batched = 0
        if self._done_s is not None:
            states = {
                "sampling": self._counts.ahead.total(),
                "scoring": self._counts.scoring.total(),
            }
            self._rules.admission.finish_iteration(
                self._now_s - self._done_s, self._short_s, states, None
            )
        self._done_s, self._short_s = self._now_s, 0.0
