"""The broker's hops by Ray actors, or over Redis streams; run by `broker_peers.py` with an environment that has these.

    prompt ─▶ rollout ─▶ prefixes (8 rows) ─▶ scorer ─▶ prefixes and verdicts ─▶ batch ─▶ learner

One rollout and two scorers that answer at once, as in `broker_load.py`; groups as large as there. Prints, as JSON, the
groups per second and the CPU milliseconds per group, of the processes between the workers and of those with the workers
and the learner:

    ray     driver, raylet and global control service. The driver keeps a number of groups under way, passes references
            from actor to actor (small objects travel with the driver's messages) and hands over whole batches: the
            cheapest form, in which it sees no result
    values  the same, but the driver gets each result before it passes it on, as whoever checks results must
    queue   an actor between the workers, with asyncio: they take their next groups from it with the call by which they
            give it their results, up to eight groups at a time. So workers may come and go, as they may with the
            broker; the driver of the forms above knows all of them from the start. Between the workers stand this
            actor, the driver, the raylet and the global control service
    single  the same with one group per call, as groups come and go where each takes seconds, and as the broker's do
    redis   redis-server, append-only file on, synced every second. Workers read their streams in consumer groups and
            acknowledge; nobody keeps a window, checks a result, or notices a dead worker

Neither encrypts or checks anything, and neither keeps what it holds over a crash as a journal does.

    python peer_hops.py ray|values|queue|single|redis SECONDS
"""

import asyncio
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

ROWS, TOKENS, BATCH, IN_FLIGHT = 8, 64, 512, 64
SCORERS = 2
AT_ONCE = 8
"""Groups of a call to the queue: with more, a call's arguments are no longer sent inline."""
TEXT = "a step of an answer " * 12
SEATS = 8
"""Calls of a worker to the queue at once, where each is about one group: with fewer, a group costs more."""
WARM_UP_S = 3.0
VERDICT = {
    "reward": 1.0,
    "status": "ok",
    "extracted": "42",
    "finish": "eos",
    "completion_tokens": 300,
}


def prefixes(seq: int) -> dict[str, Any]:
    """A group's prefixes, of as many bytes as the broker's."""
    rows = [
        {
            "tokens": os.urandom(4 * TOKENS),
            "logprobs": bytes(4 * TOKENS),
            "finish": "length",
            "text": TEXT,
        }
        for _ in range(ROWS)
    ]
    return {"seq": seq, "prompt": f"{seq} + 1 =", "prompt_tokens": bytes(400), "rows": rows}


def judged(group: dict[str, Any]) -> dict[str, Any]:
    """The group with its verdicts."""
    return {"prefixes": group, "verdicts": [VERDICT] * ROWS}


def cpu_seconds(pids: list[int]) -> float:
    """The CPU time of processes, all their threads."""
    total = 0
    for pid in pids:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            fields = file.read().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


def named(name: str) -> list[int]:
    """Children of this process with a name."""
    found = subprocess.run(
        ["ps", "-eo", "pid=,ppid=,comm="], capture_output=True, text=True, check=True
    ).stdout
    lines = (line.split(None, 2) for line in found.splitlines())
    pids = [
        int(pid)
        for pid, parent, command in lines
        if command.strip() == name and int(parent) == os.getpid()
    ]
    assert len(pids) == 1, f"{len(pids)} processes {name}"
    return pids


class Meter:
    """Counts groups after a warm-up, and what processes spend meanwhile: those between the workers, and all."""

    def __init__(self, between: list[int], workers: list[int], span_s: float) -> None:
        self._pids, self._span_s = (between, workers), span_s
        self._begin_s, self._from_s, self._cpu_from_s, self._groups = (
            time.monotonic(),
            0.0,
            [0.0, 0.0],
            0,
        )

    def _cpu_s(self) -> list[float]:
        return [cpu_seconds(pids) for pids in self._pids]

    def count(self, groups: int) -> bool:
        """Count groups that ended; False once the time is over."""
        now_s = time.monotonic()
        if not self._from_s:
            if now_s - self._begin_s > WARM_UP_S:
                self._from_s, self._cpu_from_s = now_s, self._cpu_s()
            return True
        self._groups += groups
        if now_s - self._from_s < self._span_s:
            return True
        between, workers = (
            (to_s - from_s) * 1e3 / self._groups
            for from_s, to_s in zip(self._cpu_from_s, self._cpu_s(), strict=True)
        )
        rate = self._groups / (now_s - self._from_s)
        found = {
            "cpu_ms_per_group": between,
            "system_ms_per_group": between + workers,
            "groups_per_s": rate,
        }
        print(json.dumps(found))
        return False


