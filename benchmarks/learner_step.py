"""One iteration of the learner beside a bare loop of PyTorch, and the prompt once for a group beside one per row.

Models with random weights, prompts with 8 prefixes each, one optimiser step per iteration, one thread, and float32
where no other type is named:

    gae, 66 M       Qwen2's architecture; prompts of 200 tokens, prefixes of 32, 2 groups; actor, critic, reference
    grpo, 34 M      the same architecture, prompts of 200 tokens, prefixes of 64, 3 groups; no critic, no reference
    gae, example    the arithmetic example's adapter, its 32 groups, lengths and objective
    grpo, 135 M     the shape of SmolLM2-135M (vocabulary 49,152); prompts of 200 tokens, answers of 48, 3 groups; in
                    float32, in bfloat16, and in bfloat16 with two threads
    grpo, 185 M     Qwen2's architecture, 24 layers, its vocabulary of 151,936; prompts of 200 tokens, prefixes of 32,
                    2 groups; in the same three forms

In turn, as often as there are rounds:

    per row    every row carries its prompt (`learner.shared_prompts = false`), as in the release before
    shared     the prompt once for a group's rows
    unreferred the same without the reference's forward: what is to gain where it is made while the learner waits
    bare       what an expert writes for this objective alone: the same micro-batches, no plan, no figures, no checks,
               logits as one table, torch's AdamW, and no forward that is not needed. With a KL in the reward and a
               critic, logprobs and values are needed before the first loss; without them the loop makes one forward,
               which is also that of the loss. In bfloat16 it keeps float32 masters, and copies them back

Speeds are per second of CPU time, so that other work on the machine does not count; ratios are medians over the rounds.
Peak memory is what an iteration takes above what was held before it (resident set, the models apart).

    python -m benchmarks.learner_step [--quick | --real-shapes] --json FILE
"""

import ctypes
import gc
import json
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
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.utils.logging import disable_progress_bar

from benchmarks.results import ROOT, Figure, Report, commit, options
from prefixrl.common.config.run import RunConfig
from prefixrl.learner.models.backbone import visible
from prefixrl.learner.models.batch import IterationData, PaddedRows, Sample, pad_lines
from prefixrl.learner.models.model import Models
from prefixrl.learner.training.iteration import train_iteration
from prefixrl.learner.training.plan import plan_iteration

SAMPLES = 8
EXAMPLE = ROOT / "deploy" / "examples" / "arithmetic" / "adapter" / "config.json"
PAPER: dict[str, Any] = {"name": "gae", "kl": 0.01, "entropy": 0.001}


@dataclass(frozen=True)
class Case:
    """A model and what it is trained on."""

    name: str
    shape: dict[str, Any] | None
    """Sizes of Qwen2's architecture; None: the example's adapter."""
    prompt_tokens: int
    prefix_tokens: int
    groups: int
    algorithm: dict[str, Any]
    repeats: int
    """Iterations that are timed as one: small ones are too short for the clock."""
    rounds: int
    has_variants: bool = False
    """True to run "per row" and "unreferred", too."""
    micro_batch_tokens: int = 2048
    dtype: str = "float32"
    threads: int = 1


def layers(hidden: int, intermediate: int, count: int, heads: int, **others: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": count,
        "num_attention_heads": heads,
        "num_key_value_heads": 2,
        "vocab_size": 16_384,
    } | others


GRPO: dict[str, Any] = {"name": "grpo", "kl": 0.0, "entropy": 0.001}
SMOLLM2 = layers(576, 1536, 30, 9, num_key_value_heads=3, vocab_size=49_152)
QWEN2 = layers(512, 2048, 24, 8, vocab_size=151_936)
REAL_SHAPES = tuple(
    Case(
        f"grpo, {name}, {dtype}{', 2 threads' if threads == 2 else ''}",
        shape,
        200,
        tokens,
        groups,
        GRPO,
        1,
        rounds,
        dtype=dtype,
        threads=threads,
    )
    for name, shape, tokens, groups, rounds in (
        ("135 M", SMOLLM2, 48, 3, 3),
        ("185 M", QWEN2, 32, 2, 3),
    )
    for dtype, threads in (("float32", 1), ("bfloat16", 1), ("bfloat16", 2))
)


