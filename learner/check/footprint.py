"""Bytes that one learner rank and one engine take on their device: pure formulas, counted by the tests."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

GIB = 2**30
CONTEXT_BYTES = int(1.5 * GIB)
"""CUDA context and libraries' workspaces."""
FRAGMENTED = 0.05
"""Share of what comes and goes that the allocator loses between blocks."""
HEAD_ENTRIES = 16 * 1024 * 1024
"""Logits that the output head computes at a time (`learner/models/head.py`; a test compares the two)."""
GATHERED_AT_ONCE = 10**9
"""Parameters that ZeRO-3 keeps whole at a time (DeepSpeed's `stage3_max_live_parameters`)."""
BUCKET = 200_000_000
"""Parameters that ZeRO reduces over ranks at a time, unless the config says otherwise."""
WHOLE_BUCKET = 500_000_000
"""The same at stage 0, where DeepSpeed has no setting for it."""
FP32, ADAM = 4, 8
MOST_REMEDIES = 3
LINEAR_LAYERS = 7
"""q, k, v, o, gate, up and down."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a Llama-like decoder."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    is_tied: bool = False
    is_biased: bool = False
    """True where queries, keys and values have a bias (Qwen2)."""

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        queries = self.heads * self.head_size
        keys = 2 * self.kv_heads * self.head_size
        layer = self.hidden * (2 * queries + keys + 3 * self.intermediate + 2)
        layer += (queries + keys) if self.is_biased else 0
        return self.layers * layer + self.hidden + self.embedding * (1 if self.is_tied else 2)

    @property
    def embedding(self) -> int:
        """Parameters of the embedding, and of the output head."""
        return self.vocabulary * self.hidden

    def cache_bytes(self, dtype_bytes: int) -> int:
        """Return the bytes of keys and values of one token."""
        return 2 * self.layers * self.kv_heads * self.head_size * dtype_bytes


@dataclass(frozen=True)
class RankPlan:
    """The settings that decide the memory of one learner rank."""

    parameters: int
    dtype_bytes: int
    stage: int
    """The ZeRO stage that applies, 0 only in float32."""
    ranks: int
    micro_batch_tokens: int
    row_tokens: int
    """Tokens of a long line, a prompt and its rows: the attention mask has so many entries per token."""
    action_positions: int
    """Positions of a micro-batch at which logits are computed."""
    shape: ModelShape | None
    has_critic: bool
    has_reference: bool
    has_anchor: bool = False
    """True if the reference has other weights than the actor began with."""
    has_average: bool = False
    low_rank: tuple[int, int, int] | None = None
    """Rank, and trained parameters of actor and critic, where only low-rank matrices are trained."""
    is_checkpointed: bool = False
    is_optimizer_offloaded: bool = False
    are_weights_offloaded: bool = False
    bucket: int = BUCKET
    reward_parameters: int = 0
    is_reward_trained: bool = False
    reward_copies: int = 0

    @property
    def trained(self) -> tuple[int, ...]:
        """Trained parameters per model."""
        actor = critic = self.parameters
        reward = self.reward_parameters
        if self.low_rank:
            _, actor, critic = self.low_rank
            reward = actor
        return (actor, *[critic] * self.has_critic, *[reward] * self.is_reward_trained)


@dataclass(frozen=True)
class Footprint:
    """Bytes of one learner rank at the worst moment of an iteration."""

    states: int
    """Weights, gradients, moments, reference, average."""
    activations: int
    logits: int
    """Block of the output head, its weight's gradient, hidden states at the actions."""
    buckets: int
    """Gradients on their way between ranks, and weights that ZeRO-3 has gathered."""
    backward: int
    """Most bytes of activations, logits and buckets at one time: buckets fill while activations are freed."""
    optimizer: int
    """Temporaries of the step, after the backward pass."""
    host: int
    """States kept in the host's memory, not counted in the peak."""

    @property
    def peak(self) -> int:
        """States, the larger of backward and step, and the device's own."""
        work = max(self.backward, self.optimizer)
        return self.states + int(work * (1 + FRAGMENTED)) + CONTEXT_BYTES


def learner_footprint(plan: RankPlan) -> Footprint:
    """Return the bytes of one rank."""
    device, host = _states(plan)
    shape = plan.shape
    buckets = _buckets(plan)
    activations = last = logits = tied = step = 0
    if shape is not None:
        activations, last = activation_bytes(shape, plan)
        is_trained = plan.low_rank is None
        logits = head_bytes(plan.action_positions, shape, plan.dtype_bytes, is_trained)
        tied = plan.dtype_bytes * shape.embedding if shape.is_tied and is_trained else 0
    if plan.stage == 3 and not plan.is_optimizer_offloaded:
        # One model steps at a time: ZeRO-3 flattens its gradients.
        step = FP32 * max(plan.trained) // plan.ranks
    backward = _most_at_once(activations, last, logits, tied, buckets)
    return Footprint(device, activations, logits, buckets.at(1.0), backward, step, host)


