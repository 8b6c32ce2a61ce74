"""One arm of `benchmarks.seats`: a scorer in this process, with a real broker and a simulated rollout around it.

Runs with the program of this release and with that of the release before: what differs between them is in
`simulated_engine`. Row lengths are lognormal, cut at a limit, and follow from each row's own first draw, so that both
releases write the same rows.

    python seats_arm.py FILE (simulated|vllm) SECONDS
"""

import heapq
import json
import math
import shutil
import sys
import tempfile
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import NormalDist
from typing import Any

import msgspec
import torch

import prefixrl.common.engines.simulated
from benchmarks.simulated import daemons, learner, simulated_run
from prefixrl.common.config.run import RunConfig
from prefixrl.common.engines.simulated import SimulatedEngine
from prefixrl.common.prompts.rendering import ByteRenderer
from prefixrl.common.run.digests import scorer_digests
from prefixrl.common.wire.address import address_in
from prefixrl.common.worker.link import Link
from prefixrl.learner.broker.client import BrokerClient
from prefixrl.learner.processes.servers import Servers
from prefixrl.scorer.loop import Scorer
from prefixrl.scorer.verifier.pool import VerifierPool
from prefixrl.scorer.verifier.pool_thread import PoolThread

MEDIAN, SIGMA, LIMIT = 351.84, 1.07088, 2048
"""Tokens of a row: mean 550, one row in twenty is cut."""
SAMPLES = 8
GROUPS = {"simulated": 900, "vllm": 320}
"""More than are scored by then."""
SIMULATED_SEATS, SIMULATED_TOKEN_S, SIMULATED_GROUPS_PER_TASK = 256, 0.004, 4
VLLM_SEATS, VLLM_SCALE = 16, 4
"""Rows are so many times shorter with vLLM on a CPU."""
LOOK_S = 0.02
PATIENCE_S = 300.0


def tokens_of(draw: float) -> float:
    """Length of a row with this first draw."""
    return min(
        LIMIT, MEDIAN * math.exp(SIGMA * NormalDist().inv_cdf(min(max(draw, 1e-9), 1 - 1e-9)))
    )


class Meter:
    """Mean number of rows decoded, by the clock, while it is on."""

    def __init__(self) -> None:
        self._rows, self._row_s, self._noted_s = 0, 0.0, 0.0
        self.began_s: float | None = None

    def note(self, rows: int) -> None:
        """Note the number from now on; the first that is not 0 begins the measurement."""
        now_s = time.monotonic()
        if self.began_s is None and rows:
            self.began_s = self._noted_s = now_s
        self._row_s += self._rows * (now_s - self._noted_s)
        self._rows, self._noted_s = rows, now_s

    def mean(self) -> float:
        """Mean since the first row."""
        assert self.began_s is not None, "no row was decoded"
        self.note(self._rows)
        return self._row_s / (time.monotonic() - self.began_s)


# --- engines --------------------------------------------------------------------------------------------------------


def simulated_engine(config: RunConfig, meter: Meter) -> Any:
    """An engine of so many seats whose rows take their own times, by the rules of the release that runs."""
    if not hasattr(SimulatedEngine, "slots"):

        class Now(SimulatedEngine):
            def decoding(self, now_s: float) -> int:
                """Rows whose end is to come."""
                return sum(row.ends_s > now_s for row in list(self._seated))

            def tokens_written(self) -> float:
                return self.busy_row_s / SIMULATED_TOKEN_S

        return Now("scorer", config.simulated, SAMPLES * SIMULATED_GROUPS_PER_TASK)

    old: Any = prefixrl.common.engines.simulated

    class Before(old.SimulatedEngine):  # type: ignore[misc]
        """Jobs of whole tasks, held until their longest row ends: as many as have seats together."""

        slots = SIMULATED_SEATS // (SAMPLES * SIMULATED_GROUPS_PER_TASK)

        def _start(self) -> None:
            self.rows: list[tuple[float, float]] = getattr(self, "rows", [])
            while self._waiting and len(self._running) < self.slots:
                job, now_s = self._waiting.popleft(), time.monotonic()
                lasts = [tokens_of(float(row[0])) * SIMULATED_TOKEN_S for row in job.uniforms]
                self.rows += [(now_s, now_s + each) for each in lasts]
                versions = torch.zeros(job.sampling.max_new_tokens, dtype=torch.int32).numpy()
                heapq.heappush(
                    self._running,
                    old._Running(now_s + max(lasts), job.key, max(lasts), job, versions),
                )

        def decoding(self, now_s: float) -> int:
            """Rows whose end is to come."""
            return sum(ends_s > now_s for _, ends_s in list(getattr(self, "rows", [])))

        def tokens_written(self) -> float:
            now_s = time.monotonic()
            return (
                sum(min(now_s, ends_s) - from_s for from_s, ends_s in self.rows) / SIMULATED_TOKEN_S
            )

    return Before("scorer", config.simulated)


