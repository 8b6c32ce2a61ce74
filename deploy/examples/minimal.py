"""Prefix-RL in one process and one file, to be read from top to bottom.

    python minimal.py arithmetic/run.toml                (a copy of it: `prefixrl example arithmetic`)

An adapter writes the first tokens of an answer, a frozen target continues them, a verifier says whether the answer is
right, and PPO trains the adapter on that. An iteration is four steps, here one after the other:

    questions ─▶ 1. adapter: n prefixes each ─▶ 2. target: answers; verifier: rewards ─▶ 3. PPO ─▶ 4. new weights
                     ▲                                                                                   │
                     └───────────────────────────────────────────────────────────────────────────────────┘

Models, prompts and formulas are those of the daemons. The daemons add what a long run needs:

    overlap      the four steps at the same time, on any number of machines; here each step waits for the one before
    window       samples up to S versions old, and ratios that correct for their age; here every sample is new
    journal      a run that survives the kill of any process, and trains no group twice
    proofs       version and digest of the weights in every sample, and a probe of every installation
    verifier     answers judged in child processes that may hang or crash, programs in a sandbox
    watching     status, dashboard, alarms, checkpoints, evaluation while training goes on
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from prefixrl.common.config.load import load
from prefixrl.common.config.run import RunConfig
from prefixrl.common.engines.embedded.fixed_rows import FixedRowsEngine
from prefixrl.common.engines.interface.base import Continuation, Job, TokenIds
from prefixrl.common.prompts.extract import extract_answer
from prefixrl.common.prompts.rendering import Renderer
from prefixrl.common.seeds import derive, row_uniforms
from prefixrl.common.weights.memory import MemoryFiles
from prefixrl.common.weights.snapshot import Snapshot, as_bytes, describe
from prefixrl.common.wire.messages.groups import Sampling
from prefixrl.learner.data.problems import Problem
from prefixrl.learner.data.problems import load as load_problems
from prefixrl.learner.models import distributed
from prefixrl.learner.models.batch import IterationData, Sample
from prefixrl.learner.models.model import Models
from prefixrl.learner.training.iteration import train_iteration
from prefixrl.scorer.verifier.rules.verify import judge_exactly


class PrefixTrainer:
    """The adapter, the target, and everything that trains the adapter."""

    def __init__(self, config: RunConfig) -> None:
        self.config, self.version = config, 0
        # The adapter stands twice in memory: one copy writes, the other one learns.
        self.models = Models.load(config, 0, 1, config.adapter.model)
        self.adapter = FixedRowsEngine(config.adapter.model, "cpu", "float32", threads=1)
        self.target = FixedRowsEngine(config.model_of("scorer"), "cpu", "float32", threads=1)
        self.adapter_text = Renderer(config.adapter.model, config.rollout.max_prompt_tokens)
        self.target_text = Renderer(config.model_of("scorer"), config.scorer.max_prompt_tokens)
        self.memory = MemoryFiles()

    # --- 1. the adapter writes prefixes
    def sample_prefixes(
        self, problems: Sequence[Problem], count: int, purpose: str, sampling: Sampling
    ) -> list[Continuation]:
        """Return `count` prefixes of each problem, side by side."""
        prompts = [self.adapter_text.prompt(problem.question) for problem in problems]
        return generate(
            self.adapter,
            [prompt for prompt in prompts for _ in range(count)],
            sampling,
            self.adapter_text.stop_tokens,
            derive(self.config.seed, purpose, self.version),
        )

    # --- 2. the target completes them, and the answers are judged
    def judge_prefixes(
        self, problems: Sequence[Problem], prefixes: Sequence[TokenIds], purpose: str
    ) -> list[float]:
        """Return the reward of each prefix: 1 where the target's answer is right."""
        # Both models read the same tokens here. Others need the way through text: `scorer/loop.py`.
        openings = [self.target_text.without_stop(prefix) for prefix in prefixes]
        prompts = [self.target_text.prompt(problem.question) for problem in problems]
        completions = generate(
            self.target,
            [np.concatenate(parts) for parts in zip(prompts, openings, strict=True)],
            self.config.scorer_sampling(),
            self.target_text.stop_tokens,
            derive(self.config.seed, purpose, self.version),
        )
        answers = [
            self.target_text.text(np.concatenate([opening, completion.tokens]))
            for opening, completion in zip(openings, completions, strict=True)
        ]
        return list(map(reward_of, [problem.gold for problem in problems], answers))

    # --- 3. PPO
    def train(self, problems: Sequence[Problem], total_steps: int) -> float:
        """Sample, judge and take the optimiser steps of one iteration; return the mean reward."""
        count = self.config.algorithm.samples_per_prompt
        rows = self.sample_prefixes(problems, count, "prefixes", self.config.rollout_sampling())
        repeated = [problem for problem in problems for _ in range(count)]
        rewards = self.judge_prefixes(repeated, [row.tokens for row in rows], "completions")
        prompts = [self.adapter_text.prompt(problem.question) for problem in repeated]
        samples = [
            Sample(
                prompt_tokens=prompt,
                tokens=row.tokens,
                logprobs=row.logprobs,
                reward=reward,
                group=index // count,
                versions=np.full(row.tokens.size, self.version, np.int32),
            )
            for index, (prompt, row, reward) in enumerate(zip(prompts, rows, rewards, strict=True))
        ]
        data = IterationData(
            iteration=self.version,
            seed=derive(self.config.seed, "iteration", self.version),
            lengths=tuple((sample.prompt_tokens.size, sample.tokens.size) for sample in samples),
            rewards=tuple(rewards),
            groups=tuple(sample.group for sample in samples),
            samples=dict(enumerate(samples)),
        )
        # Advantages by the critic, minibatches, clipped ratios, entropy and KL: `learner/training/iteration.py`.
        train_iteration(self.models, data, self.config, total_steps)
        self.version += 1
        return sum(rewards) / len(rewards)

    # --- 4. the new weights reach the copy that writes
    def install_weights(self) -> None:
        """Copy the learner's weights into the adapter's engine."""
        tensors = self.models.state_dict_for_publication()
        manifest = describe(self.version, tensors)
        memory = self.memory.take_memory(manifest.size_bytes)
        for entry in manifest.tensors:
            end_bytes = entry.offset_bytes + entry.size_bytes
            memory.view[entry.offset_bytes : end_bytes] = as_bytes(tensors[entry.name])
        self.adapter.install(Snapshot(manifest, memory))


