"""The cost of samples and of the overview: to a decision, a process, the store, and a node that is asked."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from statistics import median, quantiles
from threading import Event, Thread

import pytest
import redis

from app.admission.metrics.metrics import Metrics
from app.admission.metrics.tally import KEPT, Tally
from app.admission.overview.overview import View
from app.admission.overview.publisher import Publisher
from app.admission.overview.series import MOST_THROTTLED, Point, SummedSeries
from app.http.routes.overview import ShownStore, _document
from app.store.samples import (
    AT_ONCE,
    COUNTED,
    LATENCY_S,
    ProcessSample,
    SampleSeries,
    ThrottledBucket,
    TimedSample,
    packed,
)
from tests import stores
from tests.bench import generator
from tests.bench.generator import Load
from tests.proofs import print_table
from tests.service import Service, running

pytestmark = pytest.mark.bench

COMMAND = "make bench T=tests/bench/test_overview.py"
ROUNDS, CALLS = 7, 50_000
NODES, SPAN_S = 64, 900
CONSOLE_ROUNDS, CONSOLE_ROUND_S, REFRESH_S = 24, 4.0, 2.0
ASK = b'{"principal":"user-{next6}","usage":{"requests":1}}'
BUCKETS = [ThrottledBucket("request_rate", f"user=somebody-of-a-tenant-{n:04}", n, 1_000) for n in range(50)]


def seconds(work: Callable[[], object]) -> float:
    """The processor time of some work, in the median of rounds."""
    rounds = []
    for _ in range(ROUNDS):
        began = time.process_time()
        work()
        rounds.append(time.process_time() - began)
    return median(rounds)


def test_throttled_ask_costs_less_than_two_microseconds() -> None:
    names = [f"user={number}" for number in range(CALLS)]

    def same() -> None:
        tally = Tally()
        for _ in names:
            tally.add("request_rate", "user=alice", 1_000)

    def flood() -> None:
        tally = Tally()
        for name in names:
            tally.add("request_rate", name, 1_000)

    cost = {name: seconds(work) / CALLS * 1e6 for name, work in (("same", same), ("flood", flood))}
    print_table(
        "A throttled ask, without its decision",
        COMMAND,
        ("", "measured", "target"),
        [
            ("of one bucket", f"{cost['same']:.2f} us", "below 2 us"),
            (f"of a new bucket each, {KEPT} kept", f"{cost['flood']:.2f} us", "below 2 us"),
        ],
    )
    assert max(cost.values()) < 2.0


async def test_sample_costs_a_process_and_the_store_little() -> None:
    metrics = Metrics()
    metrics.observe_decisions([0.001] * 1_000)
    with stores.running("valkey") as url, redis.Redis.from_url(url) as store:
        series = SampleSeries.at(url, timeout_s=60.0)
        publisher = Publisher(series, node="node", version="1", totals=metrics.totals, throttled=Tally())
        largest = packed(ProcessSample("n", "1", False, False, 0, [2**40] * 8, [2**40] * 11, BUCKETS[:8]))
        for _ in range(NODES * 20):
            await series.append(largest, b"", None, 0)
        store.config_resetstat()
        began = time.process_time()
        for _ in range(500):
            for each in BUCKETS[:8]:
                metrics.throttled.add(each.quota, each.bucket, 1)
            await publisher.publish()
        own_us = (time.process_time() - began) / 500 * 1e6
        append_us = store.info("commandstats")["cmdstat_eval"]["usec_per_call"]
        store.config_resetstat()
        began, samples, replies, is_all = time.process_time(), 0, 0, False
        while not is_all:
            _, some, _, is_all = await series.read()
            samples, replies = samples + len(some), replies + 1
        read_us = (time.process_time() - began) / samples * 1e6
        reply_us = store.info("commandstats")["cmdstat_eval"]["usec_per_call"]
        await series.close()
    print_table(
        "A sample a second",
        COMMAND,
        ("", "measured", "target"),
        [
            ("a process, for each of its samples", f"{own_us:.0f} us", "below 5 ms"),
            ("the store, for each sample", f"{append_us:.0f} us", "below 500 us"),
            (f"the store, for each reply of {AT_ONCE} samples", f"{reply_us:.0f} us", "below 1 ms"),
            ("a reading node, for each sample", f"{read_us:.0f} us", ""),
        ],
    )
    assert samples == NODES * 20 + 500
    assert own_us < 5_000
    assert append_us < 500
    assert reply_us < 1_000


def test_sums_and_documents_of_64_processes() -> None:
    latency = [5] * (len(LATENCY_S) + 1)
    timed = [
        TimedSample(
            at,
            at * 1_000 + 300,
            ProcessSample(
                f"node-{node}", "1", at == 1, False, 0, [at] * len(COUNTED), [at] * len(latency), BUCKETS[:8]
            ),
        )
        for at in range(1, SPAN_S + 1)
        for node in range(NODES)
    ]
    series = SummedSeries(1_000, SPAN_S * 1_000, awaited=3, late_ms=1_500)
    began = time.process_time()
    for each in timed:
        series.add(each)
    sum_us = (time.process_time() - began) / len(timed) * 1e6
    series.close((SPAN_S + 2) * 1_000)
    assert len(series.points) == SPAN_S
    day = [Point(at, [at] * len(COUNTED), latency, 0, BUCKETS[:MOST_THROTTLED]) for at in range(1_440)]
    view, store = View(1, [], day, [], day), [ShownStore("a:1", 1, 2, [])]
    document_s = seconds(lambda: _document(view, "minute", {}, store, 1.0))
    size = len(_document(view, "minute", {}, store, 1.0))
    print_table(
        f"The overview of {NODES} processes",
        COMMAND,
        ("", "measured", "target"),
        [
            ("to add a sample", f"{sum_us:.1f} us", "below 100 us"),
            (
                f"the answer of a whole day, {size / 1024:.0f} KiB",
                f"{document_s * 1e3:.1f} ms",
                "below 100 ms",
            ),
        ],
    )
    assert sum_us < 100
    assert document_s < 0.1


def cost_us(node: Service) -> float:
    """Microseconds of the node's processor for a decision, under full load."""
    head = b"POST /v1/decisions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    length = b"Content-Length: %d\r\n\r\n" % len(generator.filled(ASK))
    load = Load(
        address=node.address,
        request=head + length + ASK,
        sequence=array("I", range(1_000)),
        warm_s=0.1,
        seconds=CONSOLE_ROUND_S,
        programs=(node.pid,),
    )
    return generator.processor_us(load)


