r"""Inequalities as the sets that they describe, if a lone symbol stands on one side. Pure.

x<-1\text{ or }x>1    (-\infty,-1)\cup(1,\infty)
2\le x<5              [2,5)
x^2<4, 0<1, x<x+1     no set: not solved, or true for every x
"""

import re

from prefixrl.scorer.verifier.rules.guards import PATTERNS, split_at

_SIGN = re.compile(r"\\([lg]eq?(?:slant)?|lt|gt|neq?|in)(?![a-zA-Z])|([<>]=|(?<![\d)}])!=)")
_SIGNS = {
    "le": "≤",
    "ge": "≥",
    "lt": "<",
    "gt": ">",
    "ne": "≠",
    "in": "∈",
    "<=": "≤",
    ">=": "≥",
    "!=": "≠",
}
_TURNED = str.maketrans(">≥", "<≤")


def as_sets(want: str, got: str) -> tuple[str, str] | None:
    """Return both with inequalities as sets; None if the answer is one that is not solved."""
    if not re.search(r"[<>]|!=|\\[lgni]", want + got):
        return want, got
    wanted, given = _as_set(want), _as_set(got)
    if not wanted and len(_sides(want)) > 1:
        return want, got
    is_solved = (not wanted or wanted[0] == given[0]) if given else len(_sides(got)) == 1
    return (wanted[1] if wanted else want, given[1] if given else got) if is_solved else None


def _as_set(text: str) -> tuple[str, str] | None:
    """Return the symbol and the set that a relation describes, None if it describes none in this form."""
    found = [_part(_sides(part)) for part in split_at(PATTERNS["or"].sub(";", text), ";")]
    symbols = {each and each[0] for each in found}
    return (
        (found[0][0], r"\cup".join(each[1] for each in found if each))
        if found[0] and len(symbols) == 1
        else None
    )


def _part(sides: list[str]) -> tuple[str, str] | None:
    if set(sides[1::2]) <= {">", "≥"}:
        sides = [side.translate(_TURNED) for side in reversed(sides)]
    if len(sides) == 3 and sides[1] in "∈≠" and PATTERNS["symbol"].fullmatch(sides[0]):
        value = sides[2]
        return sides[0], value if sides[1] == "∈" else rf"(-\infty,{value})\cup({value},\infty)"
    if len(sides) == 3:
        sides = (
            [r"-\infty", "<", *sides]
            if PATTERNS["symbol"].fullmatch(sides[0])
            else [*sides, "<", r"\infty"]
        )
    if (
        len(sides) != 5
        or not {sides[1], sides[3]} <= {"<", "≤"}
        or not PATTERNS["symbol"].fullmatch(sides[2])
    ):
        return None
    if re.search(rf"(?<![\\a-zA-Z]){re.escape(sides[2])}(?![a-zA-Z])", f"{sides[0]} {sides[4]}"):
        return None
    return sides[2], f"{'(['[sides[1] == '≤']}{sides[0]},{sides[4]}{')]'[sides[3] == '≤']}"


def _sides(text: str) -> list[str]:
    """Return the sides of a relation and the signs between them."""
    text = _SIGN.sub(lambda found: _SIGNS[(found[1] or found[2])[:2]], text)
    parts = split_at(re.sub("[<>≤≥≠∈]", "\0\\g<0>\0", text), "\0")
    return [part.replace("\0", "").strip() for part in parts]
