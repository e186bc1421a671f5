"""Rows of asks over several slots of a cluster: places of their own, and charges that were taken back."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from app.admission.leases.leases import Settlement
from app.domain.caller import ANYONE
from app.store import redis as redis_module
from tests import clusters
from tests.charging import decisions_of
from tests.clusters import Cluster
from tests.contract.clustered import IP_LIMIT, USER_LIMIT, address, ask_of, fresh, nodes, spent
from tests.decision_log.saved import (
    SavedBatches,
    decided_so,
    log_into,
    of_verdicts,
    rows_in,
    shown,
    verdicts_in,
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with clusters.running(replicas=False) as running:
        yield running


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A crowded machine is no outage."""
    monkeypatch.setattr(redis_module, "EXAMINE_WITHIN_S", 30.0)


async def test_each_verdict_of_several_slots_has_its_own_place(cluster: Cluster) -> None:
    stream = SavedBatches()
    log = log_into(stream)
    async with nodes(cluster, recorder=log) as (node,):
        usage = {"requests": 1, "connections": 1, "fetch_bytes": 1}
        several = ask_of(fresh("u"), address(), usage=usage, producer_ids=(1, 2), detail=True)
        alone = ask_of(fresh("u"), None, detail=True)
        asks = several, alone, replace(several, mode="record")
        decisions = [decision for ask in asks for decision in await decisions_of(node, [ask])]
    spread, single, recorded = rows = await rows_in(log, stream)
    for decision, row in zip(decisions, rows, strict=True):
        assert verdicts_in(row) == shown(decision.quotas)
        assert {name: row[name] for name in decided_so(decision)} == decided_so(decision)
    for row in (spread, recorded):
        by_bucket = defaultdict(set)
        for verdict in row["verdicts"]:
            by_bucket[verdict["bucket"]].add(verdict["bucket_order"])
        assert [len(places) for places in by_bucket.values()] == [1, 1]
        assert len(set.union(*by_bucket.values())) == 2
        assert row["order"] == max(of_verdicts(row, "bucket_order"))
    assert of_verdicts(single, "bucket_order") == [None]
    assert single["order"] is not None
    of_ids = spread["verdicts"][0]
    assert (of_ids["quota"], of_ids["charged_ids"]) == ("producer_ids_rate", spread["ids"])


async def test_rows_of_a_flood_account_for_each_bucket(cluster: Cluster) -> None:
    """Charges, undone charges, and the units given back of them add up to each bucket, as in an audit."""
    streams = [SavedBatches(), SavedBatches()]
    logs = [log_into(stream) for stream in streams]
    users, ip = [fresh("u") for _ in range(6)], address()
    async with (
        nodes(cluster, 1, recorder=logs[0]) as (one,),
        nodes(cluster, 1, recorder=logs[1]) as (other,),
    ):
        asks = [ask_of(user, ip, detail=True) for user in users for _ in range(USER_LIMIT)]
        for first in range(0, len(asks), 40):  # beyond the limit of the address
            await asyncio.gather(
                *(decisions_of(node, [ask]) for ask in asks[first : first + 40] for node in (one, other))
            )
        rows = [row for log, stream in zip(logs, streams, strict=True) for row in await rows_in(log, stream)]
        taken: defaultdict[str, float] = defaultdict(float)
        for row in rows:
            for verdict in row["verdicts"]:
                if row["kind"] == "undone" or (row["kind"] == "decision" and row["charged"]):
                    taken[verdict["bucket"]] += verdict["usage"]
                elif row["kind"] == "undo":
                    taken[verdict["bucket"]] -= verdict["usage"]
        for user in users:
            assert round(taken[f"user={user}"]) == await spent(one, f"user={user}", "request_rate")
        used = await spent(one, f"ip={ip}", "connection_creation_rate")
        assert round(taken[f"ip={ip}"]) == used
        assert IP_LIMIT - 1 <= used <= IP_LIMIT, "an undo gives back what did not flow in meanwhile"
    places = [
        (verdict["bucket"], verdict["bucket_order"])
        for row in rows
        for verdict in row["verdicts"]
        if verdict["bucket_order"] is not None
    ]
    assert len(places) == len(set(places)), "no place is in two rows"
    gone, back = ([row for row in rows if row["kind"] == kind] for kind in ("undone", "undo"))
    for row in (*gone, *back):
        (verdict,) = row["verdicts"]
        assert (row["order"], verdict["outcome"]) == (verdict["bucket_order"], "admit")
    assert len(gone) >= len(back)
    refused = [row for row in rows if row["kind"] == "decision" and row["decision"] == "throttle"]
    assert len(refused) == 2 * len(users) * USER_LIMIT - used
    assert gone
    assert not any(row["charged"] for row in refused)


async def test_lease_of_several_slots_and_what_one_of_them_freed_are_rows(cluster: Cluster) -> None:
    stream = SavedBatches()
    log = log_into(stream, "denied")
    user, ip = fresh("u"), address()
    async with nodes(cluster, recorder=log) as (node,):
        usage: dict[str, Any] = {"requests": 8, "connections": 8}
        wish = ask_of(user, ip, usage=usage, deny=True, detail=True)
        taken = await node.leases.take(wish, 10_000, [], ANYONE)
        settlement = Settlement(node.leases.named(taken.name or "", None), {"requests": 3, "connections": 2})
        nothing = replace(wish, usage={"requests": 0})
        await node.leases.take(nothing, 10_000, [settlement], ANYONE)
    rows = await rows_in(log, stream)
    assert [row["kind"] for row in rows] == ["lease", "settlement"]
    granted, settled = rows
    assert verdicts_in(granted) == shown(taken.decision.quotas)
    assert of_verdicts(granted, "usage") == [8.0, 8.0]
    assert of_verdicts(settled, "usage") == [3.0, 2.0]
    for row in rows:
        assert len(set(of_verdicts(row, "bucket_order"))) == 2
        assert row["change"]["what"] == granted["change"]["what"]
