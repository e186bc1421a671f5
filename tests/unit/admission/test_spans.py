"""Which decisions get a span, compared with the samplers of OpenTelemetry's SDK, and what a span says."""

from __future__ import annotations

import random

import pytest
from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import Decision, SamplingResult
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context
from structlog.testing import capture_logs

from app.admission.plan import PlannedAsk
from app.admission.spans import LOW, MOST_A_SECOND, DecisionSpan, Sampling, Spans, attributes_of, parent_of
from app.domain import decision
from app.domain.ask import Ask
from app.domain.caller import ANYONE, Caller

SAMPLERS = (
    ("", ""),
    ("always_on", ""),
    ("always_off", "1"),
    ("traceidratio", "0.3"),
    ("parentbased_always_on", ""),
    ("parentbased_always_off", ""),
    ("parentbased_traceidratio", "0.3"),
    ("PARENTBASED_TraceIdRatio", "0"),
    ("traceidratio", "many"),
    ("traceidratio", "-0.5"),
    ("parentbased_traceidratio", ""),
    ("traceidratio", "nan"),
    ("made_up", "0.5"),
)


def header(trace_id: int, *, is_sampled: bool, span_id: int = 7) -> bytes:
    return b"00-%032x-%016x-%02x" % (trace_id, span_id, is_sampled)


def decided(limited_by: decision.LimitedBy | None = None) -> PlannedAsk:
    made = decision.Decision("delay", 20, True, 1, "store", limited_by)
    return PlannedAsk(Ask({"requests": 1}), (), None, decision=made)


def is_sampled(result: SamplingResult) -> bool:
    return result.decision is Decision.RECORD_AND_SAMPLE


class Watch:
    """Spans with a clock that a test moves."""

    def __init__(self, name: str = "always_on", argument: str = "") -> None:
        self.now_s = 1_000.0
        self.given: list[DecisionSpan] = []
        self.spans = Spans(
            Sampling.of(name, argument),
            self.given.append,
            clock=lambda: self.now_s,
            now_ns=lambda: round(self.now_s * 1e9),
        )

    def ask(self, caller: Caller = ANYONE, asks: int = 1) -> int:
        """How many spans a request with so many asks gets."""
        before = len(self.given)
        self.spans.add([decided()] * asks, caller, 0.25)
        return len(self.given) - before


@pytest.mark.parametrize(("name", "argument"), SAMPLERS)
def test_with_a_key_the_sampler_decides_as_the_sdks(
    monkeypatch: pytest.MonkeyPatch, name: str, argument: str
):
    for variable, value in (("SAMPLER", name), ("SAMPLER_ARG", argument)):
        if value:
            monkeypatch.setenv(f"OTEL_TRACES_{variable}", value)
    theirs = TracerProvider(shutdown_on_exit=False).sampler
    ours = Watch(name, argument)
    draw = random.Random(1)
    for _ in range(300):
        ours.now_s += 1
        trace_id, flag = draw.getrandbits(128), draw.random() < 0.5
        parent = SpanContext(trace_id, 7, is_remote=True, trace_flags=TraceFlags(flag))
        within = set_span_in_context(NonRecordingSpan(parent), Context())
        expected = is_sampled(theirs.should_sample(within, trace_id, "decide"))
        found = ours.ask(Caller("key", traceparent=header(trace_id, is_sampled=flag)))
        assert bool(found) is expected


@pytest.mark.parametrize(("name", "argument"), SAMPLERS)
@pytest.mark.parametrize("key", [None, "key"])
def test_a_trace_that_begins_here_is_sampled_as_by_the_sdk(
    monkeypatch: pytest.MonkeyPatch, name: str, argument: str, key: str | None
):
    for variable, value in (("SAMPLER", name), ("SAMPLER_ARG", argument)):
        if value:
            monkeypatch.setenv(f"OTEL_TRACES_{variable}", value)
    theirs = TracerProvider(shutdown_on_exit=False).sampler
    ours = Watch(name, argument)
    draw, drawn = random.Random(2), []

    def bits(count: int) -> int:
        drawn.append(draw.getrandbits(count))
        return drawn[-1]

    monkeypatch.setattr("app.admission.spans.getrandbits", bits)
    for _ in range(300):
        ours.now_s += 1
        drawn.clear()
        found = ours.ask(Caller(key))
        assert bool(found) is is_sampled(theirs.should_sample(Context(), drawn[0], "decide"))
        assert not found or ours.given[-1].trace_id & LOW == drawn[0]


