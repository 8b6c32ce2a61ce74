r"""Removal of all that only changes the looks of an answer. Pure.

A *rewrite* is a pattern and what takes its place; the rewrites of a table are applied in their
order.

    tidy_text     what a parser reads: no delimiters, boxes or sizes of brackets, one spelling for each thing
    normal_form   what is compared as text: no spaces, currency or degree signs either
"""

import functools
import re
import unicodedata
from collections.abc import Callable

Replacement = str | Callable[[re.Match[str]], str]
Rewrites = tuple[tuple[re.Pattern[str], Replacement], ...]

ENDS_WORD = r"(?![a-zA-Z])"
r"""Behind a command: `\in` is not the beginning of `\int`."""


def _rewrites(*table: tuple[str, Replacement]) -> Rewrites:
    return tuple((re.compile(pattern), replacement) for pattern, replacement in table)


def apply_rewrites(text: str, rewrites: Rewrites) -> str:
    """Return a text after all rewrites, in turn."""
    for pattern, replacement in rewrites:
        text = pattern.sub(replacement, text)
    return text


# --- replacements that are computed ---------------------------------------------------------------

_SPELLINGS_OF_NAMES = {
    "langle": "(",
    "rangle": ")",
    "lg": r"\log_{10}",
    "imath": "i",
    "jmath": "j",
    "−": "-",
    "×": r"\times ",
    "·": r"\cdot ",
    "π": r"\pi ",
    "∞": r"\infty ",
    "≤": r"\le ",
    "≥": r"\ge ",
}


def _name_as_latex(match: re.Match[str]) -> str:
    return _SPELLINGS_OF_NAMES[match[1] or match[2]]


def _as_ascii(match: re.Match[str]) -> str:
    return unicodedata.normalize("NFKC", match[0])


def _fraction_as_latex(match: re.Match[str]) -> str:
    numerator, denominator = _as_ascii(match).split("⁄")
    return rf"\frac{{{numerator}}}{{{denominator}}}"


# --- tables ---------------------------------------------------------------------------------------

_SPACES = (
    rf"(?<!\\)\\(?:[ ,;:]|(?:q?quad|(?:thin|med|thick|en)space|enskip){ENDS_WORD}|text\{{\s*\}})"
)
_CELSIUS = (
    r"(?:°|\\degree|\^\s*\{?\s*\\circ\s*\}?)\s*(?:\\(?:text|mathrm)\s*\{\s*)?[CF]\}?\s*$"
    r"|[℃℉]"
)
_UNIT_VECTOR = (
    r"\\(?:vec|hat|mathbf|boldsymbol) ?"
    rf"(?:\{{ ?(?:\\mathbf ?\{{?)?([ijk])\}}*|([ijk]){ENDS_WORD})"
)
_SET_BUILDER = (
    r"\\\{\s*([a-z])\s*(?:\\in\s*\\mathbb\s*\{?\s*R\s*\}?)?\s*"
    r"(?:\\mid|:|\||\\vert)([^{}]*\1[^{}]*)\\\}"
)
_WORDS_BEFORE = (
    r"^\s*\\(?:text|mathrm)\{(?=[^{}]*[A-Za-z]{2})[^{}\d]*(?:\bis|\bare|:|=)\s*\}(?=\s*\S)"
)

