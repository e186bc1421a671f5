"""Which quotas apply to an ask, and which bucket each charges (section 4 of the design)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Final

from app.domain.ask import Ask
from app.domain.entity import ANY, Entity, Name, network_of
from app.domain.quota import KEYS, MAX_CONNECTION_CREATION_RATE, REQUEST_PERCENTAGE, REQUEST_RATE, Quota

Quotas = Mapping[str, Mapping[Entity, Quota]]
"""Every quota there is: by quota key, then by entity."""

EXEMPT_FOR_CLUSTER_ACTIONS: Final = frozenset({REQUEST_RATE, REQUEST_PERCENTAGE})


@dataclass(frozen=True, slots=True)
class Rules:
    """What the deployment decides about matching."""

    inter_broker_listener: str | None = None
    ipv6_prefix: int = 64


@dataclass(frozen=True, slots=True)
class Applied:
    """A quota that applies, the entity it is set on, and the bucket it charges.

    Attributes:
        owner: the entity whose name is the hash tag of the bucket's key: the user for a user or a pair.
    """

    quota: Quota
    entity: str
    bucket: str
    owner: str


@dataclass(frozen=True, slots=True)
class Explained:
    """A quota that applies, and its ladder, most specific rung first: the first limit there is decides.

    Attributes:
        ladder: entities, and the limits set on them; None where nothing is set.
    """

    applied: Applied
    ladder: tuple[tuple[str, float | None], ...]


def applied(ask: Ask, quotas: Quotas, rules: Rules) -> list[Applied]:
    """The quotas that apply to an ask, in the order in which ties are broken.

    A quota applies when the ask has its usage field and the quota's entity can be formed from the ask.
    """
    found = []
    for entities, rungs in _asked(ask, quotas, rules):
        for entity, bucket in rungs:
            quota = entities.get(entity)
            if quota is not None:
                found.append(_applied(quota, entity, bucket, ask))
                break
    return found


def explained(ask: Ask, quotas: Quotas, rules: Rules) -> list[Explained]:
    """The quotas that apply to an ask, as ``applied`` has them, each with the whole of its ladder."""
    found = []
    for entities, rungs in _asked(ask, quotas, rules):
        ladder = [(entity, bucket, entities.get(entity)) for entity, bucket in rungs]
        matching = ((quota, entity, bucket) for entity, bucket, quota in ladder if quota is not None)
        if first := next(matching, None):
            shown = tuple(
                (str(entity), None if quota is None else quota.limit) for entity, _, quota in ladder
            )
            found.append(Explained(_applied(*first, ask), shown))
    return found


def client_rungs(user: str | None, client_id: str | None) -> Iterator[tuple[Entity, Entity]]:
    """Kafka's ladder for user and client-id: (entity of the quota, entity of the bucket), first match first.

    >>> [str(entity) for entity, _ in client_rungs("a", None)]
    ['user=a', 'user=*']
    >>> [str(bucket) for _, bucket in client_rungs("a", "c")]
    ['user=a,client-id=c', 'user=a,client-id=c', 'user=a', 'user=a,client-id=c', 'user=a,client-id=c', \
'user=a', 'client-id=c', 'client-id=c']
    """
    if user is not None:
        for name in (user, ANY):
            if client_id is not None:
                pair = Entity.of(user=user, client_id=client_id)
                yield Entity.of(user=name, client_id=client_id), pair
                yield Entity.of(user=name, client_id=ANY), pair
            yield Entity.of(user=name), Entity.of(user=user)
    if client_id is not None:
        yield Entity.of(client_id=client_id), Entity.of(client_id=client_id)
        yield Entity.of(client_id=ANY), Entity.of(client_id=client_id)


def broader(entity: Entity) -> tuple[Entity, ...]:
    """The default entities whose buckets may be this one's too, in the order of the ladder.

    >>> [str(e) for e in broader(Entity.of(user="a", client_id="c"))]
    ['user=a,client-id=*', 'user=*,client-id=c', 'user=*,client-id=*']
    """
    if entity.types == ("broker", "listener"):
        return ()
    names: list[tuple[Name, ...]] = [(name,) if name is ANY else (name, ANY) for _, name in entity.parts]
    chosen = (Entity(tuple(zip(entity.types, each, strict=True))) for each in product(*names))
    return tuple(found for found in chosen if found != entity)


def ip_rungs(ip: str, ipv6_prefix: int) -> Iterator[tuple[Entity, Entity]]:
    """The address, then the default, whose bucket is the address or its IPv6 network."""
    yield Entity.of(ip=ip), Entity.of(ip=ip)
    yield Entity.of(ip=ANY), Entity.of(ip=network_of(ip, ipv6_prefix))


def listener_rungs(broker: str | None, listener: str) -> Iterator[tuple[Entity, Entity]]:
    """The listener of the broker, the listener, the default listener."""
    if broker is not None:
        pair = Entity.of(broker=broker, listener=listener)
        yield pair, pair
    yield Entity.of(listener=listener), Entity.of(listener=listener)
    yield Entity.of(listener=ANY), Entity.of(listener=listener)


def broker_rungs(broker: str) -> Iterator[tuple[Entity, Entity]]:
    """The broker, then the default; each broker has a bucket of its own."""
    yield Entity.of(broker=broker), Entity.of(broker=broker)
    yield Entity.of(broker=ANY), Entity.of(broker=broker)


def _asked(
    ask: Ask, quotas: Quotas, rules: Rules
) -> Iterator[tuple[Mapping[Entity, Quota], Iterator[tuple[Entity, Entity]]]]:
    """The ladders of every key that an ask is held to, and what is set on entities for that key."""
    for key in KEYS.values():
        entities = quotas.get(key.name)
        if not entities or not _asks_for(key.usage, ask):
            continue
        if ask.cluster_action and key.name in EXEMPT_FOR_CLUSTER_ACTIONS:
            continue
        for rungs in _ladders(key.name, ask, rules):
            yield entities, rungs


def _ladders(key: str, ask: Ask, rules: Rules) -> Iterator[Iterator[tuple[Entity, Entity]]]:
    """The ladders of a key, each of which may match once: the ladder before ip, listener before broker."""
    types = KEYS[key].entities
    if ("user",) in types:
        yield client_rungs(ask.principal, ask.client_id)
    if ("ip",) in types and ask.ip is not None:
        yield ip_rungs(ask.ip, rules.ipv6_prefix)
    if key == MAX_CONNECTION_CREATION_RATE:
        if ask.listener is not None:
            yield listener_rungs(ask.broker, ask.listener)
        if ask.broker is not None and not _between_brokers(ask, rules):
            yield broker_rungs(ask.broker)


def _between_brokers(ask: Ask, rules: Rules) -> bool:
    """KIP-612: the inter-broker listener is neither held by nor recorded in the broker-wide bucket."""
    return ask.listener is not None and ask.listener == rules.inter_broker_listener


def _asks_for(usage: str, ask: Ask) -> bool:
    return ask.producer_ids is not None if usage == "producer_ids" else usage in ask.usage


def _applied(quota: Quota, entity: Entity, bucket: Entity, ask: Ask) -> Applied:
    name = str(bucket)
    type_, first = bucket.parts[0]
    owner = str(Entity(((type_, first),))) if type_ == "user" else name
    if quota.scope == "broker" and "broker" not in bucket.types and ask.broker is not None:
        name = f"{name};{Entity.of(broker=ask.broker)}"
    return Applied(quota, str(entity), name, owner)
