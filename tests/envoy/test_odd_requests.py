"""No odd part of a request of Envoy makes it an error, or lets it in more often than a plain one."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import grpc
import pytest
import redis

from app.envoy.protos.ratelimit_pb2 import RateLimitDescriptor
from tests.envoy.calls import Client, connected, descriptor, serving
from tests.envoy.test_service import a_minute
from tests.service import Service, eventually
from tests.unit.envoy.test_mapping import JOINED, RULES

ADMITTED: Final = 2
TIMES: Final = 4
VISITOR: Final = b"shop"
"""The value that a plain visitor sends; odd visitors replace it."""
Sent = Sequence[Sequence[tuple[str, bytes]]]
PLAIN: Final[Sequence[tuple[str, Sent]]] = [
    ("none", [[("principal", b"alice")], [("client_id", VISITOR)]]),
    ("none", [[("principal", VISITOR)]]),
    ("none", [[("client_id", VISITOR), ("principal", b"alice")]]),
    ("none", [[("broker", VISITOR), ("principal", b"alice")]]),
    ("none", [[("remote_address", VISITOR), ("principal", b"alice")]]),
    ("none", [[("usage", VISITOR)], [("remote_address", b"10.0.0.7")]]),
    ("shop", [[("tenant", VISITOR)]]),
    ("shop", [[("tenant", b"acme"), ("path", VISITOR)]]),
    ("shop", [[("path", VISITOR)], [("plan", VISITOR), ("remote_address", b"10.0.0.7")]]),
    ("messaging", [[("path", VISITOR)]]),
    ("messaging", [[("type", b"ad"), ("number", VISITOR)]]),
    ("messaging", [[("code", VISITOR)], [("path", VISITOR), ("more", VISITOR)], [("path", b"/")]]),
]
"""Requests under each mapping, by their domain."""
QUOTAS: Final = ("user=*", "client-id=*", "user=*,client-id=*", "ip=*")
PARTS: Final = (
    b"\xff",
    b"\xc3",
    b"\xed\xa0\x80",
    b"\x00",
    b"\n",
    b"%FF",
    b"%",
    b"*",
    b",",
    b"=",
    b"sha256:",
    b"a",
)


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Service, Client]]:
    mapping: Path = tmp_path_factory.mktemp("mapping") / "mapping.yaml"
    mapping.write_text(JOINED + RULES.replace("\ndomains:\n", ""), encoding="utf-8")
    with serving(mapping) as (node, port), connected(port) as client:
        for entity in QUOTAS:
            node.put(entity, request_rate=a_minute(ADMITTED, on_store_failure="throttle"))
        yield node, client


def odd_value(chance: random.Random) -> bytes:
    """Bytes that are neither empty nor, by themselves, the value of a plain visitor."""
    if chance.random() < 0.5:
        return b"".join(chance.choices(PARTS, k=chance.choice((1, 2, 9, 300, 600))))
    return chance.randbytes(chance.choice((1, 3, 16, 171, 256, 511, 512, 513, 600, 5_000, 60_000)))


def odd_descriptor(chance: random.Random) -> RateLimitDescriptor:
    """A descriptor with little or nothing that can be used."""
    value = odd_value(chance)
    made = descriptor(
        chance.choice(
            (
                [],
                [("", value)],
                [("path", b"x")] * 33,
                [("usage", value), ("principal", value)],
                [("remote_address", value)],
                [("principal", b""), ("remote_address", b"")],
                [(chance.choice("abc"), value), ("type", value)],
            )
        ),
        chance.choice((None, 0, 1, 2**64 - 1)) if chance.random() < 0.3 else None,
    )
    made.is_negative_hits = chance.random() < 0.2
    return made


def odd_request(chance: random.Random, plain: Sent) -> list[RateLimitDescriptor]:
    """A plain request with the values of an odd visitor, perhaps with more entries and descriptors."""
    value = odd_value(chance)
    made = []
    for entries in plain:
        sent = [(key, value if plain_value == VISITOR else plain_value) for key, plain_value in entries]
        if chance.random() < 0.2 and sent[0][0] in ("principal", "client_id", "usage"):
            sent.append((sent[0][0], odd_value(chance)))
        one = descriptor(sent)
        if chance.random() < 0.2:
            one.limit.requests_per_unit = chance.choice((0, 1_000_000))
        one.is_negative_hits = chance.random() < 0.2
        if chance.random() < 0.1:
            one.hits_addend.value = chance.choice((1, 2**53, 2**64 - 1))
        made.append(one)
    for _ in range(chance.choice((0, 1, 1, 5))):
        made.insert(chance.randrange(len(made) + 1), odd_descriptor(chance))
    return made


def answered(client: Client, sent: list[RateLimitDescriptor], domain: str) -> str:
    """The overall code; a request that the node sheds, as the machine is busy, is sent again."""
    while True:
        try:
            return client.code(*sent, domain=domain)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise


@pytest.mark.parametrize("tries", [15, pytest.param(2_000, marks=pytest.mark.prove, id="long")])
@pytest.mark.parametrize(("domain", "plain"), PLAIN, ids=str)
def test_an_odd_request_is_never_admitted_more_often_than_a_plain_one(
    asked: tuple[Service, Client], domain: str, plain: Sent, tries: int
):
    node, client = asked
    chance = random.Random(f"{domain} {plain} {tries}")
    with redis.Redis.from_url(node.store_url) as store:

        def admitted(sent: list[RateLimitDescriptor]) -> int:
            store.flushall()
            return [answered(client, sent, domain) for _ in range(TIMES)].count("OK")

        eventually(lambda: admitted([descriptor(each) for each in plain]) == ADMITTED)
        for _ in range(tries):
            sent = odd_request(chance, plain)
            assert admitted(sent) <= ADMITTED, sent
