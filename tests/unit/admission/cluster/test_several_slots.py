"""Asks of several slots, interleaved in any way, with parts that are lost: no limit is exceeded."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec import structs

from app.admission.cluster import several_slots
from app.admission.cluster.several_slots import REFUSING, Phase, SlotPlan, SlotResult, decide, groups_in
from app.admission.errors import OverloadedError
from app.domain.quota import Quota
from app.domain.slots import slot_of
from app.domain.undo import Stamp
from app.store.encoding import decode_answer, unknown_result
from app.store.port import Answer, Charge, ChargeResult, LeaseResult, Plan, StoreError, UndoResult
from tests.planted import planted
from tests.unit.admission.fakes import charge_to

LIMIT = 20
HISTORY = b"h" * 16
AWAY = StoreError("connection")


def charge_of(bucket: str, *, enforcement: Any = "deny", on_store_failure: Any = "admit") -> Charge:
    quota = Quota(
        "request_rate", 1, "token_bucket", enforcement, burst=LIMIT, on_store_failure=on_store_failure
    )
    return charge_to(bucket, quota, key=b"qg1:{%b}:b" % bucket.encode())


class Slots:
    """Stores that count, each atomically, and that may lose a part before or after it is done.

    Attributes:
        used: the charged units, by key of a bucket.
    """

    def __init__(self) -> None:
        self.used: Counter[bytes] = Counter()
        self.kept: dict[tuple[str | None, bytes], Answer] = {}
        self.away: set[int] = set()
        self.orphans: Counter[bytes] = Counter()
        self.holds: dict[bytes, dict[bytes, float]] = {}
        """The held units, by key of a bucket and name of a lease."""

    def answer(self, part: SlotPlan) -> SlotResult:
        """Decide a part as the script does."""
        plan = part.plan
        if part.slot in self.away:
            return AWAY
        assert {slot_of(charge.key) for charge in plan.charges} <= {part.slot}, "a part spans slots"
        if plan.mode == "undo":
            return Answer(tuple(self._undone(charge) for charge in plan.charges))
        if plan.lease is not None:
            return self._leased(plan, plan.lease[0])
        if plan.retry is not None and plan.retry in self.kept:
            return self.kept[plan.retry]
        results = [self._judged(charge, plan) for charge in plan.charges]
        refused = any(result.outcome in REFUSING for result in results)
        if plan.mode == "peek" or refused:
            return Answer(tuple(results))
        for charge in plan.charges:
            self.used[charge.key] += int(charge.usage) * (-1 if plan.mode == "refund" else 1)
        answer = Answer(tuple(results))
        if plan.stamped:
            answer = structs.replace(
                answer, stamps=tuple(Stamp(1, 1, charge.usage, HISTORY) for charge in plan.charges)
            )
        if plan.retry is not None and (plan.charges or plan.keeps):
            self.kept[plan.retry] = structs.replace(answer, kept=plan.context)
        return answer

    def held(self, key: bytes) -> float:
        """The units that a bucket holds for all leases."""
        return sum(self.holds.get(key, {}).values())

    def _leased(self, plan: Plan, lease: bytes) -> Answer:
        """Peek, hold or settle; a bucket grants half of its free units, as if there were two holders."""
        if plan.mode == "settle":
            for charge in plan.charges:
                if self.holds.get(charge.key, {}).pop(lease, None) is not None:
                    self.used[charge.key] += int(charge.usage)
            return Answer(tuple(LeaseResult("admit") for _ in plan.charges))
        free = {charge.key: LIMIT - self.used[charge.key] - self.held(charge.key) for charge in plan.charges}
        grants = {
            charge.key: min(charge.usage, max(free[charge.key] // 2, min(free[charge.key], 1)))
            for charge in plan.charges
        }
        refused = not all(grants.values())
        least = min(grants.values())
        for charge in plan.charges:
            if plan.mode == "hold" and not refused:
                by_lease = self.holds.setdefault(charge.key, {})
                by_lease[lease] = by_lease.get(lease, 0) + least
        return Answer(
            tuple(
                LeaseResult(
                    "admit" if grants[charge.key] else "throttle",
                    granted=float(int(grants[charge.key] if plan.mode == "peek_hold" else least)),
                )
                for charge in plan.charges
            )
        )

    def _judged(self, charge: Charge, plan: Plan) -> ChargeResult:
        fits = self.used[charge.key] + self.held(charge.key) + charge.usage <= LIMIT
        refuses = not fits and plan.mode in {"admit", "peek"} and charge.enforcement == "deny"
        return structs.replace(unknown_result(plan.mode, charge), outcome="throttle" if refuses else "admit")

    def _undone(self, charge: Charge) -> ChargeResult:
        self.used[charge.key] -= int(charge.usage)
        return UndoResult("admit", given_back=charge.usage)


class Asking:
    """One ask on its way."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        slots = [slot_of(charge.key) for charge in plan.charges]
        kept = None if plan.retry is None else slot_of(b"{user=%b}" % str(plan.retry[0]).encode())
        self.steps = decide(plan, groups_in(slots, slot_of(b"{user=a}"), kept))
        self.phases: list[Phase] = []
        self.answer: Answer | None = None
        self.error: Exception | None = None
        self.wants = self._next(None)

    def _next(self, came: list[SlotResult] | None) -> list[SlotPlan]:
        try:
            phase, parts = next(self.steps) if came is None else self.steps.send(came)
        except StopIteration as ended:
            self.answer = ended.value
            return []
        except OverloadedError as error:
            self.error = error
            return []
        self.phases.append(phase)
        return parts

    def step(self, came: list[SlotResult]) -> None:
        self.wants = self._next(came)

    @property
    def is_admitted(self) -> bool:
        return self.answer is not None and not any(r.outcome in REFUSING for r in self.answer.results)


