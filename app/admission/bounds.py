"""The bounds of a caller's key, laid on the quotas that were found for its asks."""

from __future__ import annotations

from collections.abc import Sequence

from app.admission.plan import Match
from app.domain import bounds
from app.domain.ask import Ask
from app.domain.binding import Binding


def bounded(ask: Ask, matches: Sequence[Match], bound_to: Sequence[Binding], place: int) -> tuple[Match, ...]:
    """The matches of an ask of a bound caller: of buckets that others share, as deny; each keeps its bucket.

    Args:
        place: of the ask among those that are asked together.

    Raises:
        OutOfBounds: the ask records in a shared bucket, or gives back to one.
    """
    found = bounds.bounded(ask, [match.applied for match in matches], bound_to, place)
    return tuple(Match(applied, match.key) for applied, match in zip(found, matches, strict=True))