def vllm_engine(config: RunConfig, meter: Meter) -> Any:
    """An engine of vLLM whose rows have drawn lengths, and vLLM's own count of those it decodes."""
    from prefixrl.common.engines.vllm.engine import VllmEngine
    from prefixrl.common.engines.vllm.setup import platform_of, prepare_environment, resolve

    setup = resolve(config.model_of("scorer"), "scorer", config)
    prepare_environment(setup, platform_of(setup.device))
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.loggers import StatLoggerBase

    class Counted(StatLoggerBase):  # type: ignore[misc]
        def __init__(self, config: Any, engine_index: int = 0) -> None:
            pass

        def record(self, scheduler_stats: Any, *_: Any, **__: Any) -> None:
            if scheduler_stats is not None:
                meter.note(scheduler_stats.num_running_reqs)

        def log_engine_initialized(self) -> None:
            pass

    from_config = AsyncLLM.from_vllm_config

    def counted(config: Any, stat_loggers: Any = None, **others: Any) -> Any:
        return from_config(config, stat_loggers=[*(stat_loggers or []), Counted], **others)

    AsyncLLM.from_vllm_config = counted

    class Drawn(VllmEngine):
        async def _row(self, job: Any, index: int) -> Any:
            limit = max(1, round(tokens_of(float(job.uniforms[index][0])) / VLLM_SCALE))
            sampling = msgspec.structs.replace(job.sampling, max_new_tokens=limit)
            rows = tuple(row % 38 + 2 for row in job.rows)  # bytes, as tokens of a small vocabulary
            return await super()._row(
                replace(job, rows=rows, sampling=sampling, stop_tokens=frozenset()), index
            )

        def tokens_written(self) -> float:
            return float(self.progress)

    return Drawn(setup)


# --- a run ----------------------------------------------------------------------------------------------------------


def config_of(directory: Path, kind: str) -> RunConfig:
    """A run of one iteration that nobody will train."""
    rules: dict[str, Any] = {
        "groups_per_iteration": GROUPS[kind],
        "samples_per_prompt": SAMPLES,
        "minibatches": 1,
        "iterations": 1,
        "max_staleness": 0,
    }
    scorer: dict[str, Any] = {"engine": "simulated", "max_new_tokens": 8}
    simulated: dict[str, Any] = {"prefix_s": 0.01, "accuracy": 1.0}
    target = directory / "target"
    if kind == "vllm":
        example = (
            Path(__file__).resolve().parent.parent / "deploy" / "examples" / "arithmetic" / "target"
        )
        target = directory / "longer"
        shutil.copytree(example, target)
        model = json.loads((target / "config.json").read_text(encoding="utf-8"))
        (target / "config.json").write_text(
            json.dumps(model | {"max_position_embeddings": LIMIT}), encoding="utf-8"
        )
        scorer = {"engine": "vllm", "max_new_tokens": LIMIT // VLLM_SCALE, "temperature": 1.0}
        scorer["vllm"] = {
            "max_num_seqs": VLLM_SEATS,
            "max_model_len": 1024,
            "options": {"block_size": 32},
        }
    elif not hasattr(SimulatedEngine, "slots"):
        simulated |= {
            "completion_s": MEDIAN * SIMULATED_TOKEN_S,
            "completion_sigma": SIGMA,
            "completion_limit_s": LIMIT * SIMULATED_TOKEN_S,
            "seats": SIMULATED_SEATS,
        }
    groups = SIMULATED_GROUPS_PER_TASK if kind == "simulated" else 1
    return simulated_run(
        directory,
        1,
        0.01,
        0.01,
        algorithm=rules,
        rollout={"engine": "simulated", "groups_per_task": groups, "prefix_tokens": 4},
        scorer=scorer,
        simulated=simulated,
        target={"model": str(target)},
    )


def measured(
    client: BrokerClient, engine: Any, meter: Meter, kind: str, seconds: float
) -> dict[str, Any]:
    """Wait until so many seconds after the first row; the figures by then."""
    deadline_s = time.monotonic() + PATIENCE_S
    while meter.began_s is None or time.monotonic() < meter.began_s + seconds:
        assert time.monotonic() < deadline_s, "no row was decoded"
        if kind == "simulated":
            meter.note(engine.decoding(time.monotonic()))
        time.sleep(LOOK_S)
    decoding, passed_s, tokens = (
        meter.mean(),
        time.monotonic() - meter.began_s,
        engine.tokens_written(),
    )
    status = client.status()
    assert status.queues.get("sampled"), "no work waited any more: more groups are needed"
    (scorer,) = [each for each in status.workers if each.role == "scorer"]
    seats = SIMULATED_SEATS if kind == "simulated" else VLLM_SEATS
    return {
        "share": decoding / seats,
        "reported": status.busy_fraction["scorer"],
        "tokens_per_s": tokens / passed_s,
        "waiting_rows": getattr(scorer, "waiting_rows", 0),
        "tasks_done": scorer.tasks_done,
        "program": prefixrl.common.__file__,
    }


def main(path: Path, kind: str, seconds: float) -> None:
    """Run, measure, write the figures."""
    torch.set_num_threads(1)
    directory = Path(tempfile.mkdtemp(prefix="seats-"))
    config, meter, is_over = config_of(directory, kind), Meter(), threading.Event()
    engine = (simulated_engine if kind == "simulated" else vllm_engine)(config, meter)
    servers = Servers(config, directory / "run", 0)
    try:
        with learner(servers, config) as (client, _), daemons("rollout", 1, directory / "run"):
            link = Link(partial(address_in, directory / "run", "worker"), "scorer")
            link.name = link.welcome().worker
            digests = scorer_digests(config, config.model_of("scorer"))
            verifier = PoolThread(lambda: VerifierPool(1, 5))
            scorer = Scorer(config, link, engine, ByteRenderer(), verifier, digests)
            scorer.say_ready()
            worker = threading.Thread(
                target=scorer.run, args=(lambda: 2 * is_over.is_set(),), daemon=True
            )
            worker.start()
            found = measured(client, engine, meter, kind, seconds)
            is_over.set()
            worker.join(10.0)
            link.close("done")
    finally:
        servers.close()
        shutil.rmtree(directory, ignore_errors=True)
    path.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
