"""The changes of an import: Kafka's mapped quotas against the catalog's, and notes for the operator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from app.domain.entity import Entity
from app.domain.errors import QuotaValueError
from app.domain.quota import CONTROLLER_MUTATION_RATE, Defaults
from app.domain.quota_value import check
from app.kafka.mapping import IMPORTED_FIELDS, QuotaMapping
from app.kafka.quotas import KafkaQuotas


def alterations(
    mapping: QuotaMapping, catalog: Mapping[str, Mapping[str, Mapping[str, object]]]
) -> list[dict[str, Any]]:
    """Return the alterations of the catalog. A quota that does not fit its current fields is skipped."""
    altered: list[dict[str, Any]] = []
    for entity, quotas in mapping.quotas.items():
        current, changed = catalog.get(entity, {}), {}
        for quota, fields in quotas.items():
            try:
                new = with_unchanged(entity, quota, fields, current.get(quota))
            except QuotaValueError as wrong:
                mapping.skip(entity, quota, fields["limit"], str(wrong))
                continue
            if current.get(quota) != new:
                changed[quota] = new
        if changed:
            altered.append({"entity": entity, "quotas": changed})
    return altered


def with_unchanged(
    entity: str, quota: str, fields: Mapping[str, object], current: Mapping[str, object] | None
) -> dict[str, object]:
    """Return a quota with the fields that an import sets, and its other fields unchanged.

    >>> current = {"limit": 9, "samples": 21, "shadow": True}
    >>> with_unchanged("user=a", "producer_byte_rate", {"limit": 5}, current)
    {'limit': 5, 'shadow': True}

    Raises:
        QuotaValueError: the two do not go together.
    """
    kept = {name: value for name, value in (current or {}).items() if name not in IMPORTED_FIELDS}
    return check(quota, {**kept, **fields}, Entity.parse(entity), Defaults())


def report(bootstrap: str, kafka: KafkaQuotas, mapping: QuotaMapping) -> dict[str, Any]:
    """Return the report of an import, without the changes."""
    return {
        "kafka": {"bootstrap": bootstrap, "brokers": [broker.id for broker in kafka.brokers]},
        "scope": mapping.scope,
        "multiplied_by": mapping.times,
        "notes": [*_scope_notes(mapping), *mapping.notes],
        "left_out": [one._asdict() for one in sorted(mapping.skipped)],
    }


def _scope_notes(mapping: QuotaMapping) -> Iterator[str]:
    if mapping.scope == "broker":
        yield "Limits hold on each broker separately, as in Kafka (scope: broker); asks must name the broker."
    else:
        yield (
            f"Limits are multiplied by {mapping.times}, the number of brokers, and hold for all of them "
            "together (scope: cluster). Limits of single brokers are not multiplied."
        )
    if any(CONTROLLER_MUTATION_RATE in quotas for quotas in mapping.quotas.values()):
        yield (
            "controller_mutation_rate is enforced by the one active controller: it is not multiplied, and "
            "holds for the whole cluster (scope: cluster)."
        )
