"""What a source of quotas offers, and the rows that it hands over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from app.domain.quota_value import Definition

EVERYTHING: Final = -1
"""Changed since this version: all there is."""


class CatalogAway(Exception):
    """The catalog cannot be reached, or does not answer in time; a write may or may not have been made."""


@dataclass(frozen=True, slots=True)
class Row:
    """One quota as it is kept.

    Attributes:
        entity: its canonical spelling.
        definition: None for a tombstone.
        epoch: the catalog version that last gave it empty buckets; 0 if none did.
        identity: ``Quota.identity`` when it was last written, to see whether the next write changes it.
        version: the catalog version that wrote it.
    """

    entity: str
    quota: str
    definition: Definition | None
    epoch: int
    identity: str
    version: int


@dataclass(frozen=True, slots=True)
class Changes:
    """The rows written after some version, as they stand at ``version``."""

    version: int
    rows: Sequence[Row]


class QuotaSource(Protocol):
    """Where quotas come from; ``sql`` is the one built in."""

    async def changed(self, since: int) -> Changes:
        """What was written after a version, removals among it; with ``EVERYTHING``, all there is.

        Rows and version belong together: a later call with that version misses nothing.

        Raises:
            CatalogAway: the source cannot be reached.
        """
        ...
