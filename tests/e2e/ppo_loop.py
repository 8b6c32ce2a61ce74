"""PPO of a small adapter written straight from the formulas: plain torch, one row at a time, no padding, no DeepSpeed.

It shares no code with the software it judges. Slow on purpose: every sum is a loop over rows and tokens.

    rho_t = pi_theta(y_t) / p(y_t)        w_t = min(p(y_t) / mu(y_t), cap)
    r_t   = [t last] reward - beta (log p(y_t) - log ref(y_t))
    delta = r_t + gamma V_{t+1} - V_t     A_t = delta + gamma lambda A_{t+1}     R_t = A_t + V_t (raw)
    L_pi  = -1/N sum w_t min(rho_t A_t, clip(rho_t) A_t) - c_H H_t,   L_V = 1/(2N) sum max((V - R)^2, (clip V - R)^2)
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM


@dataclass
class Row:
    """One sampled prefix as recorded."""

    prompt: list[int]
    tokens: list[int]
    behaviour: list[float]
    reward: float


@dataclass
class Recipe:
    """The settings that matter to the formulas."""

    temperature: float
    correction: str
    cap: float
    dual_clip: float
    bound: float
    """On the row's theta/mu in the direction of the advantage; past it there is no gradient."""
    clip: float
    value_clip: float
    gamma: float
    lam: float
    kl: float
    kl_estimator: str
    kl_in_reward: bool
    entropy: float
    per_sequence: bool
    epochs: int
    whiten_floor: float
    actor_lr: float
    critic_lr: float
    warmup_ratio: float
    min_lr_ratio: float
    betas: tuple[float, float]
    grad_clip: float
    total_steps: int
    masked: tuple[int, ...] = ()
    """Tokens that the actor never draws."""


