"""Arms of every run: the target alone, with a fixed prefix, the adapter before and after.

In direct mode, and with `evaluation.every`, versions of the adapter are arms. All answer the same held-out problems,
greedy and sampled. The fixed prefix is the best on training problems among none, the configured texts and the prefixes
that the untrained adapter writes most often.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path

import msgspec

from prefixrl.common.config.foreign.files import read_json
from prefixrl.common.config.run import RunConfig
from prefixrl.common.evaluation.accuracy import Accuracy, Point, accuracy
from prefixrl.common.evaluation.plans import GREEDY, SAMPLED
from prefixrl.common.host.process import write_atomically
from prefixrl.common.run.documents import ARMS
from prefixrl.common.wire.messages.groups import ScoredGroup
from prefixrl.common.wire.packing import pack_tokens, token_ids
from prefixrl.learner.broker.client import BrokerClient
from prefixrl.learner.data import problems
from prefixrl.learner.evaluation.requests import NO_ADAPTER, EvaluationRequest, EvaluationRequests
from prefixrl.learner.run.stop import NO_STOP, StopSignal
from prefixrl.learner.run.summary import EvaluationOutcome

AT = "adapter@"
UNAFFORDABLE = "with it the run would cost more than scorer.openai.most_cost"
"""Begins the name of an evaluation in training; its version follows."""
CANDIDATE = "candidate-"
"""Begins the name of an evaluation of a candidate for the fixed prefix; its index follows."""


class Arms:
    """Requests for the arms, and their results."""

    def __init__(
        self,
        config: RunConfig,
        client: BrokerClient,
        directory: Path,
        iteration: int,
        stop: StopSignal = NO_STOP,
    ) -> None:
        """`stop` may end a wait for room on the disk, and the wait for the last results."""
        self._config = config
        self._is_direct = config.mode == "direct"
        folder = directory / "evaluations"
        folder.mkdir(exist_ok=True)
        self._candidates_file = folder / "candidates.json"
        self._held_out = problems.held_out(config)[: config.evaluation.problems]
        self._selection = problems.training(config)[: config.evaluation.selection_problems]
        self._candidates: dict[str, bytes] = {}
        self._first = iteration
        self.requests = EvaluationRequests(config, client, folder, iteration, 0, stop)

    @property
    def pinned(self) -> frozenset[int]:
        """Versions whose weights rollouts must still be able to fetch."""
        return self.requests.open.pinned

    @property
    def awaited(self) -> frozenset[int]:
        """Versions of the training whose evaluation goes on."""
        return frozenset(
            _version_of(name) for name in self.requests.open.names if name.startswith(AT)
        )

    def advance(self, iteration: int) -> None:
        """Note the current version of the learner."""
        self.requests.open.iteration = iteration

    def ask_before_training(self) -> None:
        """Ask for the arms that need no training; in a resumed run also for what was asked before."""
        if not self._is_direct:
            self._ask_arm("no_prefix", NO_ADAPTER)
        self._ask_arm("untrained_adapter", 0)
        for version in range(1, self._first):
            self.ask_version(version)
        if self._first > 0 and self._candidates_file.exists():
            self._ask_for(read_json(self._candidates_file, dict[str, bytes]))

    def ask_version(self, version: int) -> None:
        """Have this version judged if due; call it before publishing: rollouts still hold it then."""
        every = self._config.evaluation.every
        if every and version and version % every == 0:
            self.requests.ask_problems(
                EvaluationRequest(_name_at(version), version, self._held_out)
            )

    def ask_candidates(self, first_batch: list[ScoredGroup]) -> None:
        """Have the candidates for the fixed prefix judged; `first_batch` gives some of them."""
        if self._is_direct:
            return
        tokenizer = self.requests.texts
        # The empty one first: a prefix that does no better than none is not the best.
        fixed = ("", *self._config.evaluation.fixed_prefixes)
        texts = {text: pack_tokens(tokenizer.encode(text)) if text else b"" for text in fixed}
        rows = (row for group in first_batch for row in group.prefixes.rows)
        sampled = Counter(tokenizer.without_stop(token_ids(row.tokens)).tobytes() for row in rows)
        for tokens, _ in sampled.most_common(self._config.evaluation.sampled_candidates):
            texts.setdefault(tokenizer.text(token_ids(tokens)), tokens)
        document = msgspec.json.encode(texts)
        path = self._candidates_file
        self.requests.keep(lambda: write_atomically(path, document), path.name)
        self._ask_for(texts)

    def _ask_for(self, candidates: dict[str, bytes]) -> None:
        self._candidates = candidates
        self.requests.ask_candidates("the fixed prefix", CANDIDATE, candidates, self._selection)

    def _ask_arm(
        self,
        arm: str,
        version: int,
        prefix: bytes = b"",
        decodings: Sequence[str] = (GREEDY, SAMPLED),
    ) -> None:
        for decoding in decodings:
            self.requests.ask_problems(
                EvaluationRequest(f"{arm}.{decoding}", version, self._held_out, decoding, prefix)
            )

    def gather(self, published: Mapping[int, str]) -> None:
        """Take results; discard versions trained again since (`published`: digests by version)."""
        self.requests.gather()
        for name in [name for name in self.requests.rows if name.startswith(AT)]:
            digest = published.get(_version_of(name))
            if digest is not None and self.requests.rows[name][0].weights_digest != digest:
                self.requests.drop(
                    name, "the resumed run trained this version anew, with other weights"
                )

    @property
    def last_answers(self) -> int:
        """Number of answers that `finish` asks for: the trained adapter's, and those of the fixed prefix."""
        arms = 1 if self._is_direct else 2
        return 2 * arms * len(self._held_out)  # greedy and sampled

    def finish(self, is_affordable: bool = True) -> None:
        """Judge the best fixed prefix and the trained adapter; wait for all, unless a stop comes.

        `is_affordable` False: nothing new is asked.
        """
        version = self.requests.open.iteration
        if not is_affordable:
            self.requests.wait(lambda name: True)
            last = EvaluationRequest(f"trained_adapter.{GREEDY}", version, self._held_out)
            self.requests.adopt(last, _name_at(version))
            for arm, decoding in product(("trained_adapter", "fixed_prefix"), (GREEDY, SAMPLED)):
                self.requests.refuse(f"{arm}.{decoding}", UNAFFORDABLE)
            return
        self._ask_arm("trained_adapter", version, decodings=(SAMPLED,))
        # The last version may have been due in training: then it is not judged again.
        self.requests.wait(lambda name: name == _name_at(version))
        last = EvaluationRequest(f"trained_adapter.{GREEDY}", version, self._held_out)
        if not self.requests.adopt(last, _name_at(version)):
            self.requests.ask_problems(last)
        self.requests.wait(lambda name: name.startswith(CANDIDATE))
        if (best := self.requests.best(CANDIDATE, self._candidates)) is not None:
            self._ask_arm("fixed_prefix", NO_ADAPTER, best)
        self.requests.wait(lambda name: True)

    def results(self) -> dict[str, dict[str, Accuracy]]:
        """Return the accuracy by arm and decoding, of the arms of which something could be judged."""
        results = defaultdict[str, dict[str, Accuracy]](dict)
        for arm, decoding in product(ARMS, (GREEDY, SAMPLED)):
            if result := accuracy(self.requests.rows.get(f"{arm}.{decoding}", [])):
                results[arm][decoding] = result
        return results

    def curve(self) -> list[Point]:
        """Return the greedy accuracy of the adapter by version, from the untrained to the newest."""
        names = {
            0: f"untrained_adapter.{GREEDY}",
            self.requests.open.iteration: f"trained_adapter.{GREEDY}",
        }
        names |= {_version_of(name): name for name in self.requests.rows if name.startswith(AT)}
        return [
            Point(version, result.accuracy, result.ci95)
            for version, name in sorted(names.items())
            if (result := accuracy(self.requests.rows.get(name, [])))
        ]

    def outcome(self) -> EvaluationOutcome:
        """Return everything that the summary of the run reports."""
        rows = self.requests.rows
        names = map(".".join, product(ARMS, (GREEDY, SAMPLED)))
        errors = sum(row.status == "error" for name in names for row in rows.get(name, []))
        prefix = next((row.prefix for row in rows.get(f"fixed_prefix.{GREEDY}", [])), "")
        return EvaluationOutcome(
            self.results(), self.curve(), prefix, self.requests.incomplete, errors
        )


def _name_at(version: int) -> str:
    return f"{AT}{version}.{GREEDY}"


def _version_of(name: str) -> int:
    return int(name.removeprefix(AT).partition(".")[0])
