"""The arms of `prefixrl eval`: judges adapters and fixed prefixes on held-out problems."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path

from prefixrl.common.config.foreign.files import read_json
from prefixrl.common.config.foreign.verifier import MATHEMATICS
from prefixrl.common.config.run import RunConfig
from prefixrl.common.evaluation.accuracy import accuracy, means_by_problem
from prefixrl.common.evaluation.grouping import grouped
from prefixrl.common.evaluation.plans import (
    GREEDY,
    SAMPLED,
    ArmResult,
    EvaluationResults,
    OfflinePlan,
)
from prefixrl.common.prompts.rendering import texts_of
from prefixrl.common.wire.packing import pack_tokens
from prefixrl.learner.broker.client import BrokerClient
from prefixrl.learner.data import problems
from prefixrl.learner.evaluation.clustering import representatives
from prefixrl.learner.evaluation.majority import with_votes
from prefixrl.learner.evaluation.requests import (
    NO_ADAPTER,
    EvaluationRequest,
    EvaluationRequests,
    digest,
)
from prefixrl.learner.run.stop import StopSignal


class CheckpointEvaluation:
    """Judges the arms of one plan on its held-out problems."""

    def __init__(
        self,
        plan: OfflinePlan,
        config: RunConfig,
        client: BrokerClient,
        stop: StopSignal,
    ) -> None:
        self._plan = plan
        self._config = config
        self._decodings = {GREEDY: (GREEDY, 1)}
        """Decoding and answers per problem, by the end of the evaluation's name."""
        if plan.samples:
            self._decodings[f"{SAMPLED}{plan.samples}"] = (SAMPLED, plan.samples)
        folder = Path(config.directory) / "evaluations"
        folder.mkdir(exist_ok=True)
        self._requests = EvaluationRequests(config, client, folder, 0, plan.version, stop)
        held_out = grouped((problem.source, problem) for problem in problems.held_out(config))
        most = config.evaluation.problems
        self._sets = {name: members[:most] for name, members in held_out.items()}
        training = problems.training(config)
        self._selection = training[: config.evaluation.selection_problems]
        self._trained_on = {
            name: problems.count_shared(training, members) for name, members in self._sets.items()
        }

    def run(self) -> EvaluationResults:
        """Judge every arm on every set."""
        if "no_prefix" in self._plan.arms:
            self._ask_arm("no_prefix", NO_ADAPTER)
        if "adapter" in self._plan.arms:
            self._ask_arm("adapter", 0)
        if "fixed_prefix" in self._plan.arms:
            self._ask_best_of("fixed_prefix", self._fixed_prefixes())
        if "prefix_clustering" in self._plan.arms:
            self._ask_best_of("prefix_clustering", self._clustered_prefixes())
        self._wait("")
        return EvaluationResults(list(self._results()), self._requests.incomplete)

    def _ask_arm(self, arm: str, version: int, tokens: bytes = b"") -> None:
        for name, members in self._sets.items():
            for end, (decoding, samples) in self._decodings.items():
                question = EvaluationRequest(
                    f"{arm}.{name}.{end}", version, members, decoding, tokens, samples
                )
                self._requests.ask_problems(question)

    def _wait(self, beginning: str) -> None:
        """Wait for the evaluations whose name begins so."""
        self._requests.wait(lambda name: name.startswith(beginning))

    def _ask_best_of(self, arm: str, texts: list[str]) -> None:
        candidates = {text: pack_tokens(self._requests.texts.encode(text)) for text in texts}
        self._requests.ask_candidates(arm, f"{arm}-", candidates, self._selection)
        self._wait(f"{arm}-")
        if (best := self._requests.best(f"{arm}-", candidates)) is not None:
            self._ask_arm(arm, NO_ADAPTER, best)

    def _fixed_prefixes(self) -> list[str]:
        """Return the candidates that the run itself tried, else the configured candidates."""
        candidates_file = Path(self._config.directory) / "candidates.json"
        if candidates_file.exists():
            return list(read_json(candidates_file, dict[str, bytes]))
        return ["", *self._config.evaluation.fixed_prefixes]

    def _clustered_prefixes(self) -> list[str]:
        """Return representatives of the target's own openings on training problems."""
        self._requests.ask_problems(
            EvaluationRequest("openings", NO_ADAPTER, self._selection, SAMPLED)
        )
        self._wait("openings")
        target = texts_of(self._config, "scorer")
        rows = self._requests.rows.get("openings", [])
        cut = [target.encode(row.completion)[: self._plan.opening_tokens] for row in rows]
        openings = [tokens for tokens in cut if tokens.size]
        if not openings:
            return []
        chosen = representatives([tokens.tolist() for tokens in openings], self._config.seed)
        texts = (target.text(openings[index]).rstrip("\ufffd") for index in chosen)
        return list(dict.fromkeys(text for text in texts if text))

    def _results(self) -> Iterator[ArmResult]:
        """Yield the result of every arm on every set of which something could be judged."""
        for (name, members), arm, end in product(
            self._sets.items(), self._plan.arms, self._decodings
        ):
            rows = self._requests.rows.get(f"{arm}.{name}.{end}", [])
            if (result := accuracy(rows)) is None:
                continue
            # Votes need a rule for equal answers, which only mathematics has.
            if result.samples > 1 and self._config.data.verifiers <= {MATHEMATICS}:
                result = accuracy(with_votes(rows, self._config.scorer.verify_timeout_s)) or result
            first = rows[0]
            # Other weights than the plan names would be reported under the name of this adapter.
            self._plan.check_weights(first.weights_digest)
            yield ArmResult(
                run=self._plan.label,
                arm=arm,
                set=name,
                decoding=end,
                version=first.version,
                weights_digest=first.weights_digest,
                prefix="" if first.version >= 0 else first.prefix,
                errors=sum(row.status == "error" for row in rows),
                accuracy=result,
                questions_digest=digest([(each.question, each.gold) for each in members]),
                kind=self._plan.kind,
                means=means_by_problem(rows),
                trained_on=self._trained_on[name],
            )