class ReferenceLoop:
    """Actor, critic and reference, trained on batches handed to it."""

    def __init__(self, folder: str, head: Tensor, recipe: Recipe) -> None:
        self.recipe = recipe
        self.actor = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.initial = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.critic = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).model
        self.head = head.clone().requires_grad_(True)
        self.critic_parameters = [*self.critic.parameters(), self.head]
        adam = {"betas": recipe.betas, "weight_decay": 0.0}
        self.actor_adam = torch.optim.AdamW(self.actor.parameters(), lr=1.0, **adam)
        self.critic_adam = torch.optim.AdamW(self.critic_parameters, lr=1.0, **adam)
        self.steps = 0

    def train(self, rows: list[Row], minibatches: list[list[int]]) -> list[tuple[float, float]]:
        """One iteration; returns (policy loss, value loss) of every optimiser step."""
        with torch.no_grad():
            proximal = [self.logprobs(self.actor, row)[0] for row in rows]
            initial = [self.logprobs(self.initial, row)[0] for row in rows]
            old_values = [self.values(row) for row in rows]
        advantages, returns = [], []
        for row, p, ref, values in zip(rows, proximal, initial, old_values, strict=True):
            row_advantages, row_returns = self.gae(row, p, ref, values)
            advantages.append(row_advantages)
            returns.append(row_returns)
        advantages = self.whiten(advantages)
        losses = []
        for _ in range(self.recipe.epochs):
            for minibatch in minibatches:
                n_tokens = sum(len(rows[i].tokens) for i in minibatch)
                policy, value = torch.zeros(()), torch.zeros(())
                for i in minibatch:
                    size = len(rows[i].tokens)
                    share = (
                        1 / (len(minibatch) * size) if self.recipe.per_sequence else 1 / n_tokens
                    )
                    policy = policy + share * self.policy_sum(
                        rows[i], proximal[i], initial[i], advantages[i]
                    )
                    value = value + share * self.value_sum(rows[i], old_values[i], returns[i])
                self.step(policy, value)
                losses.append((policy.item(), value.item()))
        return losses

    def logprobs(self, model: torch.nn.Module, row: Row) -> tuple[Tensor, Tensor]:
        """log pi(y_t | x, y_<t) and the entropy there, at the sampling temperature."""
        logits = model(torch.tensor([row.prompt + row.tokens])).logits[0] / self.recipe.temperature
        allowed = [token for token in range(logits.shape[1]) if token not in self.recipe.masked]
        picked, entropies = [], []
        for t, token in enumerate(row.tokens):
            predicts = len(row.prompt) + t - 1
            distribution = torch.softmax(logits[predicts][allowed], dim=-1)
            picked.append(torch.log(distribution[allowed.index(token)]))
            entropies.append(-(distribution * torch.log(distribution)).sum())
        return torch.stack(picked), torch.stack(entropies)

    def values(self, row: Row) -> Tensor:
        """V_t, read where token t is predicted."""
        hidden = self.critic(torch.tensor([row.prompt + row.tokens])).last_hidden_state[0]
        return torch.stack(
            [hidden[len(row.prompt) + t - 1] @ self.head for t in range(len(row.tokens))]
        )

    def gae(
        self, row: Row, p: Tensor, ref: Tensor, values: Tensor
    ) -> tuple[list[float], list[float]]:
        last = len(row.tokens) - 1
        rewards = [row.reward if t == last else 0.0 for t in range(last + 1)]
        if self.recipe.kl_in_reward:
            rewards = [r - self.recipe.kl * (p[t] - ref[t]).item() for t, r in enumerate(rewards)]
        v = [*values.tolist(), 0.0]
        gamma, lam = self.recipe.gamma, self.recipe.lam
        deltas = [rewards[t] + gamma * v[t + 1] - v[t] for t in range(last + 1)]
        advantages = [
            sum((gamma * lam) ** (s - t) * deltas[s] for s in range(t, last + 1))
            for t in range(last + 1)
        ]
        return advantages, [a + v[t] for t, a in enumerate(advantages)]

    def whiten(self, advantages: list[list[float]]) -> list[list[float]]:
        every = [a for row in advantages for a in row]
        mean = sum(every) / len(every)
        deviation = math.sqrt(sum((a - mean) ** 2 for a in every) / len(every))
        return [
            [(a - mean) / max(deviation, self.recipe.whiten_floor) for a in row]
            for row in advantages
        ]

    def policy_sum(self, row: Row, p: Tensor, ref: Tensor, advantages: list[float]) -> Tensor:
        recipe = self.recipe
        now, entropy = self.logprobs(self.actor, row)
        total = torch.zeros(())
        moved = math.exp(
            sum(logprob.item() - mu for logprob, mu in zip(now, row.behaviour, strict=True))
        )
        for t, a in enumerate(advantages):
            mu = row.behaviour[t]
            weight = (
                min(math.exp(p[t].item() - mu), recipe.cap)
                if recipe.correction == "decoupled"
                else 1.0
            )
            rho = torch.exp(now[t] - (mu if recipe.correction == "behaviour" else p[t]))
            clipped = torch.clamp(rho, 1 - recipe.clip, 1 + recipe.clip)
            surrogate = torch.min(rho * a, clipped * a)
            if a < 0:
                surrogate = torch.clamp(surrogate, min=recipe.dual_clip * a)
            if moved ** math.copysign(1, a) > recipe.bound:
                surrogate = surrogate.detach()
            term = -surrogate - recipe.entropy * entropy[t]
            if recipe.kl and not recipe.kl_in_reward:
                r = now[t] - ref[t]
                k3 = torch.clamp(torch.exp(-r) - 1 + r, max=10.0)
                term = term + recipe.kl * (r**2 / 2 if recipe.kl_estimator == "k2" else k3)
            total = total + weight * term
        return total

    def value_sum(self, row: Row, old: Tensor, returns: list[float]) -> Tensor:
        now = self.values(row)
        total = torch.zeros(())
        for t, target in enumerate(returns):
            near = torch.clamp(
                now[t], old[t] - self.recipe.value_clip, old[t] + self.recipe.value_clip
            )
            total = total + torch.max((now[t] - target) ** 2, (near - target) ** 2) / 2
        return total

    def step(self, policy: Tensor, value: Tensor) -> None:
        recipe = self.recipe
        for adam, parameters, loss, peak in (
            (self.actor_adam, list(self.actor.parameters()), policy, recipe.actor_lr),
            (self.critic_adam, self.critic_parameters, value, recipe.critic_lr),
        ):
            adam.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, recipe.grad_clip)
            adam.param_groups[0]["lr"] = peak * self.lr_share()
            adam.step()
        self.steps += 1

    def lr_share(self) -> float:
        recipe = self.recipe
        warmup = math.ceil(recipe.total_steps * recipe.warmup_ratio)
        if self.steps < warmup:
            return (self.steps + 1) / warmup
        progress = min(1.0, (self.steps - warmup) / (recipe.total_steps - 1 - warmup))
        return (
            recipe.min_lr_ratio + (1 - recipe.min_lr_ratio) * (1 + math.cos(math.pi * progress)) / 2
        )
