"""Delays where request quotas are measured at the end of the byte delay (KIP-124's own text)."""

from __future__ import annotations

from collections.abc import Sequence

from app.domain.decision import BYTE_RATES, REQUEST_RATES
from app.domain.quota import MAX_THROTTLE_MS
from workers.jobs.whatif.buckets import Bucket
from workers.jobs.whatif.quota_form import DELAY, QuotaForm

Part = tuple[Bucket, QuotaForm, float, bool]
"""A bucket, the quota's form, the usage, and whether the quota is in shadow."""


def sequential(
    parts: Sequence[Part], at_ms: int, ids: tuple[bytes, ...], measured: Sequence[bool] | None = None
) -> tuple[list[int], int]:
    """The answers of the buckets of an ask, and the delay that they add up to if none refuses it.

    Args:
        measured: whether each bucket was measured, so that its delay counts as a byte delay; by default all.
    """
    answers = [bucket.ask(form, usage, at_ms, ids) for bucket, form, usage, _ in parts]
    byte_delay = max(
        (
            answer
            for place, (answer, (_, form, _, shadow)) in enumerate(zip(answers, parts, strict=True))
            if form.rank == DELAY and form.quota.key in BYTE_RATES and not shadow
            if measured is None or measured[place]
        ),
        default=0,
    )
    if byte_delay > 0:
        for place, (bucket, form, usage, _) in enumerate(parts):
            if form.quota.key in REQUEST_RATES:
                answers[place] = bucket.ask(form, usage, at_ms, ids, byte_delay)
    delays = [
        (form.quota.key, answer)
        for answer, (_, form, _, shadow) in zip(answers, parts, strict=True)
        if not shadow
    ]
    summed = sum(
        max((delay for key, delay in delays if key in keys), default=0)
        for keys in (BYTE_RATES, REQUEST_RATES)
    )
    others = [delay for key, delay in delays if key not in BYTE_RATES + REQUEST_RATES]
    return answers, max(min(summed, MAX_THROTTLE_MS), *others, 0)
