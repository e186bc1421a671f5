"""The audit replays the leases in the log of a real node exactly, and finds faults in them."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from operator import attrgetter
from typing import Any

import pyarrow as pa
import pytest
import redis

from app.decision_log.batch import STREAM_NAME
from app.domain.slots import slot_of
from app.store.keys import shared_key
from tests import clusters, stores
from tests.jobs.audits import Findings, asked_of, judge
from tests.ports import HOST
from tests.service import Service, eventually, running
from workers.decision_log import rows as logged_rows
from workers.decision_log.rows import table
from workers.decision_log.schema import SCHEMA
from workers.jobs.audit.judge import AuditRules, Replay, judged
from workers.jobs.audit.levels import LevelJudge
from workers.jobs.audit.saved_replays import decode, encode
from workers.jobs.whatif.simulation import Assumptions
from workers.jobs.whatif.slices import encoded
from workers.jobs.whatif.what_if import what_if

Row = dict[str, Any]
STEPS = 600
QUOTAS = {
    "consumer_byte_rate": {"limit": 1_000, "samples": 4, "sample_ms": 500},
    "controller_mutation_rate": {"limit": 20, "burst": 100},
    "request_rate": {"limit": 30, "samples": 3, "shadow": True},
}
SHARED = {"connection_creation_rate": {"limit": 20, "burst": 60, "algorithm": "token_bucket"}}
FIELDS = {"fetch_bytes": 1_500, "mutations": 60, "requests": 40, "connections": 20}


class Traffic:
    """Asks, leases, settlements and forgotten leases of two principals, in the caller's time."""

    def __init__(self, node: Service) -> None:
        self.node = node
        self.dice = random.Random(1)
        self.now_ms = 1_800_000_000_000
        self.leases: list[tuple[str, dict[str, float]]] = []
        self.rows = 0

    def usage(self) -> dict[str, float]:
        fields = self.dice.sample(list(FIELDS), self.dice.randint(1, 3))
        return {name: self.dice.randint(0, FIELDS[name]) for name in fields}

    def step(self) -> None:
        self.now_ms += self.dice.choice((0, 1, 20, 100, 400, 1_000))
        names: dict[str, Any] = {
            "principal": self.dice.choice(("a", "b")),
            "ip": self.dice.choice(("10.0.0.1", "10.0.0.2")),
            "at_ms": self.now_ms,
        }
        if self.dice.random() < 0.5:
            mode = self.dice.choice(("admit", "admit", "admit", "record", "refund", "peek"))
            self.node.ask(**names, usage=self.usage(), mode=mode)
            self.rows += mode != "peek"
            return
        settled = [self.leases.pop() for _ in range(min(len(self.leases), self.dice.randint(0, 2)))]
        if self.leases and self.dice.random() < 0.3:
            self.leases.pop(0)  # its holder dies
        spent = [
            {
                "lease": name,
                "usage": {field: int(amount * self.dice.random()) for field, amount in had.items()},
            }
            for name, had in settled
        ]
        usage = self.usage()
        body = {
            "ask": names | {"usage": usage},
            "lease_ms": self.dice.choice((50, 500, 3_000)),
            "settle": spent,
        }
        answer = self.node.lease(body)
        self.rows += len(spent) + any(usage.values())
        if answer["lease"]:
            self.leases.append((answer["lease"], answer["granted"]))


@contextmanager
def store(stream: str, *, clustered: bool) -> Iterator[tuple[str, Any]]:
    """A store of one primary or of a cluster: its URL, and a client of the primary with the stream."""
    if not clustered:
        with stores.running("valkey") as url, redis.Redis.from_url(url) as client:
            yield url, client
        return
    with clusters.running(replicas=False) as cluster:
        port = cluster.owner(slot_of(stream.encode())).port
        with redis.Redis(HOST, port) as client:
            yield cluster.url, client


