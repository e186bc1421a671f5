"""A store that fails in every possible way, under fifty callers: their answers, and the cost."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from statistics import quantiles
from typing import Any, Final

import pytest
import redis

from app.admission.gathering.circuit import PAUSES_S
from app.admission.gathering.gatherer import QUEUE_S
from app.run.embedded import PERSISTENCE
from tests import stores
from tests.line import Json, line
from tests.relay import Relay, relaying
from tests.report import say
from tests.service import Service, eventually, running
from tests.stores import Server

CALLERS: Final = 50
BURST: Final = 1_000_000
"""No bucket runs out, and none refills by a whole token in a day: missing tokens were charged."""
FEW: Final = 60
"""A limit that is reached before the outage ends."""
ANSWERS: Final = 200
"""How many answers of a kind a phase waits for, over all callers."""
BETWEEN_S: Final = 0.005
"""The pause between two asks of a caller."""
BACK_WITHIN_S: Final = 1.0
WAYS_TO_BE_HELD_UP: Final = 4
"""A probe of the store and an ask, there and back: each way may be as late as a route without a store."""
LOADED: Final = 3_000
"""How many keys the store that loads slowly has."""

POLICIES: Final[dict[str, Json]] = {
    "open": {"limit": 1e-9, "algorithm": "token_bucket", "burst": BURST, "enforcement": "deny"},
    "shut": {"limit": 1e-9, "algorithm": "token_bucket", "burst": BURST, "on_store_failure": "throttle"},
    "few": {"limit": 1e-9, "algorithm": "token_bucket", "burst": FEW, "enforcement": "deny"},
    "none": {"limit": 0},
}
"""Quotas by client-id; a caller without a client-id has no quota."""

DURABLE: Final = tuple(word for name, value in PERSISTENCE.items() for word in (f"--{name}", value))
"""The persistence settings of the embedded store."""


@dataclass
class Answer:
    """An answer to a caller."""

    client: str
    body: Json
    waited_s: float
    at: float


@dataclass
class Callers:
    """Fifty callers of five kinds, and four more that only ask for /health/live, until stopped."""

    node: Service
    answers: list[Answer] = field(default_factory=list)
    health_s: list[float] = field(default_factory=list)
    without_store: int = 0
    shed: int = 0
    stopping: bool = False

    @contextlib.asynccontextmanager
    async def calling(self) -> AsyncIterator[Callers]:
        async with asyncio.TaskGroup() as group:
            for n in range(CALLERS):
                group.create_task(self._call([*POLICIES, "free"][n % 5]))
            for _ in range(4):
                group.create_task(self._look())
            try:
                yield self
            finally:
                self.stopping = True

    async def more(self, source: str, *, answers: int = ANSWERS, within_s: float = 60) -> None:
        """Wait until so many more answers came from a source."""
        start, found = len(self.answers), 0
        async with asyncio.timeout(within_s):
            while found < answers:
                await asyncio.sleep(BETWEEN_S)
                found = sum(answer.body["source"] == source for answer in self.answers[start:])

    async def _call(self, client: str) -> None:
        ask = {"principal": "p", "usage": {"requests": 1}}
        if client != "free":
            ask["client_id"] = client
        async with line(self.node.address) as own:
            while not self.stopping:
                began = time.perf_counter()
                status, body = await own.ask(ask)
                now = time.perf_counter()
                if body.get("type") == "urn:quotagate:overloaded":
                    self.shed += 1
                    await asyncio.sleep(1)  # as the answer asks for
                    continue
                assert status == 200, body
                self.answers.append(Answer(client, body, now - began, now))
                self.without_store += body["source"] == "fallback"
                await asyncio.sleep(BETWEEN_S)

    async def _look(self) -> None:
        async with line(self.node.address) as own:
            while not self.stopping:
                began = time.perf_counter()
                status, _ = await own.send("GET", "/health/live")
                assert status == 200
                self.health_s.append(time.perf_counter() - began)
                await asyncio.sleep(BETWEEN_S)


@dataclass
class Store:
    """A real store, and the relay between it and the node."""

    server: Server
    relay: Relay

    def command(self, *words: str, password: str | None = None) -> Any:
        with redis.Redis.from_url(self.server.url, password=password, socket_timeout=60) as client:
            return client.execute_command(*words)


# The ways to fail: each makes the store fail, and returns a function that ends the failure.


async def stopped(store: Store) -> Callable[[], Awaitable[None]]:
    store.server.hold()

    async def end() -> None:
        store.server.go_on()

    return end


async def killed(store: Store) -> Callable[[], Awaitable[None]]:
    store.server.kill()

    async def end() -> None:
        store.server.start()
        await asyncio.to_thread(store.server.until_it_answers)

    return end


async def paused(store: Store) -> Callable[[], Awaitable[None]]:
    store.command("CLIENT", "PAUSE", "8000", "ALL")

    async def end() -> None:
        await asyncio.to_thread(store.command, "PING")  # answered after the pause

    return end


async def read_only(store: Store) -> Callable[[], Awaitable[None]]:
    store.command("REPLICAOF", "127.0.0.1", "1")  # an address without a server, so that it keeps its data

    async def end() -> None:
        store.command("REPLICAOF", "NO", "ONE")

    return end


async def loading(store: Store) -> Callable[[], Awaitable[None]]:
    ballast = {
        f"ballast:{n}": secrets.token_hex(1_000) for n in range(LOADED)
    }  # random, so compression does not help
    store.command("MSET", *itertools.chain.from_iterable(ballast.items()))
    store.command("BGREWRITEAOF")
    while store.command("INFO", "persistence")["aof_rewrite_in_progress"]:  # noqa: ASYNC110  there is no event for it
        await asyncio.sleep(0.01)
    store.server.kill()
    # 20 ms per key, serving clients after each: a minute, unless it is cut short.
    store.server.start("--key-load-delay", "20000", "--loading-process-events-interval-bytes", "1024")

    async def end() -> None:
        store.command("CONFIG", "SET", "key-load-delay", "0")
        await asyncio.to_thread(store.server.until_it_answers)

    return end


async def busy(store: Store) -> Callable[[], Awaitable[None]]:
    store.command("CONFIG", "SET", "busy-reply-threshold", "20")

    def endless() -> None:
        with contextlib.suppress(redis.RedisError):  # it is killed
            store.command("EVAL", "while true do end", "0")

    running = asyncio.create_task(asyncio.to_thread(endless))

    async def end() -> None:
        store.command("SCRIPT", "KILL")
        await running

    return end


async def no_password(store: Store) -> Callable[[], Awaitable[None]]:
    store.command("CONFIG", "SET", "requirepass", "secret")
    store.command("CLIENT", "KILL", "TYPE", "normal", password="secret")

    async def end() -> None:
        store.command("CONFIG", "SET", "requirepass", "", password="secret")

    return end


async def cut_in_mid_reply(store: Store) -> Callable[[], Awaitable[None]]:
    store.relay.way = "cut"
    return _passing(store)


async def late(store: Store) -> Callable[[], Awaitable[None]]:
    store.relay.way = "late"
    return _passing(store)


async def swallowed(store: Store) -> Callable[[], Awaitable[None]]:
    store.relay.way = "swallow"
    return _passing(store)


def _passing(store: Store) -> Callable[[], Awaitable[None]]:
    async def end() -> None:
        store.relay.way = "pass"

    return end


WAYS: Final = {
    stopped: "timeout",
    killed: "connection",
    paused: "timeout",
    read_only: "read_only",
    loading: "loading",
    busy: "busy",
    no_password: "authentication",
    cut_in_mid_reply: "connection",
    late: "budget",
    swallowed: "timeout",
}
"""The ways to fail, and the reasons in readiness and in the metric."""

ON_THE_WAY: Final = {"budget", "timeout", "connection"}
"""Reasons that may occur besides: waiting for a reply, or for a connection."""

BOTH: Final = (killed, read_only, loading, busy, no_password)
"""The failures that depend on the server's replies; they are tried with both servers."""


