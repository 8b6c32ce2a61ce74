"""Bytes of tensors that are alive while code runs on the CPU, where no allocator keeps a record."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only


class LiveBytes(TorchDispatchMode):
    """Counts every storage that an operation makes until it is freed; views count once."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[int, int] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        tree_map_only(torch.Tensor, self._count, made)
        return made

    def begin(self) -> None:
        """Forget the peak so far."""
        self.peak = self.now

    def _count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes or tensor.device.type == "meta":
            return
        self._sizes[key] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._freed, key)

    def _freed(self, key: int) -> None:
        self.now -= self._sizes.pop(key, 0)
