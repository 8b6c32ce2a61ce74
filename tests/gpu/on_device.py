"""The bodies of `make gpu` as functions of a device: the quick suite runs them small on the CPU.

`python -m gpu.on_device DEVICE FOLDER` writes the losses of every variant, for a comparison of two devices;
with `RANK DEVICE FOLDER RANKS` it is one of several ranks, of which the first writes `RANKS.json`.
"""

import gc
import json
import os
import sys
import time
import warnings
import weakref
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from benchmarks.results import Figure, Report, commit
from benchmarks.snapshots import snapshot_of
from gpu.ranks import run_ranks, share_of_rank
from prefixrl.common.config.run import RunConfig
from prefixrl.common.engines.embedded.continuous import TransformersEngine
from prefixrl.common.host.process import no_teardown
from prefixrl.common.weights.delta import write_delta
from prefixrl.common.weights.snapshot import describe, write_snapshot
from prefixrl.learner.check import budget
from prefixrl.learner.check.footprint import CONTEXT_BYTES, FRAGMENTED, learner_footprint
from prefixrl.learner.check.model_shapes import parameters, shape_of
from prefixrl.learner.models import distributed
from prefixrl.learner.models.batch import IterationData, Sample
from prefixrl.learner.models.model import Models
from prefixrl.learner.training import checkpoint
from prefixrl.learner.training.checkpoint import TrainerState
from prefixrl.learner.training.iteration import train_iteration
from prefixrl.learner.weights.copies import HostCopies, not_finite
from support.live_bytes import LiveBytes
from support.models.tiny_model import random_iteration, run_config, whole
from support.paths import ROOT
from support.runs.run_helper import child, finish, launched, trained_iterations, wait_for

Losses = dict[str, list[float]]
CPU = {"device": "cpu"}
VARIANTS: dict[str, dict[str, Any]] = {
    **{
        f"stage {stage}": {"deepspeed": {"zero_optimization": {"stage": stage}}}
        for stage in range(4)
    },
    "packed": {"packed": True},
    "checkpointed": {"gradient_checkpointing": True},
    "average": {"ema_decay": 0.9},
    "low rank": {"lora": {"rank": 4}},
    "offloaded": {"deepspeed": {"zero_optimization": {"stage": 2, "offload_optimizer": CPU}}},
    "bfloat16": {"dtype": "bfloat16"},
    "varlen, bfloat16": {"dtype": "bfloat16", "attn_implementation": "varlen"},
}
LOSSES = "policy_loss", "value_loss", "actor_grad_norm", "critic_grad_norm"
OWN = {"low rank", "bfloat16", "varlen, bfloat16"}
"""Variants that train something else than the others."""


def figure(
    name: str, unit: str, value: float, baseline: float | None = None, baseline_name: str = ""
) -> Figure:
    """One value, measured once."""
    ratio = value / baseline if baseline else None
    return Figure(
        name, unit, value, 1, (value, value), baseline, baseline_name, ratio, "single value", "none"
    )


def results_folder() -> Path:
    """`$OUT`, else the folder of the committed results."""
    return Path(os.environ.get("OUT") or ROOT / "benchmarks" / "results")


def write_report(name: str, figures: list[Figure], started_s: float) -> None:
    """`gpu_NAME.json` in the folder of results."""
    Report(f"gpu_{name}", False, {}, figures, None, commit()).finish(
        results_folder() / f"gpu_{name}.json", started_s
    )


def wait(device: str) -> None:
    """Until everything that was asked of the device is done."""
    if device == "cuda":
        torch.cuda.synchronize()


def losses(device: str, adapter: Path) -> Losses:
    """Losses and gradient norms of three iterations, by variant."""
    return {name: _trained(device, adapter, settings) for name, settings in VARIANTS.items()}


def _trained(device: str, adapter: Path, settings: dict[str, Any]) -> list[float]:
    config = run_config(adapter, learner={"device": device, **settings})
    models = Models.load(config, 0, 1, str(adapter))
    results = []
    for iteration in range(3):
        steps = train_iteration(models, random_iteration(iteration), config, 20).steps
        results += [step[name] for step in steps for name in LOSSES]
    return results


