"""Start of a learner rank: its servers first, so that workers load while DeepSpeed loads."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from prefixrl.common.config.foreign.verifier import WITH_MATHEMATICAL_GOLD
from prefixrl.common.config.run import RunConfig
from prefixrl.common.errors import DataError, PeerLost, TrainingFault
from prefixrl.common.host.hub import model_folder
from prefixrl.common.host.process import without_gc
from prefixrl.common.host.service import Service
from prefixrl.common.host.start_line import start_line
from prefixrl.common.run import json_lines
from prefixrl.common.run.changes import CHANGES_FILE, ChangeLine
from prefixrl.common.run.directory_format import check_format, note_start
from prefixrl.common.run.prometheus import exposed, numbers_of_run
from prefixrl.common.run.warm_start import check_warm_start
from prefixrl.common.wire.address import ENDPOINT_FILE, REBIND_S, Address, address_in
from prefixrl.common.wire.requester import WaitLog
from prefixrl.learner.broker.client import ANSWER_S, BrokerClient
from prefixrl.learner.check.disk_room import check_room
from prefixrl.learner.data import problems
from prefixrl.learner.data.gold_check import GoldCheck
from prefixrl.learner.processes.servers import CLOSE_S, Servers
from prefixrl.learner.run.directory import RunDirectory, check_ports_are_free, end_noted
from prefixrl.learner.run.spending import check_spending
from prefixrl.learner.run.stop import StopSignal
from prefixrl.learner.run.tracking import Tracking, check_packages
from prefixrl.learner.run.uploads import Uploads, check_command

if TYPE_CHECKING:
    from prefixrl.learner.models.model import Models
    from prefixrl.learner.run.collapse import Collapse
    from prefixrl.learner.run.metrics import MetricsLog

log = logging.getLogger(__name__)

ENTROPY = "algorithm.entropy"
CHANGED_KEYS = (ENTROPY, "learner.actor_lr", "learner.critic_lr")
"""Keys that an answer to a collapse and a person may change."""
LOAD_S = 3600.0
"""Longest time until models are loaded: only then a watchdog expects progress."""


def start(config: RunConfig, rank: int, ranks: int, stopped: Callable[[], bool]) -> None:
    """Run one learner rank to its end.

    Raises:
        UserError: config, data, model folder or run directory is wrong.
        PeerLost: a wait ran past its deadline.
        TrainingFault: training cannot go on.
    """
    check_format(Path(config.directory))
    if rank == 0:
        check_packages(config.log)
        check_command(config.checkpoint)
        check_spending(config)
        read = problems.read_all(config)
        check_room(config)
        run_directory = RunDirectory(config)
        with end_noted(run_directory.path):
            _lead(config, run_directory.path, read, ranks, stopped)
    else:
        with _memory_fault_explained(config):
            _run(config, (rank, ranks), None, StopSignal(stopped), None)


def _lead(
    config: RunConfig,
    directory: Path,
    read: tuple[problems.Loaded, problems.Loaded],
    ranks: int,
    stopped: Callable[[], bool],
) -> None:
    """Run rank 0, with the servers of the run."""
    is_resumed = (directory / ENDPOINT_FILE).exists()
    # Before problems are kept and servers start: a taken port ends the start at once. After a
    # resume the former broker may still hold it.
    check_ports_are_free(config.broker.listen, REBIND_S if is_resumed else 0.0)
    training = problems.keep(directory, *read)
    init_from = config.adapter.init_from
    if init_from and not is_resumed:
        check_warm_start(config)
        from prefixrl.learner.training import checkpoint

        if fault := checkpoint.damage(Path(init_from)):
            raise DataError(
                f"adapter.init_from = {init_from!r} is a damaged checkpoint: {fault}; choose another one"
            )
    completed = completed_iterations(directory)
    service = Service(stopped=stopped)
    servers = Servers(config, directory, completed, ranks=ranks, stop=StopSignal(stopped))
    golds = None
    try:
        answers = [each for each in training if each.code in WITH_MATHEMATICAL_GOLD]
        if not config.reward.is_own and answers:
            golds = GoldCheck(answers, directory, config.scorer.verify_timeout_s)
        service.ready(f"serving {config.directory} at iteration {completed}, loading models")
        service.be_patient(LOAD_S)
        with _memory_fault_explained(config):
            _run(config, (0, ranks), servers, StopSignal(stopped, service, servers), service)
    finally:
        service.stopping()
        # The supervisor must not take the time in which processes end for a hang.
        with service.patience(CLOSE_S):
            if golds:
                golds.close()
            servers.close()


def completed_iterations(directory: Path) -> int:
    """Return the iteration of the newest whole checkpoint; import torch only if one may exist.

    Its bytes are read here, and again when it is loaded: a broker that starts at an iteration with a damaged checkpoint
    would throw away groups that have to be trained again.
    """
    if not (directory / "checkpoints").is_dir():
        return 0
    from prefixrl.learner.training import checkpoint

    newest = checkpoint.latest(directory / "checkpoints")
    return checkpoint.read_manifest(newest).state.iteration if newest else 0


def _run(
    config: RunConfig,
    rank_and_count: tuple[int, int],
    servers: Servers | None,
    stop: StopSignal,
    service: Service | None,
) -> None:
    directory = Path(config.directory)
    serving = contextlib.ExitStack()
    if servers:
        serving.enter_context(exposed(config.log, "learner", partial(numbers_of_run, directory)))
    client = BrokerClient(servers.address, stop) if servers else join(directory, stop)
    # Rank 0 has written them down before its broker was there.
    training = problems.training(config)
    # Heavy imports from here on; the workers are loading their models at the same time.
    with without_gc():
        from prefixrl.learner.check.report import forecast_gib
        from prefixrl.learner.evaluation.arms import Arms
        from prefixrl.learner.loop import Learner, RankZeroParts
        from prefixrl.learner.models import distributed
        from prefixrl.learner.models.model import Models
        from prefixrl.learner.run.collapse_answers import CollapseAnswers
        from prefixrl.learner.run.metrics import MetricsLog
        from prefixrl.learner.weights.probe import make_probe
        from prefixrl.learner.weights.publish import Publisher

    arms = None
    if servers:
        arms = Arms(config, client, directory, servers.completed, stop)
        arms.ask_before_training()
    models = Models.load(config, *rank_and_count, model_folder(config.adapter.start))
    probe = make_probe(config, [each.question for each in training], models.source, models.device)
    is_resumed, iteration = load_checkpoint(config, models)
    rank_zero = None
    if servers and arms:
        note_start(directory, iteration)
        deltas = config.learner.weight_deltas
        weights = Publisher(servers.address, directory / "weights", probe, deltas, stop)
        assert service, "rank 0 speaks for the learner"
        forecast = forecast_gib(config, training) if models.device.type == "cuda" else {}
        metrics = MetricsLog(directory, iteration, stop, forecast)
        uploads = Uploads(directory, config.checkpoint)
        tracking = Tracking(directory) if config.log.chosen_trackers else None
        rank_zero = RankZeroParts(servers, weights, arms, metrics, service, uploads, tracking)
        models.on_forward = service.progressed
    collapse = collapse_of(config, rank_zero.metrics) if rank_zero else None
    answers = CollapseAnswers(config, directory, models, collapse, stop)
    learner = Learner(
        config, directory, client, models, rank_zero, len(training), stop, probe, answers, iteration
    )
    learner.saved = iteration if is_resumed else -1
    try:
        learner.run()
    finally:
        if rank_zero:
            rank_zero.close()
        client.close()
        serving.close()
        distributed.stop()


def collapse_of(config: RunConfig, metrics: "MetricsLog") -> "Collapse | None":
    """Return what answers a collapse, with what it knows of all iterations so far; None where nothing does."""
    from prefixrl.learner.run.collapse import Collapse

    algorithm = config.algorithm
    if algorithm.on_collapse == "warn":
        return None
    changes = [
        line
        for line in json_lines.read(Path(config.directory) / CHANGES_FILE, ChangeLine)
        if not line.reason and line.key in CHANGED_KEYS
    ]
    first = next((line.before for line in changes if line.key == ENTROPY), algorithm.entropy)
    collapse = Collapse(algorithm.on_collapse, float(str(first)))
    # In the order in which it happened: a change made at an iteration comes before its figures.
    for line in metrics.lines():
        while changes and changes[0].iteration <= line.iteration:
            _take_change(collapse, changes.pop(0))
        collapse.add_iteration(line.iteration, line.figures)
    for change in changes:
        _take_change(collapse, change)
    return collapse


def _take_change(collapse: "Collapse", change: ChangeLine) -> None:
    entropy = float(str(change.after)) if change.key == ENTROPY else None
    collapse.take_change(entropy, has_new_rate=change.key != ENTROPY)


def load_checkpoint(config: RunConfig, models: "Models") -> tuple[bool, int]:
    """Load the newest checkpoint, if any; return True if the run is resumed, and its iteration."""
    from prefixrl.learner.training import checkpoint

    state = checkpoint.load(Path(config.directory) / "checkpoints", models)
    iteration = state.iteration if state else 0
    if config.adapter.init_from and state is None:
        # A new run may begin with the critic of another run's checkpoint.
        checkpoint.take_critic(Path(config.adapter.init_from), models)
    facts = start_line(str(models.device), *models.facts())
    log.info("models are loaded at iteration %d: %s", iteration, facts)
    return state is not None, iteration


@contextlib.contextmanager
def _memory_fault_explained(config: RunConfig) -> Iterator[None]:
    """Turn a device without room into a TrainingFault that names what would help."""
    try:
        yield
    except RuntimeError as error:
        # Late: the servers start before torch is imported.
        import torch

        from prefixrl.learner.check import budget, report

        if not isinstance(error, torch.OutOfMemoryError):
            raise
        peak = torch.cuda.max_memory_reserved() if torch.cuda.is_available() else 0
        limit = budget.device_bytes(config) or 0
        prompt_tokens = report.forecast(config).prompt_tokens
        advice = budget.out_of_memory(config, prompt_tokens, limit, peak)
        raise TrainingFault(
            f"the learner's device has no room left: {advice} ({str(error).partition('. ')[0]})"
        ) from error


class _Moved(PeerLost):
    """The broker listens at another address now."""


@dataclass
class _BrokerAddress:
    """The address of rank 0's broker, as a rank above 0 found it in the run directory."""

    directory: Path
    stop: StopSignal
    address: Address

    def check(self) -> None:
        """Raise `_Moved` if the broker listens at another address now."""
        now = _address(self.directory, self.stop)
        if now != self.address:
            raise _Moved(f"the broker has moved from {self.address.endpoint} to {now.endpoint}")


def join(directory: Path, stop: StopSignal) -> BrokerClient:
    """Connect a rank above 0 to rank 0's broker; a file in the run directory names its endpoint.

    A file of an earlier start may stand there while rank 0 reads its data and the broker its journal.
    """
    while True:
        broker = _BrokerAddress(directory, stop, _address(directory, stop))
        try:
            return BrokerClient(broker.address, stop.beside(broker))
        except _Moved as moved:
            log.info("%s", moved)


def _address(directory: Path, stop: StopSignal) -> Address:
    """Wait for the file with the endpoint of rank 0's broker, and return its address."""
    from_s, wait = time.monotonic(), WaitLog(f"rank 0 to start its broker in {directory}")
    while True:
        # The file may go at any time: a run that is started again removes it.
        with contextlib.suppress(FileNotFoundError):
            return address_in(directory, "rank")
        waited_s = time.monotonic() - from_s
        if waited_s > ANSWER_S:
            raise PeerLost(f"rank 0 wrote no broker endpoint to {directory} within {ANSWER_S:g} s")
        stop.end_start()
        wait.log_progress(waited_s)
        time.sleep(0.1)
