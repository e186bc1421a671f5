"""Turns an ask and its quotas into a plan for the store, and the store's answer into a decision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from sys import getsizeof
from typing import Final, NamedTuple

from msgspec import msgpack

from app.admission.fallback import verdict_when_full, verdict_without_store
from app.admission.generations import Generations
from app.domain import bounds
from app.domain.ask import Ask, Mode
from app.domain.binding import Binding
from app.domain.decision import Decision, Outcome, Reason, Source, Verdict, combine, is_charged
from app.domain.holds import granted_of
from app.domain.ladder import AppliedQuota, MatchingRules, Quotas, applied_quotas
from app.domain.quota import KEYS, PRODUCER_IDS_RATE, Enforcement
from app.domain.retry import Content, content_of
from app.domain.usage import enforcement_of, spreads_of, usage_of
from app.domain.volumes import scaled_quota
from app.store.keys import bucket_key
from app.store.port import Answer, Charge, ChargeResult, Plan

MATCHES_BYTES: Final = 16 * 1024 * 1024
"""The memory for remembered matches."""

ENTRY_BYTES: Final = 300
"""Estimated size of a caller, and of each of its matches, without their strings."""

RETRY_BYTES: Final = 16

BY_POLICY: Final = ("store_full", "store_failure")
"""The reasons of results that the store did not judge."""

VerdictFields = tuple[str, str, str, float, Enforcement, bool]
"""What the store does not return of a verdict: quota, entity, bucket, limit, enforcement, shadow."""


class Match(NamedTuple):
    """A quota that applies to an ask, and the store key of the bucket that it charges."""

    applied: AppliedQuota
    key: bytes


class LocalVerdict(NamedTuple):
    """A verdict of the quota of producer ids that this node gives alone.

    Attributes:
        at_ms: the store's time, as this node estimates it.
    """

    verdict: Verdict
    at_ms: int


class Matches:
    """The quotas of one snapshot that apply to each caller, cached for recent callers.

    Args:
        most_bytes: the size of the cache. When it is full, only what was not asked for lately is forgotten.

    Attributes:
        edition: an object that only these quotas have. Who keeps it can tell whether they are still in force,
            and keeps nothing else of them.
        quotas, rules: as given.
    """

    def __init__(self, quotas: Quotas, rules: MatchingRules, most_bytes: int = MATCHES_BYTES) -> None:
        self.edition: Final = object()
        self.quotas: Final = quotas
        self.rules: Final = rules
        self._kept: Generations[tuple[object, ...], tuple[Match, ...]] = Generations(most_bytes)

    def __len__(self) -> int:
        return len(self._kept)

    def of(self, ask: Ask) -> tuple[Match, ...]:
        """Return the quotas that apply to an ask."""
        caller = caller_of(ask)
        found = self._kept.get(caller)
        if found is None:
            found = matches_of(ask, self.quotas, self.rules)
            self._kept.add(caller, found, _size(caller, found))
        return found


def caller_of(ask: Ask) -> tuple[object, ...]:
    """Return what the quotas that apply to an ask depend on."""
    who = (ask.principal, ask.client_id, ask.ip, ask.broker, ask.listener, ask.cluster_action)
    return (*who, ask.producer_ids is not None, *ask.usage)


def _size(caller: tuple[object, ...], found: tuple[Match, ...]) -> int:
    """Estimate the memory in bytes that the matches of a caller take."""
    texts = [part for part in caller[:5] if part is not None]
    for applied_, key in found:
        texts += (key, applied_.entity, applied_.bucket, applied_.owner)
    return ENTRY_BYTES * (1 + len(found)) + sum(map(getsizeof, texts))


def matches_of(ask: Ask, quotas: Quotas, rules: MatchingRules) -> tuple[Match, ...]:
    """Return the quotas that apply to an ask, without a cache."""
    return tuple(Match(found, bucket_key(found)) for found in applied_quotas(ask, quotas, rules))


def restricted_matches(
    ask: Ask, matches: Sequence[Match], bound_to: Sequence[Binding], place: int
) -> tuple[Match, ...]:
    """Return the matches of a bound caller's ask; quotas whose buckets others share are enforced as deny.

    Args:
        place: the index of the ask in its batch.

    Raises:
        OutOfBoundsError: the ask records in a shared bucket, or gives back to one.
    """
    found = bounds.restrict(ask, [match.applied for match in matches], bound_to, place)
    return tuple(Match(applied, match.key) for applied, match in zip(found, matches, strict=True))


def scaled_match(match: Match, factor: float) -> Match:
    """Return a match with its limit scaled by a throttle factor above 0; the bucket stays the same."""
    quota = scaled_quota(match.applied.quota, factor)
    return match if quota is match.applied.quota else Match(replace(match.applied, quota=quota), match.key)


def plan_of(ask: Ask, matches: Sequence[Match], secret: bytes, key: str | None = None) -> Plan | None:
    """Return the plan of an ask; None if no quota applies and no answer can have been kept.

    Args:
        key: the name of the caller's API key; kept answers belong to the key.
    """
    content = content_of(ask, key) if ask.id is not None else None
    retry = None if content is None else (ask.principal, _hash(content, secret))
    if not matches and retry is None:
        return None
    charges = tuple(_charge(ask, found, secret) for found in matches)
    context = b"" if retry is None else msgpack.encode((ask.mode, ask.detail, [_named(c) for c in charges]))
    return Plan(ask.mode, charges, ask.recheck, retry, context, ask.at_ms)


def plan_of_matches(asked: Sequence[tuple[Ask, Match]]) -> Plan:
    """Return the plan of several asks of mode admit, by their quotas; none of these counts ids."""
    return Plan("admit", tuple([_charge(ask, match, b"") for ask, match in asked]), at_ms=asked[0][0].at_ms)


def ids_match(ask: Ask, matches: Sequence[Match]) -> Match | None:
    """Return the match that counts an ask's ids, if a node can know them: not by the caller's clock."""
    if not ask.producer_ids or ask.at_ms is not None or not matches:
        return None
    return matches[0] if matches[0].applied.quota.key == PRODUCER_IDS_RATE else None


def may_answer_alone(ask: Ask) -> bool:
    """Return whether a node may answer for an ask's ids; the store decides a peek, ``id`` and ``detail``."""
    return ask.mode in {"admit", "record"} and ask.id is None and not ask.detail


