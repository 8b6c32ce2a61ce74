"""One iteration of the learner: the prompt once for a group, beside a prompt per row, beside a bare loop of PyTorch.

A model of 66 M parameters with random weights (Qwen2's architecture), prompts of 200 tokens, prefixes of 32, 8 per
prompt, the paper's objective: actor, critic and reference, KL in the reward, one optimiser step. In turn, as often as
there are rounds:

    per row    every row carries its prompt (`learner.shared_prompts = false`), as in the release before
    shared     the prompt once for a group's rows
    unreferred the same without the reference's forward: what is to gain where it is made while the learner waits
    bare       the forwards and backwards of "shared", over the same micro-batches, in a plain loop: no plan, no
               figures, no checks, logits as one table, torch's AdamW

Speeds are per second of CPU time (one thread), so that other work on the machine does not count; ratios are medians
over the rounds. Peak memory is what an iteration takes above what was held before it (resident set, the models apart).

    python -m benchmarks.learner_step [--quick] --json FILE
"""

import ctypes
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM
from transformers.utils.logging import disable_progress_bar

from benchmarks.results import Figure, Report, commit, options
from prefixrl.common.config.run import RunConfig
from prefixrl.learner.training.backbone import visible
from prefixrl.learner.training.batch import IterationData, PaddedRows, Sample, pad_lines
from prefixrl.learner.training.iteration import train_iteration
from prefixrl.learner.training.model import Models
from prefixrl.learner.training.plan import plan_iteration

PROMPT_TOKENS, PREFIX_TOKENS, SAMPLES = 200, 32, 8
MICRO_BATCH_TOKENS = 2048
GROUPS, ROUNDS = 2, 3
QUICK_GROUPS, QUICK_ROUNDS = 2, 1
VOCABULARY = 16_384
LARGE: dict[str, Any] = {
    "hidden_size": 640,
    "intermediate_size": 1920,
    "num_hidden_layers": 12,
    "num_attention_heads": 10,
}
SMALL: dict[str, Any] = {"hidden_size": 320, "intermediate_size": 960, "num_hidden_layers": 4, "num_attention_heads": 5}


@dataclass(frozen=True)
class Measured:
    """One iteration."""

    cpu_s: float
    wall_s: float
    peak_mib: float


class BareLoop:
    """Two models, two optimisers, and no more than the work itself."""

    def __init__(self, folder: Path, models: Models) -> None:
        self.actor = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.critic = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().model
        self.head = torch.zeros(self.actor.config.hidden_size, requires_grad=True)
        assert models.reference is not None
        self.reference = models.reference.model
        self.optimizers = [
            torch.optim.AdamW(parameters, lr=1e-6, weight_decay=0.0)
            for parameters in (list(self.actor.parameters()), [*self.critic.parameters(), self.head])
        ]

    def iteration(self, batches: Sequence[PaddedRows]) -> None:
        """Measure, then train, over the same micro-batches."""
        with torch.no_grad():
            measured = [
                (self.logprobs(self.actor, each)[0], self.logprobs(self.reference, each)[0], self.values(each))
                for each in batches
            ]
        for batch, (proximal, reference, old_values) in zip(batches, measured, strict=True):
            advantages = batch.rewards.mean() - 0.01 * (proximal - reference) - old_values
            logprobs, entropy = self.logprobs(self.actor, batch)
            ratio = (logprobs - proximal).exp()
            surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
            torch.autograd.backward(-(surrogate + 0.001 * entropy).mean())
            torch.autograd.backward((self.values(batch) - advantages - old_values).square().mean())
        for optimizer in self.optimizers:
            torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
            optimizer.step()
            optimizer.zero_grad()

    def logprobs(self, model: Any, batch: PaddedRows) -> tuple[Tensor, Tensor]:
        """Logprob and entropy of every sampled token."""
        table = torch.log_softmax(F.linear(self.hidden(model.model, batch), model.lm_head.weight), dim=-1)
        asked = batch.tokens.flatten()[batch.cells]
        return table.gather(1, asked[:, None])[:, 0], -(table.exp() * table).sum(dim=-1)

    def values(self, batch: PaddedRows) -> Tensor:
        return self.hidden(self.critic, batch) @ self.head

    @staticmethod
    def hidden(backbone: Any, batch: PaddedRows) -> Tensor:
        assert batch.segments is not None
        mask = visible(batch.segments)[:, None]
        out = backbone(input_ids=batch.input_ids, attention_mask=mask, position_ids=batch.position_ids, use_cache=False)
        hidden: Tensor = out.last_hidden_state.flatten(0, 1)[batch.actions]
        return hidden


def made(folder: Path, is_quick: bool) -> int:
    """Write the model; return its parameters."""
    torch.manual_seed(1)
    shape = Qwen2Config(
        vocab_size=VOCABULARY, num_key_value_heads=1 if is_quick else 2, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=1, pad_token_id=None, **(SMALL if is_quick else LARGE),
    )  # fmt: skip
    model = Qwen2ForCausalLM(shape)
    model.save_pretrained(folder)
    return sum(each.numel() for each in model.parameters())


def run_config(folder: Path) -> RunConfig:
    return RunConfig.model_validate(
        {
            "directory": str(folder / "run"),
            "adapter": {"model": str(folder)},
            "target": {"model": str(folder)},
            "data": {"train": "unused.jsonl"},
            "algorithm": {"name": "gae", "iterations": 100, "minibatches": 1, "kl": 0.01, "entropy": 0.001},
            "learner": {"dtype": "float32", "device": "cpu", "micro_batch_tokens": MICRO_BATCH_TOKENS},
        }
    )


