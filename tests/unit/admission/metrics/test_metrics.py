"""The metrics: the counts, and their exposition to Prometheus, with one process and with several."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec import msgpack, structs
from prometheus_client.parser import text_string_to_metric_families

from app.admission.answers import decided, suspend, without_call, without_store
from app.admission.factor import ThrottlingStatus
from app.admission.metrics.counts import (
    COUNTERS,
    HISTOGRAMS,
    KEPT,
    SHOWN,
    SLICE,
    SUMS,
    Counts,
    Histogram,
    touch,
)
from app.admission.metrics.metrics import (
    GONE_S,
    HALF_LIFE_S,
    KEEP_EVERY_S,
    PAUSE_FACTOR,
    QUIET_S,
    Fill,
    Metrics,
)
from app.admission.plan import Knowledge, PlannedAsk, named
from app.domain.ask import Ask
from app.domain.decision import Outcome
from app.domain.quota import KEYS, Algorithm, Quota
from app.domain.volumes import VolumeRules, factor_in_force
from app.store.compiled_quota import ShadowPeriod
from app.store.port import Answer, Charge, ChargeResult, IdsResult, LeaseResult, Plan, StoreError, UnitsResult
from app.store.samples import COUNTED, ThrottledBucket
from tests.unit.admission.fakes import charge_to, sent
from tests.waiting import until

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]
ASK = Ask(usage={"requests": 1}, principal="alice")


class Clock:
    """The host's monotonic clock, moved by hand."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


Judged = tuple[Charge, ChargeResult]
"""A charge, and its result in the store's answer."""


def judged(
    quota: str = "request_rate",
    bucket: str = "user=alice",
    outcome: Outcome = "admit",
    throttle_ms: int = 0,
    *,
    shadow: bool = False,
    algorithm: Algorithm | None = None,
    **said: Any,
) -> Judged:
    row = KEYS[quota]
    charge = charge_to(bucket, Quota(quota, 10.0, algorithm or row.algorithm, row.enforcement, shadow=shadow))
    kind = IdsResult if charge.compiled.counts_ids else UnitsResult
    return charge, kind(outcome, throttle_ms=throttle_ms, **{"observed": 5.0, "remaining": 3.0, **said})


def count(metrics: Metrics, *all_judged: Judged, ask: Ask = ASK, **answered: Any) -> None:
    """Count the decision on an ask with these results."""
    charges = tuple(charge for charge, _ in all_judged)
    plan = Plan(ask.mode, charges) if charges else None
    answer = sent(Answer(tuple(result for _, result in all_judged)))
    answer = structs.replace(answer, **answered)
    planned = PlannedAsk(ask, charges, plan)
    planned.decision, _ = decided(planned, answer, sequential=False)
    metrics.count(planned, answer)


def ids(bucket: str = "user=alice", **said: Any) -> Judged:
    """A charge of ids, and the result of the store that admits them."""
    return judged("producer_ids_rate", bucket, **{"remembered": 70, "fill": 0.25, **said})


