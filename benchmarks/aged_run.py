"""A whole training run in one process in which every trained sample has an exact age, on the real ledger and loss.

    fill      at version v: while the window has room, sample and judge groups with the weights of version v
    train     iteration v: the batch the ledger chooses, through `train_iteration`; its weights are version v + 1

The window is filled as soon as it opens, so the ledger itself makes the age: S + 1 batches are sampled at version 0 and
one at each later version, and iteration t trains what version max(0, t - S) wrote. Each group's prompt and random draws
follow from its sequence number, and rows are held together in one forward (`bitwise`), so runs of one seed differ in
nothing but what is asked of them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.snapshots import snapshot_of
from prefixrl.common.config.run import RunConfig
from prefixrl.common.engines.embedded.fixed_rows import FixedRowsEngine
from prefixrl.common.engines.interface.base import Job, JobResult, TokenIds
from prefixrl.common.prompts.extract import extract_answer
from prefixrl.common.prompts.rendering import Renderer
from prefixrl.common.seeds import derive
from prefixrl.common.wire.messages.groups import (
    GroupPrefixes,
    GroupTask,
    Prompt,
    Row,
    Sampling,
    ScoredGroup,
    Verdict,
)
from prefixrl.common.wire.messages.worker import PrefixTask
from prefixrl.common.wire.packing import logprobs, pack_tokens, token_ids, token_versions
from prefixrl.learner.broker.groups.ledger import Ledger
from prefixrl.learner.broker.groups.states import LedgerLimits
from prefixrl.learner.broker.groups.window import Choice, Window
from prefixrl.learner.data.order import PromptOrder
from prefixrl.learner.data.problems import load
from prefixrl.learner.models.batch import IterationData, Sample
from prefixrl.learner.models.model import Models
from prefixrl.learner.training.figures import IterationMetrics
from prefixrl.learner.training.iteration import train_iteration
from prefixrl.rollout.loop import make_job, pack_row
from prefixrl.scorer.verifier.exchange import ChildQuestion
from prefixrl.scorer.verifier.rules.verify import (
    Judgement,
    UnparsableAnswerError,
    judge_exactly,
    verify_with_sympy,
)
from prefixrl.scorer.verifier.scoring import Scoring


@dataclass(frozen=True)
class Trained:
    """One iteration: what was trained, the ages its samples carry (in versions), and the learner's figures."""

    data: IterationData
    ages: Counter[int]
    metrics: IterationMetrics

    @property
    def commonest_text_fraction(self) -> float:
        """Share of the rows with the commonest text."""
        texts = Counter(sample.tokens.tobytes() for sample in self.data.samples.values())
        return texts.most_common(1)[0][1] / texts.total()


class Target:
    """The frozen target and its verifier or reward function, greedy.

    A verdict is a function of question and prefix, so each is made once.
    """

    def __init__(self, config: RunConfig) -> None:
        assert config.scorer.temperature == 0.0, "a sampled completion is no function of its prefix"
        model = config.model_of("scorer")
        self._sampling = Sampling(temperature=0.0, max_new_tokens=config.scorer.max_new_tokens)
        self._engine = FixedRowsEngine(model, "cpu", "float32", 1)
        self._text = Renderer(model, config.scorer.max_prompt_tokens)
        self._reads = Renderer(config.adapter.model, config.rollout.max_prompt_tokens)
        self._reward = config.reward.function
        self._verdicts: dict[tuple[str, bytes], Verdict] = {}

    def judge(self, groups: Sequence[GroupPrefixes]) -> list[tuple[Verdict, ...]]:
        """A verdict per row of each group."""
        verdicts = iter(
            self.verdicts([(group.prompt, row.tokens) for group in groups for row in group.rows])
        )
        return [tuple(next(verdicts) for _ in group.rows) for group in groups]

    def verdicts(self, asked: Sequence[tuple[Prompt, bytes]]) -> list[Verdict]:
        """A verdict per prompt and packed prefix; new ones are completed in one forward."""
        keys = [(prompt.question, tokens) for prompt, tokens in asked]
        gold = {prompt.question: prompt.gold for prompt, _ in asked}
        new = [key for key in dict.fromkeys(keys) if key not in self._verdicts]
        if new:
            prefixes = [self._prefix(token_ids(tokens)) for _, tokens in new]
            rows = tuple(
                np.concatenate([self._text.prompt(question), prefix])
                for (question, _), prefix in zip(new, prefixes, strict=True)
            )
            draws = np.zeros((len(rows), self._sampling.max_new_tokens))
            job = Job("task", rows, draws, self._sampling, self._text.stop_tokens)
            for key, prefix, row in zip(new, prefixes, _run(self._engine, job).rows, strict=True):
                text = self._text.text(np.concatenate([prefix, row.tokens]))
                self._verdicts[key] = self._verdict(key[0], gold[key[0]], text)
        return [self._verdicts[key] for key in keys]

    def _prefix(self, tokens: TokenIds) -> TokenIds:
        """A prefix as the target continues it: ids that read the same to it, else the text."""
        text = self._reads.decode_with_special(self._reads.without_stop(tokens))
        bare = self._text.without_stop(tokens)
        if text in map(self._text.decode_with_special, (bare, tokens)):
            return bare
        return self._text.encode_literal(text.rstrip("\ufffd"))

    def _verdict(self, question: str, gold: str, text: str) -> Verdict:
        return (
            verdict(gold, text)
            if self._reward is None
            else scored(self._reward, question, gold, text)
        )


