"""Each name against its paper's formula on random ragged groups, written with loops."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from prefixrl.common.config.algorithm import AlgorithmConfig
from prefixrl.common.config.foreign import user_function
from prefixrl.common.config.implicit_reward import ImplicitRewardConfig
from prefixrl.common.config.objectives import OBJECTIVES
from prefixrl.common.config.workers.process_model import ProcessModelConfig
from prefixrl.common.errors import ConfigError
from prefixrl.learner.models.batch import PreparedMicroBatch, Sample, pad
from prefixrl.learner.training.advantages import advantages_by_parts, moments, whiten
from prefixrl.learner.training.objectives import (
    Objective,
    denominators,
    estimate,
    resolve,
    row_rewards,
    value_mask,
)
from prefixrl.learner.training.ppo import PolicyTerms, policy_loss

K = 8
NAMES = tuple(OBJECTIVES)
BETA = 0.3

seeds = st.integers(0, 2**31 - 1)
names = st.sampled_from(NAMES)


def objective_of(name: str, **options: Any) -> Objective:
    return resolve(AlgorithmConfig.model_validate({"name": name, "kl": BETA} | options), K)


@dataclass
class Rows:
    """A batch as the formulas see it."""

    piece: PreparedMicroBatch
    rewards: list[float]
    groups: list[int]
    sizes: list[int]


def random_rows(seed: int) -> Rows:
    """Ragged groups in mixed order, junk under the padding."""
    random = np.random.Generator(np.random.PCG64(seed))
    groups = random.integers(0, 3, random.integers(1, 9)).tolist()
    rewards = random.choice([0.0, 1.0, 0.25, 0.5], len(groups)).tolist()
    sizes = random.integers(1, K, len(groups)).tolist()
    prompt = np.ones(2, dtype=np.int32)
    samples = [
        Sample(
            *(prompt, np.ones(n, np.int32), np.zeros(n, np.float32)),
            *(reward, group, np.zeros(n, np.int32)),
        )
        for n, reward, group in zip(sizes, rewards, groups, strict=True)
    ]
    batch = pad(samples, 0)

    def draw() -> Tensor:
        x = torch.from_numpy(random.normal(-2.0, 0.5, batch.mask.shape)).float()
        return x.masked_fill(~batch.mask, 77.0)

    nothing = torch.zeros_like(batch.behaviour)
    piece = PreparedMicroBatch(
        tuple(range(len(groups))),
        batch,
        draw(),
        draw(),
        draw(),
        nothing,
        nothing,
        nothing,
    )
    return Rows(piece, rewards, groups, sizes)


def estimated(objective: Objective, rows: Rows) -> PreparedMicroBatch:
    rewards, piece = row_rewards(objective, rows.rewards, rows.groups), rows.piece
    if objective.baseline != "critic":
        piece = replace(piece, old_values=torch.zeros_like(piece.old_values))
    return estimate(objective, piece, torch.tensor(rewards))


def penalties(rows: Rows, i: int) -> list[float]:
    assert rows.piece.reference is not None
    return [
        BETA * (rows.piece.proximal[i, t] - rows.piece.reference[i, t]).item()
        for t in range(rows.sizes[i])
    ]


@given(seeds)
def test_gae_estimates_with_a_value_per_token(seed: int) -> None:
    rows, objective = random_rows(seed), objective_of("gae", gae_lambda=0.9)
    actual = estimated(objective, rows)
    for i, size in enumerate(rows.sizes):
        v = [*rows.piece.old_values[i, :size].tolist(), 0.0]
        r = [-penalty for penalty in penalties(rows, i)]
        r[-1] += rows.rewards[i]
        for t in range(size):
            twin = sum(0.9 ** (s - t) * (r[s] + v[s + 1] - v[s]) for s in range(t, size))
            assert actual.advantages[i, t].item() == pytest.approx(twin, abs=1e-4)
            assert actual.returns[i, t].item() == pytest.approx(twin + v[t], abs=1e-4)
    assert torch.equal(value_mask(objective, rows.piece.batch.mask), rows.piece.batch.mask)


def test_tppo_is_gae() -> None:
    assert objective_of("tppo") == objective_of("gae")


@given(seeds)
def test_appo_compares_the_whole_prefix_with_the_value_of_the_prompt(seed: int) -> None:
    rows, objective = random_rows(seed), objective_of("appo")
    actual = estimated(objective, rows)
    for i, size in enumerate(rows.sizes):
        earned = rows.rewards[i] - sum(penalties(rows, i))
        twin = earned - rows.piece.old_values[i, 0].item()
        assert actual.advantages[i, :size].tolist() == pytest.approx([twin] * size, abs=1e-4)
        assert actual.returns[i, 0].item() == pytest.approx(earned, abs=1e-4)
    first = value_mask(objective, rows.piece.batch.mask)
    assert first[:, 0].all() and not first[:, 1:].any()


@given(seeds, st.sampled_from(["grpo", "dr_grpo", "rloo", "reinforce_baseline", "grpo buffer"]))
def test_a_group_objective_adds_the_penalties_still_to_come_to_what_the_row_is_worth(
    seed: int, name: str
) -> None:
    rows = random_rows(seed)
    options = {"zscore": "buffer"} if name == "grpo buffer" else {}
    actual = estimated(objective_of(name.split()[0], **options), rows)
    for i, size in enumerate(rows.sizes):
        same = [
            j for j, g in enumerate(rows.groups) if g == rows.groups[i] or name == "grpo buffer"
        ]
        members = np.array([rows.rewards[j] for j in same])
        worth = rows.rewards[i] - members.mean()
        if name.startswith("grpo"):
            worth = worth / (members.std(ddof=1) + 1e-6) if members.std() > 1e-9 else 0.0
        if name == "rloo":
            others = [rows.rewards[j] for j in same if j != i]
            worth = rows.rewards[i] - np.mean(others) if others else 0.0
        costs = penalties(rows, i)
        twin = [worth - sum(costs[t:]) for t in range(size)]
        assert actual.advantages[i, :size].tolist() == pytest.approx(twin, abs=1e-3)
        assert not actual.advantages[i, size:].any()


@given(seeds, st.sampled_from(["prime", "grpo", "dr_grpo"]))
def test_each_source_is_discounted_and_weighed_on_its_own(seed: int, name: str) -> None:
    settings = ImplicitRewardConfig(gamma=0.9, outcome_gamma=0.8, outcome_coefficient=3.0)
    objective = resolve(AlgorithmConfig.model_validate({"name": name, "kl": 0.0}), K, settings)
    rows = random_rows(seed)
    process = torch.where(rows.piece.batch.mask, rows.piece.old_values, 0.0)
    rows = replace(rows, piece=replace(rows.piece, reference=None, process=process))
    actual, outcomes = estimated(objective, rows), row_rewards(objective, rows.rewards, rows.groups)
    for i, size in enumerate(rows.sizes):
        for t in range(size):
            twin = 0.8 ** (size - 1 - t) * 3.0 * outcomes[i]
            twin += sum(0.9 ** (s - t) * process[i, s].item() for s in range(t, size))
            assert actual.advantages[i, t].item() == pytest.approx(twin, abs=1e-4)


@given(seeds, st.sampled_from(["gae", "tppo", "appo"]))
def test_with_a_critic_scores_of_steps_are_rewards_of_tokens_beside_the_outcome(
    seed: int, name: str
) -> None:
    prm = ProcessModelConfig(
        model="m", format="step_tag", placement="step", coefficient=0.75, outcome_coefficient=0.25
    )
    keys = {"kl": 0.0, "gamma": 0.9} if name == "gae" else {"kl": 0.0}
    objective = resolve(AlgorithmConfig.model_validate({"name": name} | keys), K, None, prm)
    plain = objective_of(name, **keys)
    rows = random_rows(seed)
    steps = torch.where(rows.piece.batch.mask, 0.75 * rows.piece.proximal, 0.0)
    actual = estimated(
        objective, replace(rows, piece=replace(rows.piece, reference=None, steps=steps))
    )
    without = estimated(
        plain,
        replace(rows, piece=replace(rows.piece, reference=None), rewards=[0.0] * len(rows.sizes)),
    )
    decay = plain.gamma * plain.lambda_
    for i, size in enumerate(rows.sizes):
        for t in range(size if name != "appo" else 1):
            twin = decay ** (size - 1 - t) * 0.25 * rows.rewards[i]
            twin += sum(decay ** (s - t) * steps[i, s].item() for s in range(t, size))
            assert (actual.advantages - without.advantages)[i, t].item() == pytest.approx(
                twin, abs=1e-4
            )
            assert (actual.returns - without.returns)[i, t].item() == pytest.approx(twin, abs=1e-4)


def test_only_the_names_that_say_so_whiten() -> None:
    floors = {name: objective_of(name).whiten_floor is not None for name in NAMES}
    assert [name for name, is_whitened in floors.items() if is_whitened] == [
        "gae",
        "tppo",
        "appo",
        "reinforce_baseline",
        "prime",
    ]
    assert objective_of("rloo", whiten=True).whiten_floor == 1e-4
    assert objective_of("gae", whiten=False).whiten_floor is None


@given(seeds)
def test_appo_whitens_over_prefixes_and_not_over_tokens(seed: int) -> None:
    rows, objective = random_rows(seed), objective_of("appo")
    piece = estimated(objective, rows)
    mask = value_mask(objective, piece.batch.mask)
    whitened, is_floored = whiten(
        piece.advantages, piece.batch.mask, moments(piece.advantages, mask), 1e-4
    )
    worth = piece.advantages[:, 0].double().numpy()
    if not is_floored:
        twin = (worth - worth.mean()) / worth.std()
        assert whitened[:, 0].tolist() == pytest.approx(twin.tolist(), abs=1e-3)


@given(seeds, names, st.sampled_from(["token", "sequence"]))
def test_denominators_count_the_sampled_tokens(seed: int, name: str, aggregation: str) -> None:
    rows = random_rows(seed)
    random = np.random.Generator(np.random.PCG64(seed + 1))
    mask = rows.piece.batch.mask
    kept = mask & torch.from_numpy(random.random(mask.shape) < 0.6)
    piece = replace(rows.piece, batch=replace(rows.piece.batch, mask=kept))
    options = {} if name in ("appo", "dr_grpo") else {"aggregation": aggregation}
    policy, value = denominators(objective_of(name, **options), piece).tolist()
    rows_left = sum(bool(row.any()) for row in kept)
    if name == "dr_grpo":
        assert policy == rows_left * K
    elif name == "appo" or aggregation == "sequence":
        assert (policy, value) == (rows_left, rows_left)
    else:
        assert (policy, value) == (int(kept.sum()), int(kept.sum()))


@given(seeds)
def test_dr_grpo_sums_over_tokens_and_divides_by_rows_times_the_longest_possible(seed: int) -> None:
    rows, objective = random_rows(seed), objective_of("dr_grpo", kl=0.0, entropy=0.0)
    piece = estimated(objective, rows)
    now = piece.proximal + 0.1 * rows.piece.old_values
    terms = PolicyTerms(
        now,
        now,
        piece.proximal,
        piece.proximal,
        None,
        piece.advantages,
        piece.batch.mask,
        piece.ages,
    )
    loss, _ = policy_loss(terms, objective.policy, denominators(objective, piece)[0].item())
    twin = 0.0
    for i, size in enumerate(rows.sizes):
        members = [r for r, g in zip(rows.rewards, rows.groups, strict=True) if g == rows.groups[i]]
        a = rows.rewards[i] - sum(members) / len(members)
        for t in range(size):
            rho = math.exp((now[i, t] - piece.proximal[i, t]).item())
            twin -= min(rho * a, min(max(rho, 0.8), 1.2) * a)
    assert loss.item() == pytest.approx(twin / (len(rows.sizes) * K), abs=1e-5)


@given(seeds, names, st.integers(1, 3))
def test_order_and_partition_over_ranks_change_no_loss(seed: int, name: str, ranks: int) -> None:
    rows, objective = random_rows(seed), objective_of(name)
    order = np.random.Generator(np.random.PCG64(seed + 2)).permutation(len(rows.sizes)).tolist()
    whole = loss_over(objective, rows, [list(range(len(order)))])
    assert loss_over(objective, rows, [order]) == pytest.approx(whole, abs=1e-5)
    shares = [order[rank::ranks] for rank in range(ranks) if order[rank::ranks]]
    assert loss_over(objective, rows, shares) == pytest.approx(whole, abs=1e-5)


def loss_over(objective: Objective, rows: Rows, shares: list[list[int]]) -> float:
    """The policy loss of all rows, each share estimated, whitened and summed by itself with the sums of all."""
    worth = row_rewards(objective, rows.rewards, rows.groups)
    raw = [
        estimate(objective, narrowed(rows.piece, share), torch.tensor([worth[i] for i in share]))
        for share in shares
    ]
    normaliser = sum(denominators(objective, piece)[0].item() for piece in raw)
    together = torch.stack(
        [moments(piece.advantages, value_mask(objective, piece.batch.mask)) for piece in raw]
    ).sum(dim=0)
    total = 0.0
    for piece in raw:
        advantages = piece.advantages
        if objective.whiten_floor is not None:
            advantages, _ = whiten(advantages, piece.batch.mask, together, objective.whiten_floor)
        now = piece.proximal + 0.1 * piece.old_values
        terms = PolicyTerms(
            now,
            now,
            piece.proximal,
            piece.old_values,
            None,
            advantages,
            piece.batch.mask,
            piece.ages,
        )
        total += policy_loss(terms, objective.policy, normaliser)[0].item()
    return total


def narrowed(piece: PreparedMicroBatch, share: list[int]) -> PreparedMicroBatch:
    """Some rows of a piece, no wider than they need."""
    width = int(piece.batch.mask[share].sum(dim=1).max())
    of_rows = ("mask", "tokens", "behaviour", "versions", "rewards")
    batch = replace(piece.batch, **{name: getattr(piece.batch, name)[share] for name in of_rows})
    batch = replace(batch, mask=batch.mask[:, :width])
    tensors = {name: x[share, :width] for name, x in vars(piece).items() if isinstance(x, Tensor)}
    return PreparedMicroBatch(tuple(share), batch, **tensors)


def written(folder: Path, body: str) -> Objective:
    path = folder / "mine.py"
    path.write_text(f"def advantages(rewards, groups):\n    {body}\n")
    user_function._module.cache_clear()
    return objective_of("grpo", advantage_function=f"{path}:advantages")


def test_a_users_function_sees_all_rows_and_replaces_the_baseline(tmp_path: Path) -> None:
    body = "assert type(rewards) is type(groups) is list; return [r * 10 + g for r, g in zip(rewards, groups)]"
    objective = written(tmp_path, body)
    assert row_rewards(objective, (0.5, 0.0, 1.0), (0, 0, 2)) == [5.0, 0.0, 12.0]
    rows = random_rows(3)
    actual = estimated(objective, rows)
    for i, size in enumerate(rows.sizes):
        costs = penalties(rows, i)
        worth = rows.rewards[i] * 10 + rows.groups[i]
        twin = [worth - sum(costs[t:]) for t in range(size)]
        assert actual.advantages[i, :size].tolist() == pytest.approx(twin, abs=1e-3)


@pytest.mark.parametrize(
    "body",
    [
        pytest.param("import numpy; return numpy.array([0.5, -1])", id="numpy array"),
        pytest.param(
            "import numpy; return (numpy.float32(0.5), numpy.int64(-1))", id="numpy scalars"
        ),
        pytest.param("import torch; return torch.tensor([0.5, -1.0])", id="torch tensor"),
        pytest.param("import torch; return [torch.tensor(0.5), -1]", id="a torch scalar"),
    ],
)
def test_a_users_function_may_give_arrays_and_their_scalars(tmp_path: Path, body: str) -> None:
    actual = row_rewards(written(tmp_path, body), (0.5, 1.0), (3, 4))
    assert actual == [0.5, -1.0]
    assert {type(value) for value in actual} == {float}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        pytest.param(
            "return rewards[1:]",
            "returned 1 values; expected a list of 2, one per row",
            id="too few",
        ),
        pytest.param(
            "return None", "returned NoneType; expected a list of 2, one per row", id="None"
        ),
        pytest.param(
            "return [0.0, float('nan')]",
            r"returned nan for row 1 \(reward 1.0, group 4\)",
            id="nan",
        ),
        pytest.param(
            "return ['a', 0]", r"returned 'a' for row 0 \(reward 0.5, group 3\)", id="a string"
        ),
        pytest.param(
            "return [10 ** 400, 0]",
            r"returned inf for row 0 \(reward 0.5, group 3\)",
            id="an integer beyond floats",
        ),
        pytest.param(
            "return [0, 10 ** 5000]",
            r"returned inf for row 1 \(reward 1.0, group 4\)",
            id="a longer integer beyond floats",
        ),
        pytest.param(
            "import sys; sys.exit()", r"failed: SystemExit:  \(mine.py, line 2\)", id="an exit"
        ),
        pytest.param(
            "import asyncio; raise asyncio.CancelledError",
            r"failed: CancelledError:  \(mine.py, line 2\)",
            id="a cancellation",
        ),
        pytest.param(
            "import numpy; return numpy.zeros(3)",
            "returned 3 values; expected a list of 2",
            id="an array of another length",
        ),
        pytest.param(
            "import numpy; return numpy.zeros((2, 2))",
            r"returned \[0.0, 0.0\] for row 0",
            id="an array of two dimensions",
        ),
        pytest.param(
            "return [1 / 0]",
            r"failed: ZeroDivisionError: division by zero \(mine.py, line 2\)",
            id="an exception",
        ),
    ],
)
def test_a_users_function_that_gives_no_advantages_ends_the_run_by_its_name(
    tmp_path: Path, body: str, expected: str
) -> None:
    objective = written(tmp_path, body)
    with pytest.raises(ConfigError, match=f"mine.py:advantages' {expected}"):
        row_rewards(objective, (0.5, 1.0), (3, 4))


def test_with_parts_the_rewards_themselves_have_no_part_in_the_advantages() -> None:
    algorithm = AlgorithmConfig(name="grpo", zscore="parts")
    weights = {"right": 0.5, "form": 0.5}
    objective = resolve(algorithm, 8, part_weights=weights)
    parts = {"right": [0.0, 1.0, 1.0, 1.0], "form": [0.0, 1.0, 0.0, 5.0]}
    actual = row_rewards(objective, [9.0, 9.0, 9.0, 9.0], [0, 0, 1, 1], parts)
    assert actual == pytest.approx(advantages_by_parts(parts, weights, [0, 0, 1, 1], 1e-6))
    assert actual[1] == pytest.approx(2 * actual[3], rel=1e-5)
    # Weights are only those of parts: every other objective takes the reward as it is.
    plain = resolve(AlgorithmConfig(name="grpo"), 8, part_weights=weights)
    assert row_rewards(plain, [9.0] * 4, [0, 0, 1, 1], parts) == [0.0] * 4
