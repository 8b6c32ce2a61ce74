"""Copies of the weights in the host's memory, made before the next step may change them.

Two sets of buffers take turns and are used again: fresh memory costs more than the copy. With CUDA they are pinned and
filled by a stream of their own; the next change of a weight waits for it on the device, not in this process.
"""

import queue
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from prefixrl.learner.run.stop import ServerCheck

SETS = 2
"""Versions in the host's memory: one on its way to the disk, one being copied."""
LOOK_EVERY_S = 0.5


class HostCopy(NamedTuple):
    """Weights of one version; the buffers are its reader's until it releases them."""

    tensors: dict[str, Tensor]
    wait: Callable[[], None]
    """Return when the copy is complete; until then the buffers hold something else."""
    release: Callable[[], None]
    """Give the buffers back for a later version."""


class HostCopies:
    """Makes one copy after the other, in buffers that take turns."""

    def __init__(self, reader: ServerCheck) -> None:
        """`reader`: gives buffers back; its check may raise to end a wait for them."""
        self._reader = reader
        self._free = queue.Queue[dict[str, Tensor]]()
        for _ in range(SETS):
            self._free.put({})
        self._stream: torch.cuda.Stream | None = None

    @torch.no_grad()
    def copy(self, weights: Iterable[tuple[str, Tensor]]) -> tuple[HostCopy, list[str]]:
        """Copy weights; return the copy, and the names of weights that are not finite."""
        buffers = self._take_buffers()
        sums: dict[str, Tensor] = {}
        for name, tensor in weights:
            sums[name] = tensor.sum()
            buffer = buffers.get(name)
            if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
                buffer = buffers[name] = torch.empty(
                    tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda
                )
            self._copy(buffer, tensor)
        for outdated in set(buffers) - set(sums):
            del buffers[outdated]
        copied_event = None
        if self._stream is not None:
            copied_event = self._stream.record_event()
            # What changes the weights next waits for this, on the device.
            torch.cuda.current_stream(self._stream.device).wait_event(copied_event)
        copied = HostCopy(
            dict(buffers),
            wait=copied_event.synchronize if copied_event is not None else lambda: None,
            release=lambda: self._free.put(buffers),
        )
        # A sum is not finite where an element is not: only such weights are searched.
        suspects = suspicious(sums)
        if suspects:
            copied.wait()
        return copied, not_finite({name: buffers[name] for name in suspects})

    def wait_for_room(self) -> None:
        """Return when a copy would find free buffers."""
        self._free.put(self._take_buffers())

    def _take_buffers(self) -> dict[str, Tensor]:
        while True:
            try:
                return self._free.get(timeout=LOOK_EVERY_S)
            except queue.Empty:
                self._reader.check()

    def _copy(self, buffer: Tensor, tensor: Tensor) -> None:
        if not tensor.is_cuda:
            buffer.copy_(tensor)
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(tensor.device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._stream):
            buffer.copy_(tensor, non_blocking=True)
        # ZeRO-3 frees what it gathered before the copy may be done.
        tensor.record_stream(self._stream)


def suspicious(sums: Mapping[str, Tensor]) -> list[str]:
    """Return the names of sums that are not finite, with one look at the device; a finite tensor may overflow."""
    if not sums:
        return []
    bad: Sequence[bool] = (
        ~torch.isfinite(torch.stack([each.float() for each in sums.values()]))
    ).tolist()
    return [name for name, is_bad in zip(sums, bad, strict=True) if is_bad]


def not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of tensors with a value that is not finite."""
    suspects = suspicious({name: tensor.sum() for name, tensor in tensors.items()})
    return [name for name in suspects if not torch.isfinite(tensors[name]).all()]
