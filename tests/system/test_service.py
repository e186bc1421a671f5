"""Promises of the running service: shared stores, floods, changes and ageing."""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from functools import partial
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, Final

import pytest
import redis

from app.domain.ladder import MatchingRules
from app.domain.quota import KEYS, LAYER_POLICIES, Layers
from tests import shifted_clock
from tests.drivers import Driver, HttpDriver, Json, OracleDriver
from tests.line import line
from tests.polls import follows_within_a_second, polls_until
from tests.report import say
from tests.service import Service, eventually, running

CALLERS: Final = 200
WINDOW_MS: Final = 3_600_000
CALLER_CLOCK: Final = {"QUOTAGATE_CLOCK": "caller", "QUOTAGATE_HASH_SECRET": (b"s" * 32).hex()}
CLOCKS: Final = {"clocks agree": 0, "clocks 60 s apart": 60}


@contextlib.contextmanager
def two_nodes(apart_s: int = 0) -> Iterator[tuple[Service, Service]]:
    """Two nodes with one store and one catalog; the second one's clock may be ahead."""
    with running() as one, tempfile.NamedTemporaryFile() as ahead:
        shifted_clock.set_ahead(Path(ahead.name), apart_s)
        with running(
            store_url=one.store_url,
            database_url=one.database_url,
            environment={shifted_clock.FILE: ahead.name},
            program="tests.shifted_clock",
        ) as other:
            yield one, other


async def storm(nodes: Sequence[Service], asks: Callable[[int], list[Json]]) -> list[Json]:
    """Decisions for 200 concurrent callers; each sends its asks one by one, to the nodes in turn."""

    async def caller(n: int) -> list[Json]:
        async with AsyncExitStack() as stack:
            lines = [await stack.enter_async_context(line(node.address)) for node in nodes]
            answers = [await lines[(n + turn) % len(lines)].ask(ask) for turn, ask in enumerate(asks(n))]
        assert {status for status, _ in answers} == {200}
        return [decision for _, decision in answers]

    return list(chain.from_iterable(await asyncio.gather(*map(caller, range(CALLERS)))))


def follows(node: Service, principal: str, quota: str, limit: float) -> None:
    """Wait until a node has the limit in force."""
    eventually(lambda: has_limit(node, principal, quota, limit))


def has_limit(node: Service, principal: str, quota: str, limit: float) -> bool:
    usage = KEYS[quota].usage
    ask = {"principal": principal, "mode": "peek", "detail": True}
    nothing: object = [] if usage == "producer_ids" else 0
    return [q["limit"] for q in node.ask(usage={usage: nothing}, **ask)["quotas"]] == [limit]


def observed(node: Service, principal: str, usage: str = "producer_ids") -> float:
    nothing: object = [] if usage == "producer_ids" else 0
    decision = node.ask(principal=principal, usage={usage: nothing}, mode="peek", detail=True)
    found: float = decision["quotas"][0]["observed"]
    return found


# Two nodes, 200 callers


@pytest.mark.parametrize("apart_s", CLOCKS.values(), ids=CLOCKS)
async def test_concurrent_callers_of_two_nodes_are_counted_exactly(apart_s):
    """Exactly L asks are admitted and exactly L ids charged, whatever the nodes' own clocks say."""
    burst, ids = 500, 300
    with two_nodes(apart_s) as nodes:
        bucket = {"limit": 0.001, "algorithm": "token_bucket", "burst": burst, "enforcement": "deny"}
        nodes[0].put("user=storm", controller_mutation_rate=bucket, producer_ids_rate=ids)
        for node in nodes:
            follows(node, "storm", "controller_mutation_rate", 0.001)
        ones = await storm(nodes, lambda _: [{"principal": "storm", "usage": {"mutations": 1}}] * 5)
        assert Counter(d["source"] for d in ones) == {"store": 5 * CALLERS}
        assert Counter(d["decision"] for d in ones) == {"admit": burst, "throttle": 5 * CALLERS - burst}
        assert max(d["throttle_ms"] for d in ones) <= 1_000_000

        # up to five callers ask for each id, and there are twice as many ids as the limit
        def overlapping(n: int) -> list[Json]:
            return [{"principal": "storm", "usage": {"producer_ids": [3 * n + i]}} for i in range(15)]

        some = await storm(nodes, overlapping)
        assert {d["source"] for d in some} <= {"store", "local"}  # a node knows the ids that it admitted
        assert [observed(node, "storm") for node in nodes] == [ids, ids]
        again = nodes[1].batch(list(chain.from_iterable(overlapping(n) for n in range(0, CALLERS, 5))))
        seen = sum(d["decision"] == "admit" for d in again)
        assert ids <= seen <= ids + 2  # one in 10,000 unseen ids is taken as seen
        for node, ahead_s in zip(nodes, (0, apart_s), strict=True):
            assert ahead_s * 1_000 in node.clock_ahead_ms()
    say(f"{burst} of {5 * CALLERS} admitted, {ids} ids charged, clocks {apart_s} s apart")


