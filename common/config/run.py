"""The config of a run: one tree, validated whole, the same for every daemon."""

import math
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from prefixrl.common.config import section as bounds
from prefixrl.common.config.algorithm import AlgorithmConfig, FilterConfig
from prefixrl.common.config.data import DataConfig
from prefixrl.common.config.foreign.verifier import MATHEMATICS
from prefixrl.common.config.implicit_reward import ImplicitRewardConfig
from prefixrl.common.config.learner import LearnerConfig, LogConfig
from prefixrl.common.config.objectives import objective_record
from prefixrl.common.config.prompting import AdapterConfig, ModelConfig, TargetConfig
from prefixrl.common.config.section import (
    Fraction,
    Identifier,
    Mode,
    NonNegative,
    Positive,
    PositiveFloat,
    Section,
    Several,
)
from prefixrl.common.config.workers import launch as launch_sections
from prefixrl.common.config.workers.sections import RolloutConfig, ScorerConfig
from prefixrl.common.config.workers.served import ServerConfig
from prefixrl.common.config.workers.simulated import SimulatedConfig
from prefixrl.common.wire.messages.groups import Sampling

SAMPLED_TOKEN_BYTES = 8
"""Size of an id and a logprob."""
VERDICT_BYTES = 1024
"""Size of a verdict on one of several continuations, with a long answer."""
STEP_BYTES = 14
"""Size of a step's score and end."""
SEATED_TASKS = 4
"""Usual tasks whose rows a transformers engine decodes at once, where they need not stay together."""
SPARE_COLUMNS = 1 / 4
"""Columns of keys and values that such an engine holds beyond those in use, as a part of them."""
MOST_TASK_BYTES = 48 * 2**20
"""Limit well below that of a message, with room for prompts and texts."""


class BrokerConfig(Section):
    """Addresses and time limits of the run's servers."""

    listen: str = "tcp://127.0.0.1:0"
    """Endpoint for workers: `tcp://` and an address, interface or name of this host, or 0.0.0.0 for all of them. Port 0
    takes a free one and keeps it for the run directory. Weights are served at a free port too, or at the port after a
    fixed one."""
    heartbeat_s: PositiveFloat = 1.0
    """Time between two heartbeats of a worker."""
    silence_s: PositiveFloat = 10.0
    """Longest silence of a worker; then it counts as dead and its leases go to others."""
    stall_s: PositiveFloat = 600.0
    """Longest time a worker may hold leases without progress; then it counts as dead although it still answers."""
    attempts: Positive = 3
    """Deaths of workers that one group may cause before its prompt is requeued as a new group."""
    requeues: NonNegative = 3
    """New groups one prompt may get before it fails."""
    max_failure_share: Fraction = 0.5
    """Largest share of the newest rows that may fail; above it the run ends and reports the causes. 1 never ends it."""
    journal_segment_mib: PositiveFloat = 64.0
    """Size in MiB at which a file of the journal is closed and compressed. A restart reads the newest one or two."""

    def _check_beats(self) -> None:
        self.refuse_if(
            self.silence_s < 3 * self.heartbeat_s,
            "silence_s heartbeat_s",
            "one late heartbeat would end a healthy worker; silence_s must be at least three "
            "times as long",
        )


class CheckpointConfig(Section):
    """Times of saving, and the checkpoints that stay."""

    every: NonNegative = 10
    """Iterations between checkpoints; 0 writes only the last one of the run."""
    keep: Positive = 2
    """Number of checkpoints that stay; older ones are removed."""
    growth: bounds.AboveOne | None = None
    """Factor between geometric steps whose checkpoints are written and stay besides: with 2 those of iterations 1, 2,
    4, 8 and so on. Absent: none."""
    keep_best: NonNegative | None = None
    """Number of checkpoints that stay besides: those whose version had the highest greedy accuracy on the held-out
    problems. Every version that `evaluation.every` has judged is then saved; the link `checkpoints/best` names the
    best. Absent: 1 with `evaluation.every`, else 0."""
    upload: Several[str] = ()
    """Program and arguments of a command for every complete checkpoint, whose folder is its last argument. It runs on
    the learner's host while training goes on, and must bear to be repeated. Empty: none."""
    upload_s: PositiveFloat = 3600.0
    """Longest time of one upload; then the command is ended. A failed one is told, counted and tried again with the
    next checkpoint; the end of the run waits for the last one."""
    on_failure: Literal["go_on", "stop"] = "go_on"
    """Effect of a checkpoint that cannot be written in mid-run: an error on the console and a new attempt at later
    iterations, or the end of the run. The last one of a run, or of a stop, must be written."""