def watch(node: Service, ended: Event) -> None:
    """Read the overview as an open console does: what is new, every two seconds."""
    since_ms = 0
    while not ended.wait(REFRESH_S):
        series = node.http.get("/v1/overview", params={"since_ms": since_ms}).json()["series"]
        since_ms = series[-1]["at_ms"] if series else since_ms
        node.http.get("/v1/volumes").raise_for_status()


def test_open_console_costs_a_decision_at_most_2_percent() -> None:
    with stores.running("valkey") as store, running(store_url=store) as node:
        node.put("user=*", request_rate={"limit": 1, "enforcement": "deny"})
        costs: dict[bool, list[float]] = {False: [], True: []}
        for each in range(CONSOLE_ROUNDS):
            for is_open in (False, True) if each % 2 else (True, False):
                ended = Event()
                console = Thread(target=watch, args=(node, ended))
                if is_open:
                    console.start()
                costs[is_open].append(cost_us(node))
                ended.set()
                if is_open:
                    console.join()
    # Other programs can only add to a round, so the lower quartile is nearest to the program's own time.
    alone, watched = (quantiles(costs[is_open], n=4)[0] for is_open in (False, True))
    print_table(
        "A decision while a console is open",
        COMMAND,
        ("", "measured", "target"),
        [
            ("without a console", f"{alone:.2f} us", ""),
            ("with a console", f"{watched:.2f} us, {watched / alone:.3f} times", "at most 1.02 times"),
        ],
    )
    assert watched / alone <= 1.02
