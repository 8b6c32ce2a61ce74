"""Names, types and shapes of a model folder's weights, from the headers of its files alone."""

from pathlib import Path
from typing import NamedTuple

import msgspec

from prefixrl.common.config.foreign.files import explained
from prefixrl.common.errors import DataError

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_POINTER = b"version https://git-lfs"


class TensorHeader(NamedTuple):
    """A tensor as its file's header has it; `dtype` in the words of safetensors, such as BF16."""

    dtype: str
    shape: tuple[int, ...]


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def has_weights(folder: str) -> bool:
    """Return True if a folder has files that may be weights, of whatever form."""
    return any(next(Path(folder).glob(kind), None) for kind in ("*.safetensors*", *_PICKLED))


def tensor_headers(folder: str, called: str) -> dict[str, TensorHeader]:
    """Return every tensor of a folder, which messages call `called`; DataError names a file that cannot be read."""
    root = Path(folder)
    headers = dict[str, TensorHeader]()
    if (root / WHOLE).is_file():
        return _of_file(root / WHOLE, called)
    if not (root / INDEX).is_file():
        raise DataError(f"{called} has no weights that are read: {_instead(root)}")
    with explained(f"{called}: {INDEX} cannot be read", DataError, "copy it again"):
        places = msgspec.json.decode((root / INDEX).read_bytes(), type=_Index).weight_map
    shards = sorted(set(places.values()))
    if missing := [name for name in shards if not (root / name).is_file()]:
        raise DataError(
            f"{called}: {len(missing)} of {len(shards)} files that {INDEX} names are missing: "
            f"{some_names(missing)}; copy them too"
        )
    for name in shards:
        shard = _of_file(root / name, called)
        headers |= shard
        if lost := sorted(
            tensor for tensor, place in places.items() if place == name and tensor not in shard
        ):
            raise DataError(
                f"{called}: {INDEX} places tensors in {name} that it does not have: {some_names(lost)}"
            )
    return headers


def some_names(names: list[str]) -> str:
    """Return the first four of many names."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _of_file(path: Path, called: str) -> dict[str, TensorHeader]:
    # Late: a simulated engine needs no weights.
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "np") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            return {
                name: TensorHeader(each.get_dtype(), tuple(each.get_shape()))
                for name, each in slices.items()
            }
    except (OSError, SafetensorError) as error:
        fault = "is empty" if not path.stat().st_size else f"cannot be read: {error}"
        remedy = "copy it again"
        if path.stat().st_size < 1024 and path.read_bytes().startswith(_POINTER):
            fault = "is a pointer of Git LFS, not the file"
            remedy = "fetch it with `git lfs pull`"
        raise DataError(f"{called}: {path.name} {fault}; {remedy}") from error


def _instead(folder: Path) -> str:
    """Return what a folder has in place of weights, and what to do about it."""
    safetensors = some_names(sorted(path.name for path in folder.glob("*.safetensors")))
    pickled = some_names(sorted(path.name for kind in _PICKLED for path in folder.glob(kind)))
    if (folder / "adapter_config.json").is_file():
        return "it is a low-rank adapter of another model; merge the two (peft's merge_and_unload), and save the whole"
    if pickled and not safetensors:
        return (
            f"{pickled} would have to be unpickled, which may execute code; where you trust it, load it with "
            f"transformers and save it with save_pretrained"
        )
    has = f"has {safetensors}, but " if safetensors else "has "
    return f"it {has}neither {WHOLE} nor {INDEX}; save the model with save_pretrained"
