"""Rows of each kind, by a real store: they have the verdicts that the answers to the same asks show."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
from redis.asyncio import Redis

from app.admission.admission import Admission
from app.admission.factor import FactorSource
from app.admission.leases.leases import LeaseAnswer, Settlement
from app.admission.log.decision_log import DecisionLog, Which
from app.admission.metrics.metrics import Metrics
from app.catalog.snapshot import Snapshot
from app.domain.ask import Ask, Mode
from app.domain.caller import ANYONE
from app.domain.decision import Decision
from app.domain.digest import digest
from app.domain.entity import ANY, Entity
from app.domain.ladder import MatchingRules
from app.domain.quota import Layers, Quota
from app.store.redis import RedisStore
from app.store.script import CHECK_FULL_EVERY_MS
from tests import stores
from tests.charging import decisions_of
from tests.decision_log.saved import (
    NODE_MS,
    SECRET,
    Json,
    SavedBatches,
    asked,
    decided_so,
    log_into,
    of_verdicts,
    rows_in,
    shown,
    verdicts_in,
)
from tests.waiting import until

WINDOW_MS = 4_000
SLOWLY = 1e-6
"""A bucket with this limit does not refill while a test lasts."""
USER, ADDRESS = Entity.of(user=ANY), Entity.of(ip=ANY)
IDS = Quota("producer_ids_rate", 3, "producer_ids", "deny", window_ms=WINDOW_MS, layers=Layers(1_000, 4_500))
QUOTAS: dict[str, dict[Entity, Quota]] = {
    "request_rate": {USER: Quota("request_rate", 2, "sampled_rate", "delay", samples=3)},
    "producer_byte_rate": {USER: Quota("producer_byte_rate", 50, "sampled_rate", "delay")},
    "controller_mutation_rate": {
        USER: Quota("controller_mutation_rate", SLOWLY, "token_bucket", "deny", burst=4.0, max_debt=100.0)
    },
    "consumer_byte_rate": {
        USER: Quota("consumer_byte_rate", 5, "token_bucket", "deny", burst=5.0, max_debt=100.0, shadow=True)
    },
    "connection_creation_rate": {
        ADDRESS: Quota("connection_creation_rate", SLOWLY, "token_bucket", "deny", burst=6.0, max_debt=100.0)
    },
    "producer_ids_rate": {USER: IDS},
}
ALL = Ask(
    {"requests": 1, "mutations": 1, "fetch_bytes": 2}, (1, "a"), "alice", "etl", "10.0.0.7", detail=True
)


class FixedFactor(FactorSource):
    """A throttle factor that a test sets."""

    factor = 1.0

    def on(self, _ask: Ask) -> float:
        return self.factor

    def suspension_ms(self, _at_ms: int | None) -> int:
        return 7_000


class LoggedNode(NamedTuple):
    """A node that logs, its log, and its store."""

    node: Admission
    log: DecisionLog
    stream: SavedBatches
    factor: FixedFactor
    raw: Redis

    async def rows(self) -> list[Json]:
        """All rows so far, once no row waits any more."""
        return await rows_in(self.log, self.stream)

    async def store_passes(self, span_ms: int) -> None:
        """Wait until more time than that has passed by the clock of the store."""
        until_ms = await self._store_ms() + span_ms
        while await self._store_ms() <= until_ms:  # noqa: ASYNC110  a clock tells nobody
            await asyncio.sleep(0.01)

    async def _store_ms(self) -> float:
        seconds, micros = await self.raw.time()
        return 1_000.0 * seconds + micros / 1_000

    async def ask(self, *asks: Ask) -> tuple[list[Decision], list[Json]]:
        """The decisions on asks, and the rows of these."""
        before = len(await self.rows())
        decisions = await decisions_of(self.node, asks)
        return decisions, (await self.rows())[before:]


@asynccontextmanager
async def node_at(
    url: str,
    which: Which = "all",
    quotas: Mapping[str, Any] = QUOTAS,
    *,
    remembers: bool = False,
    **more: Any,
) -> AsyncIterator[LoggedNode]:
    """A node on an empty store."""
    raw = Redis.from_url(url)
    await raw.flushall()
    store, stream, factor = RedisStore(url, logged=True, brief=True), SavedBatches(), FixedFactor()
    log = log_into(stream, which)
    snapshot = Snapshot.of(quotas)
    node = Admission(
        store,
        lambda: snapshot,
        rules=MatchingRules(),
        secret=lambda: SECRET,
        sequential=False,
        metrics=Metrics(),
        factor=factor,
        recorder=log,
        **{"budget_s": 30.0, "queue_s": 60.0, "mark": store.mark if remembers else None, **more},
    )
    await node.open()
    try:
        yield LoggedNode(node, log, stream, factor, raw)
    finally:
        await node.close()
        await store.close()
        await raw.aclose()


def check(ask: Ask, decision: Decision, row: Json) -> None:
    """Check the row of an ask that wants detail."""
    expected = asked(ask) | decided_so(decision)
    assert {name: row[name] for name in expected} == expected
    assert verdicts_in(row) == shown(decision.quotas)


def digests(*ids: int | str) -> list[int]:
    """Ids of alice as the log has them."""
    return [int.from_bytes(digest(SECRET, "alice", each), "big", signed=True) for each in ids]


@pytest.mark.parametrize("mode", ["admit", "record", "peek", "refund"])
@pytest.mark.parametrize("deny", [False, True])
async def test_row_of_each_mode_has_the_verdicts_of_the_answer(shared: str, mode: Mode, deny: bool) -> None:
    """The same ask, until its quotas delay and refuse it, also in a batch."""
    ask = replace(ALL, mode=mode, deny=deny, producer_ids=None if mode == "refund" else ALL.producer_ids)
    async with node_at(shared) as logged_node:
        asks = [replace(ask, producer_ids=ask.producer_ids and (n, "a")) for n in range(9)]
        decisions, rows = await logged_node.ask(*asks)
        (last,), (alone,) = await logged_node.ask(ask)
    for one, decision, row in zip([*asks, ask], [*decisions, last], [*rows, alone], strict=True):
        check(one, decision, row)
        assert row["kind"] == "decision"
        assert row["at_ms"] > NODE_MS
    orders = [row["order"] for row in [*rows, alone]]
    if mode == "peek":
        assert orders == [None] * 10, "a call that only peeks has no place in the order"
    else:
        assert orders == sorted(set(orders))
    refused = {"admit": {"admit", "throttle"}, "record": {"admit", "delay"}}
    assert {row["decision"] for row in rows} == refused.get(mode, {"admit"})


async def test_charged_and_refreshed_ids_are_those_of_the_store(shared: str) -> None:
    async with node_at(shared) as logged_node:
        await logged_node.ask(replace(ALL, producer_ids=(1, 2)))
        _, (again,) = await logged_node.ask(replace(ALL, producer_ids=(1, 3, -1, 3)))
        await logged_node.store_passes(IDS.layers.interval_ms)
        _, (later,) = await logged_node.ask(replace(ALL, producer_ids=(1, 2)))
        _, (refused,) = await logged_node.ask(replace(ALL, producer_ids=(3, 4, 5)))
    columns = [
        (row["ids"], row["verdicts"][0]["charged_ids"], row["verdicts"][0]["refreshed_ids"])
        for row in (again, later, refused)
    ]
    assert columns == [
        (digests(1, 3), digests(3), []),
        (digests(1, 2), [], digests(1, 2)),
        (digests(3, 4, 5), [], digests(3)),
    ]
    assert {tuple(of_verdicts(row, "charged_ids")[1:]) for row in (again, later)} == {(None,) * 3}


async def test_kept_answer_is_a_row_without_verdicts(shared: str) -> None:
    async with node_at(shared) as logged_node:
        ask = replace(ALL, id="once")
        (first,), (row,) = await logged_node.ask(ask)
        (again,), (replayed,) = await logged_node.ask(replace(ask, detail=False))
    check(ask, first, row)
    assert again == first
    assert (row["replayed"], replayed["replayed"], replayed["verdicts"]) == (False, True, [])
    assert {name: replayed[name] for name in decided_so(again)} == decided_so(again)
    assert replayed["order"] > row["order"]


async def test_shadow_quotas_say_what_they_would_have_said_whatever_is_logged(shared: str) -> None:
    for which in ("all", "denied"):
        async with node_at(shared, which) as logged_node:
            ask = Ask({"fetch_bytes": 4}, None, "alice")
            _, rows = await logged_node.ask(ask, ask, ask)
        admitted = [row["decision"] for row in rows]
        said = [(verdict["outcome"], verdict["shadow"]) for row in rows for verdict in row["verdicts"]]
        assert admitted == (["admit"] * 3 if which == "all" else ["admit"] * 2)
        assert said[-2:] == [("throttle", True)] * 2
        assert rows[-1]["verdicts"][0]["throttle_ms"] > rows[-2]["verdicts"][0]["throttle_ms"] > 0


async def test_ask_that_a_factor_holds_has_the_verdicts_that_need_no_counter(shared: str) -> None:
    """Also with an id, when the store was asked for a kept answer; another row refreshes the producer ids."""
    async with node_at(shared) as logged_node:
        ask = Ask({"produce_bytes": 10, "requests": 1}, (1, 2), "alice", detail=True)
        await logged_node.ask(ask)
        await logged_node.store_passes(IDS.layers.interval_ms)
        logged_node.factor.factor = 0.0
        (first,), _ = await logged_node.ask(ask)
        named = replace(ask, id="held")
        (second,), _ = await logged_node.ask(named)
        await logged_node.node.close()  # the ids are refreshed meanwhile
        rows = await logged_node.rows()
    ids = [each for each in rows if each["kind"] == "ids"]
    row, with_id = [each for each in rows if each["kind"] == "decision"][-2:]
    check(ask, first, row)
    check(named, second, with_id)
    assert (first.decision, first.throttle_ms, first.source) == ("throttle", 7_000, "local")
    assert row["limited_by"]["quota"] == "throttle_factor"
    assert (row["order"], row["at_ms"]) == (None, NODE_MS)
    assert with_id["order"] is not None, "the store looked for a kept answer"
    assert [each["verdicts"][0]["refreshed_ids"] for each in ids] == [digests(1, 2)]


async def test_factor_between_scales_the_limit_of_the_row(shared: str) -> None:
    async with node_at(shared) as logged_node:
        logged_node.factor.factor = 0.5
        ask = Ask({"produce_bytes": 10}, None, "alice", detail=True)
        decisions, rows = await logged_node.ask(*[ask] * 20)
        size = len(logged_node.stream.batches[-1])
    for decision, row in zip(decisions, rows, strict=True):
        check(ask, decision, row)
    assert {row["verdicts"][0]["limit"] for row in rows} == {25.0}
    assert size < 20 * 200, "its quota is in the batch once"


async def test_row_by_policy_of_a_full_store_has_the_word_of_the_policy(shared: str) -> None:
    """Existing buckets go on; a quota without a bucket decides by its policy."""
    rate = replace(QUOTAS["request_rate"][USER], on_store_failure="throttle")
    closed = {**QUOTAS, "request_rate": {USER: rate}}
    for quotas, decision in ((QUOTAS, "admit"), (closed, "throttle")):
        async with node_at(shared, quotas=quotas) as logged_node:
            ask = replace(ALL, producer_ids=None)
            await logged_node.ask(replace(ask, usage={"mutations": 1, "connections": 1}))
            await logged_node.raw.config_set("maxmemory", 1)
            try:
                await logged_node.store_passes(CHECK_FULL_EVERY_MS)
                (found,), (row,) = await logged_node.ask(replace(ask, usage={"requests": 1, "mutations": 1}))
            finally:
                await logged_node.raw.config_set("maxmemory", 0)
                await logged_node.store_passes(CHECK_FULL_EVERY_MS)
        check(replace(ask, usage={"requests": 1, "mutations": 1}), found, row)
        assert (row["decision"], row["source"], row["failure"]) == (decision, "fallback", "store_full")
        assert of_verdicts(row, "reason")[0] == "store_full"
        assert row["verdicts"][0]["observed"] is None


async def test_row_without_a_store_says_why(shared: str) -> None:
    with stores.server("valkey") as server:
        async with node_at(server.url, budget_s=0.05) as logged_node:
            server.kill()
            await logged_node.ask(ALL)  # which notices
            (found,), (row,) = await logged_node.ask(replace(ALL, usage={"requests": 1}))
    check(replace(ALL, usage={"requests": 1}), found, row)
    assert (row["source"], row["order"], row["at_ms"]) == ("fallback", None, NODE_MS)
    assert row["failure"]
    assert of_verdicts(row, "observed") == [None, None]


async def test_asks_that_are_decided_as_one_have_a_row_each_and_each_bucket_once(shared: str) -> None:
    """The descriptors of Envoy: a bucket of two asks is in the row of the ask with the larger usage."""
    async with node_at(shared) as logged_node:
        asks = [
            Ask({"connections": 1, "mutations": 1}, None, "alice", None, "10.0.0.7", deny=True),
            Ask({"connections": 2}, None, None, None, "10.0.0.7", deny=True),
            Ask({"request_time_ms": 5}, None, "alice", deny=True),
        ]
        for _ in range(4):
            before = len(await logged_node.rows())
            atomic = await logged_node.node.decide_atomically(asks)
            rows = (await logged_node.rows())[before:]
            assert len(rows) == 3
            assert [row["usage"] for row in rows] == [list(ask.usage.items()) for ask in asks]
            whose = [of_verdicts(row, "bucket") for row in rows]
            assert whose == [["user=alice"], ["ip=10.0.0.7"], []]
            for row, part in zip(rows, atomic.parts, strict=True):
                assert part.decision is not None
                own = of_verdicts(row, "bucket")
                assert verdicts_in(row) == [
                    each for each in shown(part.decision.quotas) if each["bucket"] in own
                ]
            assert len({row["order"] for row in rows[:2]}) == 1
        assert atomic.decision.decision == "throttle"
        assert [(row["mode"], row["decision"]) for row in rows] == [
            ("peek", "admit"),  # it would pass, but was refused with the other one
            ("admit", "throttle"),
            ("peek", "admit"),
        ]


async def test_lease_settlement_and_lapse_are_rows(shared: str) -> None:
    async with node_at(shared, "denied") as logged_node:
        usage = {"mutations": 8, "connections": 8}
        wish = Ask(usage, None, "alice", None, "10.0.0.7", deny=True, detail=True)
        leases = logged_node.node.leases

        async def take(lease_ms: int, *settlements: Settlement, **more: Any) -> LeaseAnswer:
            return await leases.take(replace(wish, **more), lease_ms, settlements, ANYONE)

        first = await take(10_000)
        assert first.granted == {"mutations": 2, "connections": 3}
        name = leases.named(first.name or "", None)
        await take(10_000, Settlement(name, {"mutations": 1}), usage={"mutations": 0})
        over = await take(10_000, Settlement(name, {"mutations": 1}), usage={"mutations": 0})
        assert over.settled == [False]
        second = await take(50)
        assert second.granted
        await logged_node.store_passes(50)
        third = await take(10_000, usage={"mutations": 30})
        refused = await take(10_000, usage={"mutations": 1})
        rows = await logged_node.rows()
    kinds = ["lease", "settlement", "settlement", "lease", "lapse", "lease", "lease"]
    assert [row["kind"] for row in rows] == kinds
    granted, settled, late, taken, lapse, finding, denied = rows
    for row, answer in ((granted, first), (taken, second), (finding, third), (denied, refused)):
        assert verdicts_in(row) == shown(answer.decision.quotas)
        decision = answer.decision
        assert (row["decision"], row["throttle_ms"]) == (decision.decision, decision.throttle_ms)
    assert granted["usage"] == [("mutations", 2.0), ("connections", 3.0)]
    assert of_verdicts(granted, "usage") == [2.0, 3.0]
    assert (granted["charged"], denied["charged"]) == (True, False)
    assert json.loads(granted["change"]["after"]) == {"lease_ms": 10_000}
    assert settled["change"]["what"] == granted["change"]["what"] != taken["change"]["what"]
    assert (settled["decision"], of_verdicts(settled, "usage")) == ("admit", [1.0, 0.0])
    assert late["decision"] == "reject"
    assert (lapse["change"]["what"], json.loads(lapse["change"]["after"])) == (
        "user=alice",
        {"quota": "controller_mutation_rate", "units": second.granted["mutations"]},
    )
    assert lapse["order"] == finding["order"]


async def test_answer_by_known_ids_says_what_made_the_node_certain(shared: str) -> None:
    async with node_at(shared, remembers=True) as logged_node:
        ask = Ask({}, (1, 2), "alice")
        _, (asked_first,) = await logged_node.ask(ask)
        (decision,), (row,) = await logged_node.ask(ask)
        (_,), (others,) = await logged_node.ask(replace(ask, usage={"requests": 1}))
        _, (in_part,) = await logged_node.ask(replace(ask, producer_ids=(1, 3)))
        resets = (await logged_node.node.local._mark()).resets  # type: ignore[misc]
    assert (decision.source, row["source"], row["order"], row["failure"]) == ("local", "local", None, None)
    assert row["ids"] == digests(1, 2)
    (verdict,) = row["verdicts"]
    assert (verdict["outcome"], verdict["observed"], verdict["usage"]) == ("admit", None, 2.0)
    assert (verdict["charged_ids"], verdict["refreshed_ids"]) == ([], [])
    opened_ms, layers = asked_first["at_ms"], IDS.layers
    assert verdict["known_until_ms"] == opened_ms + layers.interval_ms + (layers.ttl_ms - layers.interval_ms)
    assert opened_ms <= row["at_ms"] < verdict["known_until_ms"]
    assert verdict["known_resets"] == resets
    ids, rate = others["verdicts"]
    assert (ids["known_until_ms"], ids["observed"]) == (verdict["known_until_ms"], None)
    assert (rate["known_until_ms"], rate["outcome"], others["source"]) == (None, "admit", "store")
    assert rate["observed"] > 0
    assert others["order"] is not None
    assert in_part["ids"] == digests(1, 3)
    assert in_part["verdicts"][0]["charged_ids"] == digests(3), "the other one was left out of the call"
    assert in_part["verdicts"][0]["known_until_ms"] is None
    assert {asked_first["verdicts"][0][name] for name in ("known_until_ms", "known_resets")} == {None}


async def test_known_ids_pass_without_the_store_with_verdicts_by_policy() -> None:
    with stores.server("valkey") as server:
        async with node_at(server.url, remembers=True, budget_s=0.05) as logged_node:
            ask = Ask({"requests": 1}, (1, 2), "alice")
            await logged_node.ask(ask)
            server.kill()
            await logged_node.ask(replace(ask, producer_ids=(7,)))  # which notices
            (found,), (row,) = await logged_node.ask(ask)
    assert (found.source, row["source"], row["order"]) == ("fallback", "fallback", None)
    ids, rate = row["verdicts"]
    assert (ids["outcome"], ids["known_until_ms"] > row["at_ms"]) == ("admit", True)
    assert (rate["outcome"], rate["observed"], rate["known_until_ms"]) == ("admit", None, None)


async def test_renewal_says_what_made_the_node_certain(shared: str) -> None:
    """An id is used after its layer closed, and once more after another bucket was reset."""
    async with node_at(shared, remembers=True) as logged_node:
        ask = Ask({}, (1, 2), "alice")
        _, (first,) = await logged_node.ask(ask)
        await logged_node.store_passes(IDS.layers.interval_ms)
        await logged_node.ask(ask)
        await until(lambda: not logged_node.node.local.waits)
        rows = await logged_node.rows()
    (row,) = [each for each in rows if each["kind"] == "renewal"]
    (verdict,) = row["verdicts"]
    assert (row["ids"], verdict["refreshed_ids"], row["source"]) == (digests(1, 2), digests(1, 2), "store")
    assert verdict["known_until_ms"] == first["at_ms"] + IDS.layers.ttl_ms > row["at_ms"]
    assert verdict["known_resets"] == 0
    assert row["order"] > first["order"]