def run_all(slots: Slots, plan: Plan) -> Asking:
    asking = Asking(plan)
    while asking.wants:
        asking.step([slots.answer(part) for part in asking.wants])
    return asking


def plan_for(*buckets: str, **more: Any) -> Plan:
    enforcement = more.pop("enforcement", "deny")
    policy = more.pop("on_store_failure", "admit")
    charges = tuple(charge_of(bucket, enforcement=enforcement, on_store_failure=policy) for bucket in buckets)
    return Plan(more.pop("mode", "admit"), charges, **more)


def test_ask_is_peeked_at_charged_and_charged_at_home_last() -> None:
    slots = Slots()
    asking = run_all(slots, plan_for("user=a", "ip=1"))
    assert asking.phases == [Phase.PEEK, Phase.CHARGE, Phase.HOME]
    assert (asking.is_admitted, slots.used[b"qg1:{user=a}:b"], slots.used[b"qg1:{ip=1}:b"]) == (True, 1, 1)


def test_refusal_seen_by_the_peek_charges_nothing_and_refreshes() -> None:
    slots = Slots()
    slots.used[b"qg1:{ip=1}:b"] = LIMIT
    asking = run_all(slots, plan_for("user=a", "ip=1"))
    assert asking.phases == [Phase.PEEK]
    assert asking.answer is not None
    assert asking.answer.refreshes
    assert slots.used[b"qg1:{user=a}:b"] == 0


@pytest.mark.parametrize("more", [{"enforcement": "delay"}, {"mode": "record"}, {"mode": "refund"}])
def test_what_cannot_be_refused_is_charged_everywhere_at_once(more: dict[str, Any]) -> None:
    assert run_all(Slots(), plan_for("user=a", "ip=1", **more)).phases == [Phase.CHARGE]


def test_refusal_after_the_peek_undoes_what_was_charged() -> None:
    slots = Slots()
    asking = Asking(plan_for("user=a", "ip=1"))
    asking.step([slots.answer(part) for part in asking.wants])
    asking.step([slots.answer(part) for part in asking.wants])
    slots.used[b"qg1:{user=a}:b"] = LIMIT
    while asking.wants:
        asking.step([slots.answer(part) for part in asking.wants])
    assert asking.phases[-1] == Phase.UNDO
    assert asking.answer is not None
    assert not asking.is_admitted
    assert [each.given for each in asking.answer.undone] == [1]
    assert slots.used[b"qg1:{ip=1}:b"] == 0


def test_lost_slot_is_answered_by_policy_and_the_others_charged() -> None:
    slots = Slots()
    slots.away = {slot_of(b"{ip=1}")}
    asking = run_all(slots, plan_for("user=a", "ip=1"))
    assert asking.answer is not None
    assert (asking.is_admitted, asking.answer.failure, asking.answer.is_charged) == (True, AWAY, True)
    assert [result.reason for result in asking.answer.results] == [None, "store_failure"]
    assert slots.used[b"qg1:{user=a}:b"] == 1
    refused = run_all(slots, plan_for("user=a", "ip=1", on_store_failure="throttle"))
    assert not refused.is_admitted
    assert slots.used[b"qg1:{user=a}:b"] == 1, "nothing is charged if a lost quota's policy throttles"


