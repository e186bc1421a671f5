"""Programs of the previous version and of this one together: no row is lost between their batches."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import redis

from app.decision_log.batch import STREAM
from tests import logged, service
from tests.decision_log import worker
from tests.decision_log.batches import Node
from tests.decision_log.conftest import eventually, known, leave, written
from tests.decision_log.test_worker import AT_ONCE, drained
from tests.programs import end
from tests.prove.neighbours import older
from workers.decision_log.flush import UNREADABLE
from workers.decision_log.read import read

BEFORE: Final = "6473362"
"""The last commit whose nodes and workers knew batches up to version 3."""
OLD_BATCH: Final = Path(__file__).parent / "version-3" / "n3-000000000001.batch"
ASKS: Final = 40


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of that commit."""
    return older(tmp_path_factory.mktemp("before"), BEFORE)


@contextmanager
def old_worker(before: Path, url: str, folder: Path) -> Iterator[None]:
    """The worker of the version before."""
    bare = {name: value for name, value in os.environ.items() if not name.startswith("QUOTAGATE_")}
    settings = {**logged.settings(folder), "QUOTAGATE_REDIS_URL": url, "PYTHONPATH": str(before)}
    with folder.with_name("old.jsonl").open("ab") as output:
        program = subprocess.Popen(
            [sys.executable, "-P", "-m", "workers"],
            env={**bare, **settings},
            cwd=folder.parent,
            stdout=output,
            stderr=output,
        )
    try:
        yield
    finally:
        end(program)


def aside(folder: Path) -> list[bytes]:
    """The batches that no worker could read."""
    return [file.read_bytes() for file in sorted((folder / UNREADABLE).glob("*"))]


def test_old_worker_keeps_new_batches_for_a_new_one(
    shared: str, client: redis.Redis, folder: Path, before: Path
) -> None:
    batches = list(Node().batches(3, rows=50))
    with old_worker(before, shared, folder):
        leave(client, batches[:2])
        client.xadd(STREAM, {"batch": OLD_BATCH.read_bytes(), "rows": 37})
        leave(client, batches[2:])
        eventually(lambda: drained(client))
    assert {batch for batch, _ in written(folder)} == {OLD_BATCH.stem}
    assert len(aside(folder)) == 3
    with worker.inside(shared, folder, limits=AT_ONCE):
        eventually(lambda: not aside(folder))
    rows = written(folder)
    assert {row for row in rows if row[0] != OLD_BATCH.stem} == known(batches)
    assert len(rows) == 37 + 3 * 50


def test_old_node_and_new_node_with_a_new_worker_lose_no_row(tmp_path: Path, before: Path) -> None:
    """Both get all kinds of asks; the log has as many rows of each as the answers said."""
    folder = tmp_path / "log"
    environment = logged.settings(folder)
    with (
        service.running(environment=environment) as new,
        service.running(
            store_url=new.store_url,
            database_url=new.database_url,
            environment={**environment, "PYTHONPATH": str(before)},
        ) as old,
        redis.Redis.from_url(new.store_url) as client,
    ):
        new.put("user=*", request_rate=5, producer_ids_rate=3, controller_mutation_rate=2)
        eventually(lambda: len(logged.in_force(old) & logged.in_force(new)) >= 3)
        said: Counter[tuple[str, str, str]] = Counter()
        with worker.inside(new.store_url, folder, limits=AT_ONCE):
            for number in range(ASKS):
                for node in (old, new):
                    for ask in asks(number):
                        answer = node.ask(**ask)
                        said[ask["principal"], answer["decision"], answer["source"]] += 1
            total = said.total()
            decisions = eventually(lambda: (found := decided(folder)).total() == total and found)
            eventually(lambda: drained(client))
        assert decisions == said
        assert {"admit", "throttle", "delay"} == {decision for _, decision, _ in said}
        assert len(set(read(folder)["node"].to_pylist())) == 2
    assert aside(folder) == []


def asks(number: int) -> list[dict[str, Any]]:
    """Some asks: admitted, delayed and refused, with ids and without, of one caller and of many."""
    return [
        {"principal": "alice", "usage": {"requests": 1}},
        {"principal": f"caller-{number}", "usage": {"requests": 1, "producer_ids": [number, number + 1]}},
        {"principal": "bob", "usage": {"producer_ids": [number]}},
        {"principal": "carol", "usage": {"mutations": 9}},
    ]


def decided(folder: Path) -> Counter[tuple[str, str, str]]:
    """How often each principal got each decision from each source, by the log."""
    rows = [row for row in read(folder).to_pylist() if row["kind"] == "decision"]
    return Counter((row["principal"], row["decision"], row["source"]) for row in rows)
