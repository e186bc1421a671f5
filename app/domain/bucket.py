"""Bucket names: parsing, the quotas that charge a bucket, and the ask that peeks at it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Final

from app.domain.ask import Ask
from app.domain.entity import ANY, Entity, Name, decode_name, network_of, normalise_ip, read_name
from app.domain.errors import EntityError
from app.domain.ladder import AppliedQuota, MatchingRules, Quotas, applied_quotas
from app.domain.quota import KEYS, PRODUCER_IDS_RATE

OF_BROKER: Final = ";broker="
"""The separator of entity and broker in the name of a bucket with scope broker."""

DEFAULT_IP: Final = Entity.of(ip=ANY)
NOTHING: Final = {key.usage: 0.0 for key in KEYS.values() if key.name != PRODUCER_IDS_RATE}


@dataclass(frozen=True, slots=True)
class BucketName:
    """The name of a bucket, as decisions spell it.

    >>> str(BucketName.parse("client-id=etl,user=alice;broker=1", MatchingRules()))
    'user=alice,client-id=etl;broker=1'
    >>> str(BucketName.parse("ip=2001:DB8::7/64", MatchingRules()))
    'ip=2001%3Adb8%3A%3A%2F64'

    Attributes:
        entity: the owner of the bucket, never a default; an ``ip`` may be an IPv6 network.
        broker: the broker, if the quota has scope broker and the entity names none.
    """

    entity: Entity
    broker: str | None = None

    @classmethod
    def parse(cls, text: str, rules: MatchingRules) -> BucketName:
        """Parse a name, spelled like an entity in a URL path; a client-id may be empty.

        Raises:
            EntityError: no bucket has this name.
        """
        spelled, of_broker, broker = text.partition(OF_BROKER)
        entity = Entity.parse(spelled, partial(_read, rules=rules))
        if not of_broker:
            return cls(entity)
        if "broker" in entity.types:
            raise EntityError(f"{entity} already names its broker: leave out {OF_BROKER}{broker}")
        return cls(entity, str(_read("broker", broker, rules)))

    def __str__(self) -> str:
        return f"{self.entity}{f';{Entity.of(broker=self.broker)}' if self.broker is not None else ''}"

    def peek(self, at_ms: int | None = None) -> Ask:
        """An ask in mode peek with a usage of 0, to which every quota that charges this bucket applies."""
        names = {type_: str(name) for type_, name in self.entity.parts}
        address, _, _ = names.get("ip", "").partition("/")
        return Ask(
            usage=NOTHING,
            producer_ids=(),
            principal=names.get("user"),
            client_id=names.get("client-id"),
            ip=address or None,
            broker=names.get("broker", self.broker),
            listener=names.get("listener"),
            mode="peek",
            at_ms=at_ms,
        )

    def charged_by(self, quotas: Quotas, rules: MatchingRules) -> list[AppliedQuota]:
        """The quotas that charge this bucket, at most one of each key, in the order of ``KEYS``."""
        if self._is_network:
            # only the default quota has buckets of networks; an address inside may have its own quota
            quotas = {
                key: {e: q for e, q in by_entity.items() if e == DEFAULT_IP}
                for key, by_entity in quotas.items()
            }
        applied = applied_quotas(self.peek(), quotas, rules)
        return [quota for quota in applied if quota.bucket == str(self)]

    @property
    def _is_network(self) -> bool:
        type_, name = self.entity.parts[0]
        return type_ == "ip" and "/" in str(name)


def _read(type_: str, spelled: str, rules: MatchingRules) -> Name:
    """Parse one name inside a bucket's name."""
    if type_ == "client-id" and not spelled:
        return ""  # the client whose id is empty
    if type_ == "ip" and "/" in (network := decode_name(type_, spelled)):
        return _network(network, rules)
    name = read_name(type_, spelled)
    if name is ANY:
        raise EntityError(f"{type_}=* is a default, which has no bucket of its own; write %2A for the name *")
    return name


def _network(text: str, rules: MatchingRules) -> str:
    """The IPv6 network that shares one bucket of the default quota, from any address in it."""
    address, _, prefix = text.partition("/")
    try:
        normalised = normalise_ip(address)
    except EntityError as error:
        raise EntityError(f"ip {error}") from None
    if ":" not in normalised or prefix != str(rules.ipv6_prefix):
        raise EntityError(f"ip: only IPv6 networks of /{rules.ipv6_prefix} have a bucket")
    return network_of(normalised, rules.ipv6_prefix)
