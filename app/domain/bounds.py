"""Limits of bound keys: in buckets that others share, their asks may only spend, and under deny."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from app.domain.ask import Ask
from app.domain.binding import Binding, field_of, parts_of
from app.domain.errors import OutOfBoundsError
from app.domain.ladder import AppliedQuota


def restrict(
    ask: Ask, quotas: Sequence[AppliedQuota], bound_to: Sequence[Binding], place: int = 0
) -> Iterator[AppliedQuota]:
    """The quotas that apply to an ask of a bound caller; a quota with a shared bucket gets deny.

    So a bound caller can neither put others into debt nor give back the usage of others.

    Raises:
        OutOfBoundsError: the ask would record in, or refund to, a shared bucket.
    """
    if not bound_to:
        yield from quotas
        return
    for applied in quotas:
        parts = parts_of(applied.bucket)
        if any(binding.owns(parts) for binding in bound_to):
            yield applied
        elif ask.mode in ("record", "refund"):
            raise OutOfBoundsError(applied.bucket, field_of(applied.bucket), place)
        else:
            yield replace(applied, quota=replace(applied.quota, enforcement="deny"))