def test_lost_home_of_an_ask_with_an_id_charges_nothing_anywhere() -> None:
    slots = Slots()
    slots.away = {slot_of(b"{user=a}")}
    asking = run_all(slots, plan_for("user=a", "ip=1", retry=("a", b"1"), context=b"c"))
    assert asking.answer is not None
    assert (asking.is_admitted, asking.answer.is_charged) == (True, False)
    assert slots.used.total() == 0


def test_shed_part_undoes_the_others_and_refuses_the_request() -> None:
    slots = Slots()
    asking = Asking(plan_for("user=a", "ip=1", "ip=2"))
    asking.step([slots.answer(part) for part in asking.wants])
    first, second = asking.wants
    asking.step([slots.answer(first), OverloadedError("age")])
    assert second.slot != first.slot
    asking.step([slots.answer(part) for part in asking.wants])
    assert isinstance(asking.error, OverloadedError)
    assert slots.used.total() == 0


def test_shed_part_of_a_record_undoes_the_others_and_of_a_refund_does_not() -> None:
    for mode, left in (("record", 0), ("refund", -1)):
        slots = Slots()
        asking = Asking(plan_for("user=a", "ip=1", mode=mode))
        first, _ = asking.wants
        asking.step([slots.answer(first), OverloadedError("age")])
        while asking.wants:
            asking.step([slots.answer(part) for part in asking.wants])
        assert slots.used[first.plan.charges[0].key] == left
        assert (asking.error is None) == (mode == "refund"), "a request that is shed has charged nothing"


def test_kept_answer_has_the_results_of_all_slots() -> None:
    """As the script keeps it: the context of the home slot, then its results."""
    slots = Slots()
    asking = run_all(slots, plan_for("user=a", "ip=1", retry=("a", b"1"), context=b"\x93own"))
    (kept,) = slots.kept.values()
    assert kept.kept is not None
    results = bytes(51)
    packed = b"\1" + len(kept.kept).to_bytes(2, "little") + kept.kept + results
    answer = decode_answer(packed)
    assert asking.answer is not None
    assert answer.kept == b"\x93own"
    assert len(answer.results) == len(asking.answer.results) == 2
    assert [result.outcome for result in answer.results] == ["admit", "admit"]


@pytest.mark.parametrize("seed", range(60))
def test_any_interleaving_admits_no_more_than_the_limits(seed: int) -> None:
    """Parts are lost before or after they are done, retries come twice, and asks stop midway."""
    chance = random.Random(seed)
    slots = Slots()
    plans = [_random_plan(chance, number) for number in range(80)]
    waiting: list[Asking] = []
    finished: list[Asking] = []
    lost = Counter[bytes]()
    """The units that a lost part may have charged, or that a lost undo may have left."""
    while plans or waiting:
        if plans and (not waiting or chance.random() < 0.3):
            waiting.append(Asking(plans.pop()))
            continue
        asking = chance.choice(waiting)
        asking.step([_came(slots, part, chance, lost) for part in asking.wants])
        if not asking.wants:
            waiting.remove(asking)
            finished.append(asking)
    _check(slots, finished, lost)