def local_verdict(
    ask: Ask, match: Match, outcome: Outcome = "admit", throttle_ms: int = 0, largest: float | None = None
) -> Verdict:
    """Return a verdict that this node gives alone; the counters are then unknown."""
    found, quota = match.applied, match.applied.quota
    reason: Reason | None = "too_large" if outcome == "reject" else None
    return Verdict(
        quota.key,
        found.entity,
        found.bucket,
        quota.limit,
        enforcement_of(ask, quota),
        quota.shadow,
        outcome,
        throttle_ms,
        reason=reason,
        largest=largest,
    )


def renewal_plan(match: Match, ask: Ask, resets: int, birth: bytes, secret: bytes) -> Plan:
    """Return the plan to write ids that this node knows: uncharged, and never refused.

    Args:
        resets: the number of the last reset that the node knew of. If the bucket was reset since, the store
            writes nothing, and the outcome is ``reject``.
        birth: of the state that the node knows. Of another one, which may have lost the number of that reset,
            the store writes nothing, and the outcome is ``throttle``.
    """
    charge = Charge(match.applied, match.key, resets, "deny", b"".join(spreads_of(ask, secret)))
    return Plan("renew", (charge,), context=birth, at_ms=ask.at_ms)


def hold_plan(ask: Ask, matches: Sequence[Match], lease: bytes, lease_ms: int) -> Plan:
    """Return the plan to hold a part of an ask's usage in all its buckets, or in none.

    Args:
        ask: under deny, in mode admit, and without producer ids.
        lease: the name of the lease; no other has it.
    """
    return Plan("hold", _charges(ask, matches), at_ms=ask.at_ms, lease=(lease, lease_ms))


def settle_plan(ask: Ask, matches: Sequence[Match], lease: bytes) -> Plan:
    """Return the plan to charge what was spent of a lease, the ask's usage, and to free the rest."""
    return Plan("settle", _charges(ask, matches), at_ms=ask.at_ms, lease=(lease, 0))


def granted_by(ask: Ask, plan: Plan, answer: Answer) -> dict[str, float]:
    """Return what an answer to a hold grants, by usage field, if every quota admits."""
    slices = {
        KEYS[charge.applied.quota.key].usage: result.granted
        for charge, result in zip(plan.charges, answer.results, strict=True)
        if not charge.applied.quota.shadow
    }
    return granted_of(ask.usage, slices)


