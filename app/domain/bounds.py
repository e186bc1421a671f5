"""What the holder of a bound key may do to buckets that others share: spend strictly, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from app.domain.ask import Ask
from app.domain.binding import Binding, field_of, parts_of
from app.domain.ladder import Applied


class OutOfBounds(Exception):
    """The caller is bound, and its record or refund would touch a bucket that others share.

    Attributes:
        bucket: the first such bucket.
        field: what of the ask leads there.
        place: of the ask among those that were asked together.
    """

    def __init__(self, bucket: str, field: str, place: int) -> None:
        super().__init__(f"{bucket} is shared with others")
        self.bucket = bucket
        self.field = field
        self.place = place


def bounded(
    ask: Ask, found: Sequence[Applied], bound_to: Sequence[Binding], place: int = 0
) -> Iterator[Applied]:
    """The quotas that apply to an ask of a bound caller: those whose buckets others share, as deny.

    So whatever it asks, it puts nobody else into debt, and gives nobody else's usage back.

    Raises:
        OutOfBounds: the ask records in a shared bucket, or gives back to one.
    """
    if not bound_to:
        yield from found
        return
    for each in found:
        parts = parts_of(each.bucket)
        if any(binding.owns(parts) for binding in bound_to):
            yield each
        elif ask.mode in ("record", "refund"):
            raise OutOfBounds(each.bucket, field_of(each.bucket), place)
        else:
            yield replace(each, quota=replace(each.quota, enforcement="deny"))
