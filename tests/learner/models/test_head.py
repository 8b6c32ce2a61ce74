"""The head in blocks of the vocabulary against the plain form, which makes the whole table; and what it keeps alive."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from prefixrl.learner.models import head
from prefixrl.learner.models.head import TokenHead, token_logprobs
from support.live_bytes import LiveBytes

TOKENS, HIDDEN, VOCABULARY = 23, 16, 101
ONE_BLOCK, SEVERAL_BLOCKS = 10**6, TOKENS * 17
GIB = 2**30


def plain_logprobs(logits: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Logprob and entropy from all logits, (tokens, vocabulary)."""
    logs = torch.log_softmax(logits.float() / temperature, dim=-1)
    entropy = -(logs.exp() * logs).sum(dim=-1)
    return logs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1), entropy


def plain_logits(parts: Sequence[tuple[Tensor, Tensor]], bias: Tensor | None) -> Tensor:
    logits = torch.stack([hidden @ weight.T for hidden, weight in parts]).sum(dim=0)
    return logits if bias is None else logits + bias


def drawn(seed: int, parts: int, has_bias: bool) -> tuple[list[Tensor], Tensor | None, Tensor]:
    random = torch.Generator().manual_seed(seed)
    tensors = []
    for part in range(parts):
        width = HIDDEN if part == 0 else 4
        tensors += [
            torch.randn(TOKENS, width, generator=random),
            torch.randn(VOCABULARY, width, generator=random),
        ]
    bias = torch.randn(VOCABULARY, generator=random) if has_bias else None
    return tensors, bias, torch.randint(0, VOCABULARY, (TOKENS,), generator=random)


def gradients(
    form: Any, tensors: list[Tensor], bias: Tensor | None, entropy: float
) -> list[Tensor]:
    """Logprobs, entropies, and the gradients of a loss with both in all tensors."""
    leaves = [each.clone().requires_grad_() for each in tensors]
    own_bias = None if bias is None else bias.clone().requires_grad_()
    pairs = list(zip(leaves[::2], leaves[1::2], strict=True))
    logprobs, entropies = form(pairs, own_bias)
    factors = torch.linspace(-1.0, 2.0, TOKENS)
    loss = (factors * logprobs).sum()
    if entropy:
        loss = loss + entropy * (factors.flip(0) * entropies).sum()
    loss.backward()
    results = [logprobs.detach(), *(each.grad for each in leaves if each.grad is not None)]
    return [*results, *([] if own_bias is None or own_bias.grad is None else [own_bias.grad])]


def assert_close(mine: Tensor, theirs: Tensor, tolerance: float = 1e-6) -> None:
    gap = (mine.float() - theirs.float()).abs().max() / theirs.float().abs().max()
    assert gap < tolerance, f"differs by {gap} of the largest entry"


@pytest.mark.parametrize("entries", [ONE_BLOCK, SEVERAL_BLOCKS])
@pytest.mark.parametrize("entropy", [0.0, 0.3])
@pytest.mark.parametrize(("parts", "has_bias"), [(1, False), (1, True), (2, False)])
def test_logprobs_and_all_gradients_are_those_of_the_plain_form(
    parts: int, has_bias: bool, entropy: float, entries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "BLOCK_ENTRIES", entries)
    tensors, bias, tokens = drawn(3, parts, has_bias)
    mine = gradients(
        lambda pairs, own: token_logprobs(pairs, own, tokens, 0.7, bool(entropy), True),
        tensors,
        bias,
        entropy,
    )
    theirs = gradients(
        lambda pairs, own: plain_logprobs(plain_logits(pairs, own), tokens, 0.7),
        tensors,
        bias,
        entropy,
    )
    assert len(mine) == len(theirs) == 1 + 2 * parts + has_bias
    for a, b in zip(mine, theirs, strict=True):
        assert_close(a, b)


