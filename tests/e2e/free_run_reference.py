"""A whole synchronous run in one process, written from the documented rules: sample, complete, judge, train, repeat.

It shares with the software it judges only what defines the data: how seeds are derived, the order of prompts, the
shuffle of an iteration's groups. Everything else is plain: every forward starts from the first token (no cache),
answers are read by one regular expression, training is `ppo_loop`.

    group g of iteration t: prompt at place g = t B + i, seed = derive(run seed, "group", g)
    token of row r, step s:  the first token whose cumulative probability exceeds row_uniforms(seed, purpose)[r, s]
"""

import json
import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from e2e.ppo_loop import Recipe, ReferenceLoop, Row
from prefixrl.common.seeds import derive, row_uniforms
from prefixrl.common.wire.messages.groups import Prompt
from prefixrl.learner.data.order import PromptOrder
from prefixrl.learner.training.plan import shuffled

BOX = re.compile(r"\\boxed\{([^{}]*)\}")


@dataclass(frozen=True)
class FreeRun:
    """The choices that fix a run."""

    adapter: str
    target: str
    train: Path
    seed: int
    groups: int
    samples: int
    groups_per_task: int
    prefix_tokens: int
    completion_tokens: int
    completion_temperature: float
    minibatches: int
    recipe: Recipe


@dataclass(frozen=True)
class ReferenceGroup:
    """One prompt's rows; `rows` carry prompt, sampled ids, their logprobs and the reward."""

    seq: int
    prompt_id: str
    rows: list[Row]


@dataclass(frozen=True)
class ReferenceIteration:
    """The trained texts, and the mean policy and value loss of the optimiser steps."""

    groups: list[ReferenceGroup]
    policy_loss: float
    value_loss: float


