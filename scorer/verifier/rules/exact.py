"""The rules that decide without sympy whether an answer is the gold answer: one ordered list. Pure.

A comparison goes through `RULES` from the first to the last. The first rule that applies ends it:
with a verdict, or by leaving it to math-verify (`verify.py`). A new rule is a function here and an
entry at its place in one of the lists that make `RULES`: for whole texts, for texts that are no
expressions, for values; the rows of `tests/scorer/verifier/rules/answers.jsonl` show what it
decides.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from prefixrl.common.prompts.extract import MAX_ANSWER_CHARS
from prefixrl.scorer.verifier.rules import guards
from prefixrl.scorer.verifier.rules.arithmetic import Rational, are_equal, read_rational
from prefixrl.scorer.verifier.rules.equations import Claim, claims
from prefixrl.scorer.verifier.rules.looks import normal_form, tidy_text
from prefixrl.scorer.verifier.rules.relations import as_sets
from prefixrl.scorer.verifier.rules.units import without_unit
from prefixrl.scorer.verifier.rules.words import (
    choice_of,
    has_loose_text,
    is_choice,
    is_same_moment,
    words_of,
)


class Decision(NamedTuple):
    """The end of a comparison."""

    is_right: bool | None
    """None if strings and numbers cannot decide: math-verify must."""
    rule: str = ""
    """Name of the rule that ended the comparison; `elements: number` for a part of the answer."""


RIGHT = Decision(True)
WRONG = Decision(False)
UNDECIDED = Decision(None)
Decide = Callable[[str, str], Decision | None]
"""The end of a comparison of a gold answer and an answer; None if a rule does not apply: the next one is asked."""


def _wrong_if(is_wrong: Callable[[str, str], bool]) -> Decide:
    """Return a rule that decides only if it finds the answer wrong."""
    return lambda gold, answer: WRONG if is_wrong(gold, answer) else None


def settle_exactly(gold: str, answer: str) -> Decision:
    """Return the decision of the first rule that applies."""
    decision = _first_decision(_TEXT_RULES, gold, answer)
    if decision is not None:
        return decision
    values = value_of(gold, gold), value_of(answer, gold)
    return _first_decision(_VALUE_RULES, *values) or UNDECIDED


def settle_plainly(gold: str, answer: str) -> bool:
    """Return True if words, choices, dates or single letters, which are no expressions, are the same."""
    decision = _first_decision(_PLAIN_RULES, gold, answer)
    return decision is not None and decision.is_right is True


def is_settled_without_sympy(gold: str) -> bool:
    """Return True if the gold answer is a number or a choice, which the rules can read."""
    form = normal_form(gold)
    return read_rational(form) is not None or _is_in_base(form) or is_choice(gold)


# --- the whole texts ------------------------------------------------------------------------------


def _compare_long_text(gold: str, answer: str) -> Decision | None:
    if len(answer) <= MAX_ANSWER_CHARS:
        return None
    return Decision(answer.strip() == gold.strip())


def _compare_text(gold: str, answer: str) -> Decision | None:
    form = normal_form(answer)
    return Decision(form != "") if normal_form(gold) == form else None


_MAX_NESTING = 50
_HOSTILE = re.compile(
    r"""
    \d{65}                                                  # more than 64 digits in a row
    | \^ \s* (?: \d+ | \{[^{}a-zA-Z]*\} ) \s* \^            # a power of a power
    | \^ \s* \{[^{}a-zA-Z]*\^
    | [({] [^(){}a-zA-Z]* \^ [^()a-zA-Z]* [)}] \s* \^
    | \^ \s* [{(]* \s* [+-]? \s* \d{5}                      # an exponent of 10000 or more
    | \d{5} \s* [)}]* \s* ! | \d \s* ! \s* [)}\s]* !        # a factorial too large
    """,
    re.VERBOSE,
)


def is_refused(answer: str) -> bool:
    """Return True if an answer must not be parsed: short inputs may cost minutes or gigabytes."""
    if len(answer) <= _MAX_NESTING and "^" not in answer and "!" not in answer:
        return False
    depths = accumulate((char in "([{") - (char in ")]}") for char in answer)
    return (
        len(answer) > MAX_ANSWER_CHARS
        or max(depths) > _MAX_NESTING
        or _HOSTILE.search(answer) is not None
    )


_IN_BASE = re.compile(r"\(?(?=[0-9A-F.]*\d)[0-9A-F.]+\)?_\w+")


def _is_in_base(form: str) -> bool:
    return _IN_BASE.fullmatch(form) is not None


# --- what is no expression ------------------------------------------------------------------------


def _compare_choice(gold: str, answer: str) -> Decision | None:
    gold_text = tidy_text(gold)
    choice = choice_of(tidy_text(answer)) if is_choice(gold_text) else None
    return None if choice is None else Decision(choice == choice_of(gold_text))


def _compare_words(gold: str, answer: str) -> Decision | None:
    words = words_of(tidy_text(gold))
    return None if words is None else Decision(words == words_of(tidy_text(answer)))


def _are_letters(gold: str, answer: str) -> bool:
    letter = normal_form(tidy_text(gold))
    return len(letter) == len(normal_form(tidy_text(answer))) == 1 and letter.isalpha()


def _compare_moment(gold: str, answer: str) -> Decision | None:
    is_same = is_same_moment(tidy_text(gold), tidy_text(answer))
    return None if is_same is None else Decision(is_same)


# --- equations and inequalities -------------------------------------------------------------------


def claims_of(gold: str, answer: str) -> list[Claim]:
    """Return all that must hold if the answer is right; for a wrong form a claim that never holds."""
    both = as_sets(tidy_text(gold), tidy_text(answer))
    return (claims(*both) if both else None) or [Claim("0", "1")]


def _compare_sides(gold: str, answer: str) -> Decision | None:
    parts = claims_of(gold, answer)
    if parts == [Claim(tidy_text(gold), tidy_text(answer))]:
        return None  # there is nothing to take apart
    return _worst_decision(map(settle_claim, parts))


def settle_claim(claim: Claim) -> Decision:
    """Settle one claim; sides that must only be equal need not be evaluated."""
    if not claim.is_side:
        return settle_exactly(claim.gold, claim.answer)
    gold = normal_form(value_of(claim.gold, claim.answer))
    answer = normal_form(value_of(claim.answer, claim.gold))
    return RIGHT if gold == answer else Decision(are_equal(gold, answer), "expression")


def _worst_decision(decisions: Iterable[Decision]) -> Decision:
    """Return the first decision of the worst kind: wrong before undecided, undecided before right."""
    return min(decisions, key=lambda part: (False, None, True).index(part.is_right))


# --- values without their units -------------------------------------------------------------------


def value_of(text: str, gold: str) -> str:
    """Return an answer as a parser reads it, without the unit behind it."""
    return without_unit(tidy_text(text), gold, is_gold=text == gold)


def _number_of(value: str) -> Rational | None:
    return read_rational(normal_form(value))


def _is_evaluated(value: str) -> bool:
    """Return True for a number written as one: `2+2` is not."""
    number = _number_of(value)
    return number is not None and number.is_evaluated


_ROUNDED = re.compile(r"-?\d*\.\d{6,}")


def _leaves_undone(gold: str, answer: str) -> bool:
    form = normal_form(gold)
    # A decimal of many places stands for an exact value, which may be given instead.
    is_number = _is_evaluated(gold) and not _ROUNDED.fullmatch(form)
    return guards.leaves_undone(form, normal_form(answer), is_number)


def _lists_more(gold: str, answer: str) -> bool:
    if _number_of(answer) is not None:
        return False  # commas may divide thousands
    return guards.lists_more(normal_form(gold), normal_form(answer))


def _compare_number(gold_value: str, answer_value: str) -> Decision | None:
    gold = _number_of(gold_value)
    answer = _number_of(answer_value)
    if gold is None:
        return None
    if answer is None:
        return UNDECIDED
    if gold.is_evaluated and not answer.is_evaluated:
        return WRONG  # "2+2" is not 4: nothing was worked out
    if gold.value == answer.value:
        return RIGHT
    # A comma may divide thousands or the values of a list.
    return UNDECIDED if gold.is_grouped or answer.is_grouped else WRONG


def _compare_elements(gold_value: str, answer_value: str) -> Decision | None:
    gold = normal_form(gold_value)
    answer = normal_form(answer_value)
    gold_elements = guards.tuple_elements(gold)
    answer_elements = guards.tuple_elements(answer)
    if not gold_elements or not answer_elements:
        return None
    is_same_shape = (gold[0], gold[-1]) == (answer[0], answer[-1])
    if len(gold_elements) != len(answer_elements) or not is_same_shape:
        return WRONG
    return _worst_decision(map(settle_exactly, gold_elements, answer_elements))


# --- the list -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """One entry of the list."""

    name: str
    """Name in verdicts; `docs/verification.md` lists them."""
    sentence: str
    """The decision in words."""
    decide: Decide


_WHOLE_TEXT_RULES = (
    Rule(
        "long text",
        "An answer too long to be parsed is right only as the gold answer's text.",
        _compare_long_text,
    ),
    Rule("same text", "Equal normal forms are right; empty ones are wrong.", _compare_text),
    Rule(
        "refused shape",
        "A tower of powers, a huge number or factorial, or deep nesting is wrong: it is not parsed.",
        _wrong_if(lambda _, answer: is_refused(answer)),
    ),
    Rule(
        "number base",
        "A number in a base is compared as written.",
        _wrong_if(lambda gold, _: _is_in_base(normal_form(gold))),
    ),
)
_PLAIN_RULES = (
    Rule("choice", "The letter of a choice is met by the same letter.", _compare_choice),
    Rule("words", "Words are compared as text, in small letters.", _compare_words),
    Rule("one letter", "Two different single letters are different.", _wrong_if(_are_letters)),
    Rule("date or time", "Dates and times are compared as written.", _compare_moment),
)
_VALUE_RULES = (
    Rule("same value", "Equal normal forms without units are right.", _compare_text),
    Rule("loose text", "Text that the gold answer lacks is wrong.", _wrong_if(has_loose_text)),
    Rule(
        "letters",
        "Letters are wrong for a gold answer without letters.",
        _wrong_if(
            lambda gold, answer: bool(guards.free_letters(answer)) and not guards.free_letters(gold)
        ),
    ),
    Rule(
        "undone work",
        "Sums, limits, derivatives, and functions beside a number, that the gold answer lacks are wrong.",
        _wrong_if(_leaves_undone),
    ),
    Rule(
        "kind",
        "A tuple or interval is neither a set nor a list nor a number.",
        _wrong_if(
            lambda gold, answer: guards.differs_in_kind(
                normal_form(gold), normal_form(answer), _is_evaluated(gold)
            )
        ),
    ),
    Rule("more values", "More values than the gold answer has are wrong.", _wrong_if(_lists_more)),
    Rule(
        "side by side",
        "Numbers without a sign between them are wrong.",
        _wrong_if(lambda _, answer: guards.has_numbers_side_by_side(normal_form(answer))),
    ),
    Rule("number", "Numbers are compared exactly.", _compare_number),
    Rule("elements", "Tuples and intervals are compared element by element.", _compare_elements),
    Rule(
        "expression",
        "Expressions are compared modulo a large prime; what is not read there is left to math-verify.",
        lambda gold, answer: Decision(are_equal(normal_form(gold), normal_form(answer))),
    ),
)
_TEXT_RULES = (
    *_WHOLE_TEXT_RULES,
    *_PLAIN_RULES,
    Rule(
        "sides",
        "Each side of an equation or inequality must be a name or equal to the value.",
        _compare_sides,
    ),
)
RULES: tuple[Rule, ...] = (*_TEXT_RULES, *_VALUE_RULES)
"""All rules, in the order in which they are asked. The last one always applies."""


def _first_decision(rules: tuple[Rule, ...], gold: str, answer: str) -> Decision | None:
    for rule in rules:
        decision = rule.decide(gold, answer)
        if decision is not None:
            # Of parts within parts the innermost is named: brackets may be nested deep.
            part = decision.rule.rpartition(": ")[2]
            return Decision(decision.is_right, f"{rule.name}: {part}" if part else rule.name)
    return None
