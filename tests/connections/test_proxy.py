"""One connection at a time through the example proxy, decided by a real node."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import struct
from contextlib import AsyncExitStack, closing

import pytest

from tests.connections.proxies import attempt, connected, listening, proxying, until
from tests.ready import ready
from tests.service import Service

SLOW = {"samples": 2, "sample_ms": 3_600_000}
"""A bucket that shows its exact charges, because it forgets nothing for an hour."""


class HalfOpen(asyncio.Protocol):
    """Sends a greeting and half-closes; still receives everything, and keeps it in `taken`."""

    def __init__(self, taken: bytearray, ended: asyncio.Event) -> None:
        self.taken, self.ended = taken, ended

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(b"hello")
        transport.write_eof()

    def data_received(self, data: bytes) -> None:
        self.taken += data

    def eof_received(self) -> None:
        self.ended.set()


class AnswersAtTheEnd(asyncio.Protocol):
    """Sends everything back once the sender has half-closed."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport, self.taken = transport, b""

    def data_received(self, data: bytes) -> None:
        self.taken += data

    def eof_received(self) -> None:
        self.transport.write(self.taken)


async def test_a_client_that_has_ended_still_gets_its_answer(node: Service) -> None:
    """Half-close, from client to target, with more than the buffers hold."""
    sent = os.urandom(3_000_000)
    async with (
        listening(AnswersAtTheEnd) as target,
        proxying(node.url, target) as proxy,
        connected(proxy.port, "127.0.1.1") as (reader, writer),
    ):
        writer.write(sent)
        writer.write_eof()
        assert await reader.read(-1) == sent


async def test_a_target_that_has_ended_still_takes_what_comes(node: Service) -> None:
    """Half-close, from target to client."""
    taken, ended = bytearray(), asyncio.Event()
    async with (
        listening(lambda: HalfOpen(taken, ended)) as target,
        proxying(node.url, target) as proxy,
        connected(proxy.port, "127.0.1.2") as (reader, writer),
    ):
        assert await reader.read(-1) == b"hello"
        writer.write(b"and more")
        writer.write_eof()
        await ended.wait()
    assert taken == b"and more"


async def test_a_slow_target_slows_its_client(node: Service) -> None:
    """Backpressure: bytes that the target does not read yet stay with the client, and all arrive later."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        async with proxying(node.url, listener.getsockname()[1]) as proxy:
            await asyncio.to_thread(flood, proxy.port, listener)


def flood(port: int, listener: socket.socket) -> None:
    """Send as much as possible while the target reads nothing, and the rest while it reads."""
    sent, arrived = memoryview(os.urandom(64 * 1024 * 1024)), bytearray()
    with (
        socket.create_connection(("127.0.0.1", port), source_address=("127.0.1.3", 0)) as client,
        closing(listener.accept()[0]) as target,
    ):
        client.setblocking(False)
        done = 0
        while done < len(sent) and ready([], [client], 1.0)[1]:
            done += client.send(sent[done:])
        assert done < len(sent) / 2
        while len(arrived) < len(sent):
            readable, writable = ready([target], [client] if done < len(sent) else [], 60)
            assert readable or writable
            if writable:
                done += client.send(sent[done:])
            if readable:
                arrived += target.recv(1_000_000)
        assert arrived == sent


async def test_a_connection_reset_on_one_side_is_ended_on_the_other(node: Service) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        async with (
            proxying(node.url, listener.getsockname()[1]) as proxy,
            connected(proxy.port, "127.0.1.4") as (reader, writer),
        ):
            target = (await asyncio.to_thread(listener.accept))[0]
            writer.write(b"?")
            assert await asyncio.to_thread(target.recv, 1) == b"?"
            target.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            target.close()  # without waiting, so with a reset
            assert await reader.read(1) == b""
            await until(lambda: proxy.counts()["broken"] == 1)


async def test_a_target_that_is_away_closes_the_connection(node: Service) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        async with proxying(node.url, nobody.getsockname()[1]) as proxy:
            assert not (await attempt(proxy.port, "127.0.1.5")).passed
            assert proxy.counts()["target_away"] == 1


async def test_an_address_without_any_allowance_is_closed_at_once(node: Service, target: int) -> None:
    node.put("ip=127.0.1.6", connection_creation_rate=0)
    async with proxying(node.url, target) as proxy:
        async with connected(proxy.port, "127.0.1.6") as (reader, _):
            assert await reader.read(1) == b""
        found = proxy.counts()
    assert (found["rejected"], found["throttled"], found["admitted"]) == (1, 0, 0)


async def test_a_throttled_connection_is_admitted_once_the_rate_has_fallen(
    node: Service, target: int
) -> None:
    """One at a time, so that a caller that waited finds the allowance free."""
    node.put("ip=127.0.1.7", connection_creation_rate={"limit": 2, "samples": 2, "sample_ms": 500})
    async with proxying(node.url, target) as proxy:
        while proxy.counts()["throttled"] < 2:
            assert (await attempt(proxy.port, "127.0.1.7")).passed
        found = proxy.counts()
    assert found["throttled"] == found["rechecked"]
    assert found["admitted"] == found["accepted"]


async def test_a_connection_that_is_still_over_the_rate_is_closed_and_charges_nobody(
    node: Service, target: int
) -> None:
    """No bucket is charged: not its address's, its listener's or its broker's."""
    rate = {"limit": 1_000, **SLOW}
    node.put("ip=127.0.1.8", connection_creation_rate={"limit": 1, **SLOW})
    node.put("listener=CHARGED", max_connection_creation_rate={**rate, "scope": "cluster"})
    node.put("broker=8", max_connection_creation_rate=rate)
    async with proxying(node.url, target, broker="8", listener="CHARGED") as proxy:
        assert node.ask(ip="127.0.1.8", usage={"connections": 4_000}, mode="record")["charged"]
        before = charged(node, "127.0.1.8", "8")
        assert before["ip=127.0.1.8"] == 4_000
        refused = await asyncio.gather(*(attempt(proxy.port, "127.0.1.8") for _ in range(3)))
        assert not any(made.passed for made in refused)
        found = proxy.counts()
        assert charged(node, "127.0.1.8", "8") == before
        assert (await attempt(proxy.port, "127.0.1.9")).passed
        after = charged(node, "127.0.1.8", "8")
    assert (found["throttled"], found["rechecked"], found["rejected"], found["admitted"]) == (3, 3, 3, 0)
    assert {bucket: after[bucket] - before[bucket] for bucket in after} == {
        "ip=127.0.1.8": 0,
        "listener=CHARGED": 1,
        "broker=8": 1,
    }


