"""Entities, on which quotas are set, and their canonical spelling."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from enum import Enum
from typing import Final, NamedTuple
from urllib.parse import quote, unquote_to_bytes

from app.domain.errors import EntityError


class Default(Enum):
    """The name of a default entity; its spelling is a bare ``*``."""

    ANY = "*"

    __hash__ = object.__hash__  # Enum's own takes as long as the rest of a look-up


ANY: Final = Default.ANY
Name = str | Default

TYPES: Final = ("user", "client-id", "ip", "broker", "listener")
"""Every entity type, in the order of the canonical spelling."""

_WORDS: Final = tuple([(type_.replace("-", "_"), type_) for type_ in TYPES])

COMBINATIONS: Final = frozenset(
    {
        ("user",),
        ("client-id",),
        ("user", "client-id"),
        ("ip",),
        ("broker",),
        ("listener",),
        ("broker", "listener"),
    }
)
"""The sets of types that an entity can have."""

Rung = str
"""The types of an entity, each with ``=*`` if its name is the default."""

MAX_NAME_BYTES: Final = 512
LONGEST_SPELLED: Final = 3 * MAX_NAME_BYTES
"""The longest percent-encoded name, in characters."""
LONGEST_ADDRESS: Final = 45
"""The longest address, in characters: IPv6 with its end spelled as IPv4."""
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")
is_unreserved: Final = re.compile(r"[A-Za-z0-9_.~-]*").fullmatch
"""Matches a name that needs no percent-encoding: only RFC 3986's unreserved characters."""
_BAD_ESCAPE: Final = re.compile(r"%(?![0-9A-Fa-f]{2})")


def read_name(type_: str, spelled: str) -> Name:
    """Parse a name; a bare ``*`` is the default.

    Raises:
        EntityError: it is empty, too long, wrongly escaped, or an ``ip`` that is not an address.
    """
    if not spelled:
        raise EntityError(f"empty name for {type_}: write {type_}=NAME, or {type_}=* for the default")
    return ANY if spelled == "*" else _checked_name(type_, decode_name(type_, spelled))


class Entity(NamedTuple):
    """One entity: (type, name) pairs in canonical order. It is a tuple, so a look-up runs no Python code.

    >>> str(Entity.parse("client-id=etl,user=alice"))
    'user=alice,client-id=etl'
    >>> str(Entity.parse("user=*")), str(Entity.parse("user=%2A"))
    ('user=*', 'user=%2A')
    >>> str(Entity.parse("ip=::ffff:10.0.0.7"))
    'ip=10.0.0.7'
    """

    parts: tuple[tuple[str, Name], ...]

    @classmethod
    def of(cls, **names: Name) -> Entity:
        """Build an entity from valid names; the argument ``client_id`` means ``client-id``.

        >>> str(Entity.of(user="alice", client_id=ANY))
        'user=alice,client-id=*'
        """
        return cls(tuple([(type_, names[word]) for word, type_ in _WORDS if word in names]))

    @classmethod
    def parse(cls, text: str, read: Callable[[str, str], Name] = read_name) -> Entity:
        """Parse a spelling such as ``user=alice,client-id=%2A``; each name is percent-decoded once.

        Args:
            read: parses a name of a type; the names in bucket names differ a little.

        Raises:
            EntityError: unknown type, empty or too long name, types that do not go together, or an ``ip``
                that is not an address.
        """
        names: dict[str, Name] = {}
        for part in text.split(","):
            type_, equals, spelled = part.partition("=")
            if type_ not in TYPES:
                raise EntityError(f"unknown entity type {type_!r}: use one of {', '.join(TYPES)}")
            if not equals:
                raise EntityError(f"empty name for {type_}: write {type_}=NAME, or {type_}=* for the default")
            if type_ in names:
                raise EntityError(f"{type_} is given twice")
            names[type_] = read(type_, spelled)
        parts = tuple((type_, names[type_]) for type_ in TYPES if type_ in names)
        combination = tuple(type_ for type_, _ in parts)
        if combination not in COMBINATIONS:
            allowed = "; ".join(sorted(" and ".join(c) for c in COMBINATIONS))
            raise EntityError(f"{' and '.join(combination)} do not go together: use {allowed}")
        if combination == ("broker", "listener") and ANY in names.values():
            raise EntityError("a broker and listener pair takes no default: name both, or use listener=*")
        return cls(parts)

    @property
    def types(self) -> tuple[str, ...]:
        """The types of this entity, in canonical order."""
        return tuple([type_ for type_, _ in self.parts])  # a list is twice as fast as a generator

    def __str__(self) -> str:
        return ",".join([f"{type_}={spell(name)}" for type_, name in self.parts])


