"""Asks that are admitted or refused as one: their buckets in one plan, and the outcome of each ask.

Every ask denies, has mode admit, and has neither an id nor producer ids. A bucket that several asks charge is
in the plan once. It is attributed to the ask with the largest usage (the first, in a tie), and only the row
of that ask in the decision log has it. The verdict on it counts for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from msgspec import structs

from app.admission.answers import ADMITTED, by_policy_in, combined, suspend, verdict_on, without_store
from app.admission.plan import PlannedAsk
from app.domain.ask import Ask
from app.domain.decision import Decision, Verdict, combine
from app.domain.quota import KEYS
from app.store.port import Answer, Charge, Plan

_PLACE_OF: Final = {key: place for place, key in enumerate(KEYS)}
_UNASKED: Final = Decision("admit", 0, False, 0, "local", None)
"""The decision on an ask that is not examined, because another ask of its request is refused anyway."""


class AtomicDecision(NamedTuple):
    """The answer to a request: all of its asks are admitted, or none.

    Attributes:
        parts: each ask with the decision of its own quotas, and all verdicts.
    """

    decision: Decision
    parts: tuple[PlannedAsk, ...]


class AtomicPart(NamedTuple):
    """The outcome of one ask of a request, as the decision log records it.

    Attributes:
        planned: the ask with the charges attributed to it. Its mode is peek if it would pass alone, but was
            refused with the others: nothing is charged.
    """

    planned: PlannedAsk
    answer: Answer | None
    verdicts: Sequence[Verdict]


class AtomicOutcome(NamedTuple):
    """The outcome of one request, as metrics and log count it.

    Attributes:
        whole: the first ask with the charges to all buckets, each once, in the order that breaks ties.
        verdicts: one for each charge of ``whole``.
        parts: one for each ask.
    """

    whole: PlannedAsk
    verdicts: Sequence[Verdict]
    parts: tuple[AtomicPart, ...]


class AtomicAsks:
    """The asks of one request with their charges, and one plan for all their buckets.

    Args:
        charges: the charges of each ask.
        suspended: for each ask, whether a throttle factor of 0 suspends it.

    Attributes:
        charges: to all buckets, each once, in the order that breaks ties between verdicts.
    """

    def __init__(
        self, asks: Sequence[Ask], charges: Sequence[Sequence[Charge]], suspended: Sequence[bool]
    ) -> None:
        self.asks = tuple(asks)
        self.suspended = tuple(suspended)
        self._ask_charges = tuple(charges)
        most = _largest(charges)
        self.charges = tuple([charge for _, charge in most])
        self._owners = [place for place, _ in most]
        """The index of the ask that each of these charges is attributed to."""

    def plan(self) -> Plan | None:
        """Return the plan; None if the store is not needed."""
        if not self.charges or any(self.suspended):
            return None
        return Plan("admit", self.charges, at_ms=self.asks[0].at_ms)

    def decided(self, answer: Answer) -> AtomicOutcome:
        """Return the decision by the store's answer."""
        owned_results = zip(self._owners, self.charges, answer.results, strict=True)
        verdicts = [verdict_on(self.asks[owner], charge, result) for owner, charge, result in owned_results]
        decision = combined("admit", verdicts, detail=False, sequential=False, by_policy=by_policy_in(answer))
        if not answer.is_charged:
            decision = replace(decision, charged=False)
        parts = []
        for place, ask in enumerate(self.asks):
            own = self._own(place)
            own_verdicts = [verdicts[at] for at in own]
            outcome, _, _ = combine(own_verdicts)
            is_unlucky = decision.decision != "admit" and outcome == "admit"
            recorded = replace(ask, mode="peek") if is_unlucky else ask
            own_answer = self._part_of(answer, own)
            by_policy = by_policy_in(own_answer)
            own_decision = combined(
                recorded.mode, own_verdicts, detail=False, sequential=False, by_policy=by_policy
            )
            part = _decided(recorded, [self.charges[at] for at in own], own_decision)
            parts.append(AtomicPart(part, own_answer, own_verdicts))
        return AtomicOutcome(self._whole(decision), verdicts, tuple(parts))

    def without_store(self) -> AtomicOutcome:
        """Return the decision by each quota's ``on_store_failure``."""
        verdicts: dict[int, Verdict] = {}
        parts = []
        for place, ask in enumerate(self.asks):
            own = self._own(place)
            charges = [self.charges[at] for at in own]
            decision, own_verdicts = without_store(ask, charges)
            if not own:
                decision = ADMITTED[0]
            verdicts |= zip(own, own_verdicts, strict=True)
            parts.append(AtomicPart(_decided(ask, charges, decision), None, own_verdicts))
        in_order = [verdicts[at] for at in range(len(self.charges))]
        outcome, throttle_ms, by = combine(in_order)
        whole = Decision(outcome, throttle_ms, False, len(in_order), "fallback", by)
        return AtomicOutcome(self._whole(whole), in_order, tuple(parts))

    def unlimited(self) -> AtomicOutcome:
        """Return the decision on asks to which no quota applies."""
        decision = ADMITTED[0]
        parts = tuple([AtomicPart(_decided(ask, (), decision), None, ()) for ask in self.asks])
        return AtomicOutcome(self._whole(decision), (), parts)

    def suspend(self, wait_ms: int, *, away: bool) -> AtomicOutcome:
        """Return the refusal of asks because the factor suspends at least one; the others are not examined.

        Args:
            away: whether the store is not available.
        """
        parts = []
        for ask, charges, is_suspended in zip(self.asks, self._ask_charges, self.suspended, strict=True):
            if is_suspended:
                decision, verdicts = suspend(ask, charges, wait_ms, away=away)
                parts.append(AtomicPart(_decided(ask, charges, decision), None, verdicts))
            else:
                parts.append(AtomicPart(_decided(replace(ask, mode="peek"), (), _UNASKED), None, ()))
        worst = max(parts, key=_refusal)
        return AtomicOutcome(worst.planned, worst.verdicts, tuple(parts))

    def answer(self, outcome: AtomicOutcome) -> AtomicDecision:
        """Return a decision as the caller gets it: each ask with the verdicts on all of its quotas."""
        pairs = zip(outcome.whole.charges, outcome.verdicts, strict=True)
        verdict_of = {charge.key: verdict for charge, verdict in pairs}
        found = []
        for ask, charges, is_suspended, part in zip(
            self.asks, self._ask_charges, self.suspended, outcome.parts, strict=True
        ):
            if is_suspended and part.planned.decision is not None:
                decision = replace(part.planned.decision, quotas=tuple(part.verdicts))
                found.append(_decided(ask, charges, decision))
                continue
            known = [charge for charge in charges if charge.key in verdict_of]
            verdicts = [verdict_of[charge.key] for charge in known]
            found.append(_decided(ask, known, combined("admit", verdicts, detail=True, sequential=False)))
        assert outcome.whole.decision is not None
        return AtomicDecision(outcome.whole.decision, tuple(found))

    def _own(self, place: int) -> list[int]:
        """Return the indexes of the charges attributed to an ask."""
        return [at for at, owner in enumerate(self._owners) if owner == place]

    def _whole(self, decision: Decision) -> PlannedAsk:
        return _decided(self.asks[0], self.charges, decision)

    def _part_of(self, answer: Answer, own: Sequence[int]) -> Answer:
        """Return the answer to some of the charges."""
        results = tuple([answer.results[at] for at in own])
        if not answer.orders:
            return structs.replace(answer, results=results, packed=b"")
        keys = {self.charges[at].key for at in own}
        return structs.replace(
            answer,
            results=results,
            orders=tuple([answer.orders[at] for at in own]),
            undone=tuple([each for each in answer.undone if each.key in keys]),
        )


def _decided(ask: Ask, charges: Sequence[Charge], decision: Decision) -> PlannedAsk:
    return PlannedAsk(ask, charges, None, decision=decision)


def _refusal(part: AtomicPart) -> tuple[bool, int]:
    """The severity of a refusal; lowest for a part that is not refused."""
    decision = part.planned.decision
    assert decision is not None
    return decision.decision == "reject", decision.throttle_ms


def _largest(charges: Sequence[Sequence[Charge]]) -> list[tuple[int, Charge]]:
    """Return the largest charge to each bucket, with its ask's place, in the order of the quota keys."""
    most: dict[bytes, tuple[int, Charge]] = {}
    for place, ask_charges in enumerate(charges):
        for charge in ask_charges:
            known = most.get(charge.key)
            if known is None or charge.usage > known[1].usage:
                most[charge.key] = place, charge
    return sorted(most.values(), key=lambda each: _PLACE_OF[each[1].quota.key])