def with_ray(span_s: float, sees_results: bool = False) -> None:
    import ray  # type: ignore[import-not-found,unused-ignore]

    ray.init(
        num_cpus=1 + SCORERS + 1,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
    )

    class Worker:
        def pid(self) -> int:
            return os.getpid()

        def sample(self, seq: int) -> dict[str, Any]:
            return prefixes(seq)

        def score(self, group: dict[str, Any]) -> dict[str, Any]:
            return judged(group)

        def train(self, *groups: dict[str, Any]) -> int:
            return len(groups)

    rollout, learner, *scorers = (ray.remote(Worker).remote() for _ in range(2 + SCORERS))
    workers = ray.get([each.pid.remote() for each in (rollout, learner, *scorers)])
    meter = Meter([os.getpid(), *named("raylet"), *named("gcs_server")], workers, span_s)
    pending: list[Any] = []
    ready: list[Any] = []
    sampling: set[Any] = set()
    seq = 0
    while True:
        while len(pending) < IN_FLIGHT:
            pending.append(rollout.sample.remote(seq))
            if sees_results:
                sampling.add(pending[-1])
            else:
                pending[-1] = scorers[seq % SCORERS].score.remote(pending[-1])
            seq += 1
        done, pending = ray.wait(pending, num_returns=1)
        more, pending = (
            ray.wait(pending, num_returns=len(pending), timeout=0) if pending else ([], [])
        )
        sampled = [each for each in done + more if each in sampling]
        sampling.difference_update(sampled)
        pending += [
            scorers[at % SCORERS].score.remote(group) for at, group in enumerate(ray.get(sampled))
        ]
        scored = [each for each in done + more if each not in sampled]
        ready += ray.get(scored) if sees_results else scored
        if len(ready) >= BATCH:
            ray.get(learner.train.remote(*ready[:BATCH]))
            ready = ready[BATCH:]
        if not meter.count(len(scored)):
            break
    ray.shutdown()


