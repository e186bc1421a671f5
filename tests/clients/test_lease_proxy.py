"""The example's proxy enforces a byte rate, decides nearly all lines by itself, and loses none."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from examples.leases.proxy import Proxy
from quotagate_client import AsyncClient
from tests.report import say
from tests.service import Service
from tests.waiting import until

LINE = b"x" * 99 + b"\n"
LINES = 20_000


class Sink:
    """Receives the bytes that the proxy forwards."""

    def __init__(self) -> None:
        self.got = bytearray()
        self.open = 0

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        with contextlib.suppress(OSError):
            while chunk := await reader.read(65_536):
                self.got += chunk
        writer.transport.abort()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        self.open -= 1


async def sent_through(node: Service, name: str, sent: bytes, enough: int) -> tuple[Sink, Proxy]:
    """Send through the proxy, until so many bytes have come out of it."""
    sink = Sink()
    target = await asyncio.start_server(sink.take, "127.0.0.1", 0)
    host, port = target.sockets[0].getsockname()[:2]
    async with AsyncClient(node.url, key=node.admin_key) as client:
        proxy = Proxy(client, host, port, 500)
        server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
        _, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])
        writer.write(name.encode() + b"\n" + sent)
        writer.write_eof()
        await until(lambda: len(sink.got) >= enough)
        server.close()
        await proxy.aclose()
        writer.transport.abort()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        await until(lambda: not sink.open)
        target.close()
    return sink, proxy


def test_lines_below_the_limit_all_pass_with_few_calls(node: Service):
    node.put("user=below", producer_byte_rate={"limit": 1_000_000_000, "enforcement": "deny"})
    sink, proxy = asyncio.run(sent_through(node, "below", LINE * LINES, len(LINE) * LINES))
    say(f"{LINES:,} lines with {proxy.calls} calls")
    assert bytes(sink.got) == LINE * LINES
    assert proxy.counts["lines"] == LINES
    assert proxy.calls <= LINES / 100


@pytest.mark.parametrize("quota", ["sampled_rate", "token_bucket"])
def test_lines_beyond_the_limit_wait(node: Service, quota: str):
    """As many bytes pass at once as an empty bucket holds; the rest is held back, and asked for rarely."""
    name = f"beyond-{quota}"
    value: dict[str, Any] = {"limit": 10_000, "enforcement": "deny", "algorithm": quota, "samples": 11}
    node.put(f"user={name}", producer_byte_rate=value)
    sink, proxy = asyncio.run(sent_through(node, name, LINE * LINES, 90_000))
    say(f"{quota}: {len(sink.got):,} bytes of {len(LINE) * LINES:,} with {proxy.calls} calls")
    assert len(sink.got) < len(LINE) * LINES
    assert sink.got == (LINE * LINES)[: len(sink.got)]
    assert proxy.counts["waited"] <= LINES / 10
