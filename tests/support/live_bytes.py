"""A count of the bytes that tensors hold at a time, storage by storage; on "meta" without the memory."""

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only


class LiveBytes(TorchDispatchMode):
    """Counts storages that operators return on a device: `now_bytes` are alive, `peak_bytes` were at once.

    Those of the `given` tensors are left out. What an operator takes and gives back inside itself is not seen.
    """

    def __init__(self, device: str = "cpu", given: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.now_bytes = self.peak_bytes = 0
        self._device, self._given = device, {tensor.untyped_storage()._cdata for tensor in given}
        self._sizes_bytes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tree_map_only(Tensor, self._count, result)
        return result

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size_bytes = storage._cdata, storage.nbytes()
        if key in self._sizes_bytes or key in self._given or storage.device.type != self._device:
            return
        self._sizes_bytes[key] = size_bytes
        self.now_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)
        weakref.finalize(storage, self._freed, key)

    def _freed(self, key: int) -> None:
        self.now_bytes -= self._sizes_bytes.pop(key)
