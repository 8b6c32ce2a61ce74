"""Supervised fine-tuning on the good prefixes of a run: the loss by hand, the lessons of a journal, a whole run."""

import math
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from prefixrl.common.config.load import load
from prefixrl.common.errors import ConfigError
from prefixrl.deploy.examples import sft
from prefixrl.deploy.examples.sft import Lesson
from prefixrl.deploy.runs.inspect import trained_groups
from support.paths import EXAMPLES
from support.runs.run_helper import finish, launched

ROWS = [Lesson((1, 2, 3), (4, 5)), Lesson((6,), (7, 8, 9)), Lesson((2, 2), (3,))]


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    shape = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    return LlamaForCausalLM(LlamaConfig(vocab_size=12, **shape)).eval()


def test_the_loss_is_the_mean_over_the_prefixes_tokens_whatever_is_padded(
    model: LlamaForCausalLM,
) -> None:
    logs = []
    for row in ROWS:
        for place, token in enumerate(row.prefix):
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([row.prompt + row.prefix[:place]])).logits[
                    0, -1
                ]
            exponents = [math.exp(each) for each in logits.tolist()]
            logs.append(math.log(exponents[token] / sum(exponents)))
    expected = -sum(logs) / len(logs)
    assert sft.loss_of(model, ROWS, 0).item() == pytest.approx(expected, rel=1e-5)
    assert sft.loss_of(model, ROWS, 11).item() == pytest.approx(expected, rel=1e-5)


def test_every_lesson_comes_once_an_epoch_and_epochs_have_orders_of_their_own() -> None:
    rows = [Lesson((number,), (0,)) for number in range(20)]
    batches = list(sft.epochs_of(rows, 8, 2, seed=1))
    assert [len(batch) for batch in batches] == [8, 8, 4] * 2
    first, second = (
        [row for batch in half for row in batch] for half in (batches[:3], batches[3:])
    )
    assert set(first) == set(second) == set(rows)
    assert first != second
    assert batches == list(sft.epochs_of(rows, 8, 2, seed=1))


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run"):
        sft.lessons(tmp_path, 1.0, None)


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_the_adapter_of_a_run_learns_its_good_prefixes_and_begins_another_run(
    tmp_path: Path,
) -> None:
    run, out = tmp_path / "run", tmp_path / "sft"
    small = (
        "algorithm.groups_per_iteration=16",
        "algorithm.iterations=3",
        "evaluation.problems=16",
        "evaluation.selection_problems=16",
        "evaluation.sampled_candidates=1",
        "launch.scorers=1",
    )
    with launched(run, *small) as process:
        finish(process, run)
    rows = sft.lessons(run, 1.0, None)
    by_hand = {
        (group.question, tuple(row.prefix_ids))
        for group in trained_groups(run)
        for row in group.rows
        if row.reward == 1.0 and row.prefix_ids
    }
    assert len(rows) == len(by_hand)
    early = sft.lessons(run, 1.0, 0)
    assert 0 < len(early) < len(rows) and set(early) < set(rows)
    with pytest.raises(
        ConfigError, match="no prefix of versions up to 0 with a reward of 2 or more"
    ):
        sft.lessons(run, 2.0, 0)
    done = CliRunner().invoke(
        sft.main, [str(run), "--out", str(out), "--lr", "1e-3"], catch_exceptions=False
    )
    assert done.exit_code == 0 and f"{len(rows)} prefixes" in done.output
    before, after = (
        AutoModelForCausalLM.from_pretrained(each)
        for each in (EXAMPLES / "arithmetic/adapter", out)
    )
    pad = AutoTokenizer.from_pretrained(out).pad_token_id
    with torch.no_grad():
        assert sft.loss_of(after, rows, pad) < sft.loss_of(before, rows, pad)
    config = load(
        EXAMPLES / "arithmetic/run.toml", (f"adapter.model={out}", f"directory={tmp_path}")
    )
    assert config.adapter.model == str(out)