@pytest.mark.parametrize(("name", "argument"), [("parentbased_always_off", ""), ("traceidratio", "0")])
def test_without_a_key_neither_flag_nor_trace_id_makes_a_span(name: str, argument: str):
    watch = Watch(name, argument)
    for trace_id in (1, 1 << 64, (1 << 128) - 1):
        assert watch.ask(Caller(None, traceparent=header(trace_id, is_sampled=True))) == 0


def test_without_a_key_a_chosen_trace_id_is_sampled_no_more_often():
    watch = Watch("parentbased_traceidratio", "0.01")
    random.seed(3)
    found = 0
    for _ in range(20_000):
        watch.now_s += 1
        found += watch.ask(Caller(None, traceparent=header(1 << 64, is_sampled=True)))
    assert 120 < found < 280  # 200 are expected, with a standard deviation of 14


def test_without_a_key_the_flag_cannot_prevent_a_span_either_and_the_span_is_a_child():
    watch = Watch("parentbased_always_on")
    assert watch.ask(Caller(None, traceparent=header(5, is_sampled=False))) == 1
    (span,) = watch.given
    assert (span.trace_id, span.parent) == (5, (5, 7, False))
    assert span.end_ns - span.start_ns == 250_000_000


def test_at_most_100_spans_lie_in_any_second_and_the_rest_is_counted():
    watch = Watch()
    assert watch.ask(asks=60) == 60
    watch.now_s += 0.9
    assert watch.ask(asks=1_000) == 40
    assert watch.spans.over_rate == 960
    watch.now_s += 0.2  # the first 60 are older than a second now
    assert watch.ask(asks=100) == 60
    assert watch.spans.over_rate == 1_000
    assert len({span.span_id for span in watch.given}) == 160 > MOST_A_SECOND


def test_the_decisions_of_a_batch_are_in_one_trace():
    watch = Watch("traceidratio", "1")
    watch.ask(asks=3)
    assert len({span.trace_id for span in watch.given}) == 1


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"00-%032x-%016x-01-more" % (5, 7),
        b"ff-%032x-%016x-01" % (5, 7),
        b"00-%032x-%016x-01" % (0, 7),
        b"00-%032x-%016x-01" % (5, 0),
        b"00-%032X-%016x-01" % (0xABC, 7),
        b"00-%031x-%016x-01" % (5, 7),
        b"00-%032x-%016x-1" % (5, 7),
        b"00-%032x-%016x-01\n" % (5, 7),
        b"x" * 10_000,
        "00-٠".encode(),
    ],
)
def test_a_header_that_is_not_valid_is_no_parent(sent: bytes):
    assert parent_of(sent) is None
    watch = Watch()
    assert watch.ask(Caller("key", traceparent=sent)) == 1
    assert watch.given[0].parent is None


def test_a_later_version_of_the_header_may_have_more_fields():
    assert parent_of(b"01-%032x-%016x-03-more" % (5, 7)) == (5, 7, True)


def test_a_span_names_the_quota_that_decided_and_bounds_names():
    by = decision.LimitedBy("request_rate", "user=*", "user=alice")
    assert attributes_of(decided(by)) == {
        "quotagate.decision": "delay",
        "quotagate.throttle_ms": 20,
        "quotagate.source": "store",
        "quotagate.mode": "admit",
        "quotagate.applied": 1,
        "quotagate.quota": "request_rate",
        "quotagate.entity": "user=*",
    }
    long = attributes_of(decided(decision.LimitedBy("request_rate", "user=" + "a" * 512, None, "capacity")))
    assert str(long["quotagate.entity"]).startswith("sha256:")
    assert len(str(long["quotagate.entity"])) == 71
    assert long["quotagate.reason"] == "capacity"


def test_a_span_that_cannot_be_made_or_given_is_logged_and_the_caller_gets_its_answer():
    def fail(_span: DecisionSpan) -> None:
        raise ValueError("no exporter")

    spans = Spans(Sampling.of("always_on", ""), fail)
    with capture_logs() as logged:
        spans.add([decided()], ANYONE, 0.25)
    (entry,) = logged
    assert (entry["log_level"], entry["exc_info"]) == ("error", True)
