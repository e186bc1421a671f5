"""Checks of a node with a fake store: the answers to a gateway, by callback and by coroutine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from ipaddress import ip_network
from time import monotonic
from typing import Any

import pytest
from msgspec import structs

from app.admission.admission import Admission
from app.admission.errors import CallerGoneError, OverloadedError
from app.admission.throttle_factor.caller_clock import CallerClock
from app.catalog.snapshot import Snapshot
from app.domain.caller import ANYONE, Caller
from app.domain.entity import ANY, Entity
from app.domain.quota import Quota
from app.http.access.access import LOOPBACK, Access
from app.http.check_question import Sources
from app.http.head import HeadFields, RequestHead
from app.http.problems import ProblemError
from app.http.routes.check import PATH, Check, CheckRoute
from app.http.server.hot import HttpAnswer, Result
from app.store.port import StoreError
from tests.unit.admission.fakes import EVERYONE, AnsweringStore, ListRecorder, admission, result

RATE = Quota("request_rate", 100, "sampled_rate", "delay", on_store_failure="throttle")
OF_IP = Quota("request_rate", 0.29, "sampled_rate", "deny", samples=101)
TOKENS = Quota("controller_mutation_rate", 5, "token_bucket", "deny", burst=20.0)
SNAPSHOT = Snapshot.of(
    {
        "request_rate": {EVERYONE: RATE, Entity.of(ip=ANY): OF_IP},
        "controller_mutation_rate": {EVERYONE: TOKENS},
    }
)
QUERY = b"requests=2&mutations=1&deny_status=403"
ALICE = {b"host": [b"h"], b"x-quotagate-principal": [b"alice"], b"x-quotagate-ip": [b"10.0.0.7"]}
ADMITS = result(remaining=40.0)
POLICY = b'"request_rate";q=1000;w=10, "request_rate_ip";q=29;w=100, "controller_mutation_rate";q=20;w=4'


def node(store: AnsweringStore, **more: Any) -> Admission:
    return admission(store, SNAPSHOT, **more)


def check_of(store: AnsweringStore, **more: Any) -> Check:
    return Check(node(store, **more), Sources(), None)


def fields(answer: HttpAnswer) -> dict[bytes, bytes]:
    return dict(answer.headers)


async def begun(
    check: Check, query: bytes = QUERY, headers: HeadFields = ALICE, caller: Caller = ANYONE
) -> HttpAnswer:
    """The answer by callback."""
    made: asyncio.Future[HttpAnswer | Exception] = asyncio.get_running_loop().create_future()
    check.begin(query, headers, None, caller, made.set_result)
    answer = await made
    if isinstance(answer, Exception):
        raise answer
    return answer


ANSWERS = {
    "admitted": ((ADMITS, ADMITS, ADMITS), 200, b'"admit"', (b"40", b"40", b"40")),
    "throttled": (
        (result("throttle", throttle_ms=1_001, remaining=-0.5), ADMITS, ADMITS),
        *(403, b'"throttle"', (b"0", b"40", b"40")),
    ),
    "rejected": (
        (ADMITS, ADMITS, result("reject", reason="too_large", largest=3.0, remaining=2.9)),
        *(403, b'"reject"', (b"40", b"40", b"2")),
    ),
    "clock behind": (
        (ADMITS, result(correction=1, remaining=1.0), ADMITS),
        200,
        b'"admit"',
        (b"40", b"1", b"40"),
    ),
}


@pytest.mark.parametrize("name", ANSWERS)
async def test_answer_has_the_fields_of_each_quota_by_a_call_and_by_waiting(name: str) -> None:
    results, status, decision, left = ANSWERS[name]
    recorder = ListRecorder()
    check = check_of(AnsweringStore(*results), recorder=recorder)
    answer = await begun(check)
    assert answer == await check.answer(QUERY, ALICE)
    assert (answer.status, decision in answer.body, b"quotas" in answer.body) == (status, True, False)
    found = fields(answer)
    wait_s = 2 if name == "throttled" else 0
    assert found[b"ratelimit-policy"] == POLICY
    assert found[b"ratelimit"] == b", ".join(
        b'"%b";r=%b;t=%d' % (quota, rest, wait_s or span_s)
        for quota, rest, span_s in zip(
            (b"request_rate", b"request_rate_ip", b"controller_mutation_rate"),
            left,
            (10, 100, 4),
            strict=True,
        )
    )
    assert found[b"x-throttle-ms"] == (b"1001" if wait_s else b"0")
    assert found.get(b"retry-after") == (b"2" if wait_s else None)
    assert len(recorder.heard) == 2


async def test_quota_without_a_counter_has_a_policy_and_no_rest() -> None:
    answer = await begun(check_of(AnsweringStore(result(reason="store_full"), ADMITS, ADMITS)))
    assert fields(answer)[b"ratelimit-policy"] == POLICY
    assert fields(answer)[b"ratelimit"].startswith(b'"request_rate_ip";r=40')
    assert answer.status == 403


@pytest.mark.parametrize(
    ("query", "headers", "policies"),
    [
        (b"", {}, None),
        (b"connections=1", ALICE, None),
        (b"mutations=1&broker=1", ALICE, b'"controller_mutation_rate";q=20;w=4'),
        (b"", {b"x-quotagate-client-id": [b""]}, None),
        (b"requests=1", {b"x-quotagate-ip": [b"::1"]}, b'"request_rate";q=29;w=100'),
    ],
)
async def test_quotas_that_apply_are_named(query: bytes, headers: HeadFields, policies: bytes | None) -> None:
    answer = await begun(check_of(AnsweringStore(ADMITS, ADMITS)), query, headers)
    assert (answer.status, fields(answer).get(b"ratelimit-policy")) == (200, policies)


async def test_policies_answer_when_the_store_fails_and_while_it_is_away() -> None:
    check = check_of(AnsweringStore(error=StoreError("timeout")))
    for _ in range(2):
        answer = await begun(check)
        assert (answer.status, b'"fallback"' in answer.body, b"ratelimit" in fields(answer)) == (
            403,
            True,
            False,
        )
        assert fields(answer)[b"ratelimit-policy"] == POLICY


@pytest.mark.parametrize(
    ("query", "headers"),
    [
        (b"requests=x", ALICE),
        (b"", {**ALICE, b"x-quotagate-ip": [b"10.0.0.7", b"10.0.0.7"]}),
        (b"", {b"x-quotagate-ip": [b"here"]}),
    ],
)
async def test_invalid_check_is_refused_and_charges_nothing(query: bytes, headers: HeadFields) -> None:
    check = check_of(store := AnsweringStore(ADMITS, ADMITS, ADMITS))
    for answer in (begun, lambda *given: given[0].answer(*given[1:])):
        with pytest.raises(ProblemError) as refused:
            await answer(check, query, headers)
        assert refused.value.status == 400
    assert store.plans == []


async def test_check_has_the_callers_time_if_it_says_none() -> None:
    store = AnsweringStore(ADMITS, ADMITS)
    timed = CallerClock(node(store))
    check = Check(timed, Sources(), timed.now_ms)
    for query in (b"at_ms=7", b"", b"at_ms=9"):
        await begun(check, query)
    assert [plan.at_ms for plan in store.plans] == [7, 7, 9]
    assert timed.now_ms() == 9


async def test_each_line_of_the_proxies_counts() -> None:
    store = AnsweringStore(ADMITS)
    check = Check(node(store), Sources(trusted=(ip_network("10.0.0.0/8"),)), None)
    for lines in ((b"6.6.6.6", b"203.0.113.9"), (b"203.0.113.9", b"6.6.6.6"), (b"6.6.6.6, 203.0.113.9",)):
        await begun(check, b"", {b"x-forwarded-for": lines})
    first, second, third = [plan.charges[0].bucket for plan in store.plans]
    assert first == third == "ip=203.0.113.9"
    assert second == "ip=6.6.6.6"


async def test_changed_quotas_answer_the_next_check() -> None:
    of = node(AnsweringStore(ADMITS, ADMITS))
    check = Check(of, Sources(), None)
    await begun(check, b"", ALICE)
    changed = SNAPSHOT.apply(2, [("request_rate", EVERYONE, replace(RATE, limit=7))])
    of._snapshot = lambda: changed
    assert fields(await begun(check, b"", ALICE))[b"ratelimit-policy"].startswith(b'"request_rate";q=70;w=10')


@pytest.mark.parametrize("where", ["head", "begin", "later", "waiting"])
async def test_shed_check_is_refused_as_by_a_quota(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shed: list[str] = []
    of = node(AnsweringStore(ADMITS, ADMITS, ADMITS))
    access = Access("", open_to=LOOPBACK, is_starting=lambda: where == "head")
    route = CheckRoute(Check(of, Sources(), None), access, shed.append)
    head = RequestHead(PATH, QUERY, ALICE, "127.0.0.1")

    def overloaded(*_: object) -> None:
        raise OverloadedError("age")

    def late(_: object, __: object, then: Callable[[Exception], None], ___: object) -> None:
        then(OverloadedError("age"))

    monkeypatch.setattr(of, "begin", late if where == "later" else overloaded)
    answer: HttpAnswer | None = None
    if where == "head":
        with pytest.raises(OverloadedError) as raised:
            route.identify(head)
        answer = await route.failed(raised.value, head)
    elif where == "waiting":
        answer = await route.reply_whole(head, b"", route.identify(head), lambda: False)
    else:
        made: list[Result] = []
        assert route.begin(head, b"", route.identify(head), lambda: False, made.append)
        answer = route.finish(made[0], head)
    assert answer is not None
    assert (answer.status, b'"throttle"' in answer.body) == (403, True)
    assert not {b"ratelimit", b"ratelimit-policy"} & fields(answer).keys()
    assert int(fields(answer)[b"x-throttle-ms"]) > 0
    assert len(shed) == 1


async def test_caller_that_left_gets_no_answer() -> None:
    with pytest.raises(CallerGoneError):
        await begun(check_of(AnsweringStore(ADMITS)), caller=Caller(is_gone=lambda: True))


async def test_caller_waits_no_longer_than_a_gateway_does() -> None:
    check = check_of(AnsweringStore(ADMITS, ADMITS, ADMITS))
    caller = Caller(came_at=monotonic() - 0.5)
    with pytest.raises(OverloadedError):
        await begun(check, caller=caller)
    with pytest.raises(OverloadedError):
        await check.answer(QUERY, ALICE, None, caller)


async def test_bound_caller_is_confined_to_what_it_may_ask() -> None:
    access = Access("key", [ip_network("10.0.0.0/8")])
    route = CheckRoute(check_of(AnsweringStore(ADMITS, ADMITS)), access, print)
    head = RequestHead("/v1/check", b"", ALICE, address="10.0.0.1")
    sender = route.identify(head)
    for grant, status in (
        (sender.grant, 200),
        (sender.grant.certified("alice"), 200),
        (sender.grant.certified("bob"), 403),
    ):
        made: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        assert route.begin(head, b"", structs.replace(sender, grant=grant), lambda: False, made.set_result)
        answer = await made
        assert answer.status == status
