"""The requests of the benchmark: valid asks of the right kind, with numbers in their slots."""

from __future__ import annotations

import struct
from array import array
from collections import Counter
from random import Random

import msgspec
import pytest

from app.domain.entity import Entity
from app.domain.ladder import MatchingRules, applied_quotas
from app.domain.quota import KEYS, Defaults
from app.domain.quota_value import check_all, resolve
from tests.bench.generator import SLOT, Load, filled, packed
from tests.bench.targets import ROWS
from tests.bench.works import (
    COMPARED,
    FEW,
    MANY,
    QUOTAS,
    STORED,
    Work,
    all_works,
    numbers,
    odd_requests,
    request,
    selected,
)
from tests.steps import decode_ask

WORKS = list(all_works())
ASKS = [work for work in WORKS if work.subject == "quotagate" and work.kind != "check"]


def named(work: Work) -> str:
    return work.name


def body_of(work: Work) -> bytes:
    """The body of a work's request with zeros in its slots."""
    head, _, body = filled(request(work)).partition(b"\r\n\r\n")
    assert f"Content-Length: {len(body)}".encode() in head
    return body


def fields_of(sent: bytes) -> dict[str, str]:
    """The fields of a request's head, by name in lower case."""
    lines = sent.partition(b"\r\n\r\n")[0].decode().split("\r\n")[1:]
    return {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}


def first(pattern: str) -> Work:
    return selected(pattern)[0]


def test_names_of_works_differ():
    names = [work.name for work in all_works()]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("work", WORKS, ids=named)
def test_heads_differ_in_each_request_unless_the_row_says_one(work):
    for sent in (request(work), *odd_requests(work)):
        fields = fields_of(sent)
        assert fields.keys() >= {"host", "user-agent", "accept", "content-type"}
        if work.head == "one":
            assert SLOT.search(sent.partition(b"\r\n\r\n")[0]) is None
            continue
        assert len(fields_of(filled(sent))["traceparent"]) == 55
        assert fields["traceparent"] == "00-{hex32}-{hex16}-01"
        assert fields["x-request-id"] == "{hex16}"


def test_all_rows_but_four_have_many_callers():
    """One of the four has new ids, and one repeats its head."""
    few = {work.name.partition("/")[2] for work in WORKS if work.callers == FEW}
    assert few == {
        "one quota/100 callers",
        "one quota/100 callers/batch 100",
        "one quota/100 callers/one head",
        "new id/100 callers",
    }
    assert {work.callers for work in WORKS} == {FEW, MANY}
    assert [work.name for work in WORKS if work.head == "one"] == ["quotagate/one quota/100 callers/one head"]


@pytest.mark.parametrize("work", WORKS, ids=named)
def test_an_echo_gets_the_same_requests(work):
    if work.subject != "nginx":
        assert request(work.echo) == request(work)
        assert odd_requests(work.echo) == odd_requests(work)
    assert work.echo.asks == 1


def test_peers_and_the_service_as_it_was_get_the_same_requests():
    sent = {work.name: request(work) for work in WORKS}
    for name, each in sent.items():
        subject, _, rest = name.partition("/")
        if subject in {"before", "fastapi", "node"}:
            assert each == sent[f"quotagate/{rest}"]


def test_each_target_of_a_row_has_a_row():
    names = {work.name for work in WORKS}
    assert set(ROWS) <= names
    assert {work.name for work in STORED} <= names


@pytest.mark.parametrize("work", ASKS, ids=named)
def test_a_work_asks_what_its_kind_says(work):
    body = body_of(work)
    bodies = [body]
    if work.batch:
        bodies = [msgspec.json.encode(ask) for ask in msgspec.json.decode(body)["asks"]]
        assert len(bodies) == work.batch
    said = {Entity.parse(name): check_all(QUOTAS[name], Entity.parse(name), Defaults()) for name in QUOTAS}
    quotas = {
        key: {
            entity: resolve(key, by_key[key], entity, Defaults(), 0)
            for entity, by_key in said.items()
            if key in by_key
        }
        for key in KEYS
    }
    for each in bodies:
        ask = decode_ask(each, "store")
        assert len(applied_quotas(ask, quotas, MatchingRules())) == work.asked.applied


def test_requests_without_a_body_name_their_principal():
    assert b"X-Quotagate-Principal: user-000000\r\n" in filled(request(first("check")))
    local = filled(request(first("nginx/one quota")))
    assert local.startswith(b"GET /one?principal=user-000000 HTTP/1.1\r\n")


def test_odd_requests_are_valid_asks_and_another_route():
    chunked, live, twice = (filled(each) for each in odd_requests(first("*/all odd")))
    size, _, rest = chunked.partition(b"\r\n\r\n")[2].partition(b"\r\n")
    body, ended = rest[: int(size, 16)], rest[int(size, 16) :]
    assert ended == b"\r\n0\r\n\r\n"
    assert live.startswith(b"GET /health/live HTTP/1.1\r\n")
    for each in (body, twice.partition(b"\r\n\r\n")[2]):
        assert decode_ask(each, "store").principal == "user-000000"
    assert odd_requests(COMPARED) == ()


def test_works_are_selected_by_patterns():
    assert [work.name for work in selected("check, node/one*, one quota/log *")] == [
        "quotagate/check",
        "quotagate/one quota/log off",
        "quotagate/one quota/log all",
        "node/one quota",
        "node/one quota/100 callers",
        "node/one quota/batch 100",
    ]
    assert selected("nobody/*") == []


def test_few_callers_ask_in_turn_and_many_are_drawn_anew():
    draw = Random(1)
    assert list(numbers(FEW, draw)) == list(range(FEW))
    one, other = numbers(MANY, draw), numbers(MANY, draw)
    assert one != other
    counted = Counter(one)
    assert max(counted) < MANY
    assert len(counted) > 0.9 * MANY
    assert max(counted.values()) < 20


def test_packed_load_says_where_numbers_go():
    load = Load(
        address=("127.0.0.1", 1),
        request=b"a{next6}b{same2}c{fresh12}d",
        odd=[b"e{hex3}{digits2}"],
        odd_in=9,
        sequence=array("I", [7, 8]),
        schedule=[0, 5],
        warm_s=0,
        seconds=1,
    )
    found = packed(load)
    assert struct.unpack_from("<IIII", found) == (2, 9, 2, 2)
    assert struct.unpack_from("<QQ", found, 16) == (0, 5)
    assert struct.unpack_from("<II", found, 32) == (7, 8)
    assert struct.unpack_from("<4I", found, 40) == (24, 3, 6, 2)
    assert struct.unpack_from("<15I", found, 56) == (1, 6, 0, 8, 2, 1, 11, 12, 2, 1, 3, 3, 4, 2, 4)
    assert found[116:] == b"a000000b00c000000000000de00000"