def resumed_and_poisoned(device: str, adapter: Path, folder: Path) -> tuple[float, bool]:
    """Largest difference after a resume, and whether steps with a NaN were dropped."""
    config = run_config(adapter, learner={"device": device, "dtype": "bfloat16"})
    models = Models.load(config, 0, 1, str(adapter))
    train_iteration(models, random_iteration(0), config, 20)
    checkpoint.save(folder, models, TrainerState(1, models.optimizer_steps, 1))
    resumed = Models.load(config, 0, 1, str(adapter))
    checkpoint.load(folder, resumed)
    for loaded_models in (models, resumed):
        train_iteration(loaded_models, random_iteration(1), config, 20)
    pairs = zip(models.actor.masters().values(), resumed.actor.masters().values(), strict=True)
    difference = max(float((tensor - other).detach().abs().max()) for tensor, other in pairs)
    before = {name: weights.detach().clone() for name, weights in models.actor.masters().items()}
    data = random_iteration(2)
    bad = {
        row: replace(sample, logprobs=sample.logprobs * float("nan"))
        for row, sample in data.samples.items()
    }
    steps = train_iteration(models, replace(data, samples=bad), config, 20).steps
    is_dropped = not any(step["actor_applied"] for step in steps)
    return difference, is_dropped and all(
        torch.equal(weights, before[name]) for name, weights in models.actor.masters().items()
    )


def save_random(folder: Path, shape: PretrainedConfig, dtype: str) -> Path:
    """A model folder with random weights of this shape."""
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(shape, dtype=getattr(torch, dtype)).save_pretrained(folder)
    return folder


def padded_rows(
    groups: int, samples: int, prompt_tokens: int, sampled_tokens: int, vocabulary: int
) -> IterationData:
    """An iteration of random rows of nearly one length: every second group's prompt is a token shorter."""
    random = np.random.Generator(np.random.PCG64(1))
    rows: dict[int, Sample] = {}
    for group in range(groups):
        prompt = random.integers(2, vocabulary, prompt_tokens - group % 2).astype(np.int32)
        for _ in range(samples):
            tokens = random.integers(2, vocabulary, sampled_tokens).astype(np.int32)
            logprobs = np.full(sampled_tokens, -5.0, dtype=np.float32)
            reward = float(random.integers(0, 2))
            rows[len(rows)] = Sample(
                prompt, tokens, logprobs, reward, group, np.zeros(sampled_tokens, np.int32)
            )
    return IterationData(
        iteration=0,
        seed=1,
        lengths=tuple((len(row.prompt_tokens), sampled_tokens) for row in rows.values()),
        rewards=tuple(row.reward for row in rows.values()),
        groups=tuple(row.group for row in rows.values()),
        samples=rows,
    )


def memory_and_speed(config: RunConfig, prompt_tokens: int, label: str) -> list[Figure]:
    """Peak of two iterations beside the forecast, tokens per second, operations, device syncs."""
    device = config.learner.device
    plan = budget.rank_plan(config, prompt_tokens)
    assert plan is not None
    algorithm, vocabulary = config.algorithm, shape_of(config.adapter.model)
    assert vocabulary is not None
    sampled = config.max_sampled_tokens
    groups, samples = algorithm.groups_per_iteration, algorithm.samples_per_prompt
    data = padded_rows(groups, samples, prompt_tokens, sampled, vocabulary.vocabulary)
    with LiveBytes() if device == "cpu" else nullcontext() as live:
        if device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        models = Models.load(config, 0, 1, config.adapter.model)
        train_iteration(models, data, config, 20)
        if live is not None:
            live.peak_bytes = live.now_bytes
        wait(device)
        started_s = time.monotonic()
        train_iteration(models, data, config, 20)
        wait(device)
        seconds = time.monotonic() - started_s
        peak = live.peak_bytes if live is not None else torch.cuda.max_memory_allocated()
        reserved = peak if live is not None else torch.cuda.max_memory_reserved()
    result = learner_footprint(plan)
    expected = (result.peak - CONTEXT_BYTES - result.states) / (1 + FRAGMENTED) + result.states
    lines = sum(
        len(micro)
        for step in budget.planned(config, prompt_tokens)[0]
        for share in step
        for micro in share
    )
    tokens = lines * prompt_tokens + groups * samples * sampled
    # Forward-equivalents: a backward pass costs two, and one more where layers run again.
    trained = (
        (1 + algorithm.has_critic)
        * algorithm.ppo_epochs
        * (4 if config.learner.gradient_checkpointing else 3)
    )
    forwards = 1 + algorithm.has_critic + (algorithm.kl > 0) + trained
    count, _ = parameters(config.adapter.model) or (0, "")
    body = count - vocabulary.embedding * (1 if vocabulary.is_tied else 2)
    figures = [
        figure(f"{label}: peak memory", "bytes", peak, expected, "the forecast"),
        figure(f"{label}: reserved of the device", "bytes", reserved, peak, "the peak"),
        figure(f"{label}: learner", "tokens/s", tokens / seconds),
        figure(f"{label}: operations", "TFLOP/s", 2 * body * tokens * forwards / seconds / 1e12),
        figure(f"{label}: device syncs of an iteration", "syncs", _syncs(models, data, config)),
    ]
    owned = [weakref.ref(parameter) for parameter in models.actor.engine.module.parameters()]
    for part in filter(None, (models.actor, models.critic)):
        part.close()
    del models, part
    gc.collect()
    assert not any(reference() is not None for reference in owned), (
        "the next configuration would be loaded on top of this one"
    )
    return figures