CASES = (
    Case("gae, 66 M", layers(640, 1920, 12, 10), 200, 32, 2, PAPER, 1, 5, has_variants=True),
    Case("grpo, 34 M", layers(512, 1536, 8, 8), 200, 64, 3, GRPO, 1, 7),
    Case(
        "gae, example", None, 20, 8, 32, PAPER | {"entropy": 0.03}, 8, 9, micro_batch_tokens=16_384
    ),
)
QUICK_CASES = (
    Case("gae, small", layers(320, 960, 4, 10), 200, 32, 2, PAPER, 1, 1, has_variants=True),
    Case(
        "gae, example", None, 20, 8, 32, PAPER | {"entropy": 0.03}, 2, 3, micro_batch_tokens=16_384
    ),
)


@dataclass(frozen=True)
class Measured:
    """One iteration."""

    cpu_s: float
    wall_s: float
    peak_mib: float


class BareLoop:
    """The models and optimisers of an objective, and no more than the work itself."""

    def __init__(self, folder: Path, models: Models, dtype: str) -> None:
        self.actor = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype)
        ).eval()
        self.critic: Any = None
        trained = [list(self.actor.parameters())]
        if models.critic is not None:
            assert models.reference is not None
            self.critic = (
                AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().model
            )
            self.head = torch.zeros(self.actor.config.hidden_size, requires_grad=True)
            self.reference = models.reference.model
            trained.append([*self.critic.parameters(), self.head])
        self.trained = trained if dtype == "bfloat16" else []
        """Parameters whose masters the optimisers have; none in float32."""
        masters = [
            [each.detach().float().requires_grad_() for each in group] for group in self.trained
        ] or trained
        self.optimizers = [
            torch.optim.AdamW(parameters, lr=1e-6, weight_decay=0.0) for parameters in masters
        ]

    def iteration(self, batches: Sequence[PaddedRows]) -> None:
        """Backward over all micro-batches and one step."""
        for batch, measured in zip(batches, self.measured(batches), strict=True):
            logprobs, entropy = self.logprobs(self.actor, batch)
            if measured is None:
                proximal, advantages = logprobs.detach(), batch.rewards.mean()
            else:
                proximal, reference, old_values = measured
                advantages = batch.rewards.mean() - 0.01 * (proximal - reference) - old_values
                torch.autograd.backward(
                    (self.values(batch) - advantages - old_values).square().mean()
                )
            ratio = (logprobs - proximal).exp()
            surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
            torch.autograd.backward(-(surrogate + 0.001 * entropy).mean())
        for number, optimizer in enumerate(self.optimizers):
            parameters = self.trained[number] if self.trained else []
            masters = optimizer.param_groups[0]["params"]
            for master, parameter in zip(masters, parameters, strict=False):
                master.grad, parameter.grad = parameter.grad.float(), None
            torch.nn.utils.clip_grad_norm_(masters, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for master, parameter in zip(masters, parameters, strict=False):
                    parameter.copy_(master)

    @torch.no_grad()
    def measured(self, batches: Sequence[PaddedRows]) -> list[tuple[Tensor, Tensor, Tensor] | None]:
        """Measure what advantages with a KL and a critic need before the loss; None without them."""
        if self.critic is None:
            return [None] * len(batches)
        return [
            (
                self.logprobs(self.actor, each)[0],
                self.logprobs(self.reference, each)[0],
                self.values(each),
            )
            for each in batches
        ]

    def logprobs(self, model: Any, batch: PaddedRows) -> tuple[Tensor, Tensor]:
        """Logprob and entropy of every sampled token."""
        logits = F.linear(self.hidden(model.model, batch), model.lm_head.weight)
        table = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
        asked = batch.tokens.flatten()[batch.cells]
        return table.gather(1, asked[:, None])[:, 0], -(table.exp() * table).sum(dim=-1)

    def values(self, batch: PaddedRows) -> Tensor:
        return self.hidden(self.critic, batch) @ self.head

    @staticmethod
    def hidden(backbone: Any, batch: PaddedRows) -> Tensor:
        assert batch.segments is not None
        mask = visible(batch.segments)[:, None]
        out = backbone(
            input_ids=batch.input_ids,
            attention_mask=mask,
            position_ids=batch.position_ids,
            use_cache=False,
        )
        hidden: Tensor = out.last_hidden_state.flatten(0, 1)[batch.actions]
        return hidden


def made(folder: Path, shape: dict[str, Any] | None) -> tuple[int, int]:
    """Write the model; return its parameters and its vocabulary."""
    torch.manual_seed(1)
    model: Any
    if shape is None:
        model = LlamaForCausalLM(LlamaConfig(**json.loads(EXAMPLE.read_text(encoding="utf-8"))))
    else:
        ids: dict[str, Any] = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": None}
        model = Qwen2ForCausalLM(Qwen2Config(tie_word_embeddings=True, **ids, **shape))
    model.save_pretrained(folder)
    return sum(each.numel() for each in model.parameters()), model.config.vocab_size


def run_config(folder: Path, case: Case) -> RunConfig:
    return RunConfig.model_validate(
        {
            "directory": str(folder / "run"),
            "adapter": {"model": str(folder)},
            "target": {"model": str(folder)},
            "data": {"train": "unused.jsonl"},
            "algorithm": {"iterations": 100, "minibatches": 1, **case.algorithm},
            "learner": {
                "dtype": case.dtype,
                "device": "cpu",
                "micro_batch_tokens": case.micro_batch_tokens,
                "threads": case.threads,
            },
        }
    )


def sampled(case: Case, vocabulary: int) -> IterationData:
    """An iteration of random tokens."""
    random = np.random.Generator(np.random.PCG64(1))
    samples: dict[int, Sample] = {}
    for group in range(case.groups):
        prompt = random.integers(2, vocabulary, case.prompt_tokens).astype(np.int32)
        for _ in range(SAMPLES):
            tokens = random.integers(2, vocabulary, case.prefix_tokens).astype(np.int32)
            logprobs = np.full(case.prefix_tokens, -np.log(vocabulary), dtype=np.float32)
            reward = float(random.integers(0, 2))
            versions = np.zeros(case.prefix_tokens, dtype=np.int32)
            samples[len(samples)] = Sample(prompt, tokens, logprobs, reward, group, versions)
    rows = list(samples.values())
    return IterationData(
        iteration=0,
        seed=1,
        lengths=((case.prompt_tokens, case.prefix_tokens),) * len(rows),
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


def figures_of(case: Case, found: dict[str, list[Measured]]) -> list[Figure]:
    """Speeds, their ratios round by round, and peak memory."""
    rows = case.groups * SAMPLES * case.repeats
    speeds = {name: [rows / each.cpu_s for each in measured] for name, measured in found.items()}

    def ratios(name: str) -> list[float]:
        return [mine / its for mine, its in zip(speeds["shared"], speeds[name], strict=True)]

    def figure(name: str, unit: str, values: list[float], beside: str = "") -> Figure:
        against = ratios(beside) if beside else []
        return median(f"{case.name}, {name}", unit, values, against, speeds, beside)

    speed = "prefixes/s of one core"
    figures = [figure("shared: speed", speed, speeds["shared"], "bare")]
    if case.has_variants:
        figures += [
            figure(f"{name}: speed", speed, values)
            for name, values in speeds.items()
            if name != "shared"
        ]
        for name, measured in found.items():
            peaks = [each.peak_mib for each in measured]
            figures.append(figure(f"{name}: peak memory of an iteration", "MiB", peaks))
        figures.append(figure("shared: speed beside per row", speed, speeds["shared"], "per row"))
        pairs = zip(found["unreferred"], found["shared"], strict=True)
        shares = [1.0 - without.cpu_s / whole.cpu_s for without, whole in pairs]
        figures.append(figure("reference's forward: share of an iteration", "1", shares))
    return figures


def median(
    name: str,
    unit: str,
    values: list[float],
    ratios: list[float],
    speeds: dict[str, list[float]],
    baseline: str,
) -> Figure:
    return Figure(
        name,
        unit,
        statistics.median(values),
        len(values),
        (min(values), max(values)),
        statistics.median(speeds[baseline]) if baseline else None,
        baseline,
        statistics.median(ratios) if ratios else None,
        "median",
        "smallest and largest",
    )


def run(case: Case) -> tuple[dict[str, list[Measured]], dict[str, float]]:
    """Measure a case; also return its parameters and the tokens of its forwards."""
    torch.set_num_threads(case.threads)
    with tempfile.TemporaryDirectory(prefix="learner-step-") as folder:
        parameters, vocabulary = made(Path(folder), case.shape)
        config = run_config(Path(folder), case)
        models = Models.load(config, 0, 1, folder)
        bare, data = BareLoop(Path(folder), models, case.dtype), sampled(case, vocabulary)
        plan = plan_iteration(data.lengths, data.groups, data.seed, 1, 1, case.micro_batch_tokens)
        batches = [
            pad_lines([[data.samples[row] for row in line] for line in micro], 0)
            for micro in plan[0][0]
        ]
        facts: dict[str, float] = {"parameters": parameters}

        def product(name: str, is_shared: bool, has_reference: bool = True) -> Callable[[], None]:
            def work() -> None:
                models.is_shared, models.has_reference = is_shared, has_reference
                for _ in range(case.repeats):
                    facts[name] = train_iteration(models, data, config, 100_000).means[
                        "forward_tokens"
                    ]

            return work

        def bare_work() -> None:
            for _ in range(case.repeats):
                bare.iteration(batches)

        works: dict[str, Callable[[], object]] = {
            "shared": product("shared", True, config.algorithm.kl > 0.0),
            "bare": bare_work,
        }
        if case.has_variants:
            works["per row"] = product("per row", False)
            works["unreferred"] = product("unreferred", True, has_reference=False)
        for name in ("shared", "bare"):
            works[name]()  # makes the optimisers' moments
        found: dict[str, list[Measured]] = {name: [] for name in works}
        for number in range(case.rounds):
            for name, work in works.items():
                found[name].append(measure(work))
                print(f"{case.name}, round {number}, {name}: {found[name][-1]}", flush=True)
    return found, facts


@click.command()
@options
@click.option("--real-shapes", is_flag=True, help="Measure the cases of real shapes alone.")
def main(path: Path, quick: bool, real_shapes: bool) -> None:
    """Measure, compare with what is claimed, and write."""
    measured_commit, started_s = commit(), time.monotonic()
    disable_progress_bar()
    cases = QUICK_CASES if quick else REAL_SHAPES if real_shapes else CASES
    runs = {case.name: run(case) for case in cases}
    figures = [figure for case in cases for figure in figures_of(case, runs[case.name][0])]
    details = {
        case: {
            name: [[each.cpu_s, each.wall_s, each.peak_mib] for each in took]
            for name, took in found.items()
        }
        for case, (found, _) in runs.items()
    }
    settings = {"samples_per_prompt": SAMPLES, **{case: facts for case, (_, facts) in runs.items()}}
    Report("learner_step", quick, settings, figures, details, measured_commit).finish(
        path, started_s
    )


if __name__ == "__main__":
    main()
