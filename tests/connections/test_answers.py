"""The example proxy with the answers of a fake Quotagate: their order, late answers, missing answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from tests.connections.proxies import attempt, connected, proxying, until

WAITING, OTHER = "127.0.2.1", "127.0.2.2"
HEAD: Final = "HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
SHED: Final = (
    "503 Service Unavailable\r\nRetry-After: 1",
    json.dumps({"type": "urn:quotagate:overloaded", "title": "Service Unavailable", "status": 503}),
)
UNUSABLE: Final = {
    "503": ("503 Service Unavailable", "{}"),
    "422": ("422 Unprocessable Content", "{}"),
    "redirect": ("307 Temporary Redirect", "{}"),
    "not JSON": ("200 OK", "admit"),
    "not an object": ("200 OK", "[]"),
    "without a decision": ("200 OK", '{"throttle_ms": 0}'),
    "an unknown decision": ("200 OK", '{"decision": "allow", "throttle_ms": 0}'),
    "no time": ("200 OK", '{"decision": "delay", "throttle_ms": "soon"}'),
}


class Scripted:
    """A fake Quotagate: records asks and their times; a test sets its answers."""

    def __init__(self) -> None:
        self.asks: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.asked_at: list[float] = []
        self.answered_at: list[float] = []
        self.may_answer = {recheck: asyncio.Event() for recheck in (False, True)}
        self.hold_back(False)
        self.answer: Callable[[dict[str, Any]], tuple[str, str]] = lambda _: said("admit")

    def hold_back(self, back: bool, *rechecks: bool) -> None:
        """Hold back or release the answers to first asks, to re-checks, or to both."""
        for recheck in rechecks or (False, True):
            event = self.may_answer[recheck]
            event.clear() if back else event.set()

    @property
    def order(self) -> list[tuple[str, bool]]:
        return [(ask["ip"], ask["recheck"]) for ask in self.asks]

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer a connection's requests until it ends."""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                fields = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:-2])
                ask = json.loads(await reader.readexactly(int(fields["content-length"])))
                self.asks.append(ask)
                self.keys.append(fields.get("authorization"))
                self.asked_at.append(time.monotonic())
                status, body = self.answer(ask)
                await self.may_answer[ask["recheck"]].wait()
                self.answered_at.append(time.monotonic())
                writer.write((HEAD.format(status=status, length=len(body)) + body).encode())
        writer.close()


def said(decision: str, throttle_ms: int = 0) -> tuple[str, str]:
    return "200 OK", json.dumps({"decision": decision, "throttle_ms": throttle_ms})


@asynccontextmanager
async def serving(script: Scripted, bound: socket.socket) -> AsyncIterator[None]:
    """Serve on a bound socket; at the end, wait for every connection."""
    connections: set[asyncio.Task[None]] = set()

    def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.add(asyncio.create_task(script(reader, writer)))

    async with await asyncio.start_server(connection, sock=bound):
        yield
    script.hold_back(False)
    await asyncio.gather(*connections)


def a_place() -> tuple[socket.socket, str]:
    """A bound socket, which refuses connections until a server listens on it, and its URL."""
    bound = socket.socket()
    bound.bind(("127.0.0.1", 0))
    return bound, f"http://127.0.0.1:{bound.getsockname()[1]}"


@pytest.fixture
async def quotagate() -> AsyncIterator[tuple[Scripted, str]]:
    script = Scripted()
    bound, url = a_place()
    async with serving(script, bound):
        yield script, url


async def test_while_the_listener_waits_nobody_is_accepted(quotagate, target) -> None:
    """A connection above the rate passes after the delay; only then is the next one asked about."""
    script, url = quotagate
    script.answer = lambda _: said("delay", 700 if len(script.asks) == 1 else 1)
    async with proxying(url, target) as proxy:
        made = await asyncio.gather(*(attempt(proxy.port, OTHER) for _ in range(3)))
        found = proxy.counts()
    assert all(one.passed and one.ended >= script.answered_at[0] + 0.7 for one in made)
    assert script.asked_at[1] >= script.answered_at[0] + 0.7
    assert script.asked_at[2] >= script.answered_at[1] + 0.001
    assert (found["delayed"], found["blocked_ms"]) == (3, 702)


