"""What the benchmark sends: valid asks of the right kind, with numbers where its slots are."""

from __future__ import annotations

import struct
from array import array
from collections import Counter

import msgspec
import pytest

from app.admission.plan import matches_of
from app.domain.entity import Entity
from app.domain.ladder import MatchingRules
from app.domain.quota import KEYS, Defaults
from app.domain.quota_value import check_all, resolve
from tests.bench.generator import Load, filled, packed
from tests.bench.works import HOT, MANY, QUOTAS, Work, all_works, numbers, request, selected
from tests.steps import decode_ask

ASKS = [work for work in all_works() if work.subject == "quotagate" and work.kind != "check"]


def body_of(work: Work) -> bytes:
    """The body of a work's request with zeros in its slots."""
    head, _, body = filled(request(work)).partition(b"\r\n\r\n")
    assert f"Content-Length: {len(body)}".encode() in head
    return body


def test_names_of_works_differ():
    names = [work.name for work in all_works()]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("work", ASKS, ids=lambda work: work.name)
def test_a_work_asks_what_its_kind_says(work):
    body = body_of(work)
    bodies = [body]
    if work.batch:
        bodies = [msgspec.json.encode(ask) for ask in msgspec.json.decode(body)["asks"]]
        assert len(bodies) == work.batch
    said = {Entity.parse(name): check_all(QUOTAS[name], Entity.parse(name), Defaults()) for name in QUOTAS}
    quotas = {
        key: {
            entity: resolve(key, its[key], entity, Defaults(), 0)
            for entity, its in said.items()
            if key in its
        }
        for key in KEYS
    }
    for each in bodies:
        ask = decode_ask(each, "store")
        assert len(matches_of(ask, quotas, MatchingRules())) == work.asked.applied


def test_requests_without_a_body_name_their_principal():
    check, local = selected("quotagate/check/hot"), selected("nginx/one quota/hot")
    assert b"X-Quotagate-Principal: user-000000\r\n" in filled(request(check[0]))
    assert filled(request(local[0])).startswith(b"GET /one?principal=user-000000 HTTP/1.1\r\n")


def test_works_are_selected_by_patterns():
    assert [work.name for work in selected("quotagate/check/*, node/*/zipf")] == [
        "quotagate/check/hot",
        "quotagate/check/uniform",
        "node/one quota/zipf",
    ]
    assert selected("nobody/*") == []


def test_keys_are_as_many_and_as_skewed_as_they_should_be():
    assert sorted(numbers("hot")) == list(range(HOT))
    uniform, zipf = Counter(numbers("uniform")), Counter(numbers("zipf"))
    assert max(uniform) < MANY
    assert len(uniform) > 0.9 * MANY
    assert max(uniform.values()) < 20
    (_, first), (_, second) = zipf.most_common(2)
    assert first / numbers("zipf").buffer_info()[1] == pytest.approx(1 / 12.09, rel=0.05)
    assert second == pytest.approx(first / 2, rel=0.1)


def test_packed_load_says_where_numbers_go():
    load = Load(
        address=("127.0.0.1", 1),
        request=b"a{next6}b{same2}c{fresh12}d",
        sequence=array("I", [7, 8]),
        schedule=[0, 5],
        warm_s=0,
        seconds=1,
    )
    found = packed(load)
    assert struct.unpack_from("<IIII", found) == (24, 3, 2, 2)
    assert struct.unpack_from("<QQ", found, 16) == (0, 5)
    assert struct.unpack_from("<II", found, 32) == (7, 8)
    assert struct.unpack_from("<9I", found, 40) == (1, 6, 0, 8, 2, 1, 11, 12, 2)
    assert found[76:] == b"a000000b00c000000000000d"
