"""Evaluations asked of the broker: who is asked for, what has come in, what will never come.

    ask ──▶ broker: pinned to one version, or with a given prefix ──▶ gather ──▶ <directory>/<name>.jsonl

Requests are answered by the workers of the run while training goes on; nothing here waits but `wait`, which has a deadline.
What stands in a file already is not judged again, unless it was asked otherwise then.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import xxhash

from prefixrl.common.accuracy import EvaluatedRow, accuracy
from prefixrl.common.config import RunConfig
from prefixrl.common.errors import PeerLost
from prefixrl.common.messages import Evaluate, ScoredGroup
from prefixrl.common.offline import GREEDY as GREEDY
from prefixrl.common.offline import SAMPLED as SAMPLED
from prefixrl.common.packing import token_ids
from prefixrl.common.process import write_atomically
from prefixrl.common.rendering import ByteRenderer, Renderer
from prefixrl.learner.client import BrokerClient
from prefixrl.learner.problems import Problem

log = logging.getLogger(__name__)

POLL_S = 0.2
ASKED_FILE = "asked.json"
"""What each file answers: a digest of all that its answers depend on."""
HEAT = {GREEDY: 0.0, SAMPLED: 1.0}
"""Of a decoding: 0 is greedy, 1 draws at the run's own temperatures."""
NO_ADAPTER = -1


@dataclass(frozen=True)
class Question:
    """What to judge: these problems, answered so many times each in one way.

    Attributes:
        name: Of the evaluation and its file.
        version: Of the adapter that writes the prefixes, NO_ADAPTER where `prefix` is given.
        prefix: Packed token ids that stand before every completion.
    """

    name: str
    version: int
    problems: Sequence[Problem]
    decoding: str = GREEDY
    prefix: bytes = b""
    samples: int = 1


