"""The port of quota sources, and the rows that they return."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from app.domain.quota_value import Definition

EVERYTHING: Final = -1
"""The version to ask for all rows."""


@dataclass(frozen=True, slots=True)
class QuotaRow:
    """One quota as stored.

    Attributes:
        entity: its canonical spelling.
        definition: None for a tombstone.
        epoch: the catalog version that last reset its buckets; 0 if none did.
        identity: ``Quota.identity`` when it was last written, so that the next write can compare.
        version: the catalog version that wrote it.
        since_ms: when its definition last changed (since 1970); 0 if unknown.
    """

    entity: str
    quota: str
    definition: Definition | None
    epoch: int
    identity: str
    version: int
    since_ms: int = 0


@dataclass(frozen=True, slots=True)
class Changes:
    """The rows written after an earlier version, as of ``version``."""

    version: int
    rows: Sequence[QuotaRow]


class QuotaSource(Protocol):
    """A source of quotas; the built-in one is ``Sql``."""

    async def changed(self, since: int) -> Changes:
        """The rows written after a version, including tombstones; all rows for ``EVERYTHING``.

        Rows and version are from the same moment, so a later call with that version misses nothing.

        Raises:
            CatalogUnavailableError: the source cannot be reached.
        """
        ...
