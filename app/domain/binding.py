"""Bindings: the entities that the holder of a key may ask for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote

from app.domain.ask import Ask
from app.domain.entity import Entity, EntityError, Name, check_name, decode_name, read_name, spell

_FIELD_OF: Final = {
    "user": "principal",
    "client-id": "client_id",
    "ip": "ip",
    "broker": "broker",
    "listener": "listener",
}
"""What an ask calls the name of each type."""

_ONE_ADDRESS: Final = "128"
"""The prefix of an IPv6 network that is one address."""


def parts_of(bucket: str) -> dict[str, str]:
    """The types and names in the name of a bucket, as decisions spell it; its broker's too.

    >>> parts_of("user=a%2Cb,client-id=;broker=1")
    {'user': 'a,b', 'client-id': '', 'broker': '1'}
    """
    parts = (part.partition("=") for part in bucket.replace(";", ",").split(","))
    return {type_: unquote(name) for type_, _, name in parts}


def field_of(bucket: str) -> str:
    """What an ask calls the first name in the name of a bucket.

    >>> field_of("client-id=etl"), field_of("listener=EXTERNAL;broker=1")
    ('client_id', 'listener')
    """
    return _FIELD_OF[next(iter(parts_of(bucket)))]


@dataclass(frozen=True, slots=True)
class Binding:
    """One entity; a ``*`` at the end of a name stands for any end of it, so ``user=*`` is every user.

    >>> Binding.parse("user=acme-*").covers(Ask(principal="acme-etl"))
    True
    >>> Binding.parse("client-id=x,user=acme").covers(Ask(principal="acme"))
    False
    >>> Binding.parse("user=*").covers(Ask(client_id="x"))
    False
    >>> str(Binding.parse("client-id=*,user=a%2A*"))
    'user=a%2A*,client-id=*'

    Attributes:
        parts: type, name, and whether the name is only the beginning of one; in canonical order.
    """

    parts: tuple[tuple[str, str, bool], ...]

    @classmethod
    def parse(cls, text: str) -> Binding:
        """Read a spelling such as ``user=acme-*``; each name is percent-decoded once.

        Raises:
            EntityError: it is no entity, or has a ``*`` elsewhere.
        """
        open_ended: set[str] = set()

        def read(type_: str, spelled: str) -> Name:
            stem = spelled.removesuffix("*")
            if "*" in stem:
                raise EntityError(f"{type_}: a * stands at the end of a name; in a name it is written %2A")
            if stem == spelled:
                return read_name(type_, spelled)
            open_ended.add(type_)
            name = decode_name(type_, stem)
            if name and (wrong := check_name(name)):
                raise EntityError(f"{type_} {wrong}")
            return name

        names = Entity.parse(text, read).parts
        return cls(tuple((type_, str(name), type_ in open_ended) for type_, name in names))

    def covers(self, ask: Ask) -> bool:
        """Whether an ask names an entity that this one stands for; one that names none is outside."""
        for type_, name, is_beginning in self.parts:
            asked: str | None = getattr(ask, _FIELD_OF[type_])
            if asked is None or not (asked.startswith(name) if is_beginning else asked == name):
                return False
        return True

    def owns(self, parts: Mapping[str, str]) -> bool:
        """Whether a bucket is charged by asks that it covers, and by no others: it has every part of it.

        >>> [Binding.parse("user=acme").owns(parts_of(name)) for name in ("user=acme,client-id=x", "ip=1")]
        [True, False]
        >>> Binding.parse("user=acme,client-id=etl").owns(parts_of("user=acme"))
        False
        >>> Binding.parse("broker=1").owns(parts_of("listener=EXTERNAL;broker=1"))
        True

        Args:
            parts: of the bucket's name.
        """
        for type_, name, is_beginning in self.parts:
            of_bucket = parts.get(type_)
            if of_bucket is None:
                return False
            if type_ == "ip" and name:
                # A network is no one's whose name is an address, or the beginning of some.
                of_bucket, of_network, prefix = of_bucket.partition("/")
                if of_network and prefix != _ONE_ADDRESS:
                    return False
            if not (of_bucket.startswith(name) if is_beginning else of_bucket == name):
                return False
        return True

    def __str__(self) -> str:
        return ",".join(f"{type_}={spell(name)}{'*' * open_}" for type_, name, open_ in self.parts)
