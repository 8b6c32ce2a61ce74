"""Keys of `[algorithm]` that go together; every refusal names both keys and the remedy."""

import math
from fractions import Fraction
from pathlib import Path
from typing import get_args

import pytest

from prefixrl.common.config.algorithm import (
    OF_THE_SURROGATE,
    WITH_CORRECTION,
    AlgorithmConfig,
    Correction,
)
from prefixrl.common.config.catalogue import GONE_KEYS, GONE_VALUES
from prefixrl.common.config.load import from_json, load
from prefixrl.common.config.objectives import KEY_RULES, OBJECTIVES, names_with
from prefixrl.common.config.run import RunConfig
from prefixrl.common.config.section import toml
from prefixrl.common.errors import ConfigError
from prefixrl.learner.training.objectives import resolve

NAMES = tuple(OBJECTIVES)
VALUES = {
    "gamma": "0.9",
    "gae_lambda": "0.9",
    "value_clip": "0.1",
    "critic_warmup_steps": "3",
    "zscore": "buffer",
    "aggregation": "sequence",
    "whiten": "true",
    "advantage_function": "mine.py:advantages",
}


def read(run_file: Path, **keys: str) -> RunConfig:
    return load(run_file, tuple(f"algorithm.{key}={value}" for key, value in keys.items()))


@pytest.mark.parametrize("key", KEY_RULES)
@pytest.mark.parametrize("name", NAMES)
def test_a_key_without_effect_under_the_name_is_refused_and_says_where_it_has_one(
    run_file: Path, name: str, key: str
) -> None:
    allowed = names_with(key)
    if name in allowed:
        assert read(run_file, name=name, **{key: VALUES[key]}).algorithm.name == name
        return
    with pytest.raises(ConfigError) as caught:
        read(run_file, name=name, **{key: VALUES[key]})
    message = str(caught.value)
    assert f"algorithm: {key} = " in message and f'no effect with name = "{name}"' in message
    assert (
        f"{KEY_RULES[key].reason}; leave {key} out, or use name = {' or '.join(map(toml, allowed))}"
        in message
    )


CORRECTION_VALUES = {
    "importance_cap": "3",
    "importance_above_cap": "mask",
    "importance_ratio": "prefix",
    "clip": "0.1",
    "clip_high": "0.1",
    "dual_clip": "off",
}


@pytest.mark.parametrize("key", WITH_CORRECTION)
@pytest.mark.parametrize("correction", get_args(Correction))
def test_a_key_without_effect_under_the_correction_is_refused(
    run_file: Path, correction: str, key: str
) -> None:
    allowed, _ = WITH_CORRECTION[key]
    keys = {"correction": correction, "kl": "0", key: CORRECTION_VALUES[key]}
    if correction in allowed:
        assert read(run_file, **keys).algorithm.correction == correction
        return
    with pytest.raises(ConfigError, match=f'{key} .*no effect with correction = "{correction}"'):
        read(run_file, **keys)


