"""Finds the quotas that apply to an ask, and the bucket that each of them charges."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Final

from app.domain.ask import Ask
from app.domain.entity import ANY, Entity, Name, network_of
from app.domain.quota import (
    CLIENTS,
    KEYS,
    REQUEST_PERCENTAGE,
    REQUEST_RATE,
    Quota,
    QuotaKey,
)

Quotas = Mapping[str, Mapping[Entity, Quota]]
"""All quotas, by quota key and then by entity."""

EXEMPT_FOR_CLUSTER_ACTIONS: Final = frozenset({REQUEST_RATE, REQUEST_PERCENTAGE})

_PAIR: Final = ("broker", "listener")


@dataclass(frozen=True, slots=True)
class MatchingRules:
    """The settings of a deployment that affect which quotas match, and which buckets they charge."""

    inter_broker_listener: str | None = None
    ipv6_prefix: int = 64


# Final instead of frozen: it is made for every ask (docs/decisions/0051)
@dataclass(slots=True, unsafe_hash=True)
class AppliedQuota:
    """A quota that applies, the entity it is set on, and the bucket it charges.

    Attributes:
        owner: the entity in the hash tag of the bucket's store key: the user, for a user or a pair.
    """

    quota: Final[Quota]
    entity: Final[str]
    bucket: Final[str]
    owner: Final[str]


@dataclass(frozen=True, slots=True)
class ExplainedQuota:
    """A quota that applies, and its ladder, most specific rung first; the first rung with a limit decides.

    Attributes:
        ladder: pairs of an entity and the limit set on it, or None.
    """

    applied: AppliedQuota
    ladder: tuple[tuple[str, float | None], ...]


def applied_quotas(ask: Ask, quotas: Quotas, rules: MatchingRules) -> list[AppliedQuota]:
    """The quotas that apply to an ask, in the order that breaks ties.

    A quota applies if the ask has its usage field and names the quota's entity.
    """
    return [explained.applied for explained in explained_quotas(ask, quotas, rules)]


def explained_quotas(ask: Ask, quotas: Quotas, rules: MatchingRules) -> list[ExplainedQuota]:
    """The quotas that apply to an ask, as in ``applied_quotas``, each with its whole ladder.

    This is the rule in readable form. Decisions use tables instead (``app.admission.compiled``).
    """
    explained = []
    asked = [key for key in KEYS.values() if quotas.get(key.name) and asks_for(key, ask)]
    ladders = [(quotas[key.name], rungs) for key in asked for rungs in ladders_of(key.name, ask, rules)]
    for entities, rungs in ladders:
        ladder = [(entity, bucket, entities.get(entity)) for entity, bucket in rungs]
        matching = ((quota, entity, bucket) for entity, bucket, quota in ladder if quota is not None)
        if first := next(matching, None):
            shown = tuple(
                (str(entity), None if quota is None else quota.limit) for entity, _, quota in ladder
            )
            explained.append(ExplainedQuota(applied_on(*first, ask), shown))
    return explained


def client_rungs(user: str | None, client_id: str | None) -> Iterator[tuple[Entity, Entity]]:
    """Kafka's ladder for user and client-id: pairs of the quota's entity and the bucket's, first match first.

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


def covering_defaults(entity: Entity) -> tuple[Entity, ...]:
    """The default entities that may charge the same buckets as this entity, in the order of the ladder.

    >>> [str(e) for e in covering_defaults(Entity.of(user="a", client_id="c"))]
    ['user=a,client-id=*', 'user=*,client-id=c', 'user=*,client-id=*']
    """
    if entity.types == ("broker", "listener"):
        return ()
    names: list[tuple[Name, ...]] = [(name,) if name is ANY else (name, ANY) for _, name in entity.parts]
    chosen = (Entity(tuple(zip(entity.types, each, strict=True))) for each in product(*names))
    return tuple(default for default in chosen if default != entity)


def own_rungs(
    type_: str, name: str, by_default: Callable[[str], str] = str
) -> Iterator[tuple[Entity, Entity]]:
    """The ladder of an entity of one type: itself, then the default.

    Args:
        by_default: returns the name in the default's bucket; called only if that rung is reached.

    >>> [(str(entity), str(bucket)) for entity, bucket in own_rungs("broker", "1")]
    [('broker=1', 'broker=1'), ('broker=*', 'broker=1')]
    """
    own = Entity(((type_, name),))
    yield own, own
    yield Entity(((type_, ANY),)), Entity(((type_, by_default(name)),))


def listener_rungs(broker: str | None, listener: str) -> Iterator[tuple[Entity, Entity]]:
    """The ladder of a listener: on its broker, on any broker, then the default."""
    if broker is not None:
        pair = Entity.of(broker=broker, listener=listener)
        yield pair, pair
    yield from own_rungs("listener", listener)


def ladders_of(key: str, ask: Ask, rules: MatchingRules) -> Iterator[Iterator[tuple[Entity, Entity]]]:
    """The ladders of a quota key that an ask can match, each once: clients before ip, listener before broker.

    A rung is a pair of the quota's entity and the bucket's; the first rung on which a quota is set decides.
    """
    types = KEYS[key].entities
    if any(clients in types for clients in CLIENTS):
        yield client_rungs(ask.principal, ask.client_id)
    if ("ip",) in types and ask.ip is not None:
        yield own_rungs("ip", ask.ip, partial(network_of, ipv6_prefix=rules.ipv6_prefix))
    if (("listener",) in types or _PAIR in types) and ask.listener is not None:
        yield listener_rungs(ask.broker if _PAIR in types else None, ask.listener)
    if ("broker",) in types and ask.broker is not None and not _between_brokers(ask, rules):
        yield own_rungs("broker", ask.broker)


def _between_brokers(ask: Ask, rules: MatchingRules) -> bool:
    """Whether the ask is on the inter-broker listener, which KIP-612 exempts from the broker-wide limit."""
    return ask.listener is not None and ask.listener == rules.inter_broker_listener


def asks_for(key: QuotaKey, ask: Ask) -> bool:
    """Whether an ask has the usage that a key limits, and is not exempt from it."""
    if ask.cluster_action and key.name in EXEMPT_FOR_CLUSTER_ACTIONS:
        return False
    return ask.producer_ids is not None if key.usage == "producer_ids" else key.usage in ask.usage


def applied_on(quota: Quota, entity: Entity, bucket: Entity, ask: Ask) -> AppliedQuota:
    """A quota that is set on an entity, as it applies to an ask.

    Args:
        bucket: the entity of the bucket, by the ladder.
    """
    name = spelled = str(bucket)
    owner = str(Entity(bucket.parts[:1])) if len(bucket.parts) > 1 and bucket.parts[0][0] == "user" else name
    if quota.scope == "broker" and "broker" not in bucket.types and ask.broker is not None:
        name = f"{name};{Entity.of(broker=ask.broker)}"
    return AppliedQuota(quota, spelled if entity == bucket else str(entity), name, owner)
