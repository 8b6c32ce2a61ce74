"""All keys of the run file with values, defaults and sentences, from the sections. Pure."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from prefixrl.common.config.foreign.files import read_toml
from prefixrl.common.config.run import RunConfig
from prefixrl.common.config.section import toml

_NAMES = read_toml(Path(__file__).parent / "tables" / "names.toml", "the table of names")
SYNONYMS, ABSENT = (
    {name: meaning for meaning, names in _NAMES[table].items() for name in names.split()}
    for table in ("keys", "absent")
)
"""Settings of OpenRLHF 0.6.1, verl, TRL, prime-rl, PRIME and OpenR, with or without their section:
the key here, or the reason why there is no key."""


def _example(file: str) -> str:
    return (
        f"this loss is an example now: `prefixrl example losses` copies {file}, and "
        f'algorithm.loss_function = "{file}:loss" uses it'
    )


GONE_KEYS = {
    "algorithm.bound_probability": _example("dppo.py"),
    "algorithm.bound_negatives": _example("opsm.py"),
    "algorithm.bound_second_moment": "no loss function sees the minibatch from which M2PO takes its "
    "limit; use algorithm.bound_ratio, which is on by default, or the example loss dppo.py",
    "algorithm.proximal": _example("a3po.py"),
    "algorithm.mask_token_band": _example("bands.py"),
    "algorithm.mask_sequence_band": _example("bands.py"),
    "algorithm.count_masked": "N always counts every token, so that a loss function which leaves "
    "tokens out (the example bands.py) shortens the step, as true did",
    "algorithm.critic_targets": "the critic always learns GAE's returns; to trust old values less, "
    "lower algorithm.max_staleness, or use an objective without a critic",
}
"""Keys of earlier releases: what to use in their place."""
GONE_VALUES = {("algorithm.correction", "topr"): _example("topr.py")}
"""By key, values of earlier releases."""


Schema = dict[str, Any]
"""A JSON schema, or a part of one."""


class Setting(NamedTuple):
    """One key, or a section."""

    key: str
    """With its sections: `learner.lora.rank`."""
    values: str
    """The values it takes; "" for a section."""
    default: str
    """As TOML writes it; `required`, or "" for a key that may be absent."""
    sentence: str

    @property
    def is_section(self) -> bool:
        """True for a table of the run file."""
        return not self.values


@cache
def settings() -> tuple[Setting, ...]:
    """Return all keys in the order of the run file, each section before its keys."""
    schema = json_schema()
    return tuple(_walk(schema, schema["$defs"], ""))


def json_schema() -> Schema:
    """Return the JSON schema of the run file."""
    return RunConfig.model_json_schema()


def _walk(node: Schema, definitions: Schema, path: str) -> Iterator[Setting]:
    required = node.get("required", ())
    for name, field in node["properties"].items():
        key = f"{path}{name}"
        section = _section(field, definitions)
        sentence = field.get("description") or (section or {}).get("description", "")
        if section is None:
            values = ", ".join(dict.fromkeys(_values(field, definitions)))
            default = "" if field.get("default") is None else toml(field["default"])
            default = "required" if name in required else default
            yield Setting(key, values, default, " ".join(sentence.split()))
        else:
            yield Setting(key, "", "", " ".join(sentence.split()))
            yield from _walk(section, definitions, f"{key}.")


def _section(field: Schema, definitions: Schema) -> Schema | None:
    for schema in (field, *field.get("anyOf", ())):
        definition = definitions.get(schema.get("$ref", "").rsplit("/", 1)[-1], {})
        if "properties" in definition:
            section: Schema = definition
            return section
    return None


def _values(field: Schema, definitions: Schema) -> Iterator[str]:
    """Yield each kind of value; absent ones (null) are no value."""
    if "$ref" in field:
        field = definitions[field["$ref"].rsplit("/", 1)[-1]]
    if "anyOf" in field:
        for schema in field["anyOf"]:
            yield from _values(schema, definitions)
    elif "const" in field:
        yield toml(field["const"])
    elif "enum" in field:
        yield from map(toml, field["enum"])
    elif field.get("type") == "array":
        items = field.get("items") or (field.get("prefixItems") or [{}])[0]
        yield f"list of {' or '.join(_values(items, definitions)) or 'values'}"
    elif field.get("type") == "object":
        yield "table"
    elif field.get("type") in _KINDS:
        bounds = " and ".join(
            f"{sign} {field[name]:g}" for name, sign in _BOUNDS.items() if name in field
        )
        yield f"{_KINDS[field['type']]} {bounds}".rstrip()


_KINDS = {"integer": "integer", "number": "number", "string": "text", "boolean": "true, false"}
_BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
