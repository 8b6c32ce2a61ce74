"""Actor, critic and reference behind a few methods; `iteration.py` brings losses and order."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import PretrainedConfig, PreTrainedModel

from prefixrl.common.config.learner import LoraConfig
from prefixrl.common.config.run import RunConfig
from prefixrl.common.errors import ConfigError, DataError
from prefixrl.common.host.hub import model_folder
from prefixrl.common.models.loading import load_model
from prefixrl.common.prompts.rendering import masked_tokens
from prefixrl.common.prompts.tokenizer import load_tokenizer
from prefixrl.common.seeds import derive
from prefixrl.common.wire.packing import Logprobs, ProbeRow
from prefixrl.learner.models import backbone as parts
from prefixrl.learner.models import distributed, lora, varlen
from prefixrl.learner.models.attention import PACKED, attn_implementation, shares_prompts
from prefixrl.learner.models.batch import PaddedRows, Sample, pad
from prefixrl.learner.models.head import TokenHead
from prefixrl.learner.models.trained_model import TrainedModel, zero_stage


class Actor(nn.Module):
    """A causal language model that returns the logprobs of given tokens."""

    def __init__(
        self, model: PreTrainedModel, is_packed: bool = False, head_dtype: str = "float32"
    ) -> None:
        super().__init__()
        self.model = model
        self.head = TokenHead(model.get_output_embeddings(), head_dtype)
        self._is_packed = is_packed

    def forward(
        self,
        batch: dict[str, Tensor],
        temperature: float,
        has_entropy: bool = False,
        masked: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return logprobs and entropies (else 0) at the actions, both (rows, tokens) float32."""
        hidden = parts.hidden_at_actions(self.model.get_decoder(), batch, self._is_packed)
        tokens = batch["tokens"].flatten()[batch["cells"]]
        logprobs, entropy = self.head(hidden, tokens, temperature, has_entropy, masked)
        return parts.spread_over_rows(logprobs, batch), parts.spread_over_rows(entropy, batch)


class Critic(nn.Module):
    """The adapter's backbone with a linear head drawn from N(0, 1/(hidden + 1)^2), no bias."""

    def __init__(self, model: PreTrainedModel, seed: int, is_packed: bool = False) -> None:
        super().__init__()
        self._is_packed = is_packed
        self.backbone = model.get_decoder()
        hidden = int(model.config.get_text_config().hidden_size)
        draws = torch.randn(1, hidden, generator=torch.Generator().manual_seed(seed))
        self.head = nn.Linear(hidden, 1, bias=False, dtype=model.dtype, device=model.device)
        self.head.weight.data.copy_(draws / (hidden + 1))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """Return values at the action positions, (rows, tokens) float32."""
        values = (
            self.head(parts.hidden_at_actions(self.backbone, batch, self._is_packed))
            .squeeze(-1)
            .float()
        )
        return parts.spread_over_rows(values, batch)


@dataclass
class RewardModel:
    """An implicit reward model, trained or only scoring, and what its log ratio is to."""

    trained: TrainedModel | None
    frozen: Actor | None
    """The model where it only scores."""
    reference: Actor | None
    """None where the policy is the reference, or the trained model without its low-rank matrices."""
    is_to_policy: bool
    source: str


