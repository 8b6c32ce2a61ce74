"""The speed of judging answers, how often the verdict is right, and the longest delay of a verdict.

The pool with two children against math-verify called in one process.

python -m benchmarks.verifier [--quick] --json benchmarks/results/verifier.json

Three kinds of answers, each measured in turns with math-verify, chunk by chunk, so that both meet the same load:
`model` (`model_answers.py`: as models give them to MATH problems, in the forms that they use), `short` (three in four
golds are numbers, four in ten answers are wrong, no pair occurs twice), and `hard`, of which every one needs sympy. All
stand at the end of whole texts. A second pass submits the same answers again and finds them in the cache. Ratios are
medians over the chunks. The shipped pairs (`tests/scorer/verifier/rules/answers.jsonl`) say what is right: they give
agreement, false positives and false negatives of both, with each gold answer boxed for itself. Last come hostile
answers (`hostile_answers.py`), on the machine as it is and beside two processes that do nothing but compute: seconds
from submitting to the slowest verdict.
"""

import json
import random
import statistics
import time
from pathlib import Path

import click

from benchmarks.hostile_answers import HOSTILE, hogs, latest
from benchmarks.hostile_answers import TIMEOUT_S as HOSTILE_TIMEOUT_S
from benchmarks.model_answers import completion, like_models
from benchmarks.results import Figure, Report, commit, mean_figure, options
from prefixrl.scorer.verifier.pool import VerifierPool
from prefixrl.scorer.verifier.rules.looks import without_delimiters
from prefixrl.scorer.verifier.rules.verify import judge_exactly

CORPUS = Path(__file__).parent.parent / "tests" / "scorer" / "verifier" / "rules" / "answers.jsonl"

ANSWERS = 4_000
QUICK_ANSWERS = 1_000
SLOW_ANSWERS = 1_000
QUICK_SLOW_ANSWERS = 200
QUICK_HOSTILE = 6
CHUNKS = 10
CHILDREN = 2
HOGS = 2
TIMEOUT_S = 5
PATIENCE_S = 600.0
BASELINE = "math-verify called directly in one process"

Case = tuple[str, str]
"""A gold answer and an answer."""


def integer(rng: random.Random) -> tuple[str, list[str]]:
    n = rng.randint(-500, 20_000)
    return str(n), [str(n), f"${n}$", f"{n:,}", f"x = {n}", rf"{n}\text{{ cm}}"]


def fraction(rng: random.Random) -> tuple[str, list[str]]:
    a, b = rng.randint(1, 200), rng.randint(2, 99)
    return rf"\frac{{{a}}}{{{b}}}", [
        rf"\frac{{{a}}}{{{b}}}",
        rf"\dfrac{{{a}}}{{{b}}}",
        f"{a}/{b}",
        rf"\frac{{{2 * a}}}{{{2 * b}}}",
    ]


def decimal(rng: random.Random) -> tuple[str, list[str]]:
    n = rng.randint(1, 99_999)
    return f"{n / 100:.2f}", [f"{n / 100:.2f}", f"{n / 100:.3f}", rf"\frac{{{n}}}{{100}}"]


def surd(rng: random.Random) -> tuple[str, list[str]]:
    a, b = rng.randint(2, 60), rng.choice((2, 3, 5, 6, 7, 10, 11, 13))
    return rf"{a}\sqrt{{{b}}}", [
        rf"{a}\sqrt{{{b}}}",
        rf"{a} \sqrt{b}" if b < 10 else rf"{a} \sqrt{{{b}}}",
        rf"\sqrt{{{a * a * b}}}",
    ]


def multiple_of_pi(rng: random.Random) -> tuple[str, list[str]]:
    a, b = rng.randint(1, 99), rng.randint(2, 60)
    return rf"\frac{{{a}\pi}}{{{b}}}", [
        rf"\frac{{{a}\pi}}{{{b}}}",
        rf"\frac{{{a}}}{{{b}}}\pi",
        rf"{a}\pi/{b}",
    ]


