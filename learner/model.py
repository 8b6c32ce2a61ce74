"""Actor, critic and reference behind a few methods.

This module does not know what is learned: losses, batches and order come from `iteration.py`.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from prefixrl.common.config import RunConfig
from prefixrl.common.errors import DataError
from prefixrl.common.seeds import derive
from prefixrl.learner import distributed
from prefixrl.learner.batch import Padded
from prefixrl.learner.ppo import token_logprobs
from prefixrl.learner.trainee import Trainee


class Actor(nn.Module):
    """A causal language model that answers for the logprobs of given tokens."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: dict[str, Tensor], temperature: float) -> tuple[Tensor, Tensor]:
        """Logprobs and entropies at the action positions, both (rows, tokens) float32."""
        hidden = _at_actions(_hidden(self.model.get_decoder(), batch), batch["action_positions"])
        return token_logprobs(
            self.model.get_output_embeddings()(hidden), batch["tokens"], temperature
        )


class Critic(nn.Module):
    """The adapter's own backbone with a linear head drawn from N(0, 1/(hidden + 1)^2) and no bias."""

    def __init__(self, model: PreTrainedModel, seed: int) -> None:
        super().__init__()
        self.backbone = model.get_decoder()
        hidden = int(model.config.get_text_config().hidden_size)
        draws = torch.randn(1, hidden, generator=torch.Generator().manual_seed(seed))
        self.head = nn.Linear(hidden, 1, bias=False, dtype=model.dtype)
        self.head.weight.data.copy_(draws / (hidden + 1))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """Values at the action positions, (rows, tokens) float32."""
        hidden = _at_actions(_hidden(self.backbone, batch), batch["action_positions"])
        values: Tensor = self.head(hidden).squeeze(-1).float()
        return values


@dataclass
class Models:
    """Everything the learner trains, and the frozen reference."""

    actor: Trainee
    critic: Trainee | None
    """None when the objective takes its baseline from the group."""
    reference: Actor | None
    """None when the KL coefficient is 0."""
    source: str
    """Folder or hub name the adapter came from."""
    hf_config: PretrainedConfig
    dtype: Literal["float32", "bfloat16"]
    device: torch.device
    rank: int
    world_size: int
    temperature: float
    optimizer_steps: int = 0
    """Planned so far, dropped and left out ones included: the position in the learning rate schedule."""

    @classmethod
    def load(cls, config: RunConfig, rank: int, world_size: int, initial_path: str) -> "Models":
        """Load the adapter up to three times over: actor, critic backbone, reference. A collective.

        Raises:
            ConfigError: DeepSpeed settings that are not the user's to choose.
            DataError: a model folder that cannot be read, or an architecture whose head is not a plain linear layer.
        """
        torch.set_num_threads(config.learner.threads)
        disable_progress_bar()
        device = distributed.start(
            config.learner.device, rank, world_size, config.learner.collective_timeout_s
        )
        dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.learner.dtype]
        actor = Actor(_load(initial_path, dtype))
        _check_head(actor.model)
        hf_config = actor.model.config
        reference = None
        if config.algorithm.kl > 0.0:
            reference = Actor(_load(initial_path, dtype)).to(device).eval().requires_grad_(False)
        critic, learner = None, config.learner
        if config.algorithm.has_critic:
            head = Critic(_load(initial_path, dtype), derive(config.seed, "critic head"))
            critic = Trainee(head, learner, learner.critic_lr, device, world_size)
        return cls(
            actor=Trainee(actor, learner, learner.actor_lr, device, world_size),
            critic=critic, reference=reference, source=initial_path, hf_config=hf_config, dtype=learner.dtype, device=device,
            rank=rank, world_size=world_size, temperature=config.rollout.temperature,
        )  # fmt: skip

    def forward_actor(self, batch: Padded) -> tuple[Tensor, Tensor]:
        """Current logprobs and entropies, (rows, tokens), at the sampling temperature."""
        logprobs, entropy = self.actor.engine(_inputs(batch), self.temperature)
        return logprobs, entropy

    def forward_reference(self, batch: Padded) -> Tensor | None:
        """Logprobs of the initial adapter, (rows, tokens); None when there is no reference."""
        if self.reference is None:
            return None
        with torch.no_grad():
            logprobs: Tensor = self.reference(_inputs(batch), self.temperature)[0]
        return logprobs

    def forward_critic(self, batch: Padded) -> Tensor | None:
        """Current values, (rows, tokens); None when there is no critic."""
        if self.critic is None:
            return None
        values: Tensor = self.critic.engine(_inputs(batch))
        return values

    def state_dict_for_publication(self) -> dict[str, Tensor]:
        """The actor's whole weights on the CPU by Hugging Face name, tied ones once; empty but on rank 0. A collective."""
        whole: dict[str, Tensor] = {}
        for name, tensor in self.actor.full_tensors():
            if self.rank == 0:
                whole[name.removeprefix("model.")] = tensor.to("cpu", copy=True).contiguous()
        return whole

    @torch.no_grad()
    def probe_logprobs(self, tokens: list[int], temperature: float = 1.0) -> list[float]:
        """Logprob of each token but the first, given those before it. A collective under ZeRO-3."""
        ids = torch.tensor([tokens], device=self.device)
        places = torch.arange(len(tokens), device=self.device)[None, :]
        batch = {
            "input_ids": ids, "attention_mask": torch.ones_like(ids), "position_ids": places,
            "action_positions": places[:, :-1], "tokens": ids[:, 1:],
        }  # fmt: skip
        logprobs: list[float] = self.actor.engine(batch, temperature)[0][0].tolist()
        return logprobs


def _load(path: str, dtype: torch.dtype) -> PreTrainedModel:
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, use_safetensors=True
        )
    except (OSError, ValueError) as error:
        raise DataError(
            f"adapter.model = {path!r} is no model folder transformers can load: {error}"
        ) from error
    model.config.use_cache = False
    model.eval()
    return model


@torch.no_grad()
def _check_head(model: PreTrainedModel) -> None:
    """Logits must be head(backbone): only the positions that count go through the head, which some architectures scale."""
    ids = torch.arange(4).remainder(model.config.get_text_config().vocab_size)[None, :]
    backbone = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
    if not torch.allclose(
        model.get_output_embeddings()(backbone),
        model(input_ids=ids, use_cache=False).logits,
        atol=1e-4,
    ):
        raise DataError(
            f"{type(model).__name__} does more to its logits than one linear layer; such adapters are not supported"
        )


def _inputs(batch: Padded) -> dict[str, Tensor]:
    names = ("input_ids", "attention_mask", "position_ids", "action_positions", "tokens")
    return {name: getattr(batch, name) for name in names}


def _hidden(backbone: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    hidden: Tensor = backbone(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], position_ids=batch["position_ids"],
        use_cache=False,
    ).last_hidden_state  # fmt: skip
    return hidden


def _at_actions(hidden: Tensor, positions: Tensor) -> Tensor:
    """(rows, width, hidden) at (rows, tokens) positions -> (rows, tokens, hidden)."""
    return hidden.gather(1, positions.unsqueeze(-1).expand(-1, -1, hidden.shape[-1]))
