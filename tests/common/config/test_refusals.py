"""Refusals of the run file: each names file, key, value and remedy."""

from pathlib import Path

import pytest

from prefixrl.common.config.load import load
from prefixrl.common.errors import ConfigError


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        pytest.param(
            "scorer.openai.most_cost=5",
            "scorer.openai: most_cost = 5 with prompt_price = 0 with completion_price = 0: nothing costs",
            id="a ceiling of the cost without a price",
        ),
        pytest.param(
            "scorer.openai.requests_per_minute=0",
            "scorer.openai.requests_per_minute = 0: Input should be greater than 0",
            id="no request per minute",
        ),
        pytest.param(
            "algorithm.max_stalenes=1",
            "algorithm.max_stalenes: unknown key; did you mean 'max_staleness'?",
            id="a misspelt key",
        ),
        pytest.param(
            "rolout.threads=1",
            "rolout: unknown key; did you mean 'rollout'?",
            id="a misspelt section",
        ),
        pytest.param(
            "adapter.zzzzzz=1",
            "adapter.zzzzzz: unknown key; known keys: model",
            id="a key that resembles none",
        ),
        pytest.param(
            "rollout.repetition_penalty=1.1",
            "rollout.repetition_penalty: unknown key",
            id="a penalty on repetition",
        ),
        pytest.param(
            "algorithm.minibatches=many",
            'algorithm.minibatches = "many": Input should be a valid integer',
            id="a wrong type",
        ),
        pytest.param(
            "algorithm.gamma=1.5",
            "algorithm.gamma = 1.5: Input should be less than or equal to 1",
            id="a value out of range",
        ),
        pytest.param(
            "algorithm.correction=both",
            "algorithm.correction = \"both\": Input should be 'decoupled', 'behaviour' or 'none'",
            id="an unknown choice",
        ),
        pytest.param(
            "algorithm.groups_per_iteration=0",
            "algorithm.groups_per_iteration = 0: Input should be greater than 0",
            id="zero groups",
        ),
        pytest.param(
            "algorithm.kl=nan",
            "algorithm.kl = NaN: Input should be a finite number",
            id="no number",
        ),
        pytest.param(
            "algorithm.entropy=inf",
            "algorithm.entropy = Infinity: Input should be a finite number",
            id="an infinite bonus",
        ),
        pytest.param(
            "learner=3",
            "learner = 3: Input should be a valid dictionary",
            id="a value for a section",
        ),
        pytest.param(
            "algorithm.kl_placement=loss",
            (
                'algorithm: kl_estimator = "k1" with kl_placement = "loss": k1 in a loss has no '
                "expected gradient, k2 and k3 in a reward are biased; use k2 or k3"
            ),
            id="k1 in the loss",
        ),
        pytest.param(
            "algorithm.kl_estimator=k3",
            (
                'algorithm: kl_estimator = "k3" with kl_placement = "reward": k1 in a loss has '
                "no expected gradient, k2 and k3 in a reward are biased; use k1"
            ),
            id="k3 in the reward",
        ),
        pytest.param(
            "data.epochs=2",
            (
                "algorithm.iterations = 3 with data.epochs = 2: give exactly one of them, it "
                "ends the run"
            ),
            id="two lengths",
        ),
        pytest.param(
            "algorithm.minibatches=5000",
            (
                "algorithm.minibatches = 5000 with algorithm.groups_per_iteration = 512 with "
                "algorithm.samples_per_prompt = 8: an iteration has only 4096 rows; lower "
                "minibatches"
            ),
            id="more minibatches than rows",
        ),
        pytest.param(
            "filter.over_sampling=2",
            (
                "filter: over_sampling = 2 has no effect with accuracy absent: without a filter "
                "every group is trained and none has to be replaced; leave over_sampling out, or "
                "use accuracy = [0.01, 0.99]"
            ),
            id="over-sampling for nothing",
        ),
        pytest.param(
            "filter.over_sampling=0.5",
            "filter.over_sampling = 0.5: Input should be greater than or equal to 1",
            id="under-sampling",
        ),
        pytest.param(
            'filter.fill="prioritise"',
            'filter: fill = "prioritise" has no effect with accuracy absent',
            id="a way of filling without a filter",
        ),
        pytest.param(
            "filter.limit_batches=10",
            "filter: limit_batches = 10 has no effect with accuracy absent",
            id="a limit of a filter that is not there",
        ),
        pytest.param(
            "filter.accuracy=[0.8, 0.2]",
            "filter: accuracy = [0.8, 0.2]: the low end is above the high end",
            id="a band upside down",
        ),
        pytest.param(
            "filter.accuracy=[0, 1.0]",
            (
                "filter: accuracy = [0, 1]: every group passes; leave it out, or narrow it: "
                "[0.01, 0.99] keeps groups that are neither all right nor all wrong"
            ),
            id="a band that takes everything",
        ),
        pytest.param(
            "filter.accuracy=[0.5, 2]",
            "filter.accuracy.1 = 2: Input should be less than or equal to 1",
            id="a band beyond all accuracies",
        ),
        pytest.param(
            "filter.accuracy=[0.3, 0.37]",
            (
                "filter.accuracy = [0.3, 0.37] with algorithm.samples_per_prompt = 8: no group "
                "can pass, its mean reward is one of 0/8 ... 8/8; the nearest are 0.25 and "
                "0.375; widen the band or sample more per prompt"
            ),
            id="a band between the accuracies a group can have",
        ),
        pytest.param(
            "scorer={continuations=3, temperature=0.0}",
            (
                "scorer: continuations = 3 with temperature = 0: a greedy target writes the same "
                "text every time; raise temperature, or leave continuations out"
            ),
            id="several continuations that are all the same",
        ),
        pytest.param(
            "scorer.continuations=0",
            "scorer.continuations = 0: Input should be greater than 0",
            id="no continuation",
        ),
        pytest.param(
            "scorer.cache_bytes=64",
            "scorer: cache_bytes = 64: the least useful size is 1048576 (1 MiB)",
            id="a cache that holds nothing",
        ),
        pytest.param(
            "learner.batch_timeout_s=600",
            (
                "learner.batch_timeout_s = 600 with broker.stall_s = 600 with broker.silence_s = "
                "10: the learner would end before a stuck worker's groups are given to another; "
                "batch_timeout_s must exceed both"
            ),
            id="a learner that gives up before the broker does",
        ),
        pytest.param(
            "checkpoint.keep_best=2",
            (
                "checkpoint.keep_best = 2 with evaluation.every = 0: no version is judged in "
                "training, so none is known to be the best; give evaluation.every, or leave "
                "keep_best out"
            ),
            id="a best checkpoint that nothing judges",
        ),
        pytest.param(
            "broker.silence_s=2.5",
            (
                "broker: silence_s = 2.5 with heartbeat_s = 1: one late heartbeat would end a "
                "healthy worker; silence_s must be at least three times as long"
            ),
            id="a silence shorter than the heartbeat allows",
        ),
        pytest.param(
            "algorithm={correction='none', importance_ratio='prefix'}",
            'algorithm: importance_ratio = "prefix" has no effect with correction = "none"',
            id="a granularity of no weight",
        ),
        pytest.param(
            "reward={url='http://h:1/r', function='mine.py:score'}",
            (
                'reward: function = "mine.py:score" with url = "http://h:1/r": each rewards '
                "every answer; leave one of them out"
            ),
            id="a server and a function",
        ),
        pytest.param(
            "reward.weights={right=1}",
            (
                "reward: weights = { right = 1 }: there are no parts of a reward without "
                "function or url"
            ),
            id="weights of no parts",
        ),
        pytest.param(
            "reward.rows=8",
            "reward: rows = 8 has no effect with url absent: no server is asked; leave rows out",
            id="limits of no server",
        ),
        pytest.param(
            "reward={url='http://h:1/r', request_s=900}",
            (
                "reward.request_s = 900 with broker.stall_s = 600: a scorer would count as dead "
                "before its request times out; request_s must be shorter"
            ),
            id="a request longer than a stall",
        ),
        pytest.param(
            "reward={url='http://h:1/r', patience_s=90000}",
            "reward.patience_s = 90000 with learner.batch_timeout_s",
            id="a patience longer than the learner's",
        ),
    ],
)
def test_a_refusal_names_file_key_value_and_remedy(
    run_file: Path, setting: str, expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(run_file, (setting,))
    head, line = str(caught.value).split("\n")
    assert head == f"{run_file} with --set: 1 problem"
    assert line.startswith(f"  {expected}")