def _syncs(models: Models, data: IterationData, config: RunConfig) -> int:
    """Waits of the host for the device; none on a CPU."""
    if config.learner.device == "cpu":
        return 0
    with warnings.catch_warnings(record=True) as caught_warnings:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        train_iteration(models, data, config, 20)
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in caught_warnings)


class NobodyWaits:
    """Stands for the publisher: buffers are always free here."""

    def check(self) -> None:
        raise AssertionError("no set of buffers is free")


def publication(device: str, size_bytes: int, folder: Path) -> list[Figure]:
    """Seconds of a publication's parts, and whether what is written is what the device holds."""
    count = size_bytes // 2 // 8
    tensors = {f"layer.{index}": torch.randn(count, device=device).bfloat16() for index in range(8)}
    copies, result = HostCopies(NobodyWaits()), []
    for version in range(4):
        tensors["layer.0"][version] += 1.0
        wait(device)
        started_s = time.monotonic()
        copied, bad = copies.copy(tensors.items())
        handed_s = time.monotonic() - started_s
        copied.wait()
        whole_s = time.monotonic() - started_s
        started_s = time.monotonic()
        assert not bad and not not_finite(copied.tensors)
        checked_s = time.monotonic() - started_s
        started_s = time.monotonic()
        write_snapshot(folder, describe(version, copied.tensors), copied.tensors)
        written_s = time.monotonic() - started_s
        assert all(
            torch.equal(copied.tensors[name], tensor.cpu()) for name, tensor in tensors.items()
        )
        copied.release()
    started_s = time.monotonic()
    assert write_delta(folder, 2, 3) is not None
    delta_s = time.monotonic() - started_s
    wait(device)
    started_s = time.monotonic()
    pageable = {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}
    pageable_s = time.monotonic() - started_s
    assert pageable.keys() == tensors.keys()
    # What is changed right after the hand-over must not reach the copy.
    expected = {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}
    copied, _ = copies.copy(tensors.items())
    for tensor in tensors.values():
        tensor.zero_()
    copied.wait()
    assert all(torch.equal(copied.tensors[name], tensor) for name, tensor in expected.items())
    result = [
        ("main thread", handed_s),
        ("copy complete", whole_s),
        ("check in the thread", checked_s),
    ]
    result += [("snapshot", written_s), ("delta", delta_s)]
    return [
        figure(
            f"publication of {size_bytes / 2**30:.2g} GiB: {name}",
            "s",
            seconds,
            pageable_s,
            "a pageable copy",
        )
        for name, seconds in result
    ]


def whole_run(
    device: str, folder: Path, iterations: int, engine: str = "transformers"
) -> list[Figure]:
    """`prefixrl launch` of the example with everything on the device; a rollout is killed in the middle."""
    settings = [f"{section}.device={device}" for section in ("learner", "rollout", "scorer")]
    settings += [f"{section}.engine={engine}" for section in ("rollout", "scorer")]
    if engine == "vllm":  # its kernels on a GPU have no float32
        settings += ["learner.dtype=bfloat16", "scorer.vllm.dtype=bfloat16", "launch.scorers=1"]
    settings += [
        "evaluation.problems=16",
        "evaluation.selection_problems=16",
        "evaluation.sampled_candidates=1",
    ]
    settings += [
        "algorithm.groups_per_iteration=16",
        f"algorithm.iterations={iterations}",
        f"broker.silence_s={60 if engine == 'vllm' else 4}",
    ]
    started_s = time.monotonic()
    with launched(folder, *settings) as process:
        wait_for(lambda: trained_iterations(folder) >= 1, "the first iteration")
        wait_for(lambda: child(process, "prefixrl-rollout"), "the rollout").kill()
        summary = finish(process, folder, 500.0)
    assert summary["groups"]["outstanding"] == 0
    return [
        figure(
            f"a run of {iterations} iterations by {engine} with a killed rollout",
            "s",
            time.monotonic() - started_s,
        ),
        figure("a publication, main thread", "s", summary["publish_s"]),
    ]


