"""Bindings: the entities for which the holder of an API key may ask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote

from app.domain.ask import Ask
from app.domain.entity import Entity, Name, check_name, decode_name, read_name, spell
from app.domain.errors import EntityError

_FIELD_OF: Final = {
    "user": "principal",
    "client-id": "client_id",
    "ip": "ip",
    "broker": "broker",
    "listener": "listener",
}
"""The field of an ask that holds the name of each entity type."""

_ONE_ADDRESS: Final = "128"
"""The prefix length of an IPv6 network of one address."""


def parts_of(bucket: str) -> dict[str, str]:
    """The types and names in the name of a bucket, as decisions spell it, including a broker at its end.

    >>> parts_of("user=a%2Cb,client-id=;broker=1")
    {'user': 'a,b', 'client-id': '', 'broker': '1'}
    """
    parts = (part.partition("=") for part in bucket.replace(";", ",").split(","))
    return {type_: unquote(name) for type_, _, name in parts}


def field_of(bucket: str) -> str:
    """The field of an ask that the first part of a bucket's name comes from.

    >>> field_of("client-id=etl"), field_of("listener=EXTERNAL;broker=1")
    ('client_id', 'listener')
    """
    return _FIELD_OF[next(iter(parts_of(bucket)))]


@dataclass(frozen=True, slots=True)
class Binding:
    """One entity, or many: a ``*`` at the end of a name matches any rest, so ``user=*`` is every user.

    >>> Binding.parse("user=acme-*").covers(Ask(principal="acme-etl"))
    True
    >>> Binding.parse("client-id=x,user=acme").covers(Ask(principal="acme"))
    False
    >>> Binding.parse("user=*").covers(Ask(client_id="x"))
    False
    >>> str(Binding.parse("client-id=*,user=a%2A*"))
    'user=a%2A*,client-id=*'

    Attributes:
        parts: triples in canonical order: type, name, and whether the name is a prefix.
    """

    parts: tuple[tuple[str, str, bool], ...]

    @classmethod
    def parse(cls, text: str) -> Binding:
        """Read a spelling such as ``user=acme-*``; each name is percent-decoded once.

        Raises:
            EntityError: it is not an entity, or a ``*`` is not at the end of a name.
        """
        open_ended: set[str] = set()

        def read(type_: str, spelled: str) -> Name:
            stem = spelled.removesuffix("*")
            if "*" in stem:
                raise EntityError(f"{type_}: a * may only end a name; write %2A for a * inside it")
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
        """Whether an ask matches every part of this binding; an ask without one of the types does not."""
        for type_, name, is_beginning in self.parts:
            asked: str | None = getattr(ask, _FIELD_OF[type_])
            if asked is None or not (asked.startswith(name) if is_beginning else asked == name):
                return False
        return True

    def owns(self, parts: Mapping[str, str]) -> bool:
        """Whether only covered asks can charge a bucket, because its name matches every part of the binding.

        >>> [Binding.parse("user=acme").owns(parts_of(name)) for name in ("user=acme,client-id=x", "ip=1")]
        [True, False]
        >>> Binding.parse("user=acme,client-id=etl").owns(parts_of("user=acme"))
        False
        >>> Binding.parse("broker=1").owns(parts_of("listener=EXTERNAL;broker=1"))
        True

        Args:
            parts: the types and names in the bucket's name.
        """
        for type_, name, is_beginning in self.parts:
            of_bucket = parts.get(type_)
            if of_bucket is None:
                return False
            if type_ == "ip" and name:
                # A network holds addresses that a bound address, or a prefix of its text, does not cover.
                of_bucket, of_network, prefix = of_bucket.partition("/")
                if of_network and prefix != _ONE_ADDRESS:
                    return False
            if not (of_bucket.startswith(name) if is_beginning else of_bucket == name):
                return False
        return True

    def __str__(self) -> str:
        return ",".join(f"{type_}={spell(name)}{'*' * open_}" for type_, name, open_ in self.parts)