class AgedRun:
    """See the module text. `config.algorithm.max_staleness` is the age."""

    def __init__(self, config: RunConfig, target: "Target") -> None:
        algorithm = config.algorithm
        assert algorithm.iterations is not None
        self.config = config
        # Prefixes are drawn from the whole vocabulary here.
        rollout = config.rollout.model_copy(update={"control_tokens": "allow"})
        self.models = Models.load(
            config.model_copy(update={"rollout": rollout}), 0, 1, config.adapter.model
        )
        self.version = 0
        self._adapter = FixedRowsEngine(config.adapter.model, "cpu", "float32", 1)
        self._target = target
        self._digest = self._adapter.digest()
        self._text = Renderer(config.adapter.model, config.rollout.max_prompt_tokens)
        train = [problem.prompt() for problem in load(config.data.train, config.data)]
        self._order = PromptOrder(train, config.seed, config.data.epochs)
        window = Window(
            algorithm.groups_per_iteration, algorithm.max_staleness, iterations=algorithm.iterations
        )
        limits = LedgerLimits(config.rollout.groups_per_task, 1, 0)
        self.ledger = Ledger(window, limits, self._order)
        self._steps = algorithm.iterations * algorithm.minibatches * algorithm.ppo_epochs

    def fill(self) -> None:
        """Sample and judge with the present weights for as long as the window has room."""
        while item := self.ledger.start_sampling(self.version):
            groups = self._write(
                [
                    GroupTask(seq, self._prompt(seq), derive(self.config.seed, "group", seq))
                    for seq in item.seqs
                ],
                self.config.algorithm.samples_per_prompt,
            )
            self.ledger.take_prefixes(groups, self.version, self._digest, 0.0)
            due = self.ledger.start_scoring()
            assert due is not None
            verdicts = self._target.judge(due.groups)
            self.ledger.take_scores(
                [
                    ScoredGroup(
                        prefixes=group,
                        version=due.version,
                        weights_digest=due.weights_digest,
                        verdicts=given,
                        scorer="in process",
                    )
                    for group, given in zip(due.groups, verdicts, strict=True)
                ]
            )
        self.ledger.records.clear()

    def train(self) -> Trained:
        """One iteration on what the ledger chooses; afterwards the new weights are installed."""
        choice = self.ledger.batch(self.version)
        assert isinstance(choice, Choice), "the window is filled before each iteration"
        data = self.data(self.ledger.results(choice.seqs))
        metrics = train_iteration(self.models, data, self.config, self._steps)
        ages = Counter(
            data.iteration - int(sample.versions.min()) for sample in data.samples.values()
        )
        self.ledger.trained(self.version)
        self.ledger.check()
        self.version += 1
        self.install()
        return Trained(data, ages, metrics)

    def install(self) -> None:
        """Give the adapter the present weights, as this version."""
        self._adapter.install(snapshot_of(self.version, self.models.state_dict_for_publication()))
        self._digest = self._adapter.digest()

    def data(self, groups: Sequence[ScoredGroup]) -> IterationData:
        """A batch as the learner takes it, every row in it."""
        rows = [
            _sample(group, row, verdict, index)
            for index, group in enumerate(groups)
            for row, verdict in zip(group.prefixes.rows, group.verdicts, strict=True)
        ]
        return IterationData(
            iteration=self.version,
            seed=derive(self.config.seed, "iteration", self.version),
            lengths=tuple((row.prompt_tokens.size, row.tokens.size) for row in rows),
            rewards=tuple(row.reward for row in rows),
            groups=tuple(row.group for row in rows),
            samples=dict(enumerate(rows)),
        )

    def mean_reward(self, problems: Sequence[Prompt]) -> float:
        """Mean reward over problems after one sampled prefix of the present version each.

        With rewards of 0 and 1 the share of right answers. The draws are the same for every version and seed.
        """
        tasks = [
            GroupTask(place, problem, derive(0, "evaluation", place))
            for place, problem in enumerate(problems)
        ]
        verdicts = self._target.judge(self._write(tasks, 1))
        return sum(given[0].reward for given in verdicts) / len(verdicts)

    def _prompt(self, seq: int) -> Prompt:
        return self._order.prompt(self.ledger.prompt_index(seq))

    def _write(self, tasks: Sequence[GroupTask], rows: int) -> list[GroupPrefixes]:
        """Prefixes of the adapter, all tasks in one forward."""
        rollout = self.config.rollout
        sampling = Sampling(temperature=rollout.temperature, max_new_tokens=rollout.prefix_tokens)
        prompts = tuple(self._text.prompt(task.prompt.question) for task in tasks)
        whole = PrefixTask(
            task="task",
            kind="train",
            version=self.version,
            groups=tuple(tasks),
            rows_per_group=rows,
            sampling=sampling,
        )
        done = iter(_run(self._adapter, make_job(whole, prompts, self._text.stop_tokens)).rows)
        groups = []
        for task, prompt in zip(tasks, prompts, strict=True):
            finished = [next(done) for _ in range(rows)]
            packed = tuple(pack_row(row, {self.version: self._digest}) for row in finished)
            groups.append(
                GroupPrefixes(
                    seq=task.seq,
                    prompt=task.prompt,
                    seed=task.seed,
                    prompt_tokens=pack_tokens(prompt),
                    rows=packed,
                )
            )
        return groups