class ReferenceRun:
    """Call `iteration` with 0, 1, 2, ...: each continues from the weights the last one left."""

    def __init__(self, run: FreeRun) -> None:
        self.run = run
        self.loop = ReferenceLoop(run.adapter, critic_head(run.adapter, run.seed), run.recipe)
        self.target = AutoModelForCausalLM.from_pretrained(run.target, dtype=torch.float32)
        self.tokenizers: list[PreTrainedTokenizerBase] = [
            AutoTokenizer.from_pretrained(run.adapter)
        ]
        self.tokenizers.append(AutoTokenizer.from_pretrained(run.target))
        lines = [json.loads(line) for line in run.train.read_text(encoding="utf-8").splitlines()]
        prompts = [Prompt(line["id"], line["question"], line["answer"]) for line in lines]
        self.order = PromptOrder(prompts, run.seed, None)
        self.smallest_margin = 1.0
        """Smallest distance of a draw from the edge at which another token would have been drawn."""

    def iteration(self, number: int) -> ReferenceIteration:
        groups = self.sample(number)
        rows = [row for group in groups for row in group.rows]
        places = shuffled(len(groups), derive(self.run.seed, "iteration", number))
        order = [
            place * self.run.samples + row for place in places for row in range(self.run.samples)
        ]
        parts = self.run.minibatches
        edges = [len(rows) * part // parts for part in range(parts + 1)]
        minibatches = [order[a:b] for a, b in pairwise(edges)]
        losses = self.loop.train(rows, minibatches)
        policy, value = (
            sum(losses_of_steps) / len(losses_of_steps)
            for losses_of_steps in zip(*losses, strict=True)
        )
        return ReferenceIteration(groups, policy, value)

    def sample(self, number: int) -> list[ReferenceGroup]:
        """All groups of an iteration, task by task, judged."""
        first = number * self.run.groups
        groups: list[ReferenceGroup] = []
        for start in range(first, first + self.run.groups, self.run.groups_per_task):
            stop = min(start + self.run.groups_per_task, first + self.run.groups)
            groups += self.task(range(start, stop))
        return groups

    def task(self, seqs: range) -> list[ReferenceGroup]:
        run, samples = self.run, self.run.samples
        prompts = [self.order.prompt(seq) for seq in seqs]
        seeds = [derive(run.seed, "group", seq) for seq in seqs]
        asked, continued = (
            [self.render(tokenizer, prompt.question) for prompt in prompts for _ in range(samples)]
            for tokenizer in self.tokenizers
        )
        prefixes, logprobs = self.write(
            self.loop.actor,
            asked,
            draws(seeds, "prefix", samples, run.prefix_tokens),
            run.recipe.temperature,
            self.tokenizers[0].eos_token_id,
            run.recipe.masked,
        )
        eos = self.tokenizers[1].eos_token_id
        opened = [prefix[:-1] if prefix[-1] == eos else prefix for prefix in prefixes]
        completions, _ = self.write(
            self.target,
            [prompt + prefix for prompt, prefix in zip(continued, opened, strict=True)],
            draws(seeds, "completion", samples, run.completion_tokens),
            run.completion_temperature,
            eos,
            (),
        )
        rows: list[Row] = []
        for i, prefix in enumerate(prefixes):
            text = self.tokenizers[1].decode(opened[i] + completions[i], skip_special_tokens=True)
            reward = judge(str(text), prompts[i // samples].gold)
            rows.append(Row(asked[i], prefix, logprobs[i], reward))
        return [
            ReferenceGroup(seq, prompt.prompt_id, rows[i * samples : (i + 1) * samples])
            for i, (seq, prompt) in enumerate(zip(seqs, prompts, strict=True))
        ]

    @staticmethod
    def render(tokenizer: PreTrainedTokenizerBase, question: str) -> list[int]:
        turns = [{"role": "user", "content": question}]
        ids: list[int] = tokenizer.apply_chat_template(
            turns, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        return ids

    @torch.no_grad()
    def write(
        self,
        model: torch.nn.Module,
        rows: list[list[int]],
        uniforms: NDArray[np.float64],
        temperature: float,
        eos: int,
        masked: tuple[int, ...],
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Continue rows until EOS or the draws are used up: all rows in one forward, padded on the left."""
        written: list[list[int]] = [[] for _ in rows]
        logprobs: list[list[float]] = [[] for _ in rows]
        fed = [list(row) for row in rows]
        for step in range(uniforms.shape[1]):
            logits = last_logits(model, fed) / temperature
            for i, row in enumerate(logits.double().numpy()):
                row[list(masked)] = -np.inf
                edges = np.cumsum(np.exp(row - row.max()))
                edges /= edges[-1]
                token = min(int((edges <= uniforms[i, step]).sum()), len(edges) - 1)
                if eos not in written[i]:
                    written[i].append(token)
                    size = edges[token] - (edges[token - 1] if token else 0.0)
                    logprobs[i].append(float(np.log(size)))
                    margin = float(np.abs(edges[:-1] - uniforms[i, step]).min())
                    self.smallest_margin = min(self.smallest_margin, margin)
                fed[i].append(token)
            if all(eos in row for row in written):
                break
        return written, logprobs


def draws(seeds: list[int], purpose: str, rows: int, tokens: int) -> NDArray[np.float64]:
    return np.concatenate([row_uniforms(seed, purpose, rows, tokens) for seed in seeds])


def last_logits(model: torch.nn.Module, rows: list[list[int]]) -> torch.Tensor:
    """Logits after each row's last token, shape (rows, vocabulary)."""
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    attention_mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    places = torch.tensor([[0] * (width - len(row)) + [*range(len(row))] for row in rows])
    output = model(
        input_ids=ids, attention_mask=attention_mask, position_ids=places, use_cache=False
    )
    logits: torch.Tensor = output.logits[:, -1]
    return logits


def judge(text: str, gold: str) -> float:
    boxes = BOX.findall(text)
    return float(bool(boxes) and boxes[-1].strip() == gold)


def critic_head(folder: str, seed: int) -> torch.Tensor:
    """N(0, 1/(hidden + 1)^2), drawn from the run's seed."""
    hidden = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))["hidden_size"]
    generator = torch.Generator().manual_seed(derive(seed, "critic head"))
    return torch.randn(1, hidden, generator=generator)[0] / (hidden + 1)
