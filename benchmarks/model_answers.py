r"""Answers like those of models to published problems, in the forms that they are published and written in.

A maker returns a gold answer and other ways of writing it. Two golds of one maker are never equal, so that every answer
is wrong for every other gold of its kind: `tests/scorer/verifier/rules/test_model_answers.py` has both judged, and
`python -m benchmarks.verifier` measures how quickly.
"""

import random
from collections.abc import Callable

Made = tuple[str, list[str]]
Maker = Callable[[random.Random], Made]
ASK = (
    "Let me work step by step. First {n} is even or odd.\n\nSo we get $x = {n}$ and then the rest.\n\n",
    "We have\n\\[ {n} + 1 = {m}. \\]\nIt follows that\n",
    "**Step 1.** Read the problem.\n**Step 2.** Compute ${n} \\cdot 2$.\n**Step 3.** ",
)
ENDS = (
    "Therefore, the final answer is $\\boxed{{{}}}$.",
    "The answer is: \\[ \\boxed{{{}}} \\]",
    "Thus \\boxed{{{}}}",
    "So the answer is $\\boxed{{ {} }}$. I hope it is correct.",
)


def integer(rng: random.Random) -> Made:
    n = rng.randint(-999, 99_999)
    return str(n), [
        str(n),
        f"{n:,}",
        f"{n}.",
        f"x = {n}",
        rf"\mathbf{{{n}}}",
        rf"\textbf{{{n}}}",
        f"{n:,}".replace(",", "{,}"),
    ]


def with_unit(rng: random.Random) -> Made:
    n, unit = (
        rng.randint(2, 9999),
        rng.choice(["cm", "meters", "square units", "hours", "miles per hour", "ways"]),
    )
    return str(n), [
        rf"{n}\text{{ {unit}}}",
        rf"{n} \text{{ {unit}}}",
        rf"{n}\ \mathrm{{{unit}}}",
        rf"{n}\,\text{{{unit}}}",
    ]


def money(rng: random.Random) -> Made:
    n = rng.randint(101, 99_999)
    text = f"{n / 100:.2f}"
    return rf"\${text}", [
        text,
        rf"\${text}",
        rf"\$ {text}",
        f"${text}".replace("$", r"\$"),
        rf"{text}\text{{ dollars}}",
    ]


def degrees(rng: random.Random) -> Made:
    n = rng.randint(1, 359)
    return rf"{n}^\circ", [
        rf"{n}^\circ",
        rf"{n}^{{\circ}}",
        f"{n}°",
        rf"{n}\text{{ degrees}}",
        str(n),
        rf"{n} ^ \circ",
    ]


def percent(rng: random.Random) -> Made:
    n = rng.randint(2, 99)
    return rf"{n}\%", [rf"{n}\%", rf"{n} \%", f"{n}%", rf"{n}\text{{ percent}}", str(n)]


def fraction(rng: random.Random) -> Made:
    b = rng.choice([7, 11, 13, 17, 19, 23])
    a = rng.choice([n for n in range(1, 99) if n % b])
    gold = rf"\frac{{{a}}}{{{b}}}"
    return gold, [
        gold,
        rf"\dfrac{{{a}}}{{{b}}}",
        rf"\tfrac{{{a}}}{{{b}}}",
        f"{a}/{b}",
        rf"\frac{{{2 * a}}}{{{2 * b}}}",
        rf"x = {gold}",
    ]


def mixed(rng: random.Random) -> Made:
    whole, b = rng.randint(1, 20), rng.choice([3, 5, 7])
    a = rng.randint(1, b - 1)
    gold = rf"{whole}\frac{{{a}}}{{{b}}}"
    return gold, [
        gold,
        rf"\frac{{{whole * b + a}}}{{{b}}}",
        f"{whole * b + a}/{b}",
        rf"{whole} \frac{{{a}}}{{{b}}}",
    ]


def decimal(rng: random.Random) -> Made:
    n = 10 * rng.randint(1, 9999) + rng.randint(1, 9)
    gold = f"{n / 1000:.3f}"
    return gold, [
        gold,
        gold + "0",
        rf"\frac{{{n}}}{{1000}}",
        gold.lstrip("0"),
        rf"{gold}\text{{ m}}",
    ]


def surd(rng: random.Random) -> Made:
    a, b = rng.randint(2, 40), rng.choice([2, 3, 5, 6, 7, 10, 11])
    return rf"{a}\sqrt{{{b}}}", [
        rf"{a}\sqrt{{{b}}}",
        rf"{a} \sqrt{{{b}}}",
        rf"{a}\cdot\sqrt{{{b}}}",
        rf"\sqrt{{{a * a * b}}}",
    ]


