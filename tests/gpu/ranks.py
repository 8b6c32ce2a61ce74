"""Learner ranks as processes of their own, each a run of one script."""

import os
import socket
import subprocess
import sys
from dataclasses import replace

from prefixrl.common.config.run import RunConfig
from prefixrl.learner.models.batch import IterationData
from prefixrl.learner.models.model import Models
from prefixrl.learner.training.iteration import plan_for
from prefixrl.learner.training.plan import rows_of_rank
from support.paths import ROOT


def run_ranks(script: str, ranks: int, *arguments: object) -> None:
    """Run a script as so many ranks, `RANK ARGUMENTS...` each; raises where one fails or does not end."""
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(reserved.getsockname()[1])}
    meeting["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT / "tests"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    )
    processes = [
        subprocess.Popen(
            [sys.executable, script, str(rank), *map(str, arguments)],
            env=os.environ | meeting | {"LOCAL_RANK": str(rank)},
        )
        for rank in range(ranks)
    ]
    try:
        assert not any([process.wait(timeout=240) for process in processes])
    finally:
        for process in processes:
            process.kill()


def share_of_rank(models: Models, data: IterationData, config: RunConfig) -> IterationData:
    """An iteration with the samples alone that this rank trains."""
    rows = rows_of_rank(plan_for(models, data, config), models.rank)
    return replace(data, samples={row: data.samples[row] for row in rows})