def polynomial(rng: random.Random) -> tuple[str, list[str]]:
    a, b, c = (rng.randint(2, 40) for _ in range(3))
    return f"{a}x^2+{b}x+{c}", [f"{a}x^2+{b}x+{c}", f"{a}x^2 + {b}x + {c}", f"{c}+{b}x+{a}x^2"]


def pair(rng: random.Random) -> tuple[str, list[str]]:
    a, b = rng.randint(-99, 99), rng.randint(-99, 99)
    return f"({a},{b})", [f"({a},{b})", f"({a}, {b})", rf"\left({a}, {b}\right)"]


def interval(rng: random.Random) -> tuple[str, list[str]]:
    a = rng.randint(-99, 99)
    b = a + rng.randint(1, 99)
    return f"[{a},{b})", [f"[{a},{b})", f"[{a}, {b})", rf"\left[{a},{b}\right)"]


def logarithm(rng: random.Random) -> tuple[str, list[str]]:
    a, b, c = (rng.randint(2, 60) for _ in range(3))
    return rf"{a}+{b}\ln {c}", [rf"{a}+{b}\ln {c}", rf"{b}\ln {c}+{a}", rf"{a}+{b}\ln({c})"]


def line(rng: random.Random) -> tuple[str, list[str]]:
    a, b = rng.randint(2, 60), rng.randint(1, 60)
    return f"y={a}x+{b}", [f"y={a}x+{b}", f"y = {b} + {a}x"]


KINDS = (
    (integer, 60),
    (fraction, 13),
    (decimal, 4),
    (surd, 7),
    (multiple_of_pi, 4),
    (polynomial, 6),
    (pair, 4),
    (interval, 2),
)


def cases(count: int, seed: int = 0) -> list[Case]:
    """Distinct pairs in an order without pattern."""
    rng = random.Random(seed)
    makers, weights = zip(*KINDS, strict=True)
    found: dict[Case, None] = {}
    while len(found) < count:
        make = rng.choices(makers, weights)[0]
        gold, spellings = make(rng)
        right = rng.random() < 0.6
        found[gold, rng.choice(spellings if right else make(rng)[1])] = None
    return list(found)


def texts_of(asked: list[Case]) -> list[Case]:
    """Golds and whole texts; the same pair is always in the same text."""
    return [(gold, completion(answer, random.Random(f"{gold} {answer}"))) for gold, answer in asked]


def judged_by_pool(
    pool: VerifierPool, asked: list[Case], may_time_out: bool = False
) -> tuple[list[bool], float]:
    """Verdicts on texts, and answers per second."""
    began_s = time.perf_counter()
    for key, (gold, text) in enumerate(asked):
        pool.submit(key, text, gold)
    found: dict[int, bool] = {}
    while pool.pending:
        if time.perf_counter() - began_s > PATIENCE_S:
            raise click.ClickException(f"{pool.pending} answers are still pending")
        pool.wait(0.01)
        for key, verdict in pool.poll():
            if verdict.status in ("error", "timeout") and not may_time_out:
                raise click.ClickException(f"{asked[key]}: {verdict}")
            found[key] = bool(verdict.reward)
    return [found[key] for key in range(len(asked))], len(asked) / (time.perf_counter() - began_s)


def judged_directly(asked: list[Case]) -> tuple[list[bool], float]:
    """As its documentation shows it."""
    from math_verify import LatexExtractionConfig, parse, verify

    config = [LatexExtractionConfig(boxed_match_priority=0)]
    began_s = time.perf_counter()
    found = []
    for gold, answer in asked:
        golds = parse(f"${gold}$", config, parsing_timeout=TIMEOUT_S)
        answers = parse(answer, config, parsing_timeout=TIMEOUT_S)
        found.append(bool(verify(golds, answers, timeout_seconds=TIMEOUT_S)))
    return found, len(asked) / (time.perf_counter() - began_s)


Measured = dict[str, list[float]]
"""Answers per second of each chunk: `direct`, `uncached`, `cached`."""


