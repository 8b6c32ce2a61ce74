"""Checkpoints: all that a rank needs to resume bitwise, in files that execute nothing.

    step_00000012/
        rank_00000/actor.safetensors    this rank's share: fp32 weights, Adam moments and step counts
        rank_00000/critic.safetensors   where the objective has a critic
        rank_00000/reward.safetensors   where an implicit reward model learns
        rank_00000/random.safetensors   states of the random generators
        hf/                             the adapter as a Hugging Face folder, free of world size and ZeRO stage
        hf_reward/                      the implicit reward model
        hf_ema/                         the moving average of its weights, where learner.ema_decay asks for one
        manifest.json                   the trainer's state, and size and digest of every other file; written last

A checkpoint is written beside its final name, synced and renamed: a folder called step_* is complete, or was damaged
later, which its digests show. Old checkpoints are removed (`run/retention.py`) only after the new one was read back.
"""

import errno
import hashlib
import json
import logging
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from prefixrl.common.errors import ConfigError, DataError, NotSaved
from prefixrl.common.host.process import sync
from prefixrl.common.journal.crash_points import crash_point
from prefixrl.common.run.directory_format import checkpoints
from prefixrl.common.run.disk import free_bytes, held_bytes, in_mib
from prefixrl.learner.models.distributed import sum_over_ranks
from prefixrl.learner.models.model import Models
from prefixrl.learner.models.optimizers import restored, saved_state
from prefixrl.learner.models.trained_model import TrainedModel

FORMAT = 2


class TrainerState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Progress of training, besides weights and moments."""

    iteration: int
    """Iterations completed, which is the version of the weights."""
    optimizer_steps: int
    world_size: int


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file of the checkpoint."""

    path: str
    size_bytes: int
    digest: str
    """xxh3-128 of its bytes."""


class CheckpointManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The description of a checkpoint: state, format and the digest of every file."""

    format: int
    state: TrainerState
    zero_stage: int
    dtype: str
    files: tuple[FileEntry, ...]
    digest: str = ""
    """xxh3-128 of the manifest as JSON without it; "" where an earlier release wrote the checkpoint."""

    def sealed(self) -> "CheckpointManifest":
        """Return the manifest with its digest."""
        bare = msgspec.structs.replace(self, digest="")
        return msgspec.structs.replace(
            self, digest=xxhash.xxh3_128_hexdigest(msgspec.json.encode(bare))
        )


def write_manifest(folder: Path, manifest: CheckpointManifest) -> None:
    """Write the manifest of a checkpoint, with its digest."""
    (folder / "manifest.json").write_bytes(
        msgspec.json.format(msgspec.json.encode(manifest.sealed()))
    )


def read_manifest(folder: Path) -> CheckpointManifest:
    """Read the manifest of a checkpoint.

    Raises:
        DataError: it is missing or damaged.
        ConfigError: another release wrote it.
    """
    try:
        fields = msgspec.json.decode(
            (folder / "manifest.json").read_bytes(), type=dict[str, object]
        )
        digest, written = fields.get("digest"), fields["format"]
        # First: damage is no sign of another release.
        if digest and digest != xxhash.xxh3_128_hexdigest(
            msgspec.json.encode({**fields, "digest": ""})
        ):
            raise DataError(f"{folder} has a manifest with another digest than when it was written")
        if written == FORMAT:
            return msgspec.convert(fields, CheckpointManifest)
    # Damaged bytes may be no text (UnicodeDecodeError, a ValueError) or nest too deeply.
    except (OSError, KeyError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise DataError(f"{folder} has no readable manifest: {error}") from error
    raise ConfigError(
        f"{folder} has checkpoint format {written}, this release reads {FORMAT}; continue with the release that "
        f"wrote it, or start a run in another directory"
    )


def damage(folder: Path) -> str:
    """Return the fault of a checkpoint's files, or "" when they are whole."""
    try:
        manifest = read_manifest(folder)
        for entry in manifest.files:
            size = (folder / entry.path).stat().st_size
            if size != entry.size_bytes:
                return f"{entry.path} holds {size} bytes instead of {entry.size_bytes}"
            if _digest(folder / entry.path) != entry.digest:
                return f"{entry.path} has another digest than when it was written"
    except (DataError, OSError, ValueError) as error:
        return str(error)
    return ""


