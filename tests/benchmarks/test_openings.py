"""The openings task: problems are right, prefixes reach the target as text, runs say what became of them."""

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from transformers import AutoTokenizer

from benchmarks import aged_run
from benchmarks.aged_run import Target
from benchmarks.openings import build
from benchmarks.openings.arms import Iteration, Outcome, Setting, Size, config_of, run_arm
from benchmarks.openings.problems import OPERATIONS, Problem
from benchmarks.openings.reward import letters_right
from prefixrl.common.engines.base import Job, JobResult
from prefixrl.common.engines.hf import TransformersEngine
from prefixrl.common.wire.messages import Prompt
from prefixrl.common.wire.packing import pack_tokens
from support.paths import ROOT
from support.tiny_model import DEEPSPEED_WARNINGS

pytestmark = DEEPSPEED_WARNINGS

SIZE = Size((1,), iterations=3, heldout=8, evaluate_every=2, changes=("algorithm.groups_per_iteration=4",))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The task with models that were hardly taught."""
    out = tmp_path_factory.mktemp("openings")
    build.build(out, seed=0, target_steps=2, adapter_steps=10)
    return out


def test_each_operation_does_what_its_words_say() -> None:
    results = {each.words[0]: each.result("djab") for each in OPERATIONS}
    assert results == {"flip": "bajd", "swap": "jdba", "advance": "eabc", "sort": "abdj"}


def test_problem_files_ask_for_all_words_equally_and_share_no_letters(folder: Path) -> None:
    rows = {
        name: [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "heldout")
    }
    words = [word for each in OPERATIONS for word in each.words]
    for name, found in rows.items():
        assert [sum(row["family"] == word for row in found) for word in words] == [len(found) // 8] * 8, name
    letters = [row["question"].split()[1] for found in rows.values() for row in found]
    assert len(set(letters)) == len(letters)
    by_word = {word: each for each in OPERATIONS for word in each.words}
    for row in rows["train"]:
        word, of_row = row["question"].split()
        assert row["answer"] == Problem(by_word[word], word, of_row).gold


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("Put them in order: abcd", 1.0),
        ("Put them in order: abdc", 0.5),
        ("Put them in order: abc", 0.75),
        ("Put them in order: abcdef", 4 / 6),
        ("", 0.0),
        (": : bcda", 0.0),
    ],
)
def test_the_reward_is_the_share_of_right_letters(answer: str, reward: float) -> None:
    assert letters_right("sort dbca", answer, "abcd") == pytest.approx(reward)


def test_every_opening_and_an_eos_fit_into_a_prefix_and_no_tokenizer_reads_the_others_ids(folder: Path) -> None:
    config = config_of(folder / "run.toml", Setting(0), 1, SIZE)
    pieces, characters = (AutoTokenizer.from_pretrained(folder / name) for name in ("adapter", "target"))
    for each in OPERATIONS:
        written = pieces.encode(each.opening, add_special_tokens=False)
        assert len(written) + 1 <= config.rollout.prefix_tokens
        assert len(characters.encode(each.opening, add_special_tokens=False)) == len(each.opening)
        assert characters.decode(written) != each.opening
    kinds = {name: json.loads((folder / name / "config.json").read_text())["model_type"] for name in config_names()}
    assert kinds == {"adapter": "gpt2", "target": "llama"}


def config_names() -> tuple[str, str]:
    return "adapter", "target"


def test_a_prefix_reaches_the_target_as_text_and_a_verdict_is_made_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Job] = []
    run = aged_run._run

    def watched(engine: TransformersEngine, job: Job) -> JobResult:
        asked.append(job)
        return run(engine, job)

    monkeypatch.setattr(aged_run, "_run", watched)
    target = Target(config_of(folder / "run.toml", Setting(0), 1, SIZE))
    pieces, characters = (AutoTokenizer.from_pretrained(folder / name) for name in config_names())
    prompt, opening = Prompt("id", "sort dbca", "abcd"), OPERATIONS[3].opening
    ids = [*pieces.encode(opening, add_special_tokens=False), pieces.eos_token_id]
    row = (prompt, pack_tokens(np.asarray(ids, dtype=np.int32)))
    first, again = target.verdicts([row, row])
    assert first is again is target.verdicts([row])[0]
    (job,) = asked
    (continued,) = job.rows
    assert characters.decode(continued.tolist()) == f"<user>sort dbca<assistant>{opening}"


@pytest.mark.parametrize("setting", [Setting(2), Setting(1, is_plain=True)])
def test_a_run_tells_what_became_of_it(folder: Path, setting: Setting) -> None:
    config = config_of(folder / "run.toml", setting, 1, SIZE)
    outcome = run_arm("name", setting, config, SIZE, Target(config))
    assert (outcome.setting, outcome.seed) == ("name", 1)
    assert [version for version, _ in outcome.heldout] == [0, 2, 3]
    assert outcome.final == outcome.heldout[-1][1]
    assert len(outcome.spans) == 1 and outcome.spans[0].ess == pytest.approx(outcome.least_ess)
    assert outcome.least_ess < 0.99999 and outcome.least_ess_at > 0
    assert 0 < outcome.last.top_share <= 1 and outcome.last.entropy > 0


def told(*spans: tuple[float, float], top_share: float = 0.3) -> Outcome:
    """A run with these rewards and entropies."""
    found = [Iteration(reward, entropy, 1.0, 0.3) for reward, entropy in spans]
    last = msgspec.structs.replace(found[-1], top_share=top_share)
    return Outcome("", 1, [(0, 0.3), (30, 0.5)], found, 0, last, 1.0)


def test_collapsed_is_little_entropy_and_a_lost_reward_or_one_prefix_for_all() -> None:
    assert not told((0.3, 0.2), (0.9, 0.02)).is_collapsed
    assert not told((0.6, 0.2), (0.4, 0.2)).is_collapsed
    assert told((0.3, 0.2), (0.6, 0.1), (0.4, 0.02)).is_collapsed
    assert told((0.3, 0.2), (0.35, 0.04), top_share=1.0).is_collapsed


def test_a_folder_is_built_again_only_for_another_seed_or_another_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[int] = []

    def instead(out: Path, seed: int) -> None:
        out.mkdir(exist_ok=True)
        built.append(seed)

    monkeypatch.setattr(build, "build", instead)
    out = tmp_path / "task"
    for seed in (0, 0, 1, 1):
        assert build.made(out, seed) == out / "run.toml"
    monkeypatch.setattr(build, "COPIED", ("run.toml",))
    build.made(out, 1)
    assert built == [0, 1, 1]


@pytest.mark.slow
def test_three_daemons_train_the_task(folder: Path, tmp_path: Path) -> None:
    settings = ("algorithm.iterations=2", "algorithm.groups_per_iteration=8", "checkpoint.every=1")
    flags = [flag for each in (f"directory={tmp_path / 'run'}", *settings) for flag in ("--set", each)]
    command = [sys.executable, "-m", "prefixrl.deploy", "launch", str(folder / "run.toml"), *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 2 and all(line["figures"]["prefix_as_text_fraction"] > 0.9 for line in lines)