# Floods and long lives


@pytest.mark.timeout(900)
@pytest.mark.parametrize("flood", [100_000, pytest.param(1_000_000, marks=pytest.mark.prove)])
def test_flood_of_ids_changes_nothing(flood: int):
    """At most the limit is charged, at most 152 unseen ids pass besides, and the state does not grow."""
    limit, at_once = 1_000, 1_000
    with running() as node, redis.Redis.from_url(node.store_url) as store:
        node.put("user=flood", producer_ids_rate=limit)
        admitted, sizes = 0, []
        for first in range(0, flood, at_once):
            asks = [
                {"principal": "flood", "usage": {"producer_ids": [n]}} for n in range(first, first + at_once)
            ]
            decisions = node.batch(asks)
            assert {d["source"] for d in decisions} == {"store"}
            admitted += sum(d["decision"] == "admit" for d in decisions)
            if first % (flood // 10) == 0:
                (key,) = store.scan_iter("*producer_ids_rate*")
                sizes.append(store.memory_usage(key))
        charged = observed(node, "flood")
    say(f"{charged} charged, {admitted - limit} beyond, {sizes[0]}-{max(sizes)} B")
    assert charged <= limit
    assert admitted <= limit + 152
    assert max(sizes) <= 2 * sizes[0] <= 2 * 104 * limit


def test_changed_limit_forgets_no_id():
    """1,000 ids are seen, and not charged again, after the limit is raised tenfold and cut to a tenth."""
    ids = list(range(1_000))
    with two_nodes() as nodes:
        nodes[0].put("user=long", producer_ids_rate=1_000)
        follows(nodes[1], "long", "producer_ids_rate", 1_000)
        for turn, part in enumerate(sliced(ids, 100)):
            assert nodes[turn % 2].ask(principal="long", usage={"producer_ids": part})["charged"]
        charged = observed(nodes[0], "long")
        assert len(ids) - 3 <= charged <= len(ids)  # unseen ids taken as seen are free: one in 10,000
        for turn, limit in enumerate((10_000, 100, 1_000)):
            nodes[turn % 2].put("user=long", producer_ids_rate=limit)
            follows(nodes[(turn + 1) % 2], "long", "producer_ids_rate", limit)
            for other, part in enumerate(sliced(ids, 50)):
                decision = nodes[other % 2].ask(principal="long", usage={"producer_ids": part})
                assert decision["decision"] == "admit"
            assert [observed(node, "long") for node in nodes] == [charged, charged]


@pytest.mark.timeout(600)
def test_long_lived_ids_beyond_the_limit_are_never_charged_twice():
    """10,000 ids, 100 of them new per window, each used once a window: all are seen and charged once."""
    limit, windows = 100, 100
    with running(environment=CALLER_CLOCK) as node:
        node.put("user=old", producer_ids_rate=limit)
        charged = 0
        for turn in range(windows + 1):
            now = turn * WINDOW_MS
            known = [ask_ids(now, part) for part in sliced(list(range(turn * limit)), 200)]
            new = [ask_ids(now, range(turn * limit, (turn + 1) * limit))] if turn < windows else []
            for some in sliced([*known, *new], 50):
                decisions = node.batch(some)
                assert {(d["decision"], d["source"]) for d in decisions} == {("admit", "store")}
            now_charged = decisions[-1]["quotas"][0]["observed"]
            # unseen ids taken as seen are free: one in 10,000
            assert len(new) * limit - 3 <= now_charged <= len(new) * limit
            charged += now_charged
    say(f"{limit * windows} ids in use under a limit of {limit}: {charged} charges")
    assert limit * windows - 10 <= charged <= limit * windows


def ask_ids(now: int, ids: Sequence[int], principal: str = "old") -> Json:
    return {"at_ms": now, "principal": principal, "usage": {"producer_ids": list(ids)}, "detail": True}


def sliced(items: Sequence[Any], size: int) -> list[Any]:
    return [items[at : at + size] for at in range(0, len(items), size)]


# Never more than the limit in any window


@pytest.fixture(scope="module")
def timed() -> Iterator[Service]:
    """A node under the caller's clock."""
    with running(environment=CALLER_CLOCK) as node:
        yield node


@pytest.fixture(params=["oracle", "http"])
def driver(request) -> Driver:
    if request.param == "oracle":
        return OracleDriver(MatchingRules())
    return HttpDriver(request.getfixturevalue("timed"))


@pytest.mark.parametrize("layers", LAYER_POLICIES)
def test_no_span_of_one_window_holds_more_charges_than_the_limit(layers, driver, request):
    """Bursts at the edges of layers and windows, and at random, under each layer policy."""
    limit, chance, user = 20, random.Random(layers), request.node.name
    policy = Layers.named(layers, WINDOW_MS)
    driver.put(f"user={user}", {"producer_ids_rate": {"limit": limit, "layers": layers}})
    edges = [0, 1, policy.interval_ms, policy.ttl_ms, WINDOW_MS]
    steps = [e + d for e in edges for d in (-1, 0, 1) if e + d >= 0] + [0] * 30 + [WINDOW_MS // 40] * 20
    times = list(accumulate(chance.choice(steps) for _ in range(2_000)))
    asks = [
        {**ask_ids(now, range(5 * n, 5 * n + chance.randint(1, 5)), user), "detail": False}
        for n, now in enumerate(times)
    ]
    decisions = driver.asks(asks)
    charges = [
        ask["at_ms"]
        for ask, decision in zip(asks, decisions, strict=True)
        if decision["charged"]
        for _ in ask["usage"]["producer_ids"]
    ]
    assert len(charges) > 10 * limit
    assert most_in_a_span(charges, WINDOW_MS) == limit
    assert {d["decision"] for d in decisions} == {"admit", "throttle"}


@pytest.mark.parametrize("layers", LAYER_POLICIES)
def test_window_slides_instead_of_starting_on_a_grid(layers, driver, request):
    """One id at 0 s and 99 at 899 s: after 3,600 s only the first has expired, so one new id is admitted."""
    user = request.node.name
    driver.put(f"user={user}", {"producer_ids_rate": {"limit": 100, "layers": layers}})
    arrivals = [(0, 1), (899_000, 99), (3_600_000, 100), (4_498_999, 1), (4_499_000, 99)]
    first, admitted = 0, []
    for now, many in arrivals:
        asks = [ask_ids(now, [n], user) for n in range(first, first + many)]
        admitted.append(sum(d["decision"] == "admit" for d in driver.asks(asks)))
        first += many
    assert admitted == [1, 99, 1, 0, 99]


def most_in_a_span(times: Sequence[int], span_ms: int) -> int:
    """The most events in any span, whose last event is less than `span_ms` after the first."""
    most = oldest = 0
    for newest, now in enumerate(times):
        while now - times[oldest] >= span_ms:
            oldest += 1
        most = max(most, newest - oldest + 1)
    return most


# Ageing


def test_each_key_in_the_store_expires():
    """After a mixed load each key has a TTL, at most the TTL of its kind: idle principals leave nothing."""
    chance = random.Random(5)
    samples, sample_ms, window_ms, burst, rate = 3, 500, 2_000, 50, 10
    sampled = {"limit": 20, "samples": samples, "sample_ms": sample_ms}
    ids = {"limit": 500, "window_ms": window_ms}
    tokens = {"limit": rate, "burst": burst, "enforcement": "deny"}
    with running() as node, redis.Redis.from_url(node.store_url) as store:
        by_user = ["request_rate", "request_percentage", "producer_byte_rate", "consumer_byte_rate"]
        node.put(
            "user=*",
            producer_ids_rate=ids,
            controller_mutation_rate=tokens,
            **dict.fromkeys(by_user, sampled),
        )
        node.put("ip=*", connection_creation_rate=sampled, request_rate=sampled)
        for type_ in ("broker", "listener"):
            node.put(f"{type_}=*", max_connection_creation_rate=sampled)
        kept = 0
        for _ in range(10):
            asks = [mixed(chance) for _ in range(500)]
            node.batch(asks)
            kept += sum("id" in ask for ask in asks)
        sampled_ms = (samples + 1) * sample_ms  # the newest sample takes events for its own length
        lives = {
            "producer_ids_rate": Layers.named("layered", window_ms).ttl_ms,
            "controller_mutation_rate": burst / rate * 1000,
        }
        found: Counter[str] = Counter()
        of_no_bucket = (b"qg1:order", b"qg1:log", b"qg1:birth", b"qg1:overview")
        for key in store.scan_iter(count=1_000):
            if key.startswith(of_no_bucket):
                assert 0 < store.pttl(key) <= 400 * 86_400_000, key
                continue
            name = key.decode().split("}:")[1].split(":")[0]
            found[name] += 1
            most = 60_000 + (0 if name == "ask" else lives.get(name, sampled_ms))
            assert 0 < store.pttl(key) <= most, key
    assert set(found) == {*KEYS, "ask"}
    say(f"{found.total()} keys, {kept} asks with an id, every key with a TTL that is not too long")


def mixed(chance: random.Random) -> Json:
    """Any ask except in mode record, whose debt would make a token bucket last longer."""
    usage: Json = {KEYS[key].usage: chance.randint(0, 5) for key in chance.sample(list(KEYS), 2)}
    mode = chance.choice(["admit", "admit", "admit", "peek", "refund"])
    if "producer_ids" in usage:
        usage["producer_ids"] = [chance.randint(0, 10**6) for _ in range(3)]
        mode = "admit"
    ask = {
        "usage": usage,
        "mode": mode,
        "principal": f"user {chance.randint(0, 99)}",
        "client_id": chance.choice(["a", "b", None]),
        "ip": f"10.0.0.{chance.randint(0, 99)}",
        "broker": str(chance.randint(0, 3)),
        "listener": chance.choice(["L", "M"]),
    }
    return {**ask, "id": f"{chance.randint(0, 10**9)}"} if chance.random() < 0.1 else ask


# Changes and refusals


def test_change_is_in_force_at_once_and_on_the_other_node_within_a_second():
    """The node that takes a change decides by it before it answers, and the other one within a second."""
    polls = []
    with two_nodes() as nodes:
        for turn in range(10):
            here, there = nodes[turn % 2], nodes[(turn + 1) % 2]
            limit = 10 + turn
            here.put("user=moved", request_rate=limit)
            decision = here.ask(principal="moved", usage={"requests": 0}, mode="peek", detail=True)
            assert [quota["limit"] for quota in decision["quotas"]] == [limit]
            polls.append(polls_until(partial(has_limit, there, "moved", "request_rate", limit)))
    follows_within_a_second("the other node follows", polls)


def test_batch_with_one_invalid_ask_in_a_thousand_charges_nothing():
    """The whole batch is refused, with the place of the error, before anything is written."""
    with running() as node, redis.Redis.from_url(node.store_url) as store:
        node.put("user=*", request_rate=10**6, producer_ids_rate=10**5)
        asks: list[Json] = [
            {"principal": "b", "usage": {"requests": 1, "producer_ids": [n]}} for n in range(1_000)
        ]
        asks[777]["usage"]["requests"] = True
        answer = node.http.post("/v1/decisions:batch", json={"asks": asks})
        assert answer.status_code == 422
        assert [error["field"] for error in answer.json()["errors"]] == ["/asks/777/usage/requests"]
        assert list(store.scan_iter("qg1:{*")) == []
        assert observed(node, "b") == observed(node, "b", "requests") == 0


def test_remaining_producer_ids_are_below_0_when_throttled():
    def remaining() -> dict[str, float]:
        lines = node.http.get("/metrics").text.splitlines()
        found = (
            line.rpartition(" ") for line in lines if line.startswith("quotagate_producer_ids_remaining")
        )
        return {name.partition("entity=")[2].strip('"}'): float(value) for name, _, value in found}

    def ids(*asked: int, **more: Any) -> str:
        decision = node.ask(principal="alice", usage={"producer_ids": asked}, detail=True, **more)
        return str(decision["decision"])

    with running() as node:
        node.put("user=alice", producer_ids_rate=5)
        node.put("user=shadowed", producer_ids_rate={"limit": 1, "shadow": True})
        assert remaining() == {}
        assert (ids(1, 2), remaining()) == ("admit", {"user=alice": 3})
        assert (ids(2, 3), remaining()) == ("admit", {"user=alice": 2})
        assert (ids(3, 4, 5, 6, 7), remaining()) == ("throttle", {"user=alice": -2}), "of 4 new ids 2 fit"
        assert (ids(1), remaining()) == ("admit", {"user=alice": 2}), "nothing was charged"
        assert (ids(4, 5, 6, mode="peek"), remaining()) == ("throttle", {"user=alice": 2})
        assert (ids(4, 5), remaining()) == ("admit", {"user=alice": 0})
        assert (ids(6), remaining()) == ("throttle", {"user=alice": -1})
        assert (ids(*range(10, 20)), remaining()) == ("reject", {"user=alice": -10})
        twice_and_none = (*range(10, 20), 10, -1)
        assert (ids(*twice_and_none), remaining()) == ("reject", {"user=alice": -10})
        refused = [node.ask(principal="alice", usage={"producer_ids": [6]})["source"] for _ in range(2)]
        assert (refused, remaining()) == (["store"] * 2, {"user=alice": -1}), "a refusal is not cached"
        node.ask(principal="shadowed", usage={"producer_ids": [1, 2, 3]})
        assert remaining()["user=shadowed"] == -2, "a shadow quota charges what it would refuse"
