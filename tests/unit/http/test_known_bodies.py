"""Bodies that came before: which are remembered, for how long, and how batches use them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from app.admission.plain import ADMITTED, ADMITTED_ALONE
from app.admission.slices import Slices
from app.domain.caller import ANYONE
from app.domain.decision import Decision
from app.domain.grant import BINDABLE, Grant
from app.http.access import Access
from app.http.decisions import DecisionRoutes
from app.http.known_bodies import MAX_KNOWN, KnownBodies
from app.http.problems import ProblemError
from app.http.wire import encode_decision
from app.store.port import Answer
from tests.steps import decode_ask
from tests.unit.admission.test_plain import ADMIT, EVERYONE, RATE, SNAPSHOT, Store, admission, ready

BODY = b'{"principal": "alice", "usage": {"requests": 1}}'
ANYBODY = Grant(None, BINDABLE)


def routes(store: Store) -> DecisionRoutes:
    return DecisionRoutes(admission(store), Access("key", ()), "store", Slices())


async def twice(route: DecisionRoutes, body: bytes) -> None:
    """Send a body that has not come before, until it is kept."""
    for _ in range(2):
        await route.one(body, ANYBODY, ANYONE)


def batch(*asks: bytes) -> bytes:
    return b'{"asks": [' + b" , ".join(asks) + b"]}"


@pytest.mark.parametrize("admitted", [*ADMITTED, ADMITTED_ALONE])
def test_admissions_are_encoded_once_and_like_all_others(admitted: Decision) -> None:
    assert encode_decision(admitted) == encode_decision(replace(admitted))
    assert encode_decision(admitted) is encode_decision(admitted)


async def test_equal_bodies_are_read_once_alone_or_in_a_batch() -> None:
    store = Store(Answer((ADMIT,)))
    route = routes(store)
    said = await route.one(BODY, ANYBODY, ANYONE)
    assert json.loads(said)["decision"] == "admit"
    assert len(route._known) == 0  # it may not come again
    assert await route.one(BODY, ANYBODY, ANYONE) == said
    assert len(route._known) == 1
    assert await route.one(BODY, ANYBODY, ANYONE) == said
    assert await route.batch(batch(BODY, BODY), ANYBODY, ANYONE) == b'{"decisions":[%b,%b]}' % (said, said)
    assert len(route._known) == 1
    first, second, *others = store.sent
    assert first == second
    assert len(others) == 3
    assert all(plan is second for plan in others)


async def test_body_of_another_ask_is_not_remembered() -> None:
    route = routes(Store(Answer((ADMIT,))))
    for more in (b'"recheck": true', b'"mode": "peek"', b'"id": "x"'):
        await twice(route, BODY[:-1] + b", " + more + b"}")
    await twice(route, BODY + b" " * MAX_KNOWN)
    assert len(route._known) == 0


async def test_caller_with_bindings_or_without_scope_gains_nothing_from_a_known_body() -> None:
    route = routes(Store(Answer((ADMIT,))))
    await twice(route, BODY)
    with pytest.raises(ProblemError) as refused:
        await route.one(BODY, ANYBODY.certified("bob"), ANYONE)
    assert refused.value.status == 403
    for body in (
        route.one(BODY, Grant("k", frozenset()), ANYONE),
        route.batch(batch(BODY), Grant("k", frozenset()), ANYONE),
    ):
        with pytest.raises(ProblemError) as refused:
            await body
        assert refused.value.status == 403


async def test_batch_with_a_fault_is_refused_as_ever() -> None:
    route = routes(Store(Answer((ADMIT,))))
    await twice(route, BODY)
    with pytest.raises(ProblemError) as refused:
        await route.batch(batch(BODY, b'{"usage": {"requests": -1}}'), ANYBODY, ANYONE)
    assert [error.field for error in refused.value.errors] == ["/asks/1/usage/requests"]
    ids = b'{"principal": "alice", "usage": {"producer_ids": [%b]}}' % b",".join([b"1"] * 400)
    await twice(route, ids)
    assert len(route._known) == 2
    with pytest.raises(ProblemError) as refused:
        await route.batch(batch(*[ids] * 26), ANYBODY, ANYONE)
    assert [error.field for error in refused.value.errors] == ["/asks"]


async def test_later_duplicate_of_a_key_counts_in_a_batch_too() -> None:
    store = Store(Answer((ADMIT,)))
    route = routes(store)
    twice = b'{"usage": {"requests": "no"}, "principal": "alice", "usage": {"requests": 1}}'
    said = await route.batch(batch(twice), ANYBODY, ANYONE)
    assert json.loads(said)["decisions"][0]["applied"] == 1


async def test_known_body_is_forgotten_when_quotas_change() -> None:
    node = admission(Store(Answer((ADMIT,))))
    known = KnownBodies()
    for _ in range(2):
        known.add(BODY, ready(node, decode_ask(BODY, "store")), 0)
    assert known.get(BODY, node.edition) is not None
    changed = SNAPSHOT.apply(2, [("request_rate", EVERYONE, replace(RATE, limit=7))])
    node._snapshot = lambda: changed
    assert known.get(BODY, node.edition) is None
    assert len(known) == 0


def test_known_bodies_are_bounded_and_keep_what_is_in_use() -> None:
    node = admission(Store(Answer((ADMIT,))))
    known = KnownBodies(200_000)
    ask = ready(node, decode_ask(BODY, "store"))
    for body in (BODY, *[b"%d" % n for n in range(1_000)]):
        known.add(body, ask, 0)
        known.add(body, ask, 0)
        assert known.get(BODY, node.edition) is not None
    assert 20 < len(known) < 300


def test_bodies_that_come_once_push_nothing_out() -> None:
    node = admission(Store(Answer((ADMIT,))))
    known = KnownBodies()
    ask = ready(node, decode_ask(BODY, "store"))
    for n in range(10_000):
        known.add(b"%d" % n, ask, 0)
    assert len(known) < 50


def test_decision_that_is_not_ready_made_is_encoded() -> None:
    assert json.loads(encode_decision(Decision("admit", 0, True, 99, "store", None)))["applied"] == 99
