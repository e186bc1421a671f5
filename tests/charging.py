"""Charges of asks and decisions on them, for tests that have quotas but no snapshot of a catalog."""

from __future__ import annotations

from collections.abc import Sequence

from app.admission.admission import Admission
from app.admission.answers import decided
from app.admission.compiled import charge_of
from app.admission.plan import PlannedAsk, plan_of, with_spreads
from app.domain.ask import Ask
from app.domain.caller import ANYONE, Caller
from app.domain.decision import Decision
from app.domain.ladder import AppliedQuota, MatchingRules, Quotas, applied_quotas
from app.store.port import Answer, Charge, Plan


def charges_of(ask: Ask, quotas: Quotas, rules: MatchingRules, secret: bytes) -> Sequence[Charge]:
    """The charges of an ask by the readable rule, with its ids hashed."""
    charges = [charge_of(applied, ask) for applied in applied_quotas(ask, quotas, rules)]
    return with_spreads(ask, charges, secret)


def plan_for(ask: Ask, quotas: Quotas, rules: MatchingRules, secret: bytes) -> Plan | None:
    """The plan of an ask; None if no quota applies and no answer can have been kept."""
    return plan_of(ask, charges_of(ask, quotas, rules, secret), secret)


def single_charge(applied: AppliedQuota, ask: Ask, spreads: bytes = b"") -> Charge:
    """The charge of an ask for one quota."""
    charge = charge_of(applied, ask)
    charge.spreads = spreads
    return charge


def decision_on(ask: Ask, plan: Plan, answer: Answer, *, sequential: bool = False) -> Decision:
    """The decision that follows from the store's answer to the plan of an ask."""
    decision, _ = decided(PlannedAsk(ask, plan.charges, plan), answer, sequential=sequential)
    return decision


async def decisions_of(node: Admission, asks: Sequence[Ask], caller: Caller = ANYONE) -> list[Decision]:
    """The decisions of a node on a batch."""
    found = []
    for planned in await node.decide(asks, caller):
        assert planned.decision is not None
        found.append(planned.decision)
    return found
