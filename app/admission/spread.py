"""Decides one ask whose buckets are in several slots of a cluster: look, charge, home last, undo.

A script call takes keys of one slot. So the charges of such an ask are made slot by slot, and yet nobody is
admitted unless all of them are made:

1. *Look*: all slots are peeked at, and the *home* slot is asked for a kept answer. A refusal is the answer.
2. *Charge* the other slots, each by an atomic check and charge.
3. *Home* is charged last. It keeps the whole answer.
4. If 2 or 3 refuse, or home has a kept answer, what was charged is *undone* (``app.domain.undo``).

Asks that cannot be refused, and that keep no answer, are charged everywhere at once. A slot whose primary is
away is answered by the quotas' own ``on_store_failure``.

This module sends nothing: ``decide`` is a generator of what to send at once, and is sent what came.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from enum import IntEnum
from typing import Final, NamedTuple

from msgspec import structs

from app.admission.errors import AdmissionError
from app.domain.decision import BYTE_RATES, Outcome
from app.domain.slots import SlotGroup, SlotGroups, groups_of
from app.store.encoding import UNKNOWN_RESULT, spread_context, undo_plan
from app.store.port import Answer, Charge, ChargeResult, Plan, StoreError, Undone

MOVED_BACK: Final = 2
"""The correction of a bucket whose times moved back with a clock."""

NEVER_UNDONE: Final = ("refund", "settle")
"""The modes that give back or settle; they delay nobody."""

REFUSING: Final = ("throttle", "reject")


class Phase(IntEnum):
    """The phases of an ask, in their order."""

    LOOK = 0
    CHARGE = 1
    HOME = 2
    UNDO = 3


class SlotPlan(NamedTuple):
    """The part of a plan that is in one slot."""

    slot: int
    plan: Plan


Came = Answer | StoreError | AdmissionError
"""What came of a part: an answer, or why it is missing. After an ``AdmissionError`` nothing was charged."""

Steps = Generator[tuple[Phase, list[SlotPlan]], list[Came], Answer]


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
        sequential: add delays up as KIP-124 does: request rates are judged as of after the byte delay, so
            that is looked at first.

    Yields:
        what to send at once, and in which phase. It must be sent what came, in the same order.

    Returns:
        the answer to the whole plan.

    Raises:
        AdmissionError: nothing is charged.
    """
    ask = _Ask(plan, groups, sequential=sequential)
    if ask.sums and plan.retry is None and (plan.mode == "peek" or _cannot_be_refused(plan)):
        of_bytes = ask.byte_groups()
        ask.took(of_bytes, (yield Phase.LOOK, ask.parts(of_bytes, mode="peek")))
    if plan.mode == "peek":
        ask.took(ask.all, (yield Phase.LOOK, ask.parts(ask.all)))
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
    """Give back at home first, whose kept answer says whether that was done before."""
    home, others = ask.groups
    (came,) = yield Phase.LOOK, [ask.at_home("refund")]
    if isinstance(came, Answer) and came.kept is not None:
        return came
    ask.charged((home,), [came])
    if isinstance(came, StoreError):
        ask.failed(others, came)  # whether it was done before is unknown
    elif others and not ask.is_over():
        ask.charged(others, (yield Phase.CHARGE, ask.parts(others)))
    return ask.answer()


def _charge(ask: _Ask) -> Steps:
    """Look, charge, home last; undo if that was in vain."""
    plan, (home, others) = ask.plan, ask.groups
    only_kept = plan.mode == "record"  # it has no refusal
    looks = (SlotGroup(home.slot, ()),) if only_kept else ask.all
    came = yield Phase.LOOK, [*ask.parts(looks[:-1], mode="peek"), ask.at_home("peek", only_kept=only_kept)]
    if isinstance(came[-1], Answer) and came[-1].kept is not None:
        return came[-1]
    ask.took(looks, came)
    home_is_lost = not isinstance(came[-1], Answer)
    if home_is_lost and only_kept:
        ask.took((home,), came)
    if ask.is_over() or (home_is_lost and plan.retry is not None):
        ask.refreshes = True
        yield from ask.move_back()
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
            return structs.replace(at_home, undone=ask.undone)
        ask.charged((home,), [at_home])
        if not isinstance(at_home, Answer) and plan.retry is not None:
            # Whether it keeps an answer is unknown, so nothing that belongs to that may stay.
            yield from ask.undo()
    return (yield from _ended(ask))


