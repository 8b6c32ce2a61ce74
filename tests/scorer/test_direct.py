"""The scorer of direct mode.

No torch in it, its texts are the tokenizer's, and an answer that was cut is not verified.
"""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from prefixrl.common.config.load import load
from prefixrl.common.errors import DataError
from prefixrl.common.run.digests import model_digests, scorer_digests
from prefixrl.common.wire.messages.groups import GroupPrefixes, Prompt, Row, TaskKind, VersionSpan
from prefixrl.common.wire.messages.worker import Ready, Scores, ScoreTask
from prefixrl.common.wire.packing import pack_logprobs, pack_tokens
from prefixrl.scorer.direct import BusySeats, Decoder, DirectScorer
from prefixrl.scorer.verifier.pool import VerifierPool
from support.broker.scoring_world import Tasks, check_scores
from support.fakes import run_on_disk, serving
from support.messages import score_task
from support.paths import EXAMPLES

EXAMPLE = EXAMPLES / "arithmetic_direct"
CONFIG = load(EXAMPLE / "run.toml")
TOKENIZER = AutoTokenizer.from_pretrained(EXAMPLE / "policy")
RIGHT = r"Let us add them up: 3 4 so \boxed{4}"


def row(text: str, finish: str) -> Row:
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    ids += [TOKENIZER.eos_token_id] if finish == "eos" else []
    spans = (VersionSpan(3, "d3", len(ids)),)
    return Row(
        tokens=pack_tokens(ids),
        logprobs=pack_logprobs([-1.0] * len(ids)),
        finish=finish,
        spans=spans,
    )  # type: ignore[arg-type]


def task(name: str, kind: TaskKind, *groups: tuple[Row, ...]) -> ScoreTask:
    prompt = Prompt("p", "sum 3 1", "4")
    made = tuple(
        GroupPrefixes(seq=seq, prompt=prompt, seed=7, prompt_tokens=pack_tokens([1, 2]), rows=rows)
        for seq, rows in enumerate(groups)
    )
    return score_task(*made, task=name, kind=kind, version=3, weights_digest="d3", sampled_s=0.5)


def scores_of(*tasks: ScoreTask) -> list[Scores]:
    link, pool = Tasks(*tasks), VerifierPool(1, 5)
    digests = scorer_digests(CONFIG, CONFIG.model_of("scorer"))
    scorer = DirectScorer(CONFIG, link, Decoder(CONFIG.model_of("scorer")), pool, digests)  # type: ignore[arg-type]
    try:
        assert scorer.run(lambda: False) == "the run is over"
    finally:
        pool.close()
    return [message for message in link.sent if isinstance(message, Scores)]


def test_a_scorer_of_direct_mode_imports_neither_torch_nor_transformers_nor_vllm() -> None:
    script = f"""
import sys
from prefixrl.common.config.load import load
from prefixrl.common.worker.join import join
from prefixrl.scorer.start import _direct, verifier_of
from prefixrl.common.run.digests import scorer_digests
from types import SimpleNamespace
config = load({str(EXAMPLE / "run.toml")!r})
joined = SimpleNamespace(config=config, model=config.model_of("scorer"), link=None)
digests = scorer_digests(config, joined.model)
_direct(joined, verifier_of(config, digests.reward_function), digests)
found = {{"torch", "transformers", "vllm", "deepspeed", "sympy"}} & set(sys.modules)
assert not found, found
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_right_wrong_and_cut_answers_of_two_groups_are_told_apart() -> None:
    wrong, none = RIGHT.replace("{4}", "{5}"), "Let us add them up:"
    (scores,) = scores_of(
        task(
            "t",
            "train",
            (row(RIGHT, "eos"), row(wrong, "eos")),
            (row(RIGHT, "length"), row(none, "eos")),
        )
    )
    for group in scores.groups:
        check_scores(group, 2)
    first, second = (group.verdicts for group in scores.groups)
    assert [
        (each.reward, each.status, each.extracted, each.finish) for each in (*first, *second)
    ] == [
        (1.0, "ok", "4", "eos"),
        (0.0, "ok", "5", "eos"),
        (0.0, "no_answer", "", "length"),
        (0.0, "no_answer", "", "eos"),
    ]
    assert {each.completion_tokens for each in (*first, *second)} == {0}
    assert {(group.version, group.weights_digest, group.sampled_s) for group in scores.groups} == {
        (3, "d3", 0.5)
    }


def test_an_evaluation_keeps_the_text_of_every_answer_a_cut_one_too() -> None:
    training, evaluation = scores_of(
        task("a", "train", (row(RIGHT, "eos"),)),
        task("b", "eval", (row(RIGHT, "eos"),), (row(RIGHT, "length"),)),
    )
    assert training.groups[0].verdicts[0].completion == ""
    assert [group.verdicts[0].completion for group in evaluation.groups] == [RIGHT, RIGHT]


def test_the_tokenizer_alone_decodes_as_transformers_does() -> None:
    ids = [*TOKENIZER.encode(RIGHT, add_special_tokens=False), TOKENIZER.eos_token_id]
    text = Decoder(str(EXAMPLE / "policy")).text(np.asarray(ids, dtype=np.int32))
    assert text == TOKENIZER.decode(ids, skip_special_tokens=True) == RIGHT


def test_a_folder_without_a_tokenizer_is_named_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=rf"no tokenizer of {tmp_path} can be read.*save_pretrained"
    ):
        Decoder(str(tmp_path))


def test_it_says_the_tokenizer_of_the_adapter_and_no_model() -> None:
    whole, said = model_digests(CONFIG.adapter.model), scorer_digests(CONFIG, CONFIG.adapter.model)
    assert (said.model, said.reward_function) == ("", "")
    assert (said.tokenizer, said.chat_template) == (whole.tokenizer, whole.chat_template)


def test_its_slots_are_its_verifier_children() -> None:
    link, pool = Tasks(), VerifierPool(1, 5)
    config = load(EXAMPLE / "run.toml", ("scorer.verifier_children=3",))
    digests = scorer_digests(config, config.model_of("scorer"))
    scorer = DirectScorer(config, link, Decoder(config.model_of("scorer")), pool, digests)  # type: ignore[arg-type]
    scorer.say_ready()
    assert link.sent == [
        Ready(
            seats=3,
            room=48,
            takes_runs=False,
            digests=digests,
            version=-1,
            weights_digest="",
            engine="verifier",
        )
    ]


def test_a_text_that_waits_for_a_child_makes_no_seat_busier() -> None:
    busy = BusySeats(2, counted_s=100.0)
    busy.count_busy(3, 110.0)  # idle for ten seconds, then one text more than seats
    assert busy.total_s == 0.0
    busy.count_busy(1, 120.0)
    assert busy.total_s == 2 * 10.0
    busy.count_busy(0, 125.0)
    busy.count_busy(0, 200.0)
    assert busy.total_s == 2 * 10.0 + 5.0


def test_an_engine_asked_for_on_the_command_line_is_refused(tmp_path: Path) -> None:
    config = run_on_disk(tmp_path, mode="direct")
    with serving(config):
        command = ["-m", "prefixrl.scorer", "--run", config.directory, "--engine", "vllm"]
        done = subprocess.run(
            [sys.executable, *command], capture_output=True, text=True, timeout=120
        )
    assert done.returncode == 2
    assert "error: --engine: this run is in direct mode, whose scorers run no engine" in done.stderr
