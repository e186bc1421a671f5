"""Decides without the store: each quota by its own ``on_store_failure``, limits of 0 as ever."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from app.domain.ask import Ask
from app.domain.decision import Decision, Outcome, Verdict, combine
from app.domain.ladder import AppliedQuota
from app.domain.quota import MAX_THROTTLE_MS
from app.domain.usage import enforcement_of, usage_of

THROTTLE_MS: Final = 1_000
"""How long an ask must wait when a quota throttles it without the store."""


def without_store(
    ask: Ask, quotas: Sequence[AppliedQuota], alone: Verdict | None = None
) -> tuple[Decision, tuple[Verdict, ...]]:
    """Decide without counters and charge nothing: admit, unless a quota throttles or has limit 0.

    A record is never refused, as the work is done: where another ask would be refused, it is delayed.
    A refund is admitted.

    Args:
        alone: the verdict on the ask's ids, which are the first quota, if this node knows them.
    """
    known = () if alone is None else (alone,)
    verdicts = (*known, *(verdict_without_store(ask, quota) for quota in quotas[len(known) :]))
    outcome, throttle_ms, limited_by = combine(verdicts)
    detail = verdicts if ask.detail else None
    return Decision(outcome, throttle_ms, False, len(verdicts), "fallback", limited_by, detail), verdicts


def verdict_when_full(ask: Ask, found: AppliedQuota) -> Verdict:
    """Return the verdict of a quota for whose new bucket the store has no room."""
    return replace(verdict_without_store(ask, found), reason="store_full")


def verdict_without_store(ask: Ask, found: AppliedQuota) -> Verdict:
    """Return the verdict of a quota without its counter."""
    quota = found.quota
    named = (quota.key, found.entity, found.bucket, quota.limit, enforcement_of(ask, quota), quota.shadow)
    if ask.mode == "refund":
        return Verdict(*named, "admit", 0)
    if quota.limit == 0 and usage_of(ask, quota) > 0:
        if ask.mode == "record":
            longest = quota.window_ms if quota.algorithm == "producer_ids" else quota.longest_delay_ms
            return Verdict(*named, "delay", min(longest, MAX_THROTTLE_MS))
        return Verdict(*named, "reject", 0, reason="too_large", largest=0.0)
    if quota.on_store_failure == "throttle":
        refused: Outcome = "delay" if ask.mode == "record" else "throttle"
        return Verdict(*named, refused, THROTTLE_MS, reason="store_failure")
    return Verdict(*named, "admit", 0)
