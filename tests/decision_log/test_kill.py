"""The worker is killed at random moments under load: each row that the store accepted is read once."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

from app.decision_log.batch import STREAM
from tests import proofs
from tests.decision_log import worker
from tests.decision_log.batches import Node, packed
from tests.decision_log.conftest import eventually, written
from tests.decision_log.test_worker import drained, files
from workers.decision_log.schema import footer

BOUND = 400
"""The capacity of the stream in entries; a node drops a refused batch, and counts it."""

APPEND = """
if redis.call('XLEN', KEYS[1]) >= tonumber(ARGV[1]) then return 0 end
redis.call('XADD', KEYS[1], '*', 'batch', ARGV[2], 'rows', ARGV[3])
return 1
"""


class Load:
    """A node that sends batches as fast as the stream takes them, and pauses briefly when it is full."""

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


def killed(url: str, folder: Path, output: Path, times: int, seed: int) -> tuple[int, int, int, int]:
    """Kill the worker repeatedly; return the number of rows accepted, refused and on disk, and of files."""
    chance = random.Random(seed)
    load = Load(url, "n1", seed)
    # It writes and merges all the time, so that kills hit every step.
    settings = {
        "limits": {"rows": 500, "age_s": 0.1},
        "times": {"lease": 0.5, "upkeep": 0.3, "stay": 2.0},
    }
    with load.running():
        for _ in range(times):
            before = set(files(folder))
            with worker.running(url, folder, output, **settings) as child:
                eventually(lambda: set(files(folder)) != before)  # noqa: B023  it writes
                time.sleep(chance.random() * 0.5)  # any moment of its work from then on
                child.kill()
                child.wait()
    with redis.Redis.from_url(url) as client, worker.running(url, folder, output, **settings):
        eventually(lambda: drained(client))
    assert "failed unexpectedly" not in output.read_text()
    assert load.accepted
    assert written(folder) == load.accepted
    rows = sum(footer(str(file)).num_rows for file in files(folder))
    return len(load.accepted), load.refused, rows, len(files(folder))


def test_three_kills_lose_nothing(shared, client, folder, tmp_path):
    accepted, *_ = killed(shared, folder, tmp_path / "output", 3, seed=random.randrange(2**32))
    assert accepted > 1_000


@pytest.mark.prove
def test_twenty_kills_lose_nothing(shared, client, folder, tmp_path):
    seed = random.randrange(2**32)
    began = time.monotonic()
    accepted, refused, rows, count = killed(shared, folder, tmp_path / "output", 20, seed)
    took_s = time.monotonic() - began
    proofs.print_table(
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
