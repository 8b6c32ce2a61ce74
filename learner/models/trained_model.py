"""One trained module behind DeepSpeed, whose engine and optimisers only this file knows."""

import contextlib
import io
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from prefixrl.common.config.learner import LearnerConfig
from prefixrl.common.errors import ConfigError
from prefixrl.learner.models import distributed
from prefixrl.learner.models.optimizers import make_adam

GATHER_NUMEL = 64 * 1024 * 1024
"""Elements gathered at a time when ZeRO-3 weights are put together for publication."""

BUCKET = 200_000_000
"""Parameters reduced over ranks at a time: in flight a bucket takes 6 bytes each, and a larger one is no faster."""

OWN_DEEPSPEED_KEYS = {
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "managed_gradient_accumulation",
    "gradient_clipping",
    "optimizer",
    "scheduler",
    "fp16",
    "bf16",
    "data_types",
}
"""Keys of DeepSpeed's config that the learner decides itself."""


@dataclass(frozen=True)
class StepReport:
    """The outcome of one optimiser step."""

    is_applied: bool
    """False when a loss or gradient was not finite on some rank; no rank changed anything then."""
    grad_norm: float
    """Norm before clipping, over all ranks; inf when not finite."""
    lr: float = 0.0


class TrainedModel:
    """One DeepSpeed engine: micro-batches of any number, then one step."""

    def __init__(
        self,
        module: nn.Module,
        config: LearnerConfig,
        lr: float,
        device: torch.device,
        world_size: int,
        ema_decay: float | None = None,
    ) -> None:
        import deepspeed

        module.eval()  # no dropout: logprobs of one batch must be the same function in every pass
        optimizer = make_adam(module.parameters(), config, lr, device)
        self.weights = sum(parameter.numel() for parameter in module.parameters())
        settings = deepspeed_settings(config, self.weights)
        self.stage: int = settings["zero_optimization"]["stage"]
        # DeepSpeed's bf16 optimiser prints memory figures, unasked.
        with contextlib.redirect_stdout(io.StringIO()):
            self.engine = deepspeed.initialize(
                model=module.to(device), optimizer=optimizer, config=settings
            )[0]
        self.engine.eval()
        if self.stage == 0 and world_size == 1:
            # There is nothing to add up, and it would copy all gradients into one buffer, and back.
            self.engine.enable_backward_allreduce = False
        for layer in module.modules():
            if getattr(layer, "gradient_checkpointing", False):
                # transformers keeps all activations of a layer in evaluation mode; what drops out stays in it.
                layer.training = True
        self._ema_decay = ema_decay
        self.ema = self._copied_masters() if ema_decay else {}
        """Moving average of `masters`; empty without an average."""
        self._peak_lr, self._config, self._world_size = lr, config, world_size
        self._bad_losses = torch.zeros((), device=device)
        self.rate_scale = 1.0
        """Factor on the rate of every step."""

    def close(self) -> None:
        """Free the memory of the engine, which DeepSpeed otherwise keeps as long as the process lives."""
        self.engine.destroy()
        del self.engine

    def backward(self, loss: Tensor, is_last: bool) -> None:
        """Accumulate the gradient of one micro-batch's share of the loss, which is over the global denominator.

        A loss that is not finite on any rank makes the last one NaN on every rank, so every ZeRO stage drops the step.
        """
        self._bad_losses += ~torch.isfinite(loss.detach())
        if is_last and distributed.sum_over_ranks(self._bad_losses).item():
            loss = loss * math.nan
        self.engine.set_gradient_accumulation_boundary(is_last)
        self.engine.backward(loss * self._world_size)

    def step(self, step: int, total: int) -> StepReport:
        """Take optimiser step `step` of `total`, unless a loss or gradient was not finite."""
        peak = self.rate_scale * self._peak_lr
        lr = lr_at(step, total, peak, self._config.warmup_ratio, self._config.min_lr_ratio)
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr
        self._bad_losses.zero_()
        if self.stage == 0:
            report = self._plain_step()
        else:
            self.engine.step()
            is_applied = bool(self.engine.was_step_applied())
            report = StepReport(
                is_applied, float(self.engine.get_global_grad_norm()) if is_applied else math.inf
            )
        if report.is_applied and self._ema_decay is not None:
            for name, weights in self.masters().items():
                self.ema[name].lerp_(weights.detach(), 1.0 - self._ema_decay)
        return replace(report, lr=lr)

    def _plain_step(self) -> StepReport:
        """Clip and step at stage 0, which checks nothing itself; all ranks see one norm of averaged gradients."""
        # DeepSpeed would measure the norm once more.
        norm = torch.nn.utils.clip_grad_norm_(
            self.engine.module.parameters(), self._config.grad_clip
        )
        if not math.isfinite(norm):
            self.engine.zero_grad()
            return StepReport(False, math.inf)
        self.engine.step()
        return StepReport(True, float(norm))

    @property
    def adam(self) -> torch.optim.Optimizer:
        """The optimiser that DeepSpeed wraps; it holds the moments of `masters`."""
        optimizer = self.engine.optimizer
        adam: torch.optim.Optimizer = optimizer if self.stage == 0 else optimizer.optimizer
        return adam

    def masters(self) -> dict[str, Tensor]:
        """Return the fp32 weights that this rank updates: whole at stage 0, else flat partitions."""
        optimizer = self.engine.optimizer
        if self.stage == 0:
            parameters = self.engine.module.named_parameters()
            return {name: weights for name, weights in parameters if weights.requires_grad}
        if self.stage == 3:
            partitions = optimizer.fp32_partitioned_groups_flat
        elif hasattr(optimizer, "fp32_groups_flat_partition"):
            # DeepSpeed's stage 1 for bf16 is a class of its own.
            partitions = optimizer.fp32_groups_flat_partition
        else:
            partitions = optimizer.single_partition_of_fp32_groups
        return {f"partition.{index}": partition for index, partition in enumerate(partitions)}

    def _copied_masters(self) -> dict[str, Tensor]:
        return {name: weights.detach().clone() for name, weights in self.masters().items()}

    def masters_changed(self) -> None:
        """Copy `masters` to the weights of the forward after they were written to. A collective."""
        optimizer = self.engine.optimizer
        if self.stage in (1, 2):
            optimizer.update_lp_params()
        elif self.stage == 3:
            optimizer.checkpoint_event_prologue()
            for index in range(len(optimizer.fp32_partitioned_groups_flat)):
                optimizer._reassign_or_swap_out_partitioned_parameters(index)
            optimizer.checkpoint_event_epilogue()

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Use the moving average as weights for a while. Entering and leaving are collectives."""
        trained = self._copied_masters()
        self._become(self.ema)
        try:
            yield
        finally:
            self._become(trained)

    @torch.no_grad()
    def _become(self, weights: dict[str, Tensor]) -> None:
        for name, master in self.masters().items():
            master.copy_(weights[name])
        self.masters_changed()

    def full_tensors(
        self, is_sent: Callable[[str], bool] = lambda name: True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield every wanted parameter by name. Under ZeRO-3 a collective, whole while yielded."""
        import deepspeed

        for bucket in _buckets(
            [each for each in self.engine.module.named_parameters() if is_sent(each[0])]
        ):
            with deepspeed.zero.GatheredParameters(
                [parameter for _, parameter in bucket], enabled=self.stage == 3
            ):
                for name, parameter in bucket:
                    yield name, parameter.detach()