@pytest.mark.parametrize("entries", [ONE_BLOCK, SEVERAL_BLOCKS])
@pytest.mark.parametrize(
    "left_out", [[0, 3, 50, 100], list(range(60)), list(range(40, VOCABULARY))]
)
def test_masked_tokens_have_no_part_in_logprobs_entropies_and_gradients(
    left_out: list[int], entries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "BLOCK_ENTRIES", entries)
    kept = [token for token in range(VOCABULARY) if token not in left_out]
    tensors, bias, places = drawn(5, 1, True)
    places = places.remainder(len(kept))
    masked = torch.zeros(VOCABULARY, dtype=torch.bool)
    masked[left_out] = True

    def over_the_others(pairs: Any, own: Any) -> tuple[Tensor, Tensor]:
        return plain_logprobs(plain_logits(pairs, own)[:, kept], places, 0.7)

    mine = gradients(
        lambda pairs, own: token_logprobs(
            pairs, own, torch.tensor(kept)[places], 0.7, True, True, masked
        ),
        tensors,
        bias,
        0.3,
    )
    for a, b in zip(mine, gradients(over_the_others, tensors, bias, 0.3), strict=True):
        assert_close(a, b)
    logprobs, entropy = token_logprobs(
        [(tensors[0], tensors[1])], None, torch.tensor(kept)[places], 0.7, True, True, masked
    )
    theirs = plain_logprobs(plain_logits([(tensors[0], tensors[1])], None)[:, kept], places, 0.7)
    assert_close(logprobs, theirs[0])
    assert_close(entropy, theirs[1])


