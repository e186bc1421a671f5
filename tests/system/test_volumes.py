"""Volumes on real nodes: the effect of the throttle factor, how nodes follow it, and its cost."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import count, islice
from typing import Any

import pytest
import redis

from tests import stores
from tests.pushing import FULL, MINUTE, WELL, drill, factor, push, pushed, volume, volumes_of
from tests.service import Service, eventually

EXCLUDED = ("topic-operator", "cruise control")
FACTOR = {"quota": "throttle_factor", "entity": None, "bucket": None}
"""The ``limited_by`` of asks that the throttle factor holds."""


@pytest.fixture(scope="module")
def node() -> Iterator[Service]:
    settings = {
        "QUOTAGATE_VOLUME_FALLBACK_FACTOR": "0.5",
        "QUOTAGATE_VOLUME_EXCLUDED_PRINCIPALS": ";".join(EXCLUDED),
    }
    with pushed(environment=settings) as node:
        yield node


@pytest.fixture
def now(node: Service) -> int:
    """A time at which no push and no drill of another test is in effect."""
    node.http.delete("/v1/volumes:drill")
    at_ms = int(volumes_of(node)["since_ms"]) + 1_000 * MINUTE
    push(node, WELL, at_ms=at_ms)
    return at_ms


def produced(
    node: Service, at_ms: int, size: float = 1, principal: str = "alice", **more: Any
) -> dict[str, Any]:
    usage = {"produce_bytes": size, **more.pop("usage", {})}
    return node.ask(principal=principal, usage=usage, at_ms=at_ms, **more)


def test_factor_0_throttles_producers_with_or_without_a_quota(node: Service, now: int):
    node.put("user=limited", producer_byte_rate=1_000_000, request_rate=1_000)
    push(node, FULL, at_ms=now)
    held = {
        "decision": "throttle",
        "throttle_ms": MINUTE,
        "charged": False,
        "applied": 0,
        "source": "local",
        "limited_by": FACTOR,
    }
    assert produced(node, now) == held
    assert node.ask(usage={"produce_bytes": 0.5}, at_ms=now) == held
    limited = produced(node, now, principal="limited", usage={"requests": 1}, detail=True)
    assert [verdict["quota"] for verdict in limited.pop("quotas")] == ["request_rate", "producer_byte_rate"]
    assert limited == {**held, "applied": 2}
    looked = node.ask(principal="limited", usage={"requests": 0}, mode="peek", detail=True, at_ms=now)
    assert looked["quotas"][0]["observed"] == 0, "nothing was charged"


def test_wait_lasts_until_the_next_check_or_at_least_a_second_or_an_interval_if_overdue(
    node: Service, now: int
):
    push(node, FULL, at_ms=now)
    waits = {0: MINUTE, 1: 59_999, 58_999: 1_001, 59_000: 1_000, 59_999: 1_000, 60_000: 1_000, 60_001: MINUTE}
    found = {after: produced(node, now + after)["throttle_ms"] for after in waits}
    assert found == waits


def test_factor_0_affects_only_asks_that_produce(node: Service, now: int):
    node.put("user=limited", producer_byte_rate=1_000_000)
    push(node, FULL, at_ms=now)
    for usage in (
        {"fetch_bytes": 5},
        {"requests": 1},
        {"produce_bytes": 0},
        {"mutations": 1, "connections": 1},
    ):
        assert node.ask(principal="limited", usage=usage, at_ms=now)["decision"] == "admit", usage
    for principal in EXCLUDED:
        assert produced(node, now, principal=principal)["decision"] == "admit"
    recorded = produced(node, now, principal="limited", mode="record")
    assert (recorded["decision"], recorded["charged"]) == ("admit", True)
    refunded = produced(node, now, principal="limited", mode="refund")
    assert (refunded["decision"], refunded["charged"]) == ("admit", True)
    peeked = produced(node, now, mode="peek")
    assert (peeked["decision"], peeked["limited_by"]) == ("throttle", FACTOR)
    assert produced(node, now, enforcement="deny")["limited_by"] == FACTOR
    assert produced(node, now, cluster_action=True)["limited_by"] == FACTOR


def test_limit_of_0_rejects_before_the_factor_applies(node: Service, now: int):
    node.put("user=none", producer_byte_rate=0)
    node.put("user=idle", request_rate=0)
    push(node, FULL, at_ms=now)
    for principal, quota in (("none", "producer_byte_rate"), ("idle", "request_rate")):
        refused = produced(node, now, principal=principal, usage={"requests": 1})
        assert refused["decision"] == "reject"
        assert refused["limited_by"]["quota"] == quota
        assert (refused["charged"], refused["source"], refused["applied"]) == (False, "local", 1)


def test_kept_answer_is_repeated_under_any_factor(node: Service, now: int):
    node.put("user=retrying", producer_byte_rate=1_000_000)
    before = produced(node, now, principal="retrying", id="attempt-1")
    assert (before["decision"], before["charged"]) == ("admit", True)
    push(node, FULL, at_ms=now)
    assert produced(node, now + 1, principal="retrying", id="attempt-1") == before
    assert produced(node, now + 1, principal="retrying", id="attempt-2")["limited_by"] == FACTOR
    push(node, WELL, at_ms=now + 2)
    assert produced(node, now + 2, principal="retrying", id="attempt-2")["decision"] == "admit"


def test_batch_is_throttled_only_in_asks_that_produce(node: Service, now: int):
    push(node, FULL, at_ms=now)
    asks = [
        {"principal": "alice", "usage": {kind: 1}, "at_ms": now} for kind in ("requests", "produce_bytes")
    ]
    assert [decision["decision"] for decision in node.batch(asks * 2)] == ["admit", "throttle"] * 2


@pytest.mark.parametrize(
    ("limit", "share", "scaled", "sizes"),
    [
        (1_000, 0.5, 500, (6_000, 1, 4_000, 77)),
        (10, 0.01, 1, (20, 5)),  # never below 1 byte per second
        (1_000_000, 0.123456, 123_456, (2_000_000, 3)),
    ],
)
def test_factor_between_0_and_1_multiplies_the_limit(
    node: Service, now: int, limit: int, share: float, scaled: int, sizes: tuple[int, ...]
):
    """An excluded principal whose own limit is the multiplied one always gets the same answers."""
    node.put("user=scaled", producer_byte_rate=limit)
    node.put("user=topic-operator", producer_byte_rate=scaled)
    drill(node, share, 100 * MINUTE)
    delays = []
    for place, size in enumerate(sizes):
        at_ms = now + 700 * place
        ours, control = (
            produced(node, at_ms, size, principal, detail=True) for principal in ("scaled", "topic-operator")
        )
        (verdict,), (wanted,) = ours.pop("quotas"), control.pop("quotas")
        assert verdict == {**wanted, "entity": "user=scaled", "bucket": "user=scaled"}
        assert verdict["limit"] == scaled
        assert (ours["decision"], ours["throttle_ms"]) == (control["decision"], control["throttle_ms"])
        delays.append(ours["throttle_ms"])
    assert delays[0] > 0
    recorded = produced(node, now + 5_000, 0, "scaled", mode="record", detail=True)
    assert recorded["quotas"][0]["limit"] == limit, "recorded usage is measured by the full limit"


def test_factor_slows_the_refill_of_a_token_bucket_but_not_its_burst(node: Service, now: int):
    quota = {"limit": 100, "algorithm": "token_bucket", "burst": 500, "enforcement": "deny"}
    node.put("user=bursting", producer_byte_rate=quota)
    drill(node, 0.1, 100 * MINUTE)
    assert produced(node, now, 500, "bursting")["decision"] == "admit"
    assert produced(node, now, 10, "bursting")["throttle_ms"] == 1_000, "10 bytes at 10 a second"
    assert produced(node, now, 501, "bursting")["decision"] == "reject"


def test_effective_limits_and_headers_show_the_factor(node: Service, now: int):
    node.put("user=shown", producer_byte_rate=1_000, consumer_byte_rate=1_000)

    def limits(principal: str) -> dict[str, float]:
        found = node.http.get("/v1/quotas:effective", params={"principal": principal, "at_ms": now}).json()
        return {one["quota"]: one["limit_now"] for one in found["quotas"]}

    def policy() -> tuple[int, str]:
        query = {"produce_bytes": 1, "at_ms": now}
        answer = node.http.get("/v1/check", params=query, headers={"X-Quotagate-Principal": "shown"})
        return answer.status_code, answer.headers.get("ratelimit-policy", "")

    assert limits("shown") == {"producer_byte_rate": 1_000, "consumer_byte_rate": 1_000}
    assert policy() == (200, '"producer_byte_rate";q=10000;w=10')
    drill(node, 0.25, MINUTE)
    node.put("user=topic-operator", producer_byte_rate=1_000)
    assert limits("shown") == {"producer_byte_rate": 250, "consumer_byte_rate": 1_000}
    assert limits("topic-operator") == {"producer_byte_rate": 1_000}
    assert policy() == (200, '"producer_byte_rate";q=2500;w=10')
    drill(node, 0, MINUTE)
    assert limits("shown") == {"producer_byte_rate": 0, "consumer_byte_rate": 1_000}
    status, _ = policy()
    assert status == 429


def test_drill_overrides_the_source_and_ends_by_itself(node: Service, now: int):
    push(node, FULL, at_ms=now)
    began = drill(node, 1, 5_000)["drill"]["since_ms"]
    assert began == now, "the newest time of any request"
    assert produced(node, now + 4_999)["decision"] == "admit", "a drill applies whatever the volumes are"
    assert produced(node, now + 5_000)["limited_by"] == FACTOR


def test_metrics_of_volumes_appear_and_disappear_with_them(node: Service, now: int):
    def metrics() -> dict[str, float]:
        lines = node.http.get("/metrics").text.splitlines()
        samples = (line.rpartition(" ") for line in lines if line.startswith("quotagate_"))
        return {name.removeprefix("quotagate_"): float(value) for name, _, value in samples}

    before = metrics()
    push(node, FULL, volume("2", 500), {**volume("2", None, "/other"), "total_bytes": None}, at_ms=now)
    found = metrics()
    assert found["throttle_factor"] == 0
    assert (found["active_brokers"], found["active_log_dirs"]) == (2, 3)
    assert found["volume_limit_violations_total"] == before["volume_limit_violations_total"] + 1
    sizes = {name: size for name, size in found.items() if name.startswith(("volume_avail", "volume_total"))}
    assert sizes == {
        'volume_available_bytes{broker="1",dir="/data"}': 5,
        'volume_total_bytes{broker="1",dir="/data"}': 1_000,
        'volume_available_bytes{broker="2",dir="/data"}': 500,
        'volume_total_bytes{broker="2",dir="/data"}': 1_000,
    }
    push(node, WELL, at_ms=now + 1)
    found = metrics()
    assert (found["throttle_factor"], found["active_brokers"], found["active_log_dirs"]) == (1, 1, 1)
    assert 'volume_total_bytes{broker="2",dir="/data"}' not in found
    node.ask(usage={"requests": 1}, at_ms=now + 5 * MINUTE + 2)
    found = metrics()
    assert found["throttle_factor"] == 0.5
    fallbacks = "throttle_factor_fallback_total"
    assert found[fallbacks] == before[fallbacks] + 1, "counted at the first ask after it"


@pytest.mark.parametrize(
    ("settings", "wait_ms"),
    [
        ({"QUOTAGATE_VOLUME_SOURCE": "static"}, MINUTE),
        ({"QUOTAGATE_VOLUME_CHECK_INTERVAL": "PT0S"}, 1_000),
        ({"QUOTAGATE_VOLUME_SOURCE": "", "QUOTAGATE_VOLUME_MIN_AVAILABLE_BYTES": ""}, MINUTE),
    ],
)
def test_only_a_drill_makes_a_factor_without_observations(settings: dict[str, str], wait_ms: int):
    fallback = {"QUOTAGATE_VOLUME_FALLBACK_FACTOR": "0"}
    with pushed(environment={**fallback, **settings}) as node:
        at_ms = 1_000_000
        assert produced(node, at_ms)["decision"] == "admit"
        shown = volumes_of(node, at_ms + 1_000 * MINUTE)
        assert (shown["factor"], shown["valid_until_ms"], shown["next_check_ms"]) == (1, None, None)
        began = drill(node, 0, 5_000)["drill"]
        held = [produced(node, at)["throttle_ms"] for at in (began["since_ms"], began["until_ms"] - 1)]
        assert held == [wait_ms, wait_ms]
        assert produced(node, began["until_ms"])["decision"] == "admit"


def test_throttled_ids_are_refreshed_but_not_by_a_peek(node: Service, now: int):
    """Ids are remembered 12 s without a refresh, and charges count for 9 s; the factor is 0 for a minute."""
    node.put("user=ids", producer_ids_rate={"limit": 3, "window_ms": 9_000})
    node.ask(principal="ids", usage={"producer_ids": [1, 2, 3]}, at_ms=now)
    push(node, FULL, at_ms=now)
    for after in range(0, 60_001, 2_000):
        held = produced(node, now + after, principal="ids", usage={"producer_ids": [1, 2]})
        assert held["limited_by"] == FACTOR
        looked = produced(node, now + after, principal="ids", usage={"producer_ids": [3]}, mode="peek")
        assert looked["limited_by"] == FACTOR
    lifted = now + 60_001
    push(node, WELL, at_ms=lifted)
    # Three new ids use up the quota. Then each further new id is too many, but remembered ids are free.
    assert (
        node.ask(principal="ids", usage={"producer_ids": [11, 12, 13]}, at_ms=lifted)["decision"] == "admit"
    )
    seen = {id_: node.ask(principal="ids", usage={"producer_ids": [id_]}, at_ms=lifted) for id_ in (1, 2, 3)}
    assert {id_: decision["decision"] for id_, decision in seen.items()} == {
        1: "admit",
        2: "admit",
        3: "throttle",
    }


def test_ask_at_factor_0_costs_no_call_and_a_scaled_one_costs_no_more(node: Service, now: int):
    node.put("user=counted", producer_byte_rate=1e12)

    times = count(now)  # a drill begins at the newest of these times

    def calls(**more: Any) -> int:
        before = _calls(node)
        for at_ms in islice(times, 100):
            produced(node, at_ms, principal="counted", **more)
        return _calls(node) - before

    examinations = range(50)  # of the store, every few seconds; each is a call, too
    assert calls() - 100 in examinations
    drill(node, 0.5, 100 * MINUTE)
    assert calls() - 100 in examinations
    drill(node, 0, 100 * MINUTE)
    assert calls() in examinations
    node.put("user=counted", producer_byte_rate=1e12, producer_ids_rate=1_000)
    assert calls(usage={"producer_ids": []}) in examinations, "no id, nothing to refresh"
    assert calls(usage={"producer_ids": [1]}) < 150, "one refresh each, after the answers"


def _calls(node: Service) -> int:
    with redis.Redis.from_url(node.store_url) as client:
        found: dict[str, Any] = client.info("commandstats")
    return int(found["cmdstat_fcall"]["calls"])


def test_two_nodes_follow_a_push_and_a_drill_and_fall_back_by_themselves():
    """Under the store's clock, with a validity that ends during the test."""
    short = {
        "QUOTAGATE_VOLUME_CHECK_INTERVAL": "PT4S",
        "QUOTAGATE_VOLUME_VALIDITY": "PT4S",
        "QUOTAGATE_VOLUME_FALLBACK_FACTOR": "0.75",
    }
    with (
        stores.running("valkey") as url,
        pushed(callers=False, environment=short, store_url=url) as one,
        pushed(callers=False, environment=short, store_url=url, database_url=one.database_url) as other,
    ):
        ask = {"principal": "alice", "usage": {"produce_bytes": 1}}
        assert push(one, FULL)["factor"] == 0.0
        held = eventually(lambda: _throttled(other.ask(**ask)))
        assert held["limited_by"] == FACTOR
        assert 1_000 <= held["throttle_ms"] <= 4_000
        push(other, WELL)
        assert other.ask(**ask)["decision"] == "admit", "the node that took the push decides by it at once"
        for node in (one, other):
            eventually(partial(_fell_back, node))
            metrics = node.http.get("/metrics").text
            assert "quotagate_throttle_factor 0.75" in metrics
        drill(one, 0, 600_000)
        eventually(lambda: _throttled(other.ask(**ask)))
        assert other.http.delete("/v1/volumes:drill").status_code == 204
        eventually(lambda: one.ask(**ask)["decision"] == "admit")
        who = one.http.get("/v1/quotas:history?entity=throttle_factor").json()["changes"]
        assert [bool(change["after"]) for change in who] == [False, True]