@dataclass(frozen=True)
class _Buckets:
    """Bytes that the reduction of gradients holds during a backward pass."""

    always: int = 0
    bucket: int = 0
    """Bytes of a bucket, full from `full_at` on and reduced then."""
    full_at: float = 1.0
    """Share of the backward pass, by parameters."""
    growing: int = 0

    def at(self, share: float) -> int:
        """Return the bytes at a share of the pass."""
        return self.always + int(
            self.bucket * min(1.0, share / self.full_at) + self.growing * share
        )


def _most_at_once(activations: int, last: int, logits: int, tied: int, buckets: _Buckets) -> int:
    """Return the most bytes at one time of a backward pass, which goes from the output head down to the embedding.

    Logits exist at its beginning alone. Layer by layer, activations are freed (those of one layer remain, `last`) while
    buckets fill, so the most is at the beginning, at the first full bucket or at the end. `tied` is the gradient of a
    head that is the embedding too.
    """
    beginning = activations + logits + buckets.at(0.0)
    later = (
        int(last + (activations - last) * (1.0 - share)) + tied + buckets.at(share)
        for share in (buckets.full_at, 1.0)
    )
    return max(beginning, *later)


def _states(plan: RankPlan) -> tuple[int, int]:
    """Return bytes on the device and in the host's memory."""
    width = plan.dtype_bytes
    ranks = plan.ranks
    frozen = int(plan.has_reference and (plan.has_anchor or not plan.low_rank))
    rewards = plan.reward_copies
    if plan.low_rank:
        # The matrices are trained, and the weights beside them are frozen.
        frozen += 1 + plan.has_critic
        rewards += plan.is_reward_trained
    divisor = ranks if plan.stage == 3 else 1
    device = (frozen * plan.parameters + rewards * plan.reward_parameters) * width // divisor
    trained = [trained_bytes(each, width, plan.stage, ranks) for each in plan.trained]
    weights, optimiser_bytes = map(sum, zip(*trained, strict=True))
    if plan.has_average:
        averaged = plan.trained[0] + (plan.trained[-1] if plan.is_reward_trained else 0)
        optimiser_bytes += FP32 * averaged // (ranks if plan.stage else 1)
    host = weights * plan.are_weights_offloaded + optimiser_bytes * plan.is_optimizer_offloaded
    return device + weights + optimiser_bytes - host, host


def trained_bytes(parameters: int, width: int, stage: int, ranks: int) -> tuple[int, int]:
    """Return bytes of a trained model's weights (`width` each), and of all that trains them."""
    if stage == 0:
        return parameters * width, parameters * (width + ADAM)
    spread = parameters * (FP32 + ADAM) // ranks
    if stage == 1:
        # Gradients are whole on every rank: of this backward in the weights' type, and their sum where that is another.
        sums = parameters * FP32 if width < FP32 else 0
        return parameters * width, parameters * width + sums + spread
    return parameters * width // (ranks if stage == 3 else 1), spread + parameters * FP32 // ranks