def charged(node: Service, ip: str, broker: str) -> dict[str, int]:
    """The content of a connection's buckets: observed = held / window, remaining = limit x window - held."""
    ask = {"ip": ip, "broker": broker, "listener": "CHARGED", "usage": {"connections": 0}}
    found = {}
    for quota in node.ask(**ask, mode="peek", detail=True)["quotas"]:
        observed, remaining, limit = quota["observed"], quota["remaining"], quota["limit"]
        found[quota["bucket"]] = round(observed * remaining / (limit - observed))
    return found


async def test_no_more_than_so_many_are_held(node: Service, target: int) -> None:
    """The newest connection is closed at once; those that are held are asked about again."""
    node.put("ip=127.0.1.10", connection_creation_rate={"limit": 1, **SLOW})
    node.ask(ip="127.0.1.10", usage={"connections": 4_000}, mode="record")
    async with proxying(node.url, target, "--hold", "3") as proxy:
        attempts = await asyncio.gather(*(attempt(proxy.port, "127.0.1.10") for _ in range(8)))
        found = proxy.counts()
    assert not any(made.passed for made in attempts)
    assert found["closed_full"] == 8 - found["rejected"] > 0
    assert found["rejected"] == found["rechecked"] >= 3


async def test_it_outlives_the_want_of_descriptors(node: Service, target: int) -> None:
    """A connection that cannot be accepted waits in the backlog, and is served when others have ended."""
    async with proxying(node.url, target) as proxy:
        assert (await attempt(proxy.port, "127.0.1.11")).passed
        room = proxy.descriptors() + 8
        resource.prlimit(proxy.process.pid, resource.RLIMIT_NOFILE, (room, room))
        async with AsyncExitStack() as idle:
            for _ in range(20):
                await idle.enter_async_context(connected(proxy.port, "127.0.1.11"))
            await until(lambda: "cannot accept" in proxy.logged())
        assert (await attempt(proxy.port, "127.0.1.11")).passed


async def test_at_the_end_open_connections_may_finish(node: Service, target: int) -> None:
    """New connections are not accepted, held ones are closed, and open ones continue until they end."""
    node.put("ip=127.0.1.12", connection_creation_rate={"limit": 1, **SLOW})
    node.ask(ip="127.0.1.12", usage={"connections": 4_000}, mode="record")
    async with proxying(node.url, target, "--grace", "60") as proxy:
        async with connected(proxy.port, "127.0.1.13") as (reader, writer):
            writer.write(b"1")
            assert await reader.read(1) == b"1"
            async with connected(proxy.port, "127.0.1.12") as (held, _):
                await until(lambda: proxy.counts()["held"] == 1)
                proxy.process.terminate()
                assert await held.read(1) == b""
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection("127.0.0.1", proxy.port)
            writer.write(b"2")
            assert await reader.read(1) == b"2"
        assert await asyncio.to_thread(proxy.process.wait, 30) == 0
        last = proxy.reports()[-1]
    assert (last["held"], last["open"]) == (0, 0)
    assert (last["accepted"], last["admitted"], last["throttled"], last["rechecked"]) == (2, 1, 1, 0)


async def test_at_the_end_nothing_is_waited_for_longer_than_the_grace(node: Service, target: int) -> None:
    async with (
        proxying(node.url, target, "--grace", "0.1") as proxy,
        connected(proxy.port, "127.0.1.14") as (reader, writer),
    ):
        writer.write(b"1")
        assert await reader.read(1) == b"1"
        proxy.process.terminate()
        assert await asyncio.to_thread(proxy.process.wait, 30) == 0