def entries(folder: Path) -> Iterator[FileEntry]:
    """Yield an entry for every file of a checkpoint."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            yield FileEntry(str(path.relative_to(folder)), path.stat().st_size, _digest(path))


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


CARRIED_FILES = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "chat_template*",
)
"""Files that the export copies from the initial adapter's folder."""

log = logging.getLogger(__name__)


def save(directory: Path, models: Models, state: TrainerState) -> Path:
    """Write a checkpoint, return its folder. A collective.

    Raises:
        NotSaved: some rank could not write its part, on every rank; nothing of it is left, and older ones are.
    """
    final = directory / f"step_{state.iteration:08d}"
    beside = directory / f".{final.name}.partial"
    written = _Writing(directory, beside, state.iteration, models)
    # Rank 0 makes the folder. No rank may write before it is there, or after rank 0 failed.
    if models.rank == 0:
        written.part(lambda: _begin(directory, beside))
    written.together()
    crash_point("checkpoint.begun")
    written.part(lambda: _write_rank(beside / f"rank_{models.rank:05d}", models))
    # The exports gather weights over ranks, so every rank takes part in each, in this order.
    exported = [("hf", models.actor, models.source)]
    if models.reward and models.reward.trained:
        exported.append(("hf_reward", models.reward.trained, models.reward.source))
    for name, model, source in exported:
        written.export(beside / name, model, source)
        if model.ema:
            with model.averaged():
                written.export(beside / f"{name}_ema", model, source)
    written.together()
    # The manifest names every file, so it comes last, after all ranks have written theirs.
    if models.rank == 0:
        written.part(lambda: _finish(beside, final, state, models))
    written.together()
    return final


@dataclass
class _Writing:
    """A checkpoint being written: of a part that fails every rank learns before the next."""

    directory: Path
    beside: Path
    iteration: int
    models: Models
    fault: Exception | None = None

    def part(self, write: Callable[[], object]) -> None:
        """Write a part unless an earlier one failed; it may hold no collective."""
        if self.fault is None:
            try:
                write()
            except (OSError, SafetensorError, DataError) as fault:
                self.fault = fault

    def export(self, folder: Path, model: TrainedModel, source: str) -> None:
        """Write an exported model. A collective."""
        weights = self.models.state_dict_for_publication(model)
        if self.models.rank == 0:
            self.part(lambda: write_export(folder, weights, source, self.models.dtype))

    def together(self) -> None:
        """Wait for all ranks; raise NotSaved on all if one failed."""
        failed = torch.tensor([float(self.fault is not None)], device=self.models.device)
        if not sum_over_ranks(failed).item():
            return
        if self.models.rank == 0:
            shutil.rmtree(self.beside, ignore_errors=True)
        *_, newest = None, *checkpoints(self.directory).values()
        older = f"the newest one is {newest}" if newest else "there is no older one"
        raise NotSaved(
            f"the checkpoint of iteration {self.iteration} could not be written: "
            f"{self.fault or 'another rank failed, its log has the cause'}; "
            f"{in_mib(free_bytes(self.directory))} are free there; {older}"
        )


def _begin(directory: Path, beside: Path) -> None:
    """Make the folder; refuse to fill a disk whose last room the journal needs."""
    for partial in directory.glob(".step_*.partial"):  # of a learner that was killed
        shutil.rmtree(partial, ignore_errors=True)
    beside.mkdir(parents=True)
    *_, newest = None, *checkpoints(directory).values()
    needed = held_bytes(newest) if newest else 0
    if (free := free_bytes(directory)) < needed:
        raise OSError(
            errno.ENOSPC,
            f"it takes about {in_mib(needed)}, {in_mib(free)} are free",
            str(directory),
        )


