"""The worker while the disk is full, or folder or store are away: counted, said once, and recovered from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from redis.asyncio import Redis

from app.store import decision_log_standing
from app.store.decision_log import STREAM
from tests import stores
from tests.decision_log import worker
from tests.decision_log.batches import Node
from tests.decision_log.conftest import eventually, known, leave, written
from tests.decision_log.test_worker import AT_ONCE, drained
from tests.disks import mounted


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small disk of its own."""
    with mounted(tmp_path / "disk", 1024 * 1024) as place:
        yield place


async def standing(url: str) -> decision_log_standing.LogStanding:
    async with Redis.from_url(url) as client:
        return await decision_log_standing.read(client)


def names(folder: Path) -> list[str]:
    return [file.name for file in folder.rglob("*") if file.is_file()]


def said_of(said: list, event: str) -> list[str]:
    return [line.get("reason", "") for line in said if event in line["event"]]


async def test_a_full_disk_is_counted_and_gone_on_with_when_there_is_room(shared, client, disk):
    folder = disk / "log"
    node = Node()
    ballast = disk / "ballast"
    with worker.inside(shared, folder, limits=AT_ONCE) as said:
        leave(client, batches := list(node.batches(2)))
        eventually(lambda: drained(client))
        with ballast.open("wb") as file, pytest.raises(OSError, match="No space left"):
            file.write(bytes(2 * 1024 * 1024))
        leave(client, more := list(node.batches(20)))
        eventually(lambda: int(client.hget(decision_log_standing.KEY, "failures") or 0) >= 2)
        assert not [name for name in names(folder) if name.startswith("_")]  # no half file takes room either
        assert written(folder) == known(batches)
        found = await standing(shared)
        assert (found.error, found.waiting, found.written) == ("full", 20, 400)
        assert found.lag_ms > 0
        ballast.unlink()
        eventually(lambda: drained(client))
        eventually(lambda: not client.hget(decision_log_standing.KEY, "error"))
    assert written(folder) == known([*batches, *more])
    assert said_of(said, "cannot be written") == ["full"]  # once, however often it was tried
    assert len(said_of(said, "is written again")) == 1
    found = await standing(shared)
    assert (found.error, found.waiting, found.written, found.lag_ms) == ("", 0, 4_400, 0)


async def test_a_folder_that_is_away_is_waited_for(shared, client, folder):
    """An object store that is away is played by a folder in whose place there is none."""
    node = Node()
    with worker.inside(shared, folder, limits=AT_ONCE) as said:
        leave(client, batches := list(node.batches(2)))
        eventually(lambda: drained(client))
        away = folder.rename(folder.with_name("away"))
        folder.write_text("no folder")
        leave(client, more := list(node.batches(3)))
        eventually(lambda: (client.hget(decision_log_standing.KEY, "error") or b"").decode() == "away")
        assert client.xlen(STREAM) == 3
        folder.unlink()
        away.rename(folder)
        eventually(lambda: drained(client))
    assert written(folder) == known([*batches, *more])
    assert said_of(said, "cannot be written") == ["away"]


def test_a_stop_while_the_folder_is_away_ends_and_leaves_everything_in_the_store(shared, client, folder):
    folder.write_text("no folder")
    batches = list(Node().batches(3))
    with worker.inside(shared, folder, limits=AT_ONCE):
        leave(client, batches)
        eventually(lambda: client.hget(decision_log_standing.KEY, "error"))
    assert client.xlen(STREAM) == 3
    folder.unlink()
    with worker.inside(shared, folder, limits=AT_ONCE):
        eventually(lambda: drained(client))
    assert written(folder) == known(batches)


def test_no_more_is_taken_than_fits_while_nothing_can_be_written(shared, client, folder):
    folder.write_text("no folder")
    batches = list(Node().batches(60, rows=100))
    with worker.inside(shared, folder, limits={"rows": 1_000, "age_s": 0.05, "packed": 200_000}):
        leave(client, batches[:5])
        eventually(lambda: client.hget(decision_log_standing.KEY, "error"))
        leave(client, batches[5:])
        taken = eventually(lambda: _steady(client))
        # One lot that is tried and one that gathers behind it, and what one call more may bring.
        assert 5 < taken < 30
        folder.unlink()
        eventually(lambda: drained(client))
    assert written(folder) == known(batches)


def _steady(client: redis.Redis) -> int:
    """How many are pending once it is tried yet again and no more were taken meanwhile."""
    key, taken = decision_log_standing.KEY, client.xpending(STREAM, "decision-log")["pending"]
    failures = client.hget(key, "failures")
    eventually(lambda: client.hget(key, "failures") != failures)
    return taken if client.xpending(STREAM, "decision-log")["pending"] == taken else 0


@pytest.mark.parametrize("kind", stores.KINDS)
def test_a_store_that_is_killed_and_comes_back_loses_nothing(kind, folder):
    node = Node()
    with (
        stores.server(kind, "--appendonly", "yes", "--appendfsync", "always") as store,
        redis.Redis.from_url(store.url) as client,
    ):
        leave(client, batches := list(node.batches(3)))
        with worker.inside(store.url, folder, limits=AT_ONCE, times={"lease": 1}) as said:
            eventually(lambda: drained(client))
            store.kill()
            eventually(lambda: said_of(said, "the store is away"))
            store.start()
            store.until_it_answers()
            leave(client, more := list(node.batches(3)))
            eventually(lambda: drained(client))
        assert written(folder) == known([*batches, *more])


async def test_without_a_writer_the_lag_grows_and_the_batches_wait(shared, client):
    assert (await standing(shared)).lag_ms == 0
    leave(client, Node().batches(3))
    first = await standing(shared)
    assert (first.waiting, first.seen_ms, first.error) == (3, 0, "")
    while (second := await standing(shared)).now_ms == first.now_ms:
        pass
    assert second.lag_ms - first.lag_ms == second.now_ms - first.now_ms > 0
