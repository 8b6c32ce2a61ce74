"""Alarms begin once, name what fell, and stay silent about a policy that has learned its task."""

import json
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixrl.learner.run.alarms import Alarms
from support.paths import ROOT


def figures(entropy: float = 1.0, reward: float = 0.5, **others: float) -> dict[str, float]:
    return {"entropy": entropy, "reward": reward} | others


def test_a_policy_that_loses_entropy_and_reward_has_collapsed_once() -> None:
    alarms = Alarms()
    assert not any(alarms.new_sentences(iteration, figures()) for iteration in range(5))
    said = [
        text
        for iteration in range(5, 30)
        for text in alarms.new_sentences(iteration, figures(entropy=0.08, reward=0.2))
    ]
    assert len(said) == 1
    assert said[0].startswith(
        "iteration 6: the policy has collapsed: entropy 0.08 nat per token (1 in the first"
    )


def test_a_policy_that_has_learned_its_task_is_no_alarm() -> None:
    alarms = Alarms()
    for iteration in range(40):
        share = iteration / 39
        assert not alarms.new_sentences(
            iteration, figures(entropy=1.0 - 0.99 * share, reward=0.3 + 0.7 * share)
        )


def test_lost_exploration_is_named_before_the_reward_is_best() -> None:
    """The trace of SmolLM2-135M under GRPO at 3e-5: 1.2 nat, 0.01 at iteration 19, rewards 0.70 there, 0.45 at 40."""
    alarms, kinds = Alarms(), dict[str, int]()
    for i in range(41):
        reward = 0.5 + 0.2 * i / 19 if i < 20 else 0.70 - 0.25 * (i - 19) / 21
        alarms.new_sentences(i, figures(entropy=1.2 * math.exp(-0.252 * i), reward=reward))
        kinds = {kind: i for kind in alarms.ringing} | kinds
    assert 10 < kinds["exploration"] < 19 < kinds["entropy"]


def test_an_entropy_that_moves_about_its_limit_is_named_once() -> None:
    """SmolLM2-135M on short stories: 1.23 nat at first, 0.02 to 0.1 from iteration 16 on, rewards 0.5 to 0.78."""
    alarms, draws = Alarms(), random.Random(0)
    said = list[str]()
    for i in range(60):
        entropy = 1.23 if i < 10 else draws.uniform(0.02, 0.1)
        said += alarms.new_sentences(i, figures(entropy=entropy, reward=draws.uniform(0.5, 0.78)))
    assert len([text for text in said if "no longer explores" in text]) == 1


def test_no_default_of_the_second_task_rang_and_its_seeds_in_a_local_optimum_did() -> None:
    details = json.loads((ROOT / "benchmarks/results/second_task.json").read_text())["details"]
    rang = {}
    for run in details:
        alarms, name = Alarms(), (run["setting"], run["seed"])
        for i, span in enumerate(run["spans"]):
            alarms.new_sentences(i, figures(span["entropy"], span["reward"]))
            rang[name] = rang.get(name, False) or "exploration" in alarms.ringing
    defaults = [
        rung
        for (setting, _), rung in rang.items()
        if setting.startswith("product") and "default" in setting
    ]
    assert len(defaults) == 16 and not any(defaults)
    assert rang["plain loop, no delay", 2]  # it ended at a reward of 0.8


def test_tokens_that_noise_alone_keeps_from_being_learned_are_named_once() -> None:
    alarms = Alarms()
    noisy = figures(bounded_by_noise_fraction=0.034, engine_mismatch_gap=0.03)
    said = [text for i in range(9) for text in alarms.new_sentences(i, noisy)]
    assert (
        len(said) == 1
        and "keeps 2.0% of the tokens of age 0" in said[0]
        and "differ by 0.03 nat" in said[0]
    )
    assert not any(
        Alarms().new_sentences(i, figures(bounded_by_noise_fraction=0.006)) for i in range(9)
    )


def test_samples_that_the_policy_has_left_behind_are_named_again_after_they_had_recovered() -> None:
    alarms = Alarms()
    seen = [
        len(alarms.new_sentences(i, figures(old_ess_fraction=ess)))
        for i, ess in enumerate((0.9, 0.4, 0.3, 0.8, 0.2))
    ]
    assert seen == [0, 1, 0, 0, 1]
    assert not alarms.new_sentences(5, figures())


def test_an_adapter_that_comes_to_write_one_text_is_named_once_and_one_that_always_did_is_not() -> (
    None
):
    alarms = Alarms()
    shares = [0.1, 0.4, 0.95, 1.0, 1.0]
    said = [
        alarms.new_sentences(i, figures(commonest_text_fraction=share))
        for i, share in enumerate(shares)
    ]
    assert [len(each) for each in said] == [0, 0, 1, 0, 0]
    assert said[2][0].startswith(
        "iteration 2: the adapter writes one and the same text in 95% of the rows, whatever"
    )
    mostly = Alarms()
    said = [
        mostly.new_sentences(i, figures(commonest_text_fraction=share))
        for i, share in enumerate((0.7, 0.82, 0.69, 0.9))
    ]
    assert [len(each) for each in said] == [0, 0, 0, 1]
    always = Alarms()
    assert not any(always.new_sentences(i, figures(commonest_text_fraction=1.0)) for i in range(5))


def test_three_iterations_without_any_reward_are_named_until_one_answer_earns_something() -> None:
    alarms = Alarms()
    said = [
        alarms.new_sentences(i, figures(reward=each))
        for i, each in enumerate((0.0, 0.0, 0.1, 0.0, 0.0, 0.0, 0.0, 0.1))
    ]
    assert [len(each) for each in said] == [0, 0, 0, 0, 0, 1, 0, 0]
    assert said[5][0].startswith("iteration 5: every answer of the last 3 iterations had reward 0")
    assert not alarms.ringing


def rung_by(rewards: list[float], uniform: float = 0.2) -> list[int]:
    """Iterations at which `plateau` begins to ring."""
    alarms = Alarms()
    said = [
        alarms.new_sentences(i, figures(1.0, each, uniform_groups_fraction=uniform))
        for i, each in enumerate(rewards)
    ]
    return [
        i
        for i, texts in enumerate(said)
        if any("have taught nothing that shows" in text for text in texts)
    ]


@given(st.integers(0, 2**32), st.floats(0.05, 0.6), st.floats(0.005, 0.1), st.integers(60, 120))
def test_a_reward_that_rises_beyond_its_noise_never_rings_and_one_that_is_constant_does(
    seed: int, start: float, noise: float, iterations: int
) -> None:
    drawn = random.Random(seed)
    rise = [
        start + 12 * noise * min(1.0, i / 50) + drawn.gauss(0, noise) for i in range(iterations)
    ]
    assert rung_by(rise) == []
    assert (
        rung_by([start] * iterations) == [59] and rung_by([start] * iterations, uniform=0.95) == []
    )


@pytest.mark.parametrize("seed", range(8))
def test_noise_alone_rings_and_a_late_rise_ends_it(seed: int) -> None:
    drawn = random.Random(seed)
    flat = [0.16 + drawn.gauss(0, 0.02) for _ in range(200)]
    assert rung_by(flat), "a rise by chance would have to last"
    late = [*flat, *(0.16 + 0.01 * i for i in range(60))]
    assert max(rung_by(late)) < 210
