"""Rows with verdicts that are no decisions, and their effects on a bucket in either replay."""

from __future__ import annotations

from app.domain.holds import MOST_HOLDS
from app.domain.undo import Stamp, give_back_sample
from workers.jobs.verdicts import lease_ms_of
from workers.jobs.whatif.buckets import Bucket, Ids, Level, Rate
from workers.jobs.whatif.quota_form import THROTTLE, QuotaForm
from workers.jobs.whatif.rows import LoggedAsk


def follow(ask: LoggedAsk, bucket: Bucket, form: QuotaForm, usage: float, *, is_over: bool = False) -> None:
    """Apply a row of a lease, of a charge in a slot of a cluster that was taken back, or of known ids.

    Args:
        is_over: the bucket held nothing for the lease any more when it was settled.
    """
    if isinstance(bucket, Ids):
        if ask.kind in {"renewal", "ids"}:
            _renew(bucket, form, ask.at_ms, ask.ids)
    elif ask.kind in {"lease", "settlement"}:
        _follow_lease(ask, bucket, form, usage, is_over=is_over)
    elif ask.kind == "undone":
        bucket.charge(form, usage, ask.at_ms)
    elif ask.kind == "undo":
        _give_back(bucket, form, usage, ask.at_ms)


def _follow_lease(
    ask: LoggedAsk, bucket: Rate | Level, form: QuotaForm, usage: float, *, is_over: bool
) -> None:
    """Hold the units of a lease that was granted, or charge the spent units of a settled one."""
    change = ask.change or {}
    name = (change.get("what") or "").encode()
    found, now_ms = bucket.domain(), max(ask.at_ms, bucket.newest_ms)
    charge = form.charge(usage, now_ms, ask.at_ms)
    found.reckon(charge)
    is_refused = ask.rank >= THROTTLE or ask.source == "fallback"
    if ask.kind == "settlement":
        if not is_over:
            found.settle(charge, name)
    elif not is_refused and usage > 0 and len(found.holds) < MOST_HOLDS:
        found.hold(charge, name, lease_ms_of(change.get("after")) or 0)
    else:
        found.touch(charge)
    bucket.adopt(found)  # type: ignore[arg-type]  # the bucket's own


def _give_back(bucket: Rate | Level, form: QuotaForm, units: float, at_ms: int) -> None:
    """Take back a charge that was made at a time, in a slot of a cluster."""
    if isinstance(bucket, Rate):
        state, _ = give_back_sample(bucket.state(), Stamp(0, at_ms, units, b""))
        bucket.take(state)
    elif bucket.tokens is not None:
        bucket.tokens = min(bucket.tokens + units, form.quota.burst)


def _renew(bucket: Ids, form: QuotaForm, at_ms: int, ids: tuple[bytes, ...]) -> None:
    """Write known ids to the open layer, uncharged."""
    now_ms = max(at_ms, bucket.newest_ms)
    for each in bucket.unseen(form, at_ms, ids):
        bucket.exact.adopt(each, now_ms, form.quota.layers)
    bucket.note()
    bucket.touch(form, at_ms, ids)
