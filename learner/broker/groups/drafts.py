"""Drafts: the target's greedy answers without advice, which the adapter reads before it advises. Pure.

    order of prompts ─▶ a batch ahead ─┐                                            ┌─▶ ledger: a group may begin
                                       ├─▶ queued ─▶ at a scorer ─▶ kept, for ever ─┤
    evaluation of the adapter ─────────┘     ▲            │                         └─▶ evaluation: its item may begin
                                             └─ worker lost; too often: kept as an empty draft with finish `error`

A group is issued only when the draft of its prompt is there, so the wait for it is no part of the group's age. A
problem is asked once in a run: the answer is kept by the request (`answers.py`), whatever asks for it. A task is one
problem, so that a bitwise draft is a forward of its own, and depends on nothing else.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from prefixrl.common.journal.records import AnswerKept
from prefixrl.common.run.status import DraftTotal
from prefixrl.common.seeds import derive
from prefixrl.common.wire.messages.groups import GroupPrefixes, Prompt, Sampling, ScoredGroup
from prefixrl.learner.broker.groups.answers import NO_PREFIX, KeptAnswers, record_of
from prefixrl.learner.broker.groups.states import PromptSource, SampleItem, ScoreItem

MOST_DRAFT_CHARS = 2**16
"""More than an adapter reads; an endpoint may answer with any text, and an evaluation's task holds 64 drafts."""


@dataclass
class _Missing:
    """A problem without a draft."""

    prompt: Prompt
    for_training: bool
    """False: only an evaluation waits for it."""
    is_asked: bool = False
    """True while a scorer has it."""
    deaths: int = 0


class Drafts:
    """The drafts of a run, and the problems that wait for one."""

    def __init__(
        self, answers: KeptAnswers, sampling: Sampling, run_seed: int, attempts: int
    ) -> None:
        """`attempts`: workers that a problem may cost before its draft counts as failed."""
        self.answers = answers
        self.sampling = sampling
        self._run_seed = run_seed
        self._attempts = attempts
        self._missing: dict[bytes, _Missing] = {}
        self._queues: dict[bool, deque[bytes]] = {True: deque(), False: deque()}
        """Problems to ask, for training and for evaluations alone."""
        self._next_seq = 0

    def answers_to(self, sampling: Sampling) -> bool:
        """Return True if drafts are kept as the answers to problems without advice, decoded so."""
        return self.answers.keeps_evaluations and sampling == self.sampling

    def is_ready(self, prompt: Prompt) -> bool:
        """Return True if a problem has its draft, which may be an empty one."""
        return self.answers.answer(self._key(prompt)) is not None

    def with_draft(self, prompt: Prompt) -> Prompt:
        """Return a problem with its draft; without one while it is missing."""
        record = self.answers.answer(self._key(prompt))
        if record is None:
            return prompt
        return msgspec.structs.replace(prompt, draft=record.text[:MOST_DRAFT_CHARS])

    def request_drafts(self, prompts: Iterable[Prompt], for_training: bool) -> None:
        """Queue the problems that have no draft."""
        for prompt in prompts:
            key = self._key(prompt)
            if self.answers.answer(key) is not None:
                continue
            entry = self._missing.get(key)
            if entry is None:
                self._missing[key] = _Missing(prompt, for_training)
                self._queues[for_training].append(key)
            elif for_training and not entry.for_training:
                entry.for_training = True
                self._queues[True].append(key)

    def count_missing(self, prompts: Iterable[Prompt]) -> int:
        """Return how many problems have no draft."""
        return sum(not self.is_ready(prompt) for prompt in prompts)

    def withdraw_drafts(self, needed: Iterable[Prompt], also_training: bool) -> None:
        """Forget the problems that no scorer has and that are not `needed`; those for training only if so told."""
        keys = {self._key(prompt) for prompt in needed}
        for key, entry in list(self._missing.items()):
            is_bound = entry.is_asked or (entry.for_training and not also_training)
            if key not in keys and not is_bound:
                del self._missing[key]

    def start_scoring(self, for_training: bool) -> ScoreItem | None:
        """Return the next problem for a scorer, as a group whose one row has no prefix."""
        queue = self._queues[for_training]
        while queue:
            entry = self._missing.get(key := queue.popleft())
            if entry is None or entry.is_asked or entry.for_training != for_training:
                continue  # it is elsewhere by now
            if self.answers.answer(key) is not None:
                del self._missing[key]  # an evaluation asked for the same
                continue
            entry.is_asked = True
            self._next_seq += 1
            prompt = entry.prompt
            group = GroupPrefixes(
                seq=self._next_seq,
                # Without a gold answer nothing is judged.
                prompt=Prompt(
                    prompt.prompt_id, prompt.question, "", "none", prompt.system, "", prompt.earlier
                ),
                seed=derive(self._run_seed, "draft", key.hex()),
                prompt_tokens=b"",
                rows=(NO_PREFIX,),
            )
            return ScoreItem((group,), -1, "", 0.0)
        return None

    def take_scores(self, groups: Sequence[ScoredGroup], prompt_tokens: int) -> None:
        """Keep drafts; the first one of a problem counts. `prompt_tokens`: those of all groups together."""
        for group in groups:
            key = self._key(group.prefixes.prompt)
            self._missing.pop(key, None)
            self.answers.keep_answer(record_of(key, group.verdicts[0], True, prompt_tokens))

    def give_back(self, item: SampleItem | ScoreItem, died: bool) -> None:
        """Take back a task without a result; the draft fails with the last attempt."""
        assert isinstance(item, ScoreItem), "drafts are for scorers"
        for group in item.groups:
            key = self._key(group.prompt)
            entry = self._missing.get(key)
            if entry is None:
                continue
            entry.is_asked = False
            entry.deaths += died
            # It goes to the head of the queue: groups wait for it, and it was asked first.
            if entry.deaths < self._attempts:
                self._queues[entry.for_training].appendleft(key)
                continue
            del self._missing[key]
            # An empty draft is an answer too: without one the groups of this problem never begin.
            lost = AnswerKept(
                key=key,
                text="",
                finish="error",
                is_draft=True,
                prompt_tokens=0,
                completion_tokens=0,
            )
            self.answers.keep_answer(lost)

    @property
    def total(self) -> DraftTotal:
        """The drafts of the run so far, without their cost."""
        return msgspec.structs.replace(self.answers.draft_total, waiting=len(self._missing))

    def check(self) -> None:
        """Assert that every problem without a draft is at a scorer or in its queue."""
        for key, entry in self._missing.items():
            assert entry.is_asked or key in self._queues[entry.for_training]

    def _key(self, prompt: Prompt) -> bytes:
        return self.answers.key(prompt, self.sampling)


class DraftedPrompts:
    """The order of prompts, each with its draft once that is there."""

    def __init__(self, prompts: PromptSource, drafts: Drafts) -> None:
        self._prompts = prompts
        self._drafts = drafts

    @property
    def total(self) -> int | None:
        """Number of prompts to ask, None when the order repeats for ever."""
        return self._prompts.total

    def prompt(self, prompt_index: int) -> Prompt:
        """Return the prompt at this position."""
        return self._drafts.with_draft(self._prompts.prompt(prompt_index))

    def source(self, prompt_index: int) -> str:
        """Return the source of this prompt, as figures name it."""
        return self._prompts.source(prompt_index)

    def problem(self, prompt_index: int) -> int:
        """Return the number of the problem at this position."""
        return self._prompts.problem(prompt_index)

    def is_ready(self, prompt_index: int) -> bool:
        """Return True if the draft of this prompt is there."""
        return self._drafts.is_ready(self._prompts.prompt(prompt_index))
