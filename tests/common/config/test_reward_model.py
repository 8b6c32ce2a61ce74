"""`[implicit_reward]`: what `prime` brings with it, and settings without effect."""

from pathlib import Path

import pytest

from prefixrl.common.config.implicit_reward import ImplicitRewardConfig
from prefixrl.common.config.load import from_json, load
from prefixrl.common.errors import ConfigError


def test_prime_has_a_reward_model_and_neither_kl_nor_entropy(run_file: Path) -> None:
    config = load(run_file, ("algorithm.name=prime",))
    assert config.implicit_reward == ImplicitRewardConfig()
    assert (config.algorithm.kl, config.algorithm.entropy, config.algorithm.is_whitened) == (
        0.0,
        0.0,
        True,
    )
    assert from_json(config.model_dump_json()) == config
    given = load(
        run_file, ("algorithm.name=prime", "algorithm.kl=0.01", "implicit_reward.beta=0.1")
    )
    assert (given.algorithm.kl, given.implicit_reward and given.implicit_reward.beta) == (0.01, 0.1)
    assert load(run_file, ("algorithm.name=rloo",)).implicit_reward is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        pytest.param(
            ("algorithm.name=gae", "implicit_reward.gamma=0.9"),
            "implicit_reward.gamma = 0.9 has no effect with algorithm",
            id="with a critic",
        ),
        pytest.param(
            ("algorithm.name=grpo", "implicit_reward.baseline=code"),
            'implicit_reward.baseline = "code" has no effect',
            id="with another objective",
        ),
        pytest.param(
            ("algorithm.name=rloo", "implicit_reward.update=none"),
            "every reward would be 0",
            id="nothing to reward",
        ),
        pytest.param(
            (
                "algorithm.name=rloo",
                "implicit_reward.reference=policy",
                "implicit_reward.reference_model=x/y",
            ),
            'reference_model = "x/y" with reference = "policy"',
            id="two references",
        ),
        pytest.param(
            (
                "algorithm.name=rloo",
                "implicit_reward.coefficient=0",
                "implicit_reward.outcome_coefficient=0",
            ),
            "no row would have an advantage",
            id="no coefficient",
        ),
        pytest.param(
            (
                "algorithm.name=rloo",
                "algorithm.advantage_function=mine.py:advantages",
                "implicit_reward.beta=0.1",
            ),
            "the function has no baseline for rewards of tokens",
            id="with a user's function",
        ),
    ],
)
def test_a_setting_without_effect_is_refused_with_the_remedy(
    run_file: Path, settings: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(run_file, settings)
    assert message in str(caught.value)


def test_a_relative_folder_of_a_reward_model_lies_beside_the_run_file(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for name in ("prm", "ref"):
        (run_file.parent / name).mkdir()
    keys = ("implicit_reward.model=prm", "implicit_reward.reference_model=./ref")
    reward = load(run_file, ("algorithm.name=prime", *keys)).implicit_reward
    assert (
        reward
        and reward.model == str(run_file.parent / "prm")
        and reward.reference_model is not None
    )
    assert Path(reward.reference_model) == run_file.parent / "ref"
    with pytest.raises(
        ConfigError, match=r"implicit_reward\.reference_model = './refs': there is no such folder"
    ):
        load(run_file, ("algorithm.name=prime", "implicit_reward.reference_model=./refs"))