def deepspeed_settings(config: LearnerConfig, parameters: int) -> dict[str, Any]:
    """Return DeepSpeed's config: the user's, with the keys that the learner decides; raise ConfigError."""
    reserved = sorted(OWN_DEEPSPEED_KEYS & config.deepspeed.keys())
    if reserved:
        raise ConfigError(
            f"learner.deepspeed sets {', '.join(reserved)}, which follow from other settings (learner.dtype, "
            "learner.grad_clip, algorithm.minibatches, learner.micro_batch_tokens); leave them out"
        )
    zero = dict(config.deepspeed.get("zero_optimization", {}))
    stage = zero_stage(config)
    for key in ("offload_optimizer", "offload_param"):
        if (zero.get(key) or {}).get("device") == "nvme":
            raise ConfigError(
                f'learner.deepspeed.zero_optimization.{key}.device = "nvme": checkpoints could not see the weights '
                'there; allowed are "cpu" and "none"'
            )
    autocast = config.deepspeed.get("torch_autocast") or {}
    if autocast.get("enabled") and autocast.get("dtype") not in (
        "bfloat16",
        "bf16",
        "torch.bfloat16",
    ):
        raise ConfigError(
            f"learner.deepspeed.torch_autocast.dtype = {autocast.get('dtype')!r}: DeepSpeed would scale gradients of "
            'another dtype than bfloat16, and the learner checks and clips them as they are; allowed are "bfloat16" '
            'and "bf16"'
        )
    zero["stage"] = stage
    zero.setdefault("reduce_bucket_size", min(BUCKET, max(parameters, 1)))
    settings: dict[str, Any] = {
        "steps_per_print": 2**31,
        "zero_force_ds_cpu_optimizer": False,
        **config.deepspeed,
    }
    settings |= {
        "zero_optimization": zero,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.grad_clip if stage else 0.0,  # at stage 0 `TrainedModel` clips
    }
    if config.dtype == "bfloat16":
        settings |= {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
        # DeepSpeed would add up the gradients of the ranks in bfloat16.
        settings.setdefault("communication_data_type", "fp32")
    return settings


def zero_stage(config: LearnerConfig) -> int:
    """Return the ZeRO stage that applies; raise ConfigError for one that does not exist."""
    stage = config.deepspeed.get("zero_optimization", {}).get("stage", 0)
    if stage not in (0, 1, 2, 3):
        raise ConfigError(
            f"learner.deepspeed.zero_optimization.stage = {stage!r}; allowed are 0, 1, 2 and 3"
        )
    # Stage 0 in bf16 keeps no fp32 weights, and steps of 5e-7 would round away; for one rank stage 1 is stage 0 with
    # them.
    return max(stage, 1) if config.dtype == "bfloat16" else int(stage)


def _buckets(
    parameters: list[tuple[str, nn.Parameter]],
) -> Iterator[list[tuple[str, nn.Parameter]]]:
    bucket: list[tuple[str, nn.Parameter]] = []
    numel = 0
    for name, parameter in parameters:
        size = int(getattr(parameter, "ds_numel", parameter.numel()))
        if bucket and numel + size > GATHER_NUMEL:
            yield bucket
            bucket, numel = [], 0
        bucket.append((name, parameter))
        numel += size
    if bucket:
        yield bucket


def lr_at(step: int, total: int, peak: float, warmup_ratio: float, min_ratio: float) -> float:
    """Return the learning rate of a step (from 0): warm-up, then half a cosine to `min_ratio * peak`, which stays."""
    warmup = math.ceil(total * warmup_ratio)
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = min((step - warmup) / max(total - 1 - warmup, 1), 1.0)
    return peak * (min_ratio + (1.0 - min_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress)))