def pairs() -> list[tuple[str, str, bool]]:
    """The shipped pairs: gold answers, texts, and what is right; then each gold answer boxed for itself."""
    found = []
    for line in CORPUS.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        text = row.get("text") or (rf"\boxed{{{row['answer']}}}" if row.get("answer") else "")
        found.append((row["gold"], text, bool(row["right"])))
    return found + [
        (gold, rf"\boxed{{{without_delimiters(gold)}}}", True)
        for gold in dict.fromkeys(each[0] for each in found)
    ]


def compared(pool: VerifierPool) -> tuple[list[Figure], dict[str, object]]:
    """Agreement with the shipped pairs and pairs per second, beside math-verify's."""
    asked = pairs()
    cases = [each[:2] for each in asked]
    found: dict[str, tuple[list[bool], float]] = {
        "math_verify": judged_directly(cases),
        "pool": judged_by_pool(pool, cases, may_time_out=True),
    }
    counts: dict[str, dict[str, int]] = {}
    for name, (verdicts, _) in found.items():
        right = [(verdict, each[2]) for verdict, each in zip(verdicts, asked, strict=True)]
        counts[name] = {
            "agreement": sum(a == b for a, b in right),
            "false_positives": sum(a and not b for a, b in right),
            "false_negatives": sum(b and not a for a, b in right),
        }
    values: dict[str, tuple[float, float]] = {
        f"pairs_{each}": (counts["pool"][each], counts["math_verify"][each])
        for each in counts["pool"]
    }
    values["pairs_rate"] = found["pool"][1], found["math_verify"][1]
    units = dict.fromkeys(values, "pairs") | {"pairs_rate": "pairs/s"}
    figures = [
        Figure(
            name,
            units[name],
            ours,
            len(asked),
            (ours, ours),
            theirs,
            BASELINE,
            ours / max(1, theirs),
            "count",
            "none",
        )
        for name, (ours, theirs) in values.items()
    ]
    return figures, {"pairs": len(asked), **counts}


def slow_cases(count: int) -> list[Case]:
    """Distinct pairs that only sympy can judge."""
    wanted, seed = list[Case](), 1
    while len(wanted) < count:
        fresh = cases(10 * count, seed)
        wanted += [each for each in fresh if judge_exactly(*each) is None]
        wanted, seed = list(dict.fromkeys(wanted)), seed + 1
    return wanted[:count]


def in_turns(pool: VerifierPool, asked: list[Case]) -> tuple[Measured, list[dict[str, object]]]:
    """Rates, and the answers on which the pool and math-verify differ."""
    found: Measured = {"direct": [], "uncached": [], "cached": []}
    differences: list[dict[str, object]] = []
    size = len(asked) // CHUNKS
    for start in range(0, len(asked), size):
        pairs = asked[start : start + size]
        chunk = texts_of(pairs)
        theirs, rate = judged_directly(chunk)
        found["direct"].append(rate)
        ours, rate = judged_by_pool(pool, chunk)
        found["uncached"].append(rate)
        again, rate = judged_by_pool(pool, chunk)
        found["cached"].append(rate)
        assert again == ours, "the cache says what was found"
        differences += [
            {"gold": gold, "answer": answer, "pool": a, "math_verify": b}
            for (gold, answer), a, b in zip(pairs, ours, theirs, strict=True)
            if a != b
        ]
    return found, differences


def rates(measured: Measured, prefix: str = "") -> list[Figure]:
    """Rates and their ratios to math-verify."""
    direct = measured["direct"]
    return [
        mean_figure(f"{prefix}{name}", "answers/s", measured[name], direct, BASELINE)
        for name in ("uncached", "cached")
    ] + [
        ratio_figure(
            f"{prefix}{name}_ratio", [a / b for a, b in zip(measured[name], direct, strict=True)]
        )
        for name in ("uncached", "cached")
    ]


