"""The run directory: one learner at a time, and one config for its whole life."""

import contextlib
import errno
import logging
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from prefixrl.common.config.foreign.files import read_json
from prefixrl.common.config.load import CONFIG_FILE, from_json
from prefixrl.common.config.run import RunConfig
from prefixrl.common.errors import ConfigError, PrefixRLError, to_copy
from prefixrl.common.host.hub import model_folder
from prefixrl.common.host.process import own, write_atomically
from prefixrl.common.run.changes import FREE_KEYS, changes_between
from prefixrl.common.run.digests import file_digest, function_digest, model_digests, process_digest
from prefixrl.common.run.directory_format import check_format, check_is_no_evaluation, write_format
from prefixrl.common.run.documents import END_FILE, RunEnd
from prefixrl.common.run.replay import check_is_no_replay
from prefixrl.common.wire.address import advertised, bindable, weights_listen
from prefixrl.common.wire.interfaces import address_of, names
from prefixrl.common.wire.messages.fields import encodable
from prefixrl.common.wire.messages.worker import ModelDigests
from prefixrl.learner.data.problems import input_files

log = logging.getLogger(__name__)

NOT_OURS = os.strerror(errno.EADDRNOTAVAIL)
REMEDY = "restore them, choose another directory (--set directory=...), or start anew (--fresh)"
REMEDY_OF_PLAN = "restore them, or judge everything anew (--fresh)"
EVALUATED_ON = ("data", "eval")
"""Key of the problems to judge, which may be others each time."""


class RunDirectory:
    """The directory of a run, locked as long as the process lives."""

    def __init__(self, config: RunConfig, has_plan: bool = False) -> None:
        """`has_plan`: `prefixrl eval` or `generate` wrote a plan there, and nothing is trained."""
        self.path = Path(config.directory)
        self._has_plan = has_plan
        check_format(self.path)
        if not has_plan:
            check_is_no_evaluation(self.path)
        check_is_no_replay(self.path)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"directory = {config.directory!r} cannot be used: {error.strerror}"
            ) from None
        self._lock = own(self.path)
        try:
            self._adopt(config)
        except ConfigError:
            self._lock.close()
            raise

    def _adopt(self, config: RunConfig) -> None:
        config_file = self.path / CONFIG_FILE
        if config_file.exists():
            before = from_json(config_file.read_bytes(), str(config_file)).model_dump()
            free = FREE_KEYS | {EVALUATED_ON} if self._has_plan else FREE_KEYS
            if changes := list(changes_between(before, config.model_dump(), free)):
                lines = "".join(f"\n  {change}" for change in changes)
                way = f"{to_copy('prefixrl resume', self.path)} goes on with those it has; else {REMEDY}"
                if self._has_plan:
                    way = f"nothing was judged; {REMEDY_OF_PLAN}"
                raise ConfigError(f"{self.path} holds a run with other settings; {way}{lines}")
        self._adopt_inputs(_inputs(config))
        # Before the config, which makes the directory one of a run.
        write_format(self.path)
        write_atomically(config_file, config.model_dump_json(indent=2))

    def _adopt_inputs(self, present: "Inputs") -> None:
        earlier = inputs(self.path) or present
        names = [
            KEYS_OF_INPUTS.get(name, name.replace("_", ".", 1))
            for name in Inputs.__struct_fields__
            # What an earlier release did not record is taken as it is now.
            if getattr(earlier, name) not in (None, (), "", getattr(present, name))
        ]
        if names:
            raise ConfigError(
                f"{self.path} holds a run whose input files were others: {', '.join(names)} changed since it began; "
                f"{REMEDY_OF_PLAN if self._has_plan else REMEDY}"
            )
        document = msgspec.json.format(msgspec.json.encode(present))
        write_atomically(self.path / "inputs.json", document)


@contextlib.contextmanager
def end_noted(directory: Path) -> Iterator[None]:
    """Write `end.json` when the block ends, however it ends; a killed process leaves no such file."""
    path = directory / END_FILE
    path.unlink(missing_ok=True)
    end = RunEnd(exit_code=0, reason="finished")
    try:
        yield
    except PrefixRLError as error:
        end = RunEnd(exit_code=error.exit_code, reason=encodable(str(error)))
        raise
    except BaseException as error:
        end = RunEnd(exit_code=1, reason=encodable(f"{type(error).__name__}: {error}"))
        raise
    finally:
        # The disk may be full: that is no reason to hide why the run ended.
        with contextlib.suppress(OSError):
            write_atomically(path, msgspec.json.encode(end))


class Inputs(msgspec.Struct, frozen=True):
    """Digests of the files that decide what is trained; a run resumes only with the same ones."""

    # The journal names problems by index and keeps rewards; a checkpoint may hold only what was added to a model.

    data_train: tuple[str, ...]
    """One digest per file, files of `without` included."""
    reward_function: str
    algorithm_advantage_function: str
    adapter_model: ModelDigests
    target_model: ModelDigests | None
    """For a hub name, whose files need not be on this host, the digest of the name."""
    algorithm_loss_function: str = ""
    scorer_prm_model: str = ""
    """Digest of the process reward model, or of its hub name; "" without one."""
    kl_anchor: str = ""
    """Digest of the reference of the KL where it is not the first adapter; "" elsewhere."""
    implicit_reward_model: str = ""
    implicit_reward_reference: str = ""
    """Digests of the reward model of tokens and of its frozen reference; "" where they are no folders of their own."""


