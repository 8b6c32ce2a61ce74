"""Messages that no peer would send: valid ones of any class, changed in their bytes or in their structure."""

import random
from typing import Any

import msgspec
from msgspec import inspect

ABSURD = (
    None,
    True,
    0,
    -1,
    1,
    2**31,
    2**53,
    2**63,
    2**64 - 1,
    -(2**63),
    0.5,
    -1.0,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "x",
    "\0",
    "\x1b]0;t\7",
    "../../etc/passwd",
    "x" * 300,
    "é" * 5000,
    b"",
    b"\0",
    b"\xff" * 400,
    [],
    {},
    [[]],
)
DEEP = b"\x91" * 5000


class Mutator:
    """A seeded source of changed messages."""

    def __init__(self, seed: int, *unions: Any) -> None:
        self._draw = random.Random(seed)
        classes = [kind for union in unions for kind in inspect.type_info(union).types]  # type: ignore[union-attr]
        self._valid = [
            msgspec.msgpack.encode(self._value(kind)) for kind in classes for _ in range(20)
        ]
        self._tags = [kind.tag for kind in classes]

    def any_message(self) -> bytes:
        """A valid message of any class, unchanged."""
        return self._draw.choice(self._valid)

    def changed(self, valid: bytes) -> bytes:
        """Change a message once or a few times."""
        result = valid
        for _ in range(self._draw.choice((1, 1, 1, 2, 4))):
            result = (
                self._bytes_changed(result)
                if self._draw.random() < 0.4
                else self._structure_changed(result)
            )
        return result

    def _bytes_changed(self, valid: bytes) -> bytes:
        draw, at = self._draw, self._draw.randrange(len(valid) + 1)
        match draw.randrange(5):
            case 0:
                return valid[:at]
            case 1:
                other = self.any_message()
                return valid[:at] + other[draw.randrange(len(other) + 1) :]
            case 2:
                return valid[:at] + draw.randbytes(draw.randrange(1, 9)) + valid[at:]
            case 3:
                return valid[:at] + DEEP
        changed = bytearray(valid or b"\0")
        for _ in range(draw.choice((1, 1, 2, 8))):
            changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
        return bytes(changed)

    def _structure_changed(self, valid: bytes) -> bytes:
        try:
            tree = msgspec.msgpack.decode(valid)
            return msgspec.msgpack.encode(self._tree_changed(tree))
        except (msgspec.MsgspecError, ValueError, TypeError, RecursionError, OverflowError):
            return self._bytes_changed(valid)  # its bytes were changed before

    def _tree_changed(self, tree: Any) -> Any:
        """Walk to a random place, and put something else there."""
        draw = self._draw
        if not isinstance(tree, dict | list) or not tree or draw.random() < 0.15:
            return self._instead(tree)
        key = draw.choice(list(tree)) if isinstance(tree, dict) else draw.randrange(len(tree))
        if isinstance(tree, list) and draw.random() < 0.1:
            return tree * 2
        if isinstance(tree, dict) and draw.random() < 0.1:
            return {name: value for name, value in tree.items() if name != key} | {
                draw.choice(("x", "task")): 1
            }
        tree[key] = (
            draw.choice(self._tags)
            if key == "type" and draw.random() < 0.5
            else self._tree_changed(tree[key])
        )
        return tree

    def _instead(self, value: Any) -> Any:
        draw = self._draw
        if isinstance(value, int) and draw.random() < 0.5:
            return value + draw.choice((-1, 1, 7, 2**31))
        if isinstance(value, bytes) and value and draw.random() < 0.5:
            return draw.choice((value[:-1], value * 2, value[::-1]))
        if draw.random() < 0.3:
            return msgspec.msgpack.decode(self.any_message())  # a subtree of another one
        return draw.choice(ABSURD)

    def _value(self, info: inspect.Type) -> Any:
        """A value of a type, within its limits."""
        draw = self._draw
        match info:
            case inspect.Metadata(type=inner):
                return self._value(inner)
            case inspect.StructType(cls=cls, fields=fields):
                return cls(**{field.name: self._value(field.type) for field in fields})
            case inspect.UnionType(types=types):
                return self._value(draw.choice(types))
            case inspect.VarTupleType(item_type=item):
                return tuple(self._value(item) for _ in range(draw.randrange(3)))
            case inspect.TupleType(item_types=items):
                return tuple(map(self._value, items))
            case inspect.DictType(key_type=key, value_type=value):
                return {self._value(key): self._value(value)}
            case inspect.LiteralType(values=values):
                return draw.choice(values)
        return self._scalar(info)

    def _scalar(self, info: inspect.Type) -> Any:
        draw = self._draw
        match info:
            case inspect.IntType(ge=least, le=most):
                return draw.choice((least or 0, 1, min(most or 2**40, 2**40), draw.randrange(100)))
            case inspect.FloatType(ge=least, le=most):
                return draw.choice((least or 0.0, 1.0 if most is None else most, 0.5))
            case inspect.StrType():
                return draw.choice(("", "a", "e-1", "text of some length"))
            case inspect.BytesType():
                return draw.choice((b"", b"\1\0\0\0", b"\0" * 8, draw.randbytes(5)))
            case inspect.BoolType():
                return draw.random() < 0.5
            case inspect.NoneType():
                return None
        raise AssertionError(f"no value of {info}")
