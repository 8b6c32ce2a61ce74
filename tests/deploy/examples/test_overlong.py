"""The example of DAPO's punishment of over-long answers, beside the paper's formula, and in a real verifier child."""

import time
from statistics import fmean, pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixrl.common.run.digests import function_digest
from prefixrl.deploy.examples.rewards import overlong
from prefixrl.scorer.verifier.exchange import AnswerFacts
from prefixrl.scorer.verifier.pool import RewardFunction, VerifierPool
from prefixrl.scorer.verifier.rules.verify import Judgement
from support.paths import EXAMPLES

L_MAX, L_CACHE = overlong.MOST_TOKENS, overlong.CACHE_TOKENS
LENGTHS = st.integers(0, L_MAX)
ANSWERS = st.tuples(st.booleans(), LENGTHS)


def r_length(y: int) -> float:
    """Equation 13, line by line."""
    if y <= L_MAX - L_CACHE:
        return 0.0
    if L_MAX - L_CACHE < y <= L_MAX:
        return ((L_MAX - L_CACHE) - y) / L_CACHE
    return -1.0


def dapo(is_right: bool, y: int) -> float:
    """The reward by rules (equation 7), and the length reward added to it."""
    return (1.0 if is_right else -1.0) + r_length(y)


def rewards_of(is_right: bool, tokens: int) -> tuple[float, float]:
    arguments = "why?", "text", "7", Judgement(float(is_right), "ok", "7"), tokens, "stop"
    return overlong.clipped(*arguments)["reward"], overlong.scaled(*arguments)["reward"]


@given(LENGTHS)
def test_the_punishment_is_the_papers_at_every_length(tokens: int) -> None:
    assert overlong.punishment(tokens, "stop") == pytest.approx(-r_length(tokens))


def test_a_cut_answer_is_past_the_limit_whatever_its_length() -> None:
    assert overlong.punishment(0, "length") == 1.0 == -r_length(L_MAX + 1)
    # By hand: nothing up to 1536 of 2048 tokens, half of it in the middle, all of it at the end.
    lengths = (0, 1536, 1792, 2048, 4096)
    assert [overlong.punishment(each, "stop") for each in lengths] == [0.0, 0.0, 0.5, 1.0, 1.0]


@given(ANSWERS, ANSWERS)
def test_clipped_is_half_of_the_papers_difference_to_a_wrong_short_answer_and_never_below_0(
    one: tuple[bool, int], other: tuple[bool, int]
) -> None:
    for answer in (one, other):
        reward, _ = rewards_of(*answer)
        # To a wrong short answer, which has -1 in the paper and 0 here.
        assert reward == pytest.approx(max(0.0, (dapo(*answer) + 1.0) / 2))
        assert 0.0 <= reward <= 1.0
        assert answer[0] or reward == 0.0


@given(st.lists(ANSWERS, min_size=2, max_size=8))
def test_advantages_of_scaled_rewards_are_the_papers(answers: list[tuple[bool, int]]) -> None:
    def advantages(rewards: list[float]) -> list[float]:
        spread = pstdev(rewards)
        return [(each - fmean(rewards)) / spread if spread > 1e-6 else 0.0 for each in rewards]

    scaled = [rewards_of(*each)[1] for each in answers]
    assert all(0.0 <= each <= 1.0 for each in scaled)
    assert advantages(scaled) == pytest.approx(
        advantages([dapo(*each) for each in answers]), abs=1e-6
    )


def test_a_verifier_that_failed_is_no_wrong_answer() -> None:
    failed = Judgement(0.0, "error", "no sandbox", "sandbox refused")
    for function in (overlong.clipped, overlong.scaled):
        with pytest.raises(ValueError, match="no sandbox"):
            function("why?", "text", "7", failed, 10, "stop")


def test_in_a_child_it_has_the_verdict_and_the_length() -> None:
    place = f"{EXAMPLES}/rewards/overlong.py:clipped"
    pool = VerifierPool(1, 60, RewardFunction(place, function_digest(place)))
    answers = (("7", 100), ("7", 1792), ("7", 2048), ("8", 100))
    results: dict[int, Judgement] = {}
    deadline_s = time.monotonic() + 200
    try:
        for key, (answer, tokens) in enumerate(answers):
            text = rf"so \boxed{{{answer}}}"
            pool.submit(key, text, "7", "why?", facts=AnswerFacts(tokens=tokens))
        while pool.pending:
            assert time.monotonic() < deadline_s
            pool.wait(1.0)
            results |= dict(pool.poll())
    finally:
        pool.close()
    assert [results[key].reward for key in range(4)] == [1.0, 0.75, 0.5, 0.0]
    assert results[1].parts == {"right": 1.0, "punishment": 0.5}
