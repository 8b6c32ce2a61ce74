"""The rules that decide without sympy whether an answer is the gold answer: one ordered list. Pure.

A comparison goes through `RULES` from the first to the last. The first rule that applies ends it:
with a verdict, or by leaving it to math-verify (`verify.py`). A new rule is a function here and an
entry of `RULES` at its place; the rows of `tests/scorer/verifier/rules/answers.jsonl` show what it
decides.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Generic, NamedTuple, TypeVar

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


_Form = TypeVar("_Form")


class _made_once(Generic[_Form]):
    """`functools.cached_property` without its lock, which costs a twentieth of a verdict."""

    def __init__(self, make: "Callable[[Comparison], _Form]") -> None:
        self._make = make
        self.__doc__ = make.__doc__

    def __set_name__(self, _owner: type, name: str) -> None:
        self._name = name

    def __get__(self, pair: "Comparison", _owner: type | None = None) -> _Form:
        form = pair.__dict__[self._name] = self._make(pair)
        return form


class Comparison:
    """A gold answer and an answer, in the forms that rules read; each form is made once, when it is needed."""

    def __init__(self, gold: str, answer: str) -> None:
        self.gold = gold
        self.answer = answer

    @_made_once
    def gold_form(self) -> str:
        """The normal form of the gold answer."""
        return normal_form(self.gold)

    @_made_once
    def answer_form(self) -> str:
        """The normal form of the answer."""
        return normal_form(self.answer)

    @_made_once
    def tidy_gold(self) -> str:
        """The gold answer as a parser reads it."""
        return tidy_text(self.gold)

    @_made_once
    def tidy_answer(self) -> str:
        """The answer as a parser reads it."""
        return tidy_text(self.answer)

    @_made_once
    def gold_value(self) -> str:
        """The gold answer as a parser reads it, without its unit."""
        return value_of(self.gold, self.gold)

    @_made_once
    def answer_value(self) -> str:
        """The answer as a parser reads it, without its unit."""
        return value_of(self.answer, self.gold)

    @_made_once
    def gold_value_form(self) -> str:
        """The normal form of the gold answer's value."""
        return normal_form(self.gold_value)

    @_made_once
    def answer_value_form(self) -> str:
        """The normal form of the answer's value."""
        return normal_form(self.answer_value)

    @_made_once
    def gold_number(self) -> Rational | None:
        """The gold answer as a number; None if it is not a number."""
        return read_rational(self.gold_value_form)

    @_made_once
    def answer_number(self) -> Rational | None:
        """The answer as a number; None if it is not a number."""
        return read_rational(self.answer_value_form)

    @property
    def is_gold_evaluated(self) -> bool:
        """True if the gold answer is a number written as one: `2+2` is not."""
        return self.gold_number is not None and self.gold_number.is_evaluated


def settle_exactly(gold: str, answer: str) -> Decision:
    """Return the decision of the first rule that applies."""
    return _first_decision(RULES, Comparison(gold, answer))


def settle_plainly(gold: str, answer: str) -> bool:
    """Return True if words, choices, dates or single letters, which are no expressions, are the same."""
    return _first_decision(_PLAIN_RULES, Comparison(gold, answer)).is_right is True


def is_settled_without_sympy(gold: str) -> bool:
    """Return True if the gold answer is a number or a choice, which the rules can read."""
    form = normal_form(gold)
    return read_rational(form) is not None or _is_in_base(form) or is_choice(gold)


# --- the whole texts ------------------------------------------------------------------------------


def _compare_long_text(pair: Comparison) -> Decision | None:
    if len(pair.answer) <= MAX_ANSWER_CHARS:
        return None
    return RIGHT if pair.answer.strip() == pair.gold.strip() else WRONG


def _compare_text(pair: Comparison) -> Decision | None:
    if pair.gold_form != pair.answer_form:
        return None
    return RIGHT if pair.answer_form else WRONG