@pytest.fixture(scope="module", params=[False, True], ids=["one primary", "cluster"])
def rows(request: pytest.FixtureRequest) -> Iterator[list[Row]]:
    settings = {"QUOTAGATE_CLOCK": "caller", "QUOTAGATE_LOG": "all"}
    stream = shared_key(STREAM_NAME, clustered=request.param)
    with (
        store(stream, clustered=request.param) as (url, client),
        running(store_url=url, environment=settings) as node,
    ):
        node.put("user=*", **QUOTAS)
        node.put("ip=*", **SHARED)
        traffic = Traffic(node)
        for _ in range(STEPS):
            traffic.step()

        def logged() -> list[Row]:
            batches = [logged_rows.decode(entry[b"batch"]) for _, entry in client.xrange(stream)]
            found = table(batches).to_pylist()
            return found if sum(bool(row["verdicts"]) for row in found) >= traffic.rows else []

        yield eventually(logged)


def wrong(found: Findings) -> int:
    counts = ("differs", "lost", "altered", "unlogged", "over", "unjudged")
    return sum(found.total(count) for count in counts)


def test_leases_of_a_node_are_judged_exactly(rows: list[Row]):
    found = judge(rows)
    kinds = {row["kind"] for row in rows}
    lapsed = [json.loads(row["change"]["after"]) for row in rows if row["kind"] == "lapse"]
    outcomes = {(row["kind"], row["decision"]) for row in rows}
    assert kinds >= {"decision", "lease", "settlement"}
    assert outcomes >= {
        ("lease", "admit"),
        ("lease", "throttle"),
        ("settlement", "admit"),
        ("settlement", "reject"),
    }
    assert lapsed
    assert all(each["units"] > 0 and each["quota"] in QUOTAS | SHARED for each in lapsed)
    assert not found.cases, found.cases[:3]
    assert wrong(found) == 0
    assert found.total("judged") == found.total("verdicts") > STEPS


def test_saved_replay_goes_on_with_its_leases(rows: list[Row]):
    dice = random.Random(1)
    holds = 0
    for _, each in groupby(asked_of(rows), attrgetter("key")):
        bucket = list(each)
        for cut in sorted(dice.randrange(1, len(bucket)) for _ in range(9)):
            so_far = Replay()
            list(judged(bucket[:cut], AuditRules(), so_far))
            saved = decode(encode(so_far))
            assert saved == so_far
            assert isinstance(saved.judge, LevelJudge)
            holds += len(saved.judge.holds)
            faulty = [row._replace(usage=row.usage / 2) if row.how else row for row in bucket[cut:]]
            rest = dice.choice((bucket[cut:], faulty))
            assert list(judged(rest, AuditRules(), saved)) == list(judged(rest, AuditRules(), so_far))
    assert holds


def test_leases_of_a_node_are_replayed(rows: list[Row]):
    """In the caller's time, with peeks that the store does not number."""
    logged = pa.Table.from_pylist(rows, schema=SCHEMA)
    found = what_if(encoded([logged], by_store=False), {}, Assumptions(is_whole=True)).reproduction
    assert found.reproduced == found.decisions > STEPS / 3, found


def first(rows: list[Row], kind: str) -> Row:
    """A row in the middle that was granted or settled, with units of a rate that denies."""
    return next(
        row
        for row in rows[len(rows) // 2 :]
        if row["kind"] == kind
        and row["decision"] == "admit"
        and dict(row["usage"]).get("fetch_bytes", 0) > 50
    )


def settles_less(rows: list[Row]) -> None:
    for verdict in first(rows, "settlement")["verdicts"]:
        verdict["usage"] = verdict["usage"] // 2


def grants_more(rows: list[Row]) -> None:
    for verdict in first(rows, "lease")["verdicts"]:
        verdict["usage"] += 1_000_000


def lacks_lease(rows: list[Row]) -> None:
    rows.remove(first(rows, "lease"))


def lacks_settlement(rows: list[Row]) -> None:
    rows.remove(first(rows, "settlement"))


def lasts_longer(rows: list[Row]) -> None:
    """A lease that nobody settled seems to hold its units for longer."""
    settled = {row["change"]["what"] for row in rows if row["kind"] == "settlement"}
    for row in rows:
        if row["kind"] == "lease" and row["decision"] == "admit" and row["change"]["what"] not in settled:
            row["change"]["after"] = json.dumps({"lease_ms": 40_000})


@pytest.mark.parametrize("fault", [settles_less, grants_more, lacks_lease, lacks_settlement, lasts_longer])
def test_fault_in_leases_is_found(rows: list[Row], fault: Callable[[list[Row]], None]):
    changed = copy.deepcopy(rows)
    fault(changed)
    assert wrong(judge(changed)) > 0
