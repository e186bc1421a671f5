"""Decides one ask whose buckets are in several slots of a cluster: peek, charge, home last, undo.

A script call takes keys of one slot. So the charges of such an ask are made slot by slot, yet the ask is
admitted only if all of them are made:

1. *Peek*: all slots are peeked at, and the *home* slot is asked for a kept answer. A refusal is the answer.
2. *Charge* the other slots, each by an atomic check and charge.
3. *Home* is charged last. It keeps the whole answer.
4. If 2 or 3 refuse, or home has a kept answer, the charges are *undone* (``app.domain.undo``).

A lease is held in the same way: *peek* at the grant of each bucket, *hold* the smallest grant in all of them,
home last, and *release* the holds if a slot refuses. A release always frees the whole hold
(``app.domain.holds``), so it needs no stamps. If a release fails, the hold lasts until the lease ends.

Asks that cannot be refused, and that keep no answer, are charged everywhere at once. For a slot whose
primary is away, the quotas' own ``on_store_failure`` decides.

This module does no I/O: the generator ``decide`` yields plans to send at once, and is sent their results.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from enum import IntEnum
from typing import Final, NamedTuple

from msgspec import structs

from app.admission.errors import AdmissionError
from app.domain.decision import BYTE_RATES, Outcome
from app.domain.slots import SlotGroup, SlotGroups, groups_of
from app.store.encoding import release_plan, undo_plan, unknown_result, with_other_slots
from app.store.port import (
    Answer,
    Charge,
    ChargeResult,
    LeaseResult,
    Plan,
    Released,
    StoreError,
    Undone,
    UndoResult,
    UnitsResult,
)

MOVED_BACK: Final = 2
"""The correction of a bucket whose times moved back with a clock."""

NEVER_UNDONE: Final = ("refund", "settle")
"""The modes that give back or settle; they cause no delay."""

REFUSING: Final = ("throttle", "reject")

HOLD_AGAIN: Final = 3
"""How often a lease is reduced to the smallest grant: concurrent asks may take units each time."""


class Phase(IntEnum):
    """The phases of an ask, in their order."""

    PEEK = 0
    CHARGE = 1
    HOME = 2
    UNDO = 3


class SlotPlan(NamedTuple):
    """The part of a plan that is in one slot."""

    slot: int
    plan: Plan


SlotResult = Answer | StoreError | AdmissionError
"""The result of a part: an answer, or an error. After an ``AdmissionError`` nothing was charged."""

Steps = Generator[tuple[Phase, list[SlotPlan]], list[SlotResult], Answer]


def groups_in(slots: Sequence[int], principal: int | None, kept: int | None) -> SlotGroups:
    """The charges of an ask by slot.

    Args:
        slots: of the charges, in order.
        principal: the slot of the principal; None without one.
        kept: the slot of the kept answer; None without an id.
    """
    home = kept
    if home is None and principal in slots:
        home = principal
    return groups_of(slots, home)


def decide(plan: Plan, groups: SlotGroups, *, sequential: bool = False) -> Steps:
    """Decide an ask.

    Args:
        sequential: add delays up as KIP-124 does. Request rates are judged as of the end of the byte delay,
            so the byte rates are peeked at first.

    Yields:
        a phase, and the plans to send at once. Send their results back, in the same order.

    Returns:
        the answer to the whole plan.

    Raises:
        AdmissionError: nothing is charged.
    """
    ask = _Ask(plan, groups, sequential=sequential)
    if plan.mode == "hold":
        return (yield from _hold(ask))
    if ask.sums and plan.retry is None and (plan.mode == "peek" or _cannot_be_refused(plan)):
        of_bytes = ask.byte_groups()
        ask.took(of_bytes, (yield Phase.PEEK, ask.parts(of_bytes, mode="peek")))
    if plan.mode == "peek":
        ask.took(ask.all, (yield Phase.PEEK, ask.parts(ask.all)))
        return ask.answer()
    if plan.retry is None and _cannot_be_refused(plan):
        ask.charged(
            ask.all, (yield Phase.CHARGE, ask.parts(ask.all, stamped=plan.mode not in {"refund", "settle"}))
        )
        return (yield from _ended(ask))
    if plan.mode == "refund":
        return (yield from _refund(ask))
    return (yield from _charge(ask))


def _refund(ask: _Ask) -> Steps:
    """Refund at home first: its kept answer shows whether the refund was made before."""
    home, others = ask.groups
    (came,) = yield Phase.PEEK, [ask.at_home("refund")]
    if isinstance(came, Answer) and came.kept is not None:
        return came
    ask.charged((home,), [came])
    if isinstance(came, StoreError):
        ask.failed(others, came)  # whether the refund was made before is unknown
    elif others and not ask.is_over():
        ask.charged(others, (yield Phase.CHARGE, ask.parts(others)))
    return ask.answer()


def _charge(ask: _Ask) -> Steps:
    """Peek, charge, home last; undo the charges if a slot refuses or home has a kept answer."""
    plan, (home, others) = ask.plan, ask.groups
    only_kept = plan.mode == "record"  # a record is never refused
    peeks = ask.all
    if only_kept:
        peeks = (*(ask.byte_groups() if ask.sums else ()), SlotGroup(home.slot, ()))
    came = yield Phase.PEEK, [*ask.parts(peeks[:-1], mode="peek"), ask.at_home("peek", only_kept=only_kept)]
    if isinstance(came[-1], Answer) and came[-1].kept is not None:
        return came[-1]
    ask.took(peeks, came)
    home_is_lost = not isinstance(came[-1], Answer)
    if home_is_lost and only_kept:
        ask.took((home,), came[-1:])
    if ask.sums and ask.is_refused() and not ask.lost:  # the first peek knew of no byte delay in other slots
        again = tuple(group for group in ask.all if group.places)
        ask.took(again, (yield Phase.PEEK, ask.parts(again, mode="peek")))
    if ask.is_over() or (home_is_lost and plan.retry is not None):
        ask.refreshes = True
        yield from ask.write_reckoned()
        return ask.answer()

    reached = tuple(group for group in others if group.slot not in ask.lost)
    if reached:
        ask.charged(reached, (yield Phase.CHARGE, ask.parts(reached, stamped=True)))
    if ask.is_over():
        ask.refreshes = True
    elif not home_is_lost:
        (at_home,) = yield Phase.HOME, [ask.at_home(plan.mode)]
        if isinstance(at_home, Answer) and at_home.kept is not None:
            yield from ask.undo()
            return structs.replace(
                at_home, undone=ask.undone, earlier=structs.replace(ask.answer(), undone=())
            )
        ask.charged((home,), [at_home])
        if not isinstance(at_home, Answer) and plan.retry is not None:
            # Home may or may not keep an answer, so no charge that belongs to it may stay.
            yield from ask.undo()
    return (yield from _ended(ask))


def _hold(ask: _Ask) -> Steps:
    """Peek, hold the smallest grant, home last; release the holds if no lease is granted."""
    home, others = ask.groups
    ask.took(ask.all, (yield Phase.PEEK, ask.parts(ask.all, mode="peek_hold")))
    ask.would_hold()
    if ask.is_in_vain():
        yield from ask.write_reckoned()
        return ask.answer()
    if others:
        ask.held(others, (yield Phase.CHARGE, ask.holds(others)))
    if not ask.is_in_vain():
        ask.held((home,), (yield Phase.HOME, ask.holds((home,))))
    for _ in range(HOLD_AGAIN):
        if ask.is_in_vain() or not (larger := ask.beyond_the_least()):
            break
        yield from ask.release(larger)
        ask.held(larger, (yield Phase.UNDO, ask.holds(larger)))
    if not ask.is_in_vain() and (larger := ask.beyond_the_least()):
        ask.throttle(larger)
    if ask.is_in_vain():
        yield from ask.release(ask.all)
    return ask.answer()


def _ended(ask: _Ask) -> Steps:
    if ask.is_over():
        yield from ask.undo()
    return ask.answer()


class _Ask:
    """The state of an ask while it is decided.

    Attributes:
        lost: the slots that did not answer.
        error: why nothing is decided, if a part was shed or its caller left.
        undone: the charges that were taken back.
        units: for each charge of a lease the units that are held, or would be, in the limit's unit.
        refreshes: whether the seen ids must still be refreshed, as after any refusal.
    """

    def __init__(self, plan: Plan, groups: SlotGroups, *, sequential: bool) -> None:
        self.plan = plan
        self.groups = groups
        self.all = (*groups.others, groups.home)
        self.results = [unknown_result(plan.mode, charge) for charge in plan.charges]
        self.orders: list[int | None] = [None] * len(plan.charges)
        self.id_outcomes = b""
        self.at_ms = 0
        self.lost: dict[int, StoreError] = {}
        self.error: AdmissionError | None = None
        self.undone: tuple[Undone, ...] = ()
        self.units = [charge.usage for charge in plan.charges]
        self.refreshes = False
        self.sums = sequential and plan.mode not in NEVER_UNDONE and len(self.byte_groups()) > 0
        """Whether the byte delay counts for the other quotas."""
        self._stamped: list[tuple[SlotGroup, Answer]] = []
        """The charges that can be undone."""
        self._held: dict[int, Answer] = {}
        """The answers to the present holds, by slot."""
        self._released: list[Released] = []
        self._found_ended: set[int] = set()
        """The charges in whose buckets a peek found leases that were over."""
        self._is_charged = False

    def parts(
        self, groups: Sequence[SlotGroup], *, mode: str | None = None, stamped: bool = False
    ) -> list[SlotPlan]:
        """The plan's part of each group, without its kept answer."""
        return [SlotPlan(group.slot, self._part(group, mode, stamped=stamped)) for group in groups]

    def byte_groups(self) -> tuple[SlotGroup, ...]:
        """The groups that have byte rates."""
        keys = [charge.quota.key for charge in self.plan.charges]
        return tuple(group for group in self.all if any(keys[place] in BYTE_RATES for place in group.places))

    def _byte_delay_ms(self) -> int:
        """The largest delay of a byte rate in the results so far."""
        if not self.sums:
            return 0
        return max(
            (
                result.throttle_ms
                for charge, result in zip(self.plan.charges, self.results, strict=True)
                if charge.quota.key in BYTE_RATES
                and not charge.quota.shadow
                and result.outcome == "delay"
                and result.reason is None
            ),
            default=0,
        )

    def at_home(self, mode: str, *, only_kept: bool = False) -> SlotPlan:
        """The part of the home slot, which asks for the kept answer, and keeps one.

        Args:
            only_kept: only ask for the kept answer.
        """
        home, others = self.groups
        if only_kept:
            home = SlotGroup(home.slot, ())
        part = self._part(home, mode)
        if self.plan.retry is None or (mode != "peek" and (self.lost or self._has_no_room())):
            return SlotPlan(home.slot, part)  # an answer that was made by policy is not kept
        places = [place for group in others for place in group.places]
        context = self.plan.context
        if places:
            context = with_other_slots(context, places, [self.results[place] for place in places])
        return SlotPlan(
            home.slot,
            structs.replace(part, retry=self.plan.retry, context=context, keeps=mode != "peek"),
        )

    def _part(self, group: SlotGroup, mode: str | None, *, stamped: bool = False) -> Plan:
        charges = tuple(self.plan.charges[place] for place in group.places)
        return structs.replace(
            self.plan,
            mode=self.plan.mode if mode is None else mode,
            charges=charges,
            retry=None,
            context=b"",
            stamped=stamped,
            byte_delay_ms=self._byte_delay_ms(),
        )

    def took(self, groups: Sequence[SlotGroup], came: Sequence[SlotResult], *, wrote: bool = False) -> None:
        """Receive the results of parts.

        Args:
            wrote: whether the parts were no peeks, so that the ended leases that they found are written.
        """
        for group, slot_result in zip(groups, came, strict=True):
            if isinstance(slot_result, AdmissionError):
                self.error = self.error or slot_result
            elif isinstance(slot_result, StoreError):
                self.failed((group,), slot_result)
            elif slot_result.error is not None:
                self.failed((group,), slot_result.error)
            else:
                self.at_ms = max(self.at_ms, slot_result.at_ms)
                for place, result in zip(group.places, slot_result.results, strict=True):
                    self.results[place] = result if wrote else self._as_peeked(place, result)
                    self.orders[place] = slot_result.order
                if slot_result.id_outcomes:
                    self.id_outcomes = slot_result.id_outcomes

    def charged(self, groups: Sequence[SlotGroup], came: Sequence[SlotResult]) -> None:
        """Receive the results of parts that were sent to be charged."""
        if self.plan.mode == "refund" and (self._is_charged or not _are_all_shed(came)):
            # A refund cannot be undone, so the request is not refused.
            came = [
                StoreError("budget") if isinstance(slot_result, AdmissionError) else slot_result
                for slot_result in came
            ]
        self.took(groups, came, wrote=True)
        for group, slot_result in zip(groups, came, strict=True):
            if isinstance(slot_result, Answer) and slot_result.error is None and not self._refuses(group):
                self._is_charged = True
                if slot_result.stamps:
                    self._stamped.append((group, slot_result))

    def failed(self, groups: Sequence[SlotGroup], error: StoreError) -> None:
        """Answer parts by the policies of their quotas."""
        for group in groups:
            self.lost[group.slot] = error
            for place in group.places:
                charge = self.plan.charges[place]
                self.results[place] = structs.replace(
                    unknown_result(self.plan.mode, charge),
                    outcome=_outcome_without_store(self.plan, charge),
                    reason="store_failure",
                )

    def is_over(self) -> bool:
        """Whether nothing more is to be charged: a quota refuses the ask, or a part was shed."""
        return self.error is not None or self.is_refused()

    def is_refused(self) -> bool:
        """Whether a quota refuses the ask."""
        return any(map(self._refuses, self.all))

    def undo(self) -> Generator[tuple[Phase, list[SlotPlan]], list[SlotResult], None]:
        """Undo the charges; the results are only recorded."""
        stamped, self._stamped, self._is_charged = self._stamped, [], False
        plans = []
        undone: list[tuple[int, Undone]] = []
        for group, answer in stamped:
            charges = [self.plan.charges[place] for place in group.places]
            full = [result.reason == "store_full" for result in answer.results]
            pairs = [
                (charge, stamp)
                for charge, stamp, is_full in zip(charges, answer.stamps, full, strict=True)
                if not is_full
            ]
            plan = undo_plan(pairs, self.plan.at_ms)
            if plan is not None:
                plans.append(SlotPlan(group.slot, plan))
            undone += [
                (group.slot, Undone(charge.key, answer.order, int(stamp.at_ms), stamp.taken))
                for charge, stamp in pairs
            ]
        came = (yield Phase.UNDO, plans) if plans else []
        places = {charge.key: place for place, charge in enumerate(self.plan.charges)}
        given: dict[bytes, tuple[float, int | None]] = {}
        for (_, plan), slot_result in zip(plans, came, strict=True):
            if isinstance(slot_result, Answer) and slot_result.error is None:
                for charge, result in zip(plan.charges, slot_result.results, strict=True):
                    assert isinstance(result, UndoResult)
                    given[charge.key] = result.given_back, slot_result.order
                    if result.given_back or result.forgiven:  # else the undo wrote nothing
                        self._lapsed_too(places[charge.key], result.lapsed)
        self.undone = tuple(
            each._replace(given=given[each.key][0], undo_order=given[each.key][1])
            if each.key in given
            else each
            for _, each in undone
        )

    def holds(self, groups: Sequence[SlotGroup]) -> list[SlotPlan]:
        """The parts that hold the smallest grant of the buckets."""
        least = self._least()
        plans = []
        for slot, part in self.parts(groups):
            charges = tuple(
                structs.replace(charge, usage=least.get(_field(charge), charge.usage))
                for charge in part.charges
            )
            plans.append(SlotPlan(slot, structs.replace(part, charges=charges)))
        return plans

    def would_hold(self) -> None:
        """Note the grant of each bucket in the results of a peek."""
        for place, (charge, result) in enumerate(zip(self.plan.charges, self.results, strict=True)):
            if isinstance(result, LeaseResult) and not charge.quota.shadow:
                self.units[place] = result.granted

    def held(self, groups: Sequence[SlotGroup], came: Sequence[SlotResult]) -> None:
        """Receive the results of holds; a bucket may grant fewer units than the peek said, never more."""
        asked = self._least()
        lapsed = [result.lapsed if isinstance(result, UnitsResult) else 0.0 for result in self.results]
        self.took(groups, came, wrote=True)
        for group, slot_result in zip(groups, came, strict=True):
            for place in group.places:  # a slot may get two holds, and each finds leases that ended before it
                self._lapsed_too(place, lapsed[place])
            if not isinstance(slot_result, Answer) or slot_result.error is not None:
                continue
            if self._refuses(group) or any(result.reason == "store_full" for result in slot_result.results):
                continue
            self._held[group.slot] = slot_result
            results = {place: self.results[place] for place in group.places}
            own = self._least(
                group.places,
                {place: each.granted for place, each in results.items() if isinstance(each, LeaseResult)},
            )
            for place in group.places:
                charge = self.plan.charges[place]
                field = _field(charge)
                self.units[place] = own.get(field, asked.get(field, charge.usage))

    def is_in_vain(self) -> bool:
        """Whether no lease is granted: a quota refuses it, a slot is lost, or a bucket has no room."""
        return self.is_over() or bool(self.lost) or self._has_no_room()

    def beyond_the_least(self) -> tuple[SlotGroup, ...]:
        """The groups that hold more than the smallest grant."""
        least = self._least()
        return tuple(
            group
            for group in self.all
            if any(
                self.units[place] > least.get(_field(self.plan.charges[place]), self.units[place])
                for place in group.places
            )
        )

    def throttle(self, groups: Sequence[SlotGroup]) -> None:
        """Refuse a lease, as concurrent asks took units each time; the caller may ask again at once."""
        for group in groups:
            for place in group.places:
                if not self.plan.charges[place].quota.shadow:
                    self.results[place] = structs.replace(
                        self.results[place], outcome="throttle", throttle_ms=1
                    )

    def release(
        self, groups: Sequence[SlotGroup]
    ) -> Generator[tuple[Phase, list[SlotPlan]], list[SlotResult], None]:
        """Free the holds of groups; a failure is only recorded, since the hold then ends with the lease."""
        groups = tuple(group for group in groups if group.slot in self._held)
        if not groups:
            return
        plans = [SlotPlan(slot, release_plan(part)) for slot, part in self.parts(groups)]
        came = yield Phase.UNDO, plans
        for group, slot_result in zip(groups, came, strict=True):
            held = self._held.pop(group.slot)
            freed = slot_result if isinstance(slot_result, Answer) and slot_result.error is None else None
            for at, place in enumerate(group.places):
                charge, units = self.plan.charges[place], self.units[place]
                if units > 0:
                    released = Released(charge.key, units, held.order, held.at_ms)
                    if freed is not None:
                        released = released._replace(release_order=freed.order, released_ms=freed.at_ms)
                    self._released.append(released)
                if freed is not None:
                    now = freed.results[at]
                    assert isinstance(now, LeaseResult)
                    self.results[place] = structs.replace(self.results[place], held=now.held)
                    self._lapsed_too(place, now.lapsed)

    def _lapsed_too(self, place: int, units: float) -> None:
        """Add to the lapsed units of a bucket that an ask writes more than once."""
        result = self.results[place]
        if units and isinstance(result, UnitsResult):
            self.results[place] = structs.replace(result, lapsed=result.lapsed + units)

    def _least(
        self, places: Sequence[int] | None = None, units: Mapping[int, float] | None = None
    ) -> dict[str, float]:
        """The smallest grant by usage field; shadow quotas follow the others."""
        least: dict[str, float] = {}
        for place in range(len(self.plan.charges)) if places is None else places:
            charge = self.plan.charges[place]
            if not charge.quota.shadow:
                field = _field(charge)
                granted = self.units[place] if units is None else units[place]
                least[field] = min(least.get(field, granted), granted)
        return least

    def _as_peeked(self, place: int, result: ChargeResult) -> ChargeResult:
        """The result of a peek; leases that it found ended are counted once their end is written.

        A record is never refused: where a limit of 0 refuses the peek, the record gets the longest delay.
        """
        if self.plan.mode == "record" and result.outcome == "reject":
            longest = self.plan.charges[place].quota.longest_delay_ms
            result = structs.replace(result, outcome="delay", throttle_ms=longest, reason=None, largest=0.0)
        if not isinstance(result, UnitsResult) or not result.lapsed:
            return result
        self._found_ended.add(place)
        return structs.replace(result, lapsed=0.0)

    def write_reckoned(self) -> Generator[tuple[Phase, list[SlotPlan]], list[SlotResult], None]:
        """Write changes that a peek only computes: times moved back with a clock, and ended leases.

        Otherwise each peek would restart the bucket's age at its own time, and the bucket would never age.
        """
        groups = []
        for group in self.all:
            places = tuple(
                place
                for place in group.places
                if place in self._found_ended or self.results[place].correction == MOVED_BACK
                if self.plan.charges[place].quota.algorithm != "producer_ids"  # they are refreshed
            )
            if places:
                groups.append(SlotGroup(group.slot, places))
        if not groups:
            return
        plans = [
            SlotPlan(
                group.slot,
                Plan(
                    "refresh",
                    tuple(self.plan.charges[place] for place in group.places),
                    at_ms=self.plan.at_ms,
                ),
            )
            for group in groups
        ]
        came = yield Phase.UNDO, plans
        for group, slot_result in zip(groups, came, strict=True):
            if isinstance(slot_result, Answer) and slot_result.error is None:
                for place, written in zip(group.places, slot_result.results, strict=True):
                    assert isinstance(written, UnitsResult)
                    self.results[place] = structs.replace(self.results[place], lapsed=written.lapsed)

    def answer(self) -> Answer:
        """The answer to the whole plan.

        Raises:
            AdmissionError: nothing is decided.
        """
        if self.error is not None:
            raise self.error
        failure = next(iter(self.lost.values()), None)
        return Answer(
            tuple(self.results),
            at_ms=self.at_ms,
            order=max((order for order in self.orders if order is not None), default=None),
            id_outcomes=self.id_outcomes,
            orders=tuple(self.orders),
            failure=failure,
            is_charged=self._is_charged,
            undone=self.undone,
            released=tuple(self._released),
            refreshes=self.refreshes,
        )

    def _refuses(self, group: SlotGroup) -> bool:
        return any(_refuses(self.plan.charges[place], self.results[place]) for place in group.places)

    def _has_no_room(self) -> bool:
        return any(result.reason == "store_full" for result in self.results)