def _refuse_shape(pair: Comparison) -> Decision | None:
    return WRONG if is_refused(pair.answer) else None


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


def _compare_base(pair: Comparison) -> Decision | None:
    return WRONG if _is_in_base(pair.gold_form) else None


# --- what is no expression ------------------------------------------------------------------------


def _compare_choice(pair: Comparison) -> Decision | None:
    if not is_choice(pair.tidy_gold):
        return None
    choice = choice_of(pair.tidy_answer)
    if choice is None:
        return None
    return RIGHT if choice == choice_of(pair.tidy_gold) else WRONG


def _compare_words(pair: Comparison) -> Decision | None:
    words = words_of(pair.tidy_gold)
    if words is None:
        return None
    return RIGHT if words == words_of(pair.tidy_answer) else WRONG


def _compare_letter(pair: Comparison) -> Decision | None:
    gold = normal_form(pair.tidy_gold)
    if len(gold) != 1 or not gold.isalpha():
        return None
    return WRONG if len(normal_form(pair.tidy_answer)) == 1 else None


def _compare_moment(pair: Comparison) -> Decision | None:
    is_same = is_same_moment(pair.tidy_gold, pair.tidy_answer)
    return None if is_same is None else Decision(is_same)


# --- equations and inequalities -------------------------------------------------------------------


def claims_of(gold: str, answer: str) -> list[Claim]:
    """Return all that must hold if the answer is right; for a wrong form a claim that never holds."""
    both = as_sets(tidy_text(gold), tidy_text(answer))
    return (claims(*both) if both else None) or [Claim("0", "1")]


def _compare_sides(pair: Comparison) -> Decision | None:
    parts = claims_of(pair.gold, pair.answer)
    if parts == [Claim(pair.tidy_gold, pair.tidy_answer)]:
        return None  # there is nothing to take apart
    return _all_hold(map(settle_claim, parts))


def settle_claim(claim: Claim) -> Decision:
    """Settle one claim; sides that must only be equal need not be evaluated."""
    if not claim.is_side:
        return settle_exactly(claim.gold, claim.answer)
    gold = normal_form(value_of(claim.gold, claim.answer))
    answer = normal_form(value_of(claim.answer, claim.gold))
    return RIGHT if gold == answer else Decision(are_equal(gold, answer), "expression")


def _all_hold(decisions: Iterable[Decision]) -> Decision:
    """Return the first decision of the worst kind: wrong before undecided, undecided before right."""
    parts = list(decisions)
    for outcome in (False, None):
        for part in parts:
            if part.is_right is outcome:
                return part
    return parts[0]


# --- values without their units -------------------------------------------------------------------


def value_of(text: str, gold: str) -> str:
    """Return an answer as a parser reads it, without the unit behind it."""
    return without_unit(tidy_text(text), gold, is_gold=text == gold)


def _compare_value(pair: Comparison) -> Decision | None:
    if pair.gold_value_form != pair.answer_value_form:
        return None
    return RIGHT if pair.answer_value_form else WRONG


def _refuse_loose_text(pair: Comparison) -> Decision | None:
    return WRONG if has_loose_text(pair.gold_value, pair.answer_value) else None


def _refuse_letters(pair: Comparison) -> Decision | None:
    has_letters = guards.free_letters(pair.answer_value)
    return WRONG if has_letters and not guards.free_letters(pair.gold_value) else None


_ROUNDED = re.compile(r"-?\d*\.\d{6,}")


def _refuse_undone(pair: Comparison) -> Decision | None:
    gold, answer = pair.gold_value_form, pair.answer_value_form
    # A decimal of many places stands for an exact value, which may be given instead.
    is_number = pair.is_gold_evaluated and not _ROUNDED.fullmatch(gold)
    return WRONG if guards.leaves_undone(gold, answer, is_number) else None


