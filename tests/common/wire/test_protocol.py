"""The number of the wire format changes with every message, and with nothing else."""

from typing import Annotated, Literal

import msgspec
import pytest
from msgspec import Meta

from prefixrl.common.journal.records import JournalRecord
from prefixrl.common.run.directory_format import FORMAT
from prefixrl.common.wire.messages.fields import Message
from prefixrl.common.wire.messages.learner import FromBroker, ToBroker
from prefixrl.common.wire.messages.protocol import DIGEST_BITS, PROTOCOL, schema_digest
from prefixrl.common.wire.messages.weights import FromWeights, ToWeights


class Inner(msgspec.Struct, frozen=True):
    """A part."""

    size: int


def digest(fields: list[tuple[str, object]], text: str = "A message.", tag: str = "Probe") -> int:
    struct = msgspec.defstruct(
        "Probe", fields, bases=(Message,), tag=tag, namespace={"__doc__": text}, kw_only=True
    )  # type: ignore[arg-type]
    return schema_digest(struct)


FIELDS: list[tuple[str, object]] = [("name", str), ("count", int), ("part", Inner)]


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param([*FIELDS, ("more", int)], id="a field more"),
        pytest.param(FIELDS[:2], id="a field less"),
        pytest.param([("title", str), *FIELDS[1:]], id="another name"),
        pytest.param([("name", bytes), *FIELDS[1:]], id="another kind"),
        pytest.param([("name", Literal["a"]), *FIELDS[1:]], id="fewer values"),
        pytest.param([FIELDS[0], ("count", Annotated[int, Meta(ge=0)]), FIELDS[2]], id="a bound"),
        pytest.param([FIELDS[0], ("count", int, 1), FIELDS[2]], id="a default"),
        pytest.param([*FIELDS[:2], ("part", Inner | None)], id="an absent part"),
    ],
)
def test_whatever_changes_an_encoded_message_changes_the_number(
    changed: list[tuple[str, object]],
) -> None:
    assert digest(changed) != digest(FIELDS)


def test_another_tag_changes_the_number_and_a_text_or_the_order_of_fields_does_not() -> None:
    assert digest(FIELDS, tag="Other") != digest(FIELDS)
    assert digest(FIELDS, text="Another text.") == digest(FIELDS)
    assert digest(FIELDS[::-1]) == digest(FIELDS)


def test_protocol_and_journal_format_follow_from_the_schemas_and_fit_every_reader() -> None:
    assert schema_digest(ToBroker, FromBroker, ToWeights, FromWeights) == PROTOCOL
    assert schema_digest(JournalRecord) == FORMAT != PROTOCOL
    assert max(FORMAT, PROTOCOL) < 2**DIGEST_BITS
