"""The arms every run reports: what the target does alone, with the best fixed prefix, with the adapter before and after.

In direct mode there is no target, and the arms are the adapter before and after. With `evaluation.every` the adapter is an arm
at every so many versions too.

All arms go through the same workers, held-out problems, greedy and sampled. The fixed prefix is the best single one on training
problems among the configured texts and the prefixes the untrained adapter writes most often.
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from prefixrl.common.accuracy import Accuracy, Point, accuracy
from prefixrl.common.config import RunConfig
from prefixrl.common.hub import model_folder
from prefixrl.common.messages import ScoredGroup
from prefixrl.common.packing import pack_tokens, token_ids
from prefixrl.common.process import write_atomically
from prefixrl.common.rendering import ByteRenderer, Renderer
from prefixrl.learner import problems
from prefixrl.learner.client import BrokerClient
from prefixrl.learner.evaluations import GREEDY, NO_ADAPTER, SAMPLED, Evaluations, Question

log = logging.getLogger(__name__)

ARMS = ("no_prefix", "fixed_prefix", "untrained_adapter", "trained_adapter")
AT = "adapter@"
"""Begins the name of an evaluation in training, its version follows."""


class Evaluator:
    """Asks for the arms and gathers them."""

    def __init__(
        self, config: RunConfig, client: BrokerClient, directory: Path, iteration: int
    ) -> None:
        self._config = config
        self._is_direct = config.mode == "direct"
        folder = directory / "evaluations"
        folder.mkdir(exist_ok=True)
        self._candidates_file = folder / "candidates.json"
        self._adapter_text = texts_of(config)
        self._held_out = problems.held_out(config)[: config.evaluation.problems]
        training = problems.training(config)
        self._selection = training[: config.evaluation.selection_problems]
        self._candidates: dict[str, bytes] = {}
        self._first = iteration
        self.asked = Evaluations(config, client, folder, self._adapter_text, iteration)

    # --- asking ------------------------------------------------------------------------------------------------------

    def ask_before_training(self) -> None:
        """The arms that need no training, and, in a run that is resumed, what was asked for before."""
        if not self._is_direct:
            self._ask_arm("no_prefix", NO_ADAPTER)
        self._ask_arm("untrained_adapter", 0)
        for version in range(1, self._first):
            self.ask_version(version)
        if self._first > 0 and self._candidates_file.exists():
            known = msgspec.json.decode(self._candidates_file.read_bytes(), type=dict[str, bytes])
            self._ask_for_each(known)

    def ask_version(self, version: int) -> None:
        """Judge this version where one is due; to be called before it is published, or rollouts may have passed it by."""
        every = self._config.evaluation.every
        if every and version and version % every == 0:
            self.asked.ask(Question(_name_at(version), version, self._held_out))

    def ask_candidates(self, first_batch: list[ScoredGroup]) -> None:
        """Judge every candidate for the fixed prefix on training problems, once the first groups show what is written often."""
        if self._is_direct:
            return
        texts = {
            text: pack_tokens(self._adapter_text.encode(text))
            for text in self._config.evaluation.fixed_prefixes
        }
        seen = Counter(
            self._adapter_text.without_stop(token_ids(row.tokens)).tobytes()
            for group in first_batch
            for row in group.prefixes.rows
        )
        for tokens, _ in seen.most_common(self._config.evaluation.sampled_candidates):
            texts.setdefault(self._adapter_text.text(token_ids(tokens)), tokens)
        write_atomically(self._candidates_file, msgspec.json.encode(texts).decode())
        self._ask_for_each(texts)

    def _ask_for_each(self, candidates: dict[str, bytes]) -> None:
        for index, (text, tokens) in enumerate(candidates.items()):
            name = f"candidate-{index}"
            self._candidates[name] = tokens
            log.info("candidate for the fixed prefix: %r", text)
            self.asked.ask(Question(name, NO_ADAPTER, self._selection, prefix=tokens))

    def _ask_arm(
        self,
        arm: str,
        version: int,
        prefix: bytes = b"",
        decodings: Sequence[str] = (GREEDY, SAMPLED),
    ) -> None:
        for decoding in decodings:
            name = f"{arm}.{decoding}"
            self.asked.ask(Question(name, version, self._held_out, decoding, prefix))

    # --- gathering ---------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Choose the fixed prefix, judge it and the trained adapter, wait for everything that is open."""
        version = self.asked.iteration
        self._ask_arm("trained_adapter", version, decodings=(SAMPLED,))
        # The last version may have been due in training: what was judged then is not judged again.
        self.asked.wait(lambda name: name == _name_at(version))
        last = Question(f"trained_adapter.{GREEDY}", version, self._held_out)
        if not self.asked.adopt(last, _name_at(version)):
            self.asked.ask(last)
        self.asked.wait(lambda name: name.startswith("candidate-"))
        best = max(self._candidates, key=lambda name: self._mean(name), default=None)
        if best is not None and self._mean(best) >= 0.0:
            self._ask_arm("fixed_prefix", NO_ADAPTER, self._candidates[best])
        self.asked.wait(lambda name: True)

    def _mean(self, name: str) -> float:
        """Of a candidate; -1 where nothing is known of it."""
        found = accuracy(self.asked.rows.get(name, []))
        return found.accuracy if found else -1.0

    def arms(self) -> dict[str, dict[str, Accuracy]]:
        """Accuracy per arm and decoding, of the arms that are complete and of which something could be judged."""
        found: dict[str, dict[str, Accuracy]] = {}
        for arm in ARMS:
            for decoding in (GREEDY, SAMPLED):
                if each := accuracy(self.asked.rows.get(f"{arm}.{decoding}", [])):
                    found.setdefault(arm, {})[decoding] = each
        return found

    def curve(self) -> list[Point]:
        """The adapter by version, the untrained and the newest included."""
        names = {
            0: f"untrained_adapter.{GREEDY}",
            self.asked.iteration: f"trained_adapter.{GREEDY}",
        }
        names |= {_version_of(name): name for name in self.asked.rows if name.startswith(AT)}
        return [
            Point(version, found.accuracy, found.ci95)
            for version, name in sorted(names.items())
            if (found := accuracy(self.asked.rows.get(name, [])))
        ]

    def check_course(self, published: Mapping[int, str]) -> None:
        """Drop evaluations of versions that a resumed run has come by again with other weights; `published`: digests."""
        for name in [name for name in self.asked.rows if name.startswith(AT)]:
            digest = published.get(_version_of(name))
            if digest is not None and self.asked.rows[name][0].weights_digest != digest:
                self.asked.drop(
                    name, "it was of weights that the resumed run has not come by again"
                )

    def errors(self) -> int:
        """Rows of all arms whose verifier failed."""
        names = (f"{arm}.{decoding}" for arm in ARMS for decoding in (GREEDY, SAMPLED))
        return sum(row.status == "error" for name in names for row in self.asked.rows.get(name, []))

    def fixed_prefix(self) -> str:
        """Text of the fixed prefix that was chosen, "" where none was."""
        rows = self.asked.rows.get(f"fixed_prefix.{GREEDY}")
        return rows[0].prefix if rows else ""


def texts_of(config: RunConfig) -> Renderer | ByteRenderer:
    """The adapter's tokenizer, or what stands in for it where the engine is simulated."""
    if config.rollout.engine == "simulated":
        return ByteRenderer()
    return Renderer(model_folder(config.adapter.model), config.rollout.max_prompt_tokens)


def _name_at(version: int) -> str:
    return f"{AT}{version}.{GREEDY}"


def _version_of(name: str) -> int:
    return int(name.removeprefix(AT).partition(".")[0])