def _refuse_kind(pair: Comparison) -> Decision | None:
    gold, answer = pair.gold_value_form, pair.answer_value_form
    return WRONG if guards.differs_in_kind(gold, answer, pair.is_gold_evaluated) else None


def _refuse_more_values(pair: Comparison) -> Decision | None:
    if pair.answer_number is not None:
        return None  # commas may divide thousands
    gold, answer = pair.gold_value_form, pair.answer_value_form
    return WRONG if guards.lists_more(gold, answer) else None


def _refuse_side_by_side(pair: Comparison) -> Decision | None:
    return WRONG if guards.has_numbers_side_by_side(pair.answer_value_form) else None


def _compare_number(pair: Comparison) -> Decision | None:
    gold, answer = pair.gold_number, pair.answer_number
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


def _compare_elements(pair: Comparison) -> Decision | None:
    gold, answer = pair.gold_value_form, pair.answer_value_form
    gold_elements = guards.tuple_elements(gold)
    answer_elements = guards.tuple_elements(answer)
    if not gold_elements or not answer_elements:
        return None
    is_same_shape = (gold[0], gold[-1]) == (answer[0], answer[-1])
    if len(gold_elements) != len(answer_elements) or not is_same_shape:
        return WRONG
    return _all_hold(map(settle_exactly, gold_elements, answer_elements))


def _compare_expression(pair: Comparison) -> Decision:
    return Decision(are_equal(pair.gold_value_form, pair.answer_value_form))


# --- the list -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """One entry of the list."""

    name: str
    """Name in verdicts; `docs/verification.md` lists them."""
    sentence: str
    """The decision in words."""
    decide: Callable[[Comparison], Decision | None]
    """None if the rule does not apply: the next one is asked."""


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
        _refuse_shape,
    ),
    Rule("number base", "A number in a base is compared as written.", _compare_base),
)
_PLAIN_RULES = (
    Rule("choice", "The letter of a choice is met by the same letter.", _compare_choice),
    Rule("words", "Words are compared as text, in small letters.", _compare_words),
    Rule("one letter", "Two different single letters are different.", _compare_letter),
    Rule("date or time", "Dates and times are compared as written.", _compare_moment),
)
_VALUE_RULES = (
    Rule("same value", "Equal normal forms without units are right.", _compare_value),
    Rule("loose text", "Text that the gold answer lacks is wrong.", _refuse_loose_text),
    Rule("letters", "Letters are wrong for a gold answer without letters.", _refuse_letters),
    Rule(
        "undone work",
        "Sums, limits, derivatives, and functions beside a number, that the gold answer lacks are wrong.",
        _refuse_undone,
    ),
    Rule("kind", "A tuple or interval is neither a set nor a list nor a number.", _refuse_kind),
    Rule("more values", "More values than the gold answer has are wrong.", _refuse_more_values),
    Rule("side by side", "Numbers without a sign between them are wrong.", _refuse_side_by_side),
    Rule("number", "Numbers are compared exactly.", _compare_number),
    Rule("elements", "Tuples and intervals are compared element by element.", _compare_elements),
    Rule(
        "expression",
        "Expressions are compared modulo a large prime; what is not read there is left to math-verify.",
        _compare_expression,
    ),
)
RULES: tuple[Rule, ...] = (
    *_WHOLE_TEXT_RULES,
    *_PLAIN_RULES,
    Rule(
        "sides",
        "Each side of an equation or inequality must be a name or equal to the value.",
        _compare_sides,
    ),
    *_VALUE_RULES,
)
"""All rules, in the order in which they are asked. The last one always applies."""


def _first_decision(rules: tuple[Rule, ...], pair: Comparison) -> Decision:
    for rule in rules:
        decision = rule.decide(pair)
        if decision is not None:
            # Of parts within parts the innermost is named: brackets may be nested deep.
            part = decision.rule.rpartition(": ")[2]
            return Decision(decision.is_right, f"{rule.name}: {part}" if part else rule.name)
    return UNDECIDED