def of_pi(rng: random.Random) -> Made:
    b = rng.choice([7, 11, 13])
    a = rng.choice([n for n in range(2, 60) if n % b])
    gold = rf"\frac{{{a}\pi}}{{{b}}}"
    return gold, [gold, rf"\dfrac{{{a} \pi}}{{{b}}}", rf"\frac{{{a}}}{{{b}}}\pi", rf"{a}\pi/{b}"]


def polynomial(rng: random.Random) -> Made:
    a, b, c = (rng.randint(2, 60) for _ in range(3))
    return f"{a}x^2+{b}x+{c}", [
        f"{a}x^2+{b}x+{c}",
        f"{a}x^2 + {b}x + {c}",
        f"{c}+{b}x+{a}x^{{2}}",
        f"{a}x^2+{c}+{b}x",
    ]


def factored(rng: random.Random) -> Made:
    a, b = rng.randint(1, 30), rng.randint(31, 60)
    return f"(x-{a})(x+{b})", [
        f"(x-{a})(x+{b})",
        f"(x+{b})(x-{a})",
        rf"(x - {a})(x + {b})",
        f"x^2+{b - a}x-{a * b}",
    ]


def point(rng: random.Random) -> Made:
    a, b = rng.randint(-99, 99), rng.randint(1, 99)
    return f"({a},{b})", [
        f"({a},{b})",
        f"({a}, {b})",
        rf"\left({a}, {b}\right)",
        rf"(x, y) = ({a}, {b})",
        rf"\left( {a},\, {b} \right)",
    ]


def interval(rng: random.Random) -> Made:
    a = rng.randint(-99, 98)
    b, ends = rng.randint(a + 1, 199), rng.choice([("[", ")"), ("(", "]"), ("[", "]"), ("(", ")")])
    gold = f"{ends[0]}{a},{b}{ends[1]}"
    others = [
        rf"\left{ends[0]}{a}, {b}\right{ends[1]}",
        f"{ends[0]}{a}, {b}{ends[1]}",
        rf"x \in {ends[0]}{a}, {b}{ends[1]}",
    ]
    return gold, [gold, *others]


def ray(rng: random.Random) -> Made:
    a = rng.randint(-99, 99)
    return rf"[{a},\infty)", [
        rf"[{a}, \infty)",
        rf"\left[{a},\infty\right)",
        rf"[{a},+\infty)",
        rf"x \ge {a}",
        rf"x\geq {a}",
    ]


def union(rng: random.Random) -> Made:
    a = rng.randint(-50, 0)
    b = rng.randint(1, 50)
    gold = rf"(-\infty,{a})\cup({b},\infty)"
    return gold, [
        gold,
        rf"(-\infty, {a}) \cup ({b}, \infty)",
        rf"(-\infty, {a}) \cup ({b}, +\infty)",
    ]


def matrix(rng: random.Random) -> Made:
    a, b, c, d = (rng.randint(-20, 20) for _ in range(4))
    rows = rf"{a} & {b} \\ {c} & {d}"
    return rf"\begin{{pmatrix}}{rows}\end{{pmatrix}}", [
        rf"\begin{{pmatrix}} {rows} \end{{pmatrix}}",
        rf"\begin{{bmatrix}} {rows} \end{{bmatrix}}",
        rf"\begin{{pmatrix}}{a}&{b}\\{c}&{d}\end{{pmatrix}}",
    ]


def vector(rng: random.Random) -> Made:
    a, b, c = (rng.randint(-40, 40) for _ in range(3))
    gold = rf"\begin{{pmatrix}}{a}\\{b}\\{c}\end{{pmatrix}}"
    return gold, [
        gold,
        rf"\begin{{pmatrix}} {a} \\ {b} \\ {c} \end{{pmatrix}}",
        rf"\begin{{bmatrix}} {a} \\ {b} \\ {c} \end{{bmatrix}}",
    ]


def choice(rng: random.Random) -> Made:
    letter = rng.choice("ABCDE")
    return rng.choice([rf"\text{{({letter})}}", letter, f"({letter})"]), [
        letter,
        f"({letter})",
        rf"\text{{{letter}}}",
        rf"\text{{({letter})}}",
        rf"\textbf{{({letter})}}",
        f"{letter}.",
        rf"\text{{Option {letter}}}",
    ]


def numbers(rng: random.Random) -> Made:
    a, b, c = sorted(rng.sample(range(-60, 60), 3))
    return f"{a},{b},{c}", [
        f"{a},{b},{c}",
        f"{a}, {b}, {c}",
        f"{c}, {a}, {b}",
        rf"{a},\, {b},\, {c}",
    ]


def finite_set(rng: random.Random) -> Made:
    a, b, c = sorted(rng.sample(range(-60, 60), 3))
    gold = rf"\{{{a},{b},{c}\}}"
    return gold, [gold, rf"\{{{a}, {b}, {c}\}}", rf"\left\{{{c}, {a}, {b}\right\}}"]


