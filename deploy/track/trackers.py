"""All trackers by name, which is the key of `[log]` and the name of the package."""

from collections.abc import Mapping

from prefixrl.common.config.foreign.plugins import check_names, load_plugin, plugins
from prefixrl.common.run.tracker import Tracker
from prefixrl.deploy.track.mlflow import MLFLOW
from prefixrl.deploy.track.tensorboard import TENSORBOARD
from prefixrl.deploy.track.wandb import TRACKIO, WANDB

TRACKERS: Mapping[str, Tracker] = {
    "tensorboard": TENSORBOARD,
    "wandb": WANDB,
    "trackio": TRACKIO,
    "mlflow": MLFLOW,
}


def tracker_of(name: str) -> Tracker:
    """Return a tracker that the config accepted; ConfigError where its package is broken."""
    check_names("trackers", TRACKERS)
    if name in TRACKERS:
        return TRACKERS[name]
    return load_plugin(plugins("trackers")[name], Tracker, "a Tracker")
