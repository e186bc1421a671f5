"""Entities: their canonical spelling, parsing, and every refusal."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.domain.entity import (
    ANY,
    COMBINATIONS,
    TYPES,
    Entity,
    Name,
    check_name,
    network_of,
    normalise_ip,
    spell,
)
from app.domain.errors import EntityError

NAMES = st.text(
    st.characters(
        exclude_categories=["Cs"], exclude_characters=[chr(n) for n in (*range(32), *range(127, 160))]
    ),
    min_size=1,
    max_size=128,
)


@st.composite
def entities(draw: st.DrawFn) -> Entity:
    types = draw(st.sampled_from(sorted(COMBINATIONS)))
    defaults = types != ("broker", "listener")
    parts: list[tuple[str, Name]] = []
    for type_ in types:
        if defaults and draw(st.booleans()):
            parts.append((type_, ANY))
        elif type_ == "ip":
            parts.append((type_, normalise_ip(str(draw(st.ip_addresses())))))
        else:
            parts.append((type_, draw(NAMES)))
    return Entity(tuple(parts))


@given(entities())
def test_entity_spelling_parses_to_the_same_entity(entity: Entity):
    assert Entity.parse(str(entity)) == entity
    assert str(entity).isascii()


@given(entities())
def test_order_of_types_does_not_matter(entity: Entity):
    backwards = ",".join(reversed(str(entity).split(",")))
    assert str(Entity.parse(backwards)) == str(entity)


@given(NAMES)
def test_name_is_spelled_with_unreserved_bytes_only(name: str):
    unreserved = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~"
    bare = [c for c in spell(name).replace("%", " ").split(" ")[0] if c not in unreserved]
    assert not bare
    assert set(spell(name)) <= set(unreserved + "%")
    assert Entity.parse(f"user={spell(name)}").parts == (("user", name),)


def test_star_is_the_default_and_an_escaped_star_a_name():
    assert Entity.parse("user=*").parts == (("user", ANY),)
    assert Entity.parse("user=%2A").parts == (("user", "*"),)
    assert Entity.parse("user=%252A").parts == (("user", "%2A"),), "decoded once"


def test_types_are_in_canonical_order():
    entity = Entity.of(listener="L", broker="1")
    assert entity.types == ("broker", "listener")
    assert TYPES == ("user", "client-id", "ip", "broker", "listener")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "unknown entity type ''"),
        ("usr=a", "unknown entity type 'usr'"),
        ("User=a", "unknown entity type"),
        ("user=a,", "unknown entity type ''"),
        ("user", "empty name for user"),
        ("user=", "empty name for user"),
        ("client-id=", "empty name for client-id"),
        ("user=a,user=b", "user is given twice"),
        ("user=a,ip=10.0.0.1", "do not go together"),
        ("ip=10.0.0.1,client-id=c", "do not go together"),
        ("user=a,broker=1", "do not go together"),
        ("user=a,client-id=c,ip=*", "do not go together"),
        ("broker=*,listener=L", "takes no default"),
        ("broker=1,listener=*", "takes no default"),
        ("user=100%", "a percent sign is written %25"),
        ("user=%4", "a percent sign is written %25"),
        ("user=%zz", "a percent sign is written %25"),
        ("user=%ff", "must be UTF-8"),
        ("user=%00", "must not hold control characters"),
        ("user=a%7Fb", "must not hold control characters"),
        ("user=%C2%85", "must not hold control characters"),
        ("user=" + "a" * 513, "at most 512 bytes"),
        ("user=" + "%C3%A9" * 257, "at most 512 bytes"),
        ("ip=localhost", "not a host name"),
        ("ip=10.0.0", "not a host name"),
        ("ip=10.0.0.0/8", "not a host name"),
        ("ip=010.0.0.1", "not a host name"),
        ("ip=fe80::1%25eth0", "without a zone"),
    ],
)
def test_invalid_entity_is_refused_with_the_reason(text: str, why: str):
    with pytest.raises(EntityError) as refused:
        Entity.parse(text)
    assert why in str(refused.value)


def test_name_has_at_most_512_bytes():
    assert check_name("é" * 256) is None
    assert check_name("é" * 256 + "a") == "must be at most 512 bytes of UTF-8"
    assert check_name("") == "must not be empty"
    assert check_name("\ud800") == "must be UTF-8 text"


@given(st.ip_addresses())
def test_address_has_one_spelling(address: ipaddress.IPv4Address | ipaddress.IPv6Address):
    written = normalise_ip(str(address))
    assert normalise_ip(written) == written
    assert normalise_ip(address.exploded) == written
    assert normalise_ip(str(address).upper()) == written


@given(st.ip_addresses(v=4))
def test_ipv4_mapped_address_becomes_ipv4(address: ipaddress.IPv4Address):
    assert normalise_ip(f"::ffff:{address}") == str(address)
    assert normalise_ip(f"0:0:0:0:0:FFFF:{int(address) >> 16:x}:{int(address) & 0xFFFF:x}") == str(address)


@given(st.ip_addresses(v=6), st.integers(1, 128))
def test_ipv6_address_lies_in_its_network(address: ipaddress.IPv6Address, prefix: int):
    network = network_of(str(address), prefix)
    assert address in ipaddress.ip_network(network)
    assert network.endswith(f"/{prefix}")
    assert Entity.of(ip=network_of("2001:db8::7", 64)).parts == (("ip", "2001:db8::/64"),)


def test_network_is_spelled_with_escapes():
    assert str(Entity.of(ip=network_of("2001:db8::7", 64))) == "ip=2001%3Adb8%3A%3A%2F64"
    assert network_of("10.0.0.7", 64) == "10.0.0.7"