@contextmanager
def agent(node: Service, seen: dict[str, Any]) -> Iterator[None]:
    """An agent that pushes its broker's volume to a node every half second, until the end of the block."""
    stop = threading.Event()

    def run() -> None:
        while not stop.is_set():
            push(node, seen, complete=None)
            stop.wait(0.5)

    with ThreadPoolExecutor(1) as pool:
        runs = pool.submit(run)
        try:
            yield
        finally:
            stop.set()
    runs.result()


def test_two_agents_at_two_nodes_of_which_one_falls_silent_and_one_node_restarts():
    """A full disk stays known while only the other agent pushes, until its own is silent for too long."""
    short = {
        "QUOTAGATE_VOLUME_CHECK_INTERVAL": "PT2S",
        "QUOTAGATE_VOLUME_VALIDITY": "PT4S",
        "QUOTAGATE_VOLUME_FALLBACK_FACTOR": "0.75",
    }
    with (
        stores.running("valkey") as url,
        pushed(callers=False, environment=short, store_url=url) as one,
        pushed(callers=False, environment=short, store_url=url, database_url=one.database_url) as other,
        agent(one, WELL),
    ):
        with agent(other, volume("2", 5)):
            first = eventually(lambda: _observed(one, "2"))
            eventually(lambda: _observed(one, "2") > first + 4_000)
            assert eventually(lambda: _throttled(one.ask(usage={"produce_bytes": 1})))["limited_by"] == FACTOR
        for node in (one, other):
            eventually(partial(_fell_back, node))
            assert "not renewed within the validity: /data of broker 2" in volumes_of(node)["reason"]
        other.stop()
        again = {"store_url": url, "database_url": one.database_url}
        with pushed(callers=False, environment=short, **again) as restarted:
            eventually(partial(_fell_back, restarted))
            assert [found["broker"] for found in volumes_of(restarted)["volumes"]] == ["1", "2"]
            assert restarted.http.delete("/v1/volumes", params={"broker": "2"}).status_code == 204
            for node in (one, restarted):
                eventually(partial(_admits, node))
                assert factor(node) == 1.0
                assert [found["broker"] for found in volumes_of(node)["volumes"]] == ["1"]
            assert restarted.http.delete("/v1/volumes", params={"broker": "2"}).status_code == 404


