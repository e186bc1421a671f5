"""Checks that came before: the same answers as those that are read, and what is remembered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from ipaddress import ip_network
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.admission.admission import Admission
from app.admission.caller_clock import CallerClock
from app.admission.errors import CallerGoneError, OverloadedError
from app.admission.port import InFull
from app.catalog.snapshot import Snapshot
from app.domain.caller import ANYONE, Caller
from app.domain.entity import ANY, Entity
from app.domain.quota import Quota
from app.http.access import Access
from app.http.check import MAX_KNOWN, Check, CheckRoute
from app.http.check_question import Headers, Sources
from app.http.hot import HttpAnswer, ReadyAnswer, lines_of, sized
from app.store.port import Answer, StoreError
from tests.unit.admission.test_plain import ADMIT, EVERYONE, Recorded, Store, admission, but, counted

ANYWHERE = Entity.of(ip=ANY)
RATE = Quota("request_rate", 100, "sampled_rate", "delay", on_store_failure="throttle")
OF_IP = Quota("request_rate", 0.29, "sampled_rate", "deny", samples=101)
TOKENS = Quota("controller_mutation_rate", 5, "token_bucket", "deny", burst=20.0)
SNAPSHOT = Snapshot().apply(
    1,
    [
        ("request_rate", EVERYONE, RATE),
        ("request_rate", ANYWHERE, OF_IP),
        ("controller_mutation_rate", EVERYONE, TOKENS),
    ],
)
QUERY = b"requests=2&mutations=1&deny_status=403"
ALICE = ((b"host", b"h"), (b"x-quotagate-principal", b"alice"), (b"x-quotagate-ip", b"10.0.0.7"))
ANSWERS = {
    "admitted": Answer((ADMIT, ADMIT, ADMIT)),
    "throttled": Answer((but(ADMIT, outcome="throttle", throttle_ms=1_001), ADMIT, ADMIT)),
    "rejected": Answer((ADMIT, ADMIT, but(ADMIT, outcome="reject", reason="too_large", largest=3.0))),
    "no room": Answer((but(ADMIT, reason="store_full"), ADMIT, ADMIT)),
    "clock behind": Answer((ADMIT, but(ADMIT, correction=1), ADMIT)),
    "debt forgiven": Answer((ADMIT, ADMIT, but(ADMIT, fill=2.5))),
    "unreadable": Answer((), error=StoreError("response", "WRONGTYPE")),
}
Sent = tuple[int, bytes, bytes]


def node(store: Store, **more: Any) -> Admission:
    return admission(store, snapshot=SNAPSHOT, **more)


def sent(answer: HttpAnswer | ReadyAnswer) -> Sent:
    """Status, fields and body of an answer."""
    if isinstance(answer, ReadyAnswer):
        return 200, answer.lines, answer.body
    return answer.status, lines_of(sized(answer)), answer.body


async def begun(
    check: Check, query: bytes = QUERY, headers: Headers = ALICE, caller: Caller = ANYONE
) -> HttpAnswer | ReadyAnswer:
    """The answer by a call."""
    made: asyncio.Future[ReadyAnswer | InFull | Exception] = asyncio.get_running_loop().create_future()
    question = check.question(query, headers)
    try:
        assert check.begin(question, caller, made.set_result)
        result = await made
        if isinstance(result, Exception):
            raise result
    except OverloadedError as error:
        return check.refuse(error, query)
    return check.finish(result, query) if isinstance(result, InFull) else result


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("takes_admissions", [False, True])
async def test_both_ways_answer_count_and_log_the_same(answer: str, takes_admissions: bool) -> None:
    logs = [Recorded(takes_admissions=takes_admissions) for _ in range(2)]
    stores = [Store(ANSWERS[answer]) for _ in range(2)]
    known, read = (node(store, logs=log) for store, log in zip(stores, logs, strict=True))
    by_call, readable = Check(known, Sources(), None), Check(read, Sources(), None)
    for _ in range(2):
        got = await begun(by_call)
        assert sent(got) == sent(await readable.answer(QUERY, ALICE))
        assert isinstance(got, ReadyAnswer) is (answer == "admitted")
    assert stores[0].sent == stores[1].sent
    assert stores[0].sent[0] is stores[0].sent[1]
    assert counted(known) == counted(read)
    assert logs[0].heard == logs[1].heard


numbers = st.one_of(
    st.floats(-1e300, 1e300), st.floats(0, 50), st.integers(-5, 50), st.floats(0, 1e-8).map(lambda x: 29 - x)
)


@given(st.lists(numbers, min_size=3, max_size=3))
def test_both_ways_show_the_same_numbers(remaining: Sequence[float]) -> None:
    answer = Answer(tuple(but(ADMIT, remaining=left) for left in remaining))

    async def both() -> tuple[Sent, Sent]:
        known, read = (Check(node(Store(answer)), Sources(), None) for _ in range(2))
        return sent(await begun(known)), sent(await read.answer(QUERY, ALICE))

    got, expected = asyncio.run(both())
    assert got == expected


@pytest.mark.parametrize(
    ("query", "headers"),
    [
        (b"", ()),
        (b"connections=1", ALICE),
        (b"mutations=1&broker=1", ALICE),
        (b"", ((b"x-quotagate-client-id", b""),)),
        (b"requests=1", ((b"x-quotagate-ip", b"::1"),)),
    ],
)
async def test_quotas_that_apply_are_named_the_same(query: bytes, headers: Headers) -> None:
    ask = Check(node(Store(Answer(()))), Sources(), None)._read(query, headers).ask
    matches = node(Store(Answer(())))._matches_in_force().of(ask)
    known, read = (Check(node(Store(Answer((ADMIT,) * len(matches)))), Sources(), None) for _ in range(2))
    assert sent(await begun(known, query, headers)) == sent(await read.answer(query, headers))


async def test_both_ways_follow_the_policies_of_a_failed_store() -> None:
    known, read = (Check(node(Store(Answer(()), StoreError("timeout"))), Sources(), None) for _ in range(2))
    for _ in range(2):  # the failed call, then the open circuit
        got = await begun(known)
        assert sent(got) == sent(await read.answer(QUERY, ALICE))
        assert sent(got)[0] == 403


@pytest.mark.parametrize(
    ("query", "headers"),
    [
        (b"requests=x", ALICE),
        (b"", (*ALICE, *ALICE)),
        (b"", ((b"x-quotagate-ip", b"here"),)),
    ],
)
async def test_what_is_invalid_is_left_to_the_reader(query: bytes, headers: Headers) -> None:
    store = Store(ANSWERS["admitted"])
    check = Check(node(store), Sources(), None)
    assert not check.begin(check.question(query, headers), ANYONE, print)
    assert not store.sent
    assert len(check._known) == 0


async def test_shadow_quotas_and_the_callers_clock_go_the_readable_way() -> None:
    shadow = Snapshot().apply(1, [("request_rate", EVERYONE, replace(RATE, shadow=True))])
    check = Check(admission(Store(Answer((ADMIT,))), snapshot=shadow), Sources(), None)
    assert not check.begin((b"", ALICE), ANYONE, print)
    timed = CallerClock(node(Store(Answer((ADMIT,)))))
    assert not Check(timed, Sources(), timed.now_ms).begin((b"at_ms=1", ALICE), ANYONE, print)


async def test_only_what_the_caller_is_read_from_makes_a_check_another_one() -> None:
    check = Check(node(Store(Answer((ADMIT, ADMIT)))), Sources(), None)
    for n in range(3):
        await begun(check, b"", (*ALICE, (b"x-request-id", b"%d" % n)))
    assert len(check._known) == 1
    await begun(check, b"deny_status=403", ALICE)
    await begun(check, b"", (*ALICE[:2], (b"x-quotagate-ip", b"10.0.0.8")))
    assert len(check._known) == 3


async def test_each_line_of_the_proxies_counts() -> None:
    sources = Sources(trusted=(ip_network("10.0.0.0/8"),))
    store = Store(Answer((ADMIT,)))
    check = Check(node(store), sources, None)
    for lines in ((b"6.6.6.6", b"203.0.113.9"), (b"203.0.113.9", b"6.6.6.6"), (b"6.6.6.6, 203.0.113.9",)):
        await begun(check, b"", [(b"x-forwarded-for", line) for line in lines])
    assert len(check._known) == 3
    charged = [plan.keys for plan in store.sent]  # type: ignore[attr-defined]
    assert charged[0] == charged[2] != charged[1]


async def test_checks_are_forgotten_when_quotas_change_and_answered_by_the_new_ones() -> None:
    of = node(Store(Answer((ADMIT, ADMIT))))
    check = Check(of, Sources(), None)
    await begun(check, b"", ALICE)
    changed = SNAPSHOT.apply(2, [("request_rate", EVERYONE, replace(RATE, limit=7))])
    of._snapshot = lambda: changed
    for kept in (0, 1):
        _, lines, _ = sent(await begun(check, b"", ALICE))
        assert b'"request_rate";q=70;w=10' in lines
        assert len(check._known) == kept


async def test_checks_are_remembered_within_bounds() -> None:
    check = Check(node(Store(Answer((ADMIT,)))), Sources(), None, known_bytes=100_000)
    for n in range(500):
        await begun(check, b"", ((b"x-quotagate-principal", b"%d" % n),))
    assert 10 < len(check._known) < 150
    before = len(check._known)
    await begun(check, b"", (*ALICE[:1], (b"x-quotagate-principal", b" " * MAX_KNOWN + b"x")))
    assert len(check._known) == before


async def test_what_is_shed_is_refused_as_by_a_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    shed: list[str] = []
    of = node(Store(ANSWERS["admitted"]))
    check = Check(of, Sources(), None, shed.append)

    def overloaded(*_: object) -> None:
        raise OverloadedError("age")

    def late(
        _ask: object,
        _caller: object,
        _admitted: object,
        then: Callable[[Exception], None],
        _within_s: object,
    ) -> None:
        then(OverloadedError("age"))

    for begin in (overloaded, late):
        monkeypatch.setattr(of, "begin_in_full", begin)
        status, lines, body = sent(await begun(check))
        assert (status, b"ratelimit" in lines, b'"throttle"' in body) == (403, False, True)
    assert shed == ["age", "age"]


async def test_caller_that_left_gets_no_answer() -> None:
    check = Check(node(Store(ANSWERS["admitted"])), Sources(), None)
    with pytest.raises(CallerGoneError):
        await begun(check, caller=Caller(is_gone=lambda: True))


async def test_caller_waits_no_longer_than_a_gateway_does() -> None:
    loop = asyncio.get_running_loop()
    check = Check(node(Store(ANSWERS["admitted"])), Sources(), None)
    status, *_ = sent(await begun(check, caller=Caller(came_at=loop.time() - 0.5)))
    assert status == 403


async def test_bound_caller_goes_the_readable_way() -> None:
    store = Store(Answer((ADMIT, ADMIT)))
    access = Access("key", [ip_network("10.0.0.0/8")])
    route = CheckRoute(Check(node(store), Sources(), None), access, print)
    scope = {"path": "/v1/check", "query_string": b"", "headers": ALICE, "client": ("10.0.0.1", 1)}
    sender = route.identify(scope)
    made: list[object] = []
    assert route.begin(scope, b"", sender, lambda: False, made.append)
    bound = sender._replace(grant=sender.grant.certified("bob"))
    assert not route.begin(scope, b"", bound, lambda: False, made.append)
