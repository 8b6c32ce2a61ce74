"""`python -m prefixrl.learner.offline`: judges an adapter that is trained already; `prefixrl eval` starts it and the workers.

    plan.json ──▶ broker that issues no training ──▶ rollouts, scorers ──▶ evaluations/*.jsonl ──▶ results.json

No model is loaded here. Rollouts load the checkpoint as their version 0, and the digest of what they hold must be the one under
which the run published it. What is judged already stands in files, so an evaluation that was interrupted goes on.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import click
import msgspec
import xxhash

from prefixrl.common.accuracy import accuracy
from prefixrl.common.config import RunConfig, from_json, import_functions
from prefixrl.common.hub import model_folder
from prefixrl.common.offline import (
    PLAN_FILE,
    RESULTS_FILE,
    Plan,
    Result,
    Results,
    check_weights,
)
from prefixrl.common.packing import pack_tokens
from prefixrl.common.process import exit_codes, start_logging, write_atomically
from prefixrl.common.rendering import ByteRenderer, Renderer
from prefixrl.learner import problems
from prefixrl.learner.client import BrokerClient
from prefixrl.learner.clustering import representatives
from prefixrl.learner.evaluate import texts_of
from prefixrl.learner.evaluations import GREEDY, NO_ADAPTER, SAMPLED, Evaluations, Question
from prefixrl.learner.problems import Problem
from prefixrl.learner.rundir import FREE_KEYS, RunDirectory
from prefixrl.learner.servers import Servers

log = logging.getLogger(__name__)


class Offline:
    """One plan, being carried out."""

    def __init__(
        self, plan: Plan, config: RunConfig, client: BrokerClient, watch: Callable[[], None]
    ) -> None:
        self._plan = plan
        self._config = config
        folder = Path(config.directory) / "evaluations"
        folder.mkdir(exist_ok=True)
        self._texts = texts_of(config)
        self._asked = Evaluations(config, client, folder, self._texts, 0, plan.version)
        self._asked.watch = watch
        self._sets: dict[str, list[Problem]] = {}
        for problem in problems.held_out(config):
            self._sets.setdefault(problem.source, []).append(problem)
        self._selection = problems.training(config)[: config.evaluation.selection_problems]

    def run(self) -> Results:
        """Judge every arm on every set."""
        own = {"no_prefix": (NO_ADAPTER, ""), "adapter": (0, "")}
        for arm in self._plan.arms:
            if arm in own:
                self._ask_arm(arm, *own[arm])
        for arm, candidates in (
            ("fixed_prefix", self._fixed_prefixes),
            ("prefix_clustering", self._clustered_prefixes),
        ):
            if arm in self._plan.arms and (best := self._best_of(arm, candidates())) is not None:
                self._ask_arm(arm, NO_ADAPTER, best)
        self._asked.wait(lambda name: True)
        return Results(self._results(), self._asked.incomplete)

    # --- asking ------------------------------------------------------------------------------------------------------

    def _decodings(self) -> dict[str, tuple[str, int]]:
        """Ends of the names, with decoding and answers per problem."""
        sampled = {f"{SAMPLED}{self._plan.samples}": (SAMPLED, self._plan.samples)}
        return {GREEDY: (GREEDY, 1)} | (sampled if self._plan.samples else {})

    def _ask_arm(self, arm: str, version: int, prefix: str) -> None:
        tokens = pack_tokens(self._texts.encode(prefix))
        for name, loaded in self._sets.items():
            for end, (decoding, samples) in self._decodings().items():
                asked = loaded[: self._config.evaluation.problems]
                question = Question(
                    f"{arm}.{name}.{end}", version, asked, decoding, tokens, samples
                )
                self._asked.ask(question)

    def _best_of(self, arm: str, candidates: list[str]) -> str | None:
        """The candidate that gets most training problems right; None where none could be judged."""
        for index, text in enumerate(candidates):
            log.info("candidate for %s: %r", arm, text)
            prefix = pack_tokens(self._texts.encode(text))
            question = Question(f"{arm}-{index}", NO_ADAPTER, self._selection, prefix=prefix)
            self._asked.ask(question)
        self._asked.wait(lambda name: name.startswith(f"{arm}-"))
        known = [
            (found.accuracy, text)
            for index, text in enumerate(candidates)
            if (found := accuracy(self._asked.rows.get(f"{arm}-{index}", [])))
        ]
        return max(known, key=lambda each: each[0])[1] if known else None

    def _fixed_prefixes(self) -> list[str]:
        """What the run itself tried, configured and sampled ones; in a run that tried none, the configured ones."""
        tried = Path(self._config.directory) / "candidates.json"
        if tried.exists():
            return list(msgspec.json.decode(tried.read_bytes(), type=dict[str, bytes]))
        return list(self._config.evaluation.fixed_prefixes)

    def _clustered_prefixes(self) -> list[str]:
        """Representatives of the target's own openings on training problems."""
        self._asked.ask(Question("openings", NO_ADAPTER, self._selection, SAMPLED))
        self._asked.wait(lambda name: name == "openings")
        target = target_texts(self._config)
        cut = [
            target.encode(row.completion)[: self._plan.opening_tokens]
            for row in self._asked.rows.get("openings", [])
        ]
        openings = [tokens for tokens in cut if tokens.size]
        if not openings:
            return []
        chosen = representatives([tokens.tolist() for tokens in openings], self._config.seed)
        texts = (target.text(openings[index]).rstrip("\ufffd") for index in chosen)
        return list(dict.fromkeys(text for text in texts if text))

    # --- results -----------------------------------------------------------------------------------------------------

    def _results(self) -> list[Result]:
        found = []
        for name, loaded in self._sets.items():
            asked = loaded[: self._config.evaluation.problems]
            for arm in self._plan.arms:
                for end in self._decodings():
                    rows = self._asked.rows.get(f"{arm}.{name}.{end}", [])
                    if (amount := accuracy(rows)) is not None:
                        held, published = rows[0].weights_digest, self._plan.published
                        check_weights(self._plan.version, held, published)
                        is_adapter = rows[0].version >= 0
                        found.append(
                            Result(
                                run=self._plan.label,
                                arm=arm,
                                set=name,
                                decoding=end,
                                version=rows[0].version,
                                weights_digest=rows[0].weights_digest,
                                prefix="" if is_adapter else rows[0].prefix,
                                errors=sum(row.status == "error" for row in rows),
                                accuracy=amount,
                                asked=_digest(asked),
                                kind=self._plan.kind,
                            )
                        )
        return found


