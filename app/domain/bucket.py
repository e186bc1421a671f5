"""Buckets by their names: how a name is read, which quotas charge it, and the ask that only looks at it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from app.domain.ask import Ask
from app.domain.entity import ANY, Entity, EntityError, Name, decode_name, network_of, normalise_ip, read_name
from app.domain.ladder import Applied, Quotas, Rules, applied
from app.domain.quota import KEYS, PRODUCER_IDS_RATE

OF_BROKER: Final = ";broker="
"""What comes before the broker, in the name of a bucket whose quota has the scope broker."""

DEFAULT_IP: Final = Entity.of(ip=ANY)
NOTHING: Final = {key.usage: 0.0 for key in KEYS.values() if key.name != PRODUCER_IDS_RATE}


@dataclass(frozen=True, slots=True)
class BucketName:
    """The name of a bucket, as decisions spell it.

    >>> str(BucketName.parse("client-id=etl,user=alice;broker=1", Rules()))
    'user=alice,client-id=etl;broker=1'
    >>> str(BucketName.parse("ip=2001:DB8::7/64", Rules()))
    'ip=2001%3Adb8%3A%3A%2F64'

    Attributes:
        entity: whose bucket it is, never a default; an ``ip`` may be an IPv6 network.
        broker: of the broker whose own bucket it is, where the entity names none.
    """

    entity: Entity
    broker: str | None = None

    @classmethod
    def parse(cls, text: str, rules: Rules) -> BucketName:
        """Read a name, spelled as an entity in a path is; a client-id may be empty.

        Raises:
            EntityError: no bucket can have this name.
        """
        spelled, of_broker, broker = text.partition(OF_BROKER)

        def read(type_: str, name: str) -> Name:
            return _read(type_, name, rules)

        entity = Entity.parse(spelled, read)
        if not of_broker:
            return cls(entity)
        if "broker" in entity.types:
            raise EntityError(f"{entity} names its broker already")
        return cls(entity, str(read("broker", broker)))

    def __str__(self) -> str:
        return f"{self.entity}{f';{Entity.of(broker=self.broker)}' if self.broker is not None else ''}"

    def peek(self, at_ms: int | None = None) -> Ask:
        """An ask that charges this bucket, if any does, for no usage at all, and writes nothing."""
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

    def charged_by(self, quotas: Quotas, rules: Rules) -> list[Applied]:
        """The quotas that charge this bucket, in the order of section 3: of each key one at most."""
        if self._is_network:
            # only the default has buckets of networks, and an address in one may have a quota of its own
            quotas = {key: {e: q for e, q in its.items() if e == DEFAULT_IP} for key, its in quotas.items()}
        found = applied(self.peek(), quotas, rules)
        return [quota for quota in found if quota.bucket == str(self)]

    @property
    def _is_network(self) -> bool:
        type_, name = self.entity.parts[0]
        return type_ == "ip" and "/" in str(name)


def _read(type_: str, spelled: str, rules: Rules) -> Name:
    """A name in the name of a bucket."""
    if type_ == "client-id" and not spelled:
        return ""  # a client of that name
    if type_ == "ip" and "/" in (network := decode_name(type_, spelled)):
        return _network(network, rules)
    name = read_name(type_, spelled)
    if name is ANY:
        raise EntityError(f"{type_}=* is a default, which has no bucket of its own; %2A is the name *")
    return name


def _network(text: str, rules: Rules) -> str:
    """The IPv6 network, given by any of its addresses, that shares a bucket of the default's."""
    address, _, prefix = text.partition("/")
    try:
        normalised = normalise_ip(address)
    except EntityError as error:
        raise EntityError(f"ip {error}") from None
    if ":" not in normalised or prefix != str(rules.ipv6_prefix):
        raise EntityError(f"ip: the networks that share a bucket are IPv6 ones of /{rules.ipv6_prefix}")
    return network_of(normalised, rules.ipv6_prefix)
