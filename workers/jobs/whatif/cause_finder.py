"""Finds the cause for which the replay of a logged ask gives something else."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

from app.domain.quota import PRODUCER_BYTE_RATE
from workers.jobs.whatif.causes import Cause
from workers.jobs.whatif.followed_bucket import FollowedBucket
from workers.jobs.whatif.quota_form import QuotaForm
from workers.jobs.whatif.rows import LoggedAsk, LoggedChange, VerdictOfAsk

GRACE_MS: Final = 2_000
"""How long nodes may differ about a change; they follow within a second."""


@dataclass(slots=True)
class CauseFinder:
    """Knows the changes in a log.

    Attributes:
        is_whole: the log has the first batch of every node, so all buckets were empty before it.
        began_ms: the time of the first ask.
    """

    is_whole: bool
    began_ms: int | None = None
    _quotas_ms: dict[str, int] = field(default_factory=dict)
    _factor_ms: dict[str, int] = field(default_factory=dict)

    def note(self, change: LoggedChange) -> None:
        """Note a change of an entity's quotas, or of a node's throttle factor."""
        if change.kind == "quota":
            self._quotas_ms[change.change.get("what") or ""] = change.at_ms
        elif change.kind == "factor":
            self._factor_ms[change.node] = change.at_ms

    def of_row(self, ask: LoggedAsk) -> Cause | None:
        """The cause that the row itself names."""
        if ask.replayed:
            return "replayed"
        if ask.failure == "store_full" or any(each.reason == "store_full" for each in ask.verdicts):
            return "store_full"
        if ask.source == "fallback":
            return "fallback"
        if ask.limiting == "throttle_factor":
            return "factor_changed"
        if ask.source == "store" and ask.mode == "peek" and not ask.has_order:
            return "unordered"
        return "local" if ask.source == "local" else None

    def may_be_older(self, form: QuotaForm, at_ms: int) -> bool:
        """Whether a bucket may hold something from before the log began."""
        if self.is_whole or self.began_ms is None:
            return False
        quota = form.quota
        lasts_ms = max(quota.layers.ttl_ms, quota.window_ms) if form.counts_ids else form.kept_ms
        return at_ms - self.began_ms < lasts_ms

    def of_bucket(
        self, ask: LoggedAsk, verdict: VerdictOfAsk, followed: FollowedBucket, form: QuotaForm
    ) -> Cause | None:
        """The cause that the bucket's own history names."""
        quota = form.quota
        if followed.doubt is not None:
            return followed.doubt
        if verdict.correction:
            return "clock"
        if verdict.order is not None:
            return "slots"
        is_known = followed.is_seen and not (form.counts_ids and self.may_be_older(form, ask.at_ms))
        if not self.is_whole and not is_known:
            return "older"
        if ask.at_ms - followed.late_ms < (quota.window_ms if form.counts_ids else form.kept_ms):
            return "late"
        changed_ms = self._quotas_ms.get(verdict.quota.applied.entity, -math.inf)
        has_changed = followed.is_seen and (followed.limit, followed.burst) != (form.limit, quota.burst)
        if abs(ask.at_ms - changed_ms) <= GRACE_MS or (has_changed and quota.key != PRODUCER_BYTE_RATE):
            return "quotas_changed"
        factor_ms = self._factor_ms.get(ask.node, -math.inf)
        if quota.key == PRODUCER_BYTE_RATE and (has_changed or abs(ask.at_ms - factor_ms) <= GRACE_MS):
            return "factor_changed"
        return None
