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
from app.store.port import Answer, Charge, LeaseResult, Plan

RETRY_BYTES: Final = 16

VerdictFields = tuple[str, str, str, float, Enforcement, bool]
"""The verdict fields that the store does not return: quota, entity, bucket, limit, enforcement, shadow."""
Kept = tuple[Mode, bool, list[VerdictFields]]
"""The context of a kept answer: the mode and the detail of its ask, and its verdicts."""


class Knowledge(NamedTuple):
    """The grounds on which a node answers for ids without the store, or renews them.

    Attributes:
        at_ms: the store's time, as the node estimates it.
        until_ms: when the first layer that holds any of them dies.
        resets: the number of the last reset of any bucket that the node knows of.
    """

    at_ms: int
    until_ms: int
    resets: int


class PlannedAsk(Struct, gc=False):
    """An ask on its way from its body to its answer.

    Attributes:
        charges: to all buckets of the quotas that apply, scaled by the throttle factor in force.
        plan: the plan for the store; None if the store is not needed.
        is_suspended: whether a factor of 0 suspends the ask.
        known: the grounds on which this node answers for the ask's ids, if it does so alone; the plan then
            lacks their charge, which is the first.
        unknown: the ask with only the ids that the node does not know, if it knows some of several.
        generation: the generation of the node's knowledge (``LocalAnswers.generation``) when it was planned.
        decision: once it is made.
        answer: the store's answer, if the decision was made from it.
    """

    ask: Ask
    charges: Sequence[Charge]
    plan: Plan | None
    is_suspended: bool = False
    known: Knowledge | None = None
    unknown: Ask | None = None
    generation: int = 0
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
    # The hash reveals nothing without the secret.
    hashed = blake2b(msgpack.encode(content), digest_size=RETRY_BYTES, key=secret, person=b"retry").digest()
    context = msgpack.encode((ask.mode, ask.detail, [named(charge) for charge in charges]))
    return Plan(ask.mode, tuple(charges), (ask.principal, hashed), context, ask.at_ms)


def named(charge: Charge) -> VerdictFields:
    """Return the fields of a verdict that the store does not return."""
    compiled = charge.compiled
    quota = compiled.quota
    return quota.key, compiled.entity, charge.bucket, quota.limit, compiled.enforcement, quota.shadow


def with_spreads(ask: Ask, charges: Sequence[Charge], secret: bytes) -> Sequence[Charge]:
    """Return charges with the ask's ids hashed, if the first charge counts ids (no other can)."""
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
    """Return the charge that counts an ask's ids, if a node can know them.

    It cannot under the caller's clock, which says nothing of the store's layers.
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
    """Return the plan to charge the ask's usage as spent of a lease, and to free the rest of the lease."""
    return Plan("settle", tuple(charges), at_ms=ask.at_ms, lease=(lease, 0))


def granted_by(ask: Ask, plan: Plan, answer: Answer) -> dict[str, float]:
    """Return the grant in an answer to a hold that every quota admits, by usage field."""
    slices = {
        charge.compiled.field: result.granted
        for charge, result in zip(plan.charges, answer.results, strict=True)
        if isinstance(result, LeaseResult) and not charge.quota.shadow
    }
    return granted_of(ask.usage, slices)
