"""Build the start of the direct arithmetic example: a small policy that works problems out, but mostly the wrong way.

    python deploy/examples/arithmetic_direct/build.py [--out DIR] [--steps N] [--seed S]

Problems, tokenizer and worked answers are those of `deploy/examples/arithmetic`. The policy is taught whole answers, on
digits that neither problem file holds. Which procedure an answer announces leans towards one habit and only a little
towards the question (`adapter_answer`); the procedure is then carried out without a fault. So the policy can do all
four, and decodes the habitual one greedily whatever is asked: it is right on about a quarter of the problems.
Reinforcement has to find which one a question asks for, from rewards of 0 and 1 for whole answers.

The result is the same on every run with one thread on one type of CPU.
"""

import json
import random
from pathlib import Path

import click
from transformers import AutoModelForCausalLM

from prefixrl.deploy.examples.arithmetic.build import (
    Shape,
    adapter_answer,
    batches,
    make_model,
    make_tokenizer,
    right_by_family,
    train,
    worked_lessons,
)
from prefixrl.deploy.examples.arithmetic.problems import FAMILIES, OPENINGS, Problem, stream
from prefixrl.deploy.examples.builder import begin, command_of, save

POLICY = Shape(hidden=64, layers=2, heads=2)

PROBLEMS = Path(__file__).parent.parent / "arithmetic"


def whole_answer(problem: Problem, rng: random.Random) -> str:
    """An opening drawn with the taught shares, and the procedure it announces carried out."""
    return problem.worked(OPENINGS.index(adapter_answer(problem, rng)))


def read_problems(name: str) -> list[Problem]:
    """A problem file of the arithmetic example."""
    by_name = {family.name: family for family in FAMILIES}
    rows = (PROBLEMS / name).read_text(encoding="utf-8").splitlines()
    words = [json.loads(row)["question"].split() for row in rows]
    return [Problem(by_name[family], tuple(map(int, digits))) for family, *digits in words]


def build(out: Path, steps: int, seed: int) -> None:
    """Write the policy to `out/policy`, then print its accuracy on the held-out problems."""
    begin(seed)
    held_out = read_problems("heldout.jsonl")
    taken = {problem.digits for problem in (*held_out, *read_problems("train.jsonl"))}
    tokenizer = make_tokenizer()
    policy = make_model(POLICY, tokenizer)
    size = sum(parameter.numel() for parameter in policy.parameters())
    click.echo(f"policy: {size / 1e6:.2f} M parameters, {steps} steps")
    lessons = stream(random.Random(f"{seed} policy"), taken)
    rng = random.Random(f"{seed} answers of the policy")
    train(policy, batches(tokenizer, worked_lessons(lessons, whole_answer, rng)), steps)
    folder = out / "policy"
    save(policy, tokenizer, folder)
    saved = AutoModelForCausalLM.from_pretrained(folder)
    for temperature in (0.0, 1.0):
        nothing: list[list[int]] = [[] for _ in held_out]
        shares = right_by_family(saved, tokenizer, held_out, nothing, temperature)
        cells = ", ".join(
            f"{family.name} {share:.3f}" for family, share in zip(FAMILIES, shares, strict=True)
        )
        click.echo(f"right at temperature {temperature}: {sum(shares) / len(shares):.3f} ({cells})")


if __name__ == "__main__":
    command_of(build, Path(__file__).parent, 1500)()
