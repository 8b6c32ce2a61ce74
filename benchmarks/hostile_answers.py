r"""Answers written to stop a verifier, and how late they make a verdict.

Their own, or that of an ordinary answer beside them.

Each round submits the same hostile answer to as many different golds as the pool has children, and an ordinary answer
behind
them: the worst place it can have. The corpus is also what `tests/scorer/verifier/test_hostile_answers.py` judges.
"""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from prefixrl.scorer.verifier.pool import VerifierPool
from prefixrl.scorer.verifier.rules.verify import Judgement

TIMEOUT_S = 2
"""Short, so that many run into it."""
ALLOWED_S = 0.5
"""Seconds that a verdict may take beyond the limit."""
HOG = "while True: pass"

HOSTILE = {
    "tower": "9^{9^{9^{9}}}",
    "tower of symbols": "x^{x^{x^{x^{x^{x^{x^{x}}}}}}}",
    "bare tower": "9^9^9^9",
    "bracketed tower": "((9^9)^9)^9",
    "huge exponent": "7^{7777777777}",
    "huge exponent by product": r"7^{10000\cdot 10000\cdot 10000}",
    "huge exponent by sum": "7^{9999+9999^2+9999^3}",
    "exponent by factorial": "2^{100!}",
    "negative tower": "9^{-9^{9^9}}",
    "root tower": r"\sqrt{9^{9^{9^9}}}",
    "fractional exponent": r"9^{\frac{999999999}{7}}",
    "factorial": "100000000!",
    "small factorials": "9999!+9998!+9997!+9996!",
    "factorial of a factorial": "((7!)!)!",
    "factorial of a power": "(10^{9})!",
    "factorial by product": r"(1000\cdot 1000\cdot 1000)!",
    "symbolic factorial": r"\frac{(10^9)!}{(10^9-1)!}",
    "binomial": r"\binom{1000000000}{500000000}",
    "binomial of powers": r"\binom{10^9}{5\cdot 10^8}",
    "binomial with spaces": r"\dbinom{99999999}{ 4999999 }",
    "nested binomial": r"\binom{\binom{\binom{99}{9}}{9}}{9}",
    "parentheses": "(" * 240 + "x" + ")" * 240,
    "fewer parentheses": "(" * 49 + "x" + ")" * 49,
    "many parentheses": "(" * 100_000 + "x" + ")" * 100_000,
    "open parentheses": "(" * 400,
    "braces": "{" * 240 + "x" + "}" * 240,
    "fractions": r"\frac{1}{" * 45 + "x" + "}" * 45,
    "many fractions": r"\frac{1}{" * 3000 + "x" + "}" * 3000,
    "roots": r"\sqrt{" * 45 + "x" + "}" * 45,
    "fractions side by side": r"\frac{1}{x}+" * 40 + "1",
    "digits": "1" * 100_000,
    "decimals": "0." + "1" * 100_000,
    "sixty-four digits, powered": "1234567890" * 6 + "^{9999}",
    "many short numbers": "99^{999}+" * 50 + "1",
    "power with a variable": "(x+1)^{9999}",
    "expansion": "(a+b+c+d+e+f+g+h)^{300}",
    "product of expansions": "(a+b+c+d)^{90}(a-b+c-d)^{90}(a+b-c-d)^{90}",
    "power of a sum of roots": r"(\sqrt{2}+\sqrt{3}+\sqrt{5}+\sqrt{7})^{500}",
    "roots that hide zero": r"\sqrt{2}+\sqrt{3}-\sqrt{5+2\sqrt{6}}+" * 5 + "x",
    "integral": r"\int_0^1 x^x \sin(\cos(x^x)) dx",
    "nested integrals": r"\int_0^1\int_0^1\int_0^1 e^{xyz}\sin(xyz) dx dy dz",
    "sum": r"\sum_{k=1}^{1000000000} \frac{\sin k}{k}",
    "nested sums": r"\sum_{i=1}^{99999}\sum_{j=1}^{99999}\sum_{k=1}^{99999} ijk^{x}",
    "product": r"\prod_{k=1}^{100000000} (k+x)",
    "limit": r"\lim_{x\to 0} \frac{\sin(\tan(x)) - \tan(\sin(x))}{x^7}",
    "derivative": r"\frac{d}{dx} x^{x^{x^{x^{x}}}}",
    "gcd": r"\gcd(10^{9999}-1, 10^{9998}-1)",
    "logarithm": r"\log_{2}(3^{9999^{9}})",
    "matrix": r"\begin{pmatrix}" + "&".join("x" * 30) + r"\end{pmatrix}^{9999}",
    "determinant": r"\det\begin{pmatrix} a&b&c&d\\e&f&g&h\\i&j&k&l\\m&n&o&p\end{pmatrix}^{200}",
    "list of bombs": ",".join(["(x+1)^{9999}"] * 20),
    "set of bombs": r"\{" + ",".join(f"(x+{n})^{{999}}" for n in range(20)) + r"\}",
    "regex of spaces": " " * 100_000 + "x",
    "regex of commas": "1," * 50_000 + "1",
    "regex of frac": r"\frac" * 90,
    "regex of digits and commas": "1,111" * 90 + "x",
    "regex of units": r"\text{ }" * 60 + "x",
    "regex of dollars": "$" * 500 + "x",
    "regex of boxes": r"\boxed{" * 60 + "x" + "}" * 60,
    "regex of and": "x and " * 80 + "x",
    "regex of equals": "x=" * 250 + "x",
    "unicode digits": "٣" * 400 + "x",
    "nulls": "\0" * 400 + "x",
    "surrogates and marks": "x\u0301" * 200,
    "python": r"__import__('os').system('echo escaped >&2')",
    "python in text": r"\text{__import__('os').abort()}",
    "inequality": r"\sin(x^x) < \cos(x^{x^x})",
    "modular": r"7^{7^{7}} \mod 1000000007",
    "absolute values": "|" * 60 + "x" + "|" * 60,
    "percent": "%" * 500,
}


