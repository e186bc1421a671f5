"""Decides asks to produce while the throttle factor is 0: they must wait, and the store is not asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from app.admission.fallback import verdict_without_store
from app.admission.plan import Match
from app.domain import sampled_rate
from app.domain.ask import Ask
from app.domain.decision import Decision, LimitedBy, Source, Verdict, combine
from app.domain.quota import Quota
from app.domain.usage import usage_of

PRODUCE: Final = "produce_bytes"
THROTTLE_FACTOR: Final = LimitedBy("throttle_factor", None, None)


class FactorSource:
    """Gives the throttle factor: here always 1; ``app.admission.throttling.Throttling`` the one in force."""

    def on(self, _ask: Ask) -> float:
        """Return the factor for an ask; 1 if the factor does not apply to it."""
        return 1.0

    def hold_ms(self, _at_ms: int | None) -> int:
        """Return how long an ask to produce must wait while the factor is 0."""
        return 0


UNTHROTTLED: Final = FactorSource()


def is_held(ask: Ask, factor: float) -> bool:
    """Return whether a factor of 0 holds an ask: it has produce bytes above 0."""
    return factor == 0 and ask.usage.get(PRODUCE, 0) > 0


def hold_decision(
    ask: Ask, matches: Sequence[Match], wait_ms: int, *, away: bool
) -> tuple[Decision, tuple[Verdict, ...]]:
    """Throttle an ask for ``wait_ms``, unless a quota rejects it or makes it wait at least as long.

    Only verdicts that need no counter are known: a limit of 0 rejects, and so does usage that no empty bucket
    could hold. While the store is away, each quota's ``on_store_failure`` counts too.

    Args:
        away: whether the store is not available.
    """
    verdicts = tuple(_known(ask, match, away=away) for match in matches)
    outcome, throttle_ms, by = combine(verdicts)
    detail = verdicts if ask.detail else None
    source: Source = "fallback" if away else "local"
    if outcome != "reject" and (outcome != "throttle" or throttle_ms < wait_ms):
        outcome, throttle_ms, by, source = "throttle", wait_ms, THROTTLE_FACTOR, "local"
    return Decision(outcome, throttle_ms, False, len(verdicts), source, by, detail), verdicts


def _known(ask: Ask, match: Match, *, away: bool) -> Verdict:
    verdict = verdict_without_store(ask, match.applied)
    quota = match.applied.quota
    # With a limit of 0 seen ids still pass, and only the store knows which ids were seen.
    if away or (verdict.outcome == "reject" and quota.algorithm != "producer_ids"):
        return verdict
    plain = replace(verdict, outcome="admit", throttle_ms=0, reason=None, largest=None)
    most = _largest(quota)
    if most is None or plain.enforcement == "delay" or not 0 < usage_of(ask, quota) > most:
        return plain
    return replace(plain, outcome="reject", reason="too_large", largest=most)


def _largest(quota: Quota) -> float | None:
    """Return the most that an empty bucket could hold; None for ids: only the store knows the new ones."""
    if quota.algorithm == "producer_ids":
        return None
    if quota.algorithm == "token_bucket":
        return quota.burst
    return sampled_rate.largest_usage(quota.limit, sampled_rate.kept_samples(quota.samples), quota.sample_ms)
