"""The causes for which a decision of a log is not what its replay gives, and their finder."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal

from app.domain.quota import PRODUCER_BYTE_RATE
from workers.jobs.whatif.quota_form import QuotaForm
from workers.jobs.whatif.rows import LoggedAsk, LoggedChange, VerdictOfAsk

if TYPE_CHECKING:
    from workers.jobs.whatif.followed_bucket import FollowedBucket, Surplus

Cause = Literal[
    "false_positive",
    "fallback",
    "late",
    "reset",
    "load",
    "quotas_changed",
    "factor_changed",
    "lease",
    "clock",
    "store_full",
    "slots",
    "replayed",
    "local",
    "older",
    "unordered",
    "other",
]
CAUSES: Final[Mapping[Cause, str]] = {
    "false_positive": "the filter took a new id as seen",
    "fallback": "the node answered without the store",
    "late": "the store may have charged an ask that was answered without it, and no row says so",
    "reset": "the bucket had been reset",
    "load": "a backfill had been loaded into the bucket",
    "quotas_changed": "the entity's quotas changed at about that time",
    "factor_changed": "the throttle factor held the ask, or changed at about that time",
    "lease": "the bucket held units for leases",
    "clock": "a clock was corrected",
    "store_full": "the store was full",
    "slots": "charges in several slots of a cluster were taken back",
    "replayed": "the answer was a kept one",
    "local": "the node answered from ids that it knew",
    "older": "the bucket is older than the log",
    "unordered": "the store numbers no call that has only peeks, so others may have been decided before it",
    "other": "none of these",
}
"""All causes, and their meanings; the list is closed."""

GRACE_MS: Final = 2_000
"""How long nodes may differ about a change; they follow within a second."""

EARLY_MS: Final = 3_000
"""How long before a row without the store its ask may have been charged: the store charged it in time, but
the answer was lost. A busy node waits up to 400 ms for an answer, and for 1,000 ids five times as long; the
rest is for clocks that differ."""


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
        self,
        ask: LoggedAsk,
        verdict: VerdictOfAsk,
        followed: FollowedBucket,
        form: QuotaForm,
        surplus: Surplus,
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
        if followed.explains_late(form, ask.at_ms, surplus):
            return "late"
        changed_ms = self._quotas_ms.get(verdict.quota.applied.entity, -math.inf)
        has_changed = followed.is_seen and (followed.limit, followed.burst) != (form.limit, quota.burst)
        if abs(ask.at_ms - changed_ms) <= GRACE_MS or (has_changed and quota.key != PRODUCER_BYTE_RATE):
            return "quotas_changed"
        factor_ms = self._factor_ms.get(ask.node, -math.inf)
        if quota.key == PRODUCER_BYTE_RATE and (has_changed or abs(ask.at_ms - factor_ms) <= GRACE_MS):
            return "factor_changed"
        return None