async def test_whoever_comes_meanwhile_stays_in_the_backlog(quotagate, target) -> None:
    """While an answer is awaited, and while the listener waits; the proxy can end meanwhile."""
    script, url = quotagate
    script.answer = lambda _: said("delay", 3_600_000)
    script.hold_back(True)
    async with proxying(url, target) as proxy, AsyncExitStack() as stack:
        for _ in range(3):
            await stack.enter_async_context(connected(proxy.port, OTHER))
        await until(lambda: script.asks)
        assert proxy.counts()["accepted"] == 1
        script.hold_back(False)
        await until(lambda: proxy.counts()["blocked_ms"])
        assert proxy.counts()["accepted"] == 1
        proxy.process.terminate()
        assert await asyncio.to_thread(proxy.process.wait, 30) == 0


async def test_a_held_connection_keeps_nobody_waiting(quotagate, target) -> None:
    script, url = quotagate
    script.answer = lambda ask: said("throttle", 60_000) if ask["ip"] == WAITING else said("admit")
    async with proxying(url, target) as proxy, connected(proxy.port, WAITING) as (reader, _):
        await until(lambda: proxy.counts()["held"] == 1)
        assert (await attempt(proxy.port, OTHER)).passed
        assert script.order == [(WAITING, False), (OTHER, False)]
        assert await reader.read(1) == b""  # held for a second, then still over the rate
        assert script.order[2:] == [(WAITING, True)]
    assert script.asked_at[2] >= script.answered_at[0] + 1.0


async def test_nothing_is_read_from_a_held_connection(quotagate, target) -> None:
    """Bytes that the client sends meanwhile wait too, and pass with the connection."""
    script, url = quotagate
    script.answer = lambda ask: said("admit") if ask["recheck"] else said("throttle", 1)
    async with proxying(url, target) as proxy, connected(proxy.port, WAITING) as (reader, writer):
        writer.write(b"early")
        assert await reader.readexactly(5) == b"early"
        found = proxy.counts()
    assert (found["throttled"], found["rechecked"], found["admitted"]) == (1, 1, 1)


async def test_a_held_connection_may_be_delayed_by_its_listener_too(quotagate, target) -> None:
    """The second answer covers both: the address may pass now, but the listener must wait."""
    script, url = quotagate
    script.answer = lambda ask: said("delay", 500) if ask["recheck"] else said("throttle", 1)
    async with proxying(url, target) as proxy:
        made = await attempt(proxy.port, WAITING)
        script.answer = lambda _: said("admit")
        found = proxy.counts()
    assert made.passed
    assert made.ended >= script.answered_at[1] + 0.5
    assert (found["throttled"], found["delayed"]) == (1, 1)


async def test_an_address_that_was_told_to_wait_is_not_asked_for_before(quotagate, target) -> None:
    """None of the address's connections would pass, so they must not take turns from others."""
    script, url = quotagate
    script.answer = lambda ask: said("throttle", 1_000) if ask["ip"] == WAITING else said("admit")
    async with proxying(url, target) as proxy, AsyncExitStack() as held:
        first = await held.enter_async_context(connected(proxy.port, WAITING))
        await until(lambda: proxy.counts()["held"] == 1)
        others = [await held.enter_async_context(connected(proxy.port, WAITING)) for _ in range(10)]
        assert (await attempt(proxy.port, OTHER)).passed
        assert [await reader.read(1) for reader, _ in [first, *others]] == [b""] * 11
        found = proxy.counts()
    assert script.order == [(WAITING, False), (OTHER, False), *[(WAITING, True)] * 11]
    assert (found["asked"], found["throttled"], found["rejected"]) == (2, 11, 11)


async def test_second_asks_leave_every_other_turn_to_newcomers(quotagate, target) -> None:
    """Four second asks are due when a newcomer arrives: one is in progress, at most one more goes first."""
    script, url = quotagate
    script.answer = lambda ask: said("throttle", 1_000) if ask["ip"] == WAITING else said("admit")
    script.hold_back(True, True)
    async with proxying(url, target) as proxy, AsyncExitStack() as held:
        for _ in range(4):
            await held.enter_async_context(connected(proxy.port, WAITING))
        await until(lambda: (WAITING, True) in script.order)
        passing = asyncio.create_task(attempt(proxy.port, OTHER))
        await until(lambda: proxy.counts()["accepted"] == 5)
        under_way = len(script.order)
        script.hold_back(False)
        assert (await passing).passed
        assert (OTHER, False) in script.order[under_way : under_way + 2]


async def test_a_key_is_sent_and_the_place_is_named(quotagate, target, tmp_path: Path) -> None:
    script, url = quotagate
    (tmp_path / "key").write_text("a-key\n")
    async with proxying(url, target, "--key-file", str(tmp_path / "key"), broker="7", listener="L") as proxy:
        assert (await attempt(proxy.port, OTHER)).passed
    assert script.keys == ["bearer a-key"]
    place = {"ip": OTHER, "broker": "7", "listener": "L"}
    assert script.asks == [{**place, "usage": {"connections": 1}, "recheck": False}]


