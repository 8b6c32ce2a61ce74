r"""Build the advice example: problems, an adapter that learns to advise, and two targets that obey.

    python deploy/examples/advice/build.py [--out DIR] [--steps N] [--seed S]

    adapter    "largest 3 1 4 1 5 9 2 6"                    ->  "keep the biggest digit"
    target     "largest 3 1 4 1 5 9 2 6 / advice: keep ..." ->  "Let us find the biggest one: 3 3 4 ... so \boxed{9}"

The task. The problems and procedures are those of the arithmetic example. A target carries out four procedures without
errors and follows the one that the advice names, but it does not know which of them a question needs. Without advice
it chooses by habit, and is right on a quarter of the problems; so it is with every fixed advice. The adapter knows the
four texts of advice and hardly looks at the question. It has to find out from rewards of 0 and 1 which text helps.

The adapter writes text, and the target reads it in its question with a tokenizer of its own. `target` shares the
adapter's tokenizer, `other_target` does not. An adapter that was trained with one of them advises the other one, too.

The result is the same on every run with one thread on one type of CPU.
"""

import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import click
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from prefixrl.deploy.examples.arithmetic.build import (
    ADAPTER,
    ASSISTANT,
    EOS,
    HABIT,
    PAD,
    TARGET,
    TAUGHT_HABIT,
    TAUGHT_RIGHT,
    UNKNOWN,
    USER,
    Lesson,
    Shape,
    batches,
    make_model,
    make_tokenizer,
    train,
    wrapped,
)
from prefixrl.deploy.examples.arithmetic.problems import (
    FAMILIES,
    HELDOUT_ROWS,
    OPENINGS,
    TRAIN_ROWS,
    Problem,
    stream,
    write_jsonl,
)
from prefixrl.deploy.examples.builder import begin, command_of, save

ADVICE = (
    "add all the digits",
    "keep the biggest digit",
    "take plus and minus in turn",
    "count the digits above four",
)
"""The advice that names each procedure."""
PROMPT = "{problem}\nadvice: {prefix}"
"""`target.prompt_template` of the run file."""
BARE_SHARE = 0.25
"""Share of the target's lessons without advice."""
OTHER_TARGET = Shape(hidden=96, layers=4, heads=3)


def questions_of_target(problems: Iterator[Problem], rng: random.Random) -> Iterator[Lesson]:
    """Yield what a target is taught: it obeys advice, and follows its habit where there is none."""
    for problem in problems:
        if rng.random() < BARE_SHARE:
            procedure = rng.choices(range(len(OPENINGS)), HABIT)[0]
            yield problem.question, problem.worked(procedure)
        else:
            procedure = rng.randrange(len(ADVICE))
            question = PROMPT.replace("{problem}", problem.question)
            yield question.replace("{prefix}", ADVICE[procedure]), problem.worked(procedure)


def questions_of_adapter(problems: Iterator[Problem], rng: random.Random) -> Iterator[Lesson]:
    """Yield what the adapter is taught: to give advice, most often the habitual one."""
    habitual = HABIT.index(max(HABIT))
    for problem in problems:
        right = FAMILIES.index(problem.family)
        shares = [(1.0 - TAUGHT_HABIT - TAUGHT_RIGHT) / (len(ADVICE) - 2)] * len(ADVICE)
        shares[right] = TAUGHT_RIGHT
        shares[habitual] = TAUGHT_HABIT + (TAUGHT_RIGHT if right == habitual else 0.0)
        yield problem.question, ADVICE[rng.choices(range(len(ADVICE)), shares)[0]]


def piece_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE in which each word is a token with the space before it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1000,
        special_tokens=[PAD, EOS, UNKNOWN, USER, ASSISTANT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    names = [family.name for family in FAMILIES]
    tokenizer.train_from_iterator([PROMPT, *ADVICE, *OPENINGS, *names], trainer)
    return wrapped(tokenizer)


def build(out: Path, steps: int, seed: int) -> None:
    """Write problems, the adapter and both targets to `out`."""
    begin(seed)
    out.mkdir(parents=True, exist_ok=True)
    taken: set[tuple[int, ...]] = set()
    for name, rows in (("heldout", HELDOUT_ROWS), ("train", TRAIN_ROWS)):
        drawn = islice(stream(random.Random(f"{seed} {name}"), taken), rows)
        write_jsonl(out / f"{name}.jsonl", name, list(drawn))
    words, pieces = make_tokenizer(("advice", *ADVICE)), piece_tokenizer()
    for name, shape, tokenizer, lessons, its_steps in (
        ("target", TARGET, words, questions_of_target, steps),
        ("adapter", ADAPTER, words, questions_of_adapter, steps),
        # Twice as many: an answer has more of its tokens.
        ("other_target", OTHER_TARGET, pieces, questions_of_target, 2 * steps),
    ):
        model = make_model(shape, tokenizer)
        size = sum(parameter.numel() for parameter in model.parameters())
        click.echo(f"{name}: {size / 1e6:.2f} M parameters, {its_steps} steps")
        problems = stream(random.Random(f"{seed} {name}"), set(taken))
        rng = random.Random(f"{seed} lessons of the {name}")
        train(model, batches(tokenizer, lessons(problems, rng)), its_steps)
        save(model, tokenizer, out / name)


if __name__ == "__main__":
    command_of(build, Path(__file__).parent, 800)()