_FORMS = _rewrites(
    # Characters without a width.
    (r"[\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]", ""),
    # One command for text, whatever its style.
    (rf"\\(?:text(?:bf|it|rm|sf|tt|normal)|mbox){ENDS_WORD}", r"\\text"),
    # "1\ 000" and "1~000" are 1000; any other space of LaTeX is a space.
    (r"(?<=\d)(?:\\ |~)(?=\d{3}(?!\d))", ""),
    (_SPACES, " "),
    # "2 1/3", a mixed number.
    (r"(?<![\w.,^}/])(\d+)[ ~]+(\d+) ?/ ?(\d+)(?![\d./])", r"\1\\frac{\2}{\3}"),
    # "\frac\pi2".
    (r"(\\[dt]?frac)\s*\\pi\s*(?=[\d{])", r"\1{\\pi}"),
    # Characters of Unicode: ½, full width, digits of other scripts, x², √2.
    ("[¼-¾⅐-⅞]", _fraction_as_latex),
    ("[！-～]", _as_ascii),
    (r"(?![0-9])\d", lambda match: str(int(match[0]))),
    ("[⁰¹²³⁴-⁹]+", lambda match: f"^{{{_as_ascii(match)}}}"),
    (r"√\s*(?:\(([^()]*)\)|\{([^{}]*)\}|(\d+|[a-zA-Z]))", r"\\sqrt{\1\2\3}"),
    # The height of a matrix line: "\\[2pt]".
    (r"(\\\\)\s*\[[\d.]+\s*[a-z]{2}\]", r"\1"),
    (rf"^\s*(?:\\approx{ENDS_WORD}|≈)", ""),
    # Markdown: "**7**", "`x`".
    (r"^(\*\*|__|[*_`])([^*_`]+)\1$", r"\2"),
    # Ohm and micro are units, not letters.
    (r"(?<=\d)(?:\s|~)*\\Omega\s*$", r"\\text{Ω}"),
    (r"\\mu\s*\\(?:text|mathrm)\{\s*", r"\\text{μ"),
    # Degrees Celsius and Fahrenheit.
    (_CELSIUS, "°"),
    (r"\\(?:textcolor|color)\s*\{[a-zA-Z]\w*\}", ""),
    (rf"°|\\degree{ENDS_WORD}", r"^\\circ "),
    (rf"\s*\^\s*(?=\{{?\s*\\circ{ENDS_WORD})", "^"),
    # "\mathrm{e}" and "\text{i}" are the constants.
    (r"\\(?:mathrm|operatorname|text)\{\s*([ei])\s*\}", r"\1"),
    (rf"\\(langle|rangle|lg|imath|jmath){ENDS_WORD}|([−×·π∞≤≥])", _name_as_latex),
    (rf"\\log_(?:e|\{{\s*e\s*\}}){ENDS_WORD}", r"\\ln "),
    # The base of a number: "(101)_2", "101_{\text{base }2}".
    (r"\((\d+)\)_", r"\1_"),
    (r"_\{\s*\\text\{\s*base\s*\}?\s*(\w+)\s*\}+", r"_{\1}"),
    (_UNIT_VECTOR, r"\\mathbf{\1\2}"),
    (_SET_BUILDER, r"\2"),
    # "\text{The answer is }7".
    (_WORDS_BEFORE, ""),
)
"""Forms that models write, each rewritten to the form that parsers know."""

_LOOKS = _rewrites(
    (r"\\\$|[€£¥₹]", ""),
    (r"\^(?:\\circ|\{\\circ\})", ""),
    (r"\{,\}", ","),
    (rf"\\[dtc]frac{ENDS_WORD}", r"\\frac"),
    ("~", " "),
    # Two kinds of spaces have a meaning and are kept, as "~": "3 4" is not 34, "1, 200" is not 1,200.
    (r"(?<=\d)\s+(?=\d)|(?<=\d,)\s+(?=\d{3}(?!\d))", "~"),
    (r"\s+", ""),
    # "\frac12" and "\frac{1}2".
    (r"\\frac(\d)", r"\\frac{\1}"),
    (r"(\\frac\{[^{}]*\})~?(\d)", r"\1{\2}"),
    # An index is one word without braces: "x_{\text{max}}" is "x_max".
    (r"_\{\\text\{(\w+)\}\}", r"_\1"),
    (r"_\{(\w+)\}", r"_\1"),
    (rf"\\varnothing{ENDS_WORD}", r"\\emptyset"),
    (r"\{:\}", ":"),
    (rf"\\[lcd]dots{ENDS_WORD}|\\dots[cbm]{ENDS_WORD}", r"\\dots"),
)
"""Rewrites of a normal form, after `_FORMS`: looks that are left out, or written in one way."""

FORMULA_SPELLINGS = _rewrites(
    (r"([\w.^]+)/([\w.^]+)", r"\\frac{\1}{\2}"),
    (rf"\\(le|ge|ne)q?(?:slant)?{ENDS_WORD}", r"\\\1"),
    (rf"\\(?:cdot|times){ENDS_WORD}", "*"),
    (r"\{(\w)\}", r"\1"),
    # Zeros at the end of a decimal, a point at the end of a number, commas between thousands.
    (r"(\.\d*?)0+(?!\d)", r"\1"),
    (r"\.(?!\d)|,(?=\d{3}(?!\d))", ""),
)
"""Spellings of a formula that `question.py` takes for the same formula."""

