"""Digests of what a worker loaded: model files, tokenizer, chat template, functions."""

import hashlib
from pathlib import Path

import msgspec

from prefixrl.common.config.foreign import user_function
from prefixrl.common.config.run import RunConfig
from prefixrl.common.wire.messages.worker import ModelDigests

SAMPLED_BLOCK_BYTES = 64 * 1024
SAMPLED_BLOCKS = 64


def model_digests(folder: str | Path) -> ModelDigests:
    """Return the digests of a model folder, or of a hub name."""
    # 64 blocks of each weight file distinguish every fine-tune, in a second for a 7B model.
    folder = Path(folder)
    if not folder.is_dir():
        return ModelDigests(name_digest(str(folder)), "", "")
    weights = hashlib.blake2b(digest_size=16)
    weights.update(_read(folder / "config.json"))
    for path in sorted(folder.glob("*.safetensors")):
        _sample(path, weights)
    return ModelDigests(weights.hexdigest(), *_tokenizer(folder))


def name_digest(name: str) -> str:
    """Return the digest of the name of a model whose files are not here."""
    return _hash(name.encode())


def tokenizer_digests(folder: str | Path) -> ModelDigests:
    """Return the digests of a model folder of which only the tokenizer is used."""
    return ModelDigests("", *_tokenizer(Path(folder)))


def scorer_digests(config: RunConfig, model: str, process_model: str | None = None) -> ModelDigests:
    """Return the digests of a scorer's target, reward function and process reward model."""
    has_weights = config.mode == "prefix" and not config.scorer.is_served
    loaded = model_digests(model) if has_weights else tokenizer_digests(model)
    return msgspec.structs.replace(
        loaded,
        reward_function=function_digest(config.reward.function),
        process_model=process_digest(process_model) if process_model else "",
    )


def process_digest(folder: str) -> str:
    """Return one digest of weights and tokenizer of a process reward model."""
    loaded = model_digests(folder)
    return _hash(f"{loaded.model} {loaded.tokenizer} {loaded.chat_template}".encode())


def function_digest(function_ref: str | None) -> str:
    """Return the digest of the file of a user's function, "" without one."""
    return file_digest(user_function.file_of(function_ref)) if function_ref else ""


def file_digest(path: str | Path) -> str:
    """Return the digest of all bytes of a file."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _tokenizer(folder: Path) -> tuple[str, str]:
    template = _read(folder / "chat_template.jinja") + _read(folder / "tokenizer_config.json")
    return _hash(_read(folder / "tokenizer.json")), _hash(template)


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