def _random_plan(chance: random.Random, number: int) -> Plan:
    buckets = chance.sample(("user=a", "ip=1", "ip=2", "listener=L"), chance.randint(1, 3))
    if chance.random() < 0.4:
        twin = b"%d" % (number // 2)
        return plan_for("user=a", "ip=1", retry=("a", twin), context=b"\x93")
    return plan_for(*buckets, mode=chance.choice(("admit", "admit", "admit", "peek")))


def _came(slots: Slots, part: SlotPlan, chance: random.Random, lost: Counter[bytes]) -> SlotResult:
    fate = chance.random()
    if fate < 0.03:
        return AWAY if chance.random() < 0.7 else OverloadedError("age")
    before = slots.used.copy()
    came = slots.answer(part)
    if fate < 0.06:
        for key in part_keys([part]):
            lost[key] += abs(slots.used[key] - before[key])
        return AWAY
    return came


def part_keys(parts: Sequence[SlotPlan]) -> list[bytes]:
    return [charge.key for part in parts for charge in part.plan.charges]


def _check(slots: Slots, finished: Sequence[Asking], lost: Counter[bytes]) -> None:
    admitted = Counter[bytes]()
    once: set[bytes] = set()
    for asking in finished:
        answer = asking.answer
        if asking.plan.mode != "admit" or answer is None or not asking.is_admitted or not answer.is_charged:
            continue
        if asking.plan.retry is not None:
            if answer.kept is not None:
                continue  # it charged nothing
            if answer.failure is None:
                assert asking.plan.retry[1] not in once, "twins were charged twice"
                once.add(asking.plan.retry[1])
        for charge, result in zip(asking.plan.charges, answer.results, strict=True):
            admitted[charge.key] += result.reason is None
    for key, used in slots.used.items():
        undos_lost = sum(
            each.key == key and each.given == 0
            for asking in finished
            if asking.answer is not None
            for each in asking.answer.undone
        )
        shed = sum(
            asking.error is not None and key in part_keys([SlotPlan(0, asking.plan)]) for asking in finished
        )
        assert admitted[key] <= used <= LIMIT, (key, admitted[key], used)
        assert used <= admitted[key] + lost[key] + undos_lost + shed, "more is orphaned than was lost"


def lease_for(*buckets: str, wish: float = 12, name: bytes = b"l" * 16) -> Plan:
    charges = tuple(structs.replace(charge_of(bucket), usage=wish) for bucket in buckets)
    return Plan("hold", charges, lease=(name, 500))


def granted(asking: Asking) -> float:
    """The units that an ask for a lease was granted in each bucket; 0 if it was refused."""
    answer = asking.answer
    if answer is None or answer.failure is not None or not asking.is_admitted:
        return 0
    units = {result.granted for result in answer.results if isinstance(result, LeaseResult)}
    assert len(units) == 1, "a lease has the same in each bucket"
    return units.pop()


def test_lease_is_peeked_at_and_held_at_home_last_with_the_least() -> None:
    slots = Slots()
    slots.used[b"qg1:{ip=1}:b"] = 8
    asking = run_all(slots, lease_for("user=a", "ip=1"))
    assert asking.phases == [Phase.PEEK, Phase.CHARGE, Phase.HOME]
    assert granted(asking) == slots.held(b"qg1:{user=a}:b") == slots.held(b"qg1:{ip=1}:b") == 6


def test_lease_refused_by_the_peek_holds_nothing() -> None:
    slots = Slots()
    slots.used[b"qg1:{ip=1}:b"] = LIMIT
    asking = run_all(slots, lease_for("user=a", "ip=1"))
    assert (asking.phases, asking.is_admitted, slots.held(b"qg1:{user=a}:b")) == ([Phase.PEEK], False, 0)


def test_lease_refused_at_home_is_released_elsewhere() -> None:
    slots = Slots()
    asking = Asking(lease_for("user=a", "ip=1"))
    for _ in range(2):
        asking.step([slots.answer(part) for part in asking.wants])
    assert slots.held(b"qg1:{ip=1}:b") == 10
    slots.used[b"qg1:{user=a}:b"] = LIMIT
    while asking.wants:
        asking.step([slots.answer(part) for part in asking.wants])
    assert (asking.phases[-1], asking.is_admitted) == (Phase.UNDO, False)
    assert slots.held(b"qg1:{ip=1}:b") == 0
    assert asking.answer is not None
    (released,) = asking.answer.released
    assert (released.units, released.released_ms) == (10, 0)


def test_lease_that_home_grants_less_of_is_cut_elsewhere() -> None:
    slots = Slots()
    asking = Asking(lease_for("user=a", "ip=1"))
    for _ in range(2):
        asking.step([slots.answer(part) for part in asking.wants])
    slots.used[b"qg1:{user=a}:b"] = 14
    while asking.wants:
        asking.step([slots.answer(part) for part in asking.wants])
    assert granted(asking) == slots.held(b"qg1:{user=a}:b") == slots.held(b"qg1:{ip=1}:b") == 3


def test_lease_is_refused_if_others_are_quicker_each_time() -> None:
    slots = Slots()
    asking = Asking(lease_for("user=a", "ip=1", "ip=2"))
    for _ in range(2):
        asking.step([slots.answer(part) for part in asking.wants])
    taken = 0
    while asking.wants:
        if asking.wants[0].plan.mode == "hold":
            key = asking.wants[0].plan.charges[0].key
            slots.used[key] = LIMIT - max(8 - 2 * taken, 1)
            taken += 1
        asking.step([slots.answer(part) for part in asking.wants])
    assert (asking.is_admitted, taken) == (False, 4)
    assert not any(map(slots.held, slots.holds))


def test_lease_with_a_lost_slot_is_decided_by_policy_and_holds_nothing() -> None:
    for policy, admits in (("admit", True), ("throttle", False)):
        slots = Slots()
        charges = tuple(charge_of(bucket, on_store_failure=policy) for bucket in ("user=a", "ip=1"))
        asking = Asking(Plan("hold", charges, lease=(b"l" * 16, 500)))
        asking.step([slots.answer(part) for part in asking.wants])
        slots.away = {slot_of(b"{user=a}")}
        while asking.wants:
            asking.step([slots.answer(part) for part in asking.wants])
        assert asking.answer is not None
        assert (asking.is_admitted, asking.answer.failure) == (admits, AWAY)
        assert not any(map(slots.held, slots.holds))


def race_leases(seed: int) -> None:
    """Interleave leases, settlements and asks at random, and lose parts; check the held and used units.

    Raises:
        AssertionError: more is used than the limit, or the held units differ from the granted ones.
    """
    chance = random.Random(seed)
    slots = Slots()
    lost = Counter[bytes]()
    unsure = set[tuple[bytes, bytes]]()
    """The buckets and leases of parts that were lost."""
    admitted = Counter[bytes]()
    plans = [_plan_beside_leases(chance, number) for number in range(60)]
    waiting: list[Asking] = []
    while plans or waiting:
        if plans and (not waiting or chance.random() < 0.3):
            waiting.append(Asking(plans.pop()))
            continue
        asking = chance.choice(waiting)
        came = []
        for part in asking.wants:
            came.append(_came(slots, part, chance, lost))
            if part.plan.lease is not None and not isinstance(came[-1], Answer):
                unsure |= {(charge.key, part.plan.lease[0]) for charge in part.plan.charges}
        asking.step(came)
        for charge in asking.plan.charges:
            assert slots.used[charge.key] + slots.held(charge.key) <= LIMIT
        if asking.wants:
            continue
        waiting.remove(asking)
        if asking.plan.lease is None:
            if asking.is_admitted and asking.answer is not None and asking.answer.is_charged:
                admitted.update(charge.key for charge in asking.plan.charges)
            continue
        name, units = asking.plan.lease[0], granted(asking)
        for charge in asking.plan.charges:
            if (charge.key, name) not in unsure:
                held = slots.holds.get(charge.key, {}).get(name, 0)
                assert held == units, f"{held} are held in {charge.key!r} of {units} that were granted"
        if units and chance.random() < 0.7:
            spent = chance.randint(0, int(units))
            charges = tuple(structs.replace(charge, usage=spent) for charge in asking.plan.charges)
            plans.append(Plan("settle", charges, lease=(name, 0)))


def race_many(seeds: int) -> None:
    for seed in range(seeds):
        race_leases(seed)


def _plan_beside_leases(chance: random.Random, number: int) -> Plan:
    buckets = chance.sample(("user=a", "ip=1", "ip=2", "listener=L"), chance.randint(2, 3))
    if chance.random() < 0.7:
        return lease_for(*buckets, wish=chance.randint(1, 12), name=b"%016d" % number)
    return plan_for(*buckets)


@pytest.mark.parametrize("seed", range(40))
def test_any_interleaving_of_leases_holds_what_it_grants(seed: int) -> None:
    race_leases(seed)


FAULTS = {
    "a refused lease that stays held": ("        yield from ask.release(ask.all)\n", "        pass\n"),
    "a lease that is not cut to the least": (
        "if ask.is_in_vain() or not (larger := ask.beyond_the_least()):",
        "if larger := ():",
    ),
    "a lease that is cut and held in addition to the first one": (
        "        yield from ask.release(larger)\n",
        "",
    ),
    "a lease of what slots answered that are not lost": (
        "return self.is_over() or bool(self.lost) or self._has_no_room()",
        "return self.is_over()",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_in_leases_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    faulty = planted(several_slots, *FAULTS[fault])
    monkeypatch.setitem(globals(), "decide", faulty["decide"])
    monkeypatch.setitem(globals(), "Phase", faulty["Phase"])
    with pytest.raises(AssertionError):
        race_many(200)
