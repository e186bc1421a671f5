"""The worker counts a full disk and a missing folder or store, logs each once, and recovers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from redis.asyncio import Redis

from app.decision_log import status
from app.decision_log.batch import STREAM
from tests import stores
from tests.decision_log import worker
from tests.decision_log.batches import Node
from tests.decision_log.conftest import eventually, known, leave, written
from tests.decision_log.test_worker import AT_ONCE, drained
from tests.disks import mounted


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small disk for one test."""
    with mounted(tmp_path / "disk", 1024 * 1024) as place:
        yield place


async def read_status(url: str) -> status.LogStatus:
    async with Redis.from_url(url) as client:
        return await status.read_status(client)


def names(folder: Path) -> list[str]:
    return [file.name for file in folder.rglob("*") if file.is_file()]


def reasons_of(lines: list, event: str) -> list[str]:
    return [line.get("reason", "") for line in lines if event in line["event"]]


async def test_full_disk_is_counted_and_writing_resumes_once_there_is_room(shared, client, disk):
    folder = disk / "log"
    node = Node()
    ballast = disk / "ballast"
    with worker.inside(shared, folder, limits=AT_ONCE) as lines:
        leave(client, batches := list(node.batches(2)))
        eventually(lambda: drained(client))
        with ballast.open("wb") as file, pytest.raises(OSError, match="No space left"):
            file.write(bytes(2 * 1024 * 1024))
        leave(client, more := list(node.batches(20)))
        eventually(lambda: int(client.hget(status.STATUS_KEY, "failures") or 0) >= 2)
        assert not [name for name in names(folder) if name.startswith("_")]  # no partial file takes up room
        assert written(folder) == known(batches)
        found = await read_status(shared)
        assert (found.error, found.waiting, found.written) == ("full", 20, 400)
        assert found.lag_ms > 0
        ballast.unlink()
        eventually(lambda: drained(client))
        eventually(lambda: not client.hget(status.STATUS_KEY, "error"))
    assert written(folder) == known([*batches, *more])
    assert reasons_of(lines, "cannot be written") == ["full"]  # once, although it is tried repeatedly
    assert len(reasons_of(lines, "is written again")) == 1
    found = await read_status(shared)
    assert (found.error, found.waiting, found.written, found.lag_ms) == ("", 0, 4_400, 0)


async def test_missing_folder_is_waited_for(shared, client, folder):
    """A file in the place of the folder simulates an unreachable object store."""
    node = Node()
    with worker.inside(shared, folder, limits=AT_ONCE) as lines:
        leave(client, batches := list(node.batches(2)))
        eventually(lambda: drained(client))
        away = folder.rename(folder.with_name("away"))
        folder.write_text("no folder")
        leave(client, more := list(node.batches(3)))
        eventually(lambda: (client.hget(status.STATUS_KEY, "error") or b"").decode() == "away")
        assert client.xlen(STREAM) == 3
        folder.unlink()
        away.rename(folder)
        eventually(lambda: drained(client))
    assert written(folder) == known([*batches, *more])
    assert reasons_of(lines, "cannot be written") == ["away"]


def test_worker_stops_while_the_folder_is_missing_and_leaves_all_batches_in_the_store(shared, client, folder):
    folder.write_text("no folder")
    batches = list(Node().batches(3))
    with worker.inside(shared, folder, limits=AT_ONCE):
        leave(client, batches)
        eventually(lambda: client.hget(status.STATUS_KEY, "error"))
    assert client.xlen(STREAM) == 3
    folder.unlink()
    with worker.inside(shared, folder, limits=AT_ONCE):
        eventually(lambda: drained(client))
    assert written(folder) == known(batches)


def test_worker_takes_no_more_than_fits_while_it_cannot_write(shared, client, folder):
    folder.write_text("no folder")
    batches = list(Node().batches(60, rows=100))
    with worker.inside(shared, folder, limits={"rows": 1_000, "age_s": 0.05, "packed": 200_000}):
        leave(client, batches[:5])
        eventually(lambda: client.hget(status.STATUS_KEY, "error"))
        leave(client, batches[5:])
        taken = eventually(lambda: _steady(client))
        # The batches being written, the batches gathered behind them, and the batches of one more call.
        assert 5 < taken < 30
        folder.unlink()
        eventually(lambda: drained(client))
    assert written(folder) == known(batches)


def _steady(client: redis.Redis) -> int:
    """The number of pending batches if it did not change until the next attempt to write, else 0."""
    key, taken = status.STATUS_KEY, client.xpending(STREAM, "decision-log")["pending"]
    failures = client.hget(key, "failures")
    eventually(lambda: client.hget(key, "failures") != failures)
    return taken if client.xpending(STREAM, "decision-log")["pending"] == taken else 0


@pytest.mark.parametrize("kind", stores.KINDS)
def test_killed_store_that_comes_back_loses_nothing(kind, folder):
    node = Node()
    with (
        stores.server(kind, "--appendonly", "yes", "--appendfsync", "always") as store,
        redis.Redis.from_url(store.url) as client,
    ):
        leave(client, batches := list(node.batches(3)))
        with worker.inside(store.url, folder, limits=AT_ONCE, times={"lease": 1}) as lines:
            eventually(lambda: drained(client))
            store.kill()
            eventually(lambda: reasons_of(lines, "the store is away"))
            store.start()
            store.until_it_answers()
            leave(client, more := list(node.batches(3)))
            eventually(lambda: drained(client))
        assert written(folder) == known([*batches, *more])


async def test_lag_grows_and_batches_wait_without_a_writer(shared, client):
    assert (await read_status(shared)).lag_ms == 0
    leave(client, Node().batches(3))
    first = await read_status(shared)
    assert (first.waiting, first.seen_ms, first.error) == (3, 0, "")
    while (second := await read_status(shared)).now_ms == first.now_ms:
        pass
    assert second.lag_ms - first.lag_ms == second.now_ms - first.now_ms > 0