def _buckets(plan: RankPlan) -> _Buckets:
    width = plan.dtype_bytes
    largest = max(plan.trained)
    size = min(plan.bucket, largest)
    full_at = size / max(1, largest)
    if plan.stage == 0:  # one rank has nothing to reduce
        return _Buckets(growing=width * min(WHOLE_BUCKET, largest) if plan.ranks > 1 else 0)
    if plan.stage == 1:
        return _Buckets(growing=width * max(size, largest // plan.ranks) if width == FP32 else 0)
    # A bucket in the weights' type, and its copy in float32 that is reduced.
    copied = width + (FP32 if width < FP32 else 0)
    if plan.stage == 2:
        return _Buckets(
            bucket=copied * size, full_at=full_at, growing=width * largest // plan.ranks
        )
    gathered = 2 * width * min(plan.parameters, GATHERED_AT_ONCE) if plan.ranks > 1 else 0
    return _Buckets(always=gathered, bucket=3 * FP32 * size, full_at=full_at)


def activation_bytes(shape: ModelShape, plan: RankPlan) -> tuple[int, int]:
    """Return what a forward pass keeps for its backward, the head apart, and one layer's share."""
    width = plan.dtype_bytes
    tokens = plan.micro_batch_tokens
    rank = plan.low_rank[0] if plan.low_rank else None
    layer = layer_bytes(shape, width, plan.row_tokens, rank)
    # The last norm, and the positions' sines and cosines.
    outside = norm_bytes(shape, width, rank) + 2 * width * shape.head_size
    layers = shape.layers * layer
    if plan.is_checkpointed:
        layers = shape.layers * width * shape.hidden + layer
    return tokens * (layers + outside), tokens * layer


def layer_bytes(shape: ModelShape, width: int, row_tokens: int, low_rank: int | None) -> int:
    """Return what one layer saves per token; `row_tokens` 0: attention without a mask."""
    # With a mask, keys and values are repeated for every head of the queries.
    kv_heads = shape.heads if row_tokens else shape.kv_heads
    attention = FP32 * shape.heads + width * row_tokens
    attention += width * shape.head_size * 2 * (shape.heads + kv_heads)
    mlp = 4 * width * shape.intermediate
    matrices = LINEAR_LAYERS * width * (low_rank or 0)
    return 2 * norm_bytes(shape, width, low_rank) + attention + mlp + matrices


def norm_bytes(shape: ModelShape, width: int, low_rank: int | None) -> int:
    """Return what one norm saves per token, its output included."""
    # The input in float32 and its inverse deviation; the normalised values where the norm's weight is trained.
    return shape.hidden * (FP32 + width * (1 if low_rank else 2)) + FP32


def head_bytes(positions: int, shape: ModelShape, width: int, is_trained: bool = True) -> int:
    """Return what logprobs at `positions` take, in float32 and in blocks of the vocabulary."""
    columns = min(shape.vocabulary, max(1, HEAD_ENTRIES // max(positions, shape.hidden)))
    # A block's logits and their gradient, and its rows of the weight in float32.
    block = FP32 * columns * (2 * positions + shape.hidden)
    # Hidden states as they came, in float32, and their gradient.
    hidden = (width + 2 * FP32) * positions * shape.hidden
    return block + hidden + (width * shape.embedding if is_trained else 0)


def remedies(plan: RankPlan, limit_bytes: int) -> list[tuple[str, int]]:
    """Return settings with which the rank fits, and its bytes then: each alone, else two together."""
    alone = _changes(plan)
    together = (
        (f"{text} with {more}", changed)
        for text, first in alone
        for more, changed in _changes(first)
        if not more.startswith(text.split(" =")[0])
    )
    return (_fitting(alone, limit_bytes) or _fitting(together, limit_bytes))[:MOST_REMEDIES]


def _fitting(changes: Iterable[tuple[str, RankPlan]], limit_bytes: int) -> list[tuple[str, int]]:
    mildest: dict[str, tuple[str, int]] = {}
    for text, plan in changes:
        peak = learner_footprint(plan).peak
        if peak <= limit_bytes:
            mildest.setdefault(text.rpartition("= ")[0], (text, peak))
    return list(mildest.values())


def _changes(plan: RankPlan) -> list[tuple[str, RankPlan]]:
    """Return milder settings, one key at a time, the least change of a key first."""
    changes = []
    if not plan.is_checkpointed:
        changes.append(
            ("learner.gradient_checkpointing = true", replace(plan, is_checkpointed=True))
        )
    # A limit below the longest row saves nothing: that row is a forward of its own anyway.
    tokens = plan.micro_batch_tokens // 2
    while tokens >= max(plan.row_tokens, 512):
        share = tokens / plan.micro_batch_tokens
        smaller = replace(
            plan,
            micro_batch_tokens=tokens,
            action_positions=max(1, int(plan.action_positions * share)),
        )
        changes.append((f"learner.micro_batch_tokens = {tokens}", smaller))
        tokens //= 2
    # More ranks save most where they divide gradients as well as moments.
    stage = max(plan.stage, 2)
    for ranks in (2, 4, 8, 16, 32):
        if ranks > plan.ranks:
            text = f"learner.deepspeed.zero_optimization.stage = {stage} and launch.learner_ranks = {ranks}"
            changes.append((text, replace(plan, stage=stage, ranks=ranks)))
    if plan.ranks > 1 and plan.stage < 3:
        changes.append(("learner.deepspeed.zero_optimization.stage = 3", replace(plan, stage=3)))
    if not plan.is_optimizer_offloaded:
        text = 'learner.deepspeed.zero_optimization.offload_optimizer.device = "cpu"'
        changes.append((text, replace(plan, is_optimizer_offloaded=True, stage=stage)))
    return changes


@dataclass(frozen=True)
class EngineFootprint:
    """Bytes of one rollout or scorer on each of its devices."""

    weights: int
    row_cache: int
    rows: int
    room: int | None
    """Bytes for keys and values; None where the device's memory is not known."""

    @property
    def rows_in_room(self) -> int | None:
        """Rows of full length whose keys and values have room; None where that is not known."""
        return None if self.room is None else max(0, self.room) // max(1, self.row_cache)


def engine_footprint(
    weights: int,
    token_cache: int,
    row_tokens: int,
    rows: int,
    devices: int,
    limit_bytes: int | None,
) -> EngineFootprint:
    """Return an engine's bytes per device; `limit_bytes` is its share of the device's memory."""
    device_weights = weights // devices
    room = None if limit_bytes is None else limit_bytes - device_weights - CONTEXT_BYTES
    return EngineFootprint(device_weights, token_cache * row_tokens // devices, rows, room)