def rung_of(entity: Entity) -> tuple[Rung, object]:
    """The rung of a ladder that an entity is on, and the names by which it is found there.

    Returns:
        the rung, and the entity's name on it: one name, a tuple of two, or None without any.

    >>> rung_of(Entity.of(user="a", client_id=ANY)), rung_of(Entity.of(user=ANY))
    (('user,client-id=*', 'a'), ('user=*', None))
    >>> rung_of(Entity.of(user="a", client_id="c"))
    ('user,client-id', ('a', 'c'))
    """
    rung = ",".join([type_ if name is not ANY else f"{type_}=*" for type_, name in entity.parts])
    names = tuple([name for _, name in entity.parts if name is not ANY])
    return rung, names if len(names) > 1 else names[0] if names else None


def spell(name: Name) -> str:
    """Spell a name: all bytes except RFC 3986 unreserved ones as ``%XX``; the default as ``*``.

    >>> spell("a b*"), spell(ANY), spell("")
    ('a%20b%2A', '*', '')
    """
    if isinstance(name, Default):
        return "*"
    return name if is_unreserved(name) else quote(name, safe="")


def has_control_characters(text: str) -> bool:
    """Whether a text has one of U+0000-001F and U+007F-009F."""
    return _CONTROL.search(text) is not None


def check_name(name: str) -> str | None:
    """The fault of a name, or None; a valid name is 1-512 bytes of UTF-8 without control characters."""
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        return "must be UTF-8 text"
    if size > MAX_NAME_BYTES:
        return f"must be at most {MAX_NAME_BYTES} bytes of UTF-8"
    if size == 0:
        return "must not be empty"
    if has_control_characters(name):
        return "must not hold control characters (U+0000-001F, U+007F-009F)"
    return None


def normalise_ip(text: str) -> str:
    """Spell an address as RFC 5952 says, and an IPv4-mapped IPv6 address as IPv4.

    >>> normalise_ip("2001:DB8:0::1"), normalise_ip("::ffff:10.0.0.7")
    ('2001:db8::1', '10.0.0.7')

    Raises:
        EntityError: it is a host name, has a zone, or is not an address.
    """
    if "%" in text:
        raise EntityError("must be an address without a zone")
    try:
        address = ipaddress.ip_address(text[: LONGEST_ADDRESS + 1])
    except ValueError:
        raise EntityError("must be an IPv4 or IPv6 address, not a host name") from None
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(address)


def network_of(address: str, ipv6_prefix: int) -> str:
    """The name of an address's bucket under the default quota: the address itself, or its IPv6 network.

    >>> network_of("2001:db8::7", 64), network_of("10.0.0.7", 64)
    ('2001:db8::/64', '10.0.0.7')
    """
    if ":" not in address:
        return address
    return str(ipaddress.ip_network((address, ipv6_prefix), strict=False))


def decode_name(type_: str, spelled: str) -> str:
    """Percent-decode a name once, without validating it.

    Raises:
        EntityError: it is wrongly escaped, or not UTF-8.
    """
    if len(spelled) > LONGEST_SPELLED:
        raise EntityError(f"{type_} must be at most {MAX_NAME_BYTES} bytes of UTF-8")
    if _BAD_ESCAPE.search(spelled):
        raise EntityError(f"{type_}: a percent sign is written %25")
    try:
        return unquote_to_bytes(spelled).decode()
    except UnicodeDecodeError:
        raise EntityError(f"{type_}: must be UTF-8") from None


def _checked_name(type_: str, name: str) -> str:
    if wrong := check_name(name):
        raise EntityError(f"{type_} {wrong}")
    if type_ == "ip":
        try:
            return normalise_ip(name)
        except EntityError as error:
            raise EntityError(f"ip {error}") from None
    return name