def samples(metrics: Metrics) -> Samples:
    text = asyncio.run(metrics.text()).decode()
    return {
        (sample.name.removeprefix("quotagate_"), tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return samples(metrics).get((name, tuple(sorted(labels.items()))))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def metrics(clock: Clock) -> Metrics:
    return Metrics(clock=clock)


def test_decisions_are_counted_by_deciding_quota(metrics: Metrics):
    count(metrics, judged())
    count(metrics, judged())
    count(metrics, judged(outcome="delay", throttle_ms=7))
    assert value(metrics, "decisions_total", decision="admit", quota="", source="store") == 2
    assert value(metrics, "decisions_total", decision="delay", quota="request_rate", source="store") == 1


def test_asks_without_a_quota_are_counted_separately(metrics: Metrics):
    nothing = PlannedAsk(ASK, (), None)
    nothing.decision, _ = without_call(nothing, sequential=False)
    metrics.count(nothing, None)
    suspended_ask = PlannedAsk(ASK, (), None, True)
    suspended_ask.decision, _ = suspend(ASK, (), 1000, away=False)
    metrics.count(suspended_ask, None)
    assert value(metrics, "unmatched_asks_total") == 1
    assert (
        value(metrics, "decisions_total", decision="throttle", quota="throttle_factor", source="local") == 1
    )


@pytest.mark.parametrize(
    ("usage", "mode", "exempt"),
    [
        ({"requests": 3}, "admit", 3),
        ({"request_time_ms": 8.5}, "record", 1),
        ({"requests": 3}, "peek", 0),
        ({"fetch_bytes": 9}, "admit", 0),
    ],
)
def test_exempt_requests_are_counted_separately(metrics: Metrics, usage: Any, mode: Any, exempt: int):
    ask = Ask(usage=usage, mode=mode, cluster_action=True)
    planned = PlannedAsk(ask, (), None)
    planned.decision, _ = without_call(planned, sequential=False)
    metrics.count(planned, None)
    assert value(metrics, "exempt_requests_total") == exempt


def test_fallbacks_corrections_and_calls_are_counted(metrics: Metrics):
    metrics.count_fallback("budget")
    metrics.count_fallback("budget")
    count(metrics, judged(correction=1), judged("controller_mutation_rate", forgiven=2.5))
    metrics.observe_call(40, 0.003)
    metrics.observe_decisions([0.004] * 40)
    found = samples(metrics)
    assert found["fallback_total", (("reason", "budget"),)] == 2
    assert found["clock_corrections_total", ()] == 1
    assert found["debt_forgiven_total", ()] == 2.5
    assert found["script_asks_bucket", (("le", "20.0"),)] == 0
    assert found["script_asks_bucket", (("le", "50.0"),)] == 1
    assert found["store_seconds_sum", ()] == 0.003
    assert found["decision_seconds_count", ()] == 40
    assert found["decision_seconds_bucket", (("le", "0.0025"),)] == 0
    assert found["decision_seconds_bucket", (("le", "0.005"),)] == 40
    assert found["decision_seconds_bucket", (("le", "+Inf"),)] == 40


def test_waits_in_the_queue_are_counted_once_with_a_call_or_a_scrape(metrics: Metrics):
    metrics.observe_queue([0.004, 0.04])
    metrics.observe_call(2, 0.003)
    metrics.observe_queue([0.4])
    for _ in range(2):
        assert value(metrics, "queue_seconds_count") == 3
        assert value(metrics, "queue_seconds_sum") == pytest.approx(0.444)


def test_rate_is_the_last_measured_one(metrics: Metrics):
    count(metrics, judged(observed=5.0))
    count(metrics, judged(observed=6.0))
    assert value(metrics, "rate", quota="request_rate", entity="user=alice") == 6


def test_token_bucket_shows_its_tokens(metrics: Metrics):
    count(metrics, judged("controller_mutation_rate", remaining=-4.0))
    count(metrics, judged(remaining=2.5, algorithm="token_bucket"))
    assert value(metrics, "tokens", quota="controller_mutation_rate", entity="user=alice") == -4
    assert value(metrics, "tokens", quota="request_rate", entity="user=alice") == 2.5
    assert value(metrics, "rate", quota="request_rate", entity="user=alice") is None


def test_throttle_seconds_is_the_mean_of_times_above_0(metrics: Metrics):
    for throttle_ms in (0, 1000, 0, 3000):
        count(metrics, judged(outcome="delay" if throttle_ms else "admit", throttle_ms=throttle_ms))
    assert value(metrics, "throttle_seconds", quota="request_rate", entity="user=alice") == 2.0


def test_old_throttle_times_weigh_less(metrics: Metrics, clock: Clock):
    count(metrics, judged(outcome="delay", throttle_ms=1000))
    for _ in metrics._counts.gauges:  # each count halves the gauges of one name
        clock.now += HALF_LIFE_S / len(metrics._counts.gauges)
        count(metrics, judged())
    count(metrics, judged(outcome="delay", throttle_ms=4000))
    assert value(metrics, "throttle_seconds", quota="request_rate", entity="user=alice") == 3.0


def test_mean_disappears_when_throttling_ends(metrics: Metrics, clock: Clock):
    count(metrics, judged(outcome="delay", throttle_ms=1000))
    for _ in range(13):
        clock.now += QUIET_S / 12
        count(metrics, judged())
    assert value(metrics, "throttle_seconds", quota="request_rate", entity="user=alice") is None
    assert value(metrics, "rate", quota="request_rate", entity="user=alice") == 5


def test_peek_counts_no_throttle_time(metrics: Metrics):
    count(metrics, judged(outcome="delay", throttle_ms=9), ask=Ask(usage={"requests": 1}, mode="peek"))
    assert value(metrics, "throttle_seconds", quota="request_rate", entity="user=alice") is None


def test_shadow_verdicts_are_counted_separately(metrics: Metrics):
    count(metrics, judged(outcome="throttle", throttle_ms=9, shadow=True))
    assert value(metrics, "decisions_total", decision="admit", quota="", source="store") == 1
    assert value(metrics, "shadow_decisions_total", decision="throttle", quota="request_rate") == 1
    assert value(metrics, "throttle_seconds", quota="request_rate", entity="user=alice") is None


@pytest.mark.parametrize(
    ("mode", "refuses", "counted"),
    [
        ("admit", False, [0, 0, 1, 0]),
        ("record", False, [0, 0, 1, 0]),
        ("peek", False, None),
        ("refund", False, None),
        ("admit", True, None),  # another quota refuses the ask
    ],
)
def test_shadow_quota_has_the_verdicts_on_asks_that_went_ahead(
    metrics: Metrics, mode: Any, refuses: bool, counted: list[int] | None
):
    other = judged("consumer_byte_rate", outcome="throttle" if refuses else "admit", throttle_ms=9 * refuses)
    shadow = judged(outcome="throttle", throttle_ms=9, shadow=True)
    count(metrics, shadow, other, ask=replace(ASK, mode=mode))
    period = ShadowPeriod("request_rate", shadow[0].entity, 0)
    assert metrics.shadows.take(5) == ([] if counted is None else [(period, counted)])
    assert value(metrics, "shadow_decisions_total", decision="throttle", quota="request_rate") == 1


@pytest.mark.parametrize(
    ("outcome", "mode", "refuses", "refused"),
    [
        ("throttle", "admit", False, 1),
        ("reject", "record", False, 1),
        ("delay", "admit", False, 0),
        ("admit", "admit", False, 0),
        ("throttle", "peek", False, 0),
        ("throttle", "admit", True, 0),  # another quota refuses the ask
    ],
)
def test_shadow_quota_has_refused_what_it_would_not_have_let_through(
    metrics: Metrics, outcome: Any, mode: Any, refuses: bool, refused: int
):
    other = judged("consumer_byte_rate", outcome="throttle" if refuses else "admit", throttle_ms=9 * refuses)
    shadow = judged(outcome=outcome, throttle_ms=9 * (outcome != "admit"), shadow=True)
    count(metrics, shadow, other, ask=replace(ASK, mode=mode))
    assert dict(zip(COUNTED, metrics.totals().counts, strict=True))["shadow_refused"] == refused


def known(*others: Charge, shadow: bool = False) -> PlannedAsk:
    """An ask whose ids this node knows."""
    charge, _ = ids(shadow=shadow)
    plan = Plan("admit", others) if others else None
    return PlannedAsk(Ask({}, (1,), "alice"), (charge, *others), plan, known=Knowledge(1, 2, 3))


@pytest.mark.parametrize("with_others", [False, True])
def test_shadow_quota_of_ids_counts_wherever_it_is_decided(metrics: Metrics, with_others: bool):
    charge, result = judged()
    planned = known(*[charge] * with_others, shadow=True)
    if with_others:
        answer = sent(Answer((result,)), brief=True)
        planned.decision, _ = decided(planned, answer, sequential=False)
        metrics.count(planned, answer)
    else:
        planned.decision, _ = without_call(planned, sequential=False)
        metrics.count(planned, None)
    assert value(metrics, "shadow_decisions_total", decision="admit", quota="producer_ids_rate") == 1
    assert [numbers for _, numbers in metrics.shadows.take(5)] == [[1, 0, 0, 0]]
    source = "store" if with_others else "local"
    assert value(metrics, "decisions_total", decision="admit", quota="", source=source) == 1
    assert value(metrics, "unmatched_asks_total") == 0


def test_rate_of_known_ids_stays_while_other_quotas_are_asked(metrics: Metrics, clock: Clock):
    count(metrics, ids(observed=4.0))
    charge, result = judged()
    planned = known(charge)
    for _ in range(3):
        clock.now += QUIET_S / 2
        answer = sent(Answer((result,)))
        planned.decision, _ = decided(planned, answer, sequential=False)
        metrics.count(planned, answer)
    assert value(metrics, "rate", quota="producer_ids_rate", entity="user=alice") == 4
    assert value(metrics, "rate", quota="request_rate", entity="user=alice") == 5


def test_brief_answer_shows_all_that_a_full_one_does(clock: Clock):
    found = []
    for brief in (False, True):
        metrics = Metrics(clock=clock)
        (rate, rate_result), (tokens, left) = (
            judged(observed=7.0),
            judged("controller_mutation_rate", remaining=2.5),
        )
        answer = sent(Answer((rate_result, left)), brief=brief)
        planned = PlannedAsk(ASK, (rate, tokens), Plan("admit", (rate, tokens)))
        planned.decision, _ = decided(planned, answer, sequential=False)
        metrics.count(planned, answer)
        found.append(samples(metrics))
    assert found[0] == found[1]
    assert found[0]["rate", (("entity", "user=alice"), ("quota", "request_rate"))] == 7


def test_what_earlier_tries_found_is_counted_too(metrics: Metrics):
    clocks = judged(correction=1), judged("controller_mutation_rate", forgiven=2.5)
    earlier = Answer(tuple(result for _, result in clocks))
    count(metrics, *clocks, earlier=structs.replace(earlier, earlier=earlier))
    count(metrics, judged(), judged("controller_mutation_rate"), earlier=earlier)
    assert value(metrics, "clock_corrections_total") == 4
    assert value(metrics, "debt_forgiven_total") == 4 * 2.5


def test_what_an_ask_wrote_before_it_found_a_kept_answer_is_counted(metrics: Metrics):
    """The kept answer may come from other quotas, and its numbers are old."""
    charge, result = judged(correction=1, lapsed=3.0)
    context = msgpack.encode(("admit", False, []))
    planned = PlannedAsk(ASK, (charge,), Plan("admit", (charge,), ("alice", bytes(16))))
    wrote, kept = Answer((result,)), Answer((), context)
    for answer, lapsed in (
        (structs.replace(kept, earlier=wrote), True),
        (structs.replace(kept, earlier=structs.replace(kept, earlier=wrote)), True),
        (structs.replace(sent(Answer((judged()[1],))), earlier=kept), False),
    ):
        planned.decision, _ = decided(planned, answer, sequential=False)
        assert metrics.count(planned, answer) is lapsed
    assert value(metrics, "clock_corrections_total") == 2


def test_held_ask_of_several_tries_is_counted(metrics: Metrics):
    """The store was asked for its kept answer alone, so its answers have no results."""
    charge, _ = judged()
    planned = PlannedAsk(ASK, (charge,), Plan("admit", (), ("alice", bytes(16))), True)
    planned.decision, _ = suspend(ASK, (charge,), 1000, away=False)
    assert not metrics.count(planned, Answer((), earlier=Answer(())))
    assert (
        value(metrics, "decisions_total", decision="throttle", quota="throttle_factor", source="local") == 1
    )


@pytest.mark.parametrize("brief", [False, True])
@pytest.mark.parametrize("is_earlier", [False, True])
def test_leases_that_ended_are_found_in_the_answer_of_any_try(
    metrics: Metrics, brief: bool, is_earlier: bool
):
    """A result of ids has none."""
    (ids_charge, ids_result), (charge, rate_result) = ids(remembered=9), judged()
    charges = (charge,) if brief else (ids_charge, charge)
    results = (rate_result,) if brief else (ids_result, rate_result)
    planned = PlannedAsk(ASK, charges, Plan("admit", charges))
    answer = sent(Answer(results), brief=brief)
    planned.decision, _ = decided(planned, answer, sequential=False)
    assert not metrics.count(planned, answer)
    over = Answer((*results[:-1], structs.replace(rate_result, lapsed=3.0)))
    answer = structs.replace(answer, earlier=over) if is_earlier else sent(over)
    assert metrics.count(planned, answer)


def test_answer_with_verdicts_by_policy_changes_no_gauge_and_counts_what_else_it_says(metrics: Metrics):
    count(metrics, judged(reason="store_full"), judged("controller_mutation_rate", forgiven=2.5))
    lost = judged("controller_mutation_rate", reason="store_failure")
    count(metrics, judged(correction=2), lost, failure=StoreError("timeout"))
    assert value(metrics, "decisions_total", decision="admit", quota="", source="fallback") == 2
    assert value(metrics, "tokens", quota="controller_mutation_rate", entity="user=alice") is None
    assert value(metrics, "rate", quota="request_rate", entity="user=alice") is None
    assert (value(metrics, "debt_forgiven_total"), value(metrics, "clock_corrections_total")) == (2.5, 1)


def test_renewal_shows_what_its_bucket_holds(metrics: Metrics):
    metrics.count_renewal(Fill("user=alice", 12, 0.5, 3))
    assert value(metrics, "producer_ids_remembered", entity="user=alice") == 12
    assert value(metrics, "filter_fill", entity="user=alice") == 0.5
    assert value(metrics, "producer_ids_remaining", entity="user=alice") == 3


def test_units_held_for_leases_are_shown(metrics: Metrics):
    charge, _ = judged()
    metrics.count_leased((charge,), Answer((LeaseResult("admit", held=7.5),)))
    found = {labels: shown for (name, labels), shown in samples(metrics).items() if name.startswith("lease")}
    assert found[("entity", "user=alice"), ("quota", "request_rate")] == 7.5


def test_fallback_changes_no_gauge(metrics: Metrics):
    charge, _ = judged()
    planned = PlannedAsk(ASK, (charge,), Plan("admit", (charge,)))
    planned.decision, _ = without_store(ASK, planned.charges)
    metrics.count(planned, None)
    assert value(metrics, "decisions_total", decision="admit", quota="", source="fallback") == 1
    assert value(metrics, "rate", quota="request_rate", entity="user=alice") is None


def test_kept_answer_is_counted_but_changes_no_gauge(metrics: Metrics):
    charge, result = judged(outcome="delay", throttle_ms=7)
    context = msgpack.encode(("admit", False, [named(charge)]))
    count(metrics, (charge, result), results=(result,), kept=context)
    assert value(metrics, "decisions_total", decision="delay", quota="request_rate", source="store") == 1
    assert value(metrics, "rate", quota="request_rate", entity="user=alice") is None


def test_filter_of_producer_ids_shows_ids_and_fill(metrics: Metrics):
    count(metrics, ids(remaining=-1))
    assert value(metrics, "producer_ids_remembered", entity="user=alice") == 70
    assert value(metrics, "filter_fill", entity="user=alice") == 0.25
    assert value(metrics, "producer_ids_remaining", entity="user=alice") == -1


@pytest.mark.parametrize(
    ("mode", "shadow", "said", "left"),
    [
        ("admit", False, {"outcome": "throttle", "throttle_ms": 9, "unseen": 2}, -1),
        ("record", False, {"outcome": "delay", "throttle_ms": 9, "unseen": 2}, -1),
        ("admit", False, {"outcome": "reject", "reason": "too_large", "largest": 9.0}, -2),
        ("peek", False, {"outcome": "throttle", "throttle_ms": 9, "unseen": 2}, 1),
        ("admit", True, {"outcome": "throttle", "throttle_ms": 9, "unseen": 2}, 1),
        ("admit", False, {"open_ms": 5_000}, 1),
    ],
)
def test_new_ids_that_were_refused_are_below_what_remains(
    metrics: Metrics, mode: Any, shadow: bool, said: Any, left: float
):
    """If an ask has more ids than the quota can ever hold, all its ids count."""
    charge, result = ids(remaining=1.0, shadow=shadow, **said)
    judged_ids = structs.replace(charge, usage=3), result
    count(metrics, judged_ids, ask=Ask({}, (1, 2, 3), principal="alice", mode=mode))
    assert value(metrics, "producer_ids_remaining", entity="user=alice") == left


def test_refused_ids_are_below_0_no_more_once_known_ids_are_used_again(metrics: Metrics, clock: Clock):
    count(metrics, ids(remaining=-2))
    count(metrics, ids("user=bob", remaining=5))
    for _ in range(2):
        for bucket in ("user=alice", "user=bob", "user=never"):
            metrics.count_local("producer_ids_rate", bucket, 1)
        assert value(metrics, "producer_ids_remaining", entity="user=alice") == -2
        clock.now += KEEP_EVERY_S / 2
    clock.now += 1
    for bucket in ("user=alice", "user=bob"):
        metrics.count_local("producer_ids_rate", bucket, 1)
    assert value(metrics, "producer_ids_remaining", entity="user=alice") == 0
    assert value(metrics, "producer_ids_remaining", entity="user=bob") == 5
    assert value(metrics, "producer_ids_remaining", entity="user=never") is None


def test_remaining_ids_are_bounded_and_the_rest_shows_its_minimum(metrics: Metrics):
    for n in range(SHOWN + 5):
        for _ in range(2 if n >= 5 else 1):
            count(metrics, ids(f"user={n}", remaining=n))
    found = {labels: shown for (name, labels), shown in samples(metrics).items() if "ids_remaining" in name}
    assert len(found) == SHOWN + 1
    assert found[(("entity", "other"),)] == 0


@pytest.mark.parametrize(
    ("bucket", "broker", "listener", "cause"),
    [
        ("listener=EXTERNAL", "", "EXTERNAL", "listener"),
        ("listener=EXTERNAL;broker=1", "1", "EXTERNAL", "listener"),
        ("broker=1,listener=A%2CB", "1", "A,B", "listener"),
        ("broker=1", "1", "", "broker"),
    ],
)
def test_connections_are_counted(metrics: Metrics, bucket: str, broker: str, listener: str, cause: str):
    ask = Ask(usage={"connections": 1}, broker="1", listener="EXTERNAL")
    held = judged("max_connection_creation_rate", bucket, "delay", 500, observed=20.0)
    count(metrics, held, ask=ask)
    count(metrics, held, ask=ask)
    assert value(metrics, "connection_accept_rate", broker=broker, listener=listener) == 20
    assert value(metrics, "connection_throttle_seconds", listener="EXTERNAL", cause=cause) == 0.5
    assert value(metrics, "connection_blocked_seconds_total", listener="EXTERNAL") == 1.0


def test_connections_are_counted_whatever_algorithm_limits_them(metrics: Metrics):
    ask = Ask(usage={"connections": 1}, broker="1", listener="EXTERNAL")
    tokens: Any = {"algorithm": "token_bucket", "observed": 20.0}
    count(metrics, judged("max_connection_creation_rate", "broker=1", "delay", 500, **tokens), ask=ask)
    count(metrics, judged("connection_creation_rate", "ip=10.0.0.7", "throttle", 250, **tokens), ask=ask)
    assert value(metrics, "connection_accept_rate", broker="1", listener="") == 20
    assert value(metrics, "connection_throttle_seconds", listener="EXTERNAL", cause="broker") == 0.5
    assert value(metrics, "connection_throttle_seconds", listener="EXTERNAL", cause="ip") == 0.25


def test_address_limit_holds_its_connections_and_blocks_no_listener(metrics: Metrics):
    ask = Ask(usage={"connections": 1}, ip="10.0.0.7", listener="EXTERNAL")
    count(metrics, judged("connection_creation_rate", "ip=10.0.0.7", "throttle", 250), ask=ask)
    found = samples(metrics)
    assert found["connection_throttle_seconds", (("cause", "ip"), ("listener", "EXTERNAL"))] == 0.25
    assert not [name for name, _ in found if name == "connection_blocked_seconds_total"]


def test_most_active_names_are_shown_and_the_rest_as_other(metrics: Metrics):
    for n in range(KEPT - 1):
        count(metrics, judged(bucket=f"user={n}", observed=1.0))
    for _ in range(5):
        count(metrics, judged(bucket="user=busy", observed=77.0))
    found = {labels: shown for (name, labels), shown in samples(metrics).items() if name == "rate"}
    assert len(found) == SHOWN + 1
    assert found[("entity", "user=busy"), ("quota", "request_rate")] == 77
    assert found[("entity", "other"), ("quota", "request_rate")] == KEPT - SHOWN


def test_gauges_stay_bounded_in_a_flood_of_names(metrics: Metrics):
    for n in range(3 * KEPT):
        count(metrics, judged(bucket=f"user={n}"))
        count(metrics, judged(bucket="user=busy"))
    assert all(len(gauges) <= KEPT for gauges in metrics._counts.gauges)
    assert value(metrics, "rate", quota="request_rate", entity="user=busy") == 5


def test_listeners_stay_bounded(metrics: Metrics):
    for n in range(2 * SHOWN):
        ask = Ask(usage={"connections": 1}, listener=str(n))
        held = judged("max_connection_creation_rate", f"listener={n}", "delay", 1000)
        count(metrics, held, ask=ask)
    shown = [labels for name, labels in samples(metrics) if name == "connection_blocked_seconds_total"]
    assert len(shown) == SHOWN + 1
    assert value(metrics, "connection_blocked_seconds_total", listener="other") == SHOWN


def test_quiet_entity_disappears(metrics: Metrics, clock: Clock):
    count(metrics, judged())
    clock.now += QUIET_S + 1
    assert value(metrics, "rate", quota="request_rate", entity="user=alice") is None
    count(metrics, judged(bucket="user=bob"))
    assert list(metrics._counts.rates) == [("request_rate", "user=bob")]


def test_totals_have_each_decision_once_and_the_buckets_that_throttled_it(metrics: Metrics):
    count(metrics, judged(outcome="delay", throttle_ms=7))
    count(metrics, judged(outcome="throttle", throttle_ms=9, shadow=True))
    count(
        metrics,
        judged(outcome="throttle", throttle_ms=9),
        ask=Ask({"requests": 1}, principal="alice", mode="peek"),
    )
    nothing = PlannedAsk(ASK, (), None)
    nothing.decision, _ = without_call(nothing, sequential=False)
    metrics.count(nothing, None)
    charge, _ = judged()
    away = PlannedAsk(ASK, (charge,), Plan("admit", (charge,)))
    away.decision, _ = without_store(ASK, (charge,))
    metrics.count(away, None)
    metrics.count_shed("age")
    metrics.observe_decisions([0.001, 0.0011, 0.0025, 2.0])
    counts, latency, queue_asks = metrics.totals()
    assert dict(zip(COUNTED, counts, strict=True)) == {
        "admit": 3,
        "delay": 1,
        "throttle": 1,
        "reject": 0,
        "local": 1,
        "fallback": 1,
        "shed": 1,
        "shadow_refused": 1,
    }
    assert (latency, queue_asks) == ([1, 1, 1, *[0] * 7, 1], 0)
    assert metrics.throttled.take(9) == [ThrottledBucket("request_rate", "user=alice", 1, 7)]


# Several processes


def test_counts_of_processes_add_up(tmp_path: Path, clock: Clock):
    one, other = Metrics(tmp_path, clock), Metrics(tmp_path, clock)
    count(one, judged(outcome="delay", throttle_ms=1000))
    count(other, judged(outcome="delay", throttle_ms=3000))
    one.observe_call(10, 0.5)
    other.observe_call(10, 0.5)
    for metrics in (one, other):
        metrics.write()
    for metrics in (one, other):
        assert value(metrics, "decisions_total", decision="delay", quota="request_rate", source="store") == 2
        assert value(metrics, "store_seconds_sum") == 1.0
        assert value(metrics, "script_asks_count") == 2
        assert value(metrics, "throttle_seconds", quota="request_rate", entity="user=alice") == 2.0


def test_file_of_counts_has_the_bounds_that_the_version_before_adds_up(tmp_path: Path, clock: Clock):
    """That version refuses a histogram with other bounds, and its scrape fails."""
    metrics = Metrics(tmp_path, clock)
    metrics.observe_decisions([0.0015, 0.0021, 7.0])
    metrics.write()
    (file,) = tmp_path.glob("*.counts")
    seconds = [0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0]
    assert msgpack.decode(file.read_bytes())["decision_seconds"] == {
        "bounds": seconds,
        "counts": [0, 0, 0, 0, 2, *[0] * 8, 1],
        "total": pytest.approx(7.0036),
    }


def test_histogram_with_other_bounds_is_added_by_these(tmp_path: Path, clock: Clock):
    finer = Counts(decision_seconds=Histogram((0.0002, 0.00025, 1.0, 2.0), [1, 2, 4, 8, 16], 5.0))
    (tmp_path / "1-x.counts").write_bytes(msgpack.encode(finer))
    metrics = Metrics(tmp_path, clock)
    metrics.observe_decisions([0.0002])
    found = samples(metrics)
    reached = {
        bound: found["decision_seconds_bucket", (("le", bound),)]
        for bound in ("0.0001", "0.00025", "0.5", "1.0", "+Inf")
    }
    assert reached == {"0.0001": 0, "0.00025": 4, "0.5": 4, "1.0": 8, "+Inf": 32}
    assert found["decision_seconds_sum", ()] == pytest.approx(5.0002)


def test_every_count_is_added_up_over_processes():
    by_rules = {
        "rates",
        "tokens",
        "remembered",
        "fills",
        "remaining",
        "accepted",
        "held",
        "leased",
    }  # the gauges
    by_rules |= {"written_at", "store_faults", "factor_fallbacks"}
    assert {*COUNTERS, *SUMS, *HISTOGRAMS} | by_rules == set(Counts.__struct_fields__)


def test_fallback_factor_that_all_processes_see_counts_once(tmp_path: Path, clock: Clock):
    rules = VolumeRules()
    now = factor_in_force(None, None, 0, rules)
    processes = [
        Metrics(tmp_path, clock, volumes=partial(ThrottlingStatus, 0, rules, now, None, None, fallbacks))
        for fallbacks in (3, 2)
    ]
    for metrics in processes:
        metrics.write()
    for metrics in processes:
        assert value(metrics, "throttle_factor_fallback_total") == 3


def test_newest_value_of_a_bucket_counts_among_processes(tmp_path: Path, clock: Clock):
    one, other = Metrics(tmp_path, clock), Metrics(tmp_path, clock)
    count(one, judged(observed=5.0))
    clock.now += 1
    count(other, judged(observed=6.0))
    for metrics in (one, other):
        metrics.write()
    for metrics in (one, other):
        assert value(metrics, "rate", quota="request_rate", entity="user=alice") == 6


def test_store_state_and_failures_are_shown(metrics: Metrics):
    assert value(metrics, "store_circuit_open") == 0
    metrics.count_failure("read_only")
    metrics.count_failure("read_only")
    metrics.set_store_state(away=True, faults=["maxmemory_policy"])
    assert value(metrics, "store_failures_total", reason="read_only") == 2
    assert value(metrics, "store_circuit_open") == 1
    assert value(metrics, "store_faults", fault="maxmemory_policy") == 1
    metrics.set_store_state(away=False, faults=[])
    assert value(metrics, "store_circuit_open") == 0
    assert value(metrics, "store_faults", fault="maxmemory_policy") is None


def test_unreachable_catalog_is_shown(clock: Clock):
    away = [True]
    metrics = Metrics(clock=clock, catalog_away=lambda: away[0])
    assert value(metrics, "catalog_away") == 1
    away[0] = False
    assert value(metrics, "catalog_away") == 0


def test_dead_process_has_no_say_in_the_store_state(tmp_path: Path, clock: Clock):
    one, other = Metrics(tmp_path, clock), Metrics(tmp_path, clock)
    one.set_store_state(away=True, faults=[])
    other.set_store_state(away=True, faults=["version"])
    other.write()
    assert value(one, "store_circuit_open") == 2
    clock.now += GONE_S + 1
    one.set_store_state(away=False, faults=[])
    assert value(one, "store_circuit_open") == 0
    assert value(one, "store_faults", fault="version") is None


def test_asks_that_waited_in_a_dead_process_wait_no_longer(tmp_path: Path, clock: Clock):
    one, other = Metrics(tmp_path, clock, waiting=lambda: 3), Metrics(tmp_path, clock, waiting=lambda: 4)
    other.write()
    assert value(one, "queue_asks") == 7
    clock.now += GONE_S + 1
    assert value(one, "queue_asks") == 3


def test_node_without_a_decision_log_drops_no_rows(metrics: Metrics):
    assert value(metrics, "log_dropped_total") == 0


def test_counts_of_a_dead_process_remain_and_a_damaged_file_is_skipped(tmp_path: Path, clock: Clock):
    dead = Metrics(tmp_path, clock)
    count(dead, judged())
    dead.write()
    (tmp_path / "1-x.counts").write_bytes(b"\xc1torn")
    heir = Metrics(tmp_path, clock)
    assert value(heir, "decisions_total", decision="admit", quota="", source="store") == 1


async def test_counts_are_written_while_running_and_at_the_end(tmp_path: Path, clock: Clock):
    folder = tmp_path / "counts"
    metrics = Metrics(folder, clock)
    async with metrics.written():
        await until(lambda: len([*folder.glob("*.counts")]) == 1)
        count(metrics, judged())
    heir = Metrics(folder, clock)
    assert b'quotagate_decisions_total{decision="admit",quota="",source="store"} 1.0' in await heir.text()


async def test_single_process_writes_no_counts():
    async with Metrics().written():
        pass


async def test_concurrent_scrapes_share_a_page(clock: Clock, monkeypatch: pytest.MonkeyPatch):
    metrics = Metrics(clock=clock)
    made = []
    render = metrics._rendered

    def counted(*arguments: Any) -> bytes:
        made.append(arguments)
        return render(*arguments)

    monkeypatch.setattr(metrics, "_rendered", counted)
    pages = await asyncio.gather(*(metrics.text() for _ in range(30)))
    assert len(made) == 1
    assert set(pages) == {pages[0]}
    metrics.count_shed("connections")
    assert b'quotagate_shed_total{cause="connections"} 1.0' in await metrics.text()
    assert len(made) == 2


async def test_pause_follows_each_page(clock: Clock, monkeypatch: pytest.MonkeyPatch):
    metrics = Metrics(clock=clock)
    for n in range(500):
        count(metrics, judged(bucket=f"user=u{n}"))
    loop = asyncio.get_running_loop()
    render = metrics._rendered
    spans = []

    def observed(*arguments: Any) -> bytes:
        began = loop.time()
        page = render(*arguments)
        spans.append((began, loop.time()))
        return page

    monkeypatch.setattr(metrics, "_rendered", observed)
    before = loop.time()
    await metrics.text()
    after = loop.time()
    due = metrics._pauses_until
    [(began, ended)] = spans
    assert PAUSE_FACTOR == 3, "constant scraping takes a quarter of a processor"
    assert ended + 3 * (ended - began) <= due <= after + 3 * (after - before)
    await metrics.text()
    assert spans[1][0] >= due


async def test_cancelled_scrape_does_not_affect_others(clock: Clock):
    metrics = Metrics(clock=clock)
    first, second = (asyncio.create_task(metrics.text()) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    assert b"quotagate_decisions_total" in await second


def test_all_gauges_are_halved_once_in_a_half_life(metrics: Metrics, clock: Clock):
    for gauges in metrics._counts.gauges:
        touch(gauges, ("user=alice",), clock.now, None, throttled=1.0)
    throttled = []
    for _ in metrics._counts.gauges:
        clock.now += HALF_LIFE_S / len(metrics._counts.gauges)
        count(metrics, judged(bucket="user=bob"))
        throttled.append([gauges["user=alice",].throttled for gauges in metrics._counts.gauges])
    assert [times.count(0.5) for times in throttled] == [*range(1, len(metrics._counts.gauges) + 1)]


async def test_large_counts_are_copied_in_slices(clock: Clock):
    metrics = Metrics(clock=clock)
    for n in range(KEPT):
        count(metrics, judged(bucket=f"user=u{n}"))
    turns = 0

    async def take_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    others = asyncio.create_task(take_turns())
    copying = asyncio.create_task(metrics.text())
    total = Counts()
    slices = sum(1 for _ in total.add_in_slices(metrics._counts))
    await copying
    others.cancel()
    assert slices == KEPT / SLICE
    assert turns >= slices
    assert total.rates == metrics._counts.rates