@torch.no_grad()
def probe(
    device: str, adapter: Path, dtype: str, spread: float, tokens: int
) -> dict[str, np.ndarray]:
    """|learner - engine| of every probe logprob, for the right version and for the one before.

    Logits are scaled to a standard deviation of `spread`, as those of a trained model are.
    """
    config = run_config(adapter, learner={"device": device, "dtype": dtype})
    models = Models.load(config, 0, 1, str(adapter))
    vocabulary = models.hf_config.get_text_config().vocab_size
    ids = np.random.default_rng(1).integers(0, vocabulary, tokens).astype(np.int32)
    head = models.actor.engine.module.model.get_output_embeddings().weight
    inputs = torch.from_numpy(ids.astype(np.int64))[None].to(models.device)
    logits = models.actor.engine.module.model(input_ids=inputs, use_cache=False).logits
    head *= spread / logits.float().std()
    engine = TransformersEngine(str(adapter), device, dtype, 1)
    engine.install(snapshot_of(1, models.state_dict_for_publication()))
    right = models.probe_logprobs([whole(ids)], 0.7) - engine.logprobs(ids, 0.7)
    for parameter in models.actor.engine.module.parameters():
        parameter *= 1.02
    wrong = models.probe_logprobs([whole(ids)], 0.7) - engine.logprobs(ids, 0.7)
    return {"right version": np.abs(right), "weights 2 % off": np.abs(wrong)}


def probe_figures(values_of_versions: dict[str, np.ndarray], label: str) -> list[Figure]:
    """Median, 90th percentile and maximum."""
    return [
        figure(f"{label}, {version}: {name}", "nat", float(np.quantile(values, quantile)))
        for version, values in values_of_versions.items()
        for name, quantile in (("median", 0.5), ("90th percentile", 0.9), ("maximum", 1.0))
    ]


def with_settings(config: RunConfig, **learner: Any) -> RunConfig:
    """The run with other keys of its learner."""
    return config.model_copy(update={"learner": config.learner.model_copy(update=learner)})


def of_rank(device: str, folder: Path, rank: int, ranks: int) -> None:
    """Train three iterations at every stage; rank 0 writes the losses and the digest of the weights before them."""
    report: dict[int, Any] = {}
    for stage in range(4):
        zero = {"zero_optimization": {"stage": stage}}
        learner = {"device": device, "deepspeed": zero, "micro_batch_tokens": 16}
        config = run_config(folder / "adapter", learner=learner)
        models = Models.load(config, rank, ranks, str(folder / "adapter"))
        weights = models.state_dict_for_publication()
        steps = []
        for iteration in range(3):
            data = share_of_rank(models, random_iteration(iteration), config)
            steps += train_iteration(models, data, config, 20).steps
        report[stage] = {
            "digest": describe(0, weights).digest if weights else "",
            "losses": [step[name] for step in steps for name in LOSSES],
        }
    if rank == 0:
        (folder / f"{ranks}.json").write_text(json.dumps(report))
    distributed.stop()


def of_ranks(device: str, folder: Path, ranks: int) -> dict[str, Any]:
    """Report of rank 0 of so many, by stage."""
    run_ranks(__file__, ranks, device, folder, ranks)
    result: dict[str, Any] = json.loads((folder / f"{ranks}.json").read_text())
    return result


def main(first: str, *arguments: str) -> None:
    """Write the losses of every variant, or be a rank."""
    if first.isdigit():
        with no_teardown():  # ends the process
            of_rank(arguments[0], Path(arguments[1]), int(first), int(arguments[2]))
    Path(arguments[0], "losses.json").write_text(
        json.dumps(losses(first, Path(arguments[0], "adapter")))
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
