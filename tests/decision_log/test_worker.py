"""The worker with a real store: when it writes, how it treats unreadable batches, and which worker leads."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import redis
from msgspec.structs import replace

from app.decision_log.batch import STREAM, VERSION
from app.decision_log.status import GROUP, STATUS_KEY
from app.node.settings import Settings
from tests.decision_log import worker
from tests.decision_log.batches import BEGAN_MS, Node, packed
from tests.decision_log.conftest import eventually, known, leave, written
from workers.decision_log.run import run
from workers.decision_log.schema import SCHEMA, footer, partition, readable

AT_ONCE = {"age_s": 0.05}
NEVER = {"age_s": 3_600}


def pending(client: redis.Redis) -> int:
    """The number of batches that a worker has taken but not finished."""
    try:
        return int(client.xpending(STREAM, GROUP)["pending"])
    except redis.ResponseError:  # the consumer group does not exist yet
        return 0


def drained(client: redis.Redis) -> bool:
    """Whether no batch is waiting or being written."""
    return client.xlen(STREAM) == 0 and pending(client) == 0


def files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*.parquet") if readable(file.name))


def test_batches_become_parquet_and_leave_the_stream(shared, client, folder):
    batches = list(Node().batches(10))
    leave(client, batches)
    with worker.inside(shared, folder, limits=AT_ONCE):
        eventually(lambda: drained(client))
    assert written(folder) == known(batches)
    assert {str(file.parent.relative_to(folder)) for file in files(folder)} == {partition(BEGAN_MS)}
    for file in files(folder):
        assert footer(str(file)).num_rows
        assert pq.read_schema(file).equals(SCHEMA)


def test_rows_are_stored_by_the_hour_of_their_time(shared, client, folder):
    node = Node(began_ms=BEGAN_MS + 3_600_000 - 100)
    batches = [node.batch(200), replace(node.batch(1), rows=[replace(node.batch(1).rows[0], at_ms=-5)])]
    leave(client, batches)
    with worker.inside(shared, folder, limits=AT_ONCE):
        eventually(lambda: drained(client))
    assert written(folder) == known(batches)
    hours = {str(file.parent.relative_to(folder)): footer(str(file)).num_rows for file in files(folder)}
    assert hours == {
        "date=2025-11-21/hour=10": 99,
        "date=2025-11-21/hour=11": 101,
        "date=1970-01-01/hour=00": 1,
    }


def test_gathered_batches_are_written_by_rows_by_bytes_and_at_a_stop(shared, client, folder):
    node = Node()
    large = {"rows": 10**9, "packed": 10**9}
    with worker.inside(shared, folder, limits=NEVER | large | {"rows": 1_000}):
        leave(client, batches := list(node.batches(5, rows=200)))
        eventually(lambda: written(folder) == known(batches))
    with worker.inside(shared, folder, limits=NEVER | large | {"packed": 10_000}):
        leave(client, more := [node.batch(200)])
        batches += more
        eventually(lambda: written(folder) == known(batches))
    with worker.inside(shared, folder, limits=NEVER | large):
        leave(client, more := [node.batch(200)])
        batches += more
        eventually(lambda: pending(client) == 1)
        assert written(folder) == known(batches[:-1])
    assert written(folder) == known(batches)
    assert drained(client)


def test_pending_batches_are_written_by_the_next_worker(shared, client, folder):
    with worker.running(shared, folder, limits=NEVER, times={"lease": 1}) as child:
        leave(client, batches := list(Node().batches(5)))
        eventually(lambda: pending(client) == 5)
        child.kill()
        child.wait()
    assert not files(folder)
    with worker.running(shared, folder, limits=AT_ONCE, times={"lease": 1}):
        eventually(lambda: drained(client))
    assert written(folder) == known(batches)


def test_unreadable_batches_are_set_aside_and_counted_and_block_nothing(shared, client, folder):
    node = Node()
    good = list(node.batches(3))
    newer = replace(node.batch(), version=VERSION + 1)
    beyond = node.batch()
    beyond = replace(beyond, rows=[*beyond.rows[:-1], replace(beyond.rows[-1], throttle_ms=2**63)])
    leave(client, [good[0], newer, good[1], beyond])
    client.xadd(STREAM, {"batch": b"\xc1 no msgpack", "rows": 7})
    client.xadd(STREAM, {"other": b"fields"})
    leave(client, [good[2]])
    ids = [entry.decode() for entry, _ in client.xrange(STREAM)]
    with worker.inside(shared, folder, limits=AT_ONCE) as lines:
        eventually(lambda: drained(client))
    assert written(folder) == known(good)
    aside = {file.name: file.read_bytes() for file in (folder / "_unreadable").iterdir()}
    assert aside == {
        f"{ids[1]}.batch": packed(newer),
        f"{ids[3]}.batch": packed(beyond),
        f"{ids[4]}.batch": b"\xc1 no msgpack",
    }
    counts = client.hgetall(STATUS_KEY)
    assert (counts[b"written"], counts[b"unreadable"]) == (b"600", b"407")
    assert [line["why"] for line in lines if line["event"].startswith("batches cannot be read")] == [
        f"its version is {VERSION + 1}, newer than {VERSION}"
    ]


def test_batch_that_was_sent_twice_counts_twice_and_is_read_once(shared, client, folder):
    """This happens after a lost reply. Only readers recognize duplicates, by the batch's id."""
    batch = Node().batch()
    with worker.inside(shared, folder, limits=AT_ONCE):
        leave(client, [batch, batch])
        eventually(lambda: drained(client))
    assert client.hget(STATUS_KEY, "written") == b"400"
    assert written(folder) == known([batch])


