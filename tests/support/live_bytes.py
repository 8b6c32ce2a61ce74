"""A count of the bytes that tensors hold at a time, storage by storage, on any device; on "meta" without the memory."""

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts storages made while it is entered: `now_bytes` are alive, `peak_bytes` were at once.

    What an operator takes and gives back inside itself is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now_bytes = self.peak_bytes = 0
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        known = {_key(each) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor) and _key(tensor) not in known:
                self._add(tensor.untyped_storage())
        return made

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size_bytes = storage._cdata, storage.nbytes()
        if key in self._alive:
            return

        def gone(_: object) -> None:
            del self._alive[key]
            self.now_bytes -= size_bytes

        self._alive[key] = weakref.ref(storage, gone)
        self.now_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
