"""The ordered list of rules: names, order, and a row of the corpus for every rule."""

import json
from pathlib import Path

from prefixrl.scorer.verifier.routing import ForChild, ask_verifier
from prefixrl.scorer.verifier.rules.exact import RULES, settle_exactly
from support.paths import ROOT

CORPUS = Path(__file__).parent / "answers.jsonl"
RARE = {
    "long text": ("7", "7" * 5_000),
    "refused shape": ("7", "9^9^9^9"),
    "elements: number": ("(1,2)", "(1,3)"),
    "sides: number": ("5", "x=6"),
}
"""A gold answer and an answer for rules and parts that the corpus may lack."""


def test_every_rule_has_a_name_of_its_own_and_a_sentence() -> None:
    names = [rule.name for rule in RULES]
    assert len(set(names)) == len(names) >= 19
    assert all(":" not in name for name in names), "a colon stands before the rule for a part"
    assert [rule.name for rule in RULES if not rule.sentence.endswith(".")] == []


def test_the_order_is_that_of_the_page() -> None:
    page = (ROOT / "docs" / "verification.md").read_text(encoding="utf-8")
    rows = [f"| `{rule.name}` | {rule.sentence} |" for rule in RULES]
    places = [page.find(row) for row in rows]
    missing_rows = [row for row, place in zip(rows, places, strict=True) if place < 0]
    assert missing_rows == [], "add these rows to docs/verification.md"
    assert places == sorted(places)


def test_every_rule_decides_an_answer_of_the_corpus() -> None:
    decided: set[str] = set()
    for line in CORPUS.read_text(encoding="utf-8").splitlines():
        case = json.loads(line)
        decided.add(settle_exactly(case["gold"], case.get("answer", "")).rule)
    for rule, (gold, answer) in RARE.items():
        assert settle_exactly(gold, answer).rule == rule
        decided.add(rule)
    first = {rule.partition(":")[0] for rule in decided}
    without_answer = {rule.name for rule in RULES} - first
    assert without_answer == set(), f"add an answer that each of them decides to {CORPUS}"


def test_a_verdict_names_the_rule_that_decided() -> None:
    for gold, answer, rule in (
        ("7", "7", "same text"),
        ("7", "8", "number"),
        ("7", "2+5", "number"),
        ("B", "C", "choice"),
        ("even", "odd", "words"),
        ("9", "9x^0", "letters"),
        (r"2\sqrt3", r"\sqrt{12}", "expression"),
        ("(((1,2),3),4)", "(((1,5),3),4)", "elements: number"),
    ):
        verdict = ask_verifier(rf"\boxed{{{answer}}}", gold, "", "none", 5)
        assert not isinstance(verdict, ForChild) and verdict.rule == rule, answer
    repeated = ask_verifier(r"\boxed{\sqrt{98}}", r"7\sqrt2", r"Simplify $\sqrt{98}$", "none", 5)
    assert not isinstance(repeated, ForChild)
    assert (repeated.reward, repeated.rule) == (0.0, "question")
