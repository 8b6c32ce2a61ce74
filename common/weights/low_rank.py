"""Versions of a LoRA run (Hu et al. 2021): low-rank matrices in place of whole weights.

A layer acts as W + alpha / rank * B A. A version holds A and B of every such layer under the layer's name; W is the
folder's, proved by its digest before the first task.
"""

import fcntl
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from prefixrl.common.host.process import locked

FIRST = ".lora_A.weight"
SECOND = ".lora_B.weight"
_OF_PEFT = {".lora_A.default.weight": FIRST, ".lora_B.default.weight": SECOND}
MEMORY = Path("/dev/shm")
PREFIX = "prefixrl-adapter-"
ALONE = fcntl.LOCK_EX | fcntl.LOCK_NB
"""A folder is locked while its maker lives, and nobody waits for it."""


@dataclass(frozen=True)
class LowRank:
    """The shape of a run's matrices."""

    rank: int
    alpha: float
    target_modules: tuple[str, ...]
    """As in the run file; "all-linear" stands for every linear layer but the head."""

    @property
    def scale(self) -> float:
        """The factor of the product B A."""
        return self.alpha / self.rank


def published_name(name: str) -> str | None:
    """Return the name in a version of a parameter that peft made; None for any other parameter."""
    for end, published in _OF_PEFT.items():
        if name.endswith(end):
            return name.removesuffix(end) + published
    return None


def are_low_rank(names: Iterable[str]) -> bool:
    """Return True if a version holds matrices, False if it holds whole weights."""
    return any(name.endswith(FIRST) for name in names)


def pairs(
    tensors: Mapping[str, Tensor], weights: Mapping[str, Tensor]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return A and B by layer; ValueError unless they fit a model with `weights`."""
    matrices = {}
    # Each pair is found by either of its names, so that a matrix alone is noticed.
    for name in tensors:
        layer = name.removesuffix(FIRST).removesuffix(SECOND)
        if layer == name:
            raise ValueError(f"weight {name} is no low-rank matrix")
        first = tensors.get(layer + FIRST)
        second = tensors.get(layer + SECOND)
        weight = weights.get(f"{layer}.weight")
        if first is None or second is None or weight is None:
            raise ValueError(
                f"matrices of layer {layer}: one is missing, or the model has no such layer"
            )
        if (second.shape[0], first.shape[1]) != weight.shape or first.shape[0] != second.shape[1]:
            shapes = tuple(first.shape), tuple(second.shape)
            raise ValueError(
                f"matrices of layer {layer} have shapes {shapes}, its weight {tuple(weight.shape)}"
            )
        if first.dtype != weight.dtype or second.dtype != weight.dtype:
            raise ValueError(
                f"matrices of layer {layer} are {first.dtype}, its weight is {weight.dtype}"
            )
        matrices[layer] = first, second
    return matrices


class LayerProducts:
    """The matrices that the layers of a model add: nothing until some are set."""

    def __init__(self, layers: Mapping[str, torch.nn.Module], scale: float) -> None:
        self._pairs: dict[str, tuple[Tensor, Tensor]] = {}
        for name, layer in layers.items():
            if isinstance(layer, torch.nn.Linear):
                layer.register_forward_hook(self._adding(name, scale))

    def set(self, matrices: Mapping[str, tuple[Tensor, Tensor]], device: torch.device) -> None:
        """Use copies of these matrices from now on."""
        self._pairs = {
            name: (first.to(device, copy=True), second.to(device, copy=True))
            for name, (first, second) in matrices.items()
        }

    def tensors(self) -> dict[str, Tensor]:
        """Return the matrices by their names in a version."""
        ends = (FIRST, SECOND)
        return {
            name + end: each
            for name, pair in self._pairs.items()
            for end, each in zip(ends, pair, strict=True)
        }

    def _adding(
        self, name: str, scale: float
    ) -> Callable[[torch.nn.Module, tuple[Tensor, ...], Tensor], Tensor]:
        def add(_: torch.nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            pair = self._pairs.get(name)
            if pair is None:
                return output
            first, second = pair
            # The learner's own order: rounding must not differ more than it has to. A head's output may be float32.
            return (
                output + (inputs[0] @ first.T).to(output.dtype) @ second.to(output.dtype).T * scale
            )

        return add


class AdapterFolders:
    """Folders in peft's format, in memory where there is room: the way matrices get into vLLM."""

    def __init__(self, root: Path = MEMORY) -> None:
        """Make the folders below `root`; remove folders that a killed process left there."""
        root = root if root.is_dir() else Path(tempfile.gettempdir())
        for folder in root.glob(f"{PREFIX}*"):
            with suppress(OSError):  # one that is in use, or another user's, stays
                if any(
                    folder.iterdir()
                ):  # an empty one may just be made: its maker must get the lock
                    with locked(folder, ALONE):
                        shutil.rmtree(folder)
        self._root = tempfile.TemporaryDirectory(prefix=PREFIX, dir=root)
        self._locks = ExitStack()
        self._locks.enter_context(locked(Path(self._root.name), ALONE))
        self._number = 0

    def write(self, matrices: Mapping[str, tuple[Tensor, Tensor]], shape: LowRank) -> str:
        """Write matrices; the folder before is removed with the next but one."""
        self._number += 1
        folder = Path(self._root.name, str(self._number))
        folder.mkdir()
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": shape.rank,
            "lora_alpha": shape.alpha,
            "target_modules": sorted({name.rpartition(".")[2] for name in matrices}),
            "bias": "none",
        }
        (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
        tensors = {
            f"base_model.model.{name}{end}": tensor.contiguous()
            for name, pair in matrices.items()
            for end, tensor in zip((FIRST, SECOND), pair, strict=True)
        }
        save_file(tensors, folder / "adapter_model.safetensors")
        shutil.rmtree(Path(self._root.name, str(self._number - 2)), ignore_errors=True)
        return str(folder)
