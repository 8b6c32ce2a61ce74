"""The benchmark of stored outputs: files as their authors stored them, rules that end texts, verdicts that differ."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks import answered_early
from benchmarks.answered_early import RULES, Pieces, cut_size, main
from benchmarks.results import LeftOut
from support.paths import EXAMPLE

SAMPLES = ("qwen_math.jsonl", "tora_70b_gsm8k.jsonl", "tora_34b_gsm8k.jsonl")
CONTINUED = "so $\\boxed{3}$.\n\nProblem: 2 + 2\n\n\\boxed{4}.\n\n"
"""An answer, and an invented problem with its own."""
LINES = "so\n\\boxed{5}\n\\boxed{3}\n\nThat is all, and more than was asked for."
ONE = "so \\boxed{3}"


def stored(folder: Path) -> Path:
    """Write a file of each form, with three texts each."""
    row = {"question": "1 + 2", "gt": "3", "code": [CONTINUED, LINES, ONE]}
    for name in SAMPLES:
        (folder / name).write_text(json.dumps(row) + "\n", encoding="utf-8")
    outputs = [{"text": text} for text in row["code"]]
    problem = {"question": "1 + 2", "groundtruth": "so $\\boxed{3}$.", "output": outputs}
    unread = problem | {"groundtruth": "3"}
    (folder / "openr_math.json").write_text(json.dumps([problem, unread]), encoding="utf-8")
    return folder


@pytest.mark.parametrize("with_tokenizer", [False, True])
def test_verdicts_and_tokens_of_every_rule_are_counted_and_differences_are_listed(
    tmp_path: Path, with_tokenizer: bool
) -> None:
    path = tmp_path / "figures.json"
    arguments = ["--outputs", str(stored(tmp_path)), "--json", str(path)]
    if with_tokenizer:
        arguments += ["--tokenizer", str(EXAMPLE / "target" / "tokenizer.json")]
    done = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    report = json.loads(path.read_bytes())
    figures = {each["name"]: each["value"] for each in report["figures"]}
    # Whole, the invented answer counts, which is wrong; cut, the first one does.
    assert report["details"]["share_right"]["qwen_math"] == pytest.approx(2 / 3)
    for name in ("qwen_math", "openr_math", "tora_70b_gsm8k", "tora_34b_gsm8k"):
        assert figures[f"{name}, paragraph: texts ended early"] == 2
        assert figures[f"{name}, paragraph: different verdicts"] == 1
        assert figures[f"{name}, line: different verdicts"] == 2
        assert figures[f"{name}, box: different verdicts"] == 2
    saved = [figures[f"all, {rule}: tokens saved"] for rule in RULES]
    assert 0 < saved[2] < saved[1] <= saved[0] < 1
    listed = [
        each for each in report["details"]["different_answers"] if each["rule"] == "paragraph"
    ]
    assert len(listed) == 4 and listed[0]["whole"] == ["4", 0.0] and listed[0]["cut"] == ["3", 1.0]
    assert ": 2 + 2" in listed[0]["after"]


def test_a_rule_ends_a_text_with_a_piece_or_never() -> None:
    pieces = ["so \\box", "ed{3", "}.", "\n", "\n", "more"]
    sizes = {rule: cut_size(pieces, make()) for rule, make in RULES.items()}
    assert sizes == {"box": 3, "line": 4, "paragraph": 5}
    assert all(cut_size(["no answer\n\n", "3"], make()) == 2 for make in RULES.values())


@pytest.mark.parametrize("text", ["so \\boxed{3}\n", "ein Gruß an ∑ 漢字", ""])
def test_pieces_of_a_text_are_the_text(text: str) -> None:
    assert "".join(Pieces(None).of(text)) == text
    tokenizer = answered_early.Tokenizer.from_file(str(EXAMPLE / "target" / "tokenizer.json"))
    assert "".join(Pieces(tokenizer).of(text)) == text


def test_missing_outputs_are_named_with_their_repositories(tmp_path: Path) -> None:
    (stored(tmp_path) / "openr_math.json").unlink()
    done = CliRunner().invoke(
        main, ["--outputs", str(tmp_path), "--json", str(tmp_path / "f.json")]
    )
    assert done.exit_code == LeftOut.exit_code
    assert (
        "openr_math.json = train/solution_selector/train_data1.json of github.com/" in done.output
    )
    assert "qwen_math" not in done.output
