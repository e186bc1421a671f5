"""Decisions by the quotas and the mapping of an import, by the oracle at a time of the test's own."""

from __future__ import annotations

from collections.abc import Sequence

import yaml

from app.domain.ask import Ask
from app.domain.entity import Entity
from app.domain.ladder import MatchingRules, applied_quotas
from app.domain.oracle import Oracle
from app.domain.quota import Defaults, Quota
from app.domain.quota_value import resolve
from app.envoy.importing import EnvoyImport
from app.envoy.mapping import DescriptorMapping
from app.envoy.names import valid_name


class Limiter:
    """Decides descriptors by the quotas and the mapping of an import."""

    def __init__(self, found: EnvoyImport) -> None:
        self.found = found
        self.mapping = DescriptorMapping.read(yaml.safe_dump(found.mapping(), sort_keys=False))
        self.quotas: dict[str, dict[Entity, Quota]] = {}
        for spelled, definitions in found.quotas.items():
            entity = Entity.parse(spelled)
            for key, definition in definitions.items():
                quota = resolve(key, definition, entity, Defaults(), 0)
                self.quotas.setdefault(key, {})[entity] = quota
        self.oracle = Oracle(b"secret")

    def ask(self, domain: str, entries: Sequence[tuple[str, str]], hits: int = 1) -> Ask:
        names = self.mapping.names(domain, entries)
        principal, client_id = valid_name(names.principal), valid_name(names.client_id)
        return Ask({names.usage: hits}, principal=principal, client_id=client_id, deny=True)

    def passes(self, ask: Ask, now_ms: int = 1_000_000) -> bool:
        return self.oracle.decide(ask, self.quotas, MatchingRules(), now_ms).decision == "admit"

    def policies(self, ask: Ask) -> list[tuple[int, int]]:
        """How many pass in how many seconds, for each quota that applies."""
        return [each.quota.allowance for each in applied_quotas(ask, self.quotas, MatchingRules())]
