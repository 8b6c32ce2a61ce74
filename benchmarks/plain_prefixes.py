"""The SmolLM2 example in plain torch and peft, the loop beside which its table stands. Nothing of the product is in it.

Synchronous, one optimiser step per batch, no correction, no entropy bonus, a constant rate. The rest is `run.toml`'s:
LoRA, groups, prefixes, the frozen target's continuation, the last number as reward. Rows of a group share the prefill.
"""

import json
import random
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.trl_arm import last_number

ROWS_AT_ONCE, JUDGED_AT_ONCE = 16, 40
STD_FLOOR = 1e-6


@dataclass(frozen=True)
class Choices:
    """The choices of a run."""

    folder: Path
    """The example's."""
    seed: int
    steps: int
    groups: int
    samples: int
    prefix_tokens: int
    most_tokens: int
    target_temperature: float
    lr: float
    betas: tuple[float, float]
    grad_clip: float
    lora_rank: int
    lora_alpha: int
    held_out: int | None
    """Held-out problems that are judged; None for all."""


class Loop:
    """Adapter with LoRA, frozen target, and AdamW."""

    def __init__(self, choices: Choices) -> None:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(choices.seed)
        self._choices, model = choices, str(choices.folder / "model")
        self._tokenizer: Any = AutoTokenizer.from_pretrained(model, padding_side="left")
        (self._end,) = self._tokenizer.encode("\n", add_special_tokens=False)
        self._target: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
        lora = LoraConfig(
            r=choices.lora_rank, lora_alpha=choices.lora_alpha, target_modules="all-linear"
        )
        self._adapter: Any = get_peft_model(
            AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16), lora
        )
        self._trained = [each for each in self._adapter.parameters() if each.requires_grad]
        self._adam = torch.optim.AdamW(
            self._trained, lr=choices.lr, betas=choices.betas, weight_decay=0.0
        )
        self._template = (choices.folder / "prompt.txt").read_text(encoding="utf-8")

    def rows(self, name: str) -> list[dict[str, str]]:
        """Problems of a file beside the example."""
        return [
            json.loads(line)
            for line in (self._choices.folder / name).read_text(encoding="utf-8").splitlines()
        ]

    def step(self, problems: list[dict[str, str]]) -> tuple[float, int]:
        """One step up the gradient of sum A log pi / tokens; returns the mean reward and the target's tokens."""
        samples = self._choices.samples
        prompts = self._prompts(problems)
        prefixes = self._write(
            self._adapter, prompts, [[]] * len(problems), samples, self._choices.prefix_tokens, 1.0
        )
        golds = [each["answer"] for each in problems for _ in range(samples)]
        judged, target_tokens = self._judge(
            prompts, prefixes, golds, samples, self._choices.target_temperature
        )
        rewards = torch.tensor(judged)
        by_group = rewards.view(-1, samples)
        advantages = (by_group - by_group.mean(dim=1, keepdim=True)) / (
            by_group.std(dim=1, keepdim=True) + STD_FLOOR
        )
        self._climb(
            prompts["input_ids"].repeat_interleave(samples, dim=0),
            prefixes,
            advantages.view(-1).tolist(),
        )
        return float(rewards.mean()), target_tokens

    def judge_held_out(self, name: str) -> dict[str, list[float]]:
        """Rewards by arm and decoding: after prefixes and after none, greedy and at the run's temperatures."""
        rewards: dict[str, list[float]] = defaultdict(list)
        choices, problems = self._choices, self.rows(name)[: self._choices.held_out]
        for first in range(0, len(problems), JUDGED_AT_ONCE):
            part = problems[first : first + JUDGED_AT_ONCE]
            prompts, golds = self._prompts(part), [each["answer"] for each in part]
            none: list[list[int]] = [[]] * len(part)
            for decoding, scale in (("greedy", 0.0), ("sampled", 1.0)):
                written = self._write(self._adapter, prompts, none, 1, choices.prefix_tokens, scale)
                for arm, prefixes in (("no_prefix", none), ("trained_adapter", written)):
                    judged, _ = self._judge(
                        prompts, prefixes, golds, 1, scale * choices.target_temperature
                    )
                    rewards[f"{arm}.{decoding}"] += judged
        return rewards

    def _prompts(self, problems: list[dict[str, str]]) -> Any:
        texts = [self._template.replace("{problem}", each["question"]) for each in problems]
        return self._tokenizer(texts, padding=True, return_tensors="pt")

    def _judge(
        self,
        prompts: Any,
        prefixes: list[list[int]],
        golds: list[str],
        samples: int,
        temperature: float,
    ) -> tuple[list[float], int]:
        """Return the rewards of the target's answers, and its tokens."""
        continued = self._write(
            self._target, prompts, prefixes, samples, self._choices.most_tokens, temperature
        )
        texts = [
            self._tokenizer.decode(prefix + more)
            for prefix, more in zip(prefixes, continued, strict=True)
        ]
        rewards = [last_number(text, gold) for text, gold in zip(texts, golds, strict=True)]
        return rewards, sum(map(len, continued))

    @torch.inference_mode()
    def _write(
        self,
        model: Any,
        prompts: Any,
        begun: list[list[int]],
        samples: int,
        most_tokens: int,
        temperature: float,
    ) -> list[list[int]]:
        """Write up to `most_tokens` after each prompt and what is begun of `samples` rows, if that has not ended."""
        seen = prompts["attention_mask"]
        asked = {"attention_mask": seen[:, :-1], "use_cache": True, "logits_to_keep": 1}
        cache = model(prompts["input_ids"][:, :-1], **asked).past_key_values
        cache.batch_repeat_interleave(samples)
        last, seen = (
            each.repeat_interleave(samples, dim=0) for each in (prompts["input_ids"][:, -1:], seen)
        )
        begun = (
            begun
            if len(begun) == len(last)
            else [list(each) for each in begun for _ in range(samples)]
        )
        ends, written = (self._end, self._tokenizer.eos_token_id), [list[int]() for _ in begun]
        is_open = torch.tensor([not set(ends) & set(each) for each in begun])
        for place in range(max(map(len, begun)) + most_tokens):
            logits = (
                model(last, attention_mask=seen, past_key_values=cache, use_cache=True)
                .logits[:, -1]
                .float()
            )
            drawn = (
                torch.multinomial((logits / temperature).softmax(-1), 1)
                if temperature
                else logits.argmax(-1, True)
            )
            for row, given in enumerate(begun):
                if place < len(given):
                    drawn[row] = given[place]
                elif is_open[row] and place < len(given) + most_tokens:
                    written[row].append(int(drawn[row]))
                    is_open[row] = written[row][-1] not in ends
            last, seen = drawn, torch.cat([seen, torch.ones_like(drawn)], dim=1)
            if place >= max(map(len, begun)) and not is_open.any():
                break
        return written

    def _climb(self, prompts: Tensor, prefixes: list[list[int]], advantages: list[float]) -> None:
        pad, tokens = self._tokenizer.pad_token_id, sum(map(len, prefixes))
        width = max(map(len, prefixes))
        written = torch.tensor([each + [pad] * (width - len(each)) for each in prefixes])
        mask = torch.tensor([[at < len(each) for at in range(width)] for each in prefixes])
        ids, gains = torch.cat([prompts, written], dim=1), torch.tensor(advantages).view(-1, 1)
        seen = torch.cat([prompts != pad, mask], dim=1).long()
        for first in range(0, len(ids), ROWS_AT_ONCE):
            part = slice(first, first + ROWS_AT_ONCE)
            if not gains[part].any():
                continue
            kept = {"attention_mask": seen[part], "logits_to_keep": width + 1}
            table = self._adapter(ids[part], **kept).logits[:, :-1].float().log_softmax(-1)
            logprobs = table.gather(2, written[part][:, :, None])[:, :, 0]
            torch.autograd.backward(-(gains[part] * logprobs * mask[part]).sum() / tokens)
        torch.nn.utils.clip_grad_norm_(self._trained, self._choices.grad_clip)
        self._adam.step()
        self._adam.zero_grad()


def run(choices: Choices, path: Path) -> dict[str, list[float]]:
    """Train, and judge the held-out problems; a line per step goes to the file, and one with all rewards at the end."""
    loop, draws = Loop(choices), random.Random(choices.seed)
    rows, order = loop.rows("train.jsonl"), list[dict[str, str]]()
    with path.open("w", encoding="utf-8") as file:
        for _ in range(choices.steps):
            if len(order) < choices.groups:
                order += draws.sample(rows, len(rows))
            batch, order = order[: choices.groups], order[choices.groups :]
            reward, tokens = loop.step(batch)
            file.write(json.dumps({"reward": reward, "tokens": tokens}) + "\n")
            file.flush()
        found = loop.judge_held_out("heldout.jsonl")
        file.write(json.dumps(found) + "\n")
    return found
