"""The plugin in vLLM's own processes, found by its entry point: it loads new weights from shared memory.

An update names the memory in which a rollout staged a snapshot and verified it, and the manifest: nothing is unpickled.
"""

import logging
import mmap
import multiprocessing
import os
from dataclasses import dataclass

import msgspec
import torch
import xxhash
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import (
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from prefixrl.common.engines.vllm.setup import BACKEND, CHILD_VARIABLE
from prefixrl.common.host.process import die_with_parent
from prefixrl.common.weights.snapshot import as_bytes, check_manifest, view_tensors
from prefixrl.common.wire.messages.weights import Manifest


def register() -> None:
    """Make the backend known to vLLM; a worker's children are set to die with their parent."""
    parent = multiprocessing.parent_process()
    if os.environ.get(CHILD_VARIABLE) and parent is not None and parent.pid is not None:
        # vLLM's engine core does not notice that its client was killed, and would keep the device's memory.
        die_with_parent(parent.pid)
        # It warns, at every installation, of each layer without weights of its own: rotary tables, a tied head.
        logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel("ERROR")
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, SharedMemoryWeights)


class AdapterSums:
    """Method that vLLM's workers get: checksums of the low-rank matrices they compute with."""

    def adapter_sums(self) -> dict[str, str]:
        """Return them by layer and rank of the device; they are no parameters of the model."""
        sums = {}
        rank = get_tensor_model_parallel_rank()
        for name, module in self.model_runner.get_model().named_modules():  # type: ignore[attr-defined]
            for part in ("lora_a_stacked", "lora_b_stacked"):
                stacked = getattr(module, part, ())
                for index, tensor in enumerate(
                    [stacked] if isinstance(stacked, torch.Tensor) else stacked
                ):
                    sums[f"tp{rank}:{name}.{part}.{index}"] = xxhash.xxh3_64_hexdigest(
                        as_bytes(tensor.cpu())
                    )
        return sums


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Empty: nothing has to be agreed on beforehand."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Memory and manifest of a snapshot."""

    path: str
    """Path of memory that the worker holds open, for any process of the same user."""
    manifest: str


class SharedMemoryWeights(WeightTransferEngine):  # type: ignore[misc]
    """Weight-transfer backend: loads all weights, layer by layer, through vLLM's own loaders."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Do nothing: there is no connection to make."""

    def start_weight_update(self) -> None:
        """Give every layer back the parameters of an unprocessed checkpoint."""
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, str]) -> None:
        """Load a snapshot; vLLM's own version waits for a device even where there is none."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Map and load; the bytes were verified when they were staged, before their path was known."""
        manifest = msgspec.json.decode(update_info.manifest, type=Manifest)
        check_manifest(manifest)
        with open(update_info.path, "rb") as file:
            # Private and writable, as tensors want it, but only copied where it is written to.
            mapped = mmap.mmap(file.fileno(), manifest.size_bytes, access=mmap.ACCESS_COPY)
        self.model.load_weights(list(view_tensors(manifest, memoryview(mapped)).items()))

    def finish_weight_update(self) -> None:
        """Process what was loaded (pack, quantise) into the memory that kernels and graphs hold."""
        finalize_layerwise_reload(self.model, self.model_config)
        pack_again(self.model)

    def shutdown(self) -> None:
        """Do nothing: no resource is held between updates."""


def pack_again(model: torch.nn.Module) -> None:
    """Pack embeddings and heads again on the CPU, where a packed copy serves the forward.

    A tied output head would keep the packed copy of its old weights: layer-wise reloading processes one module of two.
    """
    if next(model.parameters()).device.type != "cpu":
        return
    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding) and isinstance(
            module.quant_method, UnquantizedEmbeddingMethod
        ):
            module.quant_method.process_weights_after_loading(module)
