"""What an ask to produce is told while the throttle factor is 0: to wait, without a word to the store."""

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


class Unthrottled:
    """No factor: nothing is held, and no limit scaled."""

    def on(self, *_: object) -> float:
        """1, for every ask."""
        return 1.0

    def hold_ms(self, *_: object) -> int:
        """Never asked for."""
        return 0


UNTHROTTLED: Final = Unthrottled()


def is_held(ask: Ask, factor: float) -> bool:
    """Whether a factor of 0 holds an ask; it has a say in no other."""
    return factor == 0 and ask.usage.get(PRODUCE, 0) > 0


def held(
    ask: Ask, matches: Sequence[Match], wait_ms: int, *, away: bool
) -> tuple[Decision, tuple[Verdict, ...]]:
    """Refuse an ask for so long, unless a quota says worse: rejects, or has it wait longer or as long.

    Of its quotas only that is known which needs no counter: a limit of 0 rejects, and so does what no empty
    bucket could hold; and, where the store is away, what each says then.

    Args:
        away: the store does not answer.
    """
    verdicts = tuple(_known(ask, match, away=away) for match in matches)
    outcome, throttle_ms, by = combine(verdicts)
    detail = verdicts if ask.detail else None
    if outcome == "reject" or (outcome == "throttle" and throttle_ms >= wait_ms):
        source: Source = "fallback" if away else "local"
        return Decision(outcome, throttle_ms, False, len(verdicts), source, by, detail), verdicts
    decision = Decision("throttle", wait_ms, False, len(verdicts), "local", THROTTLE_FACTOR, detail)
    return decision, verdicts


def _known(ask: Ask, match: Match, *, away: bool) -> Verdict:
    verdict = verdict_without_store(ask, match.applied)
    quota = match.applied.quota
    # Under a limit of 0 ids that were seen pass, and only the store knows which were.
    if away or (verdict.outcome == "reject" and quota.algorithm != "producer_ids"):
        return verdict
    plain = replace(verdict, outcome="admit", throttle_ms=0, reason=None, largest=None)
    most = _largest(quota)
    if most is None or plain.enforcement == "delay" or not 0 < usage_of(ask, quota) > most:
        return plain
    return replace(plain, outcome="reject", reason="too_large", largest=most)


def _largest(quota: Quota) -> float | None:
    """The most that an empty bucket could hold; of ids only the store knows how many are new."""
    if quota.algorithm == "producer_ids":
        return None
    if quota.algorithm == "token_bucket":
        return quota.burst
    return sampled_rate.largest(quota.limit, sampled_rate.kept(quota.samples), quota.sample_ms)
