"""Turns an ask and the buckets that it charges into a plan for the store."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Final, NamedTuple

from msgspec import Struct, msgpack, structs

from app.admission.compiled import compiled_again, manner_of
from app.domain.ask import Ask, Mode
from app.domain.binding import Binding
from app.domain.bounds import restrict
from app.domain.decision import Decision
from app.domain.holds import granted_of
from app.domain.quota import Enforcement
from app.domain.retry import content_of
from app.domain.usage import spreads_of
from app.domain.volumes import scaled_quota
from app.store.compiled_quota import DENY
from app.store.port import Answer, Charge, Plan

RETRY_BYTES: Final = 16

VerdictFields = tuple[str, str, str, float, Enforcement, bool]
"""What the store does not return of a verdict: quota, entity, bucket, limit, enforcement, shadow."""
Kept = tuple[Mode, bool, list[VerdictFields]]
"""The context of a kept answer: the mode and the detail of its ask, and its verdicts."""


class Knowledge(NamedTuple):
    """By what a node is certain of ids that it answers for, or writes again.

    Attributes:
        at_ms: the store's time, as the node estimates it.
        until_ms: when the first of the layers dies that hold them.
        resets: the number of the last reset of any bucket of which the node knows.
    """

    at_ms: int
    until_ms: int
    resets: int


class PlannedAsk(Struct, gc=False):
    """An ask on its way from its body to its answer.

    Attributes:
        charges: to all buckets of the quotas that apply, scaled by the throttle factor in force.
        plan: what to ask the store; None if the store is not needed.
        is_held: whether a factor of 0 holds the ask.
        known: by what this node is certain of the ask's ids, if it answers for them alone; the plan then
            lacks their charge, which is the first.
        unknown: the ask with those ids alone that the node does not know, if it knows some of several.
        edition: the edition of the node's knowledge (``LocalAnswers.edition``) when it was planned.
        decision: once it is made.
        answer: the store's, if the decision was made by it.
    """

    ask: Ask
    charges: Sequence[Charge]
    plan: Plan | None
    is_held: bool = False
    known: Knowledge | None = None
    unknown: Ask | None = None
    edition: int = 0
    decision: Decision | None = None
    answer: Answer | None = None

    @property
    def alone(self) -> int:
        """How many of the first charges this node answers for alone."""
        return 0 if self.known is None else 1


def plan_of(ask: Ask, charges: Sequence[Charge], secret: bytes, key: str | None = None) -> Plan | None:
    """Return the plan of an ask; None if no quota applies and no answer can have been kept.

    Args:
        key: the name of the caller's API key; kept answers belong to the key.
    """
    content = None if ask.id is None else content_of(ask, key)
    if content is None:
        return Plan(ask.mode, tuple(charges), None, b"", ask.at_ms) if charges else None
    # It reveals nothing without the secret.
    hashed = blake2b(msgpack.encode(content), digest_size=RETRY_BYTES, key=secret, person=b"retry").digest()
    context = msgpack.encode((ask.mode, ask.detail, [named(charge) for charge in charges]))
    return Plan(ask.mode, tuple(charges), (ask.principal, hashed), context, ask.at_ms)


def named(charge: Charge) -> VerdictFields:
    """Return the fields of a verdict that the store does not return."""
    its = charge.compiled
    quota = its.quota
    return quota.key, its.entity, charge.bucket, quota.limit, its.enforcement, quota.shadow


def with_spreads(ask: Ask, charges: Sequence[Charge], secret: bytes) -> Sequence[Charge]:
    """Return charges with the ids of the ask hashed, if one counts ids: only the first may."""
    if not charges or not charges[0].compiled.counts_ids:
        return charges
    spreads = spreads_of(ask, secret)
    return (structs.replace(charges[0], usage=len(spreads), spreads=b"".join(spreads)), *charges[1:])


def restricted(
    ask: Ask, charges: Sequence[Charge], bound_to: Sequence[Binding], place: int = 0
) -> Sequence[Charge]:
    """Return the charges of a bound caller's ask; quotas whose buckets others share are enforced as deny.

    Args:
        place: the index of the ask in its batch.

    Raises:
        OutOfBoundsError: the ask records in a shared bucket, or gives back to one.
    """
    if not bound_to:
        return charges
    found = restrict(ask, [charge.applied for charge in charges], bound_to, place)
    manner = manner_of(ask) | DENY
    return [
        charge if applied.quota is charge.quota else compiled_again(charge, charge.quota, manner)
        for charge, applied in zip(charges, found, strict=True)
    ]


def scaled(ask: Ask, charges: Sequence[Charge], factor: float) -> Sequence[Charge]:
    """Return charges with the limits scaled by a throttle factor above 0; the buckets stay the same."""
    found = [(charge, scaled_quota(charge.quota, factor)) for charge in charges]
    return [
        charge if quota is charge.quota else compiled_again(charge, quota, manner_of(ask))
        for charge, quota in found
    ]


def ids_charge(ask: Ask, charges: Sequence[Charge]) -> Charge | None:
    """Return the charge that counts an ask's ids, if there are any that a node can know.

    The caller's clock says nothing of the store's layers.
    """
    if ask.at_ms is not None or not charges or not charges[0].compiled.counts_ids:
        return None
    return charges[0] if charges[0].usage else None


def may_answer_alone(ask: Ask) -> bool:
    """Return whether a node may answer for an ask's ids; the store decides a peek, ``id`` and ``detail``."""
    return ask.mode in {"admit", "record"} and ask.id is None and not ask.detail


def hold_plan(ask: Ask, charges: Sequence[Charge], lease: bytes, lease_ms: int) -> Plan:
    """Return the plan to hold a part of an ask's usage in all its buckets, or in none.

    Args:
        ask: under deny, in mode admit, and without producer ids.
        lease: the name of the lease; no other has it.
    """
    return Plan("hold", tuple(charges), at_ms=ask.at_ms, lease=(lease, lease_ms))


def settle_plan(ask: Ask, charges: Sequence[Charge], lease: bytes) -> Plan:
    """Return the plan to charge what was spent of a lease, the ask's usage, and to free the rest."""
    return Plan("settle", tuple(charges), at_ms=ask.at_ms, lease=(lease, 0))


def granted_by(ask: Ask, plan: Plan, answer: Answer) -> dict[str, float]:
    """Return what an answer to a hold grants, by usage field, if every quota admits."""
    slices = {
        charge.compiled.field: result.granted
        for charge, result in zip(plan.charges, answer.results, strict=True)
        if not charge.quota.shadow
    }
    return granted_of(ask.usage, slices)
