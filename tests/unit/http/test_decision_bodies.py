"""Bodies of asks in, bodies of decisions out, with a fake store: permissions, and the reading of batches."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from app.admission.gathering.slices import Slices
from app.domain.binding import Binding
from app.domain.grant import BINDABLE, Grant
from app.http.access.access import Access, Sender
from app.http.head import RequestHead
from app.http.problems import ProblemError
from app.http.routes.decisions import BatchRoute, DecisionRoute
from app.http.server.intake import Intake
from app.store.port import Plan
from tests.unit.admission.fakes import IDS, RATE, AnsweringStore, admission, result, snapshot_of

BODY = b'{"principal": "alice", "usage": {"requests": 1}}'
ANYBODY = Grant(None, BINDABLE)
NOBODY = Grant("k", frozenset())


class Routes:
    """The routes of one ask and of a batch, of one node."""

    def __init__(self, store: AnsweringStore) -> None:
        node = admission(store, snapshot_of(RATE, IDS))
        parts: Any = node, Access("key", ()), lambda _cause: None, Intake(), "store", Slices()
        self._one, self._batch = DecisionRoute(*parts), BatchRoute(*parts)

    async def one(self, body: bytes, grant: Grant = ANYBODY) -> bytes:
        return await self._one.reply_to(RequestHead(), body, Sender(grant, "", None), lambda: False)

    async def batch(self, body: bytes, grant: Grant = ANYBODY) -> bytes:
        return await self._batch.reply_to(RequestHead(), body, Sender(grant, "", None), lambda: False)

    async def begun(self, body: bytes, grant: Grant = ANYBODY) -> bytes | None:
        """The answer by callback; None if this body is not answered by callback."""
        made: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if not self._one.begin(RequestHead(), body, Sender(grant, "", None), lambda: False, made.set_result):
            return None
        result = await made
        if isinstance(result, Exception):
            raise result
        answer = self._one.finish(result, RequestHead())
        assert answer is not None
        return answer.body


def routes(store: AnsweringStore | None = None) -> Routes:
    return Routes(store or AnsweringStore(result()))


def batch(*asks: bytes) -> bytes:
    return b'{"asks": [' + b" , ".join(asks) + b"]}"


async def test_body_has_one_answer_alone_by_a_call_and_in_a_batch() -> None:
    route = routes(store := AnsweringStore(result("delay", throttle_ms=7)))
    said = await route.one(BODY)
    assert json.loads(said)["throttle_ms"] == 7
    assert await route.begun(BODY) == said
    assert await route.batch(batch(BODY, BODY)) == b'{"decisions":[%b,%b]}' % (said, said)
    first, *others = store.plans
    assert isinstance(first, Plan)
    assert others == [first] * 3


@pytest.mark.parametrize(
    ("more", "field", "value"),
    [
        (b'"mode": "peek"', "mode", "peek"),
        (b'"mode": "record"', "mode", "record"),
        (b'"id": "x"', "retry", None),
    ],
)
async def test_call_takes_asks_of_any_kind(more: bytes, field: str, value: object) -> None:
    route = routes(store := AnsweringStore(result()))
    body = BODY[:-1] + b", " + more + b"}"
    assert await route.begun(body) == await route.one(body)
    first, second = store.plans
    assert first == second
    assert getattr(first, field) == value or value is None


async def test_invalid_body_is_left_to_the_reader_that_explains_it() -> None:
    route = routes(store := AnsweringStore(result()))
    assert await route.begun(b'{"usage": {"requests": -1}}') is None
    with pytest.raises(ProblemError) as refused:
        await route.one(b'{"usage": {"requests": -1}}')
    assert [error.field for error in refused.value.errors] == ["/usage/requests"]
    assert store.plans == []


async def test_caller_without_the_scope_or_for_another_principal_is_refused() -> None:
    route = routes(store := AnsweringStore(result()))
    for grant in (NOBODY, ANYBODY.certified("bob")):
        for answer in (
            route.one(BODY, grant),
            route.begun(BODY, grant),
            route.batch(batch(BODY), grant),
        ):
            with pytest.raises(ProblemError) as refused:
                await answer
            assert refused.value.status == 403
    assert store.plans == []


async def test_bound_caller_may_not_account_in_buckets_of_others() -> None:
    """This holds for every route. The error's field is the name that other callers share."""
    route = routes(store := AnsweringStore(result()))
    etl = Binding.parse("client-id=etl")
    grant = Grant("k", BINDABLE, (etl,))
    body = BODY[:-1] + b', "client_id": "etl"}'
    record = body[:-1] + b', "mode": "record"}'
    for answer, field in (
        (route.one(record, grant), "/principal"),
        (route.batch(batch(body, record), grant), "/asks/1/principal"),
    ):
        with pytest.raises(ProblemError) as refused:
            await answer
        assert (refused.value.status, [each.field for each in refused.value.errors]) == (403, [field])
    with pytest.raises(ProblemError) as refused:
        await route.begun(record, grant)
    assert refused.value.status == 403
    assert store.plans == []
    assert json.loads(await route.one(body, grant))["decision"] == "admit"


async def test_batch_with_a_fault_is_refused_as_a_whole() -> None:
    route = routes(store := AnsweringStore(result()))
    with pytest.raises(ProblemError) as refused:
        await route.batch(batch(BODY, b'{"usage": {"requests": -1}}'))
    assert [error.field for error in refused.value.errors] == ["/asks/1/usage/requests"]
    ids = b'{"principal": "alice", "usage": {"producer_ids": [%b]}}' % b",".join([b"1"] * 400)
    assert json.loads(await route.batch(batch(*[ids] * 25)))["decisions"]
    store.plans.clear()
    with pytest.raises(ProblemError) as refused:
        await route.batch(batch(*[ids] * 26))
    assert [error.field for error in refused.value.errors] == ["/asks"]
    assert store.plans == []


async def test_later_duplicate_of_a_key_counts_in_a_batch_too() -> None:
    route = routes()
    twice = b'{"usage": {"requests": "no"}, "principal": "alice", "usage": {"requests": 1}}'
    said = await route.batch(batch(twice))
    assert json.loads(said)["decisions"][0]["applied"] == 1
    assert json.loads(await route.one(twice))["applied"] == 1