class EvaluationConfig(Section):
    """Evaluation on held-out problems."""

    ONLY_IN_MODE: ClassVar[bounds.OnlyWith] = {
        "max_new_tokens": (
            ("prefix",),
            "rollout.answer_tokens limits answers in evaluations too",
        ),
        **dict.fromkeys(
            ("fixed_prefixes", "selection_problems", "sampled_candidates"),
            (("prefix",), "there is no target that could continue a fixed prefix"),
        ),
    }

    every: NonNegative = 0
    """Versions between greedy evaluations of the adapter on held-out problems; 0: only before and after training."""
    max_new_tokens: Positive | None = None
    """Token limit of completions in evaluations. Absent: `scorer.max_new_tokens`."""
    problems: Positive | None = None
    """Most held-out problems used. Absent: all."""
    fixed_prefixes: Several[str] = ()
    """Candidates for the best fixed prefix, besides the most frequent sampled ones."""
    selection_problems: Positive = 128
    """Training problems used to choose the fixed prefix."""
    sampled_candidates: NonNegative = 4
    """Number of most frequent prefixes of the untrained adapter that are candidates too."""
    timeout_s: PositiveFloat = 3600.0
    """Longest wait after training for the candidates, then for the arms; only what is late is left out, by name."""


class RewardConfig(ServerConfig):
    """The reward, where it is not the verifier's verdict."""

    NAME = "reward"

    function: str | None = None
    """`file.py:name` of (question, text, gold) -> reward in [0, 1], called instead of the verifier, or after it; or of
    -> a dict with `reward` and other numbers, which are logged as parts. A name alone: the function of an installed
    package. Parameters verdict, verify, tokens, finish, prefix, source are handed by name (docs/verification.md)."""
    environment: Several[Identifier] = ()
    """Names of variables of the scorer's host that the function finds in its environment; else it has only PATH and
    its like."""
    weights: dict[str, float] = Field(default_factory=dict)
    """By name, weights of the parts that function or server gives: the reward is their sum. Absent: their `reward`."""
    no_leak: bool = False
    """Reward 0 for a prefix that holds the gold answer, whose completion is then not asked for."""
    url: str | None = None
    """Address of a server of your own that rewards answers, in place of a function (docs/verification.md)."""
    rows: Positive = 32
    """Most answers of one request to `url`."""
    requests: Positive = 8
    """Requests to `url` at once, per scorer."""
    request_s: PositiveFloat = 60.0
    """Limit of one request to `url`, then repeated. An answer that misses it twice while others are judged gets no
    reward."""
    patience_s: PositiveFloat = 600.0
    """Longest time without any answer of `url`; then the scorer ends."""

    @property
    def is_own(self) -> bool:
        """True where the verifier is not asked, or only by a function."""
        return self.function is not None or self.url is not None

    def _check_keys(self) -> None:
        self.refuse_if(
            self.function and self.url,
            "function url",
            "each rewards every answer; leave one of them out",
        )
        self.refuse_if(
            self.weights and not self.is_own,
            "weights",
            "there are no parts of a reward without function or url",
        )
        if self.url is None:
            keys = ("rows", "requests", "request_s", "patience_s", "key_variable")
            self.refuse_given(keys, "url absent", "no server is asked")


