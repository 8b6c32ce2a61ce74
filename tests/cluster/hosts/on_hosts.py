"""A run of the arithmetic example on several hosts: two learner ranks, and workers that hold nothing but a key."""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster.hosts.network import Host, Process
from support.paths import EXAMPLE
from support.runs.run_helper import RUN_FILE, inspect, wait_for

BIN = Path(sys.executable).parent
RANKS_PORT = 29500
ITERATIONS = 16
SETTINGS = (
    "algorithm.groups_per_iteration=16",
    "algorithm.samples_per_prompt=4",
    f"algorithm.iterations={ITERATIONS}",
    "algorithm.max_staleness=0",
    "checkpoint.every=0",
    "evaluation.problems=8",
    "evaluation.selection_problems=8",
    "evaluation.sampled_candidates=0",
    "broker.silence_s=12",
    # A lost worker must not change what is trained: its groups are done again, never replaced by others.
    "broker.attempts=50",
    "launch.scorers=1",
    *(f"{role}.device=cpu" for role in ("learner", "rollout", "scorer")),
    *(f"{role}.engine=transformers" for role in ("rollout", "scorer")),
    # Other numbers of threads add in another order.
    *(f"{role}.threads=1" for role in ("learner", "rollout", "scorer")),
)
GOLD = "{}.00000000000"
"""The same number in so many characters that it can be looked for."""


def data(folder: Path) -> tuple[str, ...]:
    """Write the example's problems with gold answers that can be found; the settings that name them."""
    for name in ("train", "heldout"):
        rows = [
            json.loads(line) for line in (EXAMPLE / f"{name}.jsonl").read_text().splitlines()[:512]
        ]
        lines = [json.dumps(row | {"answer": GOLD.format(row["answer"])}) for row in rows]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return (f"data.train={folder}/train.jsonl", f"data.eval={folder}/heldout.jsonl")


@dataclass
class Run:
    """A run whose directory is on the learner's hosts alone."""

    folder: Path
    settings: tuple[str, ...]
    hidden: list[Path] = field(default_factory=list)
    """Folders that exist on the learner's hosts alone."""

    def __post_init__(self) -> None:
        self.directory, self.scratch = self.folder / "run", self.folder / "scratch"
        self.kept = self.folder / "kept"
        for folder in (self.directory, self.scratch, self.kept):
            folder.mkdir(parents=True)
        self.hidden = [self.directory, self.scratch]

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def said(self, name: str = "rank-0") -> str:
        """The log of a process; rank 0's has the broker's."""
        return self.log(name).read_text() if self.log(name).exists() else ""

    def start_rank(self, rank: int, host: Host, listen: str, meet_at: str) -> Process:
        """Start a learner rank as torchrun would."""
        given = (*self.settings, f"directory={self.directory}", f"broker.listen={listen}")
        flags = [flag for setting in given for flag in ("--set", setting)]
        variables = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
        meeting = {
            "MASTER_ADDR": meet_at,
            "MASTER_PORT": str(RANKS_PORT),
            "TMPDIR": str(self.scratch),
        }
        command = [str(BIN / "prefixrl-learner"), str(RUN_FILE), *flags]
        return host.start(command, self.log(f"rank-{rank}"), variables | meeting)

    def operate(self, *arguments: str) -> str:
        """Run a command of `prefixrl` on the learner's host."""
        done = subprocess.run(
            [str(BIN / "prefixrl"), *arguments], capture_output=True, text=True, timeout=120.0
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def add_key(self, name: str, host: Path) -> None:
        """Let a worker in, and copy its key to its host as the printed command says."""
        self.operate("keygen", str(self.directory), "--worker", name)
        host.mkdir()
        note = self.operate(
            "worker-command", str(self.directory), "--role", "scorer", "--key", name
        )
        key = re.match(r"# copy (\S+) to the other host", note)
        assert key, note
        shutil.copy(key.group(1), host)

    def start_worker(self, role: str, name: str, host: Host) -> Process:
        """Start a worker by the command that is printed for another host."""
        printed = self.operate("worker-command", str(self.directory), "--role", role, "--key", name)
        command = [line for line in printed.splitlines() if not line.startswith("#")]
        assert len(command) == 1 and "is reached from this host alone" not in printed, printed
        program, *arguments = shlex.split(command[0])
        log, place = self.log(f"{role}-{name}"), self.folder / name
        return host.start([str(BIN / program), *arguments], log, hidden=self.hidden, cwd=place)

    def status_from(self, host: Host) -> dict[str, Any]:
        """`prefixrl status --json` on a host that reaches the broker."""
        document: dict[str, Any] = json.loads(
            host.run(str(BIN / "prefixrl"), "status", str(self.directory), "--json")
        )
        return document

    def keep_weights(self) -> threading.Thread:
        """Keep every file of weights that is published, until the run is over."""

        def keep() -> None:
            while not (self.directory / "summary.json").exists():
                # A version may be pruned at any step of the walk, even between a folder's name and its files.
                with contextlib.suppress(FileNotFoundError):
                    for path in (self.directory / "weights").glob("[vd]*/*.bin"):
                        kept = self.kept / f"{path.parent.name}-{path.name}"
                        if not kept.exists():
                            os.link(path, kept)
                time.sleep(0.02)

        thread = threading.Thread(target=keep, daemon=True)
        thread.start()
        return thread


def freeze_with_a_task(run: Run, worker: Process, host: Host, name: str) -> None:
    """Suspend a worker at a moment at which it holds a task."""

    def is_frozen() -> bool:
        worker.send_signal(signal.SIGSTOP)
        held = [
            each
            for each in run.status_from(host)["workers"]
            if each["name"] == name and each["leases"]
        ]
        if not held:
            worker.send_signal(signal.SIGCONT)
        return bool(held)

    wait_for(is_frozen, f"a task in the hands of {name}")


def plain_text(run: Run) -> dict[str, set[bytes]]:
    """Pieces that must not be readable on the way, by kind."""
    groups = inspect(run.directory)
    rows = [
        row["prefix_ids"]
        for group in groups
        for row in group["rows"]
        if len(row["prefix_ids"]) >= 6
    ]
    asked = {group["prompt_id"] for group in groups}
    problems = [json.loads(line) for line in (run.folder / "train.jsonl").read_text().splitlines()]
    config = (run.directory / "config.json").read_bytes()
    compact = json.dumps(json.loads(config), separators=(",", ":")).encode()
    return {
        "question": {each["question"].encode() for each in problems if each["id"] in asked},
        "gold answer": {each["answer"].encode() for each in problems},
        "tokens": {packed(ids, size) for ids in rows for size in (4, 8)},
        "config": {compact[start : start + 40] for start in range(0, len(compact) - 40, 40)},
    }


def packed(ids: list[int], size: int) -> bytes:
    """Token ids as little-endian numbers of a size."""
    return b"".join(each.to_bytes(size, "little") for each in ids)
