"""Any value of a message type, within the limits that the type states."""

from typing import Any

from hypothesis import strategies as st
from msgspec import inspect

SHORT = 3
"""Most items of an example's sequences."""


def of_type(kind: Any) -> st.SearchStrategy[Any]:
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
