"""Asks that are admitted or refused as one: their buckets in one plan, and what comes of each ask.

Every ask denies, has mode admit, and has neither an id nor producer ids. A bucket that several asks charge is
in the plan once, with the largest usage: it belongs to the ask that has that (the first of equals), and only
that ask's row of the decision log has it. The verdict on it counts for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from msgspec import structs

from app.admission.fallback import without_store
from app.admission.hold import hold_decision
from app.admission.plan import Match, combined, plan_of_matches, verdicts_of
from app.admission.port import InFull, Joint
from app.domain.ask import Ask
from app.domain.decision import Decision, Verdict, combine
from app.domain.quota import KEYS
from app.domain.usage import usage_of
from app.store.port import Answer, Plan

_PLACE_OF: Final = {key: place for place, key in enumerate(KEYS)}
_UNASKED: Final = Decision("admit", 0, False, 0, "local", None)
"""What is decided of an ask that nobody looks at, because another one of its request is refused anyway."""


class JointCharge(NamedTuple):
    """A bucket of a request: the ask that charges it most, by its place, and how."""

    place: int
    match: Match


class JointPart(NamedTuple):
    """What comes of one ask of a request, as the decision log records it.

    Attributes:
        ask: in mode peek if it would pass, but was refused with the others: nothing is charged.
        matches: the quotas whose buckets belong to this ask.
    """

    ask: Ask
    matches: tuple[Match, ...]
    answer: Answer | None
    decision: Decision
    verdicts: tuple[Verdict, ...]


class Together(NamedTuple):
    """What is decided of the asks of one request.

    Attributes:
        matches, verdicts: of all buckets, each once, in the order that breaks ties.
        parts: one for each ask.
    """

    decision: Decision
    matches: tuple[Match, ...]
    verdicts: tuple[Verdict, ...]
    parts: tuple[JointPart, ...]


class JointAsks:
    """The asks of one request with their quotas, and the plan that has the buckets of all of them.

    Args:
        matches: the quotas that apply to each ask.
        held: for each ask, whether a throttle factor of 0 holds it.
    """

    def __init__(
        self, asks: Sequence[Ask], matches: Sequence[tuple[Match, ...]], held: Sequence[bool]
    ) -> None:
        self.asks = tuple(asks)
        self.its = tuple(matches)
        self.held = tuple(held)
        self._charges = charges_of(self.asks, self.its)
        self.matches = tuple([charge.match for charge in self._charges])

    def plan(self) -> Plan | None:
        """Return the plan; None if the store is not needed."""
        if not self._charges or any(self.held):
            return None
        return plan_of_matches([(self.asks[place], match) for place, match in self._charges])

    def decided(self, plan: Plan, answer: Answer) -> Together:
        """Return the decision by the store's answer."""
        verdicts = verdicts_of([self.asks[place] for place, _ in self._charges], plan, answer)
        decision = combined("admit", verdicts, detail=False, sequential=False)
        is_refused = decision.decision != "admit"
        parts = []
        for place, ask in enumerate(self.asks):
            own = [at for at, charge in enumerate(self._charges) if charge.place == place]
            its = tuple([verdicts[at] for at in own])
            outcome, _, _ = combine(its)
            recorded = replace(ask, mode="peek") if is_refused and outcome == "admit" else ask
            parts.append(
                JointPart(
                    recorded,
                    tuple([self.matches[at] for at in own]),
                    structs.replace(answer, results=tuple([answer.results[at] for at in own])),
                    combined(recorded.mode, its, detail=False, sequential=False),
                    its,
                )
            )
        return Together(decision, self.matches, verdicts, tuple(parts))

    def without_store(self) -> Together:
        """Return the decision by each quota's ``on_store_failure``."""
        parts = []
        for place, ask in enumerate(self.asks):
            own = tuple([charge.match for charge in self._charges if charge.place == place])
            if own:
                decision, verdicts = without_store(ask, [match.applied for match in own])
            else:
                decision, verdicts = combined("admit", (), detail=False, sequential=False), ()
            parts.append(JointPart(ask, own, None, decision, verdicts))
        verdicts = self._in_order(parts)
        outcome, throttle_ms, by = combine(verdicts)
        decision = Decision(outcome, throttle_ms, False, len(verdicts), "fallback", by)
        return Together(decision, self.matches, verdicts, tuple(parts))

    def unlimited(self) -> Together:
        """Return the decision on asks to which no quota applies."""
        decision = combined("admit", (), detail=False, sequential=False)
        return Together(
            decision, (), (), tuple([JointPart(ask, (), None, decision, ()) for ask in self.asks])
        )

    def on_hold(self, wait_ms: int, *, away: bool) -> Together:
        """Return the refusal of asks of which the factor holds one at least; the others are not looked at.

        Args:
            away: whether the store is not available.
        """
        parts = []
        for ask, its, is_held in zip(self.asks, self.its, self.held, strict=True):
            if is_held:
                decision, verdicts = hold_decision(ask, its, wait_ms, away=away)
                parts.append(JointPart(ask, its, None, decision, verdicts))
            else:
                parts.append(JointPart(replace(ask, mode="peek"), (), None, _UNASKED, ()))
        refusals = [part for part in parts if part.decision.decision != "admit"]
        worst = max(
            refusals, key=lambda part: (part.decision.decision == "reject", part.decision.throttle_ms)
        )
        return Together(worst.decision, worst.matches, worst.verdicts, tuple(parts))

    def answer(self, together: Together) -> Joint:
        """Return a decision as the caller gets it: each ask with the verdicts on all of its quotas."""
        verdict_on = {
            match.key: verdict for match, verdict in zip(together.matches, together.verdicts, strict=True)
        }
        found = []
        for part, its, is_held in zip(together.parts, self.its, self.held, strict=True):
            if is_held:
                known, decision = part.matches, replace(part.decision, quotas=part.verdicts)
            else:
                known = tuple([match for match in its if match.key in verdict_on])
                verdicts = tuple([verdict_on[match.key] for match in known])
                decision = combined("admit", verdicts, detail=True, sequential=False)
            found.append(InFull(decision, tuple([match.applied.quota for match in known])))
        return Joint(together.decision, tuple(found))

    def _in_order(self, parts: Sequence[JointPart]) -> tuple[Verdict, ...]:
        """Return the verdicts of all parts, in the order of the buckets."""
        waiting = [iter(part.verdicts) for part in parts]
        return tuple([next(waiting[charge.place]) for charge in self._charges])


def charges_of(asks: Sequence[Ask], matches: Sequence[Sequence[Match]]) -> tuple[JointCharge, ...]:
    """Return the buckets that asks charge, each once, in the order that breaks ties between verdicts."""
    most: dict[bytes, JointCharge] = {}
    for place, (ask, its) in enumerate(zip(asks, matches, strict=True)):
        for match in its:
            known = most.get(match.key)
            quota = match.applied.quota
            if known is None or usage_of(ask, quota) > usage_of(asks[known.place], quota):
                most[match.key] = JointCharge(place, match)
    return tuple(sorted(most.values(), key=_rank))


def _rank(charge: JointCharge) -> int:
    return _PLACE_OF[charge.match.applied.quota.key]
