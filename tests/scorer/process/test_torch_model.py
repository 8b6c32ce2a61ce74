"""Tiny process reward models of both formats: good before corrupted answers, batches, refusals."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM

from prefixrl.common.errors import ConfigError, DataError
from prefixrl.scorer.process.formats import Marked, StepForm
from prefixrl.scorer.process.step_scoring import StepScoring, load_scoring
from prefixrl.scorer.process.torch_model import TorchStepModel, batches, head_tensors
from support.models.process_models import (
    STEP_TAG,
    TWO_CLASS,
    byte_tokenizer,
    lessons,
    loaded,
    marked,
    settings_of,
)

PAIRS = 200


@pytest.fixture(params=["step_tag", pytest.param("two_class", marks=pytest.mark.nightly)])
def model(request: pytest.FixtureRequest) -> tuple[StepForm, TorchStepModel, Path]:
    folder = request.getfixturevalue(f"{request.param}_model")
    return (*loaded(folder, request.param), folder)


def test_a_good_answer_is_above_a_corrupted_one_in_nine_of_ten_pairs(
    model: tuple[StepForm, TorchStepModel, Path],
) -> None:
    form, scores, _ = model
    pairs = lessons("held out", PAIRS)
    good = scores.scores([marked(form, question, right) for question, right, _, _ in pairs])
    corrupted = scores.scores([marked(form, question, wrong) for question, _, wrong, _ in pairs])
    above = sum(min(right) > min(wrong) for right, wrong in zip(good, corrupted, strict=True))
    assert above >= 0.9 * PAIRS
    assert all(len(scores_of_steps) == 2 for scores_of_steps in (*good, *corrupted))


def test_a_batch_gives_each_row_the_scores_it_has_alone(
    model: tuple[StepForm, TorchStepModel, Path],
) -> None:
    form, scores, _ = model
    rows = [
        marked(form, question, answer)
        for question, right, _, _ in lessons("b", 3)
        for answer in (right, "so 4")
    ]
    together = scores.scores(rows)
    alone = [scores.scores([row])[0] for row in rows]
    for scores_together, other in zip(together, alone, strict=True):
        assert scores_together == pytest.approx(other, abs=1e-6)


@torch.inference_mode()
def test_scores_are_those_of_a_plain_forward(model: tuple[StepForm, TorchStepModel, Path]) -> None:
    form, scores, folder = model
    question, right, _, _ = lessons("plain", 1)[0]
    row = marked(form, question, right)
    ids = torch.from_numpy(row.tokens.astype("int64"))[None]
    if tensors := head_tensors(str(folder)):
        hidden = AutoModel.from_pretrained(folder)(input_ids=ids).last_hidden_state[
            0, list(row.tag_positions)
        ]
        middle = (hidden @ tensors["score.0.weight"].T + tensors["score.0.bias"]).clamp(min=0)
        logits = middle @ tensors["score.2.weight"].T + tensors["score.2.bias"]
        expected = logits.softmax(-1)[:, 1]
    else:
        table = AutoModelForCausalLM.from_pretrained(folder)(input_ids=ids).logits[
            0, list(row.tag_positions)
        ]
        expected = table[:, list(form.candidates())].softmax(-1)[:, 0]
    assert scores.scores([row])[0] == pytest.approx(expected.tolist(), abs=1e-6)


def test_a_batch_has_no_more_padded_tokens_than_allowed_and_rows_keep_their_order() -> None:
    rows = [Marked(torch.zeros(size).int().numpy(), ()) for size in (3, 9, 2, 20, 1, 1)]
    actual = list(batches(rows, 18))
    assert [[row.tokens.size for row in batch] for batch in actual] == [[3, 9], [2], [20], [1, 1]]
    assert list(batches([], 18)) == []


def test_a_constant_model_is_refused(step_tag_model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(step_tag_model, tmp_path / "constant"))
    tensors = load_file(folder / "model.safetensors")
    form, _ = loaded(step_tag_model, "step_tag")
    good, bad = form.candidates()
    head = tensors["model.embed_tokens.weight"]  # tied
    head[good] = head[bad]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DataError, match=r"scores 0\.5 to 0\.5: a constant reward teaches nothing"):
        load_scoring(settings_of(folder, **STEP_TAG), str(folder))


def test_a_causal_model_is_no_model_of_two_classes(step_tag_model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(step_tag_model, tmp_path / "causal"))
    with pytest.raises(
        DataError, match=r"no head of two classes.*score or classifier: none.*format = .step_tag"
    ):
        load_scoring(settings_of(folder, **TWO_CLASS, step_tag="ки"), str(folder))


def test_a_candidate_beyond_the_output_layer_is_refused(
    step_tag_model: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(step_tag_model, tmp_path / "longer"))
    tokenizer = byte_tokenizer(["ки"])
    tokenizer.save_pretrained(folder)
    with pytest.raises(
        ConfigError, match=r"good_token is token \d+, the output layer of .* has only 43"
    ):
        load_scoring(settings_of(folder, **STEP_TAG, good_token=200), str(folder))


def test_positions_that_the_model_lacks_are_refused(step_tag_model: Path) -> None:
    form, model = loaded(step_tag_model, "step_tag")
    with pytest.raises(
        ConfigError, match=r"max_tokens = 300: .* has positions for 128; lower max_tokens to that"
    ):
        StepScoring(settings_of(step_tag_model, **STEP_TAG | {"max_tokens": 300}), form, model)
