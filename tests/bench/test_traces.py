"""The cost of traces: processor time of an API process for a decision, with traces against without.

With ``BASE=FOLDER``, a working copy of an earlier commit, its node is measured too: traces that are off cost
nothing, so the ratio is about 1.
"""

from __future__ import annotations

import os
from array import array
from contextlib import ExitStack
from statistics import quantiles
from typing import Final

import pytest

from tests import stores
from tests.bench import generator
from tests.bench.generator import Load
from tests.otlp import Collector, collecting
from tests.report import say
from tests.service import ADMIN_KEY, Service, running

pytestmark = pytest.mark.bench

ROUNDS, SECONDS = 40, 0.4
ENOUGH: Final = 1.10
"""The most that a decision may cost with 1 % sampled, as a multiple of one without traces."""

ONE = b'{"principal":"user-{next6}","usage":{"requests":1}}'
TEN = b'{"asks":[%b]}' % b",".join([ONE.replace(b"{next6}", b"%06d" % n) for n in range(10)])


def request(path: bytes, body: bytes, *, flag: bytes, with_key: bool) -> bytes:
    """A request in a span of its caller."""
    key = b"Authorization: Bearer %b\r\n" % ADMIN_KEY.encode() if with_key else b""
    head = b"POST %b HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n%b" % (path, key)
    trace = b"traceparent: 00-{hex32}-{hex16}-%b\r\n" % flag
    return head + trace + b"Content-Length: %d\r\n\r\n" % len(generator.filled(body)) + body


def cost_us(node: Service, path: bytes, body: bytes, *, with_key: bool) -> float:
    """Microseconds of the node for a request; one in 100 has the sampled flag."""
    load = Load(
        address=node.address,
        request=request(path, body, flag=b"00", with_key=with_key),
        odd=[request(path, body, flag=b"01", with_key=with_key)],
        odd_in=100,
        sequence=array("I", range(1_000)),
        warm_s=0.1,
        seconds=SECONDS,
        programs=(node.pid,),
    )
    return generator.processor_us(load)


def sampled(collector: Collector) -> dict[str, str]:
    """The variables by which 1 % is sampled, also of requests without a key."""
    return collector.environment(
        OTEL_TRACES_SAMPLER="parentbased_traceidratio",
        OTEL_TRACES_SAMPLER_ARG="0.01",
        OTEL_BSP_SCHEDULE_DELAY="1000",
    )


@pytest.mark.parametrize(
    ("path", "body", "with_key"),
    [
        (b"/v1/decisions", ONE, False),
        (b"/v1/decisions", ONE, True),
        (b"/v1/decisions:batch", TEN, False),
    ],
    ids=["one, without a key", "one, with a key", "a batch of ten"],
)
def test_processor_time_of_a_decision_with_one_in_100_sampled(path: bytes, body: bytes, with_key: bool):
    base = os.environ.get("BASE")
    with ExitStack() as stack:
        collector = stack.enter_context(collecting())
        store = stack.enter_context(stores.running("valkey"))
        environments = {"off": {}, "1 %": sampled(collector)}
        if base is not None:
            environments["base"] = {"PYTHONPATH": base}
        nodes = {
            name: stack.enter_context(running(store_url=store, environment=environment))
            for name, environment in environments.items()
        }
        for node in nodes.values():  # each has a catalog of its own
            node.put("user=*", request_rate=1e9)
        found: dict[str, list[float]] = {name: [] for name in nodes}
        for each in range(ROUNDS):
            for name in list(nodes)[:: 1 if each % 2 else -1]:
                found[name].append(cost_us(nodes[name], path, body, with_key=with_key))
        spans = len(collector.spans)
    # Other programs can only add to a round, so the lower quartile is nearest to the program's own time.
    usual = {name: quantiles(costs, n=4)[0] for name, costs in found.items()}
    against = {name: cost / usual["off"] for name, cost in usual.items()}
    say(", ".join(f"{name}: {cost:.1f} us ({against[name]:.3f})" for name, cost in usual.items()))
    say(f"{spans} spans arrived")
    assert spans > ROUNDS
    assert against["1 %"] <= ENOUGH
