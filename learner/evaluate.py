"""The arms every run reports: what the target does alone, with the best fixed prefix, with the adapter before and after.

In direct mode there is no target, and the arms are the adapter before and after.

All arms go through the same workers, held-out problems, greedy and sampled. The fixed prefix is the best single one on training
problems among the configured texts and the prefixes the untrained adapter writes most often. Requests are answered while
training goes on; nothing here waits but `finish`, which has a deadline.
"""

import logging
import math
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from prefixrl.common.config import RunConfig
from prefixrl.common.errors import PeerLost
from prefixrl.common.hub import model_folder
from prefixrl.common.messages import Evaluate, Prompt, ScoredGroup
from prefixrl.common.packing import pack_tokens, token_ids
from prefixrl.common.process import write_atomically
from prefixrl.common.rendering import ByteRenderer, Renderer
from prefixrl.learner import problems
from prefixrl.learner.client import BrokerClient

log = logging.getLogger(__name__)

POLL_S = 0.2
ARMS = ("no_prefix", "fixed_prefix", "untrained_adapter", "trained_adapter")
GREEDY, SAMPLED = "greedy", "sampled"
Z_975 = 1.959964

Interval = Literal["wilson", "normal"]
"""Of a proportion, where every reward is 0 or 1; else of a mean."""


class EvaluatedRow(msgspec.Struct, frozen=True):
    """One judged problem of one arm, a line of `evaluations/<arm>.<decoding>.jsonl`."""

    prompt_id: str
    family: str
    version: int
    prefix: str
    completion: str
    extracted: str
    reward: float
    status: str
    finish: str = ""
    """What ended the text that was judged; `length`: it was cut."""


class Accuracy(msgspec.Struct, frozen=True):
    """Mean reward: the share of problems right. Rows whose verifier failed are counted apart, never as wrong."""

    accuracy: float
    ci95: tuple[float, float]
    interval: Interval
    """What `ci95` is."""
    problems: int
    by_family: dict[str, float]
    truncated_fraction: float
    """Share of the judged texts that a length limit cut."""


def wilson(right: float, of: int) -> tuple[float, float]:
    """Wilson's 95% score interval for a proportion (Wilson 1927)."""
    share, spread = right / of, Z_975 * Z_975 / of
    centre = (share + spread / 2) / (1 + spread)
    half = Z_975 / (1 + spread) * math.sqrt(share * (1 - share) / of + spread / (4 * of))
    return max(0.0, centre - half), min(1.0, centre + half)


def mean_interval(rewards: Sequence[float]) -> tuple[float, float]:
    """The normal 95% interval of the mean of rewards in [0, 1]; (0, 1) of one reward, which says nothing of their spread."""
    if len(rewards) == 1:
        return 0.0, 1.0
    mean = statistics.fmean(rewards)
    half = Z_975 * statistics.stdev(rewards) / math.sqrt(len(rewards))
    return max(0.0, mean - half), min(1.0, mean + half)


def accuracy(rows: Sequence[EvaluatedRow]) -> Accuracy | None:
    """Accuracy of an arm with its interval and its families; None where nothing could be judged."""
    judged = [row for row in rows if row.status != "error"]
    if not judged:
        return None
    families: dict[str, list[float]] = defaultdict(list)
    for row in judged:
        families[row.family].append(row.reward)
    rewards = [row.reward for row in judged]
    is_binary = all(reward in (0.0, 1.0) for reward in rewards)
    return Accuracy(
        accuracy=statistics.fmean(rewards),
        ci95=wilson(sum(rewards), len(rewards)) if is_binary else mean_interval(rewards),
        interval="wilson" if is_binary else "normal",
        problems=len(judged),
        by_family={name: statistics.fmean(each) for name, each in sorted(families.items()) if name},
        truncated_fraction=sum(row.finish == "length" for row in judged) / len(judged),
    )