KEYS_OF_INPUTS = {
    "scorer_prm_model": "scorer.prm.model",
    "kl_anchor": "adapter.model",
    "implicit_reward_model": "implicit_reward.model",
    "implicit_reward_reference": "implicit_reward.reference_model",
}


def inputs(directory: Path) -> Inputs | None:
    """Return the inputs that a run began with; None where it has not begun."""
    inputs_file = directory / "inputs.json"
    return read_json(inputs_file, Inputs, remedy=REMEDY) if inputs_file.exists() else None


def _inputs(config: RunConfig) -> Inputs:
    reward = config.implicit_reward
    adapter = config.adapter
    has_anchor = (
        config.algorithm.kl > 0 and adapter.init_from is not None and adapter.reference == "model"
    )
    return Inputs(
        data_train=tuple(file_digest(path) for path in input_files(config.data.train)),
        reward_function=function_digest(config.reward.function),
        algorithm_advantage_function=function_digest(config.algorithm.advantage_function),
        algorithm_loss_function=function_digest(config.algorithm.loss_function),
        adapter_model=model_digests(model_folder(config.adapter.start)),
        target_model=model_digests(config.target.model) if config.target else None,
        scorer_prm_model=process_digest(config.scorer.prm.model) if config.scorer.prm else "",
        kl_anchor=_weights_digest(adapter.model if has_anchor else None),
        implicit_reward_model=_weights_digest(reward.model if reward else None),
        implicit_reward_reference=_weights_digest(reward.reference_model if reward else None),
    )


LEARNER_FUNCTIONS = ("advantage_function", "loss_function")


def check_learner_inputs(config: RunConfig, run: Path) -> None:
    """Raise ConfigError if a model that the learner of a run began with has other weights now.

    A model that a setting names is not compared. A function of the user's that is another one now is told: it may be
    what is tried.
    """
    if (began := inputs(run)) is None:
        return
    before = from_json((run / CONFIG_FILE).read_bytes(), str(run / CONFIG_FILE))
    adapter, reward, reward_before = config.adapter, config.implicit_reward, before.implicit_reward
    models: dict[str, tuple[str | None, str]] = {
        "adapter.model": (adapter.start, began.adapter_model.model)
    }
    if began.kl_anchor and config.algorithm.kl > 0 and adapter.reference == "model":
        models["the reference in adapter.model"] = (adapter.model, began.kl_anchor)
    if reward and reward_before and reward.model == reward_before.model:
        models["implicit_reward.model"] = (reward.model, began.implicit_reward_model)
    for key, (name, digest) in models.items():
        if _weights_digest(name) != digest:
            raise ConfigError(
                f"{key} = {name!r} holds other weights than when {run} began: a replay begins with the same; restore "
                f"them"
            )
    for key in LEARNER_FUNCTIONS:
        reference = getattr(config.algorithm, key)
        digest = getattr(began, f"algorithm_{key}")
        if reference == getattr(before.algorithm, key) and function_digest(reference) != digest:
            log.warning(
                "algorithm.%s = %r is another function than when %s began: the replay is of this one",
                key,
                reference,
                run,
            )


def _weights_digest(model: str | None) -> str:
    """Return the digest of the weights that this process loads of a model, "" for None."""
    return model_digests(model_folder(model)).model if model else ""


def check_ports_are_free(listen: str, patience_s: float = 0.0) -> None:
    """Raise ConfigError where `broker.listen` cannot be bound, or a fixed port stays taken."""
    bound = bindable(listen)
    if not bound.startswith("tcp://"):
        return
    weights = weights_listen(bound)
    advertised(bound)
    _wait_until_free(bound, f"broker.listen = {listen!r}", patience_s)
    if weights != bound:
        name = f"the port of the weights, the one after broker.listen = {listen!r},"
        _wait_until_free(weights, name, patience_s)


def _wait_until_free(endpoint: str, name: str, patience_s: float) -> None:
    host, port = endpoint.removeprefix("tcp://").rsplit(":", 1)
    deadline_s = time.monotonic() + patience_s
    while problem := _binding_problem(host, int(port)):
        if problem == NOT_OURS:
            addresses = ", ".join(
                f"{each} ({address})" for each in names() if (address := address_of(each))
            )
            raise ConfigError(
                f"{name} cannot be bound: {problem}; this host has {addresses}; 0.0.0.0 listens on all of them"
            )
        if time.monotonic() > deadline_s:
            raise ConfigError(
                f"{name} cannot be bound: {problem}; choose another port, or 0 for a free one"
            )
        time.sleep(0.1)


def _binding_problem(host: str, port: int) -> str:
    """Return why a TCP port cannot be bound now, "" where it can."""
    with socket.socket(socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return os.strerror(error.errno or 0)
    return ""
