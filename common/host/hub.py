"""Folders of models and datasets on this host: the folder given, or a hub snapshot."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prefixrl.common.errors import DataError, to_copy

FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
"""Weights as safetensors only: nothing that must be unpickled is fetched."""
TOKENIZER_FILES = tuple(pattern for pattern in FILES if pattern != "*.safetensors")
DATA_FILES = ("*.parquet", "*.jsonl", "*.json", "*.csv", "*.tsv", "*.arrow", "*.gz", "*.zst")


def model_folder(model: str, needs_weights: bool = True) -> str:
    """Return the folder of a model; a hub name is fetched unless it is in the cache."""
    if os.path.isdir(model):
        return model
    fault = f"model {model!r} is no folder here (a relative one: beside the run file), nor available from the hub"
    remedy = (
        "give a local folder, or fetch it where there is a network (`hf download`); a gated model"
    )
    return _fetched(fault, remedy, model, FILES if needs_weights else TOKENIZER_FILES)


def cached_file(model: str, name: str) -> Path | None:
    """Return a file of a model where it is on this host already, else None."""
    if os.path.isdir(model):
        path = Path(model) / name
        return path if path.is_file() else None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(model, name)
    except HFValidationError:  # a folder of another host
        return None
    return Path(cached) if isinstance(cached, str) else None


def dataset_folder(dataset: str) -> str:
    """Return the folder of a hub dataset, OWNER/NAME[@REVISION]; fetched unless in the cache."""
    name, _, revision = dataset.partition("@")
    fault = f"dataset {dataset!r} is not available from the hub"
    remedy = (
        f"fetch it where there is a network ({to_copy('hf download --repo-type dataset', name)}) and give the folder "
        'instead of the name (that of a problem set as [data.paths] NAME = "FOLDER"); a gated dataset'
    )
    return _fetched(fault, remedy, name, DATA_FILES, repo_type="dataset", revision=revision or None)


def _fetched(fault: str, remedy: str, name: str, patterns: Sequence[str], **options: Any) -> str:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return str(snapshot_download(name, allow_patterns=list(patterns), **options))
    except (OSError, ValueError, HfHubHTTPError) as error:
        reason = str(error).strip().split("\n")[0]
        raise DataError(f"{fault}: {reason}\n{remedy} needs HF_TOKEN in the environment") from error