def judged(
    pool: VerifierPool, asked: dict[int, tuple[str, str]]
) -> dict[int, tuple[Judgement, float]]:
    """Each verdict of answers and golds, and the seconds from submitting to it."""
    began_s = time.monotonic()
    for key, (answer, gold) in asked.items():
        pool.submit(key, rf"\boxed{{{answer}}}", gold)
    found: dict[int, tuple[Judgement, float]] = {}
    while pool.pending:
        pool.wait(0.05)
        for key, verdict in pool.poll():
            found[key] = verdict, time.monotonic() - began_s
    return found


@contextmanager
def hogs(count: int) -> Iterator[None]:
    """So many other processes that each keep a core busy."""
    started = [subprocess.Popen([sys.executable, "-c", HOG]) for _ in range(count)]
    try:
        yield
    finally:
        for each in started:
            each.kill()
            each.wait()


def latest(children: int, names: list[str]) -> tuple[list[float], list[float]]:
    """Seconds of the slowest hostile verdict of each round, and of the ordinary answer behind them."""
    pool = VerifierPool(children, TIMEOUT_S)
    hostile_s, ordinary_s = [], []
    try:
        judged(pool, {key: (rf"\ln x+{key}", rf"{key}+\ln x") for key in range(8 * children)})
        for number, name in enumerate(names, start=1):
            golds = [rf"\ln y+{number}{child}" for child in range(children)]
            asked = {key: (HOSTILE[name], gold) for key, gold in enumerate(golds)}
            found = judged(pool, asked | {children: (rf"{number}+\ln y", rf"\ln y+{number}")})
            right, waited_s = found.pop(children)
            # Where others take all cores an ordinary answer may not get its share within the limit.
            assert (right.reward, right.status) in ((1.0, "ok"), (0.0, "timeout")), (name, right)
            assert all(verdict.reward == 0.0 for verdict, _ in found.values()), (name, found)
            ordinary_s.append(waited_s)
            hostile_s.append(max(elapsed_s for _, elapsed_s in found.values()))
    finally:
        pool.close()
    return hostile_s, ordinary_s