def decision_of(
    ask: Ask, plan: Plan | None, answer: Answer | None, *, sequential: bool, alone: Verdict | None = None
) -> tuple[Decision, tuple[Verdict, ...]]:
    """Make the decision from the store's answer (None if none was needed); also return all verdicts.

    Args:
        alone: the verdict on the ask's ids, if this node gave it alone.
    """
    if plan is None or answer is None:
        known = () if alone is None else (alone,)
        decision = combined(ask.mode, known, detail=ask.detail, sequential=sequential)
        return replace(decision, source="local") if known else decision, known
    if answer.kept is None:
        mode, detail, all_named = ask.mode, ask.detail, [_named(charge) for charge in plan.charges]
    else:
        mode, detail, all_named = msgpack.decode(answer.kept, type=tuple[Mode, bool, list[VerdictFields]])
    verdicts = tuple(_verdict(names, result) for names, result in zip(all_named, answer.results, strict=True))
    by_policy = by_policy_in(answer)
    verdicts = _by_policy([ask] * len(verdicts), verdicts, plan, answer)
    if alone is not None:
        verdicts = (alone, *verdicts)
    decision = combined(mode, verdicts, detail=detail, sequential=sequential, by_policy=by_policy)
    return decision if answer.is_charged else replace(decision, charged=False), verdicts


def verdicts_of(asks: Sequence[Ask], plan: Plan, answer: Answer) -> tuple[Verdict, ...]:
    """Return the verdicts on a plan of several asks; ``asks`` has that of each charge."""
    verdicts = tuple(
        _verdict(_named(charge), result) for charge, result in zip(plan.charges, answer.results, strict=True)
    )
    return _by_policy(asks, verdicts, plan, answer)


def by_policy_in(answer: Answer) -> int:
    """Return how many results of an answer are not the store's, so that policies give the verdicts."""
    return sum(result.reason in BY_POLICY for result in answer.results)


def why_by_policy(answer: Answer) -> str:
    """Return why policies gave some verdicts on an ask that the store answered."""
    return "store_full" if answer.failure is None else answer.failure.reason


def _by_policy(
    asks: Sequence[Ask], verdicts: tuple[Verdict, ...], plan: Plan, answer: Answer
) -> tuple[Verdict, ...]:
    """Return the verdicts with those that follow a policy."""
    if not by_policy_in(answer):
        return verdicts  # also any answer that was kept
    return tuple(
        _verdict_by_policy(ask, verdict, charge)
        for ask, verdict, charge in zip(asks, verdicts, plan.charges, strict=True)
    )


def combined(
    mode: Mode, verdicts: tuple[Verdict, ...], *, detail: bool, sequential: bool, by_policy: int = 0
) -> Decision:
    """Return the decision that verdicts of the store make.

    Args:
        by_policy: how many of them are not the store's.
    """
    outcome, throttle_ms, limited_by = combine(verdicts, sequential=sequential)
    source: Source = "fallback" if by_policy else "store" if verdicts else "local"
    return Decision(
        outcome,
        throttle_ms,
        is_charged(mode, outcome) and (not by_policy or by_policy < len(verdicts)),
        len(verdicts),
        source,
        limited_by,
        verdicts if detail else None,
    )


def _charges(ask: Ask, matches: Sequence[Match]) -> tuple[Charge, ...]:
    return tuple(_charge(ask, match, b"") for match in matches)


def _charge(ask: Ask, match: Match, secret: bytes) -> Charge:
    quota = match.applied.quota
    spreads = b"".join(spreads_of(ask, secret)) if quota.algorithm == "producer_ids" else b""
    return Charge(match.applied, match.key, usage_of(ask, quota), enforcement_of(ask, quota), spreads)


def _hash(content: Content, secret: bytes) -> bytes:
    """Return the keyed hash by which a retry is recognised; it reveals nothing without the secret."""
    return blake2b(msgpack.encode(content), digest_size=RETRY_BYTES, key=secret, person=b"retry").digest()


def _named(charge: Charge) -> VerdictFields:
    return named(charge.applied, charge.enforcement)


def named(found: AppliedQuota, enforcement: Enforcement) -> VerdictFields:
    """Return what the store does not say of a verdict."""
    quota = found.quota
    return quota.key, found.entity, found.bucket, quota.limit, enforcement, quota.shadow


def _verdict_by_policy(ask: Ask, verdict: Verdict, charge: Charge) -> Verdict:
    """Return the verdict of a quota that the store could not judge, or the store's."""
    if verdict.reason == "store_full":
        return verdict_when_full(ask, charge.applied)
    return verdict_without_store(ask, charge.applied) if verdict.reason == "store_failure" else verdict


def _verdict(names: VerdictFields, result: ChargeResult) -> Verdict:
    known = result.observed == result.observed
    return Verdict(
        *names,
        result.outcome,
        result.throttle_ms,
        result.observed if known else None,
        result.remaining if known else None,
        result.reason,
        result.largest,
    )