def _ended(ask: _Ask) -> Steps:
    if ask.is_over():
        yield from ask.undo()
    return ask.answer()


class _Ask:
    """What is known of an ask so far.

    Attributes:
        lost: the slots that did not answer.
        error: why nothing is decided, if a part was shed or its caller left.
        undone: the charges that were taken back.
        refreshes: whether the seen ids are still to be refreshed, as a refusal does.
    """

    def __init__(self, plan: Plan, groups: SlotGroups, *, sequential: bool) -> None:
        self.plan = plan
        self.groups = groups
        self.all = (*groups.others, groups.home)
        self.results: list[ChargeResult] = [UNKNOWN_RESULT] * len(plan.charges)
        self.orders: list[int | None] = [None] * len(plan.charges)
        self.id_outcomes = b""
        self.at_ms = 0
        self.lost: dict[int, StoreError] = {}
        self.error: AdmissionError | None = None
        self.undone: tuple[Undone, ...] = ()
        self.refreshes = False
        self.sums = sequential and plan.mode not in NEVER_UNDONE and len(self.byte_groups()) > 0
        """Whether the byte delay counts for the other quotas."""
        self._stamped: list[tuple[SlotGroup, Answer]] = []
        """What was charged, and can be undone."""
        self._is_charged = False

    def parts(
        self, groups: Sequence[SlotGroup], *, mode: str | None = None, stamped: bool = False
    ) -> list[SlotPlan]:
        """The plan's part of each group, without its kept answer."""
        return [SlotPlan(group.slot, self._part(group, mode, stamped=stamped)) for group in groups]

    def byte_groups(self) -> tuple[SlotGroup, ...]:
        """The groups that have byte rates."""
        keys = [charge.applied.quota.key for charge in self.plan.charges]
        return tuple(group for group in self.all if any(keys[place] in BYTE_RATES for place in group.places))

    def _byte_delay_ms(self) -> int:
        """The largest delay that a byte rate gave, as far as it was looked at."""
        if not self.sums:
            return 0
        return max(
            (
                result.throttle_ms
                for charge, result in zip(self.plan.charges, self.results, strict=True)
                if charge.applied.quota.key in BYTE_RATES
                and not charge.applied.quota.shadow
                and result.outcome == "delay"
                and result.reason is None
            ),
            default=0,
        )

    def at_home(self, mode: str, *, only_kept: bool = False) -> SlotPlan:
        """The part of the home slot, which looks for the kept answer, and keeps one.

        Args:
            only_kept: do no more than look for it.
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
            context = spread_context(context, places, [self.results[place] for place in places])
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
            ids=0,
            stamped=stamped,
            byte_delay_ms=self._byte_delay_ms(),
        )

    def took(self, groups: Sequence[SlotGroup], came: Sequence[Came]) -> None:
        """Take what came of parts."""
        for group, its in zip(groups, came, strict=True):
            if isinstance(its, AdmissionError):
                self.error = self.error or its
            elif isinstance(its, StoreError):
                self.failed((group,), its)
            elif its.error is not None:
                self.failed((group,), its.error)
            else:
                self.at_ms = max(self.at_ms, its.at_ms)
                for place, result in zip(group.places, its.results, strict=True):
                    self.results[place], self.orders[place] = result, its.order
                if its.id_outcomes:
                    self.id_outcomes = its.id_outcomes

    def charged(self, groups: Sequence[SlotGroup], came: Sequence[Came]) -> None:
        """Take what came of parts that were to be charged."""
        if self.plan.mode == "refund" and (self._is_charged or not _are_all_shed(came)):
            # What was given back cannot be undone, so the request is not refused.
            came = [StoreError("budget") if isinstance(its, AdmissionError) else its for its in came]
        self.took(groups, came)
        for group, its in zip(groups, came, strict=True):
            if isinstance(its, Answer) and its.error is None and not self._refuses(group):
                self._is_charged = True
                if its.stamps:
                    self._stamped.append((group, its))

    def failed(self, groups: Sequence[SlotGroup], error: StoreError) -> None:
        """Answer parts by the policies of their quotas."""
        for group in groups:
            self.lost[group.slot] = error
            for place in group.places:
                self.results[place] = structs.replace(
                    UNKNOWN_RESULT,
                    outcome=_outcome_without_store(self.plan, self.plan.charges[place]),
                    reason="store_failure",
                )

    def is_over(self) -> bool:
        """Whether nothing more is to be charged: a quota refuses the ask, or a part was shed."""
        return self.error is not None or any(map(self._refuses, self.all))

    def undo(self) -> Generator[tuple[Phase, list[SlotPlan]], list[Came], None]:
        """Take back what was charged; what comes of it is only noted."""
        stamped, self._stamped, self._is_charged = self._stamped, [], False
        plans = []
        undone: list[tuple[int, Undone]] = []
        for group, its in stamped:
            charges = [self.plan.charges[place] for place in group.places]
            full = [result.reason == "store_full" for result in its.results]
            pairs = [
                (charge, stamp)
                for charge, stamp, is_full in zip(charges, its.stamps, full, strict=True)
                if not is_full
            ]
            plan = undo_plan(pairs, self.plan.at_ms)
            if plan is not None:
                plans.append(SlotPlan(group.slot, plan))
            undone += [
                (group.slot, Undone(charge.key, its.order, int(stamp.at_ms), stamp.taken))
                for charge, stamp in pairs
            ]
        came = (yield Phase.UNDO, plans) if plans else []
        given: dict[bytes, tuple[float, int | None]] = {}
        for (_, plan), its_answer in zip(plans, came, strict=True):
            if isinstance(its_answer, Answer) and its_answer.error is None:
                for charge, result in zip(plan.charges, its_answer.results, strict=True):
                    given[charge.key] = result.given, its_answer.order
        self.undone = tuple(
            each._replace(given=given[each.key][0], undo_order=given[each.key][1])
            if each.key in given
            else each
            for _, each in undone
        )

    def move_back(self) -> Generator[tuple[Phase, list[SlotPlan]], list[Came], None]:
        """Write what a look only reckons: that times in buckets move back with a clock.

        Else each look would take its own time for that of the last charge, and the bucket would never age.
        """
        plans = []
        for group in self.all:
            charges = tuple(
                self.plan.charges[place]
                for place in group.places
                if self.results[place].correction == MOVED_BACK
                and self.plan.charges[place].applied.quota.algorithm != "producer_ids"  # they are refreshed
            )
            if charges:
                moved = Plan("refresh", charges, at_ms=self.plan.at_ms)
                plans.append(SlotPlan(group.slot, moved))
        if plans:
            yield Phase.UNDO, plans

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
            refreshes=self.refreshes,
        )

    def _refuses(self, group: SlotGroup) -> bool:
        return any(
            self.results[place].outcome in REFUSING and not self.plan.charges[place].applied.quota.shadow
            for place in group.places
        )

    def _has_no_room(self) -> bool:
        return any(result.reason == "store_full" for result in self.results)


def _are_all_shed(came: Sequence[Came]) -> bool:
    return all(isinstance(its, AdmissionError) for its in came)


def _cannot_be_refused(plan: Plan) -> bool:
    if plan.mode in {"record", "refund", "settle"}:
        return True
    return all(
        charge.applied.quota.shadow or (charge.enforcement == "delay" and charge.applied.quota.limit > 0)
        for charge in plan.charges
    )


def _outcome_without_store(plan: Plan, charge: Charge) -> Outcome:
    quota = charge.applied.quota
    if plan.mode == "settle":
        return "reject"  # whether the lease was settled is unknown
    if plan.mode in {"record", "refund"}:
        return "admit"
    refuses = quota.on_store_failure == "throttle" or (quota.limit == 0 and charge.usage > 0)
    return "throttle" if refuses else "admit"
