"""Logprobs and entropies from hidden states, without a table of tokens x vocabulary.

    z = (h W^T + b) / T      log p(y) = z_y - lse(z)      H = lse(z) - sum_v p_v z_v      (z_v = -1e20 where masked)

The vocabulary is gone through in blocks. Forward keeps a running maximum and two sums per token; backward computes each
block's logits again and needs no more than `lse` and H:

    d log p(y) / dz_v = [v = y] - p_v          dH / dz_v = -p_v (z_v - lse + H)

A block of the vocabulary, not of tokens, since the rows of dW that belong to it are then finished at once: they are
summed in float32 over all tokens and rounded to the weight's type a single time, without a float32 copy of the whole.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from prefixrl.learner.models.lora import is_low_rank

BLOCK_ENTRIES = 16 * 1024 * 1024
"""Logits at a time (64 MiB in float32, of which two are alive), and entries of the weight at a time."""

MASKED_LOGIT = -1e20
"""Logit of a token that is never drawn: its probability is 0, and p z is 0 too, which an infinite one would spoil."""

Part = tuple[Tensor, Tensor]
"""Hidden states (tokens, hidden) and weight (vocabulary, hidden); logits are the sum over the parts."""


class TokenHead(nn.Module):
    """The linear layer that makes logits, as one step to logprobs; parameters are its own too, for ZeRO-3 and FSDP."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    first: nn.Parameter | None
    second: nn.Parameter | None

    def __init__(self, layer: Any, dtype: str) -> None:
        super().__init__()
        self.layer = layer
        self._is_float32 = dtype == "float32"
        has_matrices = is_low_rank(layer)
        linear = layer.get_base_layer() if has_matrices else layer
        self.weight, self.bias = linear.weight, linear.bias
        self.first = layer.lora_A["default"].weight if has_matrices else None
        self.second = layer.lora_B["default"].weight if has_matrices else None
        self._scaling = float(layer.scaling["default"]) if has_matrices else 0.0

    def forward(
        self,
        hidden: Tensor,
        tokens: Tensor,
        temperature: float,
        has_entropy: bool,
        masked: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return logprob and entropy of each token, float32; `masked` (vocabulary,) have no part in them.

        Entropy, 0 where not asked for, costs one more pass over each block; backward pays only if a loss uses it.
        """
        flat, is_enabled = hidden.flatten(0, -2), not getattr(self.layer, "disable_adapters", True)
        parts: list[Part] = [(flat, self.weight)]
        # Low-rank matrices on the head are a second product, so that W + B A is never built.
        if is_enabled and self.first is not None and self.second is not None:
            parts.append((flat @ self.first.T * self._scaling, self.second))
        logprobs, entropy = token_logprobs(
            parts,
            self.bias,
            tokens.flatten(),
            temperature,
            has_entropy,
            is_float32=self._is_float32,
            masked=masked,
        )
        return logprobs.view(tokens.shape), entropy.view(tokens.shape)


def token_logprobs(
    parts: Sequence[Part],
    bias: Tensor | None,
    tokens: Tensor,
    temperature: float,
    has_entropy: bool,
    is_float32: bool,
    masked: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return each token's logprob and entropy (0 unless asked for) at the sampling temperature, both float32.

    `parts` is one, or with low-rank matrices on the head two. Without `is_float32` logits are rounded to the weight's
    type. `masked` (vocabulary,) is True for tokens of probability 0.
    """
    outcome: tuple[Tensor, Tensor] = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        tokens,
        bias,
        masked,
        temperature,
        has_entropy,
        is_float32,
        *(tensor for part in parts for tensor in part),
    )
    return outcome


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tokens: Tensor,
        bias: Tensor | None,
        masked: Tensor | None,
        temperature: float,
        has_entropy: bool,
        is_float32: bool,
        *tensors: Tensor,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        logits = _Logits(tensors, bias, masked, temperature, is_float32)
        top = torch.full(tokens.shape, -torch.inf, device=tokens.device)
        mass, weighted, picked = (torch.zeros_like(top) for _ in range(3))
        for block in logits.blocks():
            z = logits.of_block(block)
            new_top = torch.maximum(top, z.amax(dim=1))
            place, is_here = _places(tokens, block)
            picked = torch.where(is_here, z.gather(1, place)[:, 0], picked)
            # What was summed so far, as if it had been below the new maximum from the beginning.
            shift = torch.where(mass > 0, top - new_top, 0.0)
            scale = shift.exp()
            powers = z.sub_(new_top[:, None]).exp()
            block_mass = powers.sum(dim=1)
            if has_entropy:
                weighted = (weighted + mass * shift) * scale + powers.mul_(z).sum(dim=1)
            mass, top = mass * scale + block_mass, new_top
            del z, powers  # the next block's logits come before these names are given again
        log_mass = mass.log()
        lse = top + log_mass
        entropy = log_mass - weighted / mass if has_entropy else torch.zeros_like(mass)
        ctx.save_for_backward(tokens, bias, masked, lse, entropy, *tensors)
        ctx.settings = temperature, is_float32
        if not has_entropy:
            ctx.mark_non_differentiable(entropy)
        return picked - lse, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        tokens, bias, masked, lse, entropy, *tensors = ctx.saved_tensors
        temperature, is_float32 = ctx.settings
        logits = _Logits(tensors, bias, masked, temperature, is_float32)
        _, needs_bias, _, _, _, _, *needed = ctx.needs_input_grad
        of_logprob = torch.zeros_like(lse) if gradients[0] is None else gradients[0]
        # Hidden states, at even places, add up over the blocks in float32; each block writes its
        # own rows of the weight.
        sums = [
            None
            if not is_needed
            else torch.zeros_like(each, dtype=torch.float32 if index % 2 == 0 else each.dtype)
            for index, (each, is_needed) in enumerate(zip(tensors, needed, strict=True))
        ]
        of_bias = torch.zeros_like(bias) if bias is not None and needs_bias else None
        for block in logits.blocks():
            logs = logits.of_block(block).sub_(lse[:, None])
            gradient = logs.exp()
            # With g and h, the gradients of logprob and entropy,
            # dL/dz_v = g ([v = y] - p_v) - h p_v (z_v - lse + H).
            if gradients[1] is None:
                gradient.mul_(-of_logprob[:, None])
            else:
                factor = (
                    logs.add_(entropy[:, None])
                    .mul_(gradients[1][:, None])
                    .add_(of_logprob[:, None])
                )
                gradient.mul_(factor).neg_()
            del logs
            place, is_here = _places(tokens, block)
            gradient.scatter_add_(1, place, torch.where(is_here, of_logprob, 0.0)[:, None])
            # z is the logit over the temperature.
            gradient.div_(temperature)
            logits.spread(gradient, block, sums)
            if of_bias is not None:
                of_bias[block] = gradient.sum(dim=0)
            del gradient
        of_tensors = [
            each if each is None else each.to(tensor.dtype)
            for each, tensor in zip(sums, tensors, strict=True)
        ]
        return None, of_bias, None, None, None, None, *of_tensors


