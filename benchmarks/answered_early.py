"""Stored outputs of public models, cut where `scorer.stop_when_answered` would end them: verdicts and tokens.

python -m benchmarks.answered_early [--quick] [--outputs FOLDER] [--tokenizer FILE] --json FILE

The outputs are files of public repositories, as their authors stored them (`FILES` names repository, commit and path);
they are no part of this repository and must lie in the folder. Every text is judged whole, with its question and gold
answer, and again as it would have ended: it is read token by token, and ends with the token at which the rule says so.
Tokens are those of the tokenizer; without one, pieces of four characters.

Three rules, so that the choice can be seen: `box`, at once with the first closed box that is not to be filled in;
`line`, with its line; `paragraph`, the rule of the program (`common/prompts/answer_end.py`). A different verdict is one
with another reward; a different answer need not be one. All of them are in the details.
"""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import click
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from benchmarks.results import ROOT, Figure, LeftOut, Report, commit, options
from prefixrl.common.prompts.answer_end import AnswerWatch
from prefixrl.common.prompts.extract import extract_answer
from prefixrl.scorer.verifier.pool import VerifierPool
from prefixrl.scorer.verifier.rules.verify import Judgement

OUTPUTS = ROOT / "runs" / "stored_outputs"
QUICK_TEXTS = 60
CHILDREN = 2
TIMEOUT_S = 5
PATIENCE_S = 3600.0
PIECE_CHARS = 4
MOST_LISTED = 200
TAIL_CHARS = 160
BASELINE = "the whole texts"


class StoredText(NamedTuple):
    """An output of a model."""

    question: str
    gold: str
    text: str


@dataclass(frozen=True)
class StoredFile:
    """A file of outputs in a public repository."""

    name: str
    """Its set, and its file in the folder."""
    repository: str
    commit: str
    path: str
    read: Callable[[str], Iterator[StoredText]]


def read_samples(content: str) -> Iterator[StoredText]:
    """Yield the outputs of a file with a line per problem and several outputs in it."""
    for line in content.splitlines():
        row = json.loads(line)
        for text in row["code"]:
            yield StoredText(row["question"], row["gt"], text)


def read_paths(content: str) -> Iterator[StoredText]:
    """Yield the outputs of a file with a list of problems, whose gold answer is the box of a solution."""
    for row in json.loads(content):
        gold = extract_answer(row["groundtruth"])
        for output in row["output"]:
            yield StoredText(row["question"], gold or "", output["text"])


_TORA = "src/outputs/llm-agents/tora-{}/gsm8k/test_tora_-1_seed0_t0.0_s0_e1319.jsonl"
FILES = (
    StoredFile(
        "qwen_math.jsonl",
        "QwenLM/Qwen2.5-Math",
        "a45202bd16f1ec06f433442dc1152d0074773465",
        "evaluation/data/eval_rm_maj_example/math_cot_100.jsonl",
        read_samples,
    ),
    StoredFile(
        "openr_math.json",
        "cuiluyi/openr",
        "10d3cbb57e12da6cd8fa92c73f61651389ed4858",
        "train/solution_selector/train_data1.json",
        read_paths,
    ),
    StoredFile(
        "tora_70b_gsm8k.jsonl",
        "microsoft/ToRA",
        "213c1c995038c73fab10343814df7a42f990f026",
        _TORA.format("70b-v1.0"),
        read_samples,
    ),
    StoredFile(
        "tora_34b_gsm8k.jsonl",
        "microsoft/ToRA",
        "213c1c995038c73fab10343814df7a42f990f026",
        _TORA.format("code-34b-v1.0"),
        read_samples,
    ),
)


# --- the rules ------------------------------------------------------------------------------------


def box_rule() -> Callable[[str], bool]:
    """Return a rule that ends a text with the piece that closes a box."""
    written = ""

    def ends(piece: str) -> bool:
        nonlocal written
        written += piece
        return "}" in piece and _would_end(written)

    return ends