def test_batches_set_aside_by_an_older_worker_are_read_again(shared, client, folder):
    batch = Node().batch()
    aside = folder / "_unreadable"
    aside.mkdir(parents=True)
    (aside / "1795258243484-0.batch").write_bytes(packed(batch))
    (aside / "1795258243484-1.batch").write_bytes(packed(replace(batch, version=VERSION + 1)))
    cut_short = aside / "_1795258243484-2.batch"  # its writer was killed, and the stream still has it
    cut_short.write_bytes(packed(Node().batch()))
    with worker.inside(shared, folder):
        eventually(lambda: files(folder) and len(list(aside.iterdir())) == 2)
    assert written(folder) == known([batch])
    assert {file.name for file in aside.iterdir()} == {"1795258243484-1.batch", cut_short.name}


def test_one_worker_leads_and_another_takes_over_when_it_is_killed(shared, client, folder):
    node = Node()
    settings: dict[str, Any] = {"limits": AT_ONCE, "times": {"lease": 1}}
    with worker.running(shared, folder, **settings) as first:
        leave(client, batches := [node.batch()])
        eventually(lambda: drained(client))
        with worker.running(shared, folder, **settings):
            first.kill()
            first.wait()
            leave(client, more := list(node.batches(5)))
            eventually(lambda: drained(client))
    assert written(folder) == known([*batches, *more])


def test_leader_that_hung_is_replaced_and_its_batches_are_not_lost(shared, client, folder, tmp_path):
    node = Node()
    times = {"lease": 1}
    output = tmp_path / "output"
    with worker.running(shared, folder, output, limits=NEVER, times=times) as first:
        leave(client, batches := list(node.batches(5)))
        eventually(lambda: pending(client) == 5)
        first.send_signal(signal.SIGSTOP)
        try:
            with worker.running(shared, folder, output, limits=AT_ONCE, times=times):
                eventually(lambda: drained(client))
                assert written(folder) == known(batches)
                first.send_signal(signal.SIGCONT)
                eventually(
                    lambda: "the decision log is no longer written by this worker" in output.read_text()
                )
                leave(client, more := list(node.batches(5)))
                eventually(lambda: drained(client))
        finally:
            first.send_signal(signal.SIGCONT)
    assert written(folder) == known([*batches, *more])
    assert "failed unexpectedly" not in output.read_text()


def test_invalid_url_is_refused_with_the_name_of_the_setting(shared):
    command = [sys.executable, "-P", "-m", "workers"]
    settings = {"QUOTAGATE_REDIS_URL": shared, "QUOTAGATE_LOG_URL": "ftp://host/log"}
    ended = subprocess.run(
        command, env={**os.environ, **settings}, capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].startswith("quotagate: QUOTAGATE_LOG_URL: must be a path, or begin")


async def test_worker_does_nothing_while_the_log_is_off(folder):
    stop = asyncio.Event()
    settings = Settings(redis_url="unix:///nowhere", log_url=str(folder), log="off")
    working = asyncio.create_task(run(settings, stop))
    await asyncio.sleep(0)
    assert not working.done()
    stop.set()
    await working
    assert not folder.exists()


def test_worker_continues_after_the_store_was_emptied(shared, client, folder):
    node = Node()
    with worker.inside(shared, folder, limits=AT_ONCE, times={"lease": 1}):
        leave(client, batches := list(node.batches(2)))
        eventually(lambda: drained(client))
        client.flushall()
        leave(client, more := list(node.batches(2)))
        eventually(lambda: drained(client))
    assert written(folder) == known([*batches, *more])