class RunConfig(Section):
    """The whole run."""

    mode: Mode = "prefix"
    """prefix: the adapter begins the answer, a frozen target completes it. direct: the adapter writes all of it."""
    seed: NonNegative = 42
    """Seed of every draw of the run: order of problems, samples, new weights."""
    bitwise: bool = False
    """Texts are the same bit by bit, whatever comes when and however many workers there are: a transformers engine
    holds the rows of a task together in one forward, from first tokens to last (docs/reproducibility.md). false: rows
    are batched continuously, which is faster; a text may then differ where rounding decides a draw."""
    directory: str
    """Folder of everything the run writes; relative to the folder in which the command is started."""
    adapter: AdapterConfig
    target: TargetConfig | None = None
    """The frozen model; required in prefix mode, refused in direct mode."""
    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    scorer: ScorerConfig = ScorerConfig()
    simulated: SimulatedConfig = SimulatedConfig()
    reward: RewardConfig = RewardConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    implicit_reward: ImplicitRewardConfig | None = None
    """Absent: only outcomes are rewarded; algorithm.name = "prime" has it always."""
    filter: FilterConfig = FilterConfig()
    learner: LearnerConfig = LearnerConfig()
    broker: BrokerConfig = BrokerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    log: LogConfig = LogConfig()
    launch: launch_sections.LaunchConfig = launch_sections.LaunchConfig()
    slurm: launch_sections.SlurmConfig = launch_sections.SlurmConfig()

    def _check_mode(self) -> None:
        self.refuse_if(
            (self.algorithm.iterations is None) == (self.data.epochs is None),
            "algorithm.iterations data.epochs",
            "give exactly one of them, it ends the run",
        )
        self.refuse_if(
            self.mode == "prefix" and self.target is None,
            "mode target",
            'give [target] model, which completes the answers, or use mode = "direct"',
        )
        self.refuse_if(
            self.mode == "direct" and self.target is not None,
            "target.model mode",
            'the adapter writes the whole answer; leave [target] out, or use mode = "prefix"',
        )
        self.refuse_if(
            self.mode == "direct" and self.scorer.truncated == "extend",
            "scorer.truncated mode",
            "scorers run no engine that could extend it; raise rollout.answer_tokens, or use "
            "judge, zero or mask",
        )
        useless = [
            f"{name}.{sentence}"
            for name, section in self
            if isinstance(section, Section)
            for sentence in section.without_effect(section.ONLY_IN_MODE, "mode", self.mode)
        ]
        if useless:
            raise ValueError("\n  ".join(useless))

    def _check_sampling(self) -> None:
        is_by_outcome = self.data.sampling == "by_outcome"
        self.refuse_if(
            is_by_outcome and self.data.epochs is not None,
            "data.sampling data.epochs",
            "a pass would not ask every problem; give algorithm.iterations in place of epochs",
        )
        self.refuse_if(
            is_by_outcome and self.algorithm.samples_per_prompt == 1,
            "data.sampling algorithm.samples_per_prompt",
            "a group of one row never has right and wrong rows; raise samples_per_prompt, or use uniform",
        )
        self.refuse_if(
            is_by_outcome and self.adapter.sees_draft,
            "data.sampling adapter.sees",
            "drafts are made before it is known which problems are asked; use uniform, or sees = "
            '"problem"',
        )

    def _check_draft(self) -> None:
        self.refuse_if(
            self.adapter.sees_draft and not self.has_advice,
            "adapter.sees target.placement",
            'a draft is followed by advice, which a begun answer is not; use target.placement = "advice", or '
            'adapter.sees = "problem"',
        )

    def _check_chat(self) -> None:
        if self.target is None or not self.scorer.is_chat:
            return
        for key in ("chat_template", "template_options"):
            if self.target.is_given(key):
                condition = 'scorer.openai.api = "chat"'
                reason = "the endpoint makes the prompt from messages"
                raise ValueError(f"target.{self.target.no_effect(key, condition, reason)}")

    def _check_bitwise(self) -> None:
        if not self.bitwise:
            return
        batched = "its texts depend on what else is in the batch; leave one of them out"
        for role in ("rollout", "scorer"):
            section = self.engine_section(role)
            is_batched = not section.is_automatic and not section.record.is_bitwise
            self.refuse_if(is_batched, f"bitwise {role}.engine", batched)
        self.refuse_if(
            self.rollout.swap == "in_flight",
            "bitwise rollout.swap",
            "texts depend on when weights come; leave one of them out",
        )
        self.refuse_if(
            self.scorer.cache_bytes > 0,
            "bitwise scorer.cache_bytes",
            "cached texts were computed beside other rows; leave one of them out",
        )

    def _check_rewards(self) -> None:
        self.refuse_if(
            self.checkpoint.keep_best and not self.evaluation.every,
            "checkpoint.keep_best evaluation.every",
            "no version is judged in training, so none is known to be the best; give "
            "evaluation.every, or leave keep_best out",
        )
        self.refuse_if(
            self.algorithm.on_collapse == "go_back" and not self.checkpoint.every,
            "algorithm.on_collapse checkpoint.every",
            "there is no checkpoint to go back to; give checkpoint.every",
        )
        for key, judge in (("function", "function"), ("url", "server")):
            self.refuse_if(
                getattr(self.reward, key) is not None and self.data.code != "none",
                f"reward.{key} data.code",
                f"the {judge} judges every answer, so no program would be run; leave one of them "
                f"out",
            )
        rows = self.algorithm.full_rows
        self.refuse_if(
            self.algorithm.minibatches > rows,
            "algorithm.minibatches algorithm.groups_per_iteration algorithm.samples_per_prompt",
            f"an iteration has only {rows} rows; lower minibatches",
        )
        # Each text is right or wrong here, so that a group's mean is one of a few fractions.
        if not self.reward.is_own and not self.data.has_fractions:
            self.filter.check_reachable(
                self.algorithm.samples_per_prompt, self.scorer.continuations
            )

    def _check_answer_ends(self) -> None:
        for key in ("function", "url"):
            self.refuse_if(
                self.scorer.stop_when_answered and getattr(self.reward, key) is not None,
                f"scorer.stop_when_answered reward.{key}",
                "it would be given texts that end behind their box, whatever it reads in them; leave one out",
            )
        verifiers = sorted(self.data.verifiers - {MATHEMATICS})
        if self.scorer.stop_when_answered and verifiers:
            raise ValueError(
                f"scorer.stop_when_answered = true with code = {', '.join(map(repr, verifiers))} (of data or of a "
                f"source): a box is the end of an answer in mathematics alone; leave stop_when_answered out"
            )

    def _check_reward_parts(self) -> None:
        is_by_parts = self.algorithm.zscore == "parts"
        self.refuse_if(
            is_by_parts and not self.reward.weights,
            "algorithm.zscore reward.weights",
            "only parts with a weight are standardised; give the weights, or leave zscore out",
        )
        self.refuse_if(
            is_by_parts and (self.implicit_reward or self.scorer.prm),
            "algorithm.zscore implicit_reward scorer.prm",
            "a reward of another model is no part of the function's; leave one of them out",
        )

    @model_validator(mode="before")
    @classmethod
    def _with_implicit_reward(cls, document: Any) -> Any:
        """Add [implicit_reward] where the objective always has it."""
        algorithm = document.get("algorithm") if isinstance(document, dict) else None
        name = algorithm.get("name") if isinstance(algorithm, dict) else None
        record = objective_record(name) if isinstance(name, str) else None
        if record is None or not record.has_implicit_reward:
            return document
        return {**document, "implicit_reward": document.get("implicit_reward") or {}}

    def _check_process_rewards(self) -> None:
        prm = self.scorer.prm
        has_steps = prm is not None and prm.placement == "step"
        self.refuse_if(
            has_steps and self.mode == "prefix",
            "scorer.prm.placement mode",
            'most steps are the target\'s, whose tokens are not trained; use placement = "row", or mode = "direct"',
        )
        settings, algorithm = self.implicit_reward, self.algorithm
        if (settings or has_steps) and algorithm.has_function:
            source = "implicit_reward" if settings else 'scorer.prm.placement = "step"'
            function = f"algorithm.name = {algorithm.name!r}"
            if algorithm.advantage_function is not None:
                function = f"algorithm.advantage_function = {algorithm.advantage_function!r}"
            raise ValueError(
                f"{source} with {function}: the function has no baseline for rewards of tokens; "
                f"leave one of the two out"
            )
        self.refuse_if(
            settings and prm is not None and settings.outcome_coefficient == 0,
            "implicit_reward.outcome_coefficient scorer.prm.model",
            "its scores would have no weight; leave [scorer.prm] out, or raise "
            "outcome_coefficient above 0",
        )
        if settings:
            settings.check_discounts(
                algorithm.name, algorithm.has_critic, algorithm.record.leaves_one_out
            )

    def _check_waits(self) -> None:
        batch_timeout_s = self.learner.batch_timeout_s
        stall_s = self.broker.stall_s
        self.refuse_if(
            batch_timeout_s <= max(stall_s, self.broker.silence_s),
            "learner.batch_timeout_s broker.stall_s broker.silence_s",
            "the learner would end before a stuck worker's groups are given to another; "
            "batch_timeout_s must exceed both",
        )
        # A wait inside a scorer must end before the broker or the learner gives up.
        for server, is_asked, words in (
            (self.scorer.openai, self.scorer.is_served, "endpoint"),
            (self.reward, self.reward.url, "server of rewards"),
        ):
            self.refuse_if(
                is_asked and server.request_s >= stall_s,
                f"{server.NAME}.request_s broker.stall_s",
                "a scorer would count as dead before its request times out; request_s must be "
                "shorter",
            )
            self.refuse_if(
                is_asked and server.patience_s >= batch_timeout_s,
                f"{server.NAME}.patience_s learner.batch_timeout_s",
                f"the learner would end before scorers that wait for the {words}; "
                f"batch_timeout_s must exceed it",
            )

    def _check_rate(self) -> None:
        per_minute = self.scorer.openai.requests_per_minute
        if per_minute is None or not self.scorer.is_served:
            return
        requests = self.algorithm.full_rows * self.scorer.continuations
        least_s = 60 * requests / per_minute
        self.refuse_if(
            least_s >= self.learner.batch_timeout_s,
            "scorer.openai.requests_per_minute learner.batch_timeout_s",
            f"an iteration has {requests} requests, which take at least {least_s:.0f} s; raise "
            f"batch_timeout_s, or train on fewer rows",
        )

    def _check_matrices(self) -> None:
        lora = self.learner.lora
        if lora is None:
            return
        self.refuse_if(
            lora.publish == "matrices" and self.rollout.swap == "in_flight",
            "rollout.swap learner.lora.publish",
            'an answer of vLLM ends with the adapter it began with; use rollout.swap = "drain", '
            'or send whole weights with publish = "merged"',
        )
        objection = self.rollout.record.lora_objection(lora)
        if objection and not self.rollout.is_automatic:
            raise ValueError(objection)

    def _check_task_size(self) -> None:
        rollout = self.rollout
        samples = self.algorithm.samples_per_prompt
        continuations = self.scorer.continuations
        verdict_bytes = continuations * VERDICT_BYTES if continuations > 1 else 0
        if self.scorer.prm is not None:
            verdict_bytes += continuations * self.scorer.prm.most_steps * STEP_BYTES
        row_bytes = self.max_sampled_tokens * SAMPLED_TOKEN_BYTES + verdict_bytes
        size_bytes = rollout.groups_per_task * samples * row_bytes
        length = "prefix_tokens" if self.mode == "prefix" else "answer_tokens"
        self.refuse_if(
            size_bytes > MOST_TASK_BYTES,
            "rollout.groups_per_task algorithm.samples_per_prompt scorer.continuations "
            f"rollout.{length}",
            f"one task's result may have {size_bytes / 2**20:.0f} MiB, allowed are "
            f"{MOST_TASK_BYTES / 2**20:.0f}; lower groups_per_task",
        )

    def _check_devices(self) -> None:
        launch = self.launch
        devices = launch.devices
        for role, gpus_of_processes, count in (
            ("learner", [devices.learner] if devices.learner else [], 1),
            ("rollout", devices.rollout, launch.rollouts),
            ("scorer", devices.scorer, launch.scorers),
        ):
            needed = self.gpus_of(role) * (launch.learner_ranks if role == "learner" else 1)
            is_wrong = len(gpus_of_processes) != count or any(
                len(gpus) != needed or len(set(gpus)) != needed for gpus in gpus_of_processes
            )
            self.refuse_if(
                gpus_of_processes and is_wrong,
                f"launch.devices.{role}",
                f"name {needed} different GPUs for each of {count} processes, or leave the key out",
            )

    @property
    def probe_tolerance(self) -> float:
        """The tolerance of the run, by the key or else by the dtype."""
        return self.rollout.probe_tolerance or (1e-3 if self.learner.dtype == "float32" else 0.2)

    @property
    def max_sampled_tokens(self) -> int:
        """The most tokens the adapter writes: a prefix, or in direct mode an answer."""
        return self.rollout.prefix_tokens if self.mode == "prefix" else self.rollout.answer_tokens

    @property
    def most_request_tokens(self) -> int:
        """The most tokens of a request to a served target: prompt, prefix and completion."""
        scorer = self.scorer
        return scorer.max_prompt_tokens + self.max_sampled_tokens + scorer.max_new_tokens

    def rollout_sampling(self, temperature_scale: float = 1.0) -> Sampling:
        """Return the adapter's sampling; `temperature_scale` 0 is greedy, 1 the run's temperature."""
        return self.rollout.sampling(
            temperature_scale * self.rollout.temperature, self.max_sampled_tokens
        )

    def scorer_sampling(self, temperature_scale: float = 1.0) -> Sampling:
        """Return the target's sampling; `temperature_scale` 0 is greedy, 1 the run's temperature."""
        return self.scorer.sampling(
            temperature_scale * self.scorer.temperature, self.scorer.max_new_tokens
        )

    def engine_section(self, role: str) -> RolloutConfig | ScorerConfig:
        """Return `[rollout]` or `[scorer]`."""
        return self.rollout if role == "rollout" else self.scorer

    def rows_per_job(self, role: str) -> int:
        """Return the number of rows that an engine of this role receives at once."""
        rows = self.rollout.groups_per_task * self.algorithm.samples_per_prompt
        return rows * self.scorer.continuations if role == "scorer" else rows

    def embedded_seats(self, role: str) -> int:
        """Return the number of rows that a transformers engine of this role decodes at once."""
        return self.rows_per_job(role) * (1 if self.bitwise else SEATED_TASKS)

    @property
    def has_advice(self) -> bool:
        """True if the prefix stands in the target's question."""
        return self.target is not None and self.target.has_advice

    def model_section(self, role: Literal["rollout", "scorer"]) -> ModelConfig:
        """Return the model of a role and how it is asked; in direct mode both have the adapter."""
        return self.target if self.target and role == "scorer" else self.adapter

    def model_of(self, role: Literal["rollout", "scorer"]) -> str:
        """Return the model a worker loads; in direct mode a scorer reads only its tokenizer."""
        section = self.model_section(role)
        return section.start if isinstance(section, AdapterConfig) else section.model

    def loads_model(self, role: str) -> bool:
        """Return True if a worker has an engine with weights, a process reward model apart."""
        has_engine = role == "rollout" or self.mode == "prefix"
        return has_engine and self.engine_section(role).record.holds_weights

    def own_cores(self, role: str) -> int:
        """Return the cores of a process of a role, a verifier's children apart; a learner serves workers too."""
        if role == "learner":
            return 8
        return 4 if self.loads_model(role) else 1

    def verifier_children(self, cores: int = 1024) -> int:
        """Return the children of a scorer's verifier on so many cores; the default is a host with enough."""
        free = cores - self.own_cores("scorer")
        texts = self.algorithm.full_rows * self.scorer.continuations
        return self.scorer.verifier_children or max(
            1, min(math.ceil(texts / self.launch.scorers / 64), free, 4)
        )

    def gpus_of(self, role: str) -> int:
        """Return the GPUs of each process of a role, or of a learner rank; 0 where it needs none."""
        if role == "learner":
            return 0 if self.learner.device == "cpu" else 1
        section = self.engine_section(role)
        prm = self.scorer.prm if role == "scorer" else None
        beside = 1 if prm is not None and prm.device != "cpu" else 0
        if section.device == "cpu" or not self.loads_model(role):
            return beside
        return section.record.gpus(section)

    @property
    def checkpointing(self) -> CheckpointConfig:
        """The section `[checkpoint]`, with the number of best checkpoints that applies."""
        keep_best = self.checkpoint.keep_best
        if keep_best is None:
            keep_best = int(self.evaluation.every > 0)
        return self.checkpoint.model_copy(update={"keep_best": keep_best})

    def groups_in_all(self, problems: int) -> int:
        """Return the groups trained with this many problems, if none fails or is filtered."""
        if self.algorithm.iterations is not None:
            return self.algorithm.iterations * self.algorithm.groups_per_iteration
        assert self.data.epochs is not None
        return self.data.epochs * problems

    def iterations_in_all(self, problems: int) -> int:
        """Return the iterations of that run, of which the last may be small; a filter leaves fewer."""
        return math.ceil(self.groups_in_all(problems) / self.algorithm.groups_per_iteration)

    def steps_in_all(self, problems: int) -> int:
        """Return the optimiser steps of that run; the last iteration may be small."""
        algorithm = self.algorithm
        iterations = self.iterations_in_all(problems)
        last_groups = (
            self.groups_in_all(problems) - (iterations - 1) * algorithm.groups_per_iteration
        )
        last = algorithm.minibatches_of(last_groups * algorithm.samples_per_prompt)
        return algorithm.ppo_epochs * ((iterations - 1) * algorithm.minibatches + last)
