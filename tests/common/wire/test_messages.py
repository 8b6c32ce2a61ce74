"""Every message survives its own link; whatever else arrives is Malformed and nothing worse."""

from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import inspect

from prefixrl.common.wire.messages.fields import Role
from prefixrl.common.wire.messages.learner import FromBroker, ToBroker
from prefixrl.common.wire.messages.weights import FromWeights, ToWeights
from prefixrl.common.wire.transport import Malformed, _decode
from security.mutations import Mutator

LINKS: dict[str, Any] = {
    "ToBroker": ToBroker,
    "FromBroker": FromBroker,
    "ToWeights": ToWeights,
    "FromWeights": FromWeights,
}
TYPES = [(name, kind) for name, union in LINKS.items() for kind in get_args(union)]
MUTATIONS = 20_000
SHORT = 3
"""Most items of an example's sequences."""
encode = msgspec.msgpack.Encoder().encode
decoders: dict[str, msgspec.msgpack.Decoder[object]] = {
    name: msgspec.msgpack.Decoder(union) for name, union in LINKS.items()
}


def of_type(kind: Any) -> st.SearchStrategy[Any]:
    """Any value of a message type, within the limits that the type states."""
    return _of(inspect.type_info(kind))


def _of(info: inspect.Type) -> st.SearchStrategy[Any]:
    match info:
        case inspect.Metadata(type=inner):
            return _of(inner)
        case inspect.StructType(cls=cls, fields=fields):
            needed = {field.name: _of(field.type) for field in fields if field.required}
            optional = {field.name: _of(field.type) for field in fields if not field.required}
            return st.fixed_dictionaries(needed, optional=optional).map(
                lambda values: cls(**values)
            )
        case inspect.UnionType(types=types):
            return st.one_of(*map(_of, types))
        case inspect.VarTupleType(item_type=item, max_length=most):
            return st.lists(_of(item), max_size=min(SHORT, most or SHORT)).map(tuple)
        case inspect.TupleType(item_types=items):
            return st.tuples(*map(_of, items))
        case inspect.DictType(key_type=key, value_type=value):
            return st.dictionaries(_of(key), _of(value), max_size=SHORT)
        case inspect.LiteralType(values=values):
            return st.sampled_from(values)
    return _of_scalar(info)


def _of_scalar(info: inspect.Type) -> st.SearchStrategy[Any]:
    match info:
        case inspect.IntType(ge=least, le=most):
            return st.integers(
                -(2**63) if least is None else least, 2**64 - 1 if most is None else most
            )
        case inspect.FloatType(ge=least, le=most):
            return st.floats(least, most, allow_nan=False)
        case inspect.StrType(max_length=most):
            return st.text(max_size=most)
        case inspect.BytesType():
            return st.binary()
        case inspect.BoolType():
            return st.booleans()
        case inspect.NoneType():
            return st.none()
    raise AssertionError(f"no example of {info}")


def decode(link: str, data: bytes) -> object:
    return _decode(decoders[link], data, b"peer")


@pytest.mark.parametrize(("link", "kind"), TYPES, ids=[kind.__name__ for _, kind in TYPES])
def test_every_message_comes_out_as_it_went_in(link: str, kind: type) -> None:
    @settings(max_examples=15)
    @given(message=of_type(kind))
    def check(message: object) -> None:
        received = decode(link, encode(message))
        assert type(received) is kind
        assert received == message

    check()


@pytest.mark.parametrize(("link", "kind"), TYPES, ids=[kind.__name__ for _, kind in TYPES])
def test_unknown_fields_missing_fields_wrong_types_and_truncation_are_refused(
    link: str, kind: type
) -> None:
    @settings(max_examples=3)
    @given(message=of_type(kind))
    def check(message: object) -> None:
        fields = msgspec.msgpack.decode(encode(message))
        refused(link, encode(fields | {"surprise": 1}))
        refused(link, encode(fields | {"type": "Surprise"}))
        refused(link, encode([1, 2]))
        for name in fields:
            refused(link, encode(fields | {name: {"not": object.__name__}}))
        for name in fields.keys() - defaults(kind):
            refused(link, encode({key: fields[key] for key in fields if key != name}))
        whole = encode(message)
        for size in {*range(min(len(whole), 64)), len(whole) - 1}:
            refused(link, whole[:size])
        refused(link, whole + b"\x00")

    check()


def defaults(kind: type) -> set[str]:
    return {field.name for field in msgspec.structs.fields(kind) if not field.required}


def refused(link: str, data: bytes) -> None:
    with pytest.raises(Malformed, match=b"peer".hex()):
        decode(link, data)


def test_a_part_with_an_unknown_field_is_refused() -> None:
    ready = {
        "seats": 1,
        "room": 1,
        "takes_runs": True,
        "version": 0,
        "weights_digest": "",
        "engine": "",
    }
    digests = {"model": "", "tokenizer": "", "chat_template": ""}
    assert decode("ToBroker", encode({"type": "Ready", "digests": digests, **ready}))
    refused("ToBroker", encode({"type": "Ready", "digests": digests | {"x": 1}, **ready}))


def test_a_role_nobody_has_is_refused() -> None:
    hello = {"type": "Hello", "protocol": 1, "incarnation": "", "host": "", "pid": 1}
    for role in get_args(Role):
        decode("ToBroker", encode(hello | {"role": role}))
    refused("ToBroker", encode(hello | {"role": "root"}))


def test_a_message_of_the_other_direction_is_refused() -> None:
    for name, union in LINKS.items():
        for link in LINKS.keys() - {name}:
            for kind in get_args(union):
                refused(link, encode({"type": kind.__name__}))


def test_random_mutations_raise_nothing_but_malformed() -> None:
    survivors = 0
    for link, union in LINKS.items():
        mutator = Mutator(1, union)
        for _ in range(MUTATIONS // len(LINKS)):
            try:
                decode(link, mutator.changed(mutator.any_message()))
            except Malformed:
                continue
            survivors += 1
    assert 0 < survivors < MUTATIONS
