"""Plans for the store: the parts of an ask in them, and quotas for bound callers and under a factor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from msgspec import msgpack

from app.admission.plan import (
    Kept,
    Knowledge,
    PlannedAsk,
    granted_by,
    hold_plan,
    ids_charge,
    may_answer_alone,
    named,
    plan_of,
    restricted,
    scaled,
    settle_plan,
    with_spreads,
)
from app.domain.ask import MODES, Ask, Mode
from app.domain.binding import Binding
from app.domain.errors import OutOfBoundsError
from app.domain.quota import Quota
from app.domain.usage import spreads_of
from app.domain.volumes import scaled_quota
from app.store.port import Answer, Charge, LeaseResult, Plan
from tests.unit.admission.fakes import IDS, RATE, charge_to, charges_for

SECRET = b"s" * 32
TOKENS = Quota("controller_mutation_rate", 5, "token_bucket", "deny", burst=5)
DELAYS = Quota("request_rate", 5, "sampled_rate", "delay")
BYTES = Quota("producer_byte_rate", 100, "sampled_rate", "delay")
ASK = Ask({"requests": 1, "mutations": 1}, (7, -1, "x"), principal="alice")
UNITS = replace(ASK, producer_ids=None)
ALICE = (Binding.parse("user=alice"),)
ETL = (Binding.parse("client-id=etl"),)


def charges(ask: Ask = ASK) -> Sequence[Charge]:
    return with_spreads(ask, charges_for(ask, IDS, RATE, TOKENS), SECRET)


def plan_for(ask: Ask, key: str | None = None) -> Plan:
    plan = plan_of(ask, charges(ask), SECRET, key)
    assert plan is not None
    return plan


# Ids


def test_only_quotas_that_count_ids_are_charged_for_them() -> None:
    plan = plan_for(ASK)
    ids = {charge.quota.key: len(charge.spreads) // 32 for charge in plan.charges}
    assert ids == {"producer_ids_rate": 2, "request_rate": 0, "controller_mutation_rate": 0}
    assert plan.charges[0].spreads == b"".join(spreads_of(ASK, SECRET))
    assert [charge.usage for charge in plan.charges] == [2, 1, 1]
    assert plan.ids == 2


def test_ids_are_hashed_only_where_a_quota_counts_them() -> None:
    ask_charges = charges_for(UNITS, RATE)
    assert with_spreads(ASK, ask_charges, SECRET) is ask_charges
    assert with_spreads(ASK, (), SECRET) == ()
    (charge,) = with_spreads(replace(ASK, producer_ids=(-1,)), charges_for(ASK, IDS), SECRET)
    assert (charge.usage, charge.spreads) == (0, b"")


def test_charge_has_the_ids_that_are_left_to_the_store() -> None:
    charge, *_ = with_spreads(replace(ASK, producer_ids=("x",)), charges_for(ASK, IDS, RATE), SECRET)
    assert (charge.usage, len(charge.spreads)) == (1, 32)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("more", [{}, {"id": "once"}, {"detail": True}])
def test_node_answers_for_ids_of_plain_asks_for_work(mode: Mode, more: dict[str, str]) -> None:
    asked = replace(ASK, mode=mode, **more)  # type: ignore[arg-type]
    assert may_answer_alone(asked) is (mode in ("admit", "record") and not more)


def test_node_knows_ids_under_the_stores_clock_alone() -> None:
    ask_charges = charges()
    assert ids_charge(ASK, ask_charges) is ask_charges[0]
    assert ids_charge(replace(ASK, at_ms=0), ask_charges) is None
    assert ids_charge(ASK, ask_charges[1:]) is None
    assert ids_charge(ASK, ()) is None
    assert ids_charge(ASK, charges(replace(ASK, producer_ids=(-1,)))) is None


def test_quota_that_the_node_answers_for_is_the_first() -> None:
    known = Knowledge(1, 2, 3)
    assert [PlannedAsk(ASK, (), None).alone, PlannedAsk(ASK, (), None, known=known).alone] == [0, 1]


# Plans


def test_plan_has_the_charges_and_the_time_of_the_ask() -> None:
    assert plan_for(replace(UNITS, at_ms=77)) == Plan("admit", tuple(charges(UNITS)), at_ms=77)
    for mode in MODES:
        assert plan_for(replace(UNITS, mode=mode)).mode == mode


@pytest.mark.parametrize("mode", MODES)
def test_ask_that_no_quota_limits_needs_a_plan_only_for_a_kept_answer(mode: Mode) -> None:
    assert plan_of(replace(ASK, mode=mode), (), SECRET) is None
    kept = plan_of(replace(ASK, mode=mode, id="once"), (), SECRET)
    assert (kept is None) is (mode == "peek")
    assert kept is None or (kept.retry is not None and kept.charges == ())


def test_peek_neither_keeps_nor_uses_an_id() -> None:
    assert plan_for(replace(ASK, mode="peek", id="once")) == plan_for(replace(ASK, mode="peek"))


def test_kept_answer_belongs_to_the_key_and_the_secret() -> None:
    once = replace(ASK, id="once")
    plans = [plan_for(once, "gateway"), plan_for(once, "other"), plan_for(once)]
    others = plan_of(once, charges(), b"t" * 32)
    retries = {plan.retry for plan in (*plans, others) if plan is not None and plan.retry is not None}
    assert len(retries) == 4
    assert {principal for principal, _ in retries} == {"alice"}
    assert {len(hashed) for _, hashed in retries} == {16}


def test_context_of_a_kept_answer_is_what_the_store_does_not_say() -> None:
    plan = plan_for(replace(ASK, id="once", mode="record", detail=True))
    mode, detail, fields = msgpack.decode(plan.context, type=Kept)
    assert (mode, detail) == ("record", True)
    assert fields == [named(charge) for charge in plan.charges]
    assert fields[1] == ("request_rate", "user=*", "user=alice", 5.0, "delay", False)


# Bound callers


def test_bound_caller_is_denied_by_quotas_whose_buckets_others_share() -> None:
    before = charges_for(UNITS, DELAYS)
    assert restricted(UNITS, before, ()) is before
    (own,) = restricted(UNITS, before, ALICE)
    assert own is before[0]
    (shared,) = restricted(UNITS, before, ETL)
    assert (shared.enforcement, shared.key, shared.usage) == ("deny", before[0].key, 1)
    assert shared.quota is before[0].quota
    assert restricted(replace(UNITS, mode="peek"), before, ETL)[0].enforcement == "deny"


def test_second_ask_for_a_connection_stays_one_for_a_bound_caller() -> None:
    again = replace(UNITS, recheck=True)
    charge, *_ = charges_for(again, DELAYS)
    (shared,) = restricted(again, [charge], ETL)
    assert shared.compiled.before[1] == charge.compiled.before[1] | 1, "only deny is added"


@pytest.mark.parametrize("mode", ["record", "refund"])
def test_bound_caller_may_not_account_in_a_shared_bucket(mode: Mode) -> None:
    account = replace(UNITS, mode=mode)
    assert restricted(account, charges_for(account, DELAYS), ALICE)
    with pytest.raises(OutOfBoundsError) as outside:
        restricted(account, charges_for(account, DELAYS), ETL, 7)
    assert outside.value.place == 7


# The throttle factor


def test_factor_scales_limits_and_keeps_buckets() -> None:
    ask = Ask({"produce_bytes": 3, "requests": 1}, principal="alice")
    rate, produce = before = charges_for(ask, DELAYS, BYTES)
    same, half = scaled(ask, before, 0.5)
    assert same is rate
    assert (half.quota, half.compiled.limit) == (scaled_quota(BYTES, 0.5), 50)
    assert (half.key, half.bucket, half.usage) == (produce.key, produce.bucket, 3)


def test_factor_leaves_the_manner_of_an_ask_as_it_is() -> None:
    ask = Ask({"produce_bytes": 3}, principal="alice", deny=True)
    (half,) = scaled(ask, charges_for(ask, BYTES), 0.5)
    assert half.enforcement == "deny"
    (both,) = restricted(ask, scaled(replace(ask, deny=False), charges_for(ask, BYTES), 0.5), ETL)
    assert (both.enforcement, both.quota.limit) == ("deny", 50)


# Leases


def test_lease_is_held_and_settled_in_all_its_buckets() -> None:
    wish = replace(UNITS, deny=True, at_ms=5)
    ask_charges = charges_for(wish, RATE, TOKENS)
    assert hold_plan(wish, ask_charges, b"l" * 16, 500) == Plan(
        "hold", tuple(ask_charges), at_ms=5, lease=(b"l" * 16, 500)
    )
    assert settle_plan(wish, ask_charges, b"l" * 16) == Plan(
        "settle", tuple(ask_charges), at_ms=5, lease=(b"l" * 16, 0)
    )


def test_lease_grants_of_each_field_what_is_held_of_it_outside_shadow() -> None:
    wish = Ask({"requests": 8, "request_time_ms": 50}, principal="alice", deny=True)
    percent = Quota("request_percentage", 5, "sampled_rate", "deny")
    shadow = replace(RATE, shadow=True)
    ask_charges = [charge_to("user=a", RATE), charge_to("ip=1", shadow), charge_to("user=a", percent)]
    plan = Plan("hold", tuple(ask_charges), lease=(b"l" * 16, 500))
    results = tuple(LeaseResult("admit", granted=units) for units in (6.0, 2.0, 4.0))
    assert granted_by(wish, plan, Answer(results)) == {"requests": 6.0, "request_time_ms": 40.0}
    refused = LeaseResult("reject", "too_large", largest=9.0)
    assert granted_by(wish, plan, Answer((refused, *results[1:])))["requests"] == 0
