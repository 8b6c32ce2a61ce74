"""The number of the wire format: a digest of the schemas of all messages, so that no change can be forgotten."""

import json
from typing import Any

import msgspec
import xxhash

from prefixrl.common.wire.messages.learner import FromBroker, ToBroker
from prefixrl.common.wire.messages.weights import FromWeights, ToWeights

DIGEST_BITS = 53
"""Bits of a digest: every program that reads JSON or MessagePack holds such a whole number."""


def schema_digest(*types: Any) -> int:
    """Return a number that differs wherever an encoded value could differ.

    Names, kinds, bounds, defaults and tags of fields count. Texts and the order of fields, which are maps on the wire,
    do not.
    """
    schemas, parts = msgspec.json.schema_components(types, ref_template="{name}")
    content = json.dumps(_canonical([schemas, parts]), sort_keys=True)
    return xxhash.xxh3_64_intdigest(content.encode()) >> (64 - DIGEST_BITS)


UNORDERED = ("required", "anyOf", "oneOf", "enum")
"""Lists of a schema whose order says nothing; releases of msgspec differ in it."""


def _canonical(node: Any) -> Any:
    if isinstance(node, dict):
        # A field may be called `description` or `required`; its schema is then neither a text nor a list.
        parts = {
            name: _canonical(part)
            for name, part in node.items()
            if name != "description" or not isinstance(part, str)
        }
        for name in UNORDERED:
            if isinstance(parts.get(name), list):
                parts[name].sort(key=lambda part: json.dumps(part, sort_keys=True))
        return parts
    return [_canonical(part) for part in node] if isinstance(node, list | tuple) else node


PROTOCOL = schema_digest(ToBroker, FromBroker, ToWeights, FromWeights)
"""Both sides of a connection must hold the same number."""
