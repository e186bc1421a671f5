"""`quotagate backfill load` into the store of a running node: a warm start, live traffic, kills."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pytest
import redis
from pyarrow import parquet as pq

from app.backfill import load as backfill
from app.backfill.assertions import AssertionFolder
from app.backfill.log import LoadLog
from app.catalog import schema
from app.catalog.catalog import Catalog
from app.catalog.sql import Origin
from app.decision_log.batch import STREAM, Row
from app.decision_log.stream import MAX_BATCHES, LogStream
from app.domain.assertion import MANIFEST, Assertion
from app.domain.digest import digest, fingerprint
from app.domain.entity import Entity
from app.domain.ladder import MatchingRules
from app.domain.quota import Defaults
from app.node import logs
from app.node.errors import CommandError
from app.store.encoding import ORDER_STEP
from app.store.keys import ORDER_KEY
from app.store.loading import Loader
from tests import assertions, stores
from tests.commands import Command, quotagate
from tests.service import Service, running
from workers.decision_log.rows import decode

__all__ = ["quotagate"]

SECRET: Final = bytes(range(32))
NODE: Final = {"QUOTAGATE_HASH_SECRET": SECRET.hex()}
HOUR: Final = 3_600_000
LAYER: Final = HOUR // 3


class Loading:
    """Runs the command as a program with a store and a catalog."""

    def __init__(self, store_url: str, database_url: str, home: Path) -> None:
        self.own = {
            "QUOTAGATE_REDIS_URL": store_url,
            "QUOTAGATE_DATABASE_URL": database_url,
            "QUOTAGATE_HASH_SECRET": SECRET.hex(),
            "QUOTAGATE_HOME": str(home),
        }
        bare = {name: value for name, value in os.environ.items() if not name.startswith("QUOTAGATE_")}
        self.environment = {**bare, **self.own}
        self.home = home

    def start(self, folder: Path, *options: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-P", "-m", "app.run.cli", "backfill", "load", str(folder), *options]
        pipe = subprocess.PIPE
        return subprocess.Popen(
            command, env=self.environment, cwd=self.home, stdout=pipe, stderr=pipe, text=True
        )

    def run(self, folder: Path, *options: str) -> dict[str, Any]:
        with self.start(folder, "-o", "json", *options) as program:
            out, err = program.communicate(timeout=120)
        assert program.returncode == 0, err
        found: dict[str, Any] = json.loads(out)
        return found

    def refused(self, folder: Path) -> str:
        with self.start(folder) as program:
            _, err = program.communicate(timeout=120)
        assert program.returncode == 1, err
        return err


def loading(service: Service, home: Path) -> Loading:
    return Loading(service.store_url, service.database_url, home)


def now_ms(store: redis.Redis) -> int:
    seconds, micros = store.time()
    return int(seconds) * 1000 + int(micros) // 1000


def an_id(principal: str, id_: int, at_ms: int, layer_ms: int) -> Assertion:
    number = int.from_bytes(digest(SECRET, principal, id_), "big", signed=True)
    return Assertion("producer_ids_rate", f"user={principal}", None, "id", at_ms, number, layer_ms)


def charges(principal: str, at_ms: int, ids: int) -> Assertion:
    return Assertion("producer_ids_rate", f"user={principal}", None, "charge", at_ms, value=float(ids))


def history(principal: str, ids: Sequence[int], at_ms: int) -> list[Assertion]:
    """Ids that were charged one by one in the last half hour, in two layers."""
    times = [at_ms - HOUR // 2 + place * 1_000 for place in range(len(ids))]
    layers = [times[0] if time - times[0] < LAYER else times[0] + LAYER for time in times]
    return [
        *(charges(principal, time, 1) for time in times),
        *(an_id(principal, *each) for each in zip(ids, times, layers, strict=True)),
    ]


def dumps(url: str) -> dict[bytes, bytes]:
    """The bytes of all buckets in a store."""
    with redis.Redis.from_url(url) as store:
        return {key: store.dump(key) or b"" for key in sorted(store.keys("qg1:{*"))}


def test_loaded_quota_starts_warm(tmp_path: Path):
    with running(environment=NODE) as node, redis.Redis.from_url(node.store_url) as store:
        node.put("user=*", producer_ids_rate=20, controller_mutation_rate={"limit": 1, "burst": 50})
        node.put("user=alice", consumer_byte_rate={"limit": 1_000, "sample_ms": 600_000})
        at = now_ms(store)
        rates = [
            Assertion(
                "consumer_byte_rate",
                "user=alice",
                "sampled_rate.11.600000.cluster.0",
                "sample",
                at - 500,
                value=9_990,
                last_ms=at - 100,
            ),
            Assertion("controller_mutation_rate", "user=alice", None, "tokens", at, value=-200.0),
            Assertion(
                "consumer_byte_rate",
                "user=alice",
                "sampled_rate.5.1000.cluster.0",
                "sample",
                at,
                value=1,
                last_ms=at,
            ),
            Assertion("request_rate", "user=alice", None, "sample", at, value=1, last_ms=at),
        ]
        old = an_id("alice", 77, at - 2 * HOUR, at - 2 * HOUR)
        rows = sorted([*history("alice", range(15), at), *rates, old, *history("b c", range(20), at)])
        folder = assertions.write(tmp_path / "a", rows, at, parts=3, secret=fingerprint(SECRET))
        load = loading(node, tmp_path)
        assert load.run(folder) == {
            "at_ms": at,
            "assertions": len(rows),
            "added": 2 * 15 + 2 * 20 + 2,
            "there": 0,
            "over": 1,
            "no_room": 0,
            "skipped": {
                "no quota charges the bucket": 1,
                "the bucket was emptied since by a change of its quota": 1,
            },
        }
        held = dumps(node.store_url)
        again = load.run(folder)
        assert (again["added"], again["there"]) == (0, 2 * 15 + 2 * 20 + 2)
        assert dumps(node.store_url) == held

        used = node.ask(principal="alice", usage={"producer_ids": list(range(15))})
        assert (used["decision"], used["limited_by"]) == ("admit", None)
        peek = node.ask(
            principal="alice", usage={"producer_ids": [*range(15), 100]}, mode="peek", detail=True
        )
        assert (peek["decision"], peek["quotas"][0]["observed"], peek["quotas"][0]["remaining"]) == (
            "admit",
            15,
            5,
        )
        six = node.ask(principal="alice", usage={"producer_ids": [*range(100, 106)]})
        assert six["decision"] == "throttle"
        assert HOUR // 2 - 60_000 < six["throttle_ms"] <= HOUR // 2 + 60_000
        assert node.ask(principal="alice", usage={"mutations": 1})["decision"] == "throttle"
        full = node.ask(principal="b c", usage={"producer_ids": [*range(20), 20]})
        assert (full["decision"], full["limited_by"]["quota"]) == ("throttle", "producer_ids_rate")
        forgotten = node.ask(principal="alice", usage={"producer_ids": [77]}, mode="peek", detail=True)
        assert forgotten["decision"] == "admit"


def test_live_traffic_continues_and_everything_is_counted_once(tmp_path: Path):
    """Live and loaded charges add up, and ids of the history that were loaded first stay free."""
    with running(environment=NODE) as node, redis.Redis.from_url(node.store_url) as store:
        node.put("user=*", producer_ids_rate=400_000)
        at = now_ms(store)
        node.ask(principal="alice", usage={"producer_ids": [1, 2, 3]})
        folder = assertions.write(tmp_path / "a", history("alice", range(1_000, 2_000), at), at)
        stop, charged = threading.Event(), [3]

        def live() -> None:
            number = 10_000
            while not stop.is_set():
                decision = node.ask(principal="alice", usage={"producer_ids": [1, 2, number, number + 1]})
                assert (decision["decision"], decision["source"]) == ("admit", "store")
                number += 2
                charged[0] += 2

        thread = threading.Thread(target=live)
        thread.start()
        try:
            loaded = loading(node, tmp_path).run(folder, "--rate", "1000")
        finally:
            stop.set()
            thread.join()
        assert (loaded["added"], loaded["no_room"]) == (2_000, 0)
        peek = node.ask(principal="alice", usage={"producer_ids": []}, mode="peek", detail=True)
        assert peek["quotas"][0]["observed"] == charged[0] + 1_000
        known = node.ask(principal="alice", usage={"producer_ids": list(range(1_000, 2_000))}, detail=True)
        assert known["decision"] == "admit"
        assert known["quotas"][0]["observed"] == charged[0] + 1_000, "an id of the history was charged again"


def test_killed_and_restarted_load_ends_in_the_same_state(tmp_path: Path):
    database = f"sqlite:///{tmp_path / 'catalog.db'}"
    schema.upgrade(database)
    with running(database_url=database, environment=NODE) as node, stores.running("valkey") as other:
        node.put("user=*", producer_ids_rate=2_000)
        with redis.Redis.from_url(node.store_url) as store:
            at = now_ms(store)
        rows = [row for name in ("a", "b", "c") for row in history(name, range(700), at)]
        folder = assertions.write(tmp_path / "f", rows, at, parts=2)
        Loading(node.store_url, database, tmp_path).run(folder)

        load = Loading(other, database, tmp_path)
        with redis.Redis.from_url(other) as store:
            progress = "qg1:backfill:tests"
            for _ in range(3):
                upto = int(store.get(progress) or 0) + random.randint(1, 600)
                with load.start(folder, "--rate", "1500") as program:
                    while int(store.get(progress) or 0) < upto and program.poll() is None:
                        time.sleep(0.002)  # between two looks at the condition that is waited for
                    program.kill()
                assert 0 < int(store.get(progress) or 0) < len(rows), "it was killed in the middle"
            assert dumps(other) != dumps(node.store_url)
            rest = load.run(folder)
            assert store.get(progress) is None
        assert rest["added"] < len(rows), "what was done is not done again"
        assert dumps(other) == dumps(node.store_url)


def loads_in_log(url: str) -> list[Row]:
    """The rows of loads in the decision log, in the order in which they were sent."""
    with redis.Redis.from_url(url) as store:
        batches = [decode(entry[b"batch"]) for _, entry in store.xrange(STREAM)]
    loads = [batch for batch in batches if batch.rows[0].kind == "load"]
    numbers: dict[str, int] = {}
    for batch in loads:
        numbers[batch.node] = numbers.get(batch.node, 0) + 1
        assert batch.id == f"{batch.node}-{numbers[batch.node]:012d}"
    return [row for batch in loads for row in batch.rows]


def test_load_is_in_the_decision_log(tmp_path: Path):
    with running(environment=NODE) as node, redis.Redis.from_url(node.store_url) as store:
        node.put("user=*", producer_ids_rate=400, controller_mutation_rate={"limit": 1, "burst": 50})
        at = now_ms(store)
        rows = [*history("alice", range(150), at), *history("bob", range(5), at)]
        rows += [Assertion("controller_mutation_rate", "user=bob", None, "tokens", at, value=-20.0)]
        folder = assertions.write(tmp_path / "a", sorted(rows), at)
        load = loading(node, tmp_path)
        load.environment["QUOTAGATE_LOG"] = "off"
        load.run(folder)
        assert loads_in_log(node.store_url) == [], "nothing is logged"
        del load.environment["QUOTAGATE_LOG"]
        before = int(store.get(ORDER_KEY) or 0)
        assert load.run(folder)["added"] == 0
        found = loads_in_log(node.store_url)
        assert {row.what for row in found} == {"user=alice", "user=bob"}
        assert len(found) == 4, "one for each bucket of a call, and a call has at most 200 assertions"
        quotas = {key for row in found for key in json.loads(row.after or "")["quotas"]}
        assert quotas == {"producer_ids_rate", "controller_mutation_rate"}
        orders = [row.order or 0 for row in found]
        assert orders == sorted(orders)
        assert orders[0] > before * ORDER_STEP
        assert all(at <= row.at_ms <= now_ms(store) for row in found)
        node.ask(principal="alice", usage={"producer_ids": [1]})
        assert int(store.get(ORDER_KEY) or 0) * ORDER_STEP > orders[-1]
        load.run(folder)
        assert [row.what for row in loads_in_log(node.store_url)] == [row.what for row in found] * 2


def test_nothing_is_loaded_while_the_log_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(backfill, "PAUSES_S", (0.01,))
    with stores.running("valkey") as url, redis.Redis.from_url(url) as store:
        database = f"sqlite:///{tmp_path / 'catalog.db'}"
        schema.upgrade(database)

        async def load() -> backfill.LoadCounts:
            catalog = Catalog(database, Defaults(), SECRET)
            loader, stream = Loader(url, "a"), LogStream.at(url)
            await catalog.open()
            try:
                user = Entity.parse("user=*")
                if await catalog.get(user) is None:
                    await catalog.put(user, {"producer_ids_rate": 20}, Origin("test", 0))
                at = await loader.now_ms()
                folder = assertions.write(tmp_path / f"a{at}", history("alice", range(5), at), at)
                return await backfill.load(
                    AssertionFolder.open(str(folder)),
                    catalog,
                    loader,
                    MatchingRules(),
                    rate=1_000,
                    progress=lambda _: None,
                    log=LoadLog(stream, loader),
                )
            finally:
                await catalog.close()
                await loader.close()
                await stream.close()

        with store.pipeline() as many:
            for _ in range(MAX_BATCHES):
                many.xadd(STREAM, {"rows": 1, "batch": b""})
            many.execute()
        with pytest.raises(CommandError, match=r"the decision log is full, .*run the same command again"):
            asyncio.run(load())
        assert dumps(url) == {}
        store.delete(STREAM)
        assert asyncio.run(load()).loaded.added == 10
        assert [row.what for row in loads_in_log(url)] == ["user=alice"]


def test_invalid_folder_of_assertions_is_refused_as_a_whole(
    tmp_path: Path, quotagate: Command, monkeypatch: pytest.MonkeyPatch
):
    """The first by the command as a program, the others by the command in this process."""
    monkeypatch.setattr(logs, "configure", lambda _: None)  # this process keeps its own
    at = 1_000_000
    good = [*history("a", range(5), at), *history("b", range(5), at)]
    with stores.running("valkey") as url, redis.Redis.from_url(url) as store:
        database = f"sqlite:///{tmp_path / 'catalog.db'}"
        schema.upgrade(database)
        load = Loading(url, database, tmp_path)

        for name, value in load.own.items():
            monkeypatch.setenv(name, value)
        monkeypatch.chdir(tmp_path)

        def refusal(folder: Path) -> str:
            ran = quotagate("backfill", "load", str(folder))
            assert ran.code == 1, ran.err
            return ran.err

        def refused(name: str, **fields: Any) -> str:
            return refusal(assertions.write(tmp_path / name, good, at, **fields))

        (tmp_path / "empty").mkdir()
        assert f"empty/{MANIFEST}: is missing" in load.refused(tmp_path / "empty")
        assert f"{MANIFEST}: version: 2 is newer" in refused("newer", version=2)
        assert "not this deployment's" in refused("secret", secret=fingerprint(b"x" * 32))
        assert f"{MANIFEST}: KeyError('rows')" in refused("manifest", files=[{"name": "a"}])
        ahead = assertions.write(tmp_path / "ahead", [], now_ms(store) + 60_000)
        assert "ahead of the store's clock" in refusal(ahead)

        corrupt = assertions.write(tmp_path / "corrupt", good, at, parts=2)
        (corrupt / "part-00001.parquet").write_bytes(b"PAR1 no more")
        assert "corrupt/part-00001.parquet: cannot be read as Parquet" in refusal(corrupt)
        gone = assertions.write(tmp_path / "gone", good, at, parts=2)
        (gone / "part-00001.parquet").unlink()
        assert "gone/part-00001.parquet: cannot be read" in refusal(gone)
        half = assertions.write(tmp_path / "half", good, at)
        table = pq.read_table(half / "part-00000.parquet")
        pq.write_table(table.slice(0, 3), half / "part-00000.parquet")
        assert f"part-00000.parquet: holds 3 rows, but {MANIFEST} says 20" in refusal(half)
        pq.write_table(table.drop_columns(["digest"]), half / "part-00000.parquet")
        assert "part-00000.parquet: column digest: is missing" in refusal(half)
        pq.write_table(table.set_column(4, "at_ms", pa.array(["soon"] * 20)), half / "part-00000.parquet")
        assert "part-00000.parquet: column at_ms: is string, must be int64" in refusal(half)
        wrong = [*good, good[-1]._replace(digest=None)]
        assert "column digest: is null, but kind id needs it" in refusal(
            assertions.write(tmp_path / "null", wrong, at)
        )
        late = [*good, good[-1]._replace(at_ms=at + 1)]
        assert "column at_ms: is later than at_ms in" in refusal(
            assertions.write(tmp_path / "late", late, at)
        )
        strange = [*good, good[-1]._replace(kind="ids")]  # type: ignore[arg-type]
        assert "column kind: must be charge, id, sample or tokens" in refusal(
            assertions.write(tmp_path / "kind", strange, at)
        )
        assert list(store.scan_iter("qg1:{*")) == [], "nothing was loaded"


def test_missing_store_setting_is_explained(tmp_path: Path):
    load = Loading("unix:///nowhere", f"sqlite:///{tmp_path / 'c.db'}", tmp_path)
    del load.environment["QUOTAGATE_REDIS_URL"]
    folder = assertions.write(tmp_path / "a", [], 1)
    assert "set QUOTAGATE_REDIS_URL, or run `quotagate up`" in load.refused(folder)
