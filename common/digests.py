"""Fingerprints of what a worker loaded: model files, tokenizer, chat template."""

import hashlib
from pathlib import Path

from prefixrl.common.messages import ModelDigests

SAMPLED_BLOCK_BYTES = 64 * 1024
SAMPLED_BLOCKS = 64


def model_digests(folder: str | Path) -> ModelDigests:
    """Digests of a local model folder.

    Weight files are sampled (head and 64 blocks spread over each file): a 7B model in a second, any fine-tune told apart.
    A hub name has no folder and gets the digests of its name.
    """
    folder = Path(folder)
    if not folder.is_dir():
        return ModelDigests(_hash(str(folder).encode()), "", "")
    weights = hashlib.blake2b(digest_size=16)
    weights.update(_read(folder / "config.json"))
    for path in sorted(folder.glob("*.safetensors")):
        _sample(path, weights)
    tokenizer = _hash(_read(folder / "tokenizer.json"))
    template = _hash(
        _read(folder / "chat_template.jinja") + _read(folder / "tokenizer_config.json")
    )
    return ModelDigests(weights.hexdigest(), tokenizer, template)


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _read(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""


def _sample(path: Path, into: "hashlib.blake2b") -> None:
    size = path.stat().st_size
    into.update(f"{path.name}:{size}".encode())
    step = max(SAMPLED_BLOCK_BYTES, size // SAMPLED_BLOCKS)
    with path.open("rb") as file:
        for offset in range(0, size, step):
            file.seek(offset)
            into.update(file.read(SAMPLED_BLOCK_BYTES))