@pytest.mark.parametrize(
    ("kind", "way"),
    [("valkey", way) for way in WAYS] + [("redis", way) for way in BOTH],
    ids=lambda value: getattr(value, "__name__", value),
)
async def test_answers_follow_policy_during_an_outage(kind, way, tmp_path):
    with (
        stores.server(kind, *DURABLE) as server,
        relaying(tmp_path / "relay", server.socket) as relay,
        running(store_url=relay.url) as node,
    ):
        for client, quota in POLICIES.items():
            node.put(f"client-id={client}", request_rate=quota)
        opens = way is not late  # late replies are replies: each ask waits for its budget
        async with Callers(node).calling() as callers:
            await callers.more("store")
            relay.without_store = lambda: callers.without_store
            end = await way(Store(server, relay))
            gone = time.perf_counter()
            await callers.more("fallback")
            await until(lambda: store_of(node) == (WAYS[way] if opens else "ok"))
            now = metrics(node)
            # A crowded machine may hold a late reply up until the call has failed, and then it opens, too.
            assert now[OPEN] == opens or "timeout" in reasons(now)
            connections, began = relay.connections, time.perf_counter()
            await callers.more("fallback", answers=20 * ANSWERS if opens else ANSWERS)
            connections, lasted_s = relay.connections - connections, time.perf_counter() - began
            await end()
            back = time.perf_counter()
            await callers.more("store", answers=1)
            back_s = time.perf_counter() - back
            await until(lambda: store_of(node) == "ok")
            assert metrics(node)[OPEN] == 0
            before = reasons(metrics(node))
            await callers.more("store")

        fallbacks = check(callers.answers)
        met = reasons(metrics(node))
        waits = [answer.waited_s for answer in callers.answers if gone <= answer.at < back]
        say(
            f"{fallbacks.total()} answers without the store, {dict(met)}; back after {back_s:.2f} s;"
            f" waited {spread(waits)} ms, on a route without a store {spread(callers.health_s)} ms;"
            f" {connections} connections in {lasted_s:.1f} s",
        )
        # Only a node that gets no processor sheds; it is as late on a route without a store.
        assert not callers.shed or max(callers.health_s) > QUEUE_S / 2
        assert WAYS[way] in met
        assert met.keys() <= {WAYS[way]} | ON_THE_WAY
        assert met.total() == fallbacks.total()
        assert back_s < BACK_WITHIN_S + WAYS_TO_BE_HELD_UP * max(callers.health_s)
        # No storm: the circuit connects; the factor, the log and its status connect at most once more each.
        assert connections <= lasted_s / PAUSES_S[-1] + 6
        assert (met - before).keys() <= {"budget"}  # the machine stalled, not the store
        assert node.process.poll() is None
        assert "a request failed" not in node.logged()
        # No acknowledged charge is missing, and no more was charged than asked for.
        acknowledged = Counter(answer.client for answer in callers.answers if answer.body["charged"])
        for client in ("open", "shut"):
            spent = round(BURST - left(node, client))
            assert acknowledged[client] <= spent <= acknowledged[client] + fallbacks[client]
        # Only asks that were admitted without the store, and counted so, exceed the limit.
        admitted = [a.body for a in callers.answers if (a.client, a.body["decision"]) == ("few", "admit")]
        assert sum(body["source"] == "store" for body in admitted) <= FEW
        assert FEW < len(admitted) <= FEW + fallbacks["few"]