class Evaluations:
    """Everything that was asked, by name."""

    def __init__(
        self,
        config: RunConfig,
        client: BrokerClient,
        directory: Path,
        texts: Renderer | ByteRenderer,
        iteration: int,
        first: int = 0,
    ) -> None:
        """`first`: what the broker's version 0 is called in the rows."""
        self._config = config
        self._client = client
        self._directory = directory
        self._texts = texts
        self._first = first
        self._families: dict[str, str] = {}
        self._open: dict[str, Evaluate] = {}
        self._unsampled: dict[str, int] = {}
        known = directory / ASKED_FILE
        self._answered: dict[str, str] = (
            msgspec.json.decode(known.read_bytes(), type=dict[str, str]) if known.exists() else {}
        )
        self.watch: Callable[[], None] = lambda: None
        """Called while waiting; may raise what makes waiting useless."""
        self.rows: dict[str, list[EvaluatedRow]] = {}
        """Of what is complete."""
        self.incomplete: list[str] = []
        self.iteration = iteration
        """Version the learner stands at: the only one that can be asked for anew."""

    def ask(self, question: Question) -> None:
        """Have it judged, unless its file stands there already."""
        name, request = question.name, request_of(question, self._config, self._texts)
        self._families |= {each.prompt_id: each.family for each in question.problems}
        if self.path(name).exists() and self._answered.get(name) == _digest(request):
            decoder = msgspec.json.Decoder(EvaluatedRow)
            lines = self.path(name).read_bytes().splitlines()
            self._take(request, [decoder.decode(line) for line in lines])
            return
        if not question.problems:
            return
        self._open[name] = request
        if request.version in (NO_ADAPTER, self.iteration):
            self._send(request)
        else:
            self._give_up(
                name, f"version {request.version} is gone: the run was resumed at {self.iteration}"
            )

    def adopt(self, question: Question, twin: str) -> bool:
        """Take the answers of a complete evaluation that asked the same under the name `twin`; whether there is one."""
        if twin not in self.rows or twin in self.incomplete:
            return False
        self._write(request_of(question, self._config, self._texts), self.rows[twin])
        self.rows[question.name] = self.rows[twin]
        return True

    def path(self, name: str) -> Path:
        """Where the judged rows of an evaluation are kept."""
        return self._directory / f"{name}.jsonl"

    def _send(self, request: Evaluate) -> None:
        self._client.evaluate(request)
        self._unsampled[request.name] = len(request.prompts) if request.version >= 0 else 0

    @property
    def pinned(self) -> frozenset[int]:
        """Versions of which prefixes are still to be sampled: their weights must stay where rollouts can fetch them."""
        return frozenset(
            self._open[name].version for name, count in self._unsampled.items() if count
        )

    def gather(self) -> None:
        """Take what is finished; ask again for what a restarted broker has forgotten, where that can still be had."""
        for name, request in list(self._open.items()):
            progress, groups = self._client.evaluation(name)
            self._unsampled[name] = progress.unsampled
            if progress.total < 0 and request.version in (NO_ADAPTER, self.iteration):
                self._send(request)
            elif progress.total < 0:
                self._give_up(name, f"version {request.version} is gone since the broker restarted")
            elif groups and progress.done + progress.failed == progress.total:
                self._keep(name, groups)
            elif progress.failed == progress.total:
                self._give_up(name, "every problem failed")

    def _keep(self, name: str, groups: list[ScoredGroup]) -> None:
        request = self._open[name]
        seen = {(group.version, group.weights_digest) for group in groups}
        if len(seen) > 1 or any(version != request.version for version, _ in seen):
            self._give_up(name, f"answers of several weights, {sorted(seen)}")
            return
        rows = [row for group in groups for row in self._rows(group)]
        self._write(request, rows)
        self._close(name)
        self._take(request, rows)

    def _write(self, request: Evaluate, rows: Sequence[EvaluatedRow]) -> None:
        text = "".join(msgspec.json.encode(row).decode() + "\n" for row in rows)
        write_atomically(self.path(request.name), text)
        self._answered[request.name] = _digest(request)
        write_atomically(self._directory / ASKED_FILE, msgspec.json.encode(self._answered).decode())

    def _take(self, request: Evaluate, rows: list[EvaluatedRow]) -> None:
        name, asked = request.name, len(request.prompts) * request.samples
        self.rows[name] = rows
        if accuracy(rows) is None:
            self._give_up(name, "no verdict on any problem, every row ended in an error")
        elif len(rows) < asked:
            self._give_up(name, f"{asked - len(rows)} of {asked} answers never came")

    def _rows(self, group: ScoredGroup) -> list[EvaluatedRow]:
        prompt = group.prefixes.prompt
        # In direct mode the adapter wrote the completion itself.
        is_direct = self._config.mode == "direct"
        return [
            EvaluatedRow(
                prompt_id=prompt.prompt_id,
                family=self._families.get(prompt.prompt_id, ""),
                version=group.version + self._first if group.version >= 0 else NO_ADAPTER,
                prefix="" if is_direct else self._texts.text(token_ids(row.tokens)),
                completion=verdict.completion,
                extracted=verdict.extracted,
                reward=verdict.reward,
                status=verdict.status,
                finish=verdict.finish,
                sample=sample,
                weights_digest=group.weights_digest,
            )
            for sample, (row, verdict) in enumerate(
                zip(group.prefixes.rows, group.verdicts, strict=True)
            )
        ]

    def drop(self, name: str, reason: str) -> None:
        """Forget an evaluation that is complete; it is named as incomplete."""
        self.path(name).unlink(missing_ok=True)
        del self.rows[name]
        self._give_up(name, reason)

    def _give_up(self, name: str, reason: str) -> None:
        log.warning("evaluation %s is incomplete: %s", name, reason)
        self.incomplete.append(name)
        self._close(name)

    def _close(self, name: str) -> None:
        self._open.pop(name, None)
        self._unsampled.pop(name, None)

    def wait(self, concerns: Callable[[str], bool]) -> None:
        """Until nothing that concerns is open; what of that takes longer than `evaluation.timeout_s` is given up.

        Raises:
            PrefixRLError: what `watch` raises.
        """
        patience_s = self._config.evaluation.timeout_s
        deadline_s = time.monotonic() + patience_s
        while any(concerns(name) for name in self._open):
            self.watch()
            try:
                self.gather()
            except PeerLost as error:
                log.warning("%s", error)
            if time.monotonic() > deadline_s:
                for name in [name for name in self._open if concerns(name)]:
                    self._give_up(name, f"not finished within {patience_s:g} s")
                return
            time.sleep(POLL_S)


def request_of(question: Question, config: RunConfig, texts: Renderer | ByteRenderer) -> Evaluate:
    """A question as the broker is asked it; `texts` reads the prefix."""
    heat = HEAT[question.decoding]
    completions = config.scorer_sampling(heat)
    limit = config.evaluation.max_new_tokens or completions.max_new_tokens
    return Evaluate(
        question.name,
        question.version,
        question.prefix,
        tuple(problem.prompt() for problem in question.problems),
        config.rollout_sampling(heat),
        msgspec.structs.replace(completions, max_new_tokens=limit),
        question.samples,
        texts.raw(token_ids(question.prefix)) if question.prefix else None,
    )


def _digest(request: Evaluate) -> str:
    return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(request))
