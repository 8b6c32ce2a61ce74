"""Evaluations that are asked of the broker, and the files that keep their judged rows.

    ask ──▶ broker: pinned to one version, or with a given prefix ──▶ gather ──▶ <directory>/<name>.jsonl

Workers answer while training goes on. Only `wait` waits, and it has a deadline. A request whose file holds the answers
to the very same request is not sent again.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import xxhash

from prefixrl.common.config.foreign.files import read_json
from prefixrl.common.config.run import RunConfig
from prefixrl.common.errors import PeerLost
from prefixrl.common.evaluation.accuracy import EvaluatedRow, accuracy
from prefixrl.common.evaluation.plans import GREEDY, SAMPLED
from prefixrl.common.host.process import write_atomically
from prefixrl.common.prompts.rendering import Texts, sent_text, texts_of
from prefixrl.common.run import json_lines
from prefixrl.common.run.disk import when_there_is_room
from prefixrl.common.wire.messages.fields import common_fields
from prefixrl.common.wire.messages.groups import ScoredGroup
from prefixrl.common.wire.messages.learner import Evaluate
from prefixrl.common.wire.packing import token_ids
from prefixrl.learner.broker.client import BrokerClient
from prefixrl.learner.data.problems import Problem
from prefixrl.learner.run.stop import StopSignal

log = logging.getLogger(__name__)

POLL_S = 0.2
ASKED_FILE = "asked.json"
"""Digest of the request that each file answers."""
REMOVE = "restore it, or remove it: what is judged already is judged again"
TEMPERATURE_SCALES = {GREEDY: 0.0, SAMPLED: 1.0}
"""Factor on the temperatures of the run, by decoding."""
NO_ADAPTER = -1


@dataclass(frozen=True)
class EvaluationRequest:
    """Problems to answer in one way."""

    name: str
    """Name of the evaluation and of its file."""
    version: int
    """Version that writes the prefixes; NO_ADAPTER where `prefix` is given."""
    problems: Sequence[Problem]
    decoding: str = GREEDY
    prefix: bytes = b""
    """Packed token ids that stand before every completion."""
    samples: int = 1

    def message(self, config: RunConfig, texts: Texts) -> Evaluate:
        """Return the message to the broker; `texts` decodes the prefix."""
        scale = TEMPERATURE_SCALES[self.decoding]
        completions = config.scorer_sampling(scale)
        limit = config.evaluation.max_new_tokens or completions.max_new_tokens
        return Evaluate(
            name=self.name,
            version=self.version,
            prefix_tokens=self.prefix,
            prompts=tuple(problem.prompt() for problem in self.problems),
            prefix_sampling=config.rollout_sampling(scale),
            completion_sampling=msgspec.structs.replace(completions, max_new_tokens=limit),
            samples=self.samples,
            prefix_text=sent_text(config, texts, token_ids(self.prefix)) if self.prefix else None,
        )


@dataclass(frozen=True)
class Answers:
    """Everything that the broker will ever answer to one request."""

    request: Evaluate
    groups: Mapping[str, ScoredGroup] = field(default_factory=dict)
    """By prompt id."""
    causes: Mapping[str, str] = field(default_factory=dict)
    """Causes of failed problems, by prompt id."""
    loss: str = ""
    """Reason why there is no answer at all, "" where there is one."""


class OpenRequests:
    """Requests that the broker works on; a request that a restarted broker forgot is sent again."""

    def __init__(self, client: BrokerClient, iteration: int) -> None:
        self.iteration = iteration
        """Current version of the learner: new prefixes can be asked for of this version only."""
        self._client = client
        self._requests: dict[str, Evaluate] = {}
        self._unsampled: dict[str, int] = {}

    @property
    def names(self) -> list[str]:
        """Names of the open requests."""
        return list(self._requests)

    @property
    def pinned(self) -> frozenset[int]:
        """Versions whose prefixes are not all sampled: rollouts must be able to fetch their weights."""
        return frozenset(
            self._requests[name].version for name, count in self._unsampled.items() if count
        )

    def send_request(self, request: Evaluate) -> bool:
        """Send a request; return False where its version is gone."""
        if request.version not in (NO_ADAPTER, self.iteration):
            return False
        self._client.evaluate(request)
        self._requests[request.name] = request
        self._unsampled[request.name] = len(request.prompts) if request.version >= 0 else 0
        return True

    def gather(self) -> Iterator[Answers]:
        """Yield the requests that are finished or lost, and close them."""
        for name, request in list(self._requests.items()):
            progress, groups = self._client.evaluation(name)
            self._unsampled[name] = progress.unsampled
            if progress.total < 0:
                if not self.send_request(request):
                    self.close(name)
                    yield Answers(
                        request,
                        loss=f"version {request.version} is gone since the broker restarted",
                    )
            elif progress.judged + progress.failed >= progress.total:
                self.close(name)
                causes = {
                    request.prompts[index].prompt_id: cause for index, cause in progress.causes
                }
                answered = {group.prefixes.prompt.prompt_id: group for group in groups}
                failed = f"every problem failed: {next(iter(causes.values()), 'no cause is known')}"
                yield Answers(request, answered, causes, "" if groups else failed)

    def close(self, name: str) -> None:
        """Stop expecting an answer to a request."""
        self._requests.pop(name, None)
        self._unsampled.pop(name, None)


class EvaluationRequests:
    """Every evaluation that was asked for, by name, and its judged rows."""

    def __init__(
        self,
        config: RunConfig,
        client: BrokerClient,
        directory: Path,
        iteration: int,
        trained: int,
        stop: StopSignal,
    ) -> None:
        """`trained`: iterations of the adapter that the broker calls version 0; `stop` may end a wait."""
        self._stop = stop
        self._config = config
        self._directory = directory
        self._trained = trained
        self._families: dict[str, str] = {}
        self.open = OpenRequests(client, iteration)
        asked_file = directory / ASKED_FILE
        self._answered = (
            read_json(asked_file, dict[str, str], remedy=REMOVE) if asked_file.exists() else {}
        )
        self.texts = texts_of(config, "rollout")
        self.rows: dict[str, list[EvaluatedRow]] = {}
        """Judged rows of the finished evaluations."""
        self.incomplete: list[str] = []
        """Names of the evaluations of which some or all rows are missing."""

    def ask_problems(self, question: EvaluationRequest) -> None:
        """Have problems judged, unless a file holds the answers already."""
        name = question.name
        request = question.message(self._config, self.texts)
        self._families |= {each.prompt_id: each.family for each in question.problems}
        if self.path(name).exists() and self._answered.get(name) == digest(request):
            lines = self.path(name).read_bytes()
            self._take_rows(request, msgspec.json.Decoder(EvaluatedRow).decode_lines(lines))
        elif question.problems and not self.open.send_request(request):
            self._give_up_evaluation(
                name,
                f"version {request.version} is gone: the run was resumed at {self.open.iteration}",
            )

    def ask_candidates(
        self, arm: str, beginning: str, candidates: Mapping[str, bytes], on: Sequence[Problem]
    ) -> None:
        """Have prefixes for an arm judged; the evaluations are named by `beginning` and an index."""
        for index, (text, tokens) in enumerate(candidates.items()):
            log.info("candidate for %s: %r", arm, text)
            self.ask_problems(
                EvaluationRequest(f"{beginning}{index}", NO_ADAPTER, on, prefix=tokens)
            )

    def best(self, beginning: str, candidates: Mapping[str, bytes]) -> bytes | None:
        """Return the candidate with the most right answers; None if no candidate could be judged."""
        accuracies = {}
        for index, tokens in enumerate(candidates.values()):
            if result := accuracy(self.rows.get(f"{beginning}{index}", [])):
                accuracies[tokens] = result.accuracy
        return max(accuracies, key=accuracies.__getitem__, default=None)

    def adopt(self, question: EvaluationRequest, twin: str) -> bool:
        """Take the rows of `twin`, which asked the same; return False where it is not complete."""
        if twin not in self.rows or twin in self.incomplete:
            return False
        self._write(question.message(self._config, self.texts), self.rows[twin])
        self.rows[question.name] = self.rows[twin]
        return True

    def path(self, name: str) -> Path:
        """Return the file of an evaluation's judged rows."""
        return self._directory / f"{name}.jsonl"

    def gather(self) -> None:
        """Take what is finished."""
        for answers in self.open.gather():
            request = answers.request
            groups = answers.groups.values()
            weights = {(group.version, group.weights_digest) for group in groups}
            if answers.loss:
                self._give_up_evaluation(request.name, answers.loss)
            elif len(weights) > 1 or any(version != request.version for version, _ in weights):
                self._give_up_evaluation(
                    request.name, f"answers of several weights, {sorted(weights)}"
                )
            else:
                context = self._config, self.texts, self._trained, self._families
                rows = [row for group in groups for row in judged(group, *context)]
                self._write(request, rows)
                self._take_rows(request, rows)

    def _write(self, request: Evaluate, rows: Sequence[EvaluatedRow]) -> None:
        self._answered[request.name] = digest(request)
        answered = msgspec.json.encode(self._answered)

        def write() -> None:
            json_lines.write(self.path(request.name), rows)
            write_atomically(self._directory / ASKED_FILE, answered)

        self.keep(write, f"the evaluation {request.name}")

    def keep(self, write: Callable[[], None], what: str) -> None:
        """Write a file of the evaluations once the disk has room."""
        when_there_is_room(write, self._directory, what, self._stop.end_disk_wait)

    def _take_rows(self, request: Evaluate, rows: list[EvaluatedRow]) -> None:
        name = request.name
        expected = len(request.prompts) * request.samples
        self.rows[name] = rows
        if accuracy(rows) is None:
            self._give_up_evaluation(name, "no verdict on any problem, every row ended in an error")
        elif len(rows) < expected:
            self._give_up_evaluation(
                name, f"{expected - len(rows)} of {expected} answers never came"
            )

    def drop(self, name: str, reason: str) -> None:
        """Remove a finished evaluation with its file; it counts as incomplete."""
        self.path(name).unlink(missing_ok=True)
        del self.rows[name]
        self._give_up_evaluation(name, reason)

    def refuse(self, name: str, reason: str) -> None:
        """Count an evaluation that is not made as incomplete, unless it is judged."""
        if name not in self.rows and name not in self.incomplete:
            self._give_up_evaluation(name, reason)

    def _give_up_evaluation(self, name: str, reason: str) -> None:
        log.warning("evaluation %s is incomplete: %s", name, reason)
        self.incomplete.append(name)
        self.open.close(name)

    def wait(self, concerns: Callable[[str], bool]) -> None:
        """Wait for evaluations whose name `concerns`; after `evaluation.timeout_s` give them up."""
        patience_s = self._config.evaluation.timeout_s
        deadline_s = time.monotonic() + patience_s
        while any(map(concerns, self.open.names)):
            self._stop.end_judging(self.open.iteration)
            try:
                self.gather()
            except PeerLost as error:
                log.warning("%s", error)
            if time.monotonic() > deadline_s:
                for name in filter(concerns, self.open.names):
                    self._give_up_evaluation(name, f"not finished within {patience_s:g} s")
                return
            time.sleep(POLL_S)


def judged(
    group: ScoredGroup, config: RunConfig, texts: Texts, trained: int, families: Mapping[str, str]
) -> list[EvaluatedRow]:
    """Return a row per answer of a group. `trained`: iterations behind the broker's version 0."""
    # In direct mode the adapter wrote the completion itself.
    is_direct = config.mode == "direct"
    prompt_id = group.prefixes.prompt.prompt_id
    rows = []
    for sample, (row, verdict) in enumerate(group.judged_rows):
        fields = common_fields(EvaluatedRow, group, verdict) | {
            "prompt_id": prompt_id,
            "family": families.get(prompt_id, ""),
            "version": group.version + trained if group.version >= 0 else NO_ADAPTER,
            "sample": sample,
            "prefix": "" if is_direct else texts.text(token_ids(row.tokens)),
            "scores": verdict.process.scores if verdict.process else None,
        }
        rows.append(EvaluatedRow(**fields))
    return rows


def digest(value: object) -> str:
    """Return the digest of a message or plain values."""
    return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(value))
