"""Removal of all that only changes the looks of an answer. Pure."""

import functools
import re
import unicodedata
from collections.abc import Callable

Rewrites = tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...]


def compiled(*pairs: tuple[str, str | Callable[[re.Match[str]], str]]) -> Rewrites:
    """Return patterns with what takes their place."""
    return tuple((re.compile(pattern), replacement) for pattern, replacement in pairs)


def rewritten(text: str, rewrites: Rewrites) -> str:
    """Return a text after all of them, in turn."""
    for pattern, replacement in rewrites:
        text = pattern.sub(replacement, text)
    return text


_REWRITES = compiled(
    (r"\\\$|[€£¥₹]", ""),
    (r"\^(?:\\circ|\{\\circ\})", ""),
    (r"\{,\}", ","),
    (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
    (r"~", " "),
    # Two kinds of spaces have a meaning and are kept, as "~": "3 4" is not 34, "1, 200" is not 1,200.
    (r"(?<=\d)\s+(?=\d)|(?<=\d,)\s+(?=\d{3}(?!\d))", "~"),
    (r"\s+", ""),
    (r"\\frac(\d)", r"\\frac{\1}"),
    (r"(\\frac\{[^{}]*\})~?(\d)", r"\1{\2}"),
    (r"_\{\\text\{(\w+)\}\}", r"_\1"),
    (r"_\{(\w+)\}", r"_\1"),
    (r"\\varnothing(?![a-zA-Z])", r"\\emptyset"),
    (r"\{:\}", ":"),
    (r"\\[lcd]dots(?![a-zA-Z])|\\dots[cbm](?![a-zA-Z])", r"\\dots"),
)
_SHAPE = re.compile(
    r"\\(?:left|right|[bB]igg?[lrm]?|displaystyle|boxed|fbox)(?![a-zA-Z])|\\!|\\[,;:](?![a-zA-Z])|(?<![a-zA-Z])\\[,;:]"
)
_NAMES = {"langle": "(", "rangle": ")", "lg": r"\log_{10}", "imath": "i", "jmath": "j", "−": "-", "×": r"\times "}
_NAMES |= {"·": r"\cdot ", "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge "}
_FORMS = compiled(
    (r"[\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]", ""),
    (r"\\(?:text(?:bf|it|rm|sf|tt|normal)|mbox)(?![a-zA-Z])", r"\\text"),
    (r"(?<=\d)(?:\\ |~)(?=\d{3}(?!\d))", ""),
    (r"(?<!\\)\\(?:[ ,;:]|(?:q?quad|(?:thin|med|thick|en)space|enskip)(?![a-zA-Z])|text\{\s*\})", " "),
    (r"(?<![\w.,^}/])(\d+)[ ~]+(\d+) ?/ ?(\d+)(?![\d./])", r"\1\\frac{\2}{\3}"),
    (r"(\\[dt]?frac)\s*\\pi\s*(?=[\d{])", r"\1{\\pi}"),
    (r"[¼-¾⅐-⅞]", lambda found: r"\frac{{{}}}{{{}}}".format(*unicodedata.normalize("NFKC", found[0]).split("⁄"))),
    (r"[！-～]", lambda found: unicodedata.normalize("NFKC", found[0])),
    (r"(?![0-9])\d", lambda found: str(unicodedata.decimal(found[0]))),
    (r"[⁰¹²³⁴-⁹]+", lambda found: f"^{{{unicodedata.normalize('NFKC', found[0])}}}"),
    (r"√\s*(?:\(([^()]*)\)|\{([^{}]*)\}|(\d+|[a-zA-Z]))", r"\\sqrt{\1\2\3}"),
    (r"(\\\\)\s*\[[\d.]+\s*[a-z]{2}\]", r"\1"),
    (r"^\s*(?:\\approx(?![a-zA-Z])|≈)", ""),
    (r"^(\*\*|__|[*_`])([^*_`]+)\1$", r"\2"),
    (r"(?<=\d)(?:\s|~)*\\Omega\s*$", r"\\text{Ω}"),
    (r"\\mu\s*\\(?:text|mathrm)\{\s*", r"\\text{μ"),
    (r"(?:°|\\degree|\^\s*\{?\s*\\circ\s*\}?)\s*(?:\\(?:text|mathrm)\s*\{\s*)?[CF]\}?\s*$|[℃℉]", "°"),
    (r"\\(?:textcolor|color)\s*\{[a-zA-Z]\w*\}", ""),
    (r"°|\\degree(?![a-zA-Z])", r"^\\circ "),
    (r"\s*\^\s*(?=\{?\s*\\circ(?![a-zA-Z]))", "^"),
    (r"\\(?:mathrm|operatorname|text)\{\s*([ei])\s*\}", r"\1"),
    (r"\\(langle|rangle|lg|imath|jmath)(?![a-zA-Z])|([−×·π∞≤≥])", lambda found: _NAMES[found[1] or found[2]]),
    (r"\\log_(?:e|\{\s*e\s*\})(?![a-zA-Z])", r"\\ln "),
    (r"\((\d+)\)_", r"\1_"),
    (r"_\{\s*\\text\{\s*base\s*\}?\s*(\w+)\s*\}+", r"_{\1}"),
    (r"\\(?:vec|hat|mathbf|boldsymbol) ?(?:\{ ?(?:\\mathbf ?\{?)?([ijk])\}*|([ijk])(?![a-zA-Z]))", r"\\mathbf{\1\2}"),
    (r"\\\{\s*([a-z])\s*(?:\\in\s*\\mathbb\s*\{?\s*R\s*\}?)?\s*(?:\\mid|:|\||\\vert)([^{}]*\1[^{}]*)\\\}", r"\2"),
    (r"^\s*\\(?:text|mathrm)\{(?=[^{}]*[A-Za-z]{2})[^{}\d]*(?:\bis|\bare|:|=)\s*\}(?=\s*\S)", ""),
)
"""Forms of one thing that models write, each as parsers know it."""
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