@pytest.mark.parametrize(("key", "remedy"), GONE_KEYS.items())
def test_a_key_of_an_earlier_release_is_refused_with_its_replacement(
    run_file: Path, key: str, remedy: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(run_file, (f"{key}=0.5",))
    assert f"{key}: there is no such key any more; {remedy}" in str(caught.value)


@pytest.mark.parametrize(("setting", "remedy"), GONE_VALUES.items())
def test_a_value_of_an_earlier_release_is_refused_with_its_replacement(
    run_file: Path, setting: tuple[str, str], remedy: str
) -> None:
    key, value = setting
    with pytest.raises(ConfigError) as caught:
        load(run_file, (f"{key}={value}",))
    assert f'{key} = "{value}": there is no such value any more; {remedy}' in str(caught.value)


def test_a_bound_that_is_on_can_be_turned_off_and_survives_the_wire(run_file: Path) -> None:
    config = read(run_file, dual_clip="off", bound_ratio="off")
    assert from_json(config.model_dump_json()) == config
    policy = resolve(config.algorithm, 8).policy
    assert policy.dual_clip == policy.bound_ratio == math.inf
    policy = resolve(read(run_file).algorithm, 8).policy
    assert (policy.dual_clip, policy.bound_ratio) == (3.0, 1.6)


def test_a_key_without_effect_is_refused_at_its_default_too_but_not_in_a_resolved_config(
    run_file: Path,
) -> None:
    with pytest.raises(ConfigError, match=r"value_clip = 0\.2 has no effect with name = .rloo."):
        read(run_file, name="rloo", value_clip="0.2")
    config = read(run_file, name="rloo")
    assert from_json(config.model_dump_json()) == config
    assert RunConfig.model_validate(config.model_dump()) == config


@pytest.mark.parametrize("name", NAMES)
def test_every_name_survives_the_wire(run_file: Path, name: str) -> None:
    config = read(run_file, name=name, clip_high="0.3", dual_clip="3")
    assert from_json(config.model_dump_json()) == config


def test_all_useless_keys_are_told_at_once(run_file: Path) -> None:
    with pytest.raises(ConfigError, match=r"(?s)gamma = .*value_clip = .*zscore = "):
        read(run_file, name="rloo", gamma="0.5", zscore="buffer", value_clip="0.1")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        pytest.param(
            {"name": "rloo", "whiten_floor": "1e-3"},
            "whiten_floor = 0.001 has no effect with name = .rloo.: advantages are not whitened",
            id="a floor of a whitening that is off",
        ),
        pytest.param(
            {"whiten": "false", "whiten_floor": "1e-3"},
            "whiten_floor = 0.001 has no effect with name = .gae. and whiten = false",
            id="a floor beside whiten = false",
        ),
        pytest.param(
            {"min_ess": "0.8", "max_staleness": "0"},
            (
                r"min_ess = 0\.8 has no effect with max_staleness = 0: no sample is ever old; "
                "leave min_ess out"
            ),
            id="a worth of old samples where none is old",
        ),
        pytest.param(
            {"min_ess": "0.5", "admission": "as_early_as_allowed"},
            (
                r"min_ess = 0\.5 has no effect with admission = .as_early_as_allowed.: all that "
                "the window allows is begun"
            ),
            id="a worth of old samples that changes nothing",
        ),
        pytest.param(
            {"min_ess": "1.0"},
            "min_ess = 1.0: Input should be less than 1",
            id="a worth of old samples that none can have",
        ),
        pytest.param(
            {"kl_limit": "0.1", "minibatches": "1"},
            (
                "kl_limit = 0.1 with minibatches = 1 with ppo_epochs = 1: .* raise minibatches "
                "or ppo_epochs"
            ),
            id="a limit on one step",
        ),
        pytest.param(
            {"name": "rloo", "samples_per_prompt": "1"},
            "samples_per_prompt = 1 with name = .rloo.: .* at least 2 per prompt",
            id="groups of one",
        ),
        pytest.param(
            {"dual_clip": "0.5"},
            "dual_clip = 0.5: Input should be greater than 1",
            id="a dual clip that would flip the sign",
        ),
        pytest.param(
            {"name": "ppo"},
            (
                r'algorithm.name: "ppo" is no objective; did you mean .tppo.\? The names are gae, '
                "tppo, appo, grpo, dr_grpo, rloo, "
            ),
            id="an unknown name",
        ),
    ],
)
def test_pairs_that_cannot_work_are_refused(
    run_file: Path, keys: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read(run_file, **keys)


def test_groups_of_one_are_standardised_over_the_buffer(run_file: Path) -> None:
    config = read(run_file, name="grpo", samples_per_prompt="1", zscore="buffer")
    assert config.algorithm.zscore == "buffer"


def test_parts_are_standardised_only_where_they_have_weights(run_file: Path) -> None:
    weighted = [
        f"reward.function={run_file.parent / 'mine.py'}:score",
        "reward.weights={right=0.8, form=0.2}",
    ]
    (run_file.parent / "mine.py").write_text("def score(q, t, g): ...\ndef advantages(r, g): ...\n")
    parts = ["algorithm.name=grpo", "algorithm.zscore=parts"]
    assert load(run_file, (*weighted, *parts)).algorithm.zscore == "parts"
    refused = {
        r"zscore = .parts. with reward.weights": (weighted[0], *parts),
        r"name = .rloo.": (*weighted, "algorithm.name=rloo", "algorithm.zscore=parts"),
        r"zscore = .parts. with implicit_reward": (*weighted, *parts, "implicit_reward.beta=0.05"),
        r"samples_per_prompt": (*weighted, *parts, "algorithm.samples_per_prompt=1"),
    }
    for message, settings in refused.items():
        with pytest.raises(ConfigError, match=message):
            load(run_file, settings)


def test_only_the_first_three_have_a_critic() -> None:
    with_critic = [name for name in NAMES if AlgorithmConfig(name=name).has_critic]
    assert with_critic == ["gae", "tppo", "appo"]


def test_a_function_of_ones_own_allows_groups_of_one_and_refuses_a_zscore(run_file: Path) -> None:
    mine = VALUES["advantage_function"]
    config = read(run_file, name="grpo", samples_per_prompt="1", advantage_function=mine)
    assert config.algorithm.advantage_function == f"{run_file.parent / 'mine.py'}:advantages"
    assert from_json(config.model_dump_json()) == config
    with pytest.raises(ConfigError, match=r"zscore = .buffer. with advantage_function = .mine\.py"):
        read(run_file, name="grpo", zscore="buffer", advantage_function=mine)


@pytest.mark.parametrize("key", OF_THE_SURROGATE)
def test_a_loss_function_of_ones_own_refuses_what_it_takes_the_place_of(
    run_file: Path, key: str
) -> None:
    (run_file.parent / "mine.py").write_text(
        "def loss(logprobs, proximal, behaviour, advantages, mask): ...\n"
    )
    value = {"correction": "none", "ratio": "prefix"}.get(key, CORRECTION_VALUES.get(key, "2"))
    with pytest.raises(
        ConfigError,
        match=f"{key} (= .*|absent) has no effect with loss_function = .*: the function is the whole",
    ):
        read(run_file, name="grpo", loss_function="mine.py:loss", **{key: value})
    kept = read(run_file, name="grpo", loss_function="mine.py:loss").algorithm
    assert kept.loss_function == f"{run_file.parent / 'mine.py'}:loss"


@pytest.mark.parametrize("minibatches", [1, 3, 8, 200])
@pytest.mark.parametrize("full_groups", [1, 5, 64])
def test_minibatches_of_a_small_batch_are_those_of_a_full_one_in_proportion(
    minibatches: int, full_groups: int
) -> None:
    algorithm = AlgorithmConfig(
        minibatches=minibatches, groups_per_iteration=full_groups, samples_per_prompt=2
    )
    full = 2 * full_groups
    for rows in range(1, full + 1):
        # The nearest number of equal parts, halves up, of at least one row each.
        exact = Fraction(minibatches * rows, full)
        nearest = min(range(minibatches + 1), key=lambda count: (abs(exact - count), -count))
        assert algorithm.minibatches_of(rows) == max(1, min(nearest, rows))