def _finish(beside: Path, final: Path, state: TrainerState, models: Models) -> None:
    write_manifest(
        beside,
        CheckpointManifest(FORMAT, state, models.actor.stage, models.dtype, tuple(entries(beside))),
    )
    for path in [*beside.rglob("*"), beside]:
        sync(path)
    crash_point("checkpoint.written")
    shutil.rmtree(final, ignore_errors=True)
    beside.rename(final)
    sync(final.parent)
    crash_point("checkpoint.renamed")
    problem = damage(final)
    if problem:
        raise DataError(f"{final} does not read back: {problem}")


def load(directory: Path, models: Models) -> TrainerState | None:
    """Restore the models from the newest whole checkpoint; None without one. A collective.

    Raises:
        DataError: it was written by another number of ranks, ZeRO stage or precision.
    """
    # Rank 0 alone looks, and tells the others one more than its iteration: 0 is none.
    newest = latest(directory) if models.rank == 0 else None
    behind = torch.tensor([int(newest.name[5:]) + 1 if newest else 0], device=models.device)
    iteration = int(sum_over_ranks(behind).item()) - 1
    if iteration < 0:
        return None
    folder = directory / f"step_{iteration:08d}"
    manifest = read_manifest(folder)
    trained = dict(_trained_models(models))
    shares = {Path(entry.path).name for entry in manifest.files}
    # A share fits only the layout that it was cut by: a difference is named before it is read.
    here_and_saved: dict[str, tuple[object, object]] = {
        "learner ranks": (models.world_size, manifest.state.world_size),
        "ZeRO stage": (models.actor.stage, manifest.zero_stage),
        "learner.dtype": (models.dtype, manifest.dtype),
    }
    for part, name in (("critic", "critic"), ("reward", "a trained implicit reward model")):
        here_and_saved[name] = (
            "one" if part in trained else "none",
            "one" if f"{part}.safetensors" in shares else "none",
        )
    for name, (now, then) in here_and_saved.items():
        if now != then:
            raise DataError(
                f"{folder} was written with {name} = {then}, this run has {now}; resume with {then}, or start a new "
                f"run from the weights in {folder / 'hf'}"
            )
    _restore_models(folder, models)
    _restore_random(load_file(folder / f"rank_{models.rank:05d}/random.safetensors"))
    models.optimizer_steps = manifest.state.optimizer_steps
    return manifest.state


def go_back(directory: Path, models: Models, iteration: int) -> int | None:
    """Give the models weights and moments of the newest whole checkpoint up to an iteration; return its iteration.

    None: there is none, and nothing has changed. Schedule and random states go on. A collective.
    """
    newest = -1
    if models.rank == 0:
        earlier = [number for number in checkpoints(directory) if number <= iteration]
        whole = (n for n in reversed(earlier) if not damage(directory / f"step_{n:08d}"))
        newest = next(whole, -1)
    behind = torch.tensor([newest + 1 if models.rank == 0 else 0], device=models.device)
    newest = int(sum_over_ranks(behind).item()) - 1
    if newest < 0:
        return None
    _restore_models(directory / f"step_{newest:08d}", models)
    return newest


def _restore_models(folder: Path, models: Models) -> None:
    share = folder / f"rank_{models.rank:05d}"
    for name, model in _trained_models(models):
        _restore(model, load_file(share / f"{name}.safetensors"))


def take_critic(folder: Path, models: Models) -> None:
    """Begin with the critic of another run's checkpoint if it fits; log why if it does not."""
    manifest = read_manifest(folder)
    begins = f"the run begins with the adapter of {folder} (iteration {manifest.state.iteration})"
    if models.critic is None:
        log.info("%s", begins)
        return
    share = folder / f"rank_{models.rank:05d}/critic.safetensors"
    saved, here = (
        (manifest.state.world_size, manifest.zero_stage),
        (models.world_size, models.critic.stage),
    )
    # A critic is only a better start. One that does not fit is left out, and the run begins anyway.
    tensors = load_file(share) if saved == here and share.exists() and not models.lora else {}
    masters = models.critic.masters()
    if {name.rpartition("/")[0] for name in tensors} != set(masters):
        why = "it fits this run only with the same learner ranks and ZeRO stage, and without low-rank matrices"
        log.warning("%s and a new critic: %s", begins, why if share.exists() else "it has none")
        return
    with torch.no_grad():
        for name, weights in masters.items():
            weights.copy_(tensors[f"{name}/weights"])
    models.critic.masters_changed()
    log.info("%s and its critic", begins)


