"""Iterations trained in this process, and the comparison of what they leave."""

import torch
from torch import Tensor

from prefixrl.common.config.run import RunConfig
from prefixrl.learner.models.batch import IterationData
from prefixrl.learner.models.model import Models
from prefixrl.learner.training.figures import IterationMetrics
from prefixrl.learner.training.iteration import train_iteration


def trained(
    config: RunConfig, *batches: IterationData
) -> tuple[list[IterationMetrics], dict[str, Tensor]]:
    """Train iterations from the config's adapter on; their metrics and the published weights."""
    models = Models.load(config, 0, 1, config.adapter.model)
    metrics = [train_iteration(models, data, config, 20) for data in batches]
    return metrics, models.state_dict_for_publication()


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """True if two sets of weights are bitwise equal."""
    return all(torch.equal(tensor, b[name]) for name, tensor in a.items())
