"""Where a model's files are on this host: the folder itself, or the snapshot a hub name stands for."""

import os

from prefixrl.common.errors import DataError

FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
"""Weights as safetensors only: nothing that must be unpickled is fetched."""


def model_folder(model: str) -> str:
    """Folder of a model; a hub name is fetched where the cache does not hold it.

    Everything that is read of a model (weights, tokenizer, stop tokens, digests) is then read from one snapshot.

    Raises:
        DataError: the hub cannot be reached, or has no such model for this user.
    """
    if os.path.isdir(model):
        return model
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return str(snapshot_download(model, allow_patterns=list(FILES)))
    except (OSError, ValueError, HfHubHTTPError) as error:
        said = str(error).strip().split("\n")[0]
        raise DataError(
            f"model {model!r} is neither a folder on this host nor to be had from the hub: {said}\ngive a local folder, or "
            "fetch it where there is a network (`hf download`); a gated model needs HF_TOKEN in the environment"
        ) from error
