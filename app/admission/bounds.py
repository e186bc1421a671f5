"""Applies the bounds of a caller's key to the quotas of its asks."""

from __future__ import annotations

from collections.abc import Sequence

from app.admission.plan import Match
from app.domain import bounds
from app.domain.ask import Ask
from app.domain.binding import Binding


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
