"""Where the files of a model or a dataset are on this host: the folder itself, or the snapshot a hub name stands for."""

import os

from prefixrl.common.errors import DataError

FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
"""Weights as safetensors only: nothing that must be unpickled is fetched."""
TOKENIZER_FILES = tuple(pattern for pattern in FILES if pattern != "*.safetensors")
DATA_FILES = ("*.parquet", "*.jsonl", "*.json", "*.csv", "*.arrow")


def model_folder(model: str, needs_weights: bool = True) -> str:
    """Folder of a model; a hub name is fetched where the cache does not hold it.

    Everything that is read of a model (weights, if they are needed, tokenizer, stop tokens, digests) is then read from one
    snapshot.

    Raises:
        DataError: the hub cannot be reached, or has no such model for this user.
    """
    if os.path.isdir(model):
        return model
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    files = FILES if needs_weights else TOKENIZER_FILES
    try:
        return str(snapshot_download(model, allow_patterns=list(files)))
    except (OSError, ValueError, HfHubHTTPError) as error:
        said = str(error).strip().split("\n")[0]
        raise DataError(
            f"model {model!r} is neither a folder on this host nor to be had from the hub: {said}\ngive a local folder, or "
            "fetch it where there is a network (`hf download`); a gated model needs HF_TOKEN in the environment"
        ) from error


def dataset_folder(dataset: str) -> str:
    """Folder with the files of a hub dataset, OWNER/NAME or OWNER/NAME@REVISION; fetched where the cache does not hold it.

    Raises:
        DataError: the hub cannot be reached, or has no such dataset for this user.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    name, _, revision = dataset.partition("@")
    try:
        return str(
            snapshot_download(
                name,
                repo_type="dataset",
                revision=revision or None,
                allow_patterns=list(DATA_FILES),
            )
        )
    except (OSError, ValueError, HfHubHTTPError) as error:
        said = str(error).strip().split("\n")[0]
        raise DataError(
            f"dataset {dataset!r} is not to be had from the hub: {said}\nfetch it where there is a network (`hf download "
            f"--repo-type dataset {name}`) and give the folder as path, of a problem set under [data.paths]; a gated dataset "
            "needs HF_TOKEN in the environment"
        ) from error