def sampled(groups: int) -> IterationData:
    """An iteration of random tokens."""
    random = np.random.Generator(np.random.PCG64(1))
    samples: dict[int, Sample] = {}
    for group in range(groups):
        prompt = random.integers(2, VOCABULARY, PROMPT_TOKENS).astype(np.int32)
        for _ in range(SAMPLES):
            tokens = random.integers(2, VOCABULARY, PREFIX_TOKENS).astype(np.int32)
            logprobs = np.full(PREFIX_TOKENS, -np.log(VOCABULARY), dtype=np.float32)
            reward = float(random.integers(0, 2))
            versions = np.zeros(PREFIX_TOKENS, dtype=np.int32)
            samples[len(samples)] = Sample(prompt, tokens, logprobs, reward, group, versions)
    rows = list(samples.values())
    return IterationData(
        iteration=0,
        seed=1,
        lengths=((PROMPT_TOKENS, PREFIX_TOKENS),) * len(rows),
        rewards=tuple(row.reward for row in rows),
        groups=tuple(row.group for row in rows),
        samples=samples,
    )


def measure(work: Callable[[], object]) -> Measured:
    """Do the work once, after the allocator gave back what earlier work left free."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    held_mib = resident_mib("VmRSS")
    wall_s, cpu_s = time.monotonic(), time.process_time()
    work()
    cpu_s, wall_s = time.process_time() - cpu_s, time.monotonic() - wall_s
    return Measured(cpu_s, wall_s, resident_mib("VmHWM") - held_mib)


def resident_mib(field: str) -> float:
    """Read a field of this process's memory: VmRSS now, VmHWM at most since it was reset."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def figures_of(found: dict[str, list[Measured]], rows: int) -> list[Figure]:
    """Speeds, their ratios round by round, and peak memory."""
    speeds = {name: [rows / each.cpu_s for each in measured] for name, measured in found.items()}
    figures = []
    for name, measured in found.items():
        peaks = [each.peak_mib for each in measured]
        baseline = "bare" if name == "shared" else ""
        ratios = [mine / its for mine, its in zip(speeds[name], speeds["bare"], strict=True)] if baseline else []
        figures.append(median(f"{name}: speed", "prefixes/s of one core", speeds[name], ratios, speeds, baseline))
        figures.append(median(f"{name}: peak memory of an iteration", "MiB", peaks, [], speeds, ""))
    gains = [mine / its for mine, its in zip(speeds["shared"], speeds["per row"], strict=True)]
    figures.append(
        median("shared: speed beside per row", "prefixes/s of one core", speeds["shared"], gains, speeds, "per row")
    )
    shares = [
        1.0 - without.cpu_s / whole.cpu_s for without, whole in zip(found["unreferred"], found["shared"], strict=True)
    ]
    figures.append(median("reference's forward: share of an iteration", "1", shares, [], speeds, ""))
    return figures


def median(
    name: str, unit: str, values: list[float], ratios: list[float], speeds: dict[str, list[float]], baseline: str
) -> Figure:
    return Figure(
        name, unit, statistics.median(values), len(values), (min(values), max(values)),
        statistics.median(speeds[baseline]) if baseline else None, baseline,
        statistics.median(ratios) if ratios else None, "median", "smallest and largest",
    )  # fmt: skip


@click.command()
@options
def main(path: Path, quick: bool) -> None:
    measured_commit, started_s = commit(), time.monotonic()
    torch.set_num_threads(1)
    disable_progress_bar()
    groups, rounds = (QUICK_GROUPS, QUICK_ROUNDS) if quick else (GROUPS, ROUNDS)
    with tempfile.TemporaryDirectory(prefix="learner-step-") as folder:
        parameters = made(Path(folder), quick)
        config = run_config(Path(folder))
        models = Models.load(config, 0, 1, folder)
        bare = BareLoop(Path(folder), models)
        data = sampled(groups)
        plan = plan_iteration(data.lengths, data.groups, data.seed, 1, 1, MICRO_BATCH_TOKENS)
        batches = [pad_lines([[data.samples[row] for row in line] for line in micro], 0) for micro in plan[0][0]]
        tokens: dict[str, float] = {}

        def product(name: str, is_shared: bool, has_reference: bool = True) -> Callable[[], None]:
            def work() -> None:
                models.is_shared, models.has_reference = is_shared, has_reference
                tokens[name] = train_iteration(models, data, config, 1000).means["forward_tokens"]

            return work

        works: dict[str, Callable[[], object]] = {
            "per row": product("per row", False),
            "shared": product("shared", True),
            "unreferred": product("unreferred", True, has_reference=False),
            "bare": lambda: bare.iteration(batches),
        }
        for name in ("shared", "bare"):
            works[name]()  # makes the optimisers' moments
        found: dict[str, list[Measured]] = {name: [] for name in works}
        for number in range(rounds):
            for name, work in works.items():
                found[name].append(measure(work))
                print(f"round {number}, {name}: {found[name][-1]}", flush=True)
    report = Report(
        benchmark="learner_step",
        is_quick=quick,
        settings={
            "parameters": parameters, "prompt_tokens": PROMPT_TOKENS, "prefix_tokens": PREFIX_TOKENS,
            "samples_per_prompt": SAMPLES, "groups": groups, "micro_batch_tokens": MICRO_BATCH_TOKENS,
            "forward_tokens": tokens,
        },
        figures=figures_of(found, groups * SAMPLES),
        details={
            name: [{"cpu_s": each.cpu_s, "wall_s": each.wall_s, "peak_mib": each.peak_mib} for each in measured]
            for name, measured in found.items()
        },
        commit=measured_commit,
    )  # fmt: skip
    report.finish(path, started_s)


if __name__ == "__main__":
    main()