def is_refusal(plan: Plan, answer: Answer) -> bool:
    """Whether a quota not in shadow mode refuses an ask; refunds and settlements are never refused."""
    if answer.kept is not None or plan.mode in NEVER_UNDONE:
        return False
    return any(map(_refuses, plan.charges, answer.results))  # an error has no results


def _refuses(charge: Charge, result: ChargeResult) -> bool:
    return result.outcome in REFUSING and not charge.quota.shadow


def _field(charge: Charge) -> str:
    """The usage field of a charge; a lease takes the same amount of each bucket with this field."""
    return charge.compiled.field


def _are_all_shed(came: Sequence[SlotResult]) -> bool:
    return all(isinstance(slot_result, AdmissionError) for slot_result in came)


def _cannot_be_refused(plan: Plan) -> bool:
    if plan.mode in {"record", "refund", "settle"}:
        return True
    return all(
        charge.quota.shadow or (charge.enforcement == "delay" and charge.quota.limit > 0)
        for charge in plan.charges
    )


def _outcome_without_store(plan: Plan, charge: Charge) -> Outcome:
    quota = charge.quota
    if plan.mode == "settle":
        return "reject"  # whether the lease was settled is unknown
    if plan.mode in {"record", "refund"}:
        return "admit"
    refuses = quota.on_store_failure == "throttle" or (quota.limit == 0 and charge.usage > 0)
    return "throttle" if refuses else "admit"
