"""Fields of rows and verdicts whose means are figures of every iteration."""

from typing import Annotated

import msgspec
import pytest

from prefixrl.common.wire.messages.fields import Count, RowFigure, row_figures
from prefixrl.common.wire.messages.groups import Row, TextVerdict, Verdict
from prefixrl.learner.broker import batches
from prefixrl.learner.run.fractions import batch_fractions
from support.messages import group, row, scored_group, verdict
from support.paths import ROOT

ALL = [*row_figures(Row).values(), *row_figures(Verdict).values()]


def test_every_marked_field_is_explained_in_the_docs() -> None:
    page = (ROOT / "docs/data.md").read_text(encoding="utf-8")
    assert len(ALL) >= 4 and [name for name in ALL if f"`{name}`" not in page] == []


def test_no_two_fields_have_one_figure() -> None:
    assert len(set(ALL)) == len(ALL)
    assert row_figures(TextVerdict) == row_figures(Verdict)


def test_a_field_that_is_marked_anew_is_a_figure_without_another_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Marked(Verdict, kw_only=True):
        retries: Annotated[Count, RowFigure("retries_mean")] = 0

    plain = [msgspec.structs.asdict(verdict()) for _ in range(3)]
    verdicts = [Marked(**fields | {"retries": place}) for place, fields in enumerate(plain)]
    monkeypatch.setattr(batches, "Verdict", Marked)
    described = batches.batch_group(scored_group(group(0, row([3]), row([3]), row([3])), *verdicts))
    assert batch_fractions([described])["retries_mean"] == 1.0


def test_parts_of_a_reward_are_told_by_row_and_a_text_that_a_rule_settled_has_none() -> None:
    texts = [verdict(parts={"form": each, "right": 1.0}) for each in (0.25, 0.75)]
    several = verdict(0.5, continuations=(*texts, verdict(status="error")))
    whole = [
        several,
        verdict(parts={"form": 1.0}),
        verdict(status="error"),
        verdict(0.0, status="no_answer"),
    ]
    described = batches.batch_group(scored_group(group(0, *[row([3])] * 4), *whole))
    assert described.row_parts == {"form": (0.5, 1.0, 0.0), "right": (1.0, 0.0, 0.0)}
    assert len(described.rewards) == 3
    assert batches.batch_group(scored_group(group(0, row([3])), verdict())).row_parts == {}
