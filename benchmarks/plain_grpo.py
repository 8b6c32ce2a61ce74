"""GRPO in plain torch and transformers: the yardstick, which imports nothing of the product.

One optimiser step per batch, no correction, no clipping (nothing to clip before the first step), no KL, no entropy
bonus. `delay` d: version v trains what version max(0, v - d) wrote."""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

Rewards = Callable[[Sequence[str], Sequence[list[int]]], list[float]]
"""Questions and token ids of prefixes, a row each, to rewards."""


@dataclass(frozen=True)
class Recipe:
    """The choices of a run."""

    groups: int
    samples: int
    prefix_tokens: int
    lr: float
    betas: tuple[float, float]
    weight_decay: float
    grad_clip: float
    delay: int = 0
    std_floor: float = 1e-6


@dataclass(frozen=True)
class Batch:
    """Rows of prompt and prefix, padded: prompts on the left, prefixes on the right."""

    ids: Tensor
    """(rows, prompt + prefix tokens)."""
    seen: Tensor
    """(rows, prompt + prefix tokens), 1 on what is not padding."""
    mask: Tensor
    """(rows, prefix tokens), True on sampled tokens, the EOS included."""
    logprobs: Tensor
    """(rows, prefix tokens), under the policy that wrote them."""

    def prefixes(self) -> list[list[int]]:
        """The sampled ids of each row."""
        width = self.mask.shape[1]
        return [
            row[kept].tolist() for row, kept in zip(self.ids[:, -width:], self.mask, strict=True)
        ]


class PlainLoop:
    """A policy, the policies that it was, and AdamW."""

    def __init__(self, folder: str, rewards: Rewards, recipe: Recipe, seed: int) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._writer: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, padding_side="left")
        self._rewards, self._recipe = rewards, recipe
        self._draws = torch.Generator().manual_seed(seed)
        self._adam = torch.optim.AdamW(
            self.model.parameters(),
            lr=recipe.lr,
            betas=recipe.betas,
            weight_decay=recipe.weight_decay,
        )
        self._versions: deque[dict[str, Tensor]] = deque(maxlen=recipe.delay + 1)
        self._keep()

    def iterate(self, questions: Sequence[str]) -> dict[str, float]:
        """One iteration on the questions of its groups."""
        rows = [question for question in questions for _ in range(self._recipe.samples)]
        self._writer.load_state_dict(self._versions[0])
        batch = self.sample(self._writer, rows, self._draws)
        prefixes = batch.prefixes()
        found = self.step(batch, torch.tensor(self._rewards(rows, prefixes)))
        self._keep()
        return found | {
            "top_share": Counter(map(tuple, prefixes)).most_common(1)[0][1] / len(prefixes)
        }

    def mean_reward(self, questions: Sequence[str], seed: int) -> float:
        """Mean reward of one sampled prefix per question by the present policy."""
        batch = self.sample(self.model, questions, torch.Generator().manual_seed(seed))
        return sum(self._rewards(questions, batch.prefixes())) / len(questions)

    @torch.no_grad()
    def sample(self, model: Any, questions: Sequence[str], draws: torch.Generator | None) -> Batch:
        """A prefix per question, at temperature 1; without draws the greedy one."""
        turns = [[{"role": "user", "content": question}] for question in questions]
        texts = [
            self._tokenizer.apply_chat_template(each, add_generation_prompt=True, tokenize=False)
            for each in turns
        ]
        prompts = self._tokenizer(
            texts, padding=True, return_tensors="pt", add_special_tokens=False
        )
        ids, seen, cache = prompts["input_ids"], prompts["attention_mask"], None
        is_open, mask, logprobs = torch.ones(len(texts), dtype=torch.bool), [], []
        for _ in range(self._recipe.prefix_tokens):
            fed = ids if cache is None else ids[:, -1:]
            places = (seen.cumsum(dim=1) - 1).clamp(min=0)[:, -fed.shape[1] :]
            out = model(
                fed, attention_mask=seen, position_ids=places, past_key_values=cache, use_cache=True
            )
            cache, table = out.past_key_values, torch.log_softmax(out.logits[:, -1], dim=-1)
            drawn = (
                torch.multinomial(table.exp(), 1, generator=draws)
                if draws
                else table.argmax(1, keepdim=True)
            )
            mask.append(is_open)
            logprobs.append(table.gather(1, drawn)[:, 0])
            ids, seen = (
                torch.cat([ids, drawn], dim=1),
                torch.cat([seen, is_open[:, None].long()], dim=1),
            )
            is_open = is_open & (drawn[:, 0] != self._tokenizer.eos_token_id)
        return Batch(ids, seen, torch.stack(mask, dim=1), torch.stack(logprobs, dim=1))

    def step(self, batch: Batch, rewards: Tensor) -> dict[str, float]:
        """One step up the gradient of sum A log pi / tokens; rows of a group are neighbours."""
        by_group = rewards.double().view(-1, self._recipe.samples)
        spread = by_group.std(dim=1, keepdim=True) + self._recipe.std_floor
        advantages = ((by_group - by_group.mean(dim=1, keepdim=True)) / spread).float().view(-1, 1)
        width, places = batch.mask.shape[1], (batch.seen.cumsum(dim=1) - 1).clamp(min=0)
        out = self.model(batch.ids, attention_mask=batch.seen, position_ids=places, use_cache=False)
        table = torch.log_softmax(out.logits[:, -width - 1 : -1], dim=-1)
        logprobs = table.gather(2, batch.ids[:, -width:, None])[:, :, 0]
        self._adam.zero_grad()
        torch.autograd.backward(-(advantages * logprobs)[batch.mask].sum() / batch.mask.sum())
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._recipe.grad_clip)
        self._adam.step()
        with torch.no_grad():
            importance = (logprobs - batch.logprobs)[batch.mask].exp()
            entropy = -(table.exp() * table).sum(dim=-1)[batch.mask].mean()
            ess = importance.sum() ** 2 / (importance.square().sum() * importance.numel())
        return {"reward": float(rewards.mean()), "entropy": float(entropy), "ess": float(ess)}

    def _keep(self) -> None:
        self._versions.append(
            {name: weights.clone() for name, weights in self.model.state_dict().items()}
        )