def check(answers: list[Answer]) -> Counter[str]:
    """Check each answer against its quota or its policy; return how many were by policy, per client-id."""
    fallbacks: Counter[str] = Counter()
    for answer in answers:
        client, body = answer.client, answer.body
        if client == "free":
            assert (body["source"], body["decision"]) == ("local", "admit")
        elif body["source"] == "store":
            outcomes = {"none": {"reject"}, "few": {"admit", "throttle"}}.get(client, {"admit"})
            assert body["decision"] in outcomes
        else:
            fallbacks[client] += 1
            assert body["source"] == "fallback"
            assert body["charged"] is False
            by = body["limited_by"] or {}
            expected = {
                "open": ("admit", 0, None),
                "shut": ("throttle", 1000, "store_failure"),
                "few": ("admit", 0, None),
                "none": ("reject", 0, "too_large"),
            }
            assert (body["decision"], body["throttle_ms"], by.get("reason")) == expected[client]
    return fallbacks


OPEN: Final = "quotagate_store_circuit_open"
FALLBACK: Final = 'quotagate_fallback_total{reason="'


def metrics(node: Service) -> dict[str, float]:
    """Return the samples of the node's metrics by name and labels."""
    lines = [text for text in node.http.get("/metrics").text.splitlines() if not text.startswith("#")]
    return {name: float(value) for name, value in (text.rsplit(" ", 1) for text in lines)}


def store_of(node: Service) -> str:
    """Return the state of the store from readiness; the node must be ready."""
    answer = node.http.get("/health/ready")
    assert answer.status_code == 200
    state: str = answer.json()["store"]
    return state