def ratio_figure(name: str, ratios: list[float]) -> Figure:
    """The median over the chunks and the ends of the middle half, which a busy machine disturbs least."""
    low, middle, high = statistics.quantiles(ratios, n=4)
    return Figure(
        name, "ratio", middle, len(ratios), (low, high), statistic="median", spread_kind="quartiles"
    )


def slowest(name: str, values: list[float]) -> Figure:
    """The worst of many, and what most of them are like."""
    low, *_, high = statistics.quantiles(values, n=20)
    return Figure(
        name,
        "s",
        max(values),
        len(values),
        (low, high),
        float(HOSTILE_TIMEOUT_S),
        "the limit of one answer",
        max(values) / HOSTILE_TIMEOUT_S,
        "maximum",
        "5th and 95th percentile",
    )


def hostile_figures(names: list[str]) -> list[Figure]:
    """The slowest verdicts on the machine as it is, and on one whose cores are all taken."""
    figures = []
    for count in (0, HOGS):
        with hogs(count):
            hostile_s, ordinary_s = latest(CHILDREN, names)
        where = f"_beside_{count}_hogs" if count else ""
        figures += [
            slowest(f"hostile{where}", hostile_s),
            slowest(f"ordinary_behind_hostile{where}", ordinary_s),
        ]
    return figures


@click.command()
@options
def main(path: Path, quick: bool) -> None:
    """Answers per second, uncached and cached, whether the verdicts are the same, and the slowest verdicts."""
    began_s = time.monotonic()
    measured = commit()
    asked = cases(QUICK_ANSWERS if quick else ANSWERS)
    model = like_models(QUICK_ANSWERS if quick else ANSWERS)
    slow = slow_cases(QUICK_SLOW_ANSWERS if quick else SLOW_ANSWERS)
    pool = VerifierPool(CHILDREN, TIMEOUT_S)
    try:
        judged_directly([("x+1", r"\boxed{1+x}")])
        judged_by_pool(
            pool, texts_of([(rf"\ln x+{n}", rf"{n}+\ln x") for n in range(4)])
        )  # all have started
        model_found, model_differences = in_turns(pool, model)
        found, differences = in_turns(pool, asked)
        slow_found, slow_differences = in_turns(pool, slow)
        pair_figures, pair_counts = compared(pool)
    finally:
        pool.close()
    hostile = list(HOSTILE)[:: len(HOSTILE) // QUICK_HOSTILE] if quick else list(HOSTILE)
    figures = [*rates(model_found, "model_"), *rates(found, "short_"), *rates(slow_found, "hard_")]
    figures += pair_figures
    figures += hostile_figures(hostile)
    settings = {
        "model_answers": len(model),
        "short_answers": len(asked),
        "hard_answers": len(slow),
        "hostile_answers": len(hostile),
        "hostile_timeout_s": HOSTILE_TIMEOUT_S,
        "children": CHILDREN,
        "chunks": CHUNKS,
        "kinds": {make.__name__: share for make, share in KINDS},
    }
    by_children = {
        name: sum(judge_exactly(gold, answer) is None for gold, answer in each) / len(each)
        for name, each in (("model", model), ("short", asked))
    }
    distinct = {(each["gold"], each["answer"]): each for each in model_differences}
    differences += slow_differences
    details = {
        "share_judged_by_children": by_children,
        "shipped_pairs": pair_counts,
        "different_verdicts": len(differences),
        "differences": differences[:20],
        "different_model_verdicts": len(model_differences),
        "different_model_pairs": len(distinct),
        "model_differences": list(distinct.values())[:40],
    }
    report = Report("verifier", quick, settings, figures, details, measured)
    report.wall_s = time.monotonic() - began_s
    report.write(path)
    for each in figures:
        low, high = each.spread
        click.echo(f"{each.name}: {each.value:.2f} {each.unit} ({low:.2f} to {high:.2f})")
    click.echo(
        f"different verdicts: {len(differences)} of {len(asked) + len(slow)} {differences[:10]}"
    )
    click.echo(
        f"of model answers: {len(model_differences)} of {len(model)} {list(distinct.values())[:10]}"
    )


if __name__ == "__main__":
    main()