class Queue:
    """The tasks of all workers and their results, in the process of an actor."""

    def __init__(self, at_once: int) -> None:
        self._at_once, self._changed = at_once, asyncio.Condition()
        self._next = self._under_way = self.scored = 0
        self._prefixes: list[dict[str, Any]] = []
        self._ready: list[dict[str, Any]] = []

    async def pid(self) -> int:
        return os.getpid()

    async def count(self) -> int:
        """The number of groups scored so far."""
        return self.scored

    async def sample(self, done: list[dict[str, Any]]) -> list[int]:
        """Take a rollout's groups and give it others to sample."""
        async with self._changed:
            self._prefixes += done
            self._changed.notify_all()
            await self._changed.wait_for(lambda: self._under_way < IN_FLIGHT)
            given = list(
                range(self._next, self._next + min(self._at_once, IN_FLIGHT - self._under_way))
            )
            self._next, self._under_way = self._next + len(given), self._under_way + len(given)
            return given

    async def score(self, done: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Take a scorer's groups and give it others to score."""
        async with self._changed:
            self._ready += done
            self.scored, self._under_way = self.scored + len(done), self._under_way - len(done)
            self._changed.notify_all()
            await self._changed.wait_for(lambda: self._prefixes)
            given, self._prefixes = self._prefixes[: self._at_once], self._prefixes[self._at_once :]
            return given

    async def batch(self) -> list[dict[str, Any]]:
        """Give the learner its next batch."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._ready) >= BATCH)
            given, self._ready = self._ready[:BATCH], self._ready[BATCH:]
            return given


def with_ray_queue(span_s: float, at_once: int = AT_ONCE, seats: int = 1) -> None:
    import ray

    ray.init(
        num_cpus=2 + SCORERS + 1,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
    )

    class Worker:
        def pid(self) -> int:
            return os.getpid()

        def sample(self, queue: Any) -> None:
            asked: list[int] = []
            while True:
                asked = ray.get(queue.sample.remote([prefixes(seq) for seq in asked]))

        def score(self, queue: Any) -> None:
            groups: list[dict[str, Any]] = []
            while True:
                groups = ray.get(queue.score.remote([judged(group) for group in groups]))

        def train(self, queue: Any) -> None:
            while ray.get(queue.batch.remote()):
                pass

    queue = ray.remote(Queue).remote(at_once)
    actor = ray.remote(Worker).options(max_concurrency=seats)
    rollout, learner, *scorers = (actor.remote() for _ in range(2 + SCORERS))
    workers = ray.get([each.pid.remote() for each in (rollout, learner, *scorers)])
    between = [os.getpid(), *named("raylet"), *named("gcs_server"), ray.get(queue.pid.remote())]
    running = [learner.train.remote(queue)]
    for _ in range(seats):
        running += [rollout.sample.remote(queue), *(each.score.remote(queue) for each in scorers)]
    meter, counted = Meter(between, workers, span_s), 0
    while True:
        ended, _ = ray.wait(running, num_returns=1, timeout=0.5)
        ray.get(ended)  # nobody ends but with an error
        before, counted = counted, ray.get(queue.count.remote())
        if not meter.count(counted - before):
            break
    ray.shutdown()


def _redis_worker(path: str, source: str, target: str, name: str) -> None:
    import redis  # type: ignore[import-not-found,unused-ignore]

    link = redis.Redis(unix_socket_path=path)
    while True:
        for _, entries in link.xreadgroup("all", name, {source: ">"}, count=16, block=1000) or []:
            for number, fields in entries:
                group = json.loads(fields[b"group"])
                # JSON cannot hold bytes: what is measured, the server, sees as many of them.
                if target == "prefixes":
                    made = {
                        "seq": group["seq"],
                        "pad": "x" * (ROWS * (8 * TOKENS + len(TEXT)) + 400),
                    }
                else:
                    made = {"prefixes": group, "verdicts": [VERDICT] * ROWS}
                sent = link.pipeline(transaction=True)
                sent.xadd(target, {"group": json.dumps(made)}).xack(source, "all", number).xdel(
                    source, number
                )
                sent.execute()


def with_redis(span_s: float) -> None:
    import redis

    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/socket"
        flags = [
            "--port",
            "0",
            "--unixsocket",
            path,
            "--dir",
            folder,
            "--appendonly",
            "yes",
            "--save",
            "",
        ]
        server = subprocess.Popen(["redis-server", *flags], stdout=subprocess.DEVNULL)
        link = redis.Redis(unix_socket_path=path)
        while not os.path.exists(path):
            time.sleep(0.05)
        for stream in ("prompts", "prefixes", "scores"):
            link.xgroup_create(stream, "all", id="0", mkstream=True)
        stages = [("prompts", "prefixes", "r")] + [
            ("prefixes", "scores", f"s{each}") for each in range(SCORERS)
        ]
        workers = [
            multiprocessing.Process(target=_redis_worker, args=(path, *each), daemon=True)
            for each in stages
        ]
        for worker in workers:
            worker.start()
        pids = [os.getpid(), *(worker.pid for worker in workers if worker.pid)]
        meter, seq, under_way = Meter([server.pid], pids, span_s), 0, 0
        while True:
            while under_way < IN_FLIGHT:
                link.xadd("prompts", {"group": json.dumps({"seq": seq, "prompt": f"{seq} + 1 ="})})
                seq, under_way = seq + 1, under_way + 1
            got = link.xreadgroup("all", "learner", {"scores": ">"}, count=BATCH, block=1000) or [
                (b"", [])
            ]
            numbers = [number for number, _ in got[0][1]]
            if numbers:
                link.pipeline().xack("scores", "all", *numbers).xdel("scores", *numbers).execute()
            under_way -= len(numbers)
            if not meter.count(len(numbers)):
                break
        for worker in workers:
            worker.kill()
        server.kill()
        server.wait()


if __name__ == "__main__":
    kinds: dict[str, Callable[[float], None]] = {
        "ray": with_ray,
        "values": partial(with_ray, sees_results=True),
        "queue": with_ray_queue,
        "single": partial(with_ray_queue, at_once=1, seats=SEATS),
        "redis": with_redis,
    }
    kinds[sys.argv[1]](float(sys.argv[2]))
