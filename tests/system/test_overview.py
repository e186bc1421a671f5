"""The overview of real nodes: every ask is counted once, over stops, starts and kills."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from threading import Event, Thread
from typing import Any

import httpx
import pytest
import redis
from msgspec import msgpack

from app.admission.overview.series import LONG_MS, MINUTE_MS
from app.store.samples import LARGEST, ProcessSample, ThrottledBucket
from tests import clusters, stores
from tests.report import say
from tests.service import STOP_WITHIN_S, Service, eventually, running

MANY = 20
DENY = {"limit": 1e-6, "algorithm": "token_bucket", "burst": 10, "enforcement": "deny"}
OUTCOMES, SOURCES = ("admit", "delay", "throttle", "reject"), ("local", "fallback")
Answers = Counter[str]
"""Decisions that callers got: by outcome, and by source too, as a busy node may answer by policy."""


@contextmanager
def nodes(
    tmp_path: Path, count: int, **environment: str
) -> Iterator[tuple[list[Service], Callable[[], Any]]]:
    """Nodes of one deployment, and a function that starts another one."""
    with ExitStack() as stack:
        start = partial(
            running,
            store_url=stack.enter_context(stores.running("valkey")),
            database_url=f"sqlite:///{tmp_path / 'catalog.db'}",
            environment=environment,
        )
        yield [stack.enter_context(start()) for _ in range(count)], start


def overview(node: Service, query: str = "") -> dict[str, Any]:
    answer = node.http.get(f"/v1/overview{query}")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def counted(view: dict[str, Any], *fields: str) -> int:
    return sum(entry[field] for entry in view["series"] for field in fields)


def answers_of(view: dict[str, Any]) -> Answers:
    return +Counter({field: counted(view, field) for field in (*OUTCOMES, *SOURCES)})


def until_counted(node: Service, answers: Answers) -> dict[str, Any]:
    """The overview of a node as soon as it has as many decisions, which it has by outcome and source."""
    view: dict[str, Any] = {}

    def look() -> bool:
        view.update(overview(node))
        return counted(view, *OUTCOMES) >= total(answers)

    eventually(look)
    assert answers_of(view) == answers
    return view


def follows(node: Service, bucket: str) -> bool:
    """Whether a node knows a quota of a bucket."""
    return bool(node.http.get("/v1/buckets", params={"bucket": bucket}).json()["buckets"])


def dropped(node: Service) -> float:
    """How many samples a node could not publish."""
    name = "quotagate_samples_dropped_total "
    lines = node.http.get("/metrics").text.splitlines()
    return sum(float(line.removeprefix(name)) for line in lines if line.startswith(name))


def total(answers: Answers) -> int:
    return sum(answers[outcome] for outcome in OUTCOMES)


def answers_in(*decisions: dict[str, Any]) -> Answers:
    said = (each[field] for each in decisions for field in ("decision", "source"))
    return Counter(word for word in said if word != "store")


def ask(node: Service, *principals: str) -> Answers:
    """Ask in a batch."""
    return answers_in(*node.batch([{"principal": each, "usage": {"requests": 1}} for each in principals]))


def ask_one(node: Service, principal: str) -> Answers:
    return answers_in(node.ask(principal=principal, usage={"requests": 1}))


def ask_until_it_ends(node: Service, principal: str) -> Answers:
    """Ask a node that stops for as long as it answers."""
    answers: Answers = Counter()
    with suppress(httpx.TransportError):
        while True:
            answers += ask(node, principal)
    return answers


def test_sum_over_nodes_is_exact_over_a_stop_and_a_start(tmp_path: Path) -> None:
    with nodes(tmp_path, 3, QUOTAGATE_DRAIN_MS="2000") as (three, start):
        three[0].put("user=alice", request_rate=DENY)
        three[0].put("user=shadow", request_rate={**DENY, "shadow": True})
        for node in three:
            eventually(partial(follows, node, "user=shadow"))
        answers: Answers = Counter()
        for node in three:
            answers += ask(node, *MANY * ["alice"], *MANY * ["shadow"], *MANY * ["nobody"])
        three[2].process.terminate()
        last = ask_until_it_ends(three[2], "alice")
        assert three[2].process.wait(STOP_WITHIN_S) == 0
        assert last, "it drains"
        answers += last
        with start() as again:
            answers += ask(again, *MANY * ["alice"])
            view = until_counted(three[0], answers)
            assert counted(view, "local") == 3 * MANY  # no quota applies
            assert 0 < counted(view, "shadow_refused") <= 3 * MANY - 10
            assert sum(sum(entry["latency"]) for entry in view["series"]) == total(answers)
            (throttled,) = view["throttled"]
            assert (throttled["bucket"], throttled["asks"]) == ("user=alice", answers["throttle"])
            assert len({node["node"] for node in view["nodes"]}) == 3
            (store,) = view["stores"]
            assert 0 < store["memory_bytes"] < store["max_bytes"] == stores.MAXMEMORY
            assert store["faults"] == []
            until_counted(again, answers)
            by_minute = overview(again, "?resolution=minute")  # of the node that stopped, at least
            assert {entry["at_ms"] % 60_000 for entry in by_minute["series"]} <= {0}


class Caller:
    """Asks a node until `end`, or until the node has stopped.

    Attributes:
        answers: of this caller.
        seconds: how long each took.
    """

    def __init__(self, node: Service) -> None:
        self.answers: Answers = Counter()
        self.seconds: list[float] = []
        self._node = node
        self._ended = Event()
        self._thread = Thread(target=self._ask_on)
        self._thread.start()

    def _ask_on(self) -> None:
        with suppress(httpx.TransportError):
            while not self._ended.wait(0.005):
                for principal in ("alice", "nobody"):
                    began = time.perf_counter()
                    answer = ask_one(self._node, principal)
                    self.seconds.append(time.perf_counter() - began)
                    self.answers += answer

    def end(self) -> None:
        self._ended.set()
        self._thread.join()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("lasts_s", [12.0, pytest.param(120.0, marks=pytest.mark.prove)])
def test_sum_and_latency_are_right_under_traffic_while_a_node_stops_and_starts(
    tmp_path: Path, lasts_s: float
) -> None:
    with nodes(tmp_path, 3, QUOTAGATE_DRAIN_MS="2000") as (three, start), ExitStack() as stack:
        three[0].put("user=alice", request_rate=DENY)
        for node in three:
            eventually(partial(follows, node, "user=alice"))

        def call(node: Service) -> Caller:
            caller = Caller(node)
            stack.callback(caller.end)
            return caller

        callers = [call(node) for node in three]
        time.sleep(lasts_s / 3)  # the traffic itself is the condition
        assert three[2].stop() == 0
        time.sleep(lasts_s / 3)
        callers.append(call(stack.enter_context(start())))
        time.sleep(lasts_s / 3)
        for caller in callers:
            caller.end()
        answers = sum((caller.answers for caller in callers), Answers())
        assert all(caller.answers["throttle"] for caller in callers)
        view = until_counted(three[0], answers)
        say(f"{total(answers)} answers in {lasts_s:.0f} s, {dict(answers)}")

        # A node measures a part of the time that its caller measures, so no more answers of callers are fast.
        seconds = [each for caller in callers for each in caller.seconds]
        counted_s = [*accumulate(map(sum, zip(*(entry["latency"] for entry in view["series"]), strict=True)))]
        assert counted_s[-1] == len(seconds) == total(answers)
        for bound_ms, within in zip(view["latency_ms"], counted_s, strict=False):
            assert within >= sum(each * 1_000 <= bound_ms for each in seconds)


def test_increments_have_each_entry_once(tmp_path: Path) -> None:
    with nodes(tmp_path, 1) as ((node,), _):
        node.put("user=alice", request_rate=DENY)
        answers: Answers = Counter()
        throttled = 0
        entries: list[dict[str, Any]] = []
        while total(answers) < 100 or counted({"series": entries}, *OUTCOMES) < total(answers):
            if total(answers) < 100:
                answers += ask(node, *MANY * ["alice"])
            more = overview(node, f"?since_ms={entries[-1]['at_ms']}" if entries else "")
            throttled += sum(each["asks"] for each in more["throttled"])
            entries += more["series"]
        at = [entry["at_ms"] for entry in entries]
        assert at == sorted(set(at))
        assert answers_of({"series": entries}) == answers
        assert throttled == answers["throttle"]
        assert overview(node, f"?since_ms={2**53 - 1}")["series"] == []


def test_a_killed_node_loses_its_last_second_which_is_a_gap(tmp_path: Path) -> None:
    with nodes(tmp_path, 2) as ((victim, other), _):
        answers = ask(victim, *MANY * ["nobody"]) + ask(other, *MANY * ["nobody"])
        until_counted(other, answers)
        lost = total(ask(victim, *MANY * ["nobody"]))
        os.kill(victim.pid, signal.SIGKILL)
        victim.process.wait()
        answers += ask(other, *MANY * ["nobody"])
        killed_ms = overview(other)["now_ms"]

        eventually(lambda: overview(other)["series"][-1]["at_ms"] > killed_ms + 5_000)
        view = overview(other)
        assert total(answers) <= counted(view, *OUTCOMES) <= total(answers) + lost
        at = [entry["at_ms"] for entry in view["series"]]
        assert any(later - earlier > 1_000 for earlier, later in pairwise(at) if later > killed_ms - 3_000)


def test_a_store_that_is_away_is_named_and_its_gap_has_all_counts(tmp_path: Path) -> None:
    with stores.server("valkey") as store, running(store_url=store.url) as node:
        node.put("user=alice", request_rate=DENY)
        answers = ask(node, *MANY * ["alice"])
        until_counted(node, answers)
        store.hold()
        answers += ask(node, *MANY * ["alice"])
        eventually(lambda: overview(node)["stores"][0]["faults"])
        eventually(lambda: dropped(node) > 0)
        assert overview(node)["series"], "it shows what it has"
        store.go_on()
        until_counted(node, answers)
        assert answers["fallback"] > 0


def test_store_without_room_decides_and_its_gap_has_all_counts() -> None:
    with (
        stores.running("valkey") as url,
        redis.Redis.from_url(url) as store,
        running(store_url=url) as node,
    ):
        node.put("user=alice", request_rate=DENY)
        answers = ask(node, *MANY * ["alice"])
        until_counted(node, answers)
        for number in range(1_000):  # in parts, as a large command takes memory that is freed after it
            store.set(f"filler-{number}", b"x" * 64 * 1024)
        store.config_set("maxmemory", store.info("memory")["used_memory"] * 64 // 63)
        eventually(lambda: dropped(node) > 1)
        more = ask(node, *MANY * ["alice"])
        assert more["throttle"] > 0, "the store decides"
        store.config_set("maxmemory", stores.MAXMEMORY)
        view = until_counted(node, answers + more)
        at = [entry["at_ms"] for entry in view["series"]]
        assert any(later - earlier > 1_000 for earlier, later in pairwise(at))


def test_a_flood_of_long_new_names_hides_no_busy_bucket_and_makes_no_sample_large(tmp_path: Path) -> None:
    with nodes(tmp_path, 1) as ((node,), _), redis.Redis.from_url(node.store_url) as store:
        node.put("user=*", request_rate={**DENY, "burst": 1})
        answers: Answers = Counter()
        for part in range(10):
            names = [f"{part}-{number}-{'x' * 500}" for number in range(400)]
            answers += ask(node, *names, *names)  # the second ask of each is throttled
            answers += ask(node, *2 * MANY * ["busy"])
        view = until_counted(node, answers)
        assert view["throttled"][0]["bucket"] == "user=busy"
        assert len(view["throttled"]) <= 50
        sizes = [len(fields[b"sample"]) for _, fields in store.xrange("qg1:overview:seconds")]
        say(f"samples of {min(sizes)} to {max(sizes)} bytes")
        assert max(sizes) <= LARGEST


def test_bucket_throttled_for_half_an_hour_is_listed(tmp_path: Path) -> None:
    """The minutes before are those of an earlier node, as it would have published them."""
    with nodes(tmp_path, 1) as ((node,), _), redis.Redis.from_url(node.store_url) as store:
        node.put("user=*", request_rate=DENY)
        ask(node, *MANY * ["alice"])
        newest = store.time()[0] // 60
        past = store.pipeline()
        past.delete("qg1:overview:minutes")
        for at in range(newest - LONG_MS // MINUTE_MS + 1, newest + 1):
            throttled = [
                ThrottledBucket("request_rate", f"user={name}", 1, 1_000)
                for name in ("alice", "bob")
                if name == "alice" or at not in (newest - 7, newest - 8)
            ]
            sample = ProcessSample("earlier", "0.1.0", False, at == newest, 0, [0] * 8, [0] * 11, throttled)
            fields = {"at": at, "before": 0, "sample": msgpack.encode(sample)}
            past.xadd("qg1:overview:minutes", fields, id=f"{at * 60_000}-1")
        past.execute()

        def listed() -> list[dict[str, Any]]:
            ask(node, "alice")  # so it goes on in the next minute, if the machine is slow
            found: list[dict[str, Any]] = overview(node, f"?since_ms={2**53 - 1}")["throttled_long"]
            return found

        eventually(listed)
        since_ms = newest * MINUTE_MS - LONG_MS
        assert listed() == [{"quota": "request_rate", "bucket": "user=alice", "since_ms": since_ms}]


def test_cluster_has_one_overview_with_all_its_primaries() -> None:
    with clusters.running(replicas=False) as own, running(store_url=own.url) as node:
        node.put("user=*", request_rate=DENY)
        names = [f"principal-{number}" for number in range(6)]
        view = until_counted(node, ask(node, *MANY * names))
        assert len(view["throttled"]) == 6
        places = sorted(store["primary"] for store in view["stores"])
        assert places == sorted(f"127.0.0.1:{each.port}" for each in own.nodes)
        assert all(0 < store["memory_bytes"] < store["max_bytes"] for store in view["stores"])


def test_callers_in_a_loop_take_a_bounded_part_of_the_node_and_the_store(tmp_path: Path) -> None:
    """Each caller wants other entries, so that no two share an answer."""
    with nodes(tmp_path, 1) as ((node,), _), redis.Redis.from_url(node.store_url) as store:
        node.put("user=alice", request_rate=DENY)
        until_counted(node, ask(node, *MANY * ["alice"]))
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
