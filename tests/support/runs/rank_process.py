"""One learner rank of two: trains, saves and resumes at ZeRO stages, with and without a critic, and tells.

Called as `python -m support.runs.rank_process RANK FOLDER STAGE...`.
"""

import json
import math
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed.tensor import DTensor

from prefixrl.common.config.run import RunConfig
from prefixrl.common.host.process import no_teardown
from prefixrl.learner.models import distributed, head
from prefixrl.learner.models.batch import IterationData
from prefixrl.learner.models.model import Models
from prefixrl.learner.training import checkpoint
from prefixrl.learner.training.checkpoint import TrainerState
from prefixrl.learner.training.figures import IterationMetrics
from prefixrl.learner.training.iteration import train_iteration
from prefixrl.learner.training.plan import plan_iteration, rows_of_rank
from support.models.tiny_model import random_iteration, run_config, whole
from support.paths import ROOT

RANKS = 2
LOW_RANK = {"lora": {"rank": 4, "alpha": 8}, "gradient_checkpointing": True, "packed": True}
HEAD = {"lora": {"rank": 4, "alpha": 8, "target_modules": ["q_proj", "lm_head"]}}
MICRO_BATCH_TOKENS = 16
"""Few enough that ranks would often run different numbers of forwards."""
ITERATIONS = 10
PRM = {
    "model": "unused",
    "format": "step_tag",
    "placement": "step",
    "outcome_coefficient": 0.5,
    "coefficient": 0.5,
}
STEPS: dict[str, Any] = {
    "mode": "direct",
    "target": None,
    "scorer": {"prm": PRM},
    "algorithm": {"name": "grpo", "zscore": "buffer", "kl": 0.0},
}
PRIME: dict[str, Any] = STEPS | {
    "algorithm": {"name": "prime", "kl": 0.01, "kl_placement": "loss", "kl_estimator": "k3"},
    "implicit_reward": {"lr": 3e-3, "baseline": "code", "gamma": 0.9},
}


def run_ranks(module: str, ranks: int, *arguments: object) -> None:
    """Run a module as so many ranks, `RANK ARGUMENTS...` each; raises where one fails or does not end."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1])}
    meeting["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT / "tests"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(rank), *map(str, arguments)],
            env=os.environ | meeting | {"LOCAL_RANK": str(rank)},
        )
        for rank in range(ranks)
    ]
    try:
        assert not any([process.wait(timeout=240) for process in processes])
    finally:
        for process in processes:
            process.kill()


def main(rank: int, folder: Path, stages: list[int]) -> None:
    head.BLOCK_ENTRIES = 300  # so that the vocabulary is several blocks
    told = {stage: one_stage(rank, folder, stage) for stage in stages}
    for stage in stages:
        told[stage]["grouped"] = grouped(rank, folder, stage)
        told[stage]["low rank"] = grouped(rank, folder, stage, **LOW_RANK)
        told[stage]["low rank head"] = grouped(rank, folder, stage, name="untied", **HEAD)
        told[stage]["prime"] = with_process_rewards(rank, folder, stage)
        told[stage]["step rewards"] = with_step_rewards(rank, folder, stage)
    (folder / f"rank_{rank}.json").write_text(json.dumps(told))
    distributed.stop()


def one_stage(rank: int, folder: Path, stage: int) -> dict[str, object]:
    config = run_config(folder / "adapter", learner=learner(stage))
    models = Models.load(config, rank, RANKS, config.adapter.model)
    steps = [train(models, config, iteration) for iteration in range(ITERATIONS)]
    state = TrainerState(ITERATIONS, models.optimizer_steps, RANKS)
    checkpoint.save(folder / f"stage_{stage}", models, state)
    went_on = train(models, config, ITERATIONS)
    poisoned = train(models, config, ITERATIONS + 1, poisoned_row=0)
    resumed = Models.load(config, rank, RANKS, config.adapter.model)
    checkpoint.load(folder / f"stage_{stage}", resumed)
    return {
        "steps": steps,
        "went_on": went_on,
        "resumed": train(resumed, config, ITERATIONS),
        "poisoned": [step["actor_applied"] for step in poisoned],
        "probe": resumed.probe_logprobs([whole([3, 4, 5])]).tolist(),
        "reference_share": reference_share(models),
        "published": sorted(resumed.state_dict_for_publication()),
    }


def learner(stage: int) -> dict[str, Any]:
    zero = {"zero_optimization": {"stage": stage}}
    return {"deepspeed": zero, "micro_batch_tokens": MICRO_BATCH_TOKENS}


def reference_share(models: Models) -> float:
    """Return the share of the reference model that this rank holds."""
    assert models.reference is not None
    weights = list(models.reference.parameters())
    held = sum((each.to_local() if isinstance(each, DTensor) else each).numel() for each in weights)
    return held / sum(each.numel() for each in weights)


def grouped(
    rank: int, folder: Path, stage: int, name: str = "adapter", **options: Any
) -> list[list[dict[str, float]]]:
    config = run_config(
        folder / name,
        learner=learner(stage) | options,
        algorithm=json.loads((folder / "grouped.json").read_text()),
    )
    models = Models.load(config, rank, RANKS, config.adapter.model)
    return [train(models, config, iteration) for iteration in range(2)]


def with_process_rewards(rank: int, folder: Path, stage: int) -> dict[str, object]:
    config = run_config(folder / "adapter", learner=learner(stage), **PRIME)
    models = Models.load(config, rank, RANKS, config.adapter.model)
    told = [figures(models, config, iteration) for iteration in range(3)]
    reward = models.reward.trained if models.reward else None
    return {"figures": told, "exported": len(models.state_dict_for_publication(reward))}


def with_step_rewards(rank: int, folder: Path, stage: int) -> list[list[float]]:
    config = run_config(folder / "adapter", learner=learner(stage), **STEPS)
    models = Models.load(config, rank, RANKS, config.adapter.model)
    return [list(iterated(models, config, iteration).row_advantages) for iteration in range(2)]


def figures(models: Models, config: RunConfig, iteration: int) -> list[dict[str, float]]:
    metrics = iterated(models, config, iteration)
    means = {
        name: each
        for name, each in metrics.means.items()
        if name.startswith(("reward_model", "process"))
    }
    return [means, *metrics.steps]


def train(
    models: Models, config: RunConfig, iteration: int, poisoned_row: int | None = None
) -> list[dict[str, float]]:
    return list(iterated(models, config, iteration, poisoned_row).steps)


def iterated(
    models: Models, config: RunConfig, iteration: int, poisoned_row: int | None = None
) -> IterationMetrics:
    return train_iteration(models, shard(models, config, iteration, poisoned_row), config, 20)


def shard(
    models: Models, config: RunConfig, iteration: int, poisoned_row: int | None
) -> IterationData:
    data = random_iteration(iteration)
    plan = plan_iteration(
        data.lengths,
        data.groups,
        data.seed,
        models.world_size,
        config.algorithm.minibatches,
        MICRO_BATCH_TOKENS,
        models.is_shared,
    )
    own = {row: data.samples[row] for row in rows_of_rank(plan, models.rank)}
    if poisoned_row in own:
        own[poisoned_row] = replace(
            own[poisoned_row], logprobs=own[poisoned_row].logprobs * math.nan
        )
    return replace(data, samples=own)


if __name__ == "__main__":
    with no_teardown():
        main(int(sys.argv[1]), Path(sys.argv[2]), [int(stage) for stage in sys.argv[3:]])