@dataclass
class Models:
    """Everything the learner trains, and the frozen reference."""

    actor: TrainedModel
    critic: TrainedModel | None
    reference: Actor | None
    """None without a reference, and where the actor without its low-rank matrices is the reference."""
    source: str
    hf_config: PretrainedConfig
    dtype: Literal["float32", "bfloat16"]
    device: torch.device
    rank: int
    world_size: int
    temperature: float
    has_reference: bool
    """False when the KL coefficient is 0."""
    is_shared: bool
    """True if the prompt of a group is computed once for all rows of a line."""
    is_packed: bool
    """True if rows run end to end as one, without padding."""
    masked: Tensor | None = None
    """Tokens that the adapter never draws, (vocabulary,); None without any. The probe is of the whole distribution."""
    lora: LoraConfig | None = None
    reward: RewardModel | None = None
    optimizer_steps: int = 0
    """Steps planned so far, with dropped and left-out steps: the position in the learning rate schedule."""
    on_forward: Callable[[], None] = lambda: None
    """Called before every forward of actor and reward model: a sign of life in a long iteration."""

    @classmethod
    def load(cls, config: RunConfig, rank: int, world_size: int, initial_path: str) -> "Models":
        """Load the adapter up to three times: actor, critic's backbone, reference. A collective; UserError."""
        torch.set_num_threads(config.learner.threads)
        device = distributed.start(
            config.learner.device, rank, world_size, config.learner.collective_timeout_s
        )
        learner, folder = config.learner, _Folder(initial_path, config, device)
        actor = Actor(folder.trainable("actor"), folder.is_packed, learner.head_dtype)
        _check_head(actor.model)
        masked = _mask(
            masked_tokens(config, initial_path), actor
        )  # while no rank has only a part of the weights
        is_shared = shares_prompts(
            learner, device.type, config.mode == "direct"
        ) and parts.takes_shared_prompts(actor.model)
        anchor = (
            folder if config.adapter.reference == "start" else folder.named(config.adapter.model)
        )
        reference = None
        # Under LoRA the frozen weights themselves are the reference, unless it is another model.
        if config.algorithm.kl > 0.0 and (learner.lora is None or anchor.path != folder.path):
            _check_tokenizer(folder, anchor)
            reference = anchor.frozen(world_size)
        critic = None
        if config.algorithm.has_critic:
            values = Critic(
                folder.trainable("critic"), derive(config.seed, "critic head"), folder.is_packed
            )
            critic = TrainedModel(values, learner, learner.critic_lr, device, world_size)
        return cls(
            actor=TrainedModel(
                actor, learner, learner.actor_lr, device, world_size, learner.ema_decay
            ),
            critic=critic,
            reference=reference,
            source=initial_path,
            hf_config=actor.model.config,
            dtype=learner.dtype,
            device=device,
            rank=rank,
            world_size=world_size,
            lora=learner.lora,
            temperature=config.rollout.temperature,
            has_reference=config.algorithm.kl > 0.0,
            is_shared=is_shared,
            is_packed=folder.is_packed,
            masked=masked,
            reward=_reward_model(folder, world_size) if config.implicit_reward else None,
        )

    def facts(self) -> tuple[str, ...]:
        """Return what decides on this rank's speed and memory, for a line of its log."""
        rows = "packed" if self.is_packed else "padded"
        return (
            f"rank {self.rank} of {self.world_size}",
            f"DeepSpeed, ZeRO stage {self.actor.stage}",
            f"{self.hf_config._attn_implementation} attention, {rows} rows",
            f"shared prompts: {'yes' if self.is_shared else 'no'}",
            self.dtype,
        )

    def forward_actor(self, batch: PaddedRows, has_entropy: bool = False) -> tuple[Tensor, Tensor]:
        """Return current logprobs, and entropies or 0, (rows, tokens), at the sampling temperature."""
        self.on_forward()
        outcome: tuple[Tensor, Tensor] = self.actor.engine(
            batch.inputs(), self.temperature, has_entropy, self.masked
        )
        return outcome

    def forward_reference(self, batch: PaddedRows) -> Tensor | None:
        """Return logprobs of the KL's reference, (rows, tokens); None without a reference."""
        if not self.has_reference:
            return None
        with torch.no_grad(), lora.disabled(self.actor.engine.module):
            model = self.reference or self.actor.engine
            logprobs: Tensor = model(batch.inputs(), self.temperature, False, self.masked)[0]
        return logprobs

    def forward_critic(self, batch: PaddedRows) -> Tensor | None:
        """Return current values, (rows, tokens); None when there is no critic."""
        if self.critic is None:
            return None
        values: Tensor = self.critic.engine(batch.inputs())
        return values

    def forward_reward(self, batch: PaddedRows) -> Tensor:
        """Return the reward model's logprobs, (rows, tokens), at temperature 1."""
        self.on_forward()
        assert self.reward is not None, "a run with process rewards"
        model = self.reward.trained.engine if self.reward.trained else self.reward.frozen
        assert model is not None, "one of the two is there"
        logprobs: Tensor = model(batch.inputs(), 1.0)[0]
        return logprobs

    @torch.no_grad()
    def forward_reward_reference(self, batch: PaddedRows) -> Tensor:
        """Return the logprobs that its log ratio is to, at temperature 1; the policy's are made here too."""
        assert self.reward is not None, "a run with process rewards"
        model = self.actor.engine if self.reward.is_to_policy else self.reward.reference
        if model is None:
            assert self.reward.trained is not None, "low-rank matrices are trained"
            with lora.disabled(self.reward.trained.engine.module):
                return self.forward_reward(batch)
        self.on_forward()
        logprobs: Tensor = model(batch.inputs(), 1.0)[0]
        return logprobs

    def state_dict_for_publication(self, model: TrainedModel | None = None) -> dict[str, Tensor]:
        """Gather the weights of a model or the actor on rank 0's CPU, by name, tied weights once. A collective."""
        whole: dict[str, Tensor] = {}
        for name, tensor in (model or self.actor).full_tensors():
            if self.rank == 0:
                whole[name.removeprefix("model.")] = tensor.to("cpu", copy=True).contiguous()
        return lora.merged(whole, self.lora) if self.lora else whole

    @torch.no_grad()
    def probe_logprobs(
        self, rows: Sequence[ProbeRow], temperature: float = 1.0, most_tokens: int = 16384
    ) -> Logprobs:
        """Return the logprobs of the scored tokens of all rows. A collective under ZeRO-3."""
        row_logprobs: list[Logprobs] = []
        width = max(prompt.size + scored.size for prompt, scored in rows)
        size = max(1, most_tokens // width)
        for start in range(0, len(rows), size):
            samples = []
            for prompt, scored in rows[start : start + size]:
                zeros = np.zeros_like(scored)
                samples.append(Sample(prompt, scored, zeros.astype(np.float32), 0.0, 0, zeros))
            batch = pad(samples, 0).to(self.device)
            logprobs = self.actor.engine(batch.inputs(), temperature)[0]
            row_logprobs.append(logprobs[batch.mask].float().cpu().numpy())
        return np.concatenate(row_logprobs)


def _reward_model(folder: "_Folder", world_size: int) -> RewardModel:
    """Load the implicit reward model and its reference; DataError. A collective under ZeRO-3."""
    config, device = folder.config, folder.device
    learner, settings = config.learner, config.implicit_reward
    assert settings is not None, "called for such runs only"
    reward_folder = (
        folder.named(settings.model, "implicit_reward.model") if settings.model else folder
    )
    _check_tokenizer(folder, reward_folder)
    trained = frozen = reference = None
    if settings.update == "none":
        frozen = reward_folder.frozen(world_size)
    else:
        actor = Actor(reward_folder.trainable("reward model"), folder.is_packed, learner.head_dtype)
        _check_head(actor.model)
        # A constant rate without decay: its steps follow no schedule of the run.
        constant = {
            "warmup_ratio": 0.0,
            "min_lr_ratio": 1.0,
            "weight_decay": 0.0,
            "grad_clip": settings.grad_clip,
        }
        trained = TrainedModel(
            actor,
            learner.model_copy(update=constant),
            settings.lr,
            device,
            world_size,
            learner.ema_decay,
        )
    other = settings.reference_model
    # Under LoRA the trained model without its matrices is the reference, so no copy is loaded.
    if settings.reference == "freeze" and (
        learner.lora is None or other or settings.update == "none"
    ):
        reference_folder = (
            folder.named(other, "implicit_reward.reference_model") if other else reward_folder
        )
        _check_tokenizer(folder, reference_folder)
        reference = reference_folder.frozen(world_size)
    return RewardModel(
        trained, frozen, reference, settings.reference == "policy", reward_folder.path
    )


def _check_tokenizer(adapter: "_Folder", other: "_Folder") -> None:
    """Raise DataError unless both read the same text as the same tokens."""
    if other.path == adapter.path:
        return
    vocabulary, other_vocabulary = (
        load_tokenizer(each.path).get_vocab() for each in (adapter, other)
    )
    if vocabulary != other_vocabulary:
        differing = len(set(vocabulary.items()) ^ set(other_vocabulary.items()))
        raise DataError(
            f"{other.key} = {other.path!r} has another tokenizer than the adapter {adapter.path!r} ({differing} "
            f"entries of the vocabularies differ): it would score other tokens; name a model of the same family"
        )


def shard(frozen: Actor, device: torch.device) -> None:
    """Leave each rank its part of a frozen model's weights, gathered layer by layer; a forward is a collective.

    DeepSpeed's ZeRO-3 has no engine for a model without an optimiser whose forwards stand between those of others.
    """
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    layers = frozen.model._no_split_modules or ()
    for module in frozen.modules():
        if type(module).__name__ in layers:
            fully_shard(module, mesh=mesh)
    fully_shard(frozen, mesh=mesh, reshard_after_forward=True)


@dataclass(frozen=True)
class _Folder:
    """A model folder, mostly the adapter's; all models of a run are loaded from folders in one way."""

    path: str
    config: RunConfig
    device: torch.device
    key: str = "adapter.model"

    def named(self, model: str, key: str = "adapter.model") -> "_Folder":
        """Return another model, loaded in the same way."""
        return replace(self, path=model_folder(model), key=key)

    @property
    def attention(self) -> str:
        """Return the implementation of attention."""
        return attn_implementation(
            self.config.learner, self.device.type, self.config.mode == "direct"
        )

    @property
    def is_packed(self) -> bool:
        """True if rows run end to end as one, without padding."""
        packed = self.config.learner.packed
        return self.attention in PACKED if packed is None else packed

    def trainable(self, name: str) -> PreTrainedModel:
        """Load a model with everything that only training needs."""
        model, learner = self.load(), self.config.learner
        if learner.lora:
            lora.add(model, learner.lora, derive(self.config.seed, "lora", name))
        if learner.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    def frozen(self, world_size: int) -> Actor:
        """Load a model that is never trained, spread over ranks under ZeRO-3."""
        learner = self.config.learner
        actor = Actor(self.load(), self.is_packed, learner.head_dtype).eval().requires_grad_(False)
        if world_size > 1 and zero_stage(learner) == 3:
            shard(actor, self.device)
        return actor

    def load(self) -> PreTrainedModel:
        """Load a model onto the learner's device."""
        attention = self.attention
        called = f"{self.key} = {self.path!r}"
        model = load_model(
            self.path, called, self.config.learner.dtype, attention=attention, is_trained=True
        )
        model.config.use_cache = False
        nn.Module.to(model, self.device)
        if attention == varlen.NAME and not parts.serves_packed_rows(model):
            if self.config.learner.attn_implementation == attention:
                raise ConfigError(
                    f"learner.attn_implementation = {attention!r} does not serve {called} on this device "
                    "(the log says why); use sdpa or auto"
                )
            model.set_attn_implementation("sdpa")
        return model


def _mask(tokens: Sequence[int], actor: Actor) -> Tensor | None:
    """Return True at the given tokens of the vocabulary, None without any."""
    if not tokens:
        return None
    is_masked = torch.zeros(
        actor.head.weight.shape[0], dtype=torch.bool, device=actor.head.weight.device
    )
    is_masked[list(tokens)] = True
    return is_masked


@torch.no_grad()
def _check_head(model: PreTrainedModel) -> None:
    """Raise DataError unless logits are head(backbone): the head sees counted positions only."""
    ids = torch.arange(4, device=model.device)[None, :].remainder(
        model.config.get_text_config().vocab_size
    )
    backbone = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
    if not torch.allclose(
        model.get_output_embeddings()(backbone),
        model(input_ids=ids, use_cache=False).logits,
        atol=1e-4,
    ):
        raise DataError(
            f"{type(model).__name__} does more to its logits than one linear layer; such adapters are not supported"
        )
