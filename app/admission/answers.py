"""Makes decisions: from the store's answer, from ids that this node knows, or by the quotas' policies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from msgspec import msgpack

from app.admission.plan import Kept, PlannedAsk, VerdictFields, named
from app.domain import sampled_rate
from app.domain.ask import Ask, Mode
from app.domain.decision import Decision, LimitedBy, Outcome, Source, Verdict, combine, is_charged
from app.domain.quota import KEYS, MAX_THROTTLE_MS, Quota
from app.domain.usage import usage_of
from app.store.port import Answer, Charge, ChargeResult

THROTTLE_MS: Final = 1_000
"""How long an ask must wait when a quota throttles it without the store."""
THROTTLE_FACTOR: Final = LimitedBy("throttle_factor", None, None)
BY_POLICY: Final = ("store_full", "store_failure")
"""The reasons of results that the store did not judge."""
MOST_CHARGES: Final = len(KEYS) + 2
"""The most quotas of an ask: each key may apply, and two of them twice."""


def decided(planned: PlannedAsk, answer: Answer, *, sequential: bool) -> tuple[Decision, Sequence[Verdict]]:
    """Return the decision by the store's answer, and the verdicts that made it."""
    ask = planned.ask
    if answer.kept is not None:
        mode, detail, fields = msgpack.decode(answer.kept, type=Kept)
        verdicts = tuple(
            _verdict(names, result) for names, result in zip(fields, answer.results, strict=True)
        )
        return combined(mode, verdicts, detail=detail, sequential=sequential), verdicts
    verdicts = verdicts_of(planned, answer)
    decision = combined(
        ask.mode, verdicts, detail=ask.detail, sequential=sequential, by_policy=by_policy_in(answer)
    )
    return decision if answer.is_charged else replace(decision, charged=False), verdicts


def verdicts_of(planned: PlannedAsk, answer: Answer | None) -> tuple[Verdict, ...]:
    """Return the verdicts on an ask: of this node, and of an answer that is not a kept one."""
    alone = planned.alone
    pairs = zip(planned.charges[alone:], () if answer is None else answer.results, strict=True)
    verdicts = [verdict_on(planned.ask, charge, result) for charge, result in pairs]
    return (verdict_alone(planned.charges[0]), *verdicts) if alone else tuple(verdicts)


def verdict_on(ask: Ask, charge: Charge, result: ChargeResult) -> Verdict:
    """Return the verdict of a quota by the store's result, or by its policy where the store has none."""
    if result.reason == "store_full":
        return verdict_when_full(ask, charge)
    if result.reason == "store_failure":
        return verdict_without_store(ask, charge)
    return _verdict(named(charge), result)


def remaining_in_buckets(planned: PlannedAsk) -> list[float | None]:
    """Return the units left in each bucket of an ask without producer ids; None where they are not known."""
    answer = planned.answer
    if answer is None:
        return [None] * len(planned.charges)
    return [
        result.remaining if result.observed == result.observed and result.reason not in BY_POLICY else None
        for result in answer.results
    ]


def verdict_alone(charge: Charge) -> Verdict:
    """Return the verdict on ids that this node knows; the counters are then unknown."""
    return Verdict(*named(charge), "admit", 0)


def verdict_when_full(ask: Ask, charge: Charge) -> Verdict:
    """Return the verdict of a quota for whose new bucket the store has no room."""
    return replace(verdict_without_store(ask, charge), reason="store_full")


def verdict_without_store(ask: Ask, charge: Charge) -> Verdict:
    """Return the verdict of a quota without its counter, by its policy; a limit of 0 still applies.

    A record is never refused, as its work is done: it is delayed where another ask would be refused.
    A refund is admitted.
    """
    quota = charge.quota
    if ask.mode == "refund":
        return Verdict(*named(charge), "admit", 0)
    if quota.limit == 0 and usage_of(ask, quota) > 0:
        if ask.mode == "record":
            longest = quota.window_ms if quota.algorithm == "producer_ids" else quota.longest_delay_ms
            return Verdict(*named(charge), "delay", min(longest, MAX_THROTTLE_MS))
        return Verdict(*named(charge), "reject", 0, reason="too_large", largest=0.0)
    if quota.on_store_failure == "throttle":
        refused: Outcome = "delay" if ask.mode == "record" else "throttle"
        return Verdict(*named(charge), refused, THROTTLE_MS, reason="store_failure")
    return Verdict(*named(charge), "admit", 0)