def target_texts(config: RunConfig) -> Renderer | ByteRenderer:
    """The target's tokenizer, or what stands in for it where the engine is simulated; its weights are not fetched."""
    if config.scorer.engine == "simulated":
        return ByteRenderer()
    assert config.target is not None
    model = model_folder(config.target.model, needs_weights=False)
    return Renderer(model, config.scorer.max_prompt_tokens)


def _digest(asked: Sequence[Problem]) -> str:
    pairs = [(each.question, each.gold) for each in asked]
    return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(pairs))


@contextmanager
def serving(config: RunConfig) -> Iterator[tuple[BrokerClient, Callable[[], None]]]:
    """A broker that trains nothing, and what to call while waiting for it; workers are sent home when all is well.

    Raises:
        PeerLost: by the call, when the servers are beyond help.
    """
    servers = Servers(config, Path(config.directory), 0, trains=False)
    client = BrokerClient(servers.endpoint, servers.check)
    try:
        yield client, servers.check
        servers.expect_end()
        client.stop("everything is judged")
    finally:
        client.close()
        servers.close()


@click.command()
@click.argument("directory", type=click.Path(path_type=Path))
def main(directory: Path) -> None:
    """Carry out the plan in DIRECTORY."""
    start_logging("prefixrl-offline")
    with exit_codes():
        plan = msgspec.json.decode((directory / PLAN_FILE).read_bytes(), type=Plan)
        config = from_json(plan.config, f"the plan in {directory}")
        import_functions(config)
        owned = RunDirectory(config, FREE_KEYS | {("data", "eval")})
        problems.keep_missing(config)
        with serving(config) as (client, watch):
            results = Offline(plan, config, client, watch).run()
            text = msgspec.json.format(msgspec.json.encode(results), indent=2).decode()
            write_atomically(owned.path / RESULTS_FILE, text)


if __name__ == "__main__":
    main()
