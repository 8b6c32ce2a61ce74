"""Speed and memory of each learner rank in an iteration, for `metrics.jsonl`."""

import torch

from prefixrl.learner.models.distributed import gather_over_ranks
from prefixrl.learner.models.model import Models
from prefixrl.learner.training.plan import Lengths, Plan, line_tokens


def rank_figures(models: Models, plan: Plan, lengths: Lengths, took_s: float) -> dict[str, float]:
    """Return the figures of `own_figures` by name and rank, as `tokens_per_s/0`. A collective."""
    figures = own_figures(models, plan, lengths, took_s)
    of_rank = torch.tensor([*figures.values()], device=models.device)
    of_ranks = gather_over_ranks(of_rank).reshape(-1, len(figures)).tolist()
    return {
        f"{name}/{rank}": figure
        for rank, row in enumerate(of_ranks)
        for name, figure in zip(figures, row, strict=True)
    }


def own_figures(models: Models, plan: Plan, lengths: Lengths, took_s: float) -> dict[str, float]:
    """Return this rank's tokens per second and, on CUDA, TFLOP/s and the most GiB since the start.

    Tokens: those of one forward over its rows. TFLOP/s: 6 operations per token and weight of actor and critic, for one
    pass; attention, further epochs and forwards without gradients come on top.
    """
    lines = [line for minibatch in plan for micro in minibatch[models.rank] for line in micro]
    speed = sum(line_tokens(line, lengths, models.is_shared) for line in lines) / max(took_s, 1e-9)
    figures = {"tokens_per_s": speed}
    if models.device.type == "cuda":
        figures["tflop_per_s"] = (
            6 * sum(each.weights for each in (models.actor, models.critic) if each) * speed / 1e12
        )
        figures["peak_allocated_gib"] = torch.cuda.max_memory_allocated(models.device) / 2**30
        figures["peak_reserved_gib"] = torch.cuda.max_memory_reserved(models.device) / 2**30
    return figures
