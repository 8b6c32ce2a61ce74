"""Prefixes that have an answer already, and prefixes with control tokens, from the workers to the metrics."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from prefixrl.common.engines.interface.base import Continuation
from prefixrl.common.engines.make import make_engine
from prefixrl.learner.broker.batches import batch_group
from prefixrl.learner.run.fractions import batch_fractions
from prefixrl.rollout.loop import pack_row
from support.models.base_models import base_model, run_of, scored
from support.paths import EXAMPLE


@pytest.mark.parametrize(
    ("opening", "is_answered"),
    [
        ("so \\boxed{3}", True),
        ("Let us add them up: so \\boxed{3} so", True),
        ("so \\boxed{3", False),
        ("so 3", False),
    ],
)
def test_a_prefix_with_a_closed_box_is_counted_as_an_answer_of_the_adapter(
    opening: str, is_answered: bool, tmp_path: Path
) -> None:
    target = base_model(EXAMPLE / "target", tmp_path / "target")
    config = run_of(target)
    groups = scored(config, make_engine("transformers", str(target), "scorer", config), opening)
    assert {verdict.is_answered for group in groups for verdict in group.verdicts} == {is_answered}
    plain = scored(config, make_engine("transformers", str(target), "scorer", config), "so")
    verdicts = [
        msgspec.structs.replace(each, parts={"form": float(place)})
        for place, each in enumerate(plain[0].verdicts)
    ]
    plain = [msgspec.structs.replace(plain[0], verdicts=tuple(verdicts)), *plain[1:]]
    batch = [batch_group(group) for group in (*groups, *plain)]
    assert batch_fractions(batch)["reward_part/form"] == (len(verdicts) - 1) / 2
    assert batch_fractions(batch)["answer_in_prefix_fraction"] == (0.5 if is_answered else 0.0)


def test_rows_with_control_tokens_are_counted(tmp_path: Path) -> None:
    target = base_model(EXAMPLE / "target", tmp_path / "target")
    config = run_of(target)
    groups = scored(config, make_engine("transformers", str(target), "scorer", config), "so")
    tokens = np.asarray([7, 3], dtype=np.int32)
    row = Continuation(tokens, np.zeros(2, np.float32), "length", ((0, 2),))
    packed = pack_row(row, {0: "d"}, "so", has_control=True)
    assert packed.has_control and not pack_row(row, {0: "d"}, "so").has_control
    changed = msgspec.structs.replace(
        groups[0], prefixes=msgspec.structs.replace(groups[0].prefixes, rows=(packed,))
    )
    batch = [batch_group(group) for group in (changed, *groups[1:4])]
    assert batch_fractions(batch)["control_tokens_fraction"] == 0.25