class _Logits:
    """Logits at the sampling temperature, and the way back from them, block by block."""

    def __init__(
        self,
        tensors: Sequence[Tensor],
        bias: Tensor | None,
        masked: Tensor | None,
        temperature: float,
        is_float32: bool,
    ) -> None:
        self._weights, self._bias, self._temperature = tensors[1::2], bias, temperature
        self._masked = masked
        self._is_float32 = is_float32
        # Where products are of float32 alone, hidden states are made so once, not in every block.
        self._is_wide = is_float32 and tensors[0].device.type != "cuda"
        self._hidden = [hidden.float() if self._is_wide else hidden for hidden in tensors[::2]]

    def blocks(self) -> Iterator[slice]:
        """Yield runs of the vocabulary, all but the last of one size."""
        vocabulary, width = self._weights[0].shape
        size = max(1, BLOCK_ENTRIES // max(self._hidden[0].shape[0], width))
        for start in range(0, vocabulary, size):
            yield slice(start, min(start + size, vocabulary))

    def of_block(self, block: slice) -> Tensor:
        """Return (tokens, block) float32, which the caller may write to."""
        logits = self._product(self._hidden[0], self._weights[0][block].T)
        for hidden, weight in zip(self._hidden[1:], self._weights[1:], strict=True):
            logits = logits + self._product(hidden, weight[block].T)
        if self._bias is not None:
            logits = logits + self._bias[block]
        logits = logits.float().div_(self._temperature)
        if self._masked is not None:
            logits.masked_fill_(self._masked[block], MASKED_LOGIT)
        return logits

    def spread(self, gradient: Tensor, block: slice, sums: Sequence[Tensor | None]) -> None:
        """Add a block's gradient to the gradients of hidden states; write the gradient of the weights."""
        if not self._is_wide:
            gradient = gradient.to(self._weights[0].dtype)  # the sums stay float32
        for index, (hidden, weight) in enumerate(zip(self._hidden, self._weights, strict=True)):
            of_hidden, of_weight = sums[2 * index], sums[2 * index + 1]
            if of_hidden is not None:
                of_hidden += self._product(gradient, weight[block])
            if of_weight is not None:
                of_weight[block] = self._product(gradient.T, hidden)

    def _product(self, first: Tensor, second: Tensor) -> Tensor:
        if not self._is_float32 or first.dtype == second.dtype == torch.float32:
            return first @ second
        if first.device.type == "cuda":
            return torch.mm(first, second, out_dtype=torch.float32)
        return first.float() @ second.float()


def _places(tokens: Tensor, block: slice) -> tuple[Tensor, Tensor]:
    """Return each token's column in the block, (tokens, 1), and True where it lies in it."""
    is_here = (tokens >= block.start) & (tokens < block.stop)
    return torch.where(is_here, tokens - block.start, 0)[:, None], is_here
