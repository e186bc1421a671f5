"""The worker killed at random moments under load: every row that the store accepted is on disk, read once."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

from app.store.decision_log import STREAM
from tests import proofs
from tests.decision_log import worker
from tests.decision_log.batches import Node, packed
from tests.decision_log.conftest import eventually, written
from tests.decision_log.test_worker import drained, files
from workers.decision_log.schema import footer

BOUND = 400
"""Entries that the stream takes; a node whose batch is refused drops it, and counts it."""

APPEND = """
if redis.call('XLEN', KEYS[1]) >= tonumber(ARGV[1]) then return 0 end
redis.call('XADD', KEYS[1], '*', 'batch', ARGV[2], 'rows', ARGV[3])
return 1
"""


class Load:
    """A node that leaves batches as fast as the stream takes them, and pauses a little when it does not."""

    def __init__(self, url: str, name: str, seed: int) -> None:
        self.accepted: set[tuple[str, int]] = set()
        self.refused = 0
        self._url = url
        self._node = Node(name, seed=seed)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work)

    @contextmanager
    def running(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self._over.set()
            self._thread.join()

    def _work(self) -> None:
        with redis.Redis.from_url(self._url) as client:
            append = client.register_script(APPEND)
            while not self._over.is_set():
                batch = self._node.batch(50)
                if append(keys=[STREAM], args=[BOUND, packed(batch), len(batch.rows)]):
                    self.accepted |= {(batch.id, place) for place in range(50)}
                else:
                    self.refused += 50
                    self._over.wait(0.05)
                self._over.wait(0.01)  # some 4,000 rows a second


def killed(url: str, folder: Path, said: Path, times: int, seed: int) -> tuple[int, int, int, int]:
    """Kill the worker so often; rows accepted, refused, on disk with those that stand twice, and files."""
    chance = random.Random(seed)
    load = Load(url, "n1", seed)
    # Flushed and merged all the time, so that a kill meets every step.
    settings = {
        "limits": {"rows": 500, "age_s": 0.1},
        "times": {"lease": 0.5, "upkeep": 0.3, "stay": 2.0},
    }
    with load.running():
        for _ in range(times):
            before = set(files(folder))
            with worker.running(url, folder, said, **settings) as child:
                eventually(lambda: set(files(folder)) != before)  # noqa: B023  it writes
                time.sleep(chance.random() * 0.5)  # any moment of what it does from then on
                child.kill()
                child.wait()
    with redis.Redis.from_url(url) as client, worker.running(url, folder, said, **settings):
        eventually(lambda: drained(client))
    assert "nobody foresaw" not in said.read_text()
    assert load.accepted
    assert written(folder) == load.accepted
    rows = sum(footer(str(file)).num_rows for file in files(folder))
    return len(load.accepted), load.refused, rows, len(files(folder))


def test_three_kills_lose_nothing(shared, client, folder, tmp_path):
    accepted, *_ = killed(shared, folder, tmp_path / "said", 3, seed=random.randrange(2**32))
    assert accepted > 1_000


@pytest.mark.prove
def test_twenty_kills_lose_nothing(shared, client, folder, tmp_path):
    seed = random.randrange(2**32)
    began = time.monotonic()
    accepted, refused, rows, count = killed(shared, folder, tmp_path / "said", 20, seed)
    took_s = time.monotonic() - began
    proofs.found(
        "decision-log",
        "Twenty kills",
        "make prove T=tests/decision_log",
        (
            "kills",
            "rows accepted",
            "refused, as the stream was full",
            "on disk, some twice",
            "read",
            "files",
            "s",
        ),
        [(20, f"{accepted:,}", f"{refused:,}", f"{rows:,}", f"{accepted:,}", count, f"{took_s:.0f}")],
    )