# --- the two forms --------------------------------------------------------------------------------

_SPACE_IN_LIST = re.compile(r"(?<=,)\s*\\!\s*|\s*\\!\s*(?=,)")
# Of a box within the box, the command alone: a parser would take the inner one for the whole.
_SIZES = re.compile(
    rf"\\(?:left|right|[bB]igg?[lrm]?|displaystyle|boxed|fbox){ENDS_WORD}"
    rf"|\\!|\\[,;:]{ENDS_WORD}|(?<![a-zA-Z])\\[,;:]"
)
_REPEATING = re.compile(r"(?<![\d.])(\d*)\.(\d*)\\(?:overline|bar|dot)\s*\{(\d{1,15})\}(?!\d)")
_E_NOTATION = re.compile(r"([+-]?\d+(?:\.\d+)?)[eE]([+-]?\d{1,4})\.?", re.ASCII)
_WRAPPER = re.compile(r"\\(?:text|mathbf|mathrm|boldsymbol|bm|underline)\s*(?=\{)")
_HAS_NO_FORMS = re.compile(r"[^\\_~*`{\s\x80-\U0010ffff]*")
"""Without a command, an index, a wrapper or a space there is nothing to rewrite."""


@functools.lru_cache(maxsize=4096)
def tidy_text(answer: str) -> str:
    """Remove what a parser need not see: delimiters, boxes, sizes of brackets, line breaks; spaces stay."""
    if answer.isdecimal() and answer.isascii():
        return answer
    text = without_delimiters(_SPACE_IN_LIST.sub("", answer))
    text = " ".join(_SIZES.sub("", text).split())
    if not _HAS_NO_FORMS.fullmatch(text):
        text = _REPEATING.sub(_repeating_as_fraction, apply_rewrites(text, _FORMS)).strip()
    while (content := _content_of_wrapper(text)) is not None:
        text = content.strip()
    # A parser reads 4.5e33 as 4.5 times Euler's number times 33.
    if power := _E_NOTATION.fullmatch(text):
        return rf"{power[1]} \times 10^{{{int(power[2])}}}"
    return text


def _repeating_as_fraction(match: re.Match[str]) -> str:
    r"""Write a repeating decimal as a fraction: `0.1\overline{6}` is 15/90."""
    whole, start, repeated = match.groups()
    numerator = int(whole + start + repeated or "0") - int(whole + start or "0")
    denominator = 10 ** len(start) * (10 ** len(repeated) - 1)
    return rf"\frac{{{numerator}}}{{{denominator}}}"


def _content_of_wrapper(text: str) -> str | None:
    """Return the content of a wrapper, or of braces alone, around the whole text; else None."""
    wrapper = _WRAPPER.match(text)
    opening = wrapper.end() if wrapper else 0
    if text[opening : opening + 1] != "{" or not text.endswith("}") or text.endswith(r"\}"):
        return None
    depth = 0
    for position in range(opening, len(text)):
        depth += (text[position] == "{") - (text[position] == "}")
        # The first brace closes before the end: it does not go around the whole text.
        if depth == 0 and position < len(text) - 1:
            return None
    return text[opening + 1 : -1] if depth == 0 else None


@functools.lru_cache(maxsize=4096)
def normal_form(answer: str) -> str:
    """Remove what only changes the looks of an answer: delimiters, spacing, wrappers, styles."""
    text = tidy_text(answer).removesuffix(".")
    return text if _HAS_NO_FORMS.fullmatch(text) else apply_rewrites(text, _LOOKS)


_DELIMITERS = re.compile(r"(?<!\\)\$|^\s*\\[(\[]|(?<!\\)\\[)\]]\s*$")


def without_delimiters(text: str) -> str:
    r"""Remove `$`, stray ones included, and `\(` or `\[` around the whole text."""
    return _DELIMITERS.sub("", text.strip()).strip()