def verdict(gold: str, text: str) -> Verdict:
    """Return the verifier's verdict on a whole answer."""
    extracted = extract_answer(text)
    judged = judge_exactly(gold, extracted) if extracted else Judgement(0.0, "no_answer", None)
    if judged is not None:
        return Verdict(
            reward=judged.reward,
            status=judged.status,
            extracted=judged.extracted or "",
            finish="eos",
            completion_tokens=0,
            elapsed_ms=0,
        )
    assert extracted is not None
    try:
        is_right = verify_with_sympy(gold, extracted, 5)
    except UnparsableAnswerError:
        return Verdict(
            reward=0.0,
            status="parse_fail",
            extracted=extracted,
            finish="eos",
            completion_tokens=0,
            elapsed_ms=0,
        )
    return Verdict(
        reward=float(is_right),
        status="ok",
        extracted=extracted,
        finish="eos",
        completion_tokens=0,
        elapsed_ms=0,
    )


def scored(function_ref: str, question: str, gold: str, text: str) -> Verdict:
    """Return the verdict of a user's reward function on a whole answer."""
    answer = Scoring(function_ref).score(ChildQuestion(gold, text, 5, question))
    assert answer.status == "ok", answer.extracted
    return Verdict(
        reward=answer.reward,
        status="ok",
        extracted="",
        finish="eos",
        completion_tokens=0,
        elapsed_ms=0,
    )


def _run(engine: FixedRowsEngine, job: Job) -> JobResult:
    engine.submit(job)
    while not (done := engine.step(0.0)):
        pass
    return done[0]


def _sample(group: ScoredGroup, row: Row, given: Verdict, index: int) -> Sample:
    tokens = token_ids(row.tokens)
    return Sample(
        token_ids(group.prefixes.prompt_tokens),
        tokens,
        logprobs(row.logprobs, tokens.size),
        given.reward,
        index,
        token_versions(row),
    )