def reasons(counted: dict[str, float]) -> Counter[str]:
    """Return the reasons of answers without the store."""
    found = {name: int(count) for name, count in counted.items() if name.startswith(FALLBACK)}
    return Counter({name[len(FALLBACK) : -2]: count for name, count in found.items()})


async def until(look: Callable[[], object], *, within_s: float = 60) -> None:
    await asyncio.to_thread(eventually, look, within_s=within_s)


def left(node: Service, client: str, principal: str = "p") -> float:
    """Return the tokens left in a bucket."""
    ask = {
        "principal": principal,
        "client_id": client,
        "usage": {"requests": 0},
        "mode": "peek",
        "detail": True,
    }
    decision = eventually(lambda: (body := node.ask(**ask))["source"] == "store" and body)
    tokens: float = decision["quotas"][0]["remaining"]
    return tokens


def spread(seconds: list[float]) -> str:
    """Format median, 99th percentile and maximum in milliseconds."""
    cuts = quantiles(seconds, n=100)
    return f"{1000 * cuts[49]:.1f} / {1000 * cuts[98]:.1f} / {1000 * max(seconds):.1f}"


# Failures that cause no outage


async def test_lost_library_costs_no_answer_and_cut_connection_at_most_one_call():
    with stores.server("valkey") as server, running(store_url=server.url) as node:
        for client, quota in POLICIES.items():
            node.put(f"client-id={client}", request_rate=quota)
        store = redis.Redis.from_url(server.url)
        async with Callers(node).calling() as callers:
            await callers.more("store")
            for _ in range(5):
                store.function_flush()
                await callers.more("store", answers=CALLERS)
            flushed = reasons(metrics(node))
            store.client_kill_filter(_type="normal", skipme=True)
            await callers.more("store")
        store.close()
        counted = metrics(node)
        cut = reasons(counted) - flushed
        say(f"{len(callers.answers)} answers; flushed {dict(flushed)}, cut {dict(cut)}")
        check(callers.answers)
        assert flushed.keys() <= {"budget"}  # the machine stalled: the lost library itself costs no answer
        assert cut.keys() <= {"budget", "connection"}
        assert cut["connection"] <= 2 * CALLERS
        assert counted['quotagate_store_failures_total{reason="connection"}'] >= 1, "the connection was cut"


async def test_failover_behind_one_address_is_followed(tmp_path):
    """The old primary becomes a replica, and new connections lead to the new primary."""
    with (
        stores.server("valkey") as old,
        stores.server("valkey") as new,
        relaying(tmp_path / "relay", old.socket) as relay,
        running(store_url=relay.url) as node,
    ):
        node.put("client-id=open", request_rate=POLICIES["open"])
        assert node.ask(principal="p", client_id="open", usage={"requests": 1})["source"] == "store"
        await read_only(Store(old, relay))
        relay.store = new.socket
        await until(lambda: node.ask(principal="p", client_id="open", usage={"requests": 1})["charged"])
        assert store_of(node) == "ok"


def test_unreadable_bucket_affects_only_its_own_ask():
    with running() as node:
        node.put("user=*", request_rate=POLICIES["open"])
        for name in ("poor", "well"):
            assert node.ask(principal=name, usage={"requests": 1})["source"] == "store"
        with redis.Redis.from_url(node.store_url) as store:
            (key,) = store.keys("*user=poor*")
            store.delete(key)
            store.rpush(key, "a list, not a bucket")
        asks = [{"principal": name, "usage": {"requests": 1}} for name in ("well", "poor", "well")]
        decisions = node.batch(asks)
        assert [one["source"] for one in decisions] == ["store", "fallback", "store"]
        assert [one["charged"] for one in decisions] == [True, False, True]
        assert round(BURST - left(node, "", principal="well")) == 3
        assert metrics(node)[OPEN] == 0
        assert reasons(metrics(node)) == {"response": 1}
        assert "WRONGTYPE" in node.logged()


def test_node_can_be_stopped_while_it_waits_for_a_hung_store():
    with stores.server("valkey") as server, running(store_url=server.url) as node:
        node.put("user=*", request_rate=10)
        server.hold()
        try:
            assert node.ask(principal="p", usage={"requests": 1})["source"] == "fallback"
            assert node.stop() == 0
        finally:
            server.go_on()
