"""A scorer that asks a broker for its turns and a chat endpoint for answers, as a process: it judges nothing.

`python -m support.paced_scorer ENDPOINT KEY_FILE ROWS`
"""

import sys
from pathlib import Path

import numpy as np

from prefixrl.common.config.load import from_json
from prefixrl.common.engines.interface.base import Job
from prefixrl.common.seeds import row_uniforms
from prefixrl.common.wire.address import fixed_address
from prefixrl.common.wire.messages.groups import Sampling
from prefixrl.common.worker.link import Link
from prefixrl.common.worker.permits import Permits
from prefixrl.scorer.served.load import load_served

NEW_TOKENS = 6
BEAT_S = 0.2
QUESTION = b'[{"role": "user", "content": "?"}]\n'


def paced_job(rows: int, key: str = "a") -> Job:
    """So many questions."""
    row = np.frombuffer(QUESTION, dtype=np.uint8).astype(np.int32)
    sampling = Sampling(temperature=0.7, max_new_tokens=NEW_TOKENS)
    draws = row_uniforms(3, "completion", rows, NEW_TOKENS)
    return Job(key, (row,) * rows, draws, sampling, frozenset())


def work(endpoint: str, key_file: str, rows: int) -> None:
    """Keep so many rows open, for ever."""
    link = Link(fixed_address(endpoint, Path(key_file)), "scorer", BEAT_S)
    config = from_json(link.welcome().config_json)
    link.permits = Permits(BEAT_S)
    engine = load_served(config.model_of("scorer"), "scorer", config, permits=link.permits)
    jobs = 0
    while True:
        if engine.open_rows < rows:
            jobs += 1
            engine.submit(paced_job(rows, str(jobs)))
        engine.step(0.02)
        link.vitals.usage, link.vitals.progress = engine.usage, engine.progress
        link.vitals.activity, link.vitals.state = "waiting", engine.waits_for


if __name__ == "__main__":
    work(sys.argv[1], sys.argv[2], int(sys.argv[3]))
