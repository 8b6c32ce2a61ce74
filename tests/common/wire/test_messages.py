"""Every message survives its own link; whatever else arrives is Malformed and nothing worse."""

import random
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings

from prefixrl.common.wire.messages.fields import Role
from prefixrl.common.wire.messages.learner import FromBroker, ToBroker
from prefixrl.common.wire.messages.weights import FromWeights, ToWeights
from prefixrl.common.wire.transport import Malformed, _decode
from support.broker.wire_examples import of_type

LINKS: dict[str, Any] = {
    "ToBroker": ToBroker,
    "FromBroker": FromBroker,
    "ToWeights": ToWeights,
    "FromWeights": FromWeights,
}
TYPES = [(name, kind) for name, union in LINKS.items() for kind in get_args(union)]
MUTATIONS = 20_000
encode = msgspec.msgpack.Encoder().encode
decoders: dict[str, msgspec.msgpack.Decoder[object]] = {
    name: msgspec.msgpack.Decoder(union) for name, union in LINKS.items()
}


def decode(link: str, data: bytes) -> object:
    return _decode(decoders[link], [data], b"peer")


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
    random_ = random.Random(1)
    seeds = [(link, encode(sample(kind))) for link, kind in TYPES]
    survivors = 0
    for _ in range(MUTATIONS):
        link, data = random_.choice(seeds)
        mutated = mutate(random_, data)
        try:
            decode(link, mutated)
        except Malformed:
            continue
        survivors += 1
    assert 0 < survivors < MUTATIONS


def mutate(random_: random.Random, data: bytes) -> bytes:
    mutated = bytearray(data)
    for _ in range(random_.randint(1, 4)):
        place = random_.randrange(len(mutated) + 1)
        match random_.randrange(4):
            case 0 if place < len(mutated):
                mutated[place] = random_.randrange(256)
            case 1:
                mutated[place:place] = random_.randbytes(random_.randint(1, 9))
            case 2:
                del mutated[place : place + random_.randint(1, 9)]
            case _:
                mutated[place:place] = mutated[: random_.randint(0, len(mutated))]
    return bytes(mutated)


def sample(annotation: Any) -> Any:
    """One value of a type, filled by its annotations."""
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        fields = msgspec.structs.fields(annotation)
        return annotation(**{field.name: sample(field.type) for field in fields})
    arguments = get_args(annotation)
    if not arguments:
        values: dict[Any, Any] = {
            bool: True,
            int: 3,
            float: 0.5,
            str: "text",
            bytes: b"\x01\x00\x00\x00",
        }
        return values[annotation]
    if annotation.__class__.__name__ == "_LiteralGenericAlias":
        return arguments[0]
    if arguments[-1] is Ellipsis:
        return (sample(arguments[0]),) * 2
    if getattr(annotation, "__origin__", None) is tuple:
        return tuple(sample(each) for each in arguments)
    return sample(arguments[0])
