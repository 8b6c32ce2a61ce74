"""Config files of models, read without transformers: rows of the embedding, positions, eos."""

from collections.abc import Mapping
from typing import Any

from prefixrl.common.config.foreign.files import read_json
from prefixrl.common.errors import DataError
from prefixrl.common.host.hub import cached_file

_UNSCALED = ("default", "llama3", "longrope", "su", "mrope")
"""Kinds of rotary positions whose `max_position_embeddings` is the limit, whatever their factor is."""


def document_of(model: str, name: str = "config.json") -> dict[str, Any]:
    """Return a JSON file of a model, of its text part; empty where it is not here; raises DataError."""
    path = cached_file(model, name)
    document = (
        read_json(path, dict[str, Any], DataError, "copy the model's folder again") if path else {}
    )
    part = document.get("text_config")
    return document | part if isinstance(part, dict) else document


def embedding_rows(model: str) -> int | None:
    """Return the rows of a model's embedding; None where its config.json is not here or does not say."""
    rows = document_of(model).get("vocab_size")
    return rows if isinstance(rows, int) and rows > 0 else None


def positions_of(config: Mapping[str, Any]) -> int | None:
    """Return the most tokens of a text in a model, as vLLM counts them; None where it names no limit."""
    limit = config.get("max_position_embeddings") or config.get("n_positions")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if not isinstance(limit, int) or kind in _UNSCALED:
        return limit if isinstance(limit, int) else None
    original = rope.get("original_max_position_embeddings") if kind == "yarn" else None
    return max(limit, int((original or limit) * (rope.get("factor") or 1)))
