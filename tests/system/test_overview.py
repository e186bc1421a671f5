"""The overview of real nodes: every ask is counted once, over stops, starts and kills."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from threading import Event, Thread
from typing import Any

import httpx
import redis

from tests import clusters, stores
from tests.report import say
from tests.service import Service, eventually, running

DENY = {"limit": 1e-6, "algorithm": "token_bucket", "burst": 10, "enforcement": "deny"}
OUTCOMES = ("admit", "delay", "throttle", "reject")


@contextmanager
def nodes(tmp_path: Path, count: int) -> Iterator[tuple[list[Service], Callable[[], Any]]]:
    """Nodes of one deployment, and a function that starts another one."""
    with ExitStack() as stack:
        start = partial(
            running,
            store_url=stack.enter_context(stores.running("valkey")),
            database_url=f"sqlite:///{tmp_path / 'catalog.db'}",
        )
        yield [stack.enter_context(start()) for _ in range(count)], start


def overview(node: Service, query: str = "") -> dict[str, Any]:
    answer = node.http.get(f"/v1/overview{query}")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def counted(view: dict[str, Any], *fields: str) -> int:
    return sum(entry[field] for entry in view["series"] for field in fields)


def until_counted(node: Service, decisions: int) -> dict[str, Any]:
    """The overview of a node as soon as it has as many decisions."""
    view: dict[str, Any] = {}

    def look() -> bool:
        view.update(overview(node))
        return counted(view, *OUTCOMES) >= decisions

    eventually(look)
    return view


def follows(node: Service, bucket: str) -> bool:
    """Whether a node knows a quota of a bucket."""
    return bool(node.http.get("/v1/buckets", params={"bucket": bucket}).json()["buckets"])


def dropped(node: Service) -> float:
    """How many samples a node could not publish."""
    name = "quotagate_samples_dropped_total "
    lines = node.http.get("/metrics").text.splitlines()
    return sum(float(line.removeprefix(name)) for line in lines if line.startswith(name))


def ask(node: Service, principal: str, asks: int = 20) -> int:
    node.batch([{"principal": principal, "usage": {"requests": 1}}] * asks)
    return asks


def test_sum_over_nodes_is_exact_over_a_stop_and_a_start(tmp_path: Path) -> None:
    with nodes(tmp_path, 3) as (three, start):
        three[0].put("user=alice", request_rate=DENY)
        three[0].put("user=shadow", request_rate={**DENY, "shadow": True})
        for node in three:
            eventually(partial(follows, node, "user=shadow"))
        sent = sum(ask(node, name) for node in three for name in ("alice", "shadow", "nobody"))
        sent += ask(three[2], "alice")
        assert three[2].stop() == 0
        with start() as again:
            sent += ask(again, "alice", 7)
            view = until_counted(three[0], sent)
            assert counted(view, *OUTCOMES) == sent
            assert counted(view, "admit") == 10 + 60 + 60
            assert counted(view, "throttle") == sent - 130
            assert counted(view, "local") == 60  # no quota applies
            assert counted(view, "shadow_refused") == 50
            assert counted(view, "shed", "fallback") == 0
            assert sum(sum(entry["latency"]) for entry in view["series"]) == sent
            (throttled,) = view["throttled"]
            assert (throttled["bucket"], throttled["asks"]) == ("user=alice", sent - 130)
            assert len({node["node"] for node in view["nodes"]}) == 3
            (store,) = view["stores"]
            assert 0 < store["memory_bytes"] < store["max_bytes"] == stores.MAXMEMORY
            assert store["faults"] == []
            assert counted(until_counted(again, sent), *OUTCOMES) == sent
            by_minute = overview(again, "?resolution=minute")  # of the node that stopped, at least
            assert {entry["at_ms"] % 60_000 for entry in by_minute["series"]} <= {0}


def test_increments_have_each_entry_once(tmp_path: Path) -> None:
    with nodes(tmp_path, 1) as ((node,), _):
        node.put("user=alice", request_rate=DENY)
        sent, throttled = 0, 0
        entries: list[dict[str, Any]] = []
        while sent < 100 or sum(entry[field] for entry in entries for field in OUTCOMES) < sent:
            sent += ask(node, "alice") if sent < 100 else 0
            more = overview(node, f"?since_ms={entries[-1]['at_ms']}" if entries else "")
            throttled += sum(each["asks"] for each in more["throttled"])
            entries += more["series"]
        at = [entry["at_ms"] for entry in entries]
        assert at == sorted(set(at))
        assert sum(entry[field] for entry in entries for field in OUTCOMES) == sent
        assert throttled == sent - 10
        assert overview(node, f"?since_ms={2**53 - 1}")["series"] == []


def test_a_killed_node_loses_its_last_second_which_is_a_gap(tmp_path: Path) -> None:
    with nodes(tmp_path, 2) as ((victim, other), _):
        sent = ask(victim, "nobody") + ask(other, "nobody")
        until_counted(other, sent)
        lost = ask(victim, "nobody")
        os.kill(victim.pid, signal.SIGKILL)
        victim.process.wait()
        sent += ask(other, "nobody")
        killed_ms = overview(other)["now_ms"]

        eventually(lambda: overview(other)["series"][-1]["at_ms"] > killed_ms + 5_000)
        view = overview(other)
        assert sent <= counted(view, *OUTCOMES) <= sent + lost
        at = [entry["at_ms"] for entry in view["series"]]
        assert any(later - earlier > 1_000 for earlier, later in pairwise(at) if later > killed_ms - 3_000)


def test_a_store_that_is_away_is_named_and_its_gap_has_all_counts(tmp_path: Path) -> None:
    with stores.server("valkey") as store, running(store_url=store.url) as node:
        node.put("user=alice", request_rate=DENY)
        sent = ask(node, "alice")
        until_counted(node, sent)
        store.hold()
        sent += ask(node, "alice")
        eventually(lambda: overview(node)["stores"][0]["faults"])
        eventually(lambda: dropped(node) > 0)
        assert overview(node)["series"], "it shows what it has"
        store.go_on()
        view = until_counted(node, sent)
        assert counted(view, *OUTCOMES) == sent
        assert counted(view, "fallback") > 0


def test_cluster_has_one_overview_with_all_its_primaries() -> None:
    with clusters.running(replicas=False) as own, running(store_url=own.url) as node:
        node.put("user=*", request_rate=DENY)
        sent = sum(ask(node, f"principal-{number}") for number in range(6))
        view = until_counted(node, sent)
        assert counted(view, *OUTCOMES) == sent
        assert counted(view, "throttle") == 6 * 10
        assert len(view["throttled"]) == 6
        places = sorted(store["primary"] for store in view["stores"])
        assert places == sorted(f"127.0.0.1:{each.port}" for each in own.nodes)
        assert all(0 < store["memory_bytes"] < store["max_bytes"] for store in view["stores"])


def test_callers_in_a_loop_take_a_bounded_part_of_the_node_and_the_store(tmp_path: Path) -> None:
    """Each caller wants other entries, so that no two share an answer."""
    with nodes(tmp_path, 1) as ((node,), _), redis.Redis.from_url(node.store_url) as store:
        node.put("user=alice", request_rate=DENY)
        until_counted(node, ask(node, "alice"))
        began, ended, answers = time.monotonic(), Event(), []
        before = store.info("commandstats")["cmdstat_xrange"]["calls"]

        def loop(place: int) -> None:
            since_ms = overview(node)["now_ms"] - 1_000 * place
            while not ended.is_set():
                answers.append(len(overview(node, f"?since_ms={since_ms}")["series"]))

        threads = [Thread(target=loop, args=(place,)) for place in range(8)]
        for each in threads:
            each.start()
        try:
            for _ in range(100):
                node.ask(principal="alice", usage={"requests": 1})
            eventually(lambda: len(answers) > len(threads))
        finally:
            ended.set()
            for each in threads:
                each.join()
        took_s = time.monotonic() - began
        calls = store.info("commandstats")["cmdstat_xrange"]["calls"] - before
        say(f"{len(answers)} answers in {took_s:.1f} s, for which the store had {calls} XRANGE")
        # A read has two, and a sample of the node six at most; each at most once a second.
        assert calls <= 8 * (took_s + 2)


def test_overview_needs_the_scope_read_and_a_right_query(tmp_path: Path) -> None:
    with nodes(tmp_path, 1) as ((node,), _):
        assert httpx.get(f"{node.url}/v1/overview").status_code == 401
        made = node.http.post("/v1/keys", json={"name": "asker", "scopes": ["decide"]}).json()["key"]
        headers = {"Authorization": f"Bearer {made}"}
        assert httpx.get(f"{node.url}/v1/overview", headers=headers).status_code == 403
        for query, field in (
            ("resolution=hour", "/resolution"),
            ("since_ms=-1", "/since_ms"),
            ("since=1", "/since"),
        ):
            answer = node.http.get(f"/v1/overview?{query}")
            assert answer.status_code == 422
            assert [error["field"] for error in answer.json()["errors"]] == [field]