@given(st.integers(0, 2**31), st.floats(0.3, 2.0), st.integers(1, 40))
def test_logprobs_and_entropy_are_those_of_the_softmax_at_the_temperature(
    seed: int, temperature: float, entries: int
) -> None:
    random = np.random.Generator(np.random.PCG64(seed))
    hidden, weight = (
        torch.from_numpy(random.normal(0, 2, shape)).float() for shape in ((4, 3), (7, 3))
    )
    tokens = torch.from_numpy(random.integers(0, 7, 4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head, "BLOCK_ENTRIES", entries)
        logprobs, entropy = token_logprobs(
            [(hidden, weight)], None, tokens, temperature, True, True
        )
    logits = (hidden.double() @ weight.double().T).tolist()
    for t in range(4):
        powers = [math.exp((value - max(logits[t])) / temperature) for value in logits[t]]
        share = [power / sum(powers) for power in powers]
        assert math.isclose(
            entropy[t].item(), -sum(x * math.log(x) for x in share if x), abs_tol=1e-4
        )
        if share[tokens[t]] > 1e-30:
            assert math.isclose(
                logprobs[t].item(), math.log(share[tokens[t]]), abs_tol=1e-4, rel_tol=1e-5
            )


def test_float32_logits_of_bfloat16_weights_are_not_rounded_and_the_models_own_are() -> None:
    (hidden, weight), _, tokens = drawn(5, 1, False)
    hidden, weight = (4 * hidden).bfloat16(), weight.bfloat16()
    exact, rounded = (
        token_logprobs([(hidden, weight)], None, tokens, 0.7, False, is_float32)[0]
        for is_float32 in (True, False)
    )
    assert_close(exact, plain_logprobs(hidden.float() @ weight.float().T, tokens, 0.7)[0])
    assert_close(rounded, plain_logprobs(hidden @ weight.T, tokens, 0.7)[0])
    assert (exact - rounded).abs().max() > 0.03


@pytest.mark.parametrize("is_float32", [False, True])
def test_gradients_of_bfloat16_weights_are_summed_in_float32(
    is_float32: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "BLOCK_ENTRIES", SEVERAL_BLOCKS)
    tensors, _, tokens = drawn(7, 1, False)
    mine = gradients(
        lambda pairs, own: token_logprobs(pairs, own, tokens, 0.7, False, is_float32),
        [each.bfloat16() for each in tensors],
        None,
        0.0,
    )
    exact = gradients(
        lambda pairs, own: plain_logprobs(plain_logits(pairs, own), tokens, 0.7),
        [each.bfloat16().float() for each in tensors],
        None,
        0.0,
    )
    assert mine[1].dtype == mine[2].dtype == torch.bfloat16
    for a, b in zip(mine[1:], exact[1:], strict=True):
        # One rounding at the end; logits in the model's type add theirs.
        assert_close(a, b, 2**-8 if is_float32 else 0.1)


def test_float32_logits_halve_what_two_engines_differ_by() -> None:
    random = torch.Generator().manual_seed(13)
    weight = torch.randn(500, 64, generator=random).bfloat16()
    tokens = torch.randint(0, 500, (300,), generator=random)
    # Trained models are sure of the next token: its logit is about 20. Other kernels move a hidden state now and
    # then by one step of bfloat16.
    hidden = (weight[tokens] * 0.35 + 0.1 * torch.randn(300, 64, generator=random)).bfloat16()
    moved = torch.where(
        torch.rand(hidden.shape, generator=random) < 0.02, hidden * (1 + 2**-8), hidden
    )
    asked = torch.randint(0, 500, (300,), generator=random)
    gaps = {}
    for is_float32 in (False, True):
        one, other = (
            token_logprobs([(each, weight)], None, asked, 0.7, False, is_float32)[0]
            for each in (hidden, moved)
        )
        gaps[is_float32] = (one - other).abs().max().item()
    print(f"logprobs differ by up to {gaps[False]:.3f} nat, in float32 by up to {gaps[True]:.3f}")  # noqa: T201
    assert gaps[True] < 0.5 * gaps[False]


def test_entropy_is_0_and_outside_the_graph_where_not_asked_for() -> None:
    (hidden, weight), _, tokens = drawn(9, 1, False)
    logprobs, entropy = token_logprobs(
        [(hidden.requires_grad_(), weight)], None, tokens, 1.0, False, True
    )
    assert logprobs.requires_grad and not entropy.requires_grad and not entropy.any()


def test_the_heads_parameters_are_those_of_the_layer() -> None:
    layer = nn.Linear(HIDDEN, VOCABULARY)
    (hidden, _), _, tokens = drawn(11, 1, False)
    made = TokenHead(layer, "float32")
    assert made.weight is layer.weight and made.bias is layer.bias
    logprobs, _ = made(hidden.view(1, TOKENS, HIDDEN), tokens.view(1, TOKENS), 0.7, False)
    assert_close(logprobs, plain_logprobs(layer(hidden), tokens, 0.7)[0][None])


def peak_bytes(
    form: Any, tokens: int, hidden: int, vocabulary: int, dtype: torch.dtype, device: str
) -> int:
    """Most bytes alive at once in forward and backward, without inputs and without the weight's gradient."""
    states = torch.zeros(tokens, hidden, dtype=dtype, device=device, requires_grad=True)
    weight = torch.zeros(vocabulary, hidden, dtype=dtype, device=device, requires_grad=True)
    asked = torch.zeros(tokens, dtype=torch.int64, device=device)
    with LiveBytes(device, (states, weight, asked)) as live:
        logprobs, entropy = form(states, weight, asked)
        (logprobs.sum() + entropy.sum()).backward()
    return live.peak_bytes - weight.nbytes


def in_blocks(states: Tensor, weight: Tensor, asked: Tensor) -> tuple[Tensor, Tensor]:
    return token_logprobs([(states, weight)], None, asked, 0.7, True, True)


def whole(states: Tensor, weight: Tensor, asked: Tensor) -> tuple[Tensor, Tensor]:
    return plain_logprobs(states @ weight.T, asked, 0.7)


@pytest.mark.parametrize("tokens", [2_260, 16_384])
def test_a_published_models_head_stays_below_a_gibibyte(tokens: int) -> None:
    mine, plain = (
        peak_bytes(form, tokens, 1_536, 151_936, torch.bfloat16, "meta")
        for form in (in_blocks, whole)
    )
    print(  # noqa: T201 -- a figure for the reader of the log
        f"{tokens:,} tokens x 151,936 entries: {mine / GIB:.2f} GiB in blocks, {plain / GIB:.2f} GiB whole"
    )
    assert mine < GIB and plain > 8 * mine


def test_bytes_counted_without_memory_are_those_of_tensors_with_memory() -> None:
    sizes = (200, 32, 151_936, torch.float32)
    real, counted = (peak_bytes(in_blocks, *sizes, device) for device in ("cpu", "meta"))
    print(f"200 tokens x 151,936 entries: {real / GIB:.3f} GiB with memory")  # noqa: T201
    assert real == counted
