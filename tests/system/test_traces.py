"""Nodes export spans of decisions to a collector; neither callers nor a collector can do harm by that."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from app.admission.spans import MOST_A_SECOND
from app.envoy.server import METHOD
from tests.envoy.calls import connected, request, serving
from tests.otlp import Collector, attributes, collecting
from tests.report import say
from tests.service import ADMIN_KEY, Service, eventually, running

TRACE = 0x0AF7651916CD43DD8448EB211C80319C
SPAN = 0xB7AD6B7169203331
OTLP_TIMEOUT_S = 60
"""How long a node would wait for a collector that hangs."""
STRICT = {"limit": 1e-6, "algorithm": "token_bucket", "burst": 1, "enforcement": "deny"}
ASK = {"principal": "alice", "usage": {"requests": 1}}


def within(trace_id: int = TRACE, *, is_sampled: bool = True) -> dict[str, str]:
    """The header of a caller that asks in a span of its own."""
    return {"traceparent": f"00-{trace_id:032x}-{SPAN:016x}-{is_sampled:02x}"}


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as found:
        yield found


def anonymous(node: Service) -> httpx.Client:
    """A client without a key."""
    return httpx.Client(base_url=node.url, timeout=60, trust_env=False)


def dropped(node: Service) -> dict[str, float]:
    """The spans that a node dropped, by reason."""
    page = text_string_to_metric_families(node.http.get("/metrics").text)
    return {
        sample.labels["reason"]: sample.value
        for family in page
        for sample in family.samples
        if sample.name == "quotagate_spans_dropped_total"
    }


def test_every_route_gives_its_decisions_spans_below_the_callers(collector: Collector):
    with serving(environment=collector.environment()) as (node, port):
        node.put("user=*", request_rate=STRICT)
        before_ns = time.time_ns()
        chunked = iter([b'{"principal": "chunked", "usage": {"requests": 1}}'])  # by uvicorn's protocol
        node.http.post("/v1/decisions", json=ASK, headers=within(1)).raise_for_status()
        node.http.post("/v1/decisions", json=ASK, headers=within(2)).raise_for_status()
        node.http.post("/v1/decisions", content=chunked, headers=within(3)).raise_for_status()
        node.http.post(
            "/v1/decisions:batch", json={"asks": [ASK, {**ASK, "principal": "bob"}]}, headers=within(4)
        ).raise_for_status()
        node.http.get("/v1/check", headers={"X-Quotagate-Principal": "alice", **within(5)})
        with connected(port) as client:
            for trace_id, names in ((6, ["alice"]), (7, ["carol", "alice"])):
                asked = request(*({"principal": name} for name in names)).SerializeToString()
                metadata = [("authorization", f"Bearer {ADMIN_KEY}"), *within(trace_id).items()]
                client.channel.unary_unary(METHOD)(asked, timeout=60, metadata=metadata)
        eventually(lambda: len(collector.spans) >= 8)
        after_ns = time.time_ns()

    refused = {
        "decision": "throttle",
        "source": "store",
        "mode": "admit",
        "applied": 1,
        "quota": "request_rate",
        "entity": "user=*",
    }
    found: dict[int, list[dict[str, str | int]]] = {}
    for span in collector.spans:
        assert span.name == "quotagate.decision"
        assert int.from_bytes(span.parent_span_id, "big") == SPAN
        assert before_ns - 1e9 < span.start_time_unix_nano < span.end_time_unix_nano <= after_ns
        found.setdefault(int.from_bytes(span.trace_id, "big"), []).append(attributes(span))
    admitted = {"decision": "admit", "source": "store", "mode": "admit", "applied": 1, "throttle_ms": 0}
    assert found[1] == found[3] == [admitted]
    assert len(found[4]) == 2
    assert found[4][1] == admitted
    for refusal in (found[2][0], found[4][0], found[5][0], found[6][0]):
        wait = refusal.pop("throttle_ms")
        assert isinstance(wait, int)
        assert wait > 0
        assert refusal == refused
    (several,) = found[7]
    assert several["throttle_ms"]
    assert {**several, "throttle_ms": 0} == {**refused, "throttle_ms": 0, "applied": 2}
    assert collector.services == {"quotagate"}


def test_only_with_a_key_the_sampled_flag_counts(collector: Collector):
    variables = {"OTEL_TRACES_SAMPLER": "parentbased_always_off", "OTEL_SERVICE_NAME": "quotas"}
    with running(environment=collector.environment(**variables)) as node, anonymous(node) as stranger:
        for _ in range(20):
            stranger.post("/v1/decisions", json=ASK, headers=within(1)).raise_for_status()
        node.http.post("/v1/decisions", json=ASK, headers=within(2, is_sampled=False)).raise_for_status()
        node.http.post("/v1/decisions", json=ASK).raise_for_status()
        node.http.post("/v1/decisions", json=ASK, headers=within(3)).raise_for_status()
        eventually(lambda: collector.spans)  # spans leave in order, so an earlier one would be here
        assert node.stop() == 0
    assert [int.from_bytes(span.trace_id, "big") for span in collector.spans] == [3]
    assert collector.services == {"quotas"}


def test_without_a_key_a_decision_is_sampled_as_one_of_the_node_and_still_a_child(collector: Collector):
    variables = {"OTEL_TRACES_SAMPLER": "parentbased_always_on"}
    with running(environment=collector.environment(**variables)) as node, anonymous(node) as stranger:
        stranger.post("/v1/decisions", json=ASK, headers=within(is_sampled=False)).raise_for_status()
        (span,) = eventually(lambda: collector.spans)
    assert int.from_bytes(span.trace_id, "big") == TRACE
    assert int.from_bytes(span.parent_span_id, "big") == SPAN


def test_at_most_100_spans_a_second_leave_a_process_and_the_rest_is_counted(collector: Collector):
    with running(environment=collector.environment()) as node, anonymous(node) as stranger:
        asks = 10 * MOST_A_SECOND
        stranger.post("/v1/decisions:batch", json={"asks": [ASK] * asks}).raise_for_status()
        eventually(lambda: len(collector.spans) >= MOST_A_SECOND)
        assert dropped(node) == {"rate": asks - MOST_A_SECOND, "queue": 0, "export": 0}
        assert node.stop() == 0
    assert len(collector.spans) == MOST_A_SECOND


def test_a_stopping_node_sends_its_last_spans(collector: Collector):
    with running(environment=collector.environment(OTEL_BSP_SCHEDULE_DELAY="3600000")) as node:
        for _ in range(5):
            node.ask(**ASK)
        assert not collector.spans
        assert node.stop() == 0
    assert len(collector.spans) == 5


def test_a_collector_that_hangs_delays_neither_decisions_nor_a_stop_and_fills_no_memory(collector: Collector):
    bounds = {
        "OTEL_BSP_MAX_QUEUE_SIZE": "10",
        "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "5",
        "OTEL_EXPORTER_OTLP_TIMEOUT": f"{OTLP_TIMEOUT_S}",
    }
    with running(environment=collector.environment(**bounds)) as node:
        collector.answers.clear()
        node.ask(**ASK)
        assert collector.asked.wait(60)
        node.batch([ASK] * 30)
        assert node.ask(**ASK)["decision"] == "admit"
        assert dropped(node) == {"rate": 0, "queue": 22, "export": 0}
        began = time.monotonic()
        assert node.stop() == 0
        stopped_s = time.monotonic() - began
        assert "the last spans could not be sent" in node.logged()
    say(f"stopped in {stopped_s:.1f} s")
    assert stopped_s < OTLP_TIMEOUT_S


def test_a_collector_that_is_away_costs_its_spans_which_are_counted():
    with collecting() as gone:
        environment = gone.environment(OTEL_EXPORTER_OTLP_TIMEOUT="0.5")
    with running(environment=environment) as node:
        for _ in range(3):
            assert node.ask(**ASK)["decision"] == "admit"
        eventually(lambda: dropped(node)["export"] == 3)
        assert node.stop() == 0
        assert node.logged().count("exporting spans batch") + node.logged().count("export spans batch") == 1
        assert "the last spans could not be sent" not in node.logged()


@pytest.mark.parametrize(
    ("variables", "why"),
    [
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, None),
        ({"OTEL_SDK_DISABLED": "true"}, None),
        ({"OTEL_TRACES_EXPORTER": "none"}, None),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "must be http/protobuf"),
        ({"OTEL_BSP_MAX_QUEUE_SIZE": "many"}, "invalid literal"),
        ({"OTEL_BSP_SCHEDULE_DELAY": "0"}, "must be positive"),
    ],
    ids=str,
)
def test_traces_are_off_without_an_endpoint_and_with_wrong_variables(
    collector: Collector, variables: dict[str, str], why: str | None
):
    with running(environment={**collector.environment(), **variables}) as node:
        assert node.http.post("/v1/decisions", json=ASK, headers=within()).is_success
        assert dropped(node) == {}
        assert node.stop() == 0
        log = node.logged()
    assert ("traces are off" in log) == (why is not None)
    assert (why or "") in log
    assert not collector.asked.is_set()


LOADED = """
import sys
from app.run import wiring
from app.run.traces import traces_by
{before}
traces = traces_by({environment})
loaded = [name for name in ("app.run.otlp", "opentelemetry.exporter", "requests") if name in sys.modules]
print(traces, loaded)
"""


def printed(before: str, environment: dict[str, str]) -> str:
    command = [sys.executable, "-c", LOADED.format(before=before, environment=environment)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_without_an_endpoint_no_exporter_is_loaded():
    assert printed("", {"OTEL_TRACES_SAMPLER": "always_on"}) == "None []\n"


def test_without_the_extra_a_node_starts_and_names_it():
    out = printed("sys.modules['opentelemetry.exporter'] = None", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c"})
    assert "quotagate[otel]" in out
    assert out.endswith("None ['opentelemetry.exporter']\n")  # the entry that hides it