def latest(directory: Path) -> Path | None:
    """Return the newest whole checkpoint, None where there is none at all.

    Damaged ones are skipped with a warning.

    Raises:
        DataError: every checkpoint is damaged.
    """
    folders = [*reversed(checkpoints(directory).values())]
    for folder in folders:
        problem = damage(folder)
        if not problem:
            return folder
        log.warning("skipping the checkpoint %s: %s", folder, problem)
    if folders:
        raise DataError(
            f"every checkpoint in {directory} is damaged; the newest: {damage(folders[0])}; restore "
            f"one, or remove them to begin again at iteration 0"
        )
    return None


def write_export(folder: Path, weights: dict[str, Tensor], model_source: str, dtype: str) -> None:
    """Write weights as a Hugging Face folder with the tokenizer that the model came with."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, file := folder / "model.safetensors", metadata={"format": "pt"})
    file.chmod(folder.stat().st_mode & 0o666)  # safetensors lets its owner alone read it
    source = Path(model_source)
    for pattern in CARRIED_FILES:
        for path in source.glob(pattern):
            shutil.copyfile(path, folder / path.name)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)
    config["dtype"] = dtype  # or a loader that trusts the config would round the weights
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _write_rank(folder: Path, models: Models) -> None:
    folder.mkdir()
    for name, model in _trained_models(models):
        save_file(_partition_tensors(model), folder / f"{name}.safetensors")
    save_file(_random_states(), folder / "random.safetensors")


def _trained_models(models: Models) -> list[tuple[str, TrainedModel]]:
    critic = [("critic", models.critic)] if models.critic else []
    reward = [("reward", models.reward.trained)] if models.reward and models.reward.trained else []
    return [("actor", models.actor), *critic, *reward]


def _partition_tensors(model: TrainedModel) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, weights in model.masters().items():
        state = saved_state(model.adam.state.get(weights, {}))
        average = {"ema": model.ema[name]} if model.ema else {}
        for part, tensor in {"weights": weights.detach(), **average, **state}.items():
            tensors[f"{name}/{part}"] = tensor.to("cpu").contiguous()
    return tensors


@torch.no_grad()
def _restore(model: TrainedModel, tensors: dict[str, Tensor]) -> None:
    masters = model.masters()
    saved = {name.rpartition("/")[0] for name in tensors}
    if saved != set(masters):
        raise DataError(
            f"the checkpoint holds {sorted(saved)[:5]}..., this model has {sorted(masters)[:5]}..."
        )
    for name, weights in masters.items():
        weights.copy_(tensors.pop(f"{name}/weights"))
        if model.ema:
            model.ema[name].copy_(tensors.pop(f"{name}/ema"))
        model.adam.state.pop(weights, None)
    for name, tensor in tensors.items():
        owner, _, part = name.rpartition("/")
        model.adam.state[masters[owner]][part] = restored(
            part, tensor, model.adam, masters[owner].device
        )
    model.masters_changed()


def _random_states() -> dict[str, Tensor]:
    _, keys, position, _, _ = np.random.get_state()
    version, words, _ = random.getstate()
    states = {
        "torch": torch.get_rng_state(),
        "numpy": torch.from_numpy(np.append(keys, position).astype(np.int64)),
        "python": torch.tensor([version, *words], dtype=torch.int64),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _restore_random(states: dict[str, Tensor]) -> None:
    torch.set_rng_state(states["torch"])
    *keys, position = states["numpy"].tolist()
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, 0, 0.0))
    version, *words = states["python"].tolist()
    random.setstate((version, tuple(words), None))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
