"""Removal of all that only changes the looks of an answer. Pure."""

import functools
import re
import tomllib
import unicodedata
from collections.abc import Callable
from pathlib import Path

Rewrites = tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...]


def rewritten(text: str, rewrites: Rewrites) -> str:
    """Return a text after all of them, in turn."""
    for pattern, replacement in rewrites:
        text = pattern.sub(replacement, text)
    return text


_SHAPE = re.compile(
    r"\\(?:left|right|[bB]igg?[lrm]?|displaystyle|boxed|fbox)(?![a-zA-Z])|\\!|\\[,;:](?![a-zA-Z])|(?<![a-zA-Z])\\[,;:]"
)
_NAMES = {
    "langle": "(",
    "rangle": ")",
    "lg": r"\log_{10}",
    "imath": "i",
    "jmath": "j",
    "−": "-",
    "×": r"\times ",
}
_NAMES |= {"·": r"\cdot ", "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge "}
_FUNCTIONS: dict[str, Callable[[re.Match[str]], str]] = {
    "{fraction}": lambda found: r"\frac{{{}}}{{{}}}".format(
        *unicodedata.normalize("NFKC", found[0]).split("⁄")
    ),
    "{plain}": lambda found: unicodedata.normalize("NFKC", found[0]),
    "{digit}": lambda found: str(unicodedata.decimal(found[0])),
    "{power}": lambda found: f"^{{{unicodedata.normalize('NFKC', found[0])}}}",
    "{name}": lambda found: _NAMES[found[1] or found[2]],
}
TABLES = tomllib.loads(
    (Path(__file__).parent / "tables" / "looks.toml").read_text(encoding="utf-8")
)
_FORMS, _REWRITES, SPELLINGS = (
    tuple((re.compile(pattern), _FUNCTIONS.get(place, place)) for pattern, place in TABLES[name])
    for name in ("forms", "rewrites", "spellings")
)
"""Forms of one thing that models write, each as parsers know it; what is looks alone; spellings of a formula."""
_REPEATING = re.compile(r"(?<![\d.])(\d*)\.(\d*)\\(?:overline|bar|dot)\s*\{(\d{1,15})\}(?!\d)")
_E_NOTATION = re.compile(r"([+-]?\d+(?:\.\d+)?)[eE]([+-]?\d{1,4})\.?", re.ASCII)
_WHOLE = re.compile(r"\\(?:text|mathbf|mathrm|boldsymbol|bm|underline)\s*(?=\{)")
_BARE = re.compile(r"[^\\_~*`{\s\x80-\U0010ffff]*")
"""Without a command, an index, a wrapper or a space there is nothing to replace."""


@functools.lru_cache(maxsize=4096)
def tidied(answer: str) -> str:
    """Remove what a parser need not see: delimiters, boxes, sizes of brackets, line breaks; spaces stay."""
    if answer.isdecimal() and answer.isascii():
        return answer
    # Of a box within the box, the command alone: a parser would take the inner one for the whole.
    text = re.sub(r"(?<=,)\s*\\!\s*|\s*\\!\s*(?=,)", "", answer)
    text = " ".join(_SHAPE.sub("", bare(text)).split())
    if not _BARE.fullmatch(text):
        text = _REPEATING.sub(_as_fraction, rewritten(text, _FORMS)).strip()
    while (inner := _inner(text)) is not None:
        text = inner.strip()
    # A parser reads 4.5e33 as 4.5 times Euler's number times 33.
    if power := _E_NOTATION.fullmatch(text):
        return rf"{power[1]} \times 10^{{{int(power[2])}}}"
    return text


def _as_fraction(found: re.Match[str]) -> str:
    """Write a repeating decimal as a fraction."""
    whole, start, again = found.groups()
    above = int(whole + start + again or "0") - int(whole + start or "0")
    return rf"\frac{{{above}}}{{{10 ** len(start) * (10 ** len(again) - 1)}}}"


def _inner(text: str) -> str | None:
    """Return the content of a wrapper, or of braces alone, around the whole text."""
    start = _WHOLE.match(text)
    opening = start.end() if start else 0
    if text[opening : opening + 1] != "{" or not text.endswith("}") or text.endswith(r"\}"):
        return None
    depth = 0
    for at in range(opening, len(text)):
        depth += (text[at] == "{") - (text[at] == "}")
        if depth == 0 and at < len(text) - 1:
            return None
    return text[opening + 1 : -1] if depth == 0 else None


@functools.lru_cache(maxsize=4096)
def normalise(answer: str) -> str:
    """Remove what only changes the looks of an answer: delimiters, spacing, wrappers, styles."""
    text = tidied(answer).removesuffix(".")
    return text if _BARE.fullmatch(text) else rewritten(text, _REWRITES)


def bare(gold: str) -> str:
    r"""Remove `$`, stray ones included, and `\(` or `\[` around the whole text."""
    return re.sub(r"(?<!\\)\$|^\s*\\[(\[]|(?<!\\)\\[)\]]\s*$", "", gold.strip()).strip()
