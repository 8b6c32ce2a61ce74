"""MLflow: one run of an experiment on the server that MLFLOW_TRACKING_URI names."""

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from prefixrl.common.errors import ConfigError
from prefixrl.common.run.documents import MetricsLine, columns
from prefixrl.common.run.tracker import SampleText, Tracker
from prefixrl.deploy.track.identity import identity_at, imported_package, settings_of


class ExperimentRun:
    """One run of MLflow, also over resumes, on the server that MLFLOW_TRACKING_URI names."""

    def __init__(self, directory: Path, experiment: str) -> None:
        """Begin or go on; raise ConfigError without the package."""
        self._mlflow = mlflow = imported_package("mlflow")
        try:
            place = mlflow.set_experiment(experiment).experiment_id
            client = mlflow.MlflowClient()
        except mlflow.MlflowException as fault:
            raise ConfigError(
                f"log.mlflow: {fault}; MLFLOW_TRACKING_URI names the server"
            ) from None
        name = directory.resolve().name
        run_id = identity_at(
            directory, "mlflow", lambda: client.create_run(place, run_name=name).info.run_id
        )
        mlflow.start_run(run_id)
        mlflow.log_dict(settings_of(directory), "config.json")

    def write(self, lines: Sequence[MetricsLine]) -> None:
        """Send the columns of each line, in names that MLflow allows; no name is a folder of another one."""
        for line in lines:
            values = {
                re.sub(r"[^\w\-. :]", "_", name.replace("/", ".")): value
                for name, value in columns(line).items()
            }
            self._mlflow.log_metrics(values, line.iteration)

    def samples(self, samples: Sequence[SampleText]) -> None:
        """Send a file."""
        if samples:
            text = msgspec.json.encode(samples).decode()
            self._mlflow.log_text(text, f"samples/{samples[0].iteration}.json")

    def close(self) -> None:
        """Name the run as ended."""
        self._mlflow.end_run()


MLFLOW = Tracker(open=ExperimentRun)