def line_rule() -> Callable[[str], bool]:
    """Return a rule that ends a text with the first line that ends behind a closed box."""
    written = ""

    def ends(piece: str) -> bool:
        nonlocal written
        written += piece
        before, line_end, _ = written.rpartition("\n")
        return "\n" in piece and bool(line_end) and _would_end(before)

    return ends


def paragraph_rule() -> Callable[[str], bool]:
    """Return the rule of the program."""
    return AnswerWatch().add_piece


def _would_end(written: str) -> bool:
    """Return True if a text would be complete if its paragraph ended here."""
    watch = AnswerWatch()
    watch.add_piece(written)
    return watch.add_piece("\n\n")


RULES: dict[str, Callable[[], Callable[[str], bool]]] = {
    "box": box_rule,
    "line": line_rule,
    "paragraph": paragraph_rule,
}


class Pieces:
    """A text as tokens, and the text that each adds."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def of(self, text: str) -> list[str]:
        """Return the pieces of a text; together they are the text."""
        if self._tokenizer is None:
            return [text[at : at + PIECE_CHARS] for at in range(0, len(text), PIECE_CHARS)]
        stream = DecodeStream(skip_special_tokens=False)
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        pieces = [stream.step(self._tokenizer, token) or "" for token in ids]
        return pieces if "".join(pieces) == text else list(text)


def cut_size(pieces: list[str], ends: Callable[[str], bool]) -> int:
    """Return the number of pieces with which a rule ends a text; all of them if it does not."""
    return next((size for size, piece in enumerate(pieces, 1) if ends(piece)), len(pieces))


# --- verdicts -------------------------------------------------------------------------------------


def judged(pool: VerifierPool, texts: list[StoredText]) -> list[Judgement]:
    """Return the verdict on every text."""
    began_s = time.monotonic()
    for key, stored in enumerate(texts):
        pool.submit(key, stored.text, stored.gold, stored.question)
    verdicts: dict[int, Judgement] = {}
    while pool.pending:
        if time.monotonic() - began_s > PATIENCE_S:
            raise click.ClickException(f"{pool.pending} texts are still without a verdict")
        pool.wait(0.05)
        verdicts |= dict(pool.poll())
    return [verdicts[key] for key in range(len(texts))]


@dataclass
class Counts:
    """The result of a rule on a set."""

    texts: int = 0
    ended: int = 0
    """Texts that it ends before their end."""
    tokens: int = 0
    kept_tokens: int = 0
    different_answers: int = 0
    different_verdicts: int = 0

    def add(self, other: "Counts") -> None:
        """Add the counts of another set."""
        for name, count in vars(other).items():
            setattr(self, name, getattr(self, name) + count)


Difference = dict[str, Any]


def compared(
    pool: VerifierPool,
    name: str,
    texts: list[StoredText],
    pieces: list[list[str]],
    whole: list[Judgement],
    rule: str,
) -> tuple[Counts, list[Difference]]:
    """Return what a rule does to the texts of a set, and every text with another answer."""
    sizes = [cut_size(each, RULES[rule]()) for each in pieces]
    ended = [place for place, size in enumerate(sizes) if size < len(pieces[place])]
    cut = {place: "".join(pieces[place][: sizes[place]]) for place in ended}
    verdicts = judged(pool, [texts[place]._replace(text=cut[place]) for place in ended])
    counts = Counts(len(texts), len(ended), sum(map(len, pieces)), sum(sizes))
    differences: list[Difference] = []
    for place, verdict in zip(ended, verdicts, strict=True):
        stored, before = texts[place], whole[place]
        is_other = verdict.reward != before.reward
        counts.different_verdicts += is_other
        if verdict.extracted == before.extracted and not is_other:
            continue
        counts.different_answers += 1
        differences.append(
            {
                "set": name,
                "rule": rule,
                "text": place,
                "gold": stored.gold,
                "whole": [before.extracted, before.reward],
                "cut": [verdict.extracted, verdict.reward],
                "end": cut[place][-TAIL_CHARS:],
                "after": stored.text[len(cut[place]) :][:TAIL_CHARS],
            }
        )
    return counts, differences


def figures_of(name: str, rule: str, counts: Counts) -> list[Figure]:
    """Return the figures of a rule on a set."""
    saved = counts.tokens - counts.kept_tokens
    values = (
        ("tokens saved", "share", saved / max(1, counts.tokens), counts.tokens),
        ("texts ended early", "texts", counts.ended, counts.texts),
        ("different verdicts", "texts", counts.different_verdicts, counts.texts),
    )
    return [
        Figure(
            f"{name}, {rule}: {what}",
            unit,
            value,
            n,
            (value, value),
            baseline_name=BASELINE,
            statistic="count",
            spread_kind="none",
        )
        for what, unit, value, n in values
    ]


def stored_texts(folder: Path, is_quick: bool) -> dict[str, list[StoredText]]:
    """Return the texts with a gold answer, by set; LeftOut names the files that are missing."""
    missing = [each for each in FILES if not (folder / each.name).is_file()]
    if missing:
        lines = [
            f"{folder / each.name} = {each.path} of github.com/{each.repository} at {each.commit}"
            for each in missing
        ]
        raise LeftOut("stored outputs are missing; put them there: " + "; ".join(lines))
    sets = {}
    for each in FILES:
        content = (folder / each.name).read_text(encoding="utf-8")
        texts = [stored for stored in each.read(content) if stored.gold]
        sets[Path(each.name).stem] = texts[:QUICK_TEXTS] if is_quick else texts
    return sets


@click.command()
@click.option(
    "--outputs",
    type=click.Path(file_okay=False, path_type=Path),
    default=OUTPUTS,
    show_default=True,
    help="The folder of the stored outputs.",
)
@click.option(
    "--tokenizer",
    type=click.Path(dir_okay=False, exists=True, path_type=Path),
    help="A tokenizer.json that makes tokens of the texts.",
)
@options
def main(path: Path, quick: bool, outputs: Path, tokenizer: Path | None) -> None:
    """Verdicts on whole and cut texts, and the tokens that would not have been written."""
    started_s = time.monotonic()
    measured = commit()
    sets = stored_texts(outputs, quick)
    pieces_of = Pieces(None if tokenizer is None else Tokenizer.from_file(str(tokenizer)))
    totals = {rule: Counts() for rule in RULES}
    figures: list[Figure] = []
    differences: list[Difference] = []
    right: dict[str, float] = {}
    pool = VerifierPool(CHILDREN, TIMEOUT_S)
    try:
        for name, texts in sets.items():
            pieces = [pieces_of.of(stored.text) for stored in texts]
            whole = judged(pool, texts)
            right[name] = sum(verdict.reward for verdict in whole) / len(whole)
            for rule, total in totals.items():
                counts, differing = compared(pool, name, texts, pieces, whole, rule)
                total.add(counts)
                figures += figures_of(name, rule, counts)
                differences += differing
    finally:
        pool.close()
    for rule, total in totals.items():
        figures += figures_of("all", rule, total)
    settings = {
        "files": [
            {"repository": each.repository, "commit": each.commit, "path": each.path}
            for each in FILES
        ],
        "tokens": "pieces of four characters" if tokenizer is None else tokenizer.parent.name,
        "children": CHILDREN,
        "timeout_s": TIMEOUT_S,
    }
    # The program's own rule first: its differences are never left out.
    differences.sort(key=lambda each: each["rule"] != "paragraph")
    details = {
        "share_right": right,
        "counts": {rule: vars(total) for rule, total in totals.items()},
        "differences": len(differences),
        "different_answers": differences[:MOST_LISTED],
    }
    Report("answered_early", quick, settings, figures, details, measured).finish(path, started_s)


if __name__ == "__main__":
    main()