def generate(
    engine: FixedRowsEngine,
    rows: Sequence[TokenIds],
    sampling: Sampling,
    stop_tokens: frozenset[int],
    seed: int,
) -> list[Continuation]:
    """Continue rows of tokens, one forward of all rows per token."""
    draws = row_uniforms(seed, "row", len(rows), sampling.max_new_tokens)
    engine.submit(Job("job", tuple(rows), draws, sampling, stop_tokens))
    while not (finished := engine.step(0.0)):
        pass
    return list(finished[0].rows)


def reward_of(gold: str, answer: str) -> float:
    """Return 1 for a right answer in the last box; expressions that need sympy are wrong here."""
    extracted = extract_answer(answer)
    judgement = judge_exactly(gold, extracted) if extracted else None
    return judgement.reward if judgement else 0.0


def batches(problems: Sequence[Problem], size: int, seed: int) -> Iterator[list[Problem]]:
    """Yield batches of problems without end, shuffled anew in every epoch."""
    random = np.random.default_rng(seed)
    while True:
        order = random.permutation(len(problems))
        for start in range(0, len(problems) - size + 1, size):
            yield [problems[index] for index in order[start : start + size]]


def accuracy(trainer: PrefixTrainer, problems: Sequence[Problem]) -> float:
    """Return the share of problems that the target gets right with one greedy prefix each."""
    greedy = msgspec.structs.replace(trainer.config.rollout_sampling(), temperature=0.0)
    rows = trainer.sample_prefixes(problems, 1, "held out", greedy)
    rewards = trainer.judge_prefixes(problems, [row.tokens for row in rows], "held out answers")
    return sum(rewards) / len(rewards)


def main(run_file: str, *settings: str) -> float:
    """Train the run of a file; print rewards, and the held-out accuracy before and after."""
    config = load(Path(run_file), settings)
    trainer, iterations = PrefixTrainer(config), config.algorithm.iterations or 100
    held_out = load_problems(config.data.eval, config.data)
    problems = load_problems(config.data.train, config.data)
    groups = batches(problems, config.algorithm.groups_per_iteration, config.seed)
    steps = iterations * config.algorithm.minibatches * config.algorithm.ppo_epochs
    print(f"held out, untrained: {accuracy(trainer, held_out):.3f}")
    for iteration in range(1, iterations + 1):
        reward = trainer.train(next(groups), steps)
        trainer.install_weights()
        if iteration % 10 == 0:
            print(f"iteration {iteration}: reward {reward:.3f}", flush=True)
    trained = accuracy(trainer, held_out)
    print(f"held out, trained: {trained:.3f}")
    distributed.stop()
    return trained


if __name__ == "__main__":
    main(*sys.argv[1:])