def line(rng: random.Random) -> Made:
    a, b = rng.randint(2, 60), rng.randint(1, 60)
    return f"y={a}x+{b}", [f"y={a}x+{b}", f"y = {a}x + {b}", f"y = {b} + {a}x"]


def complex_number(rng: random.Random) -> Made:
    a, b = rng.randint(1, 60), rng.randint(2, 60)
    return f"{a}+{b}i", [f"{a}+{b}i", f"{a} + {b}i", f"{b}i+{a}", rf"{a}+{b}\mathrm{{i}}"]


def power(rng: random.Random) -> Made:
    a, b = rng.choice([2, 3, 5, 7]), rng.randint(11, 60)
    return f"{a}^{{{b}}}", [f"{a}^{{{b}}}", f"{a}^{{ {b} }}", f"{{{a}}}^{{{b}}}"]


def in_base(rng: random.Random) -> Made:
    n, base = "".join(rng.choice("123456") for _ in range(4)), rng.choice([7, 8, 9])
    return f"{n}_{base}", [f"{n}_{base}", f"{n}_{{{base}}}"]


def clock(rng: random.Random) -> Made:
    hour, minute, half = rng.randint(1, 12), rng.randint(10, 59), rng.choice("ap")
    gold = rf"{hour}:{minute}\text{{ {half}.m.}}"
    return gold, [
        gold,
        rf"{hour}:{minute} \text{{ {half}.m.}}",
        rf"\text{{{hour}:{minute} {half}.m.}}",
    ]


def word(rng: random.Random) -> Made:
    name = rng.choice(
        [
            "even",
            "odd",
            "Alice",
            "Evelyn",
            "east",
            "west",
            "ellipse",
            "hyperbola",
            "Monday",
            "Friday",
        ]
    )
    return rf"\text{{{name}}}", [
        name,
        rf"\text{{{name}}}",
        rf"\textbf{{{name}}}",
        rf"\text{{ {name} }}",
        name.lower(),
    ]


def logarithm(rng: random.Random) -> Made:
    a, b, c = rng.randint(2, 60), rng.randint(2, 60), rng.choice([2, 3, 5, 7, 11, 13])
    gold = rf"{a}+{b}\ln {c}"
    return gold, [
        gold,
        rf"{a} + {b}\ln {c}",
        rf"{b}\ln {c}+{a}",
        rf"{a}+{b}\ln({c})",
        rf"{a}+{b}\ln{{{c}}}",
    ]


USUAL: tuple[Maker, ...] = (
    integer,
    with_unit,
    money,
    degrees,
    percent,
    fraction,
    mixed,
    decimal,
    surd,
    of_pi,
    polynomial,
    factored,
    point,
    interval,
    ray,
    union,
    matrix,
    vector,
    choice,
    numbers,
    finite_set,
    line,
    complex_number,
    power,
    in_base,
    clock,
    word,
    logarithm,
)
LIKE_MATH = {
    integer: 46,
    with_unit: 6,
    money: 2,
    degrees: 4,
    percent: 2,
    fraction: 13,
    decimal: 3,
    surd: 6,
    of_pi: 4,
    polynomial: 4,
    point: 4,
    interval: 2,
    choice: 1,
    matrix: 1,
    word: 1,
    numbers: 1,
}
"""Kinds of gold answers and their parts of 100, as far as MATH's can be told by their looks."""


def completion(answer: str, rng: random.Random) -> str:
    """Return a text that ends with the answer in a box, as an instructed model writes it."""
    n = rng.randint(2, 99)
    return rng.choice(ASK).format(n=n, m=n + 1) + rng.choice(ENDS).format(answer)


def asked(count: int, seed: int = 0) -> list[tuple[str, str, str, str]]:
    """Return kind, gold, a right answer and one that is right for another gold of its kind."""
    rng = random.Random(seed)
    found = []
    for index in range(count):
        make = USUAL[index % len(USUAL)]
        gold, spellings = make(rng)
        while (other := make(rng))[1] == spellings or other[1][0] == spellings[0]:
            pass
        found.append((make.__name__, gold, rng.choice(spellings), rng.choice(other[1])))
    return found


def like_models(count: int, seed: int = 0) -> list[tuple[str, str]]:
    """Return golds and answers as models give them to MATH problems: two in three right, pairs that repeat."""
    rng = random.Random(seed)
    makers, weights = list(LIKE_MATH), list(LIKE_MATH.values())
    found = []
    for _ in range(count):
        make = rng.choices(makers, weights)[0]
        gold, spellings = make(rng)
        # Most write an answer as its gold answer is written.
        usual = gold if rng.random() < 0.6 else rng.choice(spellings)
        found.append((gold, usual if rng.random() < 0.65 else rng.choice(make(rng)[1])))
    return found