class Evaluator:
    """Asks for the arms and gathers them; an arm whose file stands in the run directory already is not judged again."""

    def __init__(
        self, config: RunConfig, client: BrokerClient, directory: Path, iteration: int
    ) -> None:
        self._config = config
        self._is_direct = config.mode == "direct"
        self._client = client
        self._directory = directory / "evaluations"
        self._directory.mkdir(exist_ok=True)
        self._candidates_file = self._directory / "candidates.json"
        simulated = config.rollout.engine == "simulated"
        self._adapter_text = (
            ByteRenderer()
            if simulated
            else Renderer(model_folder(config.adapter.model), config.rollout.max_prompt_tokens)
        )
        self._held_out = problems.held_out(config)[: config.evaluation.problems]
        training = problems.training(config)
        self._selection = training[: config.evaluation.selection_problems]
        self._family = {
            problem.prompt_id: problem.family for problem in (*self._held_out, *training)
        }
        self._open: dict[str, Evaluate] = {}
        self._rows: dict[str, list[EvaluatedRow]] = {}
        self._candidates: dict[str, bytes] = {}
        self.incomplete: list[str] = []
        self.iteration = iteration
        """Version the learner stands at: the only one whose prefixes can still be asked for."""

    # --- asking ------------------------------------------------------------------------------------------------------

    def ask_before_training(self) -> None:
        """The arms that need no training, and, in a run that is resumed, what was asked for before."""
        if not self._is_direct:
            self._ask_arm("no_prefix", -1, b"")
        self._ask_arm("untrained_adapter", 0, b"")
        if self.iteration > 0 and self._candidates_file.exists():
            known = msgspec.json.decode(self._candidates_file.read_bytes(), type=dict[str, bytes])
            self._ask_for_each(known)

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
            self._ask(name, -1, tokens, [problem.prompt() for problem in self._selection], 0.0)

    def _ask_arm(self, arm: str, version: int, prefix: bytes) -> None:
        prompts = [problem.prompt() for problem in self._held_out]
        self._ask(f"{arm}.{GREEDY}", version, prefix, prompts, 0.0)
        self._ask(f"{arm}.{SAMPLED}", version, prefix, prompts, 1.0)

    def _ask(
        self, name: str, version: int, prefix: bytes, prompts: list[Prompt], heat: float
    ) -> None:
        """`heat` 0 decodes greedily, 1 at the run's own temperatures."""
        path = self._directory / f"{name}.jsonl"
        if path.exists():
            decoder = msgspec.json.Decoder(EvaluatedRow)
            self._take(name, [decoder.decode(line) for line in path.read_bytes().splitlines()])
            return
        if not prompts:
            return
        completions = self._config.scorer_sampling(heat)
        limit = self._config.evaluation.max_new_tokens or completions.max_new_tokens
        self._open[name] = Evaluate(
            name, version, prefix, tuple(prompts),
            self._config.rollout_sampling(heat),
            msgspec.structs.replace(completions, max_new_tokens=limit),
            self._adapter_text.raw(token_ids(prefix)) if prefix else None,
        )  # fmt: skip
        if version in (-1, self.iteration):
            self._client.evaluate(self._open[name])
        else:
            self._give_up(
                name, f"version {version} is gone: the run was resumed at {self.iteration}"
            )

    # --- gathering ---------------------------------------------------------------------------------------------------

    def gather(self) -> None:
        """Take what is finished; ask again for what a restarted broker has forgotten, where that can still be had."""
        for name, request in list(self._open.items()):
            progress, groups = self._client.evaluation(name)
            if progress.total < 0 and request.version in (-1, self.iteration):
                self._client.evaluate(request)
            elif progress.total < 0:
                self._give_up(name, f"version {request.version} is gone since the broker restarted")
            elif groups and progress.done + progress.failed == progress.total:
                self._keep(name, groups)
            elif progress.failed == progress.total:
                self._give_up(name, "every problem failed")

    def _keep(self, name: str, groups: list[ScoredGroup]) -> None:
        versions = {group.version for group in groups}
        assert versions == {self._open[name].version}, (
            f"evaluation {name} mixed versions {versions}"
        )
        rows = [self._row(group) for group in groups]
        path = self._directory / f"{name}.jsonl"
        write_atomically(path, "".join(msgspec.json.encode(row).decode() + "\n" for row in rows))
        del self._open[name]
        self._take(name, rows)

    def _take(self, name: str, rows: list[EvaluatedRow]) -> None:
        self._rows[name] = rows
        if accuracy(rows) is None:
            self._give_up(name, "no verdict on any problem, every row ended in an error")

    def _row(self, group: ScoredGroup) -> EvaluatedRow:
        row, verdict, prompt = group.prefixes.rows[0], group.verdicts[0], group.prefixes.prompt
        return EvaluatedRow(
            prompt_id=prompt.prompt_id,
            family=self._family.get(prompt.prompt_id, ""),
            version=group.version,
            # In direct mode the adapter wrote the completion itself.
            prefix="" if self._is_direct else self._adapter_text.text(token_ids(row.tokens)),
            completion=verdict.completion,
            extracted=verdict.extracted,
            reward=verdict.reward,
            status=verdict.status,
            finish=verdict.finish,
        )

    def _give_up(self, name: str, reason: str) -> None:
        log.warning("evaluation %s is incomplete: %s", name, reason)
        self.incomplete.append(name)
        self._open.pop(name, None)

    def finish(self) -> None:
        """Choose the fixed prefix, judge it and the trained adapter, wait for everything that is open."""
        self._ask_arm("trained_adapter", self.iteration, b"")
        deadline_s = time.monotonic() + self._config.evaluation.timeout_s
        self._wait(deadline_s, lambda name: name.startswith("candidate-"))
        best = max(self._candidates, key=lambda name: self._mean(name), default=None)
        if best is not None and self._mean(best) >= 0.0:
            self._ask_arm("fixed_prefix", -1, self._candidates[best])
        self._wait(deadline_s, lambda name: True)

    def _mean(self, name: str) -> float:
        """Of a candidate; -1 where nothing is known of it."""
        found = accuracy(self._rows.get(name, []))
        return found.accuracy if found else -1.0

    def _wait(self, deadline_s: float, concerns: Callable[[str], bool]) -> None:
        while any(concerns(name) for name in self._open):
            try:
                self.gather()
            except PeerLost as error:
                log.warning("%s", error)
            if time.monotonic() > deadline_s:
                for name in list(self._open):
                    self._give_up(
                        name, f"not finished within {self._config.evaluation.timeout_s:g} s"
                    )
                return
            time.sleep(POLL_S)

    def arms(self) -> dict[str, dict[str, Accuracy]]:
        """Accuracy per arm and decoding, of the arms that are complete and of which something could be judged."""
        found: dict[str, dict[str, Accuracy]] = {}
        for arm in ARMS:
            for decoding in (GREEDY, SAMPLED):
                if each := accuracy(self._rows.get(f"{arm}.{decoding}", [])):
                    found.setdefault(arm, {})[decoding] = each
        return found

    def errors(self) -> int:
        """Rows of all arms whose verifier failed."""
        names = (f"{arm}.{decoding}" for arm in ARMS for decoding in (GREEDY, SAMPLED))
        return sum(row.status == "error" for name in names for row in self._rows.get(name, []))

    def fixed_prefix(self) -> str:
        """Text of the fixed prefix that was chosen, "" where none was."""
        rows = self._rows.get(f"fixed_prefix.{GREEDY}")
        return rows[0].prefix if rows else ""