# A Quotagate that has too much to do


@pytest.mark.parametrize("policy", ["admit", "close"])
async def test_a_connection_that_was_shed_is_held_and_asked_for_again(quotagate, target, policy) -> None:
    """Under either policy for outages: a flood must not let connections in. Other connections continue."""
    script, url = quotagate
    script.answer = lambda ask: said("admit") if ask["recheck"] or ask["ip"] == OTHER else SHED
    async with proxying(url, target, "--when-away", policy) as proxy:
        waiting = asyncio.create_task(attempt(proxy.port, WAITING))
        await until(lambda: proxy.counts()["held"] == 1)
        assert (await attempt(proxy.port, OTHER)).passed
        assert (await waiting).passed
        found = proxy.counts()
    assert script.order == [(WAITING, False), (OTHER, False), (WAITING, True)]
    assert script.asked_at[2] >= script.answered_at[0] + 1.0
    assert (found["shed"], found["admitted"], found["unanswered"]) == (1, 2, 0)


async def test_a_connection_that_is_shed_twice_is_closed(quotagate, target) -> None:
    script, url = quotagate
    script.answer = lambda _: SHED
    async with proxying(url, target) as proxy:
        assert not (await attempt(proxy.port, WAITING)).passed
        found = proxy.counts()
    assert (found["shed"], found["closed_shed"], found["admitted_away"]) == (1, 1, 0)


# Without an answer that can be used


@pytest.mark.parametrize("unusable", UNUSABLE.values(), ids=UNUSABLE)
async def test_unusable_answer_counts_as_none(quotagate, target, unusable) -> None:
    script, url = quotagate
    script.answer = lambda _: unusable
    async with proxying(url, target, "--when-away", "close") as proxy:
        assert not (await attempt(proxy.port, OTHER)).passed
        found = proxy.counts()
    assert (found["unanswered"], found["closed_away"], found["rejected"]) == (1, 1, 0)


@pytest.mark.parametrize("policy", ["admit", "close"])
async def test_without_an_answer_the_policy_decides(quotagate, target, policy) -> None:
    """It also decides about connections in the next second, without an ask; then Quotagate is asked again."""
    script, url = quotagate
    script.answer = lambda _: UNUSABLE["503"]
    async with proxying(url, target, "--when-away", policy) as proxy:
        made = [await attempt(proxy.port, OTHER) for _ in range(10)]
        found = proxy.counts()
        script.answer = lambda _: said("admit")
        while not proxy.counts()["admitted"]:
            await attempt(proxy.port, OTHER)
    assert [one.passed for one in made] == [policy == "admit"] * 10
    assert found["admitted_away" if policy == "admit" else "closed_away"] == 10
    assert script.asked_at[1] >= script.answered_at[0] + 1.0


@pytest.mark.parametrize("policy", ["admit", "close"])
async def test_a_held_connection_that_gets_no_second_answer_goes_by_the_policy(
    quotagate, target, policy
) -> None:
    script, url = quotagate
    script.answer = lambda ask: UNUSABLE["503"] if ask["recheck"] else said("throttle", 1)
    async with proxying(url, target, "--when-away", policy) as proxy:
        assert (await attempt(proxy.port, WAITING)).passed == (policy == "admit")
        assert proxy.counts()["throttled"] == 1


@pytest.mark.parametrize("policy", ["admit", "close"])
async def test_an_answer_that_does_not_come_is_not_waited_for(quotagate, target, policy) -> None:
    script, url = quotagate
    script.hold_back(True)
    async with proxying(url, target, "--when-away", policy, "--ask-within", "0.25") as proxy:
        made = [await attempt(proxy.port, OTHER) for _ in range(10)]
        assert [one.passed for one in made] == [policy == "admit"] * 10
        assert "TimeoutError" in proxy.logged()


@pytest.mark.parametrize("policy", ["admit", "close"])
async def test_a_quotagate_that_was_away_is_found_when_it_comes(target, policy) -> None:
    bound, url = a_place()
    async with AsyncExitStack() as later, proxying(url, target, "--when-away", policy) as proxy:
        assert (await attempt(proxy.port, OTHER)).passed == (policy == "admit")
        assert "ConnectError" in proxy.logged()
        await later.enter_async_context(serving(Scripted(), bound))
        while not proxy.counts()["admitted"]:
            await attempt(proxy.port, OTHER)
