"""The snapshot: all quotas in memory, immutable, from which decisions are made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from app.domain.entity import Entity
from app.domain.ladder import Quotas
from app.domain.quota import Quota

SnapshotChange = tuple[str, Entity, Quota | None]
"""A quota key, the entity that it is set on, and the quota; None removes it."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All quotas, as of a catalog version.

    >>> quota, user = Quota("request_rate", 5, "sampled_rate", "delay"), Entity.of(user="alice")
    >>> old = Snapshot()
    >>> new = old.apply(7, [("request_rate", user, quota)])
    >>> new.version, new.quotas["request_rate"][user].limit, old.quotas
    (7, 5, mappingproxy({}))
    """

    version: int = -1
    quotas: Quotas = field(default_factory=lambda: MappingProxyType({}))

    def apply(self, version: int, changes: Iterable[SnapshotChange]) -> Snapshot:
        """The snapshot after some changes; it shares all other quotas with this one.

        Only the dicts of changed quota keys are copied, which takes a millisecond for 100,000 quotas.
        """
        touched: dict[str, dict[Entity, Quota]] = {}
        for key, entity, quota in changes:
            if key not in touched:
                touched[key] = dict(self.quotas.get(key, {}))
            if quota is None:
                touched[key].pop(entity, None)
            else:
                touched[key][entity] = quota
        if not touched:
            return Snapshot(version, self.quotas)
        merged: Mapping[str, Mapping[Entity, Quota]] = {**self.quotas, **touched}
        return Snapshot(version, MappingProxyType(merged))
