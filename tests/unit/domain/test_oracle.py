"""The oracle: all or nothing, modes, shadow, re-check, retries, clocks that go back, combined delays."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from app.domain.ask import Ask
from app.domain.binding import Binding
from app.domain.caller import ANYONE, Caller
from app.domain.decision import Decision, Verdict
from app.domain.entity import ANY, Entity
from app.domain.errors import OutOfBoundsError
from app.domain.ladder import MatchingRules
from app.domain.oracle import Oracle
from app.domain.quota import KEYS, Quota

ALICE, EACH_IP = Entity.of(user="alice"), Entity.of(ip=ANY)
T = 1_000_000


def quota(key: str, limit: float, **fields: Any) -> Quota:
    row = KEYS[key]
    given: dict[str, Any] = {"algorithm": row.algorithm, "enforcement": row.enforcement, "burst": 11 * limit}
    return Quota(key, limit, **(given | fields))


class Asking:
    """An oracle with quotas for alice; times are in milliseconds after T."""

    def __init__(self, *quotas: Quota, sequential: bool = False, max_ids: int = 1_000) -> None:
        self.oracle = Oracle(b"s" * 32, sequential=sequential, max_ids=max_ids)
        self.quotas = {q.key: {ALICE if ("user",) in KEYS[q.key].entities else EACH_IP: q} for q in quotas}

    def change(self, key: str, **changes: Any) -> None:
        self.quotas[key] = {entity: replace(q, **changes) for entity, q in self.quotas[key].items()}

    def __call__(self, at: int, ids: tuple[int | str, ...] | None = None, **fields: Any) -> Decision:
        usage = {name: fields.pop(name) for name in list(fields) if name in USAGES}
        caller = fields.pop("caller", ANYONE)
        ask = Ask(usage, ids, "alice", ip="10.0.0.7", detail=True, **fields)
        return self.oracle.decide(ask, self.quotas, MatchingRules(), T + at, caller)

    def shows(self, at: int, key: str) -> Verdict:
        """The state of a bucket."""
        field = KEYS[key].usage
        ids = () if field == "producer_ids" else None
        peeked = self(at, ids, mode="peek", **({} if ids is not None else {field: 0}))
        assert peeked.quotas is not None
        return peeked.quotas[0]


USAGES = {row.usage for row in KEYS.values()}


def says(decision: Decision) -> tuple[str, int, str | None]:
    by = None if decision.limited_by is None else decision.limited_by.quota
    return decision.decision, decision.throttle_ms, by


# All or nothing


def test_refused_ask_charges_no_bucket():
    ask = Asking(quota("consumer_byte_rate", 10), quota("controller_mutation_rate", 1, burst=1.0))
    assert ask(0, mutations=1, fetch_bytes=10).charged
    refused = ask(0, mutations=1, fetch_bytes=10)
    assert says(refused) == ("throttle", 1_000, "controller_mutation_rate")
    assert not refused.charged
    assert ask.shows(0, "consumer_byte_rate").observed == 1.0


def test_remaining_is_what_the_window_still_admits():
    ask = Asking(quota("consumer_byte_rate", 10))
    ask(0, fetch_bytes=30)
    shown = ask.shows(0, "consumer_byte_rate")
    assert (shown.observed, shown.remaining) == (3.0, 70.0)


def test_limit_of_0_rejects_with_the_largest_usage_that_it_admits():
    ask = Asking(quota("consumer_byte_rate", 0))
    refused = ask(0, fetch_bytes=1)
    assert refused.limited_by is not None
    assert (refused.decision, refused.limited_by.largest) == ("reject", 0)


def test_longest_wait_decides_and_reject_goes_first():
    ask = Asking(quota("consumer_byte_rate", 10), quota("controller_mutation_rate", 1, burst=1.0))
    ask(0, fetch_bytes=100, mutations=1)
    assert says(ask(0, fetch_bytes=1, mutations=1)) == ("throttle", 1_000, "controller_mutation_rate")
    assert says(ask(0, fetch_bytes=99, mutations=1)) == ("throttle", 11_000, "consumer_byte_rate")
    assert says(ask(0, fetch_bytes=101, mutations=1)) == ("reject", 0, "consumer_byte_rate")


def test_throttle_goes_before_delay():
    ask = Asking(quota("producer_byte_rate", 1), quota("controller_mutation_rate", 1, burst=1.0))
    assert says(ask(0, produce_bytes=1_000, mutations=1)) == ("delay", 990_000, "producer_byte_rate")
    assert says(ask(0, produce_bytes=1_000, mutations=1)) == ("throttle", 1_000, "controller_mutation_rate")
    assert ask.shows(0, "producer_byte_rate").observed == 100.0


def test_tie_goes_to_the_earlier_quota_key():
    ask = Asking(
        quota("consumer_byte_rate", 1, algorithm="token_bucket", burst=1.0),
        quota("controller_mutation_rate", 1, burst=1.0),
    )
    ask(0, fetch_bytes=1, mutations=1)
    assert says(ask(0, fetch_bytes=1, mutations=1)) == ("throttle", 1_000, "consumer_byte_rate")


def test_throttled_ask_remembers_no_unseen_id_but_refreshes_seen_ones():
    ask = Asking(quota("producer_ids_rate", 2, window_ms=3_600_000))
    assert says(ask(0, (1, 2))) == ("admit", 0, None)
    refreshed = 1_200_000
    assert says(ask(refreshed, (1, 3))) == ("throttle", 2_400_000, "producer_ids_rate")
    assert says(ask(refreshed, (3,))) == ("throttle", 2_400_000, "producer_ids_rate")
    assert says(ask(4_800_000, (1,), mode="peek")) == ("admit", 0, None)
    assert ask.shows(4_800_000, "producer_ids_rate").observed == 0
    before = ask(4_800_000, (1, 2), mode="peek").quotas
    assert before is not None
    assert ask(4_800_000, (1, 2)).charged
    assert ask.shows(4_800_000, "producer_ids_rate").observed == 1, "only id 2 was forgotten"


# Modes


def test_peek_writes_nothing():
    ask = Asking(quota("request_rate", 5), quota("producer_ids_rate", 2))
    for _ in range(3):
        assert says(ask(0, (1, 2), requests=50, mode="peek")) == ("admit", 0, None)
    assert ask.shows(0, "request_rate").observed == 0
    assert ask.shows(0, "producer_ids_rate").observed == 0


def test_record_never_refuses_and_always_charges():
    ask = Asking(
        quota("consumer_byte_rate", 10), quota("controller_mutation_rate", 1), quota("producer_ids_rate", 1)
    )
    assert says(ask(0, mode="record", fetch_bytes=200)) == ("delay", 10_000, "consumer_byte_rate")
    assert says(ask(0, mode="record", mutations=31)) == ("delay", 20_000, "controller_mutation_rate")
    assert says(ask(0, (1, 2, 3), mode="record")) == ("delay", 3_600_000, "producer_ids_rate")
    assert says(ask(0, (1, 2, 3))) == ("admit", 0, None)
    assert ask.shows(0, "producer_ids_rate").observed == 3


def test_record_of_ids_waits_until_one_new_id_would_pass():
    ask = Asking(quota("producer_ids_rate", 2))
    ask(0, (1,))
    ask(1_000, (2,))
    assert says(ask(2_000, (3,), mode="record")) == ("delay", 3_599_000, "producer_ids_rate")


def test_limit_of_0_rejects_all_usage():
    ask = Asking(quota("producer_byte_rate", 0), quota("producer_ids_rate", 0), quota("request_rate", 0))
    assert says(ask(0, produce_bytes=1)) == ("reject", 0, "producer_byte_rate")
    assert says(ask(0, produce_bytes=0)) == ("admit", 0, None)
    assert says(ask(0, produce_bytes=1, mode="record")) == ("delay", 2_147_483_647, "producer_byte_rate")
    assert says(ask(0, requests=1, mode="record")) == ("delay", 1_000, "request_rate")
    assert says(ask(0, (1,))) == ("reject", 0, "producer_ids_rate")
    assert says(ask(0, (-1,))) == ("admit", 0, None)
    assert says(ask(0, (1,), mode="record")) == ("delay", 3_600_000, "producer_ids_rate")
    assert says(ask(0, (1,))) == ("admit", 0, None), "seen ids still pass"


def test_refund_gives_back_what_was_charged():
    ask = Asking(quota("consumer_byte_rate", 10), quota("controller_mutation_rate", 1, burst=5.0))
    ask(0, fetch_bytes=100, mutations=5)
    assert ask(500, mode="refund", fetch_bytes=40, mutations=2).charged
    assert ask.shows(500, "consumer_byte_rate").observed == pytest.approx(60 / 10.5)
    assert ask.shows(500, "controller_mutation_rate").remaining == 2.5
    ask(500, mode="refund", fetch_bytes=1_000, mutations=1_000)
    assert ask.shows(500, "consumer_byte_rate").observed == 0
    assert ask.shows(500, "controller_mutation_rate").remaining == 5


# Shadow


def test_shadow_quota_charges_but_never_changes_the_decision():
    ask = Asking(quota("producer_ids_rate", 1, shadow=True))
    over = ask(0, (1, 2, 3))
    assert says(over) == ("admit", 0, None)
    assert over.quotas is not None
    assert (over.quotas[0].outcome, over.quotas[0].reason) == ("reject", "too_large")
    ask.change("producer_ids_rate", shadow=False)
    assert says(ask(1, (1, 2, 3))) == ("admit", 0, None), "a window of shadow learns the ids in use"
    assert says(ask(1, (4,)))[0] == "throttle"


def test_shadow_quota_charges_nothing_when_the_ask_is_refused():
    ask = Asking(
        quota("consumer_byte_rate", 10, shadow=True), quota("controller_mutation_rate", 1, burst=1.0)
    )
    ask(0, mutations=1)
    assert says(ask(0, mutations=1, fetch_bytes=50))[0] == "throttle"
    assert ask.shows(0, "consumer_byte_rate").observed == 0


# The re-check of KIP-612


def test_address_over_its_rate_is_held_once_then_admitted_or_rejected():
    ask = Asking(quota("connection_creation_rate", 1))
    ask(0, connections=10)
    assert says(ask(0, connections=1)) == ("throttle", 1_000, "connection_creation_rate")
    assert says(ask(1_000, connections=1, recheck=True)) == ("reject", 0, "connection_creation_rate")
    assert says(ask(10_500, connections=1)) == ("throttle", 500, "connection_creation_rate")
    assert says(ask(11_000, connections=1, recheck=True)) == ("admit", 0, None)


# Retries


def test_kept_answer_is_repeated_to_the_same_ask_of_the_same_caller():
    ask = Asking(quota("request_rate", 1))
    first = ask(0, requests=10, id="a")
    assert ask(59_999, requests=10, id="a") == first
    assert ask(59_999, requests=11, id="a") != first
    assert ask(59_999, mode="refund", requests=10, id="a") != first
    one_more = ask(59_999, requests=10, id="a", caller=Caller("gateway"))
    assert one_more != first
    assert ask(59_999, requests=10, id="a", caller=Caller("gateway", turn="elsewhere")) == one_more
    assert ask(60_000, requests=10, id="a") != first


def test_retry_may_differ_in_time_and_detail():
    ask = Asking(quota("request_rate", 1))
    first = ask(0, requests=10, id="a", at_ms=1)
    plain = Ask({"requests": 10}, None, "alice", ip="10.0.0.7", id="a", at_ms=2)
    assert ask.oracle.decide(plain, ask.quotas, MatchingRules(), T) == first, "as it was, detail and all"


def test_answer_that_charged_nothing_is_not_kept():
    ask = Asking(quota("controller_mutation_rate", 1, burst=1.0), quota("producer_ids_rate", 5))
    ask(0, mutations=1)
    assert says(ask(0, mutations=1, id="a"))[0] == "throttle"
    assert says(ask(1_000, mutations=1, id="a"))[0] == "admit"
    ask(1_000, (1,))
    ask(1_000, (1,), id="b")
    assert {content[2] for content in ask.oracle.answers} == {"a"}


def test_peek_neither_keeps_nor_uses_an_id():
    ask = Asking(quota("controller_mutation_rate", 1, burst=1.0))
    assert says(ask(0, mutations=1, mode="peek", id="a"))[0] == "admit"
    assert ask(0, mutations=1, id="a").charged
    assert says(ask(0, mutations=1, mode="peek", id="a"))[0] == "throttle"


def test_producer_ids_are_separate_for_each_principal():
    ask = Asking(quota("controller_mutation_rate", 1, burst=1.0))
    kept = ask(0, mutations=1, id="a")
    other = Ask({"mutations": 1}, principal="bob", id="a")
    assert ask.oracle.decide(other, ask.quotas, MatchingRules(), T) != kept


# Bounds

OF_ALICE = Caller("acme", bound_to=(Binding.parse("user=alice"),))


def test_bound_key_spends_under_deny_in_shared_buckets_only():
    shared = quota("connection_creation_rate", 5, enforcement="delay", burst=5.0, algorithm="token_bucket")
    ask = Asking(shared, quota("producer_byte_rate", 1))
    assert says(ask(0, connections=6, caller=OF_ALICE))[0] == "reject"
    assert says(ask(0, connections=5, produce_bytes=99, caller=OF_ALICE))[0] == "delay"
    assert says(ask(0, connections=1, caller=OF_ALICE)) == ("throttle", 200, "connection_creation_rate")
    assert ask.shows(0, "connection_creation_rate").remaining == 0, "nobody is in debt"
    assert says(ask(0, connections=1))[0] == "delay"


@pytest.mark.parametrize("mode", ["record", "refund"])
def test_bound_key_cannot_record_in_or_refund_to_shared_buckets(mode: str):
    ask = Asking(quota("connection_creation_rate", 5), quota("producer_byte_rate", 10))
    ask(0, connections=5, produce_bytes=5)
    assert ask(0, produce_bytes=5, mode=mode, caller=OF_ALICE).charged
    with pytest.raises(OutOfBoundsError) as refused:
        ask(0, connections=5, produce_bytes=5, mode=mode, caller=OF_ALICE)
    assert (refused.value.bucket, refused.value.field) == ("ip=10.0.0.7", "ip")
    assert ask.shows(0, "connection_creation_rate").observed == 0.5


# Debts


def test_debt_stays_within_its_bound_and_the_excess_is_forgiven():
    ask = Asking(quota("controller_mutation_rate", 1, burst=5.0, enforcement="delay", max_debt=60.0))
    assert says(ask(0, mutations=2**53 - 1))[:2] == ("delay", 60_000)
    assert says(ask(0, mutations=10, mode="record"))[:2] == ("delay", 60_000)
    assert ask.shows(30_000, "controller_mutation_rate").remaining == -30
    assert ask(30_000, mutations=7, mode="refund").charged
    assert ask.shows(30_000, "controller_mutation_rate").remaining == -23


def test_lowered_limit_forgives_debt_at_the_next_ask_even_if_refused():
    ask = Asking(quota("controller_mutation_rate", 10, burst=5.0, max_debt=600.0))
    ask(0, mutations=9_999, mode="record")
    ask.change("controller_mutation_rate", limit=1, max_debt=60.0)
    assert ask.shows(0, "controller_mutation_rate").remaining == -60
    assert says(ask(5_000, mutations=1)) == ("throttle", 61_000, "controller_mutation_rate")
    assert says(ask(65_999, mutations=1)) == ("throttle", 1, "controller_mutation_rate")
    assert says(ask(66_000, mutations=1))[0] == "admit"


def test_limit_of_0_has_unlimited_debt():
    ask = Asking(quota("controller_mutation_rate", 0, burst=0.0, enforcement="delay"))
    ask(0, mutations=1e9, mode="record")
    assert ask.shows(0, "controller_mutation_rate").remaining == -1e9


# Clocks


def test_clock_behind_counts_as_the_newest_time_but_waits_start_at_the_real_one():
    ask = Asking(quota("controller_mutation_rate", 1, burst=10.0))
    ask(0, mutations=10)
    assert says(ask(-500, mutations=1)) == ("throttle", 1_500, "controller_mutation_rate")
    assert says(ask(1_000, mutations=1)) == ("admit", 0, None)
    assert ask.oracle.corrections == 1


def test_clock_back_by_more_than_a_window_moves_the_bucket_back():
    ask = Asking(quota("producer_ids_rate", 2, window_ms=10_000))
    ask(100_000, (1, 2))
    assert says(ask(90_000, (3,))) == ("throttle", 20_000, "producer_ids_rate")
    assert says(ask(80_000, (3,))) == ("throttle", 10_000, "producer_ids_rate")
    assert says(ask(89_999, (3,))) == ("throttle", 1, "producer_ids_rate")
    assert says(ask(90_000, (3,))) == ("admit", 0, None)
    assert ask.oracle.corrections == 2


def test_peek_moves_no_bucket():
    ask = Asking(quota("consumer_byte_rate", 10))
    ask(100_000, fetch_bytes=100)
    assert says(ask(0, fetch_bytes=1, mode="peek")) == ("throttle", 100, "consumer_byte_rate")
    assert says(ask(100_000, fetch_bytes=1)) == ("throttle", 100, "consumer_byte_rate")


# Delays


B06 = (quota("request_rate", 100), quota("producer_byte_rate", 1_000))


@pytest.mark.parametrize(
    ("sequential", "throttle_ms", "by"),
    [(False, 2_100, "producer_byte_rate"), (True, 2_500, "producer_byte_rate")],
)
def test_delays_combine_by_kafkas_rule_or_by_kip_124(sequential: bool, throttle_ms: int, by: str):
    """Vector B06: a byte delay of 2,100 ms, and a request delay of 500 ms now or 400 ms after that."""
    ask = Asking(*B06, sequential=sequential)
    ask(0, mode="record", requests=1_050)
    assert says(ask(0, mode="record", requests=0))[1] == 500
    assert says(ask(0, mode="record", requests=0, produce_bytes=12_100)) == ("delay", throttle_ms, by)


def test_delay_of_neither_bytes_nor_requests_is_not_added_to_the_sum():
    ask = Asking(*B06, quota("controller_mutation_rate", 1), sequential=True)
    ask(0, mode="record", requests=1_050)
    decision = ask(0, mode="record", requests=0, produce_bytes=12_100, mutations=14)
    assert says(decision) == ("delay", 3_000, "controller_mutation_rate")
    decision = ask(0, mode="record", requests=0, produce_bytes=0, mutations=-1)
    assert decision.throttle_ms == 2_500


# Capacity


def test_unseen_id_waits_for_a_layer_to_die_at_capacity():
    ask = Asking(quota("producer_ids_rate", 5), max_ids=10)
    ask(0, tuple(range(10)), mode="record")
    full = ask(3_600_000, (10,))
    assert says(full) == ("throttle", 1_200_000, "producer_ids_rate")
    assert full.limited_by is not None
    assert full.limited_by.reason == "capacity"
    assert says(ask(3_600_000, (10,), mode="record")) == ("admit", 0, None)
    assert says(ask(3_600_000, (10,), mode="peek"))[0] == "throttle", "record charged it without remembering"
    assert says(ask(3_600_000, (0,))) == ("admit", 0, None)
    assert says(ask(4_800_000, (11,))) == ("admit", 0, None)


def test_usage_that_can_never_pass_is_rejected_in_any_state():
    ask = Asking(
        quota("producer_ids_rate", 5),
        quota("consumer_byte_rate", 10, samples=1),
        quota("controller_mutation_rate", 1, burst=5.0),
    )
    for decision in (ask(0, tuple(range(6))), ask(0, fetch_bytes=10.01), ask(0, mutations=5.01)):
        assert decision.decision == "reject"
        assert decision.limited_by is not None
        assert decision.limited_by.reason == "too_large"
    largest = [
        decision.limited_by.largest
        for decision in (ask(0, tuple(range(6))), ask(0, fetch_bytes=11))
        if decision.limited_by
    ]
    assert largest == [5, 10]
    assert says(ask(0, fetch_bytes=10, mutations=5)) == ("admit", 0, None)
