"""A dispatcher with a real ledger and no socket, and what it sent to whom."""

from dataclasses import dataclass, field
from typing import Any, Literal

from prefixrl.common.config.run import RunConfig
from prefixrl.common.wire.messages.fields import Role
from prefixrl.common.wire.messages.groups import Prompt
from prefixrl.common.wire.messages.learner import FromBroker
from prefixrl.common.wire.messages.protocol import PROTOCOL
from prefixrl.common.wire.messages.worker import Hello, PrefixTask
from prefixrl.learner.broker.__main__ import make_ledger
from prefixrl.learner.broker.groups.answers import KeptAnswers
from prefixrl.learner.broker.groups.drafts import DraftedPrompts, Drafts
from prefixrl.learner.broker.groups.states import PromptSource
from prefixrl.learner.broker.workers.dispatch import Dispatcher
from prefixrl.learner.broker.workers.task_names import TaskNames
from prefixrl.learner.broker.workers.workers import Phase, Worker
from prefixrl.learner.data import problems
from prefixrl.learner.data.order import PromptOrder
from support import messages
from support.fakes import sampled


def hello(role: Role) -> Hello:
    """The first message of some worker."""
    return Hello(protocol=PROTOCOL, role=role, incarnation="i", host="h", pid=1)


@dataclass
class Desk:
    """A dispatcher, and what it sent to whom."""

    config: RunConfig
    now_s: float = 0.0
    inboxes: dict[str, list[FromBroker]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        config = self.config
        prompts = [problem.prompt() for problem in problems.load(config.data.train, config.data)]
        answers, drafts = KeptAnswers("", config.has_advice, keeps_evaluations=True), None
        order: PromptSource = PromptOrder(prompts, config.seed, None)
        if config.adapter.sees_draft:
            drafts = Drafts(answers, config.scorer_sampling(0.0), 1, config.broker.attempts)
            order = DraftedPrompts(order, drafts)
        self.ledger = make_ledger(config, order, len(prompts))
        names = TaskNames("e", b"key")
        self.dispatcher = Dispatcher(config, self.ledger, order, names, answers, drafts)

    def worker(
        self, role: Literal["rollout", "scorer"], slots: int = 1, version: int = 0
    ) -> Worker:
        registry = self.dispatcher.registry
        identity = f"{role}{len(self.inboxes)}".encode()
        worker = registry.add(identity, hello(role), self.now_s)
        worker.phase, worker.seats, worker.room, worker.version = Phase.READY, 1, slots, version
        self.inboxes[worker.name] = []
        return worker

    def replaced(self, worker: Worker) -> Worker:
        """Give a worker up, as the server does with one whose message it refused; another one in its place."""
        self.dispatcher.lose_worker(worker, "refused", died=True)
        self.ledger.check()
        return self.worker(worker.role, worker.room, worker.version)

    def dispatch(self) -> None:
        self.now_s += 0.1
        self.dispatcher.dispatch(self.now_s)
        workers = self.dispatcher.registry.by_identity
        for identity, message, _ in self.dispatcher.outbox.after_sync():
            self.inboxes[workers[identity].name].append(message)

    def tasks(self, worker: Worker, kind: type[Any]) -> list[Any]:
        """Return the messages of a type that a worker received since the last call."""
        inbox = self.inboxes[worker.name]
        self.inboxes[worker.name] = [message for message in inbox if not isinstance(message, kind)]
        return [message for message in inbox if isinstance(message, kind)]

    def sample_everything(self, rollout: Worker) -> int:
        """Let a rollout work until it gets nothing more; groups sampled."""
        groups = 0
        self.dispatch()
        while tasks := self.tasks(rollout, PrefixTask):
            for task in tasks:
                self.dispatcher.take_prefixes(rollout, sampled(task), now_s=1.0)
                groups += len(task.groups)
            self.dispatch()
        return groups


def evaluate(desk: Desk, version: int, prompts: list[Prompt], name: str = "e") -> None:
    desk.dispatcher.evaluations.add(messages.evaluate(name, version, prompts))


def held_out(count: int) -> list[Prompt]:
    return [Prompt(f"h{i}", "?", "1") for i in range(count)]
