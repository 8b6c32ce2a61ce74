r"""Build the advice example: problems, an adapter that learns to advise, and a target that obeys.

    python deploy/examples/advice/build.py [--out DIR] [--steps N] [--seed S]

    adapter    "largest 3 1 4 1 5 9 2 6"                    ->  "keep the biggest digit"
    target     "advice: keep ... / largest 3 1 4 1 5 9 2 6" ->  "Let us find the biggest one: 3 3 4 ... so \boxed{9}"

The task. The problems and procedures are those of the arithmetic example. A target carries out four procedures without
errors and follows the one that the advice names, but it does not know which of them a question needs. Without advice
it chooses by habit, and is right on a quarter of the problems; so it is with every fixed advice. The adapter knows the
four texts of advice and hardly looks at the question. It has to find out from rewards of 0 and 1 which text helps.

The result is the same on every run with one thread on one type of CPU.
"""

import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import click
from transformers import AutoModelForCausalLM

from prefixrl.deploy.examples.arithmetic import build as arithmetic
from prefixrl.deploy.examples.arithmetic.build import (
    ADAPTER,
    HABIT,
    TAUGHT_HABIT,
    TAUGHT_RIGHT,
    Lesson,
    batches,
    make_model,
    make_tokenizer,
    train,
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
PROMPT = "advice: {prefix}\n{problem}"
"""`target.prompt_template` of the run file."""
PROCEDURES = Path(arithmetic.__file__).parent / "target"
"""The target of the arithmetic example, with which the target begins."""
BARE_SHARE = 0.25
"""Share of the target's lessons without advice."""


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


def build(out: Path, steps: int, seed: int) -> None:
    """Write problems, the adapter and its target to `out`."""
    begin(seed)
    out.mkdir(parents=True, exist_ok=True)
    taken: set[tuple[int, ...]] = set()
    for name, rows in (("heldout", HELDOUT_ROWS), ("train", TRAIN_ROWS)):
        drawn = islice(stream(random.Random(f"{seed} {name}"), taken), rows)
        write_jsonl(out / f"{name}.jsonl", name, list(drawn))
    tokenizer = make_tokenizer(("advice", *ADVICE))
    # It knows the procedures already; the words of the advice are new.
    target = AutoModelForCausalLM.from_pretrained(PROCEDURES)
    target.resize_token_embeddings(len(tokenizer))
    for name, model, lessons, its_steps in (
        ("target", target, questions_of_target, steps),
        ("adapter", make_model(ADAPTER, tokenizer), questions_of_adapter, 4 * steps),
    ):
        size = sum(parameter.numel() for parameter in model.parameters())
        click.echo(f"{name}: {size / 1e6:.2f} M parameters, {its_steps} steps")
        problems = stream(random.Random(f"{seed} {name}"), set(taken))
        rng = random.Random(f"{seed} lessons of the {name}")
        train(model, batches(tokenizer, lessons(problems, rng)), its_steps)
        save(model, tokenizer, out / name)


if __name__ == "__main__":
    command_of(build, Path(__file__).parent, 200)()
