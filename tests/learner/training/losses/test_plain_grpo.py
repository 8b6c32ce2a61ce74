"""The plain loop against the product: one step on one batch gives the same weights, and delays are what they say."""

import ast
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from benchmarks import plain_grpo
from benchmarks.aged_run import AgedRun, Target
from benchmarks.openings.arms import RUN_FILE, Setting, Size, config_of
from benchmarks.plain_grpo import Batch, PlainLoop, Recipe
from prefixrl.common.wire.messages.groups import Prompt, Verdict
from prefixrl.common.wire.packing import token_ids
from prefixrl.deploy.examples.letters.build import build
from prefixrl.learner.models.batch import IterationData
from support.messages import verdict
from support.models.tiny_model import DEEPSPEED_WARNINGS

pytestmark = DEEPSPEED_WARNINGS

SIZE = Size(
    (1,), iterations=3, heldout=8, evaluate_every=3, changes=("algorithm.groups_per_iteration=8",)
)
RECIPE = Recipe(
    groups=8,
    samples=8,
    prefix_tokens=6,
    lr=5e-4,
    betas=(0.9, 0.95),
    weight_decay=0.0,
    grad_clip=1.0,
)
QUESTIONS = ["flip abcd", "trade efgh", "next abcd", "sort dcba"]


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An adapter that was hardly taught: it writes tokens of all kinds."""
    out = tmp_path_factory.mktemp("letters")
    build(out, seed=0, steps=12)
    return str(out / "adapter")


class FirstToken(Target):
    """Rewards that follow from a prefix's first token: a target that was not taught would give none."""

    def verdicts(self, asked: Sequence[tuple[Prompt, bytes]]) -> list[Verdict]:
        return [verdict(int(token_ids(tokens)[0]) % 4 / 4) for _, tokens in asked]


def by_first_token(questions: object, prefixes: list[list[int]]) -> list[float]:
    return [(prefix[0] % 4) / 4 for prefix in prefixes]


def plain(adapter: str, delay: int = 0) -> PlainLoop:
    recipe = Recipe(**{**vars(RECIPE), "delay": delay})
    return PlainLoop(adapter, by_first_token, recipe, seed=1)  # type: ignore[arg-type]


def padded(data: IterationData) -> Batch:
    """The product's batch as the plain loop's: prompts on the left, prefixes on the right."""
    rows = list(data.samples.values())
    most, width = max(row.prompt_tokens.size for row in rows), max(row.tokens.size for row in rows)
    ids, seen = (
        torch.zeros(len(rows), most + width, dtype=torch.long),
        torch.zeros(len(rows), most + width).long(),
    )
    logprobs = torch.zeros(len(rows), width)
    for number, row in enumerate(rows):
        begin, end = most - row.prompt_tokens.size, most + row.tokens.size
        ids[number, begin:most] = torch.tensor(row.prompt_tokens)
        ids[number, most:end] = torch.tensor(row.tokens)
        seen[number, begin:end] = 1
        logprobs[number, : row.tokens.size] = torch.tensor(row.logprobs)
    return Batch(ids, seen, seen[:, most:].bool(), logprobs)


def test_steps_on_the_same_batches_give_the_products_weights(adapter: str) -> None:
    config = config_of(RUN_FILE, Setting(0, (f"adapter.model={adapter}",)), 1, SIZE)
    run, loop = AgedRun(config, FirstToken(config)), plain(adapter)
    mine = dict(loop.model.named_parameters())
    first = {name: weights.detach().clone() for name, weights in mine.items()}
    is_told = {name: torch.ones_like(weights, dtype=torch.bool) for name, weights in mine.items()}
    for _ in range(SIZE.iterations):
        run.fill()
        data = run.train().data
        actual = loop.step(padded(data), torch.tensor(data.rewards))
        assert actual["ess"] == pytest.approx(1.0, abs=1e-5)
        for name, weights in run.models.state_dict_for_publication().items():
            # Adam makes whole steps of any gradient: where it is nothing but rounding (a key's bias has none in exact
            # arithmetic), so is the direction of the step.
            is_told[name] &= mine[name].grad.abs() > 1e-6
            assert (mine[name] - weights).detach().abs()[is_told[name]].max() < 1e-6, name
    told, every = (
        sum(int(each.sum()) for each in is_told.values()),
        sum(each.numel() for each in is_told.values()),
    )
    assert told > 0.9 * every
    moved = torch.cat([(mine[name] - first[name]).detach().abs().flatten() for name in mine])
    assert moved.mean() > 1e-4, "weights move by much more than they differ"


def test_a_delay_trains_what_an_older_version_wrote(adapter: str) -> None:
    actual = [plain(adapter, delay) for delay in (0, 2)]
    fresh, late = ([loop.iterate(QUESTIONS * 2)["ess"] for _ in range(4)] for loop in actual)
    assert fresh == pytest.approx([1.0] * 4, abs=1e-5)
    assert late[0] == pytest.approx(1.0, abs=1e-5)
    assert max(late[1:]) < 1.0 - 1e-4


def test_the_yardstick_imports_nothing_of_what_it_measures() -> None:
    tree = ast.parse(Path(plain_grpo.__file__).read_text(encoding="utf-8"))
    imported = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    imported += [
        each.name for node in ast.walk(tree) if isinstance(node, ast.Import) for each in node.names
    ]
    assert not [
        name for name in imported if name.startswith(("prefixrl", "benchmarks", "deepspeed"))
    ]