def without_store(
    ask: Ask, charges: Sequence[Charge], known: int = 0
) -> tuple[Decision, tuple[Verdict, ...]]:
    """Decide without counters and charge nothing: admit, unless a quota throttles or has limit 0.

    Args:
        known: how many of the first charges this node knows to admit: 1 if it knows the ids, else 0.
    """
    verdicts = (
        *map(verdict_alone, charges[:known]),
        *(verdict_without_store(ask, charge) for charge in charges[known:]),
    )
    outcome, throttle_ms, limited_by = combine(verdicts)
    detail = verdicts if ask.detail else None
    return Decision(outcome, throttle_ms, False, len(verdicts), "fallback", limited_by, detail), verdicts


def without_call(planned: PlannedAsk, *, sequential: bool) -> tuple[Decision, tuple[Verdict, ...]]:
    """Return the decision on an ask that needs no call: no quota applies, or this node knows its ids."""
    ask = planned.ask
    if ask.mode == "admit" and not ask.detail:
        return ADMITTED_ALONE if planned.alone else ADMITTED[0], ()
    known = verdicts_of(planned, None)
    decision = combined(ask.mode, known, detail=ask.detail, sequential=sequential)
    return replace(decision, source="local") if known else decision, known


def suspend(
    ask: Ask, charges: Sequence[Charge], wait_ms: int, *, away: bool
) -> tuple[Decision, tuple[Verdict, ...]]:
    """Throttle a suspended ask for ``wait_ms``, unless a quota rejects it or throttles it for as long.

    Only verdicts that need no counter are known: a limit of 0 rejects, and so does usage that no empty bucket
    could hold. While the store is away, each quota's ``on_store_failure`` counts too.

    Args:
        away: whether the store is not available.
    """
    verdicts = tuple(_known(ask, charge, away=away) for charge in charges)
    outcome, throttle_ms, by = combine(verdicts)
    detail = verdicts if ask.detail else None
    source: Source = "fallback" if away else "local"
    if outcome != "reject" and (outcome != "throttle" or throttle_ms < wait_ms):
        outcome, throttle_ms, by, source = "throttle", wait_ms, THROTTLE_FACTOR, "local"
    return Decision(outcome, throttle_ms, False, len(verdicts), source, by, detail), verdicts


def combined(
    mode: Mode, verdicts: Sequence[Verdict], *, detail: bool, sequential: bool, by_policy: int = 0
) -> Decision:
    """Return the decision that verdicts make.

    Args:
        by_policy: how many of the verdicts a policy made instead of the store.
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
        tuple(verdicts) if detail else None,
    )


def by_policy_in(answer: Answer) -> int:
    """Return how many results of an answer the store did not judge; policies give those verdicts."""
    return 0 if answer.admits else sum([result.reason in BY_POLICY for result in answer.results])


def why_by_policy(answer: Answer) -> str:
    """Return why policies gave some verdicts on an ask that the store answered."""
    return "store_full" if answer.failure is None else answer.failure.reason


def _verdict(names: VerdictFields, result: ChargeResult) -> Verdict:
    is_known = result.observed == result.observed
    return Verdict(
        *names,
        result.outcome,
        result.throttle_ms,
        result.observed if is_known else None,
        result.remaining if is_known else None,
        result.reason,
        result.largest if result.reason == "too_large" else None,
    )


def _known(ask: Ask, charge: Charge, *, away: bool) -> Verdict:
    verdict = verdict_without_store(ask, charge)
    quota = charge.quota
    # With a limit of 0 seen ids still pass, and only the store knows which ids were seen.
    if away or (verdict.outcome == "reject" and quota.algorithm != "producer_ids"):
        return verdict
    admitted = replace(verdict, outcome="admit", throttle_ms=0, reason=None, largest=None)
    most = _largest(quota)
    if most is None or admitted.enforcement == "delay" or not 0 < usage_of(ask, quota) > most:
        return admitted
    return replace(admitted, outcome="reject", reason="too_large", largest=most)


def _largest(quota: Quota) -> float | None:
    """Return the most that an empty bucket could hold; None for ids: only the store knows which are new."""
    if quota.algorithm == "producer_ids":
        return None
    if quota.algorithm == "token_bucket":
        return quota.burst
    return sampled_rate.largest_usage(quota.limit, sampled_rate.kept_samples(quota.samples), quota.sample_ms)


_ADMITS: Final = Verdict("", "", "", 0.0, "deny", shadow=False, outcome="admit", throttle_ms=0)
ADMITTED: Final[Sequence[Decision]] = [
    combined("admit", (_ADMITS,) * charges, detail=False, sequential=False)
    for charges in range(MOST_CHARGES + 1)
]
"""The decision if every quota admits, by the number of quotas; all asks share these objects."""
ADMITTED_ALONE: Final = replace(ADMITTED[1], source="local")
"""The decision on an ask whose ids are all known to this node, if no other quota applies."""