def test_push_that_does_not_say_complete_is_warned_about_once():
    with pushed() as node:
        push(node, WELL, at_ms=1_000, complete=False)
        push(node, WELL, at_ms=1_001, complete=True)
        assert "was taken as a part" not in node.logged()
        for at_ms in range(2_000, 2_005):
            push(node, WELL, at_ms=at_ms, complete=None)
        assert node.logged().count("was taken as a part") == 1


def test_broker_that_got_another_name_is_forgotten_by_the_callers_clock(node: Service, now: int):
    push(node, volume("old", 500), WELL, at_ms=now)
    for minute in range(1, 11):
        push(node, volume("new", 500), WELL, at_ms=now + minute * MINUTE, complete=None)
    at_ms = now + 10 * MINUTE + 1
    assert push(node, volume("new", 500), WELL, at_ms=at_ms, complete=None)["factor"] == 0.5
    forgotten = node.http.delete("/v1/volumes", params={"broker": "old", "at_ms": at_ms})
    assert forgotten.status_code == 204, forgotten.text
    shown = volumes_of(node, at_ms)
    assert (shown["factor"], [found["broker"] for found in shown["volumes"]]) == (1.0, ["1", "new"])
    assert produced(node, at_ms)["decision"] == "admit"


def test_killed_store_leaves_factor_0_in_force():
    with stores.server("valkey") as store, pushed(callers=False, store_url=store.url) as node:
        node.put("user=alice", producer_byte_rate=1_000_000)
        push(node, FULL)
        ask = {"principal": "alice", "usage": {"produce_bytes": 1}}
        assert node.ask(**ask)["limited_by"] == FACTOR
        store.kill()
        for _ in range(20):
            assert _throttled(node.ask(**ask))["limited_by"] == FACTOR
        assert factor(node) == 0.0, "the node keeps the factor"
        refused = node.http.post("/v1/volumes", json={"volumes": [WELL]})
        assert refused.status_code == 503
        assert node.http.post("/v1/volumes:drill", json={"factor": 1, "for_ms": 1}).status_code == 503
        began, failed = reversed(node.http.get("/v1/quotas:history?entity=throttle_factor").json()["changes"])
        assert (began["before"], failed["after"]) == (None, None)
        assert failed["reason"].startswith("the drill did not begin: ")
        store.start()  # empty, because it keeps nothing on disk
        store.until_it_answers()
        assert node.ask(**ask)["limited_by"] == FACTOR
        eventually(lambda: _recorded(store.url))
        assert factor(node) == 0.0, "the node writes the lost record again"
        push(node, WELL)
        eventually(lambda: node.ask(**ask)["source"] == "store")


def _throttled(decision: dict[str, Any]) -> dict[str, Any]:
    return decision if decision["decision"] == "throttle" else {}


def _admits(node: Service) -> bool:
    return bool(node.ask(usage={"produce_bytes": 1})["decision"] == "admit")


def _fell_back(node: Service) -> bool:
    return bool(node.http.get("/health/ready").json()["throttle_factor"] == 0.75)


def _observed(node: Service, broker: str) -> int:
    """When the volume of a broker was observed last; 0 if it is unknown."""
    return next((v["observed_ms"] for v in volumes_of(node)["volumes"] if v["broker"] == broker), 0)


def _recorded(url: str) -> bool:
    with redis.Redis.from_url(url) as client:
        return any(b"volumes" in key for key in client.scan_iter())
