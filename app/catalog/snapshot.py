"""The snapshot: all quotas in memory, immutable, from which decisions are made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from app.domain.entity import Entity, Rung, rung_of
from app.domain.ladder import Quotas
from app.domain.quota import Quota

SnapshotChange = tuple[str, Entity, Quota | None]
"""A quota key, the entity that it is set on, and the quota; None removes it."""


@dataclass(slots=True)
class SetQuota:
    """A quota, and the entity that it is set on.

    Attributes:
        compiled: a value that decisions derive from these two and keep here; None at first.
    """

    quota: Quota
    entity: Entity
    compiled: Any = None


Rungs = Mapping[tuple[str, Rung], Mapping[Any, SetQuota]]
"""All quotas again, by quota key and rung, and then by the names that ``rung_of`` returns."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All quotas, as of a catalog version.

    >>> quota, user = Quota("request_rate", 5, "sampled_rate", "delay"), Entity.of(user="alice")
    >>> old = Snapshot()
    >>> new = old.apply(7, [("request_rate", user, quota)])
    >>> new.version, new.quotas["request_rate"][user].limit, old.quotas
    (7, 5, mappingproxy({}))
    >>> new.rungs["request_rate", "user"]["alice"].quota is quota
    True

    Attributes:
        quotas: by quota key and entity, for explanations.
        rungs: the same quotas by names, for the look-ups of decisions.
    """

    version: int = -1
    quotas: Quotas = field(default_factory=lambda: MappingProxyType({}))
    rungs: Rungs = field(default_factory=lambda: MappingProxyType({}), repr=False, compare=False)

    @classmethod
    def of(cls, quotas: Quotas, version: int = 0) -> Snapshot:
        """The snapshot of these quotas."""
        return cls().apply(
            version,
            [
                (key, entity, quota)
                for key, by_entity in quotas.items()
                for entity, quota in by_entity.items()
            ],
        )

    def apply(self, version: int, changes: Iterable[SnapshotChange]) -> Snapshot:
        """The snapshot after some changes; it shares all other quotas with this one."""
        changed = ChangedSnapshot(self)
        for change in changes:
            changed.take(change)
        return changed.snapshot(version)


class ChangedSnapshot:
    """A snapshot in the making: a base and changes to it, which can be taken in parts.

    Only the dicts of changed quota keys and rungs are copied, each in a few milliseconds for 100,000 quotas.
    """

    def __init__(self, base: Snapshot) -> None:
        self._base = base
        self._quotas: dict[str, dict[Entity, Quota]] = {}
        self._rungs: dict[tuple[str, Rung], dict[Any, SetQuota]] = {}

    def take(self, change: SnapshotChange) -> None:
        """Apply a change."""
        key, entity, quota = change
        quotas = self._quotas.get(key)
        if quotas is None:
            quotas = self._quotas[key] = dict(self._base.quotas.get(key, ()))
        rung, names = rung_of(entity)
        on_rung = self._rungs.get((key, rung))
        if on_rung is None:
            on_rung = self._rungs[key, rung] = dict(self._base.rungs.get((key, rung), ()))
        if quota is None:
            quotas.pop(entity, None)
            on_rung.pop(names, None)
        else:
            quotas[entity] = quota
            on_rung[names] = SetQuota(quota, entity)

    def snapshot(self, version: int) -> Snapshot:
        """The snapshot after these changes."""
        base = self._base
        if not self._quotas:
            return Snapshot(version, base.quotas, base.rungs)
        return Snapshot(
            version,
            MappingProxyType({**base.quotas, **self._quotas}),
            MappingProxyType({**base.rungs, **self._rungs}),
        )
